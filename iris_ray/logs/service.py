"""The service ``logs``, as the kernel sees it."""

from typing import Final

from iris_ray.actors.protocol.services import Command, Service

SERVICE: Final = Service(
    "logs",
    commands={
        "job logs": Command("iris_ray.logs.cli:logs", "What a task has printed, even after its end.", "Every day"),
    },
)
