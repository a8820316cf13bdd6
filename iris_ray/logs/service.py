"""The service ``logs``, as the kernel sees it."""

from typing import Final

from iris_ray.actors.protocol.services import Command, Page, Service

SERVICE: Final = Service(
    "logs",
    controller="iris_ray.logs.controller:LogsInController",
    pool="iris_ray.logs.pool:LogsInPool",
    host="iris_ray.logs.host:LogsOnHost",
    output="iris_ray.logs.host:TaskOutput",
    pages=(Page("/api/jobs/{job:[^/]+}/logs", "iris_ray.logs.pages:piece"),),
    commands={
        "job logs": Command("iris_ray.logs.cli:logs", "The output of a task, even after its end.", "Every day"),
    },
)
