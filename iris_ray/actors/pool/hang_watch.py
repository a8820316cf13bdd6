"""Ending an attempt in which no task makes progress."""

import asyncio
import math
import time
from collections.abc import Mapping

from iris_ray.actors.pool.attempt_place import AttemptPlace
from iris_ray.actors.pool.notice_delivery import NoticeDelivery
from iris_ray.actors.pool.reserved_slices import ReservedSlices
from iris_ray.actors.pool.slice_actor import SliceActor
from iris_ray.actors.pool.stop_request import StopRequest
from iris_ray.actors.wire.messages import Progress
from iris_ray.model.outcomes import RunErrorKind, TaskKey, TpuRunError

STACKS_S = 1.0
"""How long the stacks of a gang that hangs have to reach the logs."""
LOOK_AT_MOST_S = 5.0


class HangWatch:
    """Sees how far the tasks of an attempt are, see `ProgressWatch`.

    Args:
        place: whose tasks these are.
        slices: have the tasks print what they are doing.
        notices: what they were told; to save takes time, too.
        stop: is asked to end the attempt.
        limit_s: seconds without progress of any task after which the attempt hangs; None: never.
    """

    def __init__(
        self,
        place: AttemptPlace,
        slices: ReservedSlices,
        notices: NoticeDelivery,
        stop: StopRequest,
        limit_s: float | None,
    ) -> None:
        self._place = place
        self._slices = slices
        self._notices = notices
        self._stop = stop
        self._limit = limit_s
        self._progress_at = time.monotonic()
        self._running: set[TaskKey] = set()

    def progress_made(self) -> None:
        """Count from now."""
        self._progress_at = time.monotonic()

    @property
    def look_after_s(self) -> float:
        """How often it has to see how far the tasks are, in seconds; infinite without a limit."""
        return math.inf if self._limit is None else min(self._limit / 4, LOOK_AT_MOST_S)

    async def is_over(self, running: set[TaskKey], progress: Mapping[TaskKey, Progress]) -> bool:
        """Return whether the attempt hangs. If so, it has been asked to end.

        Args:
            running: the tasks that have not returned.
            progress: what those of them say whose hosts answer.
        """
        if self._limit is None:
            return False
        silence = self._silence(running, progress)
        if not progress or silence <= self._limit:
            return False
        await self._end(progress, silence)
        return True

    def _silence(self, running: set[TaskKey], progress: Mapping[TaskKey, Progress]) -> float:
        """Return for how many seconds no task has made progress."""
        now = time.monotonic()
        beats = [now - max(0.0, p.age) for p in progress.values() if p.age is not None]
        if self._running - running:  # a task that has returned has made progress
            beats.append(now)
        self._running = running
        notice = self._notices.latest
        if notice is not None and time.time() < notice.deadline and any(p.saved for p in progress.values()):
            beats.append(now)  # the others may be waiting for those that have saved
        self._progress_at = max([self._progress_at, *beats])
        return now - self._progress_at

    async def _end(self, progress: Mapping[TaskKey, Progress], silence: float) -> None:
        last = min(progress, key=lambda key: _how_far(progress[key]))
        attempt = self._place.order.attempt
        dumps = (self._slices.actor(name).ask_once(SliceActor.dump_stacks, attempt) for name in self._place.names)
        await asyncio.gather(*dumps, return_exceptions=True)
        await asyncio.sleep(STACKS_S)
        reason = (
            f"no task has made progress for {silence:.0f} s; the last is {self._place.in_words(last)},"
            f" {_in_words(progress[last], progress)}. What each was doing is in its log"
        )
        self._stop.blame(last, TpuRunError(reason, kind=RunErrorKind.HANG), reason)


def _how_far(progress: Progress) -> tuple[int, float]:
    """A task that has never said anything is further behind than any that has."""
    return -1 if progress.step is None else progress.step, -(progress.age or float("inf"))


def _in_words(last: Progress, all_of_them: Mapping[TaskKey, Progress]) -> str:
    steps = [progress.step for progress in all_of_them.values() if progress.step is not None]
    where = "before its first heartbeat" if last.step is None and last.age is None else f"at step {last.step}"
    return where + (f"; the furthest is at step {max(steps)}" if steps else "")
