"""Asks the running tasks of an attempt for their steps, shows them to people, and ends an attempt that hangs."""

import asyncio
import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from iris_ray.actors.calls.background import repeat
from iris_ray.actors.pool.attempt_place import AttemptContext
from iris_ray.actors.pool.notice_delivery import NoticeDelivery
from iris_ray.actors.pool.slice_actor import SliceActor
from iris_ray.actors.protocol.answers import Unreachable
from iris_ray.actors.protocol.controller_interface import ControllerInterface
from iris_ray.actors.protocol.messages import GangProgress, Progress, Saves
from iris_ray.hangs.blame import StallFinding, find_culprit
from iris_ray.hangs.calls import HangCalls, TaskLook
from iris_ray.hangs.limit import StallLimit
from iris_ray.model.goodput import Marks, with_step
from iris_ray.model.lifecycle import AttemptId
from iris_ray.model.outcomes import RunErrorKind, TaskKey, TpuFailed, TpuResult, TpuRunError

logger = logging.getLogger(__name__)

FIRST_LOOK_S = 1.0
LOOK_S, LOOK_AT_LEAST_S = 5.0, 60.0
TASKS_A_SECOND = 16.0
"""The pool asks so many tasks per second on average, so it asks a large gang less often."""
LAST_LOOK_S = 0.2
"""The last look at a gang that has ended may delay its end so long."""
TELL_AGAIN_S = 30.0
"""Progress that has not changed is repeated after so long, for a Controller that was restarted."""


class ProgressWatch:
    """Asks the tasks of an attempt every few seconds, and tells the Controller what has changed.

    Args:
        context: the attempt.
        hangs: sees each answer, and ends the attempt if it hangs.
    """

    def __init__(self, context: AttemptContext, hangs: "HangWatch") -> None:
        self._attempt, self._place = context, context.place
        self._hangs = hangs
        self._pause_s = min(pause_s(context.request.spec.most_tasks), hangs.look_after_s)
        self._told: tuple[int | None, str | None, bool] | None = None  # step, status, whether it heeds notices
        self._told_at = 0.0
        self._speaker: TaskKey | None = None
        self._has_looked = False
        self._marks = Marks()
        self._speeds = Speeds()

    @property
    def marks(self) -> Marks:
        """The marks of the attempt's speaker: the first task that named a step."""
        return self._marks

    async def watch(self) -> None:
        """Look at the tasks until the attempt hangs and has been asked to end."""
        await asyncio.sleep(min(FIRST_LOOK_S, self._pause_s))
        await repeat(self._look, f"asking how far {self._attempt.id} is", self._pause_s)

    async def _look(self) -> bool:
        """Look at the tasks once, then pause. Return whether the attempt hangs."""
        self._has_looked = True
        running, progress = await self._ask()
        if await self._hangs.is_over(running, progress):
            return True
        self._note_marks(progress)
        slow, limit = self._stragglers(progress), self._hangs.limit_in_words
        await self._tell(summed_up(self._attempt.id, progress, self._marks, slow, limit))
        await asyncio.sleep(self._pause_s)
        return False

    async def look_again(self, has_failed: bool) -> None:
        """Ask the speaker a last time for its marks, if its host answers within `LAST_LOOK_S`. It may have ended.

        Args:
            has_failed: whether the attempt has failed. Then the first task is asked if no task had named a step.
        """
        first = TaskKey(0, 0) if has_failed and self._has_looked else None
        if (key := self._speaker or first) is not None:
            actor, attempt = self._attempt.slices.actor(self._place.name(key)), self._attempt.id
            asked = asyncio.ensure_future(actor.ask_once(SliceActor.last_progress, attempt, self._place.process(key)))
            await asyncio.wait({asked}, timeout=LAST_LOOK_S)
            if asked.done() and not isinstance(found := asked.result(), Unreachable) and found is not None:
                self._note_marks({key: found})
            asked.cancel()

    def _note_marks(self, progress: Mapping[TaskKey, Progress]) -> None:
        """Take the speaker's marks. The first task that names a step becomes the speaker."""
        if self._speaker is None:
            self._speaker = next((key for key in sorted(progress) if progress[key].marks.steps), None)
        if self._speaker is not None and (found := progress.get(self._speaker)) is not None:
            steps = self._marks.steps or found.marks.steps
            for step, began in found.marks.steps:
                steps = with_step(steps, step, began)
            self._marks = Marks(steps, found.marks.before, found.marks.during)

    def _stragglers(self, progress: Mapping[TaskKey, Progress]) -> tuple[str, ...]:
        """Return in words which tasks are slow."""
        steps = {key: found.step for key, found in progress.items() if found.step is not None}
        self._speeds.note(steps, asyncio.get_running_loop().time())
        return tuple(
            f"{self._place.in_words(slow.task)}: {slow.steps_per_s:.2g} steps/s, the median is {slow.median_per_s:.2g}"
            for slow in self._speeds.stragglers()
        )

    async def _ask(self) -> tuple[set[TaskKey], dict[TaskKey, Progress]]:
        """Return the tasks that have not returned, and the progress of those whose hosts answer."""
        running = self._attempt.by_task(await self._attempt.ask(SliceActor.progress, self._attempt.id))
        return set(running), {key: found for key, found in running.items() if not isinstance(found, Unreachable)}

    async def _tell(self, progress: GangProgress) -> None:
        """Tell the Controller what has changed. If it does not answer, the next look tells it again."""
        now = asyncio.get_running_loop().time()
        if progress.age is None and progress.status is None and progress.saves == Saves():
            return
        said = progress.step, progress.status, progress.saves.heeds_notices
        if said == self._told and now < self._told_at + TELL_AGAIN_S:
            return
        try:
            sender = self._attempt.controller.sender
            reply = await self._attempt.controller.ask_once(ControllerInterface.note_progress, progress, sender)
            if not isinstance(reply, Unreachable):
                self._told, self._told_at = said, now
        except Exception:  # a job goes on without anybody seeing its progress
            logger.exception("%s: how far it is did not reach the Controller", self._attempt.id)


