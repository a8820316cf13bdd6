"""Times that one host tells another whose wall clock may differ."""

import time
from dataclasses import replace

from iris_ray.model.notices import Notice


def by_this_clock(notice: Notice, sent_at: float) -> Notice:
    """Return a notice with its deadline by the wall clock of this process.

    The way it took counts as nothing, so a notice that is sent again over clocks that agree stays the same one.

    Args:
        notice: what another process sent, with its deadline by the clock there.
        sent_at: what that clock said then.
    """
    return replace(notice, deadline=notice.deadline + round(time.time() - sent_at))
