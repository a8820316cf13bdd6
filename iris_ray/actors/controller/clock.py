"""The Controller's own clock. It only goes forward, and evenly, whatever becomes of the wall clock.

It begins as the wall clock stands, goes on by monotonic steps, and its readings are recorded, so that a successor goes
on where it stood. When somebody sets the wall clock, the two part: no pause gets longer and nothing times out. What
people and tasks see is wall time, as the wall clock stood then.
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
"""A wall clock that is off by more than this was set."""
MOST_AWAY_S = 300.0
"""Without a Controller no more time passes than this. Ray starts one anew within seconds, a machine within minutes."""
JUMPS_KEPT = 20

Deadline = TypeVar("Deadline", WorkerDrainedEvent, WorkerRegisteredEvent)


class Clock:
    """Seconds since the epoch, on a clock that nobody can set."""

    def __init__(self) -> None:
        self._ahead = time.time() - time.monotonic()  # of the monotonic clock
        self._offsets = [(0.0, 0.0)]  # from which time on the wall clock was ahead of this one, and how far

    def now(self) -> float:
        """Return the time."""
        return self._ahead + time.monotonic()

    @property
    def jumps(self) -> list[tuple[float, float]]:
        """When the wall clock was set, by what it said then, and how far; the latest ones."""
        offsets = [offset for _, offset in self._offsets]
        moved = zip(self._offsets[1:], offsets, strict=False)
        return [(at + offset, offset - before) for (at, offset), before in moved]

    def look(self) -> None:
        """Notice if the wall clock was set since the last look."""
        now, wall = self.now(), time.time()
        jump = wall - now - self._offsets[-1][1]
        if abs(jump) > JUMP_S:
            logger.warning(
                "the wall clock is %+.0f s off: somebody has set it, or no Controller ran for long; no pause and no"
                " time limit of any job changes with it",
                jump,
            )
            self._offsets = [*self._offsets[-JUMPS_KEPT:], (now, wall - now)]

    # -- what others say and see ------------------------------------------------------------------------------------

    def wall(self, at: float) -> float:
        """Return what the wall clock said, or will say, at a time of this clock."""
        return at + self._offsets[max(0, bisect_right(self._offsets, (at, float("inf"))) - 1)][1]

    def wall_or_none(self, at: float | None) -> float | None:
        """Return the same; None for None."""
        return None if at is None else self.wall(at)

    def heard(self, event: Deadline) -> Deadline:
        """Return an event with its deadline by this clock; others set deadlines by the wall clock."""
        if event.deadline is None:
            return event
        self.look()
        return replace(event, deadline=event.deadline - self._offsets[-1][1])

    def told(self, notice: Notice) -> Notice:
        """Return a notice with its deadline by the wall clock, as tasks know it."""
        self.look()
        return replace(notice, deadline=notice.deadline + self._offsets[-1][1])

    # -- its record -------------------------------------------------------------------------------------------------

    def record(self) -> bytes:
        """Return what a successor needs to go on."""
        self.look()
        return json.dumps([self.now(), self._offsets]).encode()

    def go_on_from(self, recorded: bytes) -> None:
        """Go on where an earlier Controller stood, as much later as the wall clock says, within bounds."""
        then, offsets = json.loads(recorded)
        self._offsets = [(float(at), float(offset)) for at, offset in offsets]
        away = time.time() - self._offsets[-1][1] - then
        self._ahead = then + min(max(away, 0.0), MOST_AWAY_S) - time.monotonic()
        self.look()
