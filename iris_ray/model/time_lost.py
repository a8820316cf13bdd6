"""Time lost to failures: the cost of each early end of an attempt, and compact sums by cause."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from statistics import median


class FailureCause(StrEnum):
    """The cause of an attempt's end after which the job continued.

    PREEMPTED: a host was taken after a notice, or the gang moved because of that notice.
    LOST: a host or a process of iris_ray was lost without notice.
    CRASHED: a task failed.
    HUNG: no task had called ``heartbeat`` for too long.
    EVICTED: the gang gave its hosts to another job.
    GROWN: the gang moved to more slices.
    """

    PREEMPTED = "preempted"
    LOST = "lost"
    CRASHED = "crashed"
    HUNG = "hung"
    EVICTED = "evicted"
    GROWN = "grown"


PLANNED = frozenset({FailureCause.PREEMPTED, FailureCause.EVICTED, FailureCause.GROWN})
"""Causes of which a gang has notice, so that it can save its state."""


@dataclass(frozen=True, slots=True)
class Failure:
    """The cost of an attempt's end, until the first step of the next attempt, or its start if it reports no steps.

    An attempt that ended before its first step lost all its time, which counts here as ``start_s``. Failures therefore
    don't overlap, and no second counts twice.

    Attributes:
        attempt: the number of the attempt that ended.
        cause: why it ended.
        again_s: the original duration of the steps that a later attempt repeated.
        away_s: the time from the last step that was kept until user code runs again.
        start_s: the time from there to the first step, and that step's extra time compared to the others.
        waited_s: the part of ``away_s`` in which the job waited for slices.
        reinit_s: the time from getting slices to the first step: launches, and initialization before that step.
        chip_seconds: the cost in chip-seconds, by the chips that the job held.
        is_over: whether the cost is final: the next attempt has completed a step or ended, or the job has ended. If the
            job reports no steps: user code runs again.
    """

    attempt: int
    cause: FailureCause
    again_s: float
    away_s: float
    start_s: float
    waited_s: float
    reinit_s: float
    chip_seconds: float
    is_over: bool

    @property
    def lost_s(self) -> float:
        """The total cost in seconds."""
        return self.again_s + self.away_s + self.start_s


LATEST_KEPT = 32
"""The number of latest failures of a cause whose costs are kept, for the median. The sums cover all failures."""


@dataclass(frozen=True, slots=True)
class TimeLost:
    """The sums of the completed failures of one cause.

    Attributes:
        count: the number of failures.
        seconds, chip_seconds: their total cost.
        waited_s, reinit_s: parts of ``seconds``; see `Failure`.
        worst_s: the cost of the most expensive one.
        latest: the cost of each of the latest ones, and the part in which the job waited for slices; seconds.
        median_s: the median cost of the latest ones; 0 without any.
    """

    count: int = 0
    seconds: float = 0.0
    chip_seconds: float = 0.0
    waited_s: float = 0.0
    reinit_s: float = 0.0
    worst_s: float = 0.0
    latest: tuple[tuple[float, float], ...] = ()
    median_s: float = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "median_s", median(lost_s for lost_s, _ in self.latest) if self.latest else 0.0)

    def with_failure(self, failure: Failure) -> "TimeLost":
        """Return these sums with one more failure."""
        lost_s, waited_s = failure.lost_s, failure.waited_s
        latest = ((lost_s, waited_s),)
        more = TimeLost(1, lost_s, failure.chip_seconds, waited_s, failure.reinit_s, lost_s, latest)
        both = all_together((self, more))
        return replace(both, latest=both.latest[-LATEST_KEPT:])


def all_together(parts: Iterable[TimeLost]) -> TimeLost:
    """Return the sum of several. Its median is over the latest failures of each."""
    found = list(parts)
    return TimeLost(
        sum(one.count for one in found),
        sum(one.seconds for one in found),
        sum(one.chip_seconds for one in found),
        sum(one.waited_s for one in found),
        sum(one.reinit_s for one in found),
        max((one.worst_s for one in found), default=0.0),
        tuple(cost for one in found for cost in one.latest),
    )


def move_s(lost: Mapping[FailureCause, TimeLost]) -> float | None:
    """Return the median cost of a job's planned moves in seconds, without the wait for slices.

    Before its first planned move this is the median over all its failures, which cost more; None without a failure.
    """
    for causes in (PLANNED, frozenset(FailureCause)):
        if costs := [lost_s - waited_s for cause in causes & lost.keys() for lost_s, waited_s in lost[cause].latest]:
            return median(costs)
    return None


def reinit_s(lost: Mapping[FailureCause, TimeLost]) -> float | None:
    """Return a job's average time from new slices to the first step after failures, in seconds; None without any."""
    count = sum(found.count for found in lost.values())
    return sum(found.reinit_s for found in lost.values()) / count if count else None
