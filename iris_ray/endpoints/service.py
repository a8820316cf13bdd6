"""The service ``endpoints``, as the kernel sees it."""

from typing import Final

from iris_ray.actors.protocol.services import Service

SERVICE: Final = Service(
    "endpoints",
)
