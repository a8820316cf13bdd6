"""The service ``goodput``, as the kernel sees it."""

from typing import Final

from iris_ray.actors.protocol.services import Command, Page, Service

SERVICE: Final = Service(
    "goodput",
    controller="iris_ray.goodput.controller:GoodputInController",
    pages=(Page("/api/goodput", "iris_ray.goodput.pages:by_user", 10.0),),
    commands={
        "job goodput": Command(
            "iris_ray.goodput.cli:goodput",
            "How the time of jobs was spent: productive steps, queueing, recovery from preemptions and more.",
        ),
    },
)
