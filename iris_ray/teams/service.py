"""The service ``teams``, as the kernel sees it."""

from typing import Final

from iris_ray.actors.protocol.services import Command, Service

SERVICE: Final = Service(
    "teams",
    controller="iris_ray.teams.controller:TeamsInController",
    commands={
        "team": Command(
            "iris_ray.teams.cli:team", "Teams and their quotas: show them, or set them from a file.", "By subject"
        ),
        "team show": Command("iris_ray.teams.cli:show", "Teams: their quotas, and what each uses, borrows and lends."),
        "team apply": Command(
            "iris_ray.teams.cli:apply", "Replace the tree of teams by the tree in a file; shows the difference first."
        ),
        "cluster limits": Command("iris_ray.teams.limits:limits", "How much each user has and may have, or set it."),
    },
)
