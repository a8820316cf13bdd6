"""A file of the history for tests, with a clock that they set."""

import math
from collections.abc import Iterator
from pathlib import Path

from iris_ray.actors.protocol.status import JobFacts
from iris_ray.history.calls import HistoryRows, Value
from iris_ray.history.history_file import Bounds, HistoryFile
from iris_ray.history.reading import read_history
from iris_ray.history.rows import JobStory, Sample, UserSample, job_story
from iris_ray.model.jobs import Job
from tests.support.worlds import World

NOON = 1_795_694_400.0
"""2026-11-26 12:00 UTC."""


class History:
    """A file of the history, and a clock that tests set.

    Attributes:
        now: seconds since the epoch.
    """

    def __init__(self, path: Path, bounds: Bounds) -> None:
        self.now = NOON
        self.file = HistoryFile(path, bounds, lambda: self.now)

    def bounded(self, days: float = 400, megabytes: float = 100) -> HistoryFile:
        """Return the same file with other bounds."""
        return HistoryFile(self.file.path, Bounds(days, megabytes), lambda: self.now)

    def rows(self, sql: str, **parameters: Value) -> list[tuple[Value, ...]]:
        return list(self.ask(sql, **parameters).rows)

    def ask(self, sql: str, **parameters: Value) -> HistoryRows:
        return read_history(self.file.path, sql, parameters)


def a_month(until: float) -> Iterator[Sample]:
    """Yield what a cluster of 40 slices did in a month, hour by hour, and in the last day minute by minute."""
    chips = {"v4-16": 160.0, "v4-32": 256.0}
    hours = [until - 3600 * n for n in range(30 * 24, 24, -1)]
    for at in (*hours, *(until - 60 * n for n in range(24 * 60, 0, -1))):
        busy = 0.5 + 0.4 * math.sin(at / 86400 * 2 * math.pi) * math.sin(at / 604800)
        rows = [
            ("v4-16", "interactive", "ann", 150 * busy * 0.5, 0.0, 0.0),
            ("v4-32", "interactive", "bob", 250 * busy * 0.4, 1.0, 32.0),
            ("v4-32", "batch", "cho", 250 * busy * 0.5, 6 * busy, 200 * busy),
            ("v4-16", "production", "dee", 32.0, 0.0, 0.0),
        ]
        yield Sample(at, chips, tuple(UserSample(*row[:3], "", *row[3:]) for row in rows))


def wall(at: float) -> float:
    """The worlds' clock begins at 100; that is noon."""
    return NOON + at - 100.0


def story(world: World, job: Job) -> JobStory:
    return job_story(JobFacts(job, world.state, wall), job.times, world.now)
