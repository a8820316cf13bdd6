"""Times that one host tells another whose wall clock may differ."""

import time
from dataclasses import replace
from typing import TypeVar

from iris_ray.model.notices import HostNotice, Notice, NoticeKind

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
