"""Names the tasks of a gang that make fewer steps than the others."""

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

from iris_ray.model.outcomes import TaskKey

WINDOW_S = 60.0
"""Over so long speeds are measured at least, and over twice as long at most."""
FEWEST = 3
"""A gang of fewer tasks has no median that says anything."""
SLOW = 0.8
"""A task that makes less than this share of the median's steps is a straggler."""
MOST_NAMED = 5

_Seen = tuple[int, float]
"""A step, and when it began; seconds."""


@dataclass(frozen=True, slots=True)
class Straggler:
    """A task that is slow.

    Attributes:
        task: its place.
        steps_per_s: how fast it is.
        median_per_s: how fast half of the tasks are at least.
    """

    task: TaskKey
    steps_per_s: float
    median_per_s: float


class Speeds:
    """How fast each task of an attempt makes steps."""

    def __init__(self) -> None:
        self._since: dict[TaskKey, tuple[_Seen, _Seen]] = {}  # where two windows began, the earlier one first
        self._latest: dict[TaskKey, _Seen] = {}

    def note(self, steps: Mapping[TaskKey, int], now: float) -> None:
        """Take how far tasks are now.

        Args:
            steps: the latest step of each task that has named one.
            now: seconds on any clock.
        """
        for key, step in steps.items():
            _, later = self._since.setdefault(key, ((step, now), (step, now)))
            self._latest[key] = step, now
            if now >= later[1] + WINDOW_S:
                self._since[key] = later, (step, now)

    def stragglers(self) -> list[Straggler]:
        """Return the slowest tasks, if some are clearly slower than the others; at most `MOST_NAMED`, slowest first."""
        speeds = {key: self._speed(key) for key in self._latest}
        known = {key: speed for key, speed in speeds.items() if speed is not None}
        if len(known) < FEWEST:
            return []
        usual = median(known.values())
        slow = sorted((speed, key.slice_id, key.host_index) for key, speed in known.items() if speed < SLOW * usual)
        return [Straggler(TaskKey(slice_id, host), speed, usual) for speed, slice_id, host in slow[:MOST_NAMED]]

    def _speed(self, key: TaskKey) -> float | None:
        """Return the steps per second of a task; None as long as it was not watched for `WINDOW_S`."""
        ((first, since), _), (latest, until) = self._since[key], self._latest[key]
        return (latest - first) / (until - since) if until - since >= WINDOW_S else None
