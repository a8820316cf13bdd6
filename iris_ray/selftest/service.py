"""The service ``selftest``, as the kernel sees it."""

from typing import Final

from iris_ray.actors.protocol.services import Command, Service

SERVICE: Final = Service(
    "selftest",
    commands={
        "cluster selftest": Command("iris_ray.selftest.cli:selftest", "Try real TPU slices, and write a report."),
    },
)
