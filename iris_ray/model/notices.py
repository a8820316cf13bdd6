"""Preemption notices: the provider is about to take a host, or iris_ray is about to move a gang."""

from dataclasses import dataclass
from enum import StrEnum

NOTICE_S = 30.0
"""Seconds from a notice without a deadline to the assumed deadline, as for spot VMs."""
GROWTH_NOTICE_S = 60.0
"""Seconds that a gang has for saving its state before it moves to more slices."""


class NoticeKind(StrEnum):
    """Why a gang must move or end."""

    PREEMPTION = "preemption"
    MAINTENANCE = "maintenance"
    GROWTH = "growth"  # more slices are free for it
    EVICTION = "eviction"  # a job of a higher band takes its hosts
    TIME_LIMIT = "time_limit"  # its job's max_runtime is nearly over


OUR_MOVES = frozenset({NoticeKind.GROWTH, NoticeKind.EVICTION, NoticeKind.TIME_LIMIT})
"""Kinds of notices that iris_ray gives, at no cost to the gang. Those of growth and eviction may be called off."""


@dataclass(frozen=True, slots=True)
class HostNotice:
    """A notice that a host is about to be lost.

    Attributes:
        kind: the cause.
        reason: the cause, for people.
        deadline: when the host may be gone, in seconds since the epoch on the host's clock; None if unknown.
    """

    kind: NoticeKind
    reason: str
    deadline: float | None


@dataclass(frozen=True, slots=True)
class Notice:
    """A notice to all tasks of a gang that the gang must move.

    Attributes:
        kind: the cause.
        reason: the cause and the host, for people.
        deadline: the latest time at which the gang is moved, in seconds since the epoch.
    """

    kind: NoticeKind
    reason: str
    deadline: float


SAME_DEADLINE_S = 1.0
"""Deadlines that differ by at most this many seconds are considered equal."""


def is_as_urgent(known: Notice, deadline: float | None) -> bool:
    """Return whether a known notice is at least as urgent as one with this deadline (None if unknown)."""
    return deadline is None or known.deadline <= deadline + SAME_DEADLINE_S


def is_same(known: Notice, notice: Notice) -> bool:
    """Return whether two notices, such as a host's own and the Controller's, are the same except for their words."""
    return known.kind is notice.kind and abs(known.deadline - notice.deadline) <= SAME_DEADLINE_S


def is_news(known: Notice | None, notice: Notice, now: float) -> bool:
    """Return whether a notice adds to the known one: it is more urgent, or the known one's deadline has passed.

    Args:
        known: the latest notice that a task or host has, or None.
        notice: the other notice, from any host of the gang.
        now: seconds since the epoch.
    """
    if known is None:
        return True
    if is_same(known, notice):
        return False
    is_only_growth = known.kind is NoticeKind.GROWTH and notice.kind is not NoticeKind.GROWTH
    return is_only_growth or not is_as_urgent(known, notice.deadline) or known.deadline <= now < notice.deadline


def keeps(known: Notice | None, notice: Notice, now: float) -> bool:
    """Return whether a task keeps its notice, although its pool has another one.

    It does if both are the same, or if both come from the provider and the known deadline is still the earliest. For
    iris_ray's own moves the pool's notice wins, since the known one may have been called off. For the arguments, see
    `is_news`.
    """
    if known is None or known.kind is not notice.kind:
        return False
    return is_same(known, notice) or not (known.kind in OUR_MOVES or is_news(known, notice, now))
