"""The service ``cleaning``, as the kernel sees it."""

from typing import Final

from iris_ray.actors.protocol.services import Service

SERVICE: Final = Service(
    "cleaning",
    controller="iris_ray.cleaning.controller:CleaningInController",
    settings="iris_ray.cleaning.settings:SETTINGS",
)
