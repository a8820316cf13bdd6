"""The service of hangs in a pool: it ends an attempt without progress, names the task at fault, and slow tasks."""

import asyncio
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from iris_ray.actors.calls.service_parts import RunningPart
from iris_ray.actors.pool.services import (
    AttemptBegan,
    AttemptOver,
    AttemptTold,
    JobOver,
    Pool,
    PoolEvent,
    PoolPart,
    ProgressSeen,
    RunningAttempt,
)
from iris_ray.actors.pool.slice_actor import SliceActor
from iris_ray.actors.protocol.answers import Unreachable
from iris_ray.actors.protocol.messages import Progress
from iris_ray.hangs.blame import StallFinding, find_culprit
from iris_ray.hangs.calls import HangCalls, TaskLook
from iris_ray.hangs.limit import StallLimit
from iris_ray.hangs.stragglers import Speeds
from iris_ray.model.outcomes import RunErrorKind, TaskKey, TpuFailed, TpuResult, TpuRunError

STACKS_S = 1.0
"""The time for the stacks of a hanging gang to reach its logs."""
LOOK_WITHIN_S = 5.0
"""How long the hosts of a hanging gang have to report its processes before these are ended."""
LOOK_AT_MOST_S = 5.0
EVIDENCE_S = 10.0
"""How long the hosts of a hanging gang have to keep evidence as files, before its processes are ended."""
SAVING_S = 600.0
"""How long a gang with a notice may save before its silence counts. At the notice's deadline, it moves in any case."""
ASK_AGAIN_S = 1.0
"""How long the hosts have to report progress once more before a gang is ended."""


class HangsInPool(PoolPart):
    """Watches the progress of each attempt. A gang's limit outlives its attempts."""

    def __init__(self, pool: Pool, running: RunningPart[PoolEvent]) -> None:
        super().__init__(pool, running)
        self._limits: dict[str, dict[int, StallLimit]] = {}  # by job and gang
        self._watches: dict[RunningAttempt, HangWatch] = {}

    async def happened(self, events: list[PoolEvent]) -> None:
        for event in events:
            match event:
                case AttemptBegan(attempt):
                    self._watch_of(attempt)
                case AttemptTold(attempt) if attempt in self._watches:
                    self._watches[attempt].told()
                case ProgressSeen(attempt, running, progress):
                    looking = self._watch_of(attempt).look(running, progress)
                    self.pool.background.start(looking, f"asking whether {attempt.context.id} hangs")
                case AttemptOver(attempt):
                    self._watches.pop(attempt, None)
                case JobOver(job_id):
                    self._limits.pop(job_id, None)

    def _watch_of(self, attempt: RunningAttempt) -> "HangWatch":
        """Return the watch of an attempt. After a restart, this service hears of attempts that began before."""
        if attempt not in self._watches:
            request, gang = attempt.context.request, attempt.context.id.gang
            limits = self._limits.setdefault(request.spec.job_id, {})
            if gang not in limits:
                limits[gang] = StallLimit(request.stall_timeout, learns=request.spec.max_retries_preemption > 0)
            self._watches[attempt] = HangWatch(attempt, limits[gang])
        return self._watches[attempt]