def pause_s(job_tasks: int) -> float:
    """Return the pause between two looks, in seconds, for a job with so many tasks in all."""
    return min(max(LOOK_S, job_tasks / TASKS_A_SECOND), LOOK_AT_LEAST_S)


def summed_up(
    attempt: AttemptId,
    progress: Mapping[TaskKey, Progress],
    marks: Marks,
    stragglers: tuple[str, ...],
    stall_limit: str | None = None,
) -> GangProgress:
    """Return the progress of a gang as people see it: its newest heartbeat, furthest step and first status."""
    ages = [found.age for found in progress.values() if found.age is not None]
    words = (progress[key].status for key in sorted(progress))
    status = next(filter(None, words), None)
    age, saves = min(ages, default=None), _latest_save(progress)
    return GangProgress(attempt, age, _furthest(progress), status, marks, stragglers, stall_limit, saves)


def _latest_save(progress: Mapping[TaskKey, Progress]) -> Saves:
    """Return the latest save of any task, and whether any asks for notices."""
    told = [found.saves for found in progress.values()]
    latest = min(told, key=lambda saves: math.inf if saves.ago_s is None else saves.ago_s, default=Saves())
    return replace(latest, heeds_notices=any(saves.heeds_notices for saves in told))


STACKS_S = 1.0
"""When a gang hangs, its stacks have so long to reach the logs."""
LOOK_WITHIN_S = 5.0
"""How long the hosts of a hanging gang have to report its processes before these are ended."""
LOOK_AT_MOST_S = 5.0


