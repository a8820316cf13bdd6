"""How an actor notices that its pool no longer calls it: the pool hangs, or a failed network has cut this host off.

The pool marks such a host lost within seconds, and runs the gang elsewhere. So what runs here must end; otherwise two
attempts of a task would write the same checkpoints for as long as the network is broken.
"""

import asyncio
from collections.abc import Callable

TICK_S = 1.0
SLICE_UNASKED_S = 10.0
"""A SliceActor that was not called for so long stops pinging its hosts: its pool may be gone."""
HOST_UNASKED_S = 60.0
"""A TPUHostActor that was not called for so long ends its tasks and itself. Ray's processes wait as long for a GCS."""


class Contact:
    """Counts the seconds since an actor was last called, as far as it matters.

    Args:
        limit_s: contact is lost after so many seconds.
        matters: returns whether there is anything that must end then; other seconds don't count.
    """

    def __init__(self, limit_s: float, matters: Callable[[], bool]) -> None:
        self._limit_s = limit_s
        self._matters = matters
        self._unasked_s = 0.0

    @property
    def is_lost(self) -> bool:
        """Whether the last call is too long ago."""
        return self._unasked_s >= self._limit_s

    def asked(self) -> None:
        """Start the count anew, since a call came."""
        self._unasked_s = 0.0

    async def count(self) -> None:
        """Count one second, and take it. A time in which this whole process did not run counts as one second, too."""
        await asyncio.sleep(TICK_S)
        self._unasked_s = self._unasked_s + TICK_S if self._matters() else 0.0
