"""One job on the user's side: its gangs, side by side, from its submission to its results."""

import asyncio
import logging
from dataclasses import replace
from typing import Any

import ray

from iris_ray.actors.controller_client import ControllerClient
from iris_ray.actors.gang_run import GangRun
from iris_ray.actors.messages import AttemptOrder, RunRequest
from iris_ray.actors.slice_pool import SlicePool
from iris_ray.errors import JobCancelledError
from iris_ray.events import JobCancelledEvent

logger = logging.getLogger(__name__)


class JobRun:
    """Runs one request: as one gang if it is coscheduled, else as one for every task.

    Args:
        slices, controller: as for `GangRun`.
        request: the job.
        accepted: set to True when the Controller has it.
    """

    def __init__(
        self,
        slices: SlicePool,
        controller: ControllerClient,
        request: RunRequest,
        accepted: "asyncio.Future[bool]",
    ) -> None:
        request = replace(request, spec=replace(request.spec, owner=slices.owner))
        self.job_id = request.spec.job_id
        self._controller = controller
        self._spec = request.spec
        first_tasks = range(1 if self._spec.coscheduling else self._spec.replicas)
        self._accepted = accepted
        self._gangs = [GangRun(slices, controller, request, index) for index in first_tasks]

    async def run(self) -> list[Any]:
        """Returns the tasks' results by index, or raises the job's own error."""
        runs: list[asyncio.Task[list[Any] | Exception]] = []
        try:
            await self._controller.ask("submit", self._spec, ray.get_runtime_context().current_actor)
            self._accepted.set_result(True)
            runs = [asyncio.ensure_future(gang.run()) for gang in self._gangs]
            outcomes = await asyncio.gather(*runs)
        except BaseException as error:
            cancelled = isinstance(error, asyncio.CancelledError)
            reason = "cancelled by its owner" if cancelled else f"iris_ray failed: {type(error).__name__}: {error}"
            await asyncio.shield(asyncio.ensure_future(self._cancel(runs, reason)))
            raise
        if errors := [outcome for outcome in outcomes if isinstance(outcome, Exception)]:
            # Those that were only ended with the job do not say why it ended.
            raise next((error for error in errors if not isinstance(error, JobCancelledError)), errors[0])
        return [result for results in outcomes if isinstance(results, list) for result in results]

    def take(self, order: AttemptOrder) -> None:
        """Have an order carried out, unless it has come before."""
        self._gangs[order.first_task].take(order)

    def wake(self) -> None:
        """The job is over, by the Controller's decision."""
        for gang in self._gangs:
            gang.wake()

    async def settled(self) -> None:
        """Returns when everything has been reported."""
        await asyncio.gather(*(gang.settled() for gang in self._gangs))

    async def stop_attempt(self, first_task: int, number: int, reason: str) -> None:
        """End that attempt of a gang, or keep it from starting; returns when it is over."""
        await self._gangs[first_task].stop_attempt(number, reason)

    async def _cancel(self, runs: list["asyncio.Task[Any]"], reason: str) -> None:
        """Stop what runs and take the job from the queue. Never raises: the reason for it is what the user gets."""
        for run in runs:
            run.cancel()
        await asyncio.gather(*runs, return_exceptions=True)
        try:
            ends = await asyncio.gather(*(gang.abandon(reason) for gang in self._gangs))
            events = [JobCancelledEvent(self.job_id, reason), *(event for end in ends for event in end)]
            await self._controller.ask("report", self.job_id, events)
        except Exception:
            logger.exception("%s: cancelling it failed", self.job_id)
        finally:
            for gang in self._gangs:
                gang.abandoned()