class HangWatch:
    """Ends an attempt in which no task makes progress. `ProgressWatch` asks the tasks.

    Args:
        context: the attempt.
        notices: the notices that tasks were told; saving takes time, and is no hang.
        limit: says after how many seconds without progress of any task the attempt hangs.
    """

    def __init__(self, context: AttemptContext, notices: NoticeDelivery, limit: StallLimit) -> None:
        self._attempt, self._place = context, context.place
        self._notices = notices
        self._limit = limit
        limit.attempt_begins()
        self._progress_at = time.monotonic()
        self._running: set[TaskKey] = set()
        self._now: tuple[set[str], int | None] = set(), None  # declared pauses of its tasks, and the furthest step

    def progress_made(self) -> None:
        """Restart the count of seconds without progress."""
        self._progress_at = time.monotonic()

    @property
    def look_after_s(self) -> float:
        """The longest pause between two looks at the tasks, in seconds; infinite unless a user has set a limit."""
        return math.inf if self._limit.set_s is None else min(self._limit.set_s / 4, LOOK_AT_MOST_S)

    @property
    def limit_in_words(self) -> str | None:
        """After how long without progress the attempt hangs, and why; None: never."""
        return self._limit.in_words(*self._now)

    async def is_over(self, running: set[TaskKey], progress: Mapping[TaskKey, Progress]) -> bool:
        """Return whether the attempt hangs. If it does, ask it to end.

        Args:
            running: the tasks that have not returned.
            progress: of the running tasks whose hosts answer.
        """
        self._limit.note(found.rhythm for found in progress.values())
        self._now = _paused(progress), _furthest(progress)
        silence, limit = self._silence(running, progress), self._limit.seconds(*self._now)
        if limit is None or not progress or silence <= limit:
            return False
        await self._end(progress, silence)
        return True

    def _silence(self, running: set[TaskKey], progress: Mapping[TaskKey, Progress]) -> float:
        """Return the seconds since any task made progress."""
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
        found = await self._look(progress)
        if found.culprit is not None:
            who = f"{self._place.in_words(found.culprit)} holds the others up: {found.why}"
        else:
            who = f"the last is {self._place.in_words(last)}, {_in_words(progress[last], progress)}"
            who += f"; which process is at fault is not clear: {found.why}" if len(progress) > 1 else ""
        reason = f"no task has made progress for {silence:.0f} s, and the limit was {self.limit_in_words}; {who}."
        reason += " What each was doing is in its log"
        if self._limit.is_learned:
            self._limit.alarmed(_furthest(progress), silence)
            result: TpuResult = TpuFailed(f"{reason}; stall_timeout=0 switches this off")
        else:
            result = TpuRunError(reason, kind=RunErrorKind.HANG)
        self._attempt.stop.blame_for_hang(found.culprit or last, result, reason, held_up=found.culprit is not None)

    async def _look(self, progress: Mapping[TaskKey, Progress]) -> StallFinding:
        """Have all tasks print their stacks, and compare what they do; within `LOOK_WITHIN_S` and a second."""
        printed = asyncio.gather(asyncio.sleep(STACKS_S), self._ask_of_each(HangCalls.dump_stacks, STACKS_S))
        replies = await self._ask_of_each(HangCalls.look, LOOK_WITHIN_S)
        await printed
        looks: dict[TaskKey, TaskLook | None] = dict.fromkeys(progress)
        for key, (look, took_s) in replies.items():
            looks[key] = replace(look, late_s=took_s - look.took_s) if isinstance(look, TaskLook) else None
        steps = {key: found.step for key, found in progress.items() if found.step is not None}
        return find_culprit(looks, steps, lambda key: self._place.host(key).node_id)

    async def _ask_of_each(self, question: Callable[..., object], within_s: float) -> dict[TaskKey, tuple[Any, float]]:
        """Ask the hosts about each running process. Leave out the slices whose SliceActors do not answer."""
        what = self._attempt.id, "hangs", question.__name__, within_s
        return self._attempt.by_task(await self._attempt.ask_within(within_s + 1.0, SliceActor.ask_of_each, *what))


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


# -- stragglers --------------------------------------------------------------------------------------------------------

WINDOW_S = 60.0
"""Speeds are averages over one to two windows of so many seconds."""
FEWEST = 3
"""The median of fewer tasks says nothing."""
SLOW = 0.8
"""A task whose speed is below this share of the median is a straggler."""
MOST_NAMED = 5

_Seen = tuple[int, float]
"""A step, and when we saw it; seconds."""


@dataclass(frozen=True, slots=True)
class Straggler:
    """A task that is slower than `SLOW` times the median."""

    task: TaskKey
    steps_per_s: float
    median_per_s: float


class Speeds:
    """The speed of each task of an attempt, in steps per second."""

    def __init__(self) -> None:
        self._since: dict[TaskKey, tuple[_Seen, _Seen]] = {}  # where two windows began, the earlier one first
        self._latest: dict[TaskKey, _Seen] = {}

    def note(self, steps: Mapping[TaskKey, int], now: float) -> None:
        """Take the latest step of each task that has named one; `now` is in seconds on any clock."""
        for key, step in steps.items():
            _, later = self._since.setdefault(key, ((step, now), (step, now)))
            self._latest[key] = step, now
            if now >= later[1] + WINDOW_S:
                self._since[key] = later, (step, now)

    def stragglers(self) -> list[Straggler]:
        """Return the stragglers, slowest first; at most `MOST_NAMED`."""
        speeds = {key: self._speed(key) for key in self._latest}
        known = {key: speed for key, speed in speeds.items() if speed is not None}
        if len(known) < FEWEST:
            return []
        usual = median(known.values())
        slow = sorted((speed, key) for key, speed in known.items() if speed < SLOW * usual)
        return [Straggler(key, speed, usual) for speed, key in slow[:MOST_NAMED]]

    def _speed(self, key: TaskKey) -> float | None:
        """Return the steps per second of a task; None until it was watched for `WINDOW_S`."""
        ((first, since), _), (latest, until) = self._since[key], self._latest[key]
        return (latest - first) / (until - since) if until - since >= WINDOW_S else None
