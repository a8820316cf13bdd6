"""One gang on the user's side: runs the attempts that the Controller orders, and reports how they ended.

The Controller decides where the gang runs and whether it runs again. The gang chooses the error that the user sees.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any

from ray import cloudpickle
from ray.exceptions import RayTaskError

from iris_ray.actors.calls.background import BackgroundTasks
from iris_ray.actors.calls.controller_client import ControllerClient
from iris_ray.actors.pool.attempt import Attempt, Phase
from iris_ray.actors.pool.attempt_end import AttemptEnd
from iris_ray.actors.pool.launch import (
    ChipsInUse,
    LaunchFailed,
    MovedBeforeStart,
    NoVersionFits,
    OtherVersions,
    SecretNotReadable,
    SetupImpossible,
    silent_hosts,
)
from iris_ray.actors.pool.misfits import Misfits
from iris_ray.actors.pool.reserved_slices import ReservedSlices, SpareFailed
from iris_ray.actors.pool.services import PoolParts
from iris_ray.actors.protocol.controller_interface import ControllerInterface, ReportedEvent
from iris_ray.actors.protocol.messages import AttemptOrder, JobView, RunRequest
from iris_ray.actors.protocol.payloads import Pickled, PickledError
from iris_ray.errors import (
    ControllerUnavailableError,
    JobCancelledError,
    JobUnschedulableError,
    LaunchesFailedError,
    PreemptedTooManyTimesError,
    RemoteUserError,
    TaskCrashedError,
    TaskOutOfMemoryError,
    TaskSetupError,
    UnknownNameError,
    VersionMismatchError,
)
from iris_ray.model.jobs import MOST_FAILED_LAUNCHES
from iris_ray.model.lifecycle import JobState, TaskState
from iris_ray.model.notices import OUR_MOVES, Notice
from iris_ray.model.outcomes import RunErrorKind, TpuCancelled, TpuPreempted, TpuResult, TpuRunError, TpuSuccess
from iris_ray.model.tracebacks import SeenTracebacks, as_seen, last_lines
from iris_ray.model.verdict import Verdict
from iris_ray.state.events import (
    AttemptMarkedEvent,
    GangMovedEvent,
    GangReturnedEvent,
    SliceReleasedEvent,
    TaskDispatchFailedEvent,
    TaskStateChangedEvent,
    WorkerBlamedEvent,
    WorkerSuspectedEvent,
    all_reached,
    attempt_over,
)

logger = logging.getLogger(__name__)

FIRST_WORD_S, REPEAT_S = 2.0, 30.0
"""A waiting job logs after the first time why it waits, and repeats it at the second interval."""
RESULTS_FIRST_S = 0.01
"""The pause between a gang's success and the end of its processes, which would delay the results on few cores."""
NO_RETRIES = "to end at the first failure instead: --max-retries-failure 0, or max_retries_failure=0 in Python"
EXIT_WORD_S = 2.0
"""The time after which a successful job logs that its processes have not ended yet."""


