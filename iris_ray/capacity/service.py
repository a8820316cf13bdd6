"""The service ``capacity``, as the kernel sees it."""

from typing import Final

from iris_ray.actors.protocol.services import Command, Service

SERVICE: Final = Service(
    "capacity",
    controller="iris_ray.capacity.controller:CapacityInController",
    settings="iris_ray.capacity.settings:SETTINGS",
    commands={
        "cluster provision": Command(
            "iris_ray.capacity.cli:provision",
            "Request slices from Google that waiting jobs need, and delete idle ones.",
        ),
    },
)
