"""The Controller's own clock. It only goes forward, and evenly, even if somebody sets the wall clock.

It starts with the wall clock's time and follows the monotonic clock. Its readings are recorded, so that a successor
goes on from the last one. If somebody sets the wall clock, no pause gets longer and nothing times out. People and tasks
see wall time: the Controller translates each time with the offset that held then.
"""

import json
import logging
import time
from bisect import bisect_right
from dataclasses import replace
from typing import TypeVar

from iris_ray.model.notices import Notice
from iris_ray.state.events import WorkerDrainedEvent, WorkerRegisteredEvent

logger = logging.getLogger(__name__)

JUMP_S = 2.0
"""If the wall clock is off by more than this, somebody has set it."""
MOST_AWAY_S = 300.0
"""The most time that passes while no Controller runs. Ray restarts one within seconds, a machine within minutes."""
JUMPS_KEPT = 20

Deadline = TypeVar("Deadline", WorkerDrainedEvent, WorkerRegisteredEvent)


class Clock:
    """Seconds since the epoch, on a clock that nobody can set."""

    def __init__(self) -> None:
        self._ahead = time.time() - time.monotonic()  # of the monotonic clock
        self._offsets = [(0.0, 0.0)]  # from which time on the wall clock was ahead of this clock, and how far

    def now(self) -> float:
        return self._ahead + time.monotonic()

    @property
    def jumps(self) -> list[tuple[float, float]]:
        """The latest times at which the wall clock was set, in wall time, and by how many seconds."""
        offsets = [offset for _, offset in self._offsets]
        moved = zip(self._offsets[1:], offsets, strict=False)
        return [(at + offset, offset - before) for (at, offset), before in moved]

    def look(self) -> None:
        """Check whether the wall clock was set since the last look. If so, log it and keep the new offset."""
        now, wall = self.now(), time.time()
        jump = wall - now - self._offsets[-1][1]
        if abs(jump) > JUMP_S:
            logger.warning(
                "the wall clock has jumped by %+.0f s: it was set, or no Controller ran for a while. Pauses and time"
                " limits of jobs are not affected",
                jump,
            )
            self._offsets = [*self._offsets[-JUMPS_KEPT:], (now, wall - now)]

    # -- from and to wall time --------------------------------------------------------------------------------------

    def wall(self, at: float) -> float:
        """Return the wall time at a time of this clock, past or future."""
        return at + self._offsets[max(0, bisect_right(self._offsets, (at, float("inf"))) - 1)][1]

    def wall_or_none(self, at: float | None) -> float | None:
        """Return the wall time as `wall` does; None for None."""
        return None if at is None else self.wall(at)

    def heard(self, event: Deadline) -> Deadline:
        """Return an event with its deadline translated from wall time to this clock."""
        if event.deadline is None:
            return event
        self.look()
        return replace(event, deadline=event.deadline - self._offsets[-1][1])

    def told(self, notice: Notice) -> Notice:
        """Return a notice with its deadline translated from this clock to wall time."""
        self.look()
        return replace(notice, deadline=notice.deadline + self._offsets[-1][1])

    # -- its record -------------------------------------------------------------------------------------------------

    def record(self) -> bytes:
        """Return the present time and the offsets, for a successor."""
        self.look()
        return json.dumps([self.now(), self._offsets]).encode()

    def go_on_from(self, recorded: bytes) -> None:
        """Go on from an earlier Controller's time, plus the wall time since then, but at most `MOST_AWAY_S`."""
        then, offsets = json.loads(recorded)
        self._offsets = [(float(at), float(offset)) for at, offset in offsets]
        away = time.time() - self._offsets[-1][1] - then
        self._ahead = then + min(max(away, 0.0), MOST_AWAY_S) - time.monotonic()
        self.look()
