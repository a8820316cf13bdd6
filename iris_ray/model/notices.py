"""Notices: the provider is about to take a host, or iris_ray is about to move a gang."""

from dataclasses import dataclass
from enum import StrEnum

NOTICE_S = 30.0
"""Seconds from a notice to its deadline if none is given: what a spot VM gets."""
GROWTH_NOTICE_S = 60.0
"""Seconds that a gang has to save its state before it moves to more slices."""


class NoticeKind(StrEnum):
    """Why a gang must move, or end."""

    PREEMPTION = "preemption"
    MAINTENANCE = "maintenance"
    GROWTH = "growth"  # more slices are free for it
    EVICTION = "eviction"  # a job of a higher band takes its hosts
    TIME_LIMIT = "time_limit"  # its job's own time is nearly up


OUR_MOVES = frozenset({NoticeKind.GROWTH, NoticeKind.EVICTION, NoticeKind.TIME_LIMIT})
"""Kinds of notices that iris_ray itself gives. Such a move costs the gang nothing; the first two may be called off."""


@dataclass(frozen=True, slots=True)
class HostNotice:
    """A host is about to go.

    Attributes:
        kind: why.
        reason: the same in words, for people.
        deadline: when it may be gone, in seconds since the epoch on the host's clock; None if unknown.
    """

    kind: NoticeKind
    reason: str
    deadline: float | None


@dataclass(frozen=True, slots=True)
class Notice:
    """What every task of a gang is told when the gang must move.

    Attributes:
        kind: why.
        reason: the same in words, with the host.
        deadline: when the gang is moved at the latest, in seconds since the epoch.
    """

    kind: NoticeKind
    reason: str
    deadline: float


SAME_DEADLINE_S = 1.0
"""Deadlines that differ by less than this many seconds count as the same."""


def is_as_urgent(known: Notice, deadline: float | None) -> bool:
    """Return whether a known notice is at least as urgent as one with this deadline; None: the deadline is unknown."""
    return deadline is None or known.deadline <= deadline + SAME_DEADLINE_S


def is_same(known: Notice, notice: Notice) -> bool:
    """Return whether two notices say the same, perhaps in other words: a host's own and the Controller's."""
    return known.kind is notice.kind and abs(known.deadline - notice.deadline) <= SAME_DEADLINE_S


def is_news(known: Notice | None, notice: Notice, now: float) -> bool:
    """Return whether a notice is news for hosts that know another: it is more urgent, or the other's deadline is over.

    Args:
        known: the latest notice that a task or host was told, or None.
        notice: the other one, which any host of the gang may have sent.
        now: seconds since the epoch.
    """
    if known is None:
        return True
    if is_same(known, notice):
        return False
    is_only_growth = known.kind is NoticeKind.GROWTH and notice.kind is not NoticeKind.GROWTH
    return is_only_growth or not is_as_urgent(known, notice.deadline) or known.deadline <= now < notice.deadline


def keeps(known: Notice | None, notice: Notice, now: float) -> bool:
    """Return whether a task keeps the notice that it was told, though its pool names another one.

    It does if both say the same, or if both come from the provider and the known deadline is still the earliest. The
    pool alone knows whether a move of ours was called off before the other one. The arguments are those of `is_news`.
    """
    if known is None or known.kind is not notice.kind:
        return False
    return is_same(known, notice) or not (known.kind in OUR_MOVES or is_news(known, notice, now))
