"""Tells the Controller which of the jobs that have hosts for slots it may give to others."""

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from ray.exceptions import RayError

from iris_ray.actors.calls.actor import Actor
from iris_ray.actors.protocol.controller_interface import ControllerInterface
from iris_ray.actors.slots.runners import RunnerHere
from iris_ray.actors.wire.controller_connection import find_controller
from iris_ray.slots.idle_runners import idle_runners, needs_room
from iris_ray.slots.reconciler import Reconciler

LOOK_S = 1.0
"""How often it is looked which runners are idle."""
ANSWER_S = 10.0
logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Yielding:
    """See the module.

    Args:
        core: knows which runners are idle.
        runners: those that are there, by id.
        jobs: ids of the jobs.
        user: in whose name.
    """

    core: Reconciler
    runners: Mapping[str, RunnerHere]
    jobs: Collection[str]
    user: str
    _said: dict[str, bool] = field(default_factory=dict)

    async def report(self, now: Callable[[], float]) -> None:
        """Report what has changed, for ever."""
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                await self.report_changes(now())
            except (RayError, TimeoutError) as error:
                why = str(error) or f"it did not answer within {ANSWER_S:g} s"
                logger.warning("the Controller could not be told which hosts of slots are idle: %s", why)
            except Exception:  # a user's rule of when slots are stale may raise; other rules are looked at again
                logger.exception("it can't be said which hosts of slots are idle; they stay where they are")

    async def report_changes(self, now: float) -> None:
        """Report what has changed. After an error all of it is said again: it may have arrived all the same."""
        found = self._found(now)
        changed = {job_id: yields for job_id, yields in found.items() if self._said.get(job_id) != yields}
        for job_id in changed:
            self._said.pop(job_id, None)
        if changed:
            async with asyncio.timeout(ANSWER_S):
                await self._tell(changed)
            self._said |= changed

    async def _tell(self, changed: Mapping[str, bool]) -> None:
        controller = await asyncio.to_thread(find_controller)
        if controller is None:
            raise TimeoutError("no Controller runs; the next job starts one")
        await Actor[ControllerInterface](controller).call(ControllerInterface.set_yielding, changed, self.user)

    def _found(self, now: float) -> dict[str, bool]:
        """Return of each job whether it yields: all of its runners are idle; or it has none, and none is needed."""
        if needs_room(self.core):
            return dict.fromkeys(self.jobs, False)
        busy_ids = self.runners.keys() - idle_runners(self.core, now)
        busy = {self.runners[runner_id].job_id for runner_id in busy_ids}
        return {job_id: job_id not in busy for job_id in self.jobs}
