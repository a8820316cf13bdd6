"""A file of the history for tests, with a clock that they set."""

from pathlib import Path

from iris_ray.history.history_file import Bounds, HistoryFile
from iris_ray.history.reading import HistoryRows, Value, read_history
from iris_ray.history.rows import JobStory, job_story
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


def wall(at: float | None) -> float | None:
    """The worlds' clock begins at 100; that is noon."""
    return None if at is None else NOON + at - 100.0


def story(world: World, job: Job) -> JobStory:
    return job_story(job, job.times, world.now, wall)
