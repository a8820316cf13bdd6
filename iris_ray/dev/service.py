"""The service ``dev``, as the kernel sees it."""

from typing import Final

from iris_ray.actors.protocol.services import Command, Service

SERVICE: Final = Service(
    "dev",
    commands={
        "dev hold": Command("iris_ray.dev.cli:hold", "Hold slices. `iris-ray dev v4-32` is short for it."),
        "dev run": Command(
            "iris_ray.dev.cli:run", "Send what changed of this directory, and run a program on every held host."
        ),
        "dev ls": Command("iris_ray.dev.cli:ls", "The slices that you hold."),
        "dev stop": Command("iris_ray.dev.cli:stop", "Give held slices back."),
        "dev": Command(
            "iris_ray.dev.cli:dev", "Hold slices, and run what you have just edited on all their hosts.", "Every day"
        ),
    },
)
