"""What the service of goodput answers to the dashboard: how each user's jobs spent their time."""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from iris_ray.actors.calls.controller_connection import ControllerConnection
from iris_ray.goodput.calls import GoodputCalls, JobGoodput
from iris_ray.model.goodput import Totals, productive_share


def by_user(source: ControllerConnection, _: Mapping[str, str], __: Mapping[str, str]) -> dict[str, Any]:
    """Return how each user's jobs spent their time."""
    return goodput_by_user(source.ask_all(GoodputCalls.list_goodput))


def goodput_by_user(jobs: Iterable[JobGoodput]) -> dict[str, Any]:
    """Return each user's number of jobs, their chip-seconds by use, and the productive share."""
    totals: dict[str, Totals] = {}
    counts: Counter[str] = Counter()
    for job in jobs:
        counts[job.user] += 1
        totals.setdefault(job.user, Totals()).add(job.seconds, job.chip_seconds)
    return {
        user: {
            "jobs": counts[user],
            "chip_seconds": total.chip_seconds,
            "goodput": productive_share(total.chip_seconds),
        }
        for user, total in totals.items()
    }
