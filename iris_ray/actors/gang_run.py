"""One job from submission to its last attempt's end, on the user's side.

The Controller decides where and whether; this decides nothing but what happened. An attempt is a fixed sequence:
hold the slices → prepare every host → start every task → wait → gather evidence → stop everybody → judge → report.
"""

import asyncio
import logging
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import cloudpickle
import ray
from ray.exceptions import RayTaskError

from iris_ray.actors.messages import AttemptOrder, JobView, RunRequest, TaskLaunch
from iris_ray.actors.resource_pool import ANSWER_TIMEOUT_S, Unreachable, answer
from iris_ray.constraints import AttributeValue, Constraint, ConstraintOp
from iris_ray.errors import (
    ControllerUnavailableError,
    IrisError,
    JobCancelledError,
    PreemptedTooManyTimesError,
    RemoteUserError,
    TaskCrashedError,
)
from iris_ray.events import (
    AttemptEndConfirmedEvent,
    Event,
    JobCancelledEvent,
    TaskDispatchFailedEvent,
    TaskStateChangedEvent,
)
from iris_ray.job_info import JobInfo
from iris_ray.jobs import TPU_TOPOLOGY, CoschedulingConfig, JobSpec, JobState, TaskState
from iris_ray.multislice import MultisliceInfo
from iris_ray.outcomes import EndKind, HostEvidence, TaskEnd, TaskKey, TpuRunError, TpuSuccess
from iris_ray.retry import Verdict, judge_gang

if TYPE_CHECKING:
    from iris_ray.actors.pool import SlicePoolManager

logger = logging.getLogger(__name__)

RESERVE_TIMEOUT_S = 10.0
"""How long Ray may take to reserve chips that the Controller believes to be free."""
START_TIMEOUT_S = 300.0
"""How long all hosts of a gang may take to start their processes (their runtime environment included)."""
REFILL_DELAY_S = 4.0
"""A gang that has run so long gets its next standbys; before, they would only compete with it."""
FIRST_WORD_S, REPEAT_S = 2.0, 30.0
"""When a waiting job says for the first time why it waits, and how often it repeats that."""


@dataclass(slots=True)
class Attempt:
    """One live incarnation of the gang."""

    order: AttemptOrder
    names: tuple[str, ...]
    stop_reason: "asyncio.Future[str]"
    over: asyncio.Event


class LaunchFailed(Exception):
    """The attempt could not be started whole. Names the slices that are to be dropped."""

    def __init__(self, reason: str, broken: tuple[str, ...]) -> None:
        super().__init__(reason)
        self.broken = broken


