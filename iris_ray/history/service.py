"""The service ``history``, as the kernel sees it."""

from typing import Final

from iris_ray.actors.protocol.services import Command, Page, Service

SERVICE: Final = Service(
    "history",
    controller="iris_ray.history.controller:HistoryInController",
    settings="iris_ray.history.settings:SETTINGS",
    pages=(
        Page("/api/history/{what:utilisation|jobs}", "iris_ray.history.pages:history", 20.0),
        Page("/api/history/jobs/{job:[^/]+}", "iris_ray.history.pages:past_job"),
    ),
    commands={
        "history": Command(
            "iris_ray.history.cli:history",
            "Jobs that ended long ago, utilisation over time, and any SELECT.",
            "By subject",
        ),
        "report": Command(
            "iris_ray.history.cli:report",
            "Chip-hours and goodput of a month by user, and what failures cost.",
            "By subject",
        ),
    },
)
