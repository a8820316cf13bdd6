"""The service ``study``, as the kernel sees it."""

from typing import Final

from iris_ray.actors.protocol.services import Command, Service

SERVICE: Final = Service(
    "study",
    commands={
        "study": Command(
            "iris_ray.study.cli:study",
            "See in virtual time how long jobs would wait, and what faults would cost.",
            "Without a cluster",
        ),
    },
)
