"""Asks the tasks of an attempt how far they are, while they run: for people, and to notice a hang."""

import asyncio
import logging
from collections.abc import Mapping

from iris_ray.actors.pool.attempt_place import AttemptPlace
from iris_ray.actors.pool.hang_watch import HangWatch
from iris_ray.actors.pool.reserved_slices import ReservedSlices
from iris_ray.actors.pool.slice_actor import SliceActor
from iris_ray.actors.pool.stragglers import Speeds
from iris_ray.actors.protocol.controller_interface import ControllerInterface
from iris_ray.actors.wire.answers import Unreachable
from iris_ray.actors.wire.background import repeat
from iris_ray.actors.wire.controller_client import ControllerClient
from iris_ray.actors.wire.messages import GangProgress, Progress
from iris_ray.goodput.marks import Marks, with_step
from iris_ray.model.ids import AttemptId
from iris_ray.model.outcomes import TaskKey

logger = logging.getLogger(__name__)

FIRST_LOOK_S = 1.0
LOOK_S, LOOK_AT_LEAST_S = 5.0, 60.0
TASKS_A_SECOND = 16.0
"""So many tasks are asked in a second on average, so a large gang is asked less often."""
LAST_LOOK_S = 0.2
"""How long a gang that has ended may be kept for its last word."""
TELL_AGAIN_S = 30.0
"""A Controller that has come back hears after so long what has not changed."""


class ProgressWatch:
    """Looks every few seconds. The Controller is told what has changed.

    Args:
        place: whose tasks are asked.
        slices: ask the tasks.
        hangs: is shown what they say, and may have the attempt ended.
        controller: is told what they say.
        job_tasks: how many tasks the whole job has.
    """

    def __init__(
        self,
        place: AttemptPlace,
        slices: ReservedSlices,
        hangs: HangWatch,
        controller: ControllerClient,
        job_tasks: int,
    ) -> None:
        self._place = place
        self._slices = slices
        self._hangs = hangs
        self._controller = controller
        self._pause_s = min(pause_s(job_tasks), hangs.look_after_s)
        self._told: tuple[int | None, str | None] | None = None  # step and status
        self._told_at = 0.0
        self._speaker: TaskKey | None = None
        self._has_looked = False
        self._marks = Marks()
        self._speeds = Speeds()

    @property
    def marks(self) -> Marks:
        """What the first task that has named a step has said about its time."""
        return self._marks

    async def watch(self) -> None:
        """Look until the attempt hangs and has been asked to end."""
        await asyncio.sleep(min(FIRST_LOOK_S, self._pause_s))
        await repeat(self._look, f"asking how far {self._place.order.attempt} is", self._pause_s)

    async def _look(self) -> bool:
        """Look once, and pause. Return whether the attempt hangs."""
        self._has_looked = True
        running, progress = await self._ask()
        if await self._hangs.is_over(running, progress):
            return True
        self._note_marks(progress)
        await self._tell(summed_up(self._place.order.attempt, progress, self._marks, self._stragglers(progress)))
        await asyncio.sleep(self._pause_s)
        return False

    async def look_again(self, has_failed: bool) -> None:
        """Have a last look at the task that speaks for its gang, which may have ended, if its host answers at once.

        Args:
            has_failed: nobody waits for results. If no task had named a step before, the first one is asked.
        """
        first = TaskKey(0, 0) if has_failed and self._has_looked else None
        if (key := self._speaker or first) is not None:
            actor, attempt = self._slices.actor(self._place.name(key)), self._place.order.attempt
            asked = asyncio.ensure_future(actor.ask_once(SliceActor.last_progress, attempt, key.host_index))
            await asyncio.wait({asked}, timeout=LAST_LOOK_S)
            if asked.done() and not isinstance(found := asked.result(), Unreachable) and found is not None:
                self._note_marks({key: found})
            asked.cancel()

    def _note_marks(self, progress: Mapping[TaskKey, Progress]) -> None:
        """Take what the speaker says; the first task that names a step speaks for the attempt from then on."""
        if self._speaker is None:
            self._speaker = next((key for key in sorted(progress, key=_place) if progress[key].marks.steps), None)
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
        """Return the tasks that have not returned, and how far each of them is, as far as hosts answer."""
        attempt = self._place.order.attempt
        asks = (self._slices.actor(name).ask_once(SliceActor.progress, attempt) for name in self._place.names)
        replies = await asyncio.gather(*asks, return_exceptions=True)
        running = {
            TaskKey(slice_id, host_index): found
            for slice_id, reply in enumerate(replies)
            if not isinstance(reply, (Unreachable, BaseException))
            for host_index, found in reply.items()
        }
        return set(running), {key: found for key, found in running.items() if not isinstance(found, Unreachable)}

    async def _tell(self, progress: GangProgress) -> None:
        """Tell the Controller, if it does not know yet. One that does not answer hears it the next time."""
        now = asyncio.get_running_loop().time()
        if progress.age is None and progress.status is None:
            return
        said = progress.step, progress.status
        if said == self._told and now < self._told_at + TELL_AGAIN_S:
            return
        try:
            sender = self._controller.sender
            reply = await self._controller.ask_once(ControllerInterface.note_progress, progress, sender)
            if not isinstance(reply, Unreachable):
                self._told, self._told_at = said, now
        except Exception:  # a job need not end because nobody sees how far it is
            logger.exception("%s: how far it is did not reach the Controller", self._place.order.attempt)


def pause_s(job_tasks: int) -> float:
    """Return the seconds between two looks at a gang of a job with so many tasks in all."""
    return min(max(LOOK_S, job_tasks / TASKS_A_SECOND), LOOK_AT_LEAST_S)


def summed_up(
    attempt: AttemptId, progress: Mapping[TaskKey, Progress], marks: Marks, stragglers: tuple[str, ...]
) -> GangProgress:
    """Return what people are shown of what an attempt's tasks have said."""
    ages = [found.age for found in progress.values() if found.age is not None]
    steps = [found.step for found in progress.values() if found.step is not None]
    words = (progress[key].status for key in sorted(progress, key=_place))
    status = next(filter(None, words), None)
    return GangProgress(attempt, min(ages, default=None), max(steps, default=None), status, marks, stragglers)


def _place(key: TaskKey) -> tuple[int, int]:
    return key.slice_id, key.host_index
