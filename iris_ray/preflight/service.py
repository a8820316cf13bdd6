"""The service ``preflight``, as the kernel sees it."""

from typing import Final

from iris_ray.actors.protocol.services import Service

SERVICE: Final = Service(
    "preflight", pool="iris_ray.preflight.pool:PreflightInPool", host="iris_ray.preflight.host:PreflightOnHost"
)