class GangRun:
    """Runs one request through as many attempts as its budgets allow."""

    def __init__(self, pool: "SlicePoolManager", request: RunRequest) -> None:
        self.job_id = f"{request.name}-{secrets.token_hex(4)}"
        self.orders: asyncio.Queue[AttemptOrder] = asyncio.Queue()
        self._pool = pool
        self._request = request
        self._attempt: Attempt | None = None
        self._refused = 0  # attempts up to this one were stopped before they began
        self._used_ports: frozenset[int] = frozenset()
        self._background: set[asyncio.Task[Any]] = set()

    async def run(self) -> list[Any]:
        """Returns the tasks' results, or raises the job's own error."""
        try:
            await self._submit()
            while True:
                order = await self._next_order()
                verdict, job = await self._run_attempt(order)
                if verdict is not None and verdict.succeeded:
                    return [Pickled(r.result) for _, r in sorted_results(verdict) if isinstance(r, TpuSuccess)]
                if job.state.finished:
                    raise self._final_error(verdict, job)
        except asyncio.CancelledError:
            await asyncio.shield(asyncio.ensure_future(self._cancel("cancelled by its owner")))
            raise

    async def stop_attempt(self, attempt: int, reason: str) -> None:
        """End that attempt if it runs, and keep it from starting if it does not; returns when it is over."""
        self._refused = max(self._refused, attempt)
        current = self._attempt
        if current is not None and current.order.attempt <= attempt:
            if not current.stop_reason.done():
                current.stop_reason.set_result(reason)
            await current.over.wait()

    # -- talking to the Controller ---------------------------------------------------------------------------------

    async def _submit(self) -> None:
        request = self._request
        spec = JobSpec(
            job_id=self.job_id,
            name=request.name,
            owner=self._pool.pool_id,
            replicas=request.hosts_per_slice,
            coscheduling=CoschedulingConfig(num_groups=request.num_slices),
            constraints=(Constraint(TPU_TOPOLOGY, ConstraintOp.EQ, AttributeValue(request.tpu_type)),),
            resources=self._bundle(),
            max_retries_failure=request.max_retries_failure,
            max_retries_preemption=request.max_retries_preemption,
        )
        await self._ask_controller("submit", spec, ray.get_runtime_context().current_actor)

    async def _report(self, events: list[Event]) -> JobView:
        view: JobView = await self._ask_controller("report", self.job_id, events)
        return view

    async def _ask_controller(self, method: str, *args: Any) -> Any:
        """Ask until the Controller answers: "unavailable" means "ask again", not "failed"."""
        for _ in range(12):
            assert self._pool.controller is not None
            reply = await answer(getattr(self._pool.controller, method).remote(*args), "the Controller", 10.0)
            if not isinstance(reply, Unreachable):
                return reply
            await asyncio.sleep(0.5)
        raise ControllerUnavailableError(f"{reply.reason}; job {self.job_id} can't go on without it")

    async def _next_order(self) -> AttemptOrder:
        """Wait for the Controller's order; say every so often why there is none."""
        patience = FIRST_WORD_S
        while True:
            try:
                order = await asyncio.wait_for(self.orders.get(), patience)
            except TimeoutError:
                patience = REPEAT_S
                why = await self._ask_controller("why", self.job_id)
                logger.info("%s is waiting: %s", self.job_id, why)
                continue
            if order.attempt > self._refused:
                return order

    # -- one attempt -----------------------------------------------------------------------------------------------

    async def _run_attempt(self, order: AttemptOrder) -> tuple[Verdict | None, JobView]:
        names = tuple(hosts[0].slice_name for hosts in order.slices)
        attempt = Attempt(order, names, asyncio.get_running_loop().create_future(), asyncio.Event())
        self._attempt = attempt
        logger.info(
            "%s attempt %d on %s (%d hosts)",
            self.job_id, order.attempt, ", ".join(names), sum(map(len, order.slices)),
        )  # fmt: skip
        try:
            try:
                launches = await self._prepare(attempt)
            except LaunchFailed as failure:
                return None, await self._give_back(attempt, failure)
            return await self._launch_and_judge(attempt, launches)
        finally:
            attempt.over.set()

    def _bundle(self) -> dict[str, float]:
        return {"TPU": float(self._request.chips_per_host), **self._request.resources}

    async def _prepare(self, attempt: Attempt) -> dict[str, list[TaskLaunch]]:
        """Get every host of every slice to the point where a task starts at once; the launches by slice name."""
        pool, request, order = self._pool, self._request, attempt.order
        pool.scale_multislice(order, self._bundle(), request.process, request.keep_warm)
        await pool.ready_standbys(attempt.names, request.process)
        ready = asyncio.ensure_future(self._ask_all_ready(attempt))
        refusal = asyncio.ensure_future(self._refusal(attempt))
        try:
            await asyncio.wait({ready, refusal, attempt.stop_reason}, return_when=asyncio.FIRST_COMPLETED)
            if attempt.stop_reason.done():
                raise LaunchFailed(attempt.stop_reason.result(), ())
            if refusal.done():
                raise refusal.result()
            answers = ready.result()
        finally:
            ready.cancel()
            refusal.cancel()
        broken = {n: a for n, a in answers.items() if isinstance(a, (Unreachable, BaseException))}
        if broken:
            reasons = "; ".join(a.reason if isinstance(a, Unreachable) else str(a) for a in broken.values())
            raise LaunchFailed(reasons, tuple(broken))
        return self._launches(attempt, answers[attempt.names[0]])

    async def _ask_all_ready(self, attempt: Attempt) -> dict[str, Any]:
        """Free ports on each slice's host 0 once every host could start at once, or why a slice can't."""
        calls = (
            self._pool.ask(name, "prepare", 3, self._used_ports, START_TIMEOUT_S, timeout_s=START_TIMEOUT_S + 5)
            for name in attempt.names
        )
        return dict(zip(attempt.names, await asyncio.gather(*calls, return_exceptions=True), strict=True))

    async def _refusal(self, attempt: Attempt) -> LaunchFailed:
        """Returns if Ray has not reserved the slices in time: somebody outside iris_ray was faster."""
        await asyncio.sleep(RESERVE_TIMEOUT_S)
        waiting = []
        for name in attempt.names:
            if not await asyncio.to_thread(self._pool.slices[name].group.wait, 0.01):
                waiting.append(name)
        if not waiting:
            await asyncio.Event().wait()  # reserved; the rest is a matter of starting processes
        return LaunchFailed(
            f"Ray did not reserve {', '.join(waiting)} within {RESERVE_TIMEOUT_S:g} s: its resources are in use outside"
            " iris_ray, or its hosts are going away",
            tuple(waiting),
        )

    def _launches(self, attempt: Attempt, ports: tuple[int, ...]) -> dict[str, list[TaskLaunch]]:
        """What each host gets, with an address for this attempt alone."""
        request, order = self._request, attempt.order
        self._used_ports |= set(ports)
        megascale_port, debug_port, coordinator_port = ports
        coordinator = order.slices[0][0].address
        per_slice, num_slices = request.hosts_per_slice, len(order.slices)
        launches: dict[str, list[TaskLaunch]] = {}
        for slice_id, hosts in enumerate(order.slices):
            multislice = MultisliceInfo(coordinator, slice_id, num_slices, megascale_port, debug_port)
            for host in hosts:
                index = slice_id * per_slice + host.worker_id
                info = JobInfo(
                    job_id=self.job_id,
                    task_id=f"{self.job_id}/task-{index}",
                    task_index=index,
                    num_tasks=per_slice * num_slices,
                    attempt=order.attempt,
                    slice_id=slice_id,
                    num_slices=num_slices,
                    slice_name=host.slice_name,
                    worker_id=host.worker_id,
                    coordinator_address=f"{coordinator}:{coordinator_port}",
                )
                label = f"{request.name} slice={slice_id} worker={host.worker_id}"
                launches.setdefault(host.slice_name, []).append(
                    TaskLaunch(request.function, request.env, info, multislice, request.num_cpus, label)
                )
        return launches

    async def _give_back(self, attempt: Attempt, failure: LaunchFailed) -> JobView:
        """Nothing ran. The gang goes back to the queue, the slices that were at fault go back to Ray."""
        logger.info("%s attempt %d did not start: %s", self.job_id, attempt.order.attempt, failure)
        number = attempt.order.attempt
        await self._stop_all(attempt, str(failure), skip=failure.broken)
        events: list[Event] = [*self._pool.retire(failure.broken)]
        await self._pool.set_idle(attempt.names, self._request.process)
        events.append(TaskDispatchFailedEvent(self.job_id, number, str(failure), now=0.0))  # the Controller's clock
        return await self._report([*events, AttemptEndConfirmedEvent(self.job_id, number)])

    async def _launch_and_judge(
        self, attempt: Attempt, launches: Mapping[str, list[TaskLaunch]]
    ) -> tuple[Verdict, JobView]:
        pool, number = self._pool, attempt.order.attempt
        calls = {
            asyncio.ensure_future(pool.ask(name, "run_remote_fn", launches[name], timeout_s=None)): name
            for name in attempt.names
        }
        self._in_background(self._report(self._all_tasks(attempt, TaskState.RUNNING)))
        refill = asyncio.get_running_loop().call_later(REFILL_DELAY_S, self._refill_later, attempt)
        try:
            ends = await self._until_end(attempt, calls)
        finally:
            refill.cancel()

        if all(end is not None and end.kind is EndKind.RETURNED for end in ends.values()):
            verdict = judge_gang(ends, dict.fromkeys(ends, HostEvidence()))
            job = await self._report(self._all_tasks(attempt, TaskState.SUCCEEDED))
            tidy = self._in_background(self._tidy(attempt))
            if self._request.keep_warm <= 0:
                await asyncio.wait({tidy})
            return verdict, job

        evidence = await self._gather_evidence(attempt)
        reason = attempt.stop_reason.result() if attempt.stop_reason.done() else "another task of the gang ended"
        lost = tuple(n for i, n in enumerate(attempt.names) if self._slice_is_lost(i, evidence))
        ends |= await self._stop_all(attempt, reason, skip=lost, known=ends)
        verdict = judge_gang(ends, evidence)
        return verdict, await self._conclude(attempt, verdict, lost, number)

    async def _conclude(self, attempt: Attempt, verdict: Verdict, lost: tuple[str, ...], number: int) -> JobView:
        """After a failure: tidy up, then tell the Controller the first cause and that everybody is gone."""
        events: list[Event] = [*self._pool.retire(lost)]
        cause = verdict.cause
        assert cause is not None
        index = cause.slice_id * self._request.hosts_per_slice + cause.worker_id
        where = f"slice {cause.slice_id} ({attempt.names[cause.slice_id]}) worker {cause.worker_id}"
        error = f"{where}: {getattr(verdict.result, 'error', '')}"
        events.append(TaskStateChangedEvent(self.job_id, index, number, verdict.charged_as, error))
        events.append(AttemptEndConfirmedEvent(self.job_id, number))
        job = await self._report(events)
        budget = (
            f"failures {job.failures} of {self._request.max_retries_failure} retries, "
            f"preemptions {job.preemptions} of {self._request.max_retries_preemption}"
        )
        outcome = "trying again" if not job.state.finished else job.state.name
        logger.info(
            "%s attempt %d ended: %s: %s [%s; %s]",
            self.job_id, number, type(verdict.result).__name__, error, budget, outcome,
        )  # fmt: skip
        await self._pool.set_idle(attempt.names, self._request.process)
        return job

    def _all_tasks(self, attempt: Attempt, state: TaskState) -> list[Event]:
        count = self._request.hosts_per_slice * len(attempt.names)
        return [TaskStateChangedEvent(self.job_id, i, attempt.order.attempt, state) for i in range(count)]

    async def _until_end(
        self, attempt: Attempt, calls: dict["asyncio.Future[Any]", str]
    ) -> dict[TaskKey, TaskEnd | None]:
        """Wait until all tasks have returned, one has not, or somebody wants the attempt to stop."""
        ends: dict[TaskKey, TaskEnd | None] = {}
        pending: set[asyncio.Future[Any]] = {*calls, attempt.stop_reason}
        while len(pending) > 1:
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for call in done - {attempt.stop_reason}:
                slice_id = attempt.names.index(calls[call])
                reply = call.result()
                hosts = range(self._request.hosts_per_slice)
                known = dict.fromkeys(hosts) if isinstance(reply, Unreachable) else reply
                ends |= {TaskKey(slice_id, worker): end for worker, end in known.items()}
            bad = any(end is None or end.kind is not EndKind.RETURNED for end in ends.values())
            if bad or attempt.stop_reason.done():
                break
        for call in pending - {attempt.stop_reason}:
            call.cancel()
        return {key: ends.get(key) for key in self._keys(attempt)}

    def _keys(self, attempt: Attempt) -> list[TaskKey]:
        return [TaskKey(s, w) for s in range(len(attempt.names)) for w in range(self._request.hosts_per_slice)]

    async def _gather_evidence(self, attempt: Attempt) -> dict[TaskKey, HostEvidence]:
        """Ask every host whether it is there, and the Controller what it has heard about them."""
        node_ids = [host.node_id for hosts in attempt.order.slices for host in hosts]
        controller = self._pool.controller
        assert controller is not None
        word, *replies = await asyncio.gather(
            answer(controller.evidence.remote(node_ids), "the Controller", ANSWER_TIMEOUT_S),
            *(self._pool.ask(name, "healthy") for name in attempt.names),
        )
        heard: dict[str, HostEvidence] = {} if isinstance(word, Unreachable) else word
        evidence = {}
        for slice_id, (hosts, reply) in enumerate(zip(attempt.order.slices, replies, strict=True)):
            for host in hosts:
                said = heard.get(host.node_id, HostEvidence())
                silent = reply.reason if isinstance(reply, Unreachable) else reply[host.worker_id]
                evidence[TaskKey(slice_id, host.worker_id)] = HostEvidence(said.lost or silent, said.draining)
        return evidence

    def _slice_is_lost(self, slice_id: int, evidence: Mapping[TaskKey, HostEvidence]) -> bool:
        """The slice is the unit of failure: one host lost or about to go, and it is worthless."""
        return any(e.lost or e.draining for key, e in evidence.items() if key.slice_id == slice_id)

    async def _stop_all(
        self,
        attempt: Attempt,
        reason: str | None,
        skip: tuple[str, ...] = (),
        known: Mapping[TaskKey, TaskEnd | None] | None = None,
    ) -> dict[TaskKey, TaskEnd | None]:
        """End all tasks and wait until their processes are gone; what each host says about the end."""
        held = [name for name in attempt.names if name not in skip and name in self._pool.slices]
        replies = await asyncio.gather(*(self._pool.ask(name, "stop", reason, timeout_s=20.0) for name in held))
        ends: dict[TaskKey, TaskEnd | None] = dict(known or {})
        for name, reply in zip(held, replies, strict=True):
            if not isinstance(reply, Unreachable):
                slice_id = attempt.names.index(name)
                ends |= {TaskKey(slice_id, w): end for w, end in reply.items() if end is not None}
        return ends

    async def _tidy(self, attempt: Attempt) -> None:
        """After success: the results are out; now the used processes go, and then the hosts are free."""
        await self._stop_all(attempt, None)
        await self._pool.set_idle(attempt.names, self._request.process)
        await self._report([AttemptEndConfirmedEvent(self.job_id, attempt.order.attempt)])

    def _refill_later(self, attempt: Attempt) -> None:
        for name in attempt.names:
            if held := self._pool.slices.get(name):
                held.needs_standbys = True
        self._in_background(self._pool.ready_standbys(attempt.names, self._request.process))

    def _in_background(self, work: Any) -> "asyncio.Task[Any]":
        task = asyncio.ensure_future(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task

    # -- the end ---------------------------------------------------------------------------------------------------

    async def _cancel(self, reason: str) -> None:
        attempt = self._attempt
        events: list[Event] = [JobCancelledEvent(self.job_id, reason)]
        if attempt is not None and not attempt.over.is_set():
            await self._stop_all(attempt, reason)
            await self._pool.set_idle(attempt.names, self._request.process)
        if attempt is not None:
            attempt.over.set()
            events.append(AttemptEndConfirmedEvent(self.job_id, attempt.order.attempt))
        await self._report(events)

    def _final_error(self, verdict: Verdict | None, job: JobView) -> Exception:
        if job.state is JobState.KILLED:
            return JobCancelledError(f"job {self.job_id} was cancelled: {job.error}")
        if job.state is JobState.WORKER_FAILED:
            return PreemptedTooManyTimesError(
                f"job {self.job_id} was preempted too many times: it lost its hosts {job.preemptions} times, and"
                f" max_retries_preemption is {self._request.max_retries_preemption}. The last cause: {job.error}"
            )
        result = verdict.result if verdict is not None else None
        if isinstance(result, TpuRunError) and result.traceback:
            cause: Exception = PickledError(result.exception or cloudpickle.dumps(RemoteUserError(result.error)))
            return RayTaskError(self._request.name, result.traceback, cause)
        return TaskCrashedError(f"job {self.job_id} failed: {job.error}")


def sorted_results(verdict: Verdict) -> list[tuple[TaskKey, Any]]:
    """Outcomes by slice id, then worker id."""
    return sorted(verdict.results.items(), key=lambda item: (item[0].slice_id, item[0].worker_id))


class Pickled:
    """A value that stays pickled in this process and is rebuilt where it arrives.

    The pool need not be able to import what user code can, and must not run it.
    """

    def __init__(self, payload: bytes) -> None:
        self._payload = payload

    def __reduce__(self) -> tuple[Any, ...]:
        return cloudpickle.loads, (self._payload,)


class PickledError(Exception):
    """A user's exception, pickled like `Pickled`."""

    def __init__(self, payload: bytes) -> None:
        super().__init__(payload)
        self._payload = payload

    def __reduce__(self) -> tuple[Any, ...]:
        return rebuild_error, (self._payload,)


def rebuild_error(payload: bytes) -> Exception:
    """The user's exception, or a stand-in where its class can't be imported."""
    try:
        error = cloudpickle.loads(payload)
    except Exception as why:
        return RemoteUserError(f"the task raised an exception that can't be rebuilt here: {why}")
    return error if isinstance(error, IrisError | Exception) else RemoteUserError(repr(error))