class GangRun:
    """Runs one gang through as many attempts as the Controller orders.

    Args:
        slices: its attempts run on these.
        controller: gives orders, and is told how attempts end.
        services: the parts of services in this pool.
        request: the job.
        number: the gang's index among those of its job.
        changed: called when an attempt has started its tasks, and as soon as these have ended.
        seen: the tracebacks of the job that its user has seen.

    Attributes:
        attempt: the latest attempt, which may be over.
        returned: whether all its tasks have returned.
    """

    def __init__(
        self,
        slices: ReservedSlices,
        controller: ControllerClient,
        services: PoolParts,
        request: RunRequest,
        number: int,
        changed: Callable[[], None],
        seen: SeenTracebacks,
    ) -> None:
        self.job_id = request.spec.job_id
        self.returned = False
        self._number = number
        self._changed = changed
        self._seen = seen
        kind = "slice" if request.spec.coscheduling else "task"
        self._who = self.job_id if request.spec.is_one_gang else f"{self.job_id}/{kind}-{number}"
        self._orders: asyncio.Queue[AttemptOrder | None] = asyncio.Queue()
        self._slices = slices
        self._controller = controller
        self._services = services
        self._request = request
        self.attempt: Attempt | None = None
        self._taken = 0  # orders up to this attempt have come, some of them twice
        self._told: tuple[int, Notice] | None = None  # the latest notice, and the number of its attempt
        self._refused = 0  # attempts up to this number were stopped, perhaps before they began
        self._suspected: dict[str, str] = {}  # why hosts may be at fault for the end before, by node id
        self._setup_failed = False  # the latest launch found no host that could set up the job's environment
        self._other_version = False  # the latest launch failed because the hosts' iris_ray does not go with ours
        self._misfits = Misfits()
        self._background, self._spares = BackgroundTasks(), BackgroundTasks()

    async def run(self) -> list[Any] | Exception:
        """Run the gang to its end. Return its results by rank, or the error that ends it for good."""
        while True:
            order = await self._next_order()
            if order is None:
                view = await self._report([])
                if view.state.finished:
                    return self._final_error(None, view)
                continue
            if order.attempt.number <= self._refused:
                continue
            verdict, job = await self._run_attempt(order)
            if verdict is not None and verdict.succeeded:
                ordered = (verdict.results[key] for key in sorted(verdict.results))
                return [Pickled(result.result) for result in ordered if isinstance(result, TpuSuccess)]
            if job is not None and job.state.finished:
                return self._final_error(verdict, job)

    @property
    def running(self) -> Attempt | None:
        """The attempt whose tasks run now, or None."""
        return self.attempt if self.attempt is not None and self.attempt.phase is Phase.RUNNING else None

    def take(self, order: AttemptOrder) -> None:
        """Queue an order, unless it has come before."""
        if order.attempt.number > self._taken:
            self._taken = order.attempt.number
            self._orders.put_nowait(order)

    def wake(self) -> None:
        """Note that the Controller has ended the job."""
        self._orders.put_nowait(None)

    async def settled(self) -> None:
        """Wait until the gang has reported all events."""
        await self._background.all_ended()

    def notify(self, attempt: int, notice: Notice) -> None:
        """Take a notice that the gang is to move. It may come before the order of its attempt."""
        if self._told is None or attempt >= self._told[0]:
            self._told = attempt, notice
        if self.attempt is not None and self.attempt.id.number == attempt:
            self.attempt.notify(notice)

    def hold_spare(self, order: AttemptOrder) -> None:
        """Begin to hold slices ready for this gang, as the Controller orders."""
        self._spares.start(self._hold_spare(order), f"holding the spare {order.attempt.job_id}")

    async def _hold_spare(self, order: AttemptOrder) -> None:
        """Hold slices ready, and report whether they are."""
        try:
            await self._slices.hold_ready(
                order, self._request.process, self._request.keep_warm, self._request.host_silence
            )
            hosts = range(order.hosts_per_slice * len(order.slices))
            events: list[ReportedEvent] = [*all_reached(order.attempt, hosts, TaskState.RUNNING)]
        except SpareFailed as failure:
            logger.info("%s: %s", order.attempt.job_id, failure)
            events = self._spare_failed(order, str(failure), failure.broken)
        except Exception as error:
            logger.exception("%s could not be held ready", order.attempt.job_id)
            events = self._spare_failed(order, f"{type(error).__name__}: {error}", ())
        await self._controller.report(None, events)

    def _spare_failed(self, order: AttemptOrder, why: str, broken: tuple[str, ...]) -> list[ReportedEvent]:
        """Give broken slices back. Return the events for the Controller, which may try again."""
        failed: list[ReportedEvent] = [TaskDispatchFailedEvent(order.attempt, why, 0.0, broken)]
        return attempt_over(order.attempt, failed, self._slices.retire(broken))

    async def stop_attempt(self, number: int, reason: str) -> None:
        """End an attempt if it runs; else keep it from starting. Return when it is over."""
        self._refused = max(self._refused, number)
        if self.attempt is not None and self.attempt.id.number <= number:
            self.attempt.stop(reason)
            await self.attempt.over.wait()

    # -- talking to the Controller ---------------------------------------------------------------------------------

    async def _report(self, events: Sequence[ReportedEvent]) -> JobView:
        view = await self._controller.report(self.job_id, events, self._number)
        if view is None:
            raise ControllerUnavailableError(
                f"the Controller was restarted and does not know job {self.job_id}; run it again"
            )
        return view

    async def _next_order(self) -> AttemptOrder | None:
        """Return the Controller's next order; None if the job has ended. Log from time to time why the gang waits."""
        patience = FIRST_WORD_S
        while True:
            try:
                async with asyncio.timeout(patience):
                    return await self._orders.get()
            except TimeoutError:
                patience = REPEAT_S
                if (await self._report([])).state.finished:  # the Controller's call that says so was lost
                    return None
                why = await self._controller.ask(ControllerInterface.why, self.job_id)
                logger.info("%s: %s", self._who, why)

    # -- attempts --------------------------------------------------------------------------------------------------

    async def _run_attempt(self, order: AttemptOrder) -> tuple[Verdict | None, JobView | None]:
        """Run one attempt. Return its verdict (None if it did not start) and the job's state (None after success)."""
        attempt = self.attempt = Attempt(self._slices, self._controller, self._services, self._request, order)
        if self._told is not None and self._told[0] == order.attempt.number:  # the notice was faster than the order
            attempt.notify(self._told[1])
        try:
            if not self._slices.has_fitted:
                self._misfits.require_others(attempt.place)
            if not self._slices.is_warm(order, self._request.process):
                logger.info("%s attempt %d: starting processes on %s", self._who, attempt.id.number, attempt.place)
            launches = await attempt.prepare(self._suspected)
            self._suspected, self._setup_failed = {}, False
            logger.info("%s attempt %d on %s", self._who, attempt.id.number, attempt.place)
            end = await attempt.run(launches, lambda: self._report_running(attempt), self._changed)
            verdict = end.verdict
            if verdict.succeeded:  # return the results at once, and tidy up later
                self.returned = True
                self._changed()
                self._background.start(self._tidy(attempt), f"tidying up after {attempt.id}")
                return verdict, None
            job = await self._conclude(attempt, end)
        except LaunchFailed as failure:
            verdict, job = None, await self._give_back(attempt, failure)
        attempt.over.set()
        return verdict, job

    def _report_running(self, attempt: Attempt) -> None:
        self._background.start(
            self._report(self._changes(attempt, TaskState.RUNNING)), f"reporting that {attempt.id} runs"
        )

    async def _tidy(self, attempt: Attempt) -> None:
        look = attempt.progress.look_again(has_failed=False)
        await asyncio.wait({self._background.start(look, f"asking how far {attempt.id} was")})
        ending = self._background.start(self._let_exit(attempt), f"ending the processes of {attempt.id}")
        try:
            job = await self._report([*_marked(attempt), *self._changes(attempt, TaskState.SUCCEEDED)])
            if not job.state.finished:  # it had taken the attempt back for a lost host, and would run it again
                await self._report([GangReturnedEvent(attempt.id)])
        except Exception:
            logger.exception("%s succeeded, but the Controller could not be told", self._who)
        try:
            await ending
            released = self._free(attempt)
            await self._report(attempt_over(attempt.id, released=released))
        except Exception:
            logger.exception("%s succeeded, but tidying up after it failed", self._who)
        finally:
            attempt.over.set()

    async def _let_exit(self, attempt: Attempt) -> None:
        """End the processes of an attempt that has succeeded. Log if threads or exit handlers take long."""
        if attempt.place.on_slices:
            await asyncio.sleep(RESULTS_FIRST_S)
        ending = asyncio.ensure_future(attempt.shutdown.stop_all(None))
        await asyncio.wait({ending}, timeout=EXIT_WORD_S)
        if not ending.done():
            logger.info(
                "%s: all tasks have returned. Threads or exit handlers still run on %s, for exit_grace=%g s at most",
                *(self._who, attempt.place, self._request.exit_grace),
            )
        await ending

    async def _conclude(self, attempt: Attempt, end: AttemptEnd) -> JobView:
        """Tidy up after a failure. Then report the first cause, and that every process is gone."""
        verdict = end.verdict
        assert verdict.cause is not None
        released = self._free(attempt)
        error = f"{attempt.place.in_words(verdict.cause)}: {getattr(verdict.result, 'error', '')}"
        suspicions = self._suspicions(end, error)
        self._suspected = {event.node_id: event.reason for event in suspicions}
        events: list[ReportedEvent] = [*suspicions]
        moved_by_us = end.moved_for is not None and end.moved_for.kind in OUR_MOVES
        if moved_by_us:
            events.append(GangMovedEvent(attempt.id, error))
        elif end.never_started:
            at_fault = (attempt.place.name(verdict.cause),)
            events.append(TaskDispatchFailedEvent(attempt.id, error, 0.0, at_fault, end.is_failed_launch))
        else:
            events += self._changes(attempt, TaskState.RUNNING)  # it may not have been reported yet
            index = attempt.place.task_index(verdict.cause)
            ended = TaskStateChangedEvent(
                attempt.id, index, verdict.charged_as, error, end.exit_code, is_hang=end.is_hang
            )
            events.append(ended)
        job = await self._report(attempt_over(attempt.id, [*_marked(attempt), *events], released))
        is_free = (moved_by_us or attempt.evicted or end.never_started) and job.state is not JobState.WORKER_FAILED
        count = "free of charge" if is_free else self._charge(verdict, job)
        outcome = f"job {job.state.name}" if job.state.finished else "trying again"
        self._log_end(attempt, verdict.result, error, f"{count}; {outcome}", job.state.finished)
        return job

    def _log_end(self, attempt: Attempt, result: TpuResult, error: str, cost: str, is_last: bool) -> None:
        """Log why an attempt has failed, with its traceback unless it was logged before.

        The caller gets the last attempt's traceback, so that one is not logged.
        """
        who = f"{self._who} attempt {attempt.id.number}"
        if not isinstance(result, TpuRunError):
            logger.info("%s ended: %s: %s [%s]", who, type(result).__name__, error, cost)
            return
        earlier, is_first = self._seen.earlier(result.traceback), not self._seen
        lines = [f"{who} ended: {result.kind.value}: {error}{f' (as {earlier})' if earlier else ''} [{cost}]"]
        if not is_last:
            self._seen.note(result.traceback, who)
            lines += last_lines(result.traceback) if result.traceback and not earlier else []
            lines += [f"{who}: {NO_RETRIES}"] * is_first
        logger.info("%s", "\n".join(lines))

    def _suspicions(self, end: AttemptEnd, error: str) -> list[WorkerSuspectedEvent | WorkerBlamedEvent]:
        """Return events that name the hosts that may be lost, and the host that may be at fault."""
        events: list[WorkerSuspectedEvent | WorkerBlamedEvent] = [
            WorkerSuspectedEvent(node, why, now=0.0) for node, why in end.suspects.items()
        ]
        is_own_doing = not isinstance(end.verdict.result, (TpuPreempted, TpuCancelled))  # a signal may answer a notice
        if is_own_doing and (blamed := end.blamed_host) is not None:
            events.append(WorkerBlamedEvent(blamed[0], self.job_id, error, blamed[1]))
        return events

    def _charge(self, verdict: Verdict, job: JobView) -> str:
        """Return in words which retry budget pays for the attempt."""
        if verdict.charged_as is TaskState.FAILED:
            noun, count, allowed = "failure", job.failures, self._request.spec.max_retries_failure
        else:
            noun, count, allowed = "preemption", job.preemptions, self._request.spec.max_retries_preemption
        left = max(0, allowed + 1 - count)
        return f"{noun} {count}, {left:,} {'retry' if left == 1 else 'retries'} left"

    async def _give_back(self, attempt: Attempt, failure: LaunchFailed) -> JobView:
        """Return the gang to the queue, since no task ran, and the slices that were at fault to Ray."""
        logger.info("%s attempt %d did not start: %s", self._who, attempt.id.number, failure)
        broken = failure.broken
        suspects = {**broken.unfit, **await silent_hosts(attempt.place, self._slices, broken.silent)}
        no_version_fits = isinstance(failure, NoVersionFits) and not await self._job_has_run()
        released = self._free(attempt, broken.names if attempt.place.on_slices else attempt.place.names)
        reason = str(failure)
        events: list[ReportedEvent] = [WorkerSuspectedEvent(node_id, why, now=0.0) for node_id, why in suspects.items()]
        events += [WorkerBlamedEvent(node, self.job_id, why, fault) for node, (why, fault) in broken.blamed.items()]
        can_not_be_set_up = isinstance(failure, SetupImpossible) and (failure.is_certain or self._setup_failed)
        if can_not_be_set_up or no_version_fits:
            first = attempt.place.order.first_task
            events.append(TaskStateChangedEvent(attempt.id, first, TaskState.FAILED, reason, is_hopeless=True))
        elif isinstance(failure, MovedBeforeStart):
            events.append(GangMovedEvent(attempt.id, reason, started=False))
        else:
            counts = self._misfits.note(failure) and not isinstance(failure, ChipsInUse)
            blames = not isinstance(failure, SecretNotReadable)
            events.append(TaskDispatchFailedEvent(attempt.id, reason, 0.0, broken.names, counts, blames))
        self._setup_failed = isinstance(failure, SetupImpossible)  # one host alone is no evidence
        self._other_version = isinstance(failure, OtherVersions)
        if isinstance(failure, NoVersionFits):
            self._misfits = Misfits()  # a job that has run goes on trying: the hosts may get its version
        job = await self._report(attempt_over(attempt.id, events, released))
        return job

    async def _job_has_run(self) -> bool:
        """Return whether any task of the job has run. An earlier process of this pool may have run it."""
        try:
            status = await self._controller.ask(ControllerInterface.job_status, self.job_id)
        except UnknownNameError:  # the report that follows says so
            return False
        return status.started_at is not None

    def _free(self, attempt: Attempt, broken: Sequence[str] | None = None) -> list[SliceReleasedEvent]:
        """Give the places back that it leaves, and let the next attempt use the others. Return the events that say so.

        Args:
            attempt: has ended.
            broken: the slices that could not be used; None: its shutdown knows what it leaves.

        Both the end of the attempt and `abandon` may call this. The second call does nothing.
        """
        if attempt.phase is Phase.TIDY:
            return []
        shutdown = attempt.shutdown
        if broken is None:
            released = self._slices.retire(shutdown.leaving, whole=shutdown.whole)
        else:
            released = self._slices.retire(broken)
        self._slices.set_idle(attempt.place.names)
        attempt.phase = Phase.TIDY
        return released

    def _changes(self, attempt: Attempt, state: TaskState) -> list[TaskStateChangedEvent]:
        """Return one event per task of the attempt: the task has reached this state."""
        first = attempt.place.order.first_task
        return all_reached(attempt.id, range(first, first + attempt.place.num_hosts), state)

    async def abandon(self, reason: str) -> list[ReportedEvent]:
        """Stop the running attempt. Return the events to report behind the job's cancellation."""
        attempt, released = self.attempt, list[SliceReleasedEvent]()
        if attempt is None or attempt.over.is_set():
            return []
        if attempt.phase is not Phase.TIDY:
            await attempt.shutdown.stop_all(reason)
            released = self._free(attempt)
        return [*attempt_over(attempt.id, released=released)]

    def abandoned(self) -> None:
        """Note that the events of `abandon` were reported, so the attempt is over."""
        if self.attempt is not None:
            self.attempt.over.set()

    def _final_error(self, verdict: Verdict | None, job: JobView) -> Exception:
        if job.state is JobState.KILLED:
            return JobCancelledError(f"job {self._who} was cancelled: {job.error}")
        if job.state is JobState.SUCCEEDED:  # the pool's process before this one had the results
            return JobCancelledError(f"{self._who} had succeeded, but its results were lost when the job ended")
        if job.state is JobState.UNSCHEDULABLE:
            why = f"job {self._who} was given up: {job.error}"
            gave_up = job.failed_launches >= MOST_FAILED_LAUNCHES
            return LaunchesFailedError(why) if gave_up else JobUnschedulableError(why)
        if job.state is JobState.WORKER_FAILED:
            return PreemptedTooManyTimesError(
                f"job {self._who} was preempted too many times: it lost its hosts {job.preemptions} times, and"
                f" max_retries_preemption is {self._request.spec.max_retries_preemption}. The last cause: {job.error}"
            )
        if verdict is None:
            kind = VersionMismatchError if self._other_version else TaskSetupError
            return kind(f"job {self._who} could not start its tasks: {job.error}")
        earlier = self._seen.earlier(getattr(verdict.result, "traceback", ""))
        return failure_error(self._request.spec.name, self._who, job.error or "", verdict.result, earlier)


def _marked(attempt: Attempt) -> list[ReportedEvent]:
    """Return an event with the times of the attempt's steps, if it has named any step."""
    return [AttemptMarkedEvent(attempt.id, attempt.progress.marks)] if attempt.progress.marks.steps else []


def failure_error(name: str, who: str, why: str, result: TpuResult, earlier: str | None = None) -> Exception:
    """Return the error that a caller gets if a job has failed by itself.

    Args:
        name: the job's name.
        who: the id of the job or of its task.
        why: which task was the first cause, and how it ended.
        result: that task's outcome.
        earlier: an attempt that ended with the same traceback, which the user has seen.
    """
    if isinstance(result, TpuRunError) and result.traceback:
        payload = result.exception or cloudpickle.dumps(RemoteUserError(result.error))
        trace = as_seen(earlier, result.traceback) if earlier else result.traceback
        where = f"{why}\n{trace}"  # which task it was, then its own traceback
        error: Exception = RayTaskError(name, where, PickledError(payload))
        return error
    no_memory = isinstance(result, TpuRunError) and result.kind is RunErrorKind.OUT_OF_MEMORY
    return (TaskOutOfMemoryError if no_memory else TaskCrashedError)(f"job {who} failed: {why}")
