"""Asks the running tasks of an attempt for their steps, and shows them to people."""

import asyncio
import logging
import math
from collections.abc import Mapping
from dataclasses import replace

from iris_ray.actors.calls.background import repeat
from iris_ray.actors.pool.services import PoolParts, ProgressSeen, RunningAttempt
from iris_ray.actors.pool.slice_actor import SliceActor
from iris_ray.actors.protocol.answers import Unreachable
from iris_ray.actors.protocol.controller_interface import ControllerInterface
from iris_ray.actors.protocol.messages import GangProgress, Progress, Saves
from iris_ray.model.goodput import Marks, with_step
from iris_ray.model.outcomes import TaskKey

logger = logging.getLogger(__name__)

FIRST_LOOK_S = 1.0
LOOK_S, LOOK_AT_LEAST_S = 5.0, 60.0
TASKS_A_SECOND = 16.0
"""The number of tasks asked per second, on average. A large gang is asked less often."""
LAST_LOOK_S = 0.2
"""The longest delay of a gang's end by the last look at its tasks."""
TELL_AGAIN_S = 30.0
"""The interval at which unchanged progress is repeated, for a restarted Controller."""


class ProgressWatch:
    """Asks the tasks of an attempt every few seconds, and tells services and the Controller what has changed.

    Args:
        attempt: the attempt.
        services: see each answer.
    """

    def __init__(self, attempt: RunningAttempt, services: PoolParts) -> None:
        self._attempt, self._place = attempt.context, attempt.context.place
        self._seen_by_services, self._services = attempt, services
        self._job_pause_s = pause_s(attempt.context.request.spec.most_tasks)
        self._told: tuple[object, ...] | None = None  # step, status, limit, whether it heeds notices
        self._told_at = 0.0
        self._speaker: TaskKey | None = None
        self._has_looked = False
        self._marks = Marks()

    @property
    def _pause_s(self) -> float:
        return min(self._job_pause_s, self._seen_by_services.most_pause_s)

    @property
    def marks(self) -> Marks:
        """The marks of the attempt's speaker: the first task that named a step."""
        return self._marks

    async def watch(self) -> None:
        """Look at the tasks for ever."""
        await asyncio.sleep(min(FIRST_LOOK_S, self._pause_s))
        await repeat(self._look, f"asking how far {self._attempt.id} is", self._pause_s)

    async def _look(self) -> None:
        """Look at the tasks once, then pause."""
        self._has_looked = True
        running, progress = await self._ask()
        self._services.note([ProgressSeen(self._seen_by_services, running, progress)])
        self._note_marks(progress)
        await self._tell(summed_up(self._seen_by_services, progress, self._marks))
        await asyncio.sleep(self._pause_s)

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

    async def _ask(self) -> tuple[set[TaskKey], dict[TaskKey, Progress]]:
        """Return the tasks that have not returned, and the progress of those whose hosts answer."""
        running = self._attempt.by_task(await self._attempt.ask(SliceActor.progress, self._attempt.id))
        return set(running), {key: found for key, found in running.items() if not isinstance(found, Unreachable)}

    async def _tell(self, progress: GangProgress) -> None:
        """Tell the Controller what has changed. If it does not answer, the next look tells it again."""
        now = asyncio.get_running_loop().time()
        if progress.age is None and progress.status is None and progress.saves == Saves():
            return
        said = progress.step, progress.status, progress.stall_limit, progress.saves.heeds_notices
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
    """Return the pause between two looks at a job with this number of tasks; seconds."""
    return min(max(LOOK_S, job_tasks / TASKS_A_SECOND), LOOK_AT_LEAST_S)


def summed_up(attempt: RunningAttempt, progress: Mapping[TaskKey, Progress], marks: Marks) -> GangProgress:
    """Return the progress of a gang as people see it: its newest heartbeat, furthest step and first status."""
    ages = [found.age for found in progress.values() if found.age is not None]
    words = (progress[key].status for key in sorted(progress))
    status = next(filter(None, words), None)
    age, saves = min(ages, default=None), _latest_save(progress)
    step = max((found.step for found in progress.values() if found.step is not None), default=None)
    by_services = attempt.stragglers, attempt.stall_limit
    return GangProgress(attempt.context.id, age, step, status, marks, *by_services, saves)


def _latest_save(progress: Mapping[TaskKey, Progress]) -> Saves:
    """Return the latest save of any task, and whether any asks for notices."""
    told = [found.saves for found in progress.values()]
    latest = min(told, key=lambda saves: math.inf if saves.ago_s is None else saves.ago_s, default=Saves())
    return replace(latest, heeds_notices=any(saves.heeds_notices for saves in told))
