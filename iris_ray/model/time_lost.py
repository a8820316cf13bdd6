"""Time lost per failure: the cost of each end of a job's attempts, by cause, and sums that stay small."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from statistics import median


class FailureCause(StrEnum):
    """The cause of the end of an attempt after which the job went on.

    PREEMPTED: a host was taken after a notice, or the gang moved because of that notice.
    LOST: a host, or a process of iris_ray, was gone without notice.
    CRASHED: a task ended early, of itself.
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
"""Causes that are announced to a gang, so that it can save its state."""


@dataclass(frozen=True, slots=True)
class Failure:
    """The cost of one attempt's end, until the first step of the next attempt, or the start of one without steps.

    An attempt that ended before its first step has lost all its time, and that time counts here, as ``start_s``. So
    each failure counts by itself, and no second counts twice.

    Attributes:
        attempt: the number of the attempt that ended.
        cause: why it ended.
        again_s: steps that a later attempt did again, as long as they took before.
        away_s: from the last step that was kept until user code runs again.
        start_s: from there to the first step, and by how much that step took longer than the others.
        waited_s: the part of ``away_s`` in which the job waited for slices.
        reinit_s: from the slices until the first step begins: launches, and what comes before that step.
        chip_seconds: of all this, times the chips that the job held meanwhile.
        is_over: whether the next attempt has made a step or has ended, or the job has.
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
        """All the time that it cost."""
        return self.again_s + self.away_s + self.start_s


LATEST_KEPT = 32
"""The limit for failures of a cause whose single times are kept, for the median. The sums have all failures."""


@dataclass(frozen=True, slots=True)
class TimeLost:
    """The failures of one cause that are over.

    Attributes:
        count: how many.
        seconds, chip_seconds: what they cost together.
        waited_s, reinit_s: parts of ``seconds``, see `Failure`.
        worst_s: what the worst one cost.
        latest: what each of the latest ones cost, and the part of it in which the job waited for slices; seconds.
        median_s: the median of what the latest ones cost; 0 if there is none.
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
        """Return this with one more failure."""
        lost_s, waited_s = failure.lost_s, failure.waited_s
        latest = ((lost_s, waited_s),)
        more = TimeLost(1, lost_s, failure.chip_seconds, waited_s, failure.reinit_s, lost_s, latest)
        both = all_together((self, more))
        return replace(both, latest=both.latest[-LATEST_KEPT:])


def all_together(parts: Iterable[TimeLost]) -> TimeLost:
    """Return the sums of several. The median is over the latest failures of each."""
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


def summed_up(jobs: Iterable[Mapping[FailureCause, TimeLost]]) -> dict[FailureCause, TimeLost]:
    """Return the time lost by several jobs, by cause."""
    found: dict[FailureCause, list[TimeLost]] = {}
    for job in jobs:
        for cause, lost in job.items():
            found.setdefault(cause, []).append(lost)
    return {cause: all_together(parts) for cause, parts in found.items()}


def elastic_seconds(lost: Mapping[FailureCause, TimeLost]) -> dict[str, float]:
    """Return the failures of a job as the elastic kinds of badput in Google's ``ml-goodput-measurement`` 0.2.

    MaxText records them: the wait for slices, after a loss or in order to grow, and then what comes before the first
    step. In the library, too, that part of initialization and preparation counts here and not by itself.
    """
    waits = {cause: found.waited_s for cause, found in lost.items()}
    grown_s = waits.pop(FailureCause.GROWN, 0.0)
    reinit_s = sum(found.reinit_s for found in lost.values())
    kinds = "elastic_slice_down", "elastic_scale_up", "elastic_reinitialization"
    return dict(zip(kinds, (sum(waits.values()), grown_s, reinit_s), strict=True))


def move_s(lost: Mapping[FailureCause, TimeLost]) -> float | None:
    """Return the median of what the planned moves of a job cost, without the wait for slices.

    As long as it has made none, that of its other failures, which cost more; None if there was no failure.
    """
    for causes in (PLANNED, frozenset(FailureCause)):
        if costs := [lost_s - waited_s for cause in causes & lost.keys() for lost_s, waited_s in lost[cause].latest]:
            return median(costs)
    return None


def reinit_s(lost: Mapping[FailureCause, TimeLost]) -> float | None:
    """Return how long a job was away from its work after a failure, on average: from its new slices to the first step.

    None if there was no failure.
    """
    count = sum(found.count for found in lost.values())
    return sum(found.reinit_s for found in lost.values()) / count if count else None
