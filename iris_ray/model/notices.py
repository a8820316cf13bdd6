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
    EVICTION = "eviction"  # another job takes its hosts
    TIME_LIMIT = "time_limit"  # its job's max_runtime is nearly over


OUR_MOVES = frozenset({NoticeKind.GROWTH, NoticeKind.EVICTION, NoticeKind.TIME_LIMIT})
"""Kinds of notices that iris_ray itself gives, at no cost to the gang."""
MAY_BE_CALLED_OFF = frozenset({NoticeKind.MAINTENANCE, NoticeKind.GROWTH, NoticeKind.EVICTION})
SAME_DEADLINE_S = 1.0
"""Deadlines that differ by at most this many seconds are considered equal: clocks of hosts differ."""


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

    def repeats(self, known: "Notice | HostNotice") -> bool:
        """Return whether both notices are the same except for their words, which depend on the sender."""
        if known.deadline is None:
            return False
        return self.kind is known.kind and abs(self.deadline - known.deadline) <= SAME_DEADLINE_S


@dataclass(frozen=True, slots=True)
class Replacement(Notice):
    """A notice that counts although the one before it is more urgent, because that one was called off."""


def is_news(known: Notice | None, notice: Notice | HostNotice, now: float) -> bool:
    """Return whether a notice adds to the known one. Otherwise it is a double, or the known one is as urgent.

    Every process that a notice passes asks this: the Controller, the pool, and each host of the gang.

    Args:
        known: the latest notice, or None.
        notice: the other notice, from any host of the gang or from the Controller.
        now: seconds since the epoch.
    """
    if known is None:
        return True
    if known.repeats(notice):
        return False
    if isinstance(notice, Replacement) and known.kind in MAY_BE_CALLED_OFF:
        return True
    if NoticeKind.GROWTH in (known.kind, notice.kind):
        return notice.kind is not NoticeKind.GROWTH
    if notice.deadline is None:
        return False
    is_earlier = notice.deadline < known.deadline - SAME_DEADLINE_S
    return is_earlier or known.deadline <= now < notice.deadline
