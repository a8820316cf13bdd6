"""Times that one host tells another whose wall clock may differ."""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Self, TypeVar

from iris_ray.model.notices import HostNotice, Notice, NoticeKind


class Moment(float):
    """A time of day that has passed, in seconds since the epoch by the clock of the process that holds it.

    It travels as the seconds that have passed since then. So moments of several hosts can be compared where they have
    arrived, whatever the clocks of these hosts say. The way counts as nothing.
    """

    @classmethod
    def now(cls) -> Self:
        """Return the present moment."""
        return cls(time.time())

    def __reduce__(self) -> tuple[Callable[[float], "Moment"], tuple[float]]:
        return _moment_ago, (time.time() - self,)


def _moment_ago(seconds: float) -> Moment:
    return Moment(time.time() - seconds)


Told = TypeVar("Told", Notice, HostNotice)


def by_this_clock(notice: Told, sent_at: float) -> Told:
    """Return a notice with its deadline by the wall clock of this process.

    The way it took counts as nothing, so a notice that is sent again over clocks that agree stays the same one.

    Args:
        notice: what another process sent, with its deadline by the clock there.
        sent_at: what that clock said then.
    """
    if notice.deadline is None or (isinstance(notice, HostNotice) and notice.kind is NoticeKind.MAINTENANCE):
        return notice  # Google's servers say when a maintenance begins, by their own clock
    return replace(notice, deadline=notice.deadline + round(time.time() - sent_at))
