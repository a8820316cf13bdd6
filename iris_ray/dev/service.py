"""The service ``dev``, as the kernel sees it."""

from typing import Final

from iris_ray.actors.protocol.services import Command, Service

SERVICE: Final = Service(
    "dev",
    commands={
        "dev": Command(
            "iris_ray.dev.cli:dev", "Hold slices, and run what you have just edited on all their hosts.", "Every day"
        ),
    },
)
