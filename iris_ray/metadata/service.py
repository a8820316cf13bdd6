"""The service ``metadata``, as the kernel sees it."""

from typing import Final

from iris_ray.actors.protocol.services import Service

SERVICE: Final = Service(
    "metadata",
    controller="iris_ray.metadata.controller:MetadataInController",
    host="iris_ray.metadata.host:MetadataOnHost",
)
