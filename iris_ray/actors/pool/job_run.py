"""One job on the user's side: its gangs, side by side, from its submission to its results."""

import asyncio
import logging
import secrets
from collections.abc import Sequence
from typing import Any

import ray

from iris_ray.actors.calls.background import BackgroundTasks
from iris_ray.actors.calls.controller_client import ControllerClient
from iris_ray.actors.pool.attempt import Attempt
from iris_ray.actors.pool.gang_run import GangRun
from iris_ray.actors.pool.reserved_slices import ReservedSlices
from iris_ray.actors.pool.services import PoolParts
from iris_ray.actors.pool.slice_actor import SliceActor
from iris_ray.actors.protocol.controller_interface import ControllerInterface
from iris_ray.actors.protocol.messages import RunRequest
from iris_ray.errors import (
    InvalidRequestError,
    JobCancelledError,
    LimitReachedError,
    NotPermittedError,
    ResultsLostError,
    SecretStoreError,
)
from iris_ray.model.lifecycle import JobState
from iris_ray.model.membership import Membership
from iris_ray.model.options import EACH_SLICE
from iris_ray.model.tracebacks import SeenTracebacks
from iris_ray.state.events import JobCancelledEvent

logger = logging.getLogger(__name__)

REFUSED = (InvalidRequestError, LimitReachedError, NotPermittedError, SecretStoreError)
"""The errors with which the Controller refuses a job."""
TELL_AGAIN_S = 0.1
"""The pause before tasks are told again that could not be told: their processes may be just starting."""


class JobRun:
    """Runs one request: as one gang if it is coscheduled, or one for every slice, else as one for every task.

    Args:
        slices, controller: as for `GangRun`.
        request: the job.
        accepted: set to True when the Controller has the job.
        incarnation: the number of this process among those of the pool.

    Attributes:
        request: the job.
        gangs: its gangs, by number. The pool hands them what the Controller says about them.
    """

    def __init__(
        self,
        slices: ReservedSlices,
        controller: ControllerClient,
        services: PoolParts,
        request: RunRequest,
        accepted: "asyncio.Future[bool]",
        incarnation: int,
    ) -> None:
        self.job_id = request.spec.job_id
        self._controller = controller
        self.request = request
        self._spec = request.spec.owned_by(slices.owner)
        self._accepted = accepted
        self._incarnation = incarnation
        numbers = range(self._spec.num_gangs)
        seen = SeenTracebacks()
        self.gangs = [GangRun(slices, controller, services, request, number, self._changed, seen) for number in numbers]
        self._membership = Membership(0, token=secrets.token_hex(16))
        self._background = BackgroundTasks()

    async def run(self) -> list[Any]:
        """Return the tasks' results by index, or raise the job's own error.

        If ``max_task_failures`` lets a job succeed though some tasks failed, their errors stand in the places of their
        results.
        """
        runs: list[asyncio.Task[list[Any] | Exception]] = []
        try:
            await self._submit()
            runs = [asyncio.ensure_future(gang.run()) for gang in self.gangs]
            outcomes = await asyncio.gather(*runs)
            failed = any(isinstance(outcome, Exception) for outcome in outcomes) and not await self._has_succeeded()
        except BaseException as error:
            if isinstance(error, REFUSED) and not self._accepted.done():
                raise  # the Controller has refused this job; a job with the same id is another one, so cancel nothing
            cancelled = isinstance(error, asyncio.CancelledError)
            reason = "cancelled by its owner" if cancelled else f"iris_ray failed: {type(error).__name__}: {error}"
            await asyncio.shield(asyncio.ensure_future(self._cancel(runs, reason)))
            raise
        if failed:
            raise _telling_error([outcome for outcome in outcomes if isinstance(outcome, Exception)])
        per_gang = max(len(outcome) for outcome in outcomes if isinstance(outcome, list))
        in_places = (outcome if isinstance(outcome, list) else [outcome] * per_gang for outcome in outcomes)
        return [result for outcome in in_places for result in outcome]

    def _changed(self) -> None:
        """Note that a gang has started or ended its tasks. If each slice is a gang, tell all that run which these are.

        Returns at once.
        """
        if self._spec.failure_domain != EACH_SLICE:
            return
        running = {i: gang.running for i, gang in enumerate(self.gangs)}
        now = {i: attempt.id.number for i, attempt in running.items() if attempt is not None}
        known = self._membership
        stay = {i: number for i, number in known.running.items() if now.get(i) == number}
        returned = frozenset(i for i, gang in enumerate(self.gangs) if gang.returned)
        self._membership = Membership(known.epoch + 1, stay | now, returned, known.token)
        for i, attempt in running.items():
            if attempt is not None:
                telling = self._tell_membership(self.gangs[i], attempt, self._membership)
                self._background.start(telling, f"telling {attempt.id} which slices run")

    async def _tell_membership(self, gang: GangRun, attempt: Attempt, membership: Membership) -> None:
        """Tell the tasks of an attempt, again and again until all have heard it or there is something newer to tell."""
        while self._membership is membership and gang.running is attempt:
            if all(await attempt.context.ask(SliceActor.hear_membership, attempt.id, membership)):
                return
            await asyncio.sleep(TELL_AGAIN_S)

    def is_warm_for(self, request: RunRequest) -> bool:
        """Return whether the slices that this job leaves will be warm for that request."""
        mine, spec = self.request, self._spec
        is_alike = (spec.device, mine.process) == (request.spec.device, request.process)
        return is_alike and mine.keep_warm > 0 and spec.requirement.chips > 0

    async def settled(self) -> None:
        """Wait until all gangs have reported all events."""
        await asyncio.gather(*(gang.settled() for gang in self.gangs))

    async def _submit(self) -> None:
        """Submit the job to the Controller, unless the Controller has it already."""
        pool = ray.get_runtime_context().current_actor
        state = await self._controller.ask(ControllerInterface.submit, self._spec, pool, self._incarnation)
        if not self._accepted.done():
            self._accepted.set_result(True)
        if state.finished:  # the job ended while the pool's process was restarted
            for gang in self.gangs:
                gang.wake()
        if state is JobState.SUCCEEDED:
            raise ResultsLostError(
                f"job {self.job_id} has succeeded, but its results were lost with the process that had them; files"
                " that it wrote are still there. Run it again if you need what it returned"
            )

    async def _has_succeeded(self) -> bool:
        """Return whether the job has succeeded though a gang has failed. All gangs have ended."""
        if self._spec.max_task_failures is None:
            return False  # any gang that fails ends the job
        view = await self._controller.report(self.job_id, [])
        return view is not None and view.job_state is JobState.SUCCEEDED

    async def _cancel(self, runs: list["asyncio.Task[Any]"], reason: str) -> None:
        """Stop all gangs and cancel the job at the Controller. Raise nothing: the user gets the error that led here."""
        for run in runs:
            run.cancel()
        await asyncio.gather(*runs, return_exceptions=True)
        try:
            ends = await asyncio.gather(*(gang.abandon(reason) for gang in self.gangs))
            events = [JobCancelledEvent(self.job_id, reason), *(event for end in ends for event in end)]
            await self._controller.report(self.job_id, events)
        except Exception:
            logger.exception("%s: cancelling it failed", self.job_id)
        finally:
            for gang in self.gangs:
                gang.abandoned()


def _telling_error(errors: Sequence[Exception]) -> Exception:
    """Return the first error that says why the job ended. Skip gangs that were only cancelled with the job."""
    return next((error for error in errors if not isinstance(error, JobCancelledError)), errors[0])
