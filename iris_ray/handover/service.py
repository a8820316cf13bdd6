"""The service ``handover``, as the kernel sees it."""

from typing import Final

from iris_ray.actors.protocol.services import Service

SERVICE: Final = Service(
    "handover",
    controller="iris_ray.handover.controller:HandoverInController",
    pool="iris_ray.handover.pool:HandoverInPool",
)
