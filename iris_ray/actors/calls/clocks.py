"""Times in messages between hosts whose wall clocks may differ."""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Self, TypeVar

from iris_ray.model.notices import HostNotice, Notice, NoticeKind

if TYPE_CHECKING:  # a host needs no state of the cluster
    from iris_ray.state.events import WorkerDrainedEvent


class Moment(float):
    """A past time, in seconds since the epoch by the clock of the process that holds it.

    It is pickled as the seconds that have passed since then. So a receiver can compare moments of several hosts,
    though their clocks differ. The time of the transfer is neglected.
    """

    @classmethod
    def now(cls) -> Self:
        return cls(time.time())

    def __reduce__(self) -> tuple[Callable[[float], "Moment"], tuple[float]]:
        return _moment_ago, (time.time() - self,)


def _moment_ago(seconds: float) -> Moment:
    return Moment(time.time() - seconds)


Told = TypeVar("Told", Notice, HostNotice, "WorkerDrainedEvent")


def by_this_clock(notice: Told, sent_at: float, exact: bool = False) -> Told:
    """Return a notice with its deadline by the wall clock of this process.

    The difference of the clocks is rounded to seconds, so a notice that is sent again stays equal if the clocks agree.

    Args:
        notice: with its deadline by the sender's clock.
        sent_at: the time on that clock when it was sent.
        exact: do not round, because the notice goes from host to host: the roundings of a way round would add up, and
            the notice would come back with an earlier deadline, as if it were news.
    """
    if notice.deadline is None or (not isinstance(notice, Notice) and notice.kind is NoticeKind.MAINTENANCE):
        return notice  # the beginning of a maintenance is by the clock of Google's servers
    ahead = time.time() - sent_at
    return replace(notice, deadline=notice.deadline + (ahead if exact else round(ahead)))
