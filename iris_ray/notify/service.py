"""The service ``notify``, as the kernel sees it."""

from typing import Final

from iris_ray.actors.protocol.services import Command, Page, Service

SERVICE: Final = Service(
    "notify",
    controller="iris_ray.notify.controller:NotifyInController",
    settings="iris_ray.notify.settings:SETTINGS",
    admits=("notify",),
    pages=(Page("/api/notifications", "iris_ray.notify.pages:notifications"),),
    commands={
        "job notifications": Command(
            "iris_ray.notify.cli:notifications", "The latest notifications about jobs; send a test."
        )
    },
)
