"""Stragglers: tasks that make clearly fewer steps per second than the others of their gang."""

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

from iris_ray.model.outcomes import TaskKey

WINDOW_S = 60.0
"""The window of a speed: an average covers one to two windows; seconds."""
FEWEST = 3
"""The median of fewer tasks says nothing."""
SLOW = 0.8
"""A task whose speed is below this share of the median is a straggler."""
MOST_NAMED = 5

_Seen = tuple[int, float]
"""A step, and when we saw it; seconds."""


@dataclass(frozen=True, slots=True)
class Straggler:
    """A task that is slower than `SLOW` times the median."""

    task: TaskKey
    steps_per_s: float
    median_per_s: float


class Speeds:
    """The speed of each task of an attempt, in steps per second."""

    def __init__(self) -> None:
        self._since: dict[TaskKey, tuple[_Seen, _Seen]] = {}  # where two windows began, the earlier one first
        self._latest: dict[TaskKey, _Seen] = {}

    def note(self, steps: Mapping[TaskKey, int], now: float) -> None:
        """Take the latest step of each task that has named one; `now` is in seconds on any clock."""
        for key, step in steps.items():
            _, later = self._since.setdefault(key, ((step, now), (step, now)))
            self._latest[key] = step, now
            if now >= later[1] + WINDOW_S:
                self._since[key] = later, (step, now)

    def stragglers(self) -> list[Straggler]:
        """Return the stragglers, slowest first; at most `MOST_NAMED`."""
        speeds = {key: self._speed(key) for key in self._latest}
        known = {key: speed for key, speed in speeds.items() if speed is not None}
        if len(known) < FEWEST:
            return []
        usual = median(known.values())
        slow = sorted((speed, key) for key, speed in known.items() if speed < SLOW * usual)
        return [Straggler(key, speed, usual) for speed, key in slow[:MOST_NAMED]]

    def _speed(self, key: TaskKey) -> float | None:
        """Return the steps per second of a task; None until it was watched for `WINDOW_S`."""
        ((first, since), _), (latest, until) = self._since[key], self._latest[key]
        return (latest - first) / (until - since) if until - since >= WINDOW_S else None