class HangWatch:
    """Ends an attempt in which no task makes progress.

    Args:
        attempt: the attempt.
        limit: the silence after which the attempt hangs.
    """

    def __init__(self, attempt: RunningAttempt, limit: StallLimit) -> None:
        self._attempt = attempt
        self._place = attempt.context.place
        self._limit = limit
        limit.attempt_begins()
        if limit.set_s is not None:
            attempt.most_pause_s = min(limit.set_s / 4, LOOK_AT_MOST_S)
        self._progress_at = time.monotonic()
        self._told_at = self._moves_at = self._progress_at
        self._running: set[TaskKey] = set()
        self._is_ending = False
        self._speeds = Speeds()
        self._now: tuple[set[str], int | None] = set(), None  # declared pauses of its tasks, and the furthest step

    def told(self) -> None:
        """Note that the tasks have got a notice, and save their state."""
        if (notice := self._attempt.notices.latest) is not None:
            self._told_at = time.monotonic()
            self._moves_at = self._told_at + notice.deadline - time.time()

    @property
    def limit_in_words(self) -> str | None:
        """After how long without progress the attempt hangs, and why; None: never."""
        return self._limit.in_words(*self._now)

    async def look(self, running: set[TaskKey], progress: Mapping[TaskKey, Progress]) -> None:
        """Ask the attempt to end if it hangs.

        Args:
            running: the tasks that have not returned.
            progress: of the running tasks whose hosts answer.
        """
        self._limit.note(found.rhythm for found in progress.values())
        self._now = _paused(progress), _furthest(progress)
        self._attempt.stall_limit, self._attempt.stragglers = self.limit_in_words, self._stragglers(progress)
        silence, limit = self._silence(running, progress), self._limit.seconds(*self._now)
        if limit is None or not progress or silence <= limit or self._attempt.context.stop.asked:
            return
        if not self._is_ending:  # finding the process at fault takes seconds
            self._is_ending = True
            try:
                await self._end(progress, silence, limit)
            finally:
                self._is_ending = False

    def _stragglers(self, progress: Mapping[TaskKey, Progress]) -> tuple[str, ...]:
        steps = {key: found.step for key, found in progress.items() if found.step is not None}
        self._speeds.note(steps, asyncio.get_running_loop().time())
        return tuple(
            f"{self._place.in_words(slow.task)}: {slow.steps_per_s:.2g} steps/s, the median is {slow.median_per_s:.2g}"
            for slow in self._speeds.stragglers()
        )

    def _silence(self, running: set[TaskKey], progress: Mapping[TaskKey, Progress]) -> float:
        """Return the seconds since any task made progress."""
        now = time.monotonic()
        beats = [now - max(0.0, p.age) for p in progress.values() if p.age is not None]
        if self._running - running:  # a task that has returned has made progress
            beats.append(now)
        self._running = running
        is_told = self._attempt.notices.latest is not None and now < self._moves_at
        # a save takes time, and tasks that have saved may wait for the others
        if is_told and (now < self._told_at + SAVING_S or any(p.saved for p in progress.values())):
            beats.append(now)
        self._progress_at = max([self._progress_at, *beats])
        return now - self._progress_at

    async def _end(self, progress: Mapping[TaskKey, Progress], silence: float, limit: float) -> None:
        """End the attempt, unless it makes progress while its processes are looked at."""
        last = min(progress, key=lambda key: _how_far(progress[key]))
        said = self.limit_in_words
        found = await self._look(progress)
        if await self._silence_now() <= limit:
            return
        kept = await self._ask_of_each("evidence", "keep_evidence", EVIDENCE_S)
        if await self._silence_now() <= limit:
            return
        if found.culprit is not None:
            who = f"{self._place.in_words(found.culprit)} holds the others up: {found.why}"
        else:
            who = f"the last is {self._place.in_words(last)}, {_in_words(progress[last], progress)}"
            who += f"; which process is at fault is not clear: {found.why}" if len(progress) > 1 else ""
        reason = f"no task has made progress for {silence:.0f} s, and the limit was {said}; {who}."
        reason += " What each was doing is in its log"
        if any(not isinstance(answer, Unreachable) for answer, _ in kept.values()):
            reason += f" and its output files (iris-ray cp --output {self._attempt.context.request.spec.job_id})"
        if self._limit.is_learned:
            self._limit.alarmed(_furthest(progress), silence)
            result: TpuResult = TpuFailed(f"{reason}; stall_timeout=0 switches this off")
        else:
            result = TpuRunError(reason, kind=RunErrorKind.HANG)
        self._attempt.context.stop.blame_for_hang(
            found.culprit or last, result, reason, held_up=found.culprit is not None
        )

    async def _silence_now(self) -> float:
        """Ask the tasks once more. Return the seconds since any made progress."""
        context = self._attempt.context
        answers = context.by_task(await context.ask_within(ASK_AGAIN_S, SliceActor.progress, context.id))
        return self._silence(self._running, {key: one for key, one in answers.items() if isinstance(one, Progress)})

    async def _look(self, progress: Mapping[TaskKey, Progress]) -> StallFinding:
        """Have all tasks print their stacks, and compare their activity, within `LOOK_WITHIN_S` and a second."""
        printed = asyncio.gather(
            asyncio.sleep(STACKS_S), self._ask_of_each("hangs", HangCalls.dump_stacks.__name__, STACKS_S)
        )
        answers = await self._ask_of_each("hangs", HangCalls.look.__name__, LOOK_WITHIN_S)
        await printed
        looks: dict[TaskKey, TaskLook | None] = dict.fromkeys(progress)
        for key, (look, took_s) in answers.items():
            looks[key] = replace(look, late_s=took_s - look.took_s) if isinstance(look, TaskLook) else None
        steps = {key: found.step for key, found in progress.items() if found.step is not None}
        return find_culprit(looks, steps, lambda key: self._place.host(key).node_id)

    async def _ask_of_each(self, service: str, method: str, within_s: float) -> dict[TaskKey, tuple[Any, float]]:
        """Ask a service on the hosts about each running process; leave out slices that do not answer."""
        context = self._attempt.context
        call = context.ask_within(within_s + 1.0, SliceActor.ask_of_each, context.id, service, method, within_s)
        return context.by_task(await call)


def _paused(progress: Mapping[TaskKey, Progress]) -> set[str]:
    return {found.rhythm.pause for found in progress.values() if found.rhythm.pause is not None}


def _furthest(progress: Mapping[TaskKey, Progress]) -> int | None:
    return max((found.step for found in progress.values() if found.step is not None), default=None)


def _how_far(progress: Progress) -> tuple[int, float]:
    """Return a sort key that is smallest for the task that is furthest behind. A task without a step is behind all."""
    return -1 if progress.step is None else progress.step, -(progress.age or float("inf"))


def _in_words(last: Progress, all_of_them: Mapping[TaskKey, Progress]) -> str:
    steps = [progress.step for progress in all_of_them.values() if progress.step is not None]
    where = "before its first heartbeat" if last.step is None and last.age is None else f"at step {last.step}"
    return where + (f"; the furthest is at step {max(steps)}" if steps else "")
