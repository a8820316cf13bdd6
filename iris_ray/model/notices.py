"""Advance word: a host or a gang is about to be ended, by the provider or by ourselves."""

from dataclasses import dataclass
from enum import StrEnum

NOTICE_S = 30.0
"""What a spot VM gets, where nobody says how long a notice is."""
GROWTH_NOTICE_S = 60.0
"""How long a gang that is to move to more slices has to save its state."""


class NoticeKind(StrEnum):
    """Why a gang is to move."""

    PREEMPTION = "preemption"
    MAINTENANCE = "maintenance"
    GROWTH = "growth"  # more slices are there for it


@dataclass(frozen=True, slots=True)
class HostNotice:
    """A host is going to go away.

    Attributes:
        kind: what is going to happen to it.
        reason: the same in words, for people.
        deadline: from when on it may be gone, in seconds since the epoch on the host's clock; None if nobody said.
    """

    kind: NoticeKind
    reason: str
    deadline: float | None


@dataclass(frozen=True, slots=True)
class Notice:
    """What every task of a gang is told when one of its hosts is to go.

    Attributes:
        kind: why.
        reason: the same in words, with the host.
        deadline: when it will happen at the latest; seconds since the epoch.
    """

    kind: NoticeKind
    reason: str
    deadline: float


SAME_DEADLINE_S = 1.0
"""Deadlines that differ by less are the same."""


def is_as_urgent(known: Notice, deadline: float | None) -> bool:
    """Whether whoever knows of a notice learns nothing new from one with this deadline (None: nobody knows it)."""
    return deadline is None or known.deadline <= deadline + SAME_DEADLINE_S
