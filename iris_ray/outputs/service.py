"""The service ``outputs``, as the kernel sees it."""

from typing import Final

from iris_ray.actors.protocol.services import Service

SERVICE: Final = Service(
    "outputs",
    controller="iris_ray.outputs.controller:OutputsInController",
    pool="iris_ray.outputs.pool:OutputsInPool",
    host="iris_ray.outputs.host:OutputsOnHost",
    variables="iris_ray.outputs.task:output_variable",
    settings="iris_ray.outputs.settings:SETTINGS",
)
