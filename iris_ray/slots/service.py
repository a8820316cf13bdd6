"""The service ``slots``, as the kernel sees it."""

from typing import Final

from iris_ray.actors.protocol.services import Command, Service

SERVICE: Final = Service(
    "slots",
    commands={
        "serve": Command(
            "iris_ray.slots.cli:serve", "Serve the models of a file as OpenAI's API, until Ctrl-C.", "By subject"
        ),
        "slots": Command(
            "iris_ray.slots.cli:slots",
            "Models that are served: their slots, what waits for them, and why.",
            "By subject",
        ),
    },
)
