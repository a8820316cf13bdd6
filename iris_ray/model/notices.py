"""Notices: advance warning that a host is to go or that a gang is to move."""

from dataclasses import dataclass
from enum import StrEnum

NOTICE_S = 30.0
"""Seconds of notice that are assumed if none are given: what a spot VM gets."""
GROWTH_NOTICE_S = 60.0
"""Seconds that a gang has to save its state before it moves to more slices."""


class NoticeKind(StrEnum):
    """Why a gang is to move."""

    PREEMPTION = "preemption"
    MAINTENANCE = "maintenance"
    GROWTH = "growth"  # more slices are there for it


@dataclass(frozen=True, slots=True)
class HostNotice:
    """A host is to go.

    Attributes:
        kind: why.
        reason: the same in words, for people.
        deadline: from when on it may be gone, in seconds since the epoch on the host's clock; None if unknown.
    """

    kind: NoticeKind
    reason: str
    deadline: float | None


@dataclass(frozen=True, slots=True)
class Notice:
    """What every task of a gang is told when the gang is to move.

    Attributes:
        kind: why.
        reason: the same in words, with the host.
        deadline: when at the latest; seconds since the epoch.
    """

    kind: NoticeKind
    reason: str
    deadline: float


SAME_DEADLINE_S = 1.0
"""Deadlines that differ by less, in seconds, count as equal."""


def is_as_urgent(known: Notice, deadline: float | None) -> bool:
    """Return whether a known notice is at least as urgent as one with this deadline (None: unknown)."""
    return deadline is None or known.deadline <= deadline + SAME_DEADLINE_S
