"""`IrisClient`: jobs of any kind on a shared cluster, and everything that one may want to know about them."""

import concurrent.futures
import contextlib
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import ray
from ray.exceptions import RayTaskError

from iris_ray.actors.wire.controller_connection import RESTART_S, ControllerConnection
from iris_ray.actors.wire.messages import RunRequest
from iris_ray.actors.wire.status import JobStatus, TaskStatus, WorkerStatus
from iris_ray.actors.wire.task_log import TaskLog, printable
from iris_ray.client.connection import connect
from iris_ray.client.log_stream import FIRST_WORD_S, REPEAT_S, stream_logs
from iris_ray.client.submission import (
    KEEP_WARM_S,
    REPEATED,
    current_user,
    identified,
    make_job,
    of_type,
    pool_of_this_process,
    require_cluster,
    slices_of,
    submit_detached,
)
from iris_ray.errors import (
    ControllerUnavailableError,
    InvalidJobError,
    InvalidRequestError,
    IrisError,
    JobCancelledError,
    RemoteUserError,
    UnknownNameError,
)
from iris_ray.model.constraints import Constraint, ConstraintOp
from iris_ray.model.jobs import (
    GROW_AFTER_S,
    MAX_RETRIES_FAILURE,
    MAX_RETRIES_PREEMPTION,
    CoschedulingConfig,
    PriorityBand,
)
from iris_ray.model.resources import BYTES_PER_GB, ResourceSpec
from iris_ray.model.workers import TPU, TPU_NAME
from iris_ray.scheduler.pending_reason import PendingReason
from iris_ray.task.job_info import get_job_info

SETTLED_S = 20.0
"""How long the Controller may take to hear of a job's end after its results have come."""
_OFF_SLICES = Constraint(TPU_NAME, ConstraintOp.NOT_EXISTS)


class JobHandle(concurrent.futures.Future[list[Any]]):
    """A job that was submitted: a `concurrent.futures.Future` of its tasks' results, by task index.

    Attributes:
        job_id: the job's name in the cluster.
    """

    def __init__(self, job_id: str, results: "ray.ObjectRef[list[Any]]") -> None:
        super().__init__()
        self.job_id = job_id
        self.set_running_or_notify_cancel()
        results.future().add_done_callback(self._take)

    def _take(self, done: "concurrent.futures.Future[list[Any]]") -> None:
        error = done.exception()
        if isinstance(error, RayTaskError) and isinstance(error.cause, IrisError):
            error = error if isinstance(error.cause, RemoteUserError) else error.cause
        if error is not None:
            self.set_exception(error)
        else:
            self.set_result(done.result())

    def results(self, timeout: float | None = None) -> list[Any]:
        """One result per task, by index; waits for the job's end.

        Args:
            timeout: seconds; None waits for ever.

        Raises:
            TimeoutError: it has not ended in time, and goes on.
            ray.exceptions.RayTaskError: a task's own error, also an instance of the exception that it raised.
            JobCancelledError, JobUnschedulableError, PreemptedTooManyTimesError, TaskCrashedError, TaskSetupError:
                as for `run_on_pod`.
        """
        return self.result(timeout)

    def wait(
        self, timeout: float | None = None, *, stream_logs: bool = False, stream_task_index: int | None = None
    ) -> JobStatus:
        """How the job stands at its end. A failure of the job is not raised. While it is in the queue, stderr says why.

        A Controller that is stopped or replaced meanwhile is waited for.

        Args:
            timeout: seconds after which to return anyway; None waits for ever.
            stream_logs: print what the tasks print, each line after its task (``task-3| …``), until the job ends.
            stream_task_index: print what this task prints alone, and all of it.

        Raises:
            InvalidRequestError: no number of a task; or a timeout and logs: the logs end when the job does.
            ControllerUnavailableError: in the end none came back within 20 s, so that nobody can tell.
            UnknownNameError: there is no such task.
        """
        if stream_logs or stream_task_index is not None:
            if timeout is not None:
                raise InvalidRequestError("logs are streamed until the job ends; leave timeout out, or the logs")
            if stream_task_index is not None:
                require_number("stream_task_index", stream_task_index)
            print_logs(self.job_id, stream_task_index)
        deadline = None if timeout is None else time.monotonic() + timeout
        patience = FIRST_WORD_S
        while not self.done():
            left = patience if deadline is None else min(patience, deadline - time.monotonic())
            if left <= 0:
                break
            concurrent.futures.wait([self], left)
            if left == patience and not self.done() and (why := self._why()):
                print(f"{self.job_id}: {why}", file=sys.stderr)
                patience = REPEAT_S
        status, settled_by = self.status(), time.monotonic() + SETTLED_S
        while self.done() and not status.state.finished and time.monotonic() < settled_by:
            time.sleep(0.1)
            status = self.status()
        return status

    def _why(self) -> PendingReason | None:
        """Why it waits; None if it does not, or if nobody can tell now."""
        try:
            return ControllerConnection().ask("job_status", self.job_id).waiting  # type: ignore[no-any-return]
        except ControllerUnavailableError:
            return None

    def status(self) -> JobStatus:
        """How the job stands."""
        status: JobStatus = ask("job_status", self.job_id)
        return status

    def cancelled(self) -> bool:
        """Whether the job has ended because somebody cancelled it; `result` raises JobCancelledError then."""
        return self.done() and isinstance(self.exception(), JobCancelledError)

    def cancel(self) -> bool:
        """End the job, whether it waits or runs. Returns whether it had not ended before."""
        before: JobStatus = ask("cancel", self.job_id, f"cancelled by {current_user()}")
        return not before.state.finished

    def __repr__(self) -> str:
        return f"<JobHandle {self.job_id}>"


class IrisClient:
    """The way to a cluster's Controller and its queue.

    ``IrisClient()`` is for scripts that run in the cluster, ``IrisClient.remote(address)`` for others, and
    ``IrisClient.local({"v4-16": 2})`` for trying without a cluster. All three can be used in a ``with`` statement.

    Raises:
        NoClusterError: Ray is not initialised and there is no cluster to connect to.
    """

    def __init__(self) -> None:
        require_cluster()
        self._at_the_end = contextlib.ExitStack()

    @classmethod
    def remote(cls, address: str, workspace: Path | str | None = None) -> Self:
        """Connect to the cluster whose head is at ``address``.

        Args:
            address: HOST:PORT of the cluster's head.
            workspace: a directory that travels to the hosts as the working directory of the tasks.

        Raises:
            NoClusterError: nothing answers there, or it is no head of a Ray cluster.
            InvalidRequestError: the address or the workspace makes no sense.
        """
        options: dict[str, Any] = {}
        if workspace is not None:
            if not Path(workspace).is_dir():
                raise InvalidRequestError(f"workspace is {str(workspace)!r}, which is no directory")
            options["runtime_env"] = {"working_dir": str(workspace)}
        if ray.is_initialized():
            raise InvalidRequestError(
                "this process is connected to a Ray cluster already; use IrisClient(), or call ray.shutdown() before"
            )
        connect(address, **options)
        client = cls()
        client._at_the_end.callback(ray.shutdown)
        return client

    @classmethod
    def local(cls, slices: Mapping[str, int], **options: Any) -> Self:
        """A simulated cluster on this machine, for as long as the client is open.

        Args:
            slices: how many of each TPU type.
            options: more for `iris_ray.testing.SimulatedCluster`.
        """
        from iris_ray.testing import SimulatedCluster

        with contextlib.ExitStack() as starting:
            starting.enter_context(SimulatedCluster(slices, **options))
            client = cls()
            client._at_the_end = starting.pop_all()
        return client

    def close(self) -> None:
        """Leave the cluster, if this client joined it. Jobs that are not detached end with that."""
        self._at_the_end.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- jobs ------------------------------------------------------------------------------------------------------

    def submit(
        self,
        fn: Callable[[], Any] | Any,
        name: str | None = None,
        *,
        resources: ResourceSpec | None = None,
        constraints: Sequence[Constraint] = (),
        preferences: Sequence[Constraint] = (),
        tolerations: Sequence[str] = (),
        coscheduling: CoschedulingConfig | None = None,
        max_retries_failure: int = MAX_RETRIES_FAILURE,
        max_retries_preemption: int = MAX_RETRIES_PREEMPTION,
        max_task_failures: int | None = None,
        priority: PriorityBand = PriorityBand.INTERACTIVE,
        scheduling_timeout: float | None = None,
        env: Mapping[str, str] | None = None,
        keep_warm: float = KEEP_WARM_S,
        preload: Sequence[str] = (),
        spares: int = 0,
        grow_after: float | None = GROW_AFTER_S,
        stall_timeout: float | None = None,
        detached: bool = False,
    ) -> JobHandle:
        """Put a job into the cluster's queue; returns as soon as it is there.

        On slices of several hosts the tasks are a gang, as with `run_on_pod`. Otherwise each task is placed, fails and
        is retried by itself.

        Args:
            fn: a function without arguments, or a Ray remote function.
            name: what to call the job; the function's name if left out.
            resources: what each task needs, and how many tasks there are; one CPU and one task if left out.
            constraints: what every host must satisfy.
            preferences: what is better satisfied.
            tolerations: names of taints that do not keep the job away.
            coscheduling: for several slices: ``CoschedulingConfig(num_groups=2)``, or ``[2, 4]``.
            max_retries_failure, max_retries_preemption: further attempts of a gang, or of a single task.
            max_task_failures: failed attempts of all tasks in all, retried ones too, that the job survives. None: it
                fails with the first task, or gang, whose retries are used up.
            priority: which jobs it goes before.
            scheduling_timeout: seconds by which every task must have run, or the job is given up.
            env: environment variables of the tasks. Those that act when a process starts (``LD_…``, ``PYTHON…``,
                ``RAY_…`` and their kind, see `task_env.py`) travel as Ray's ``runtime_env``, whose values Ray's own
                logs show: no secrets in them.
            keep_warm, preload, spares, grow_after: as for `run_on_pod`; of no use without TPU.
            stall_timeout: as for `run_on_pod`.
            detached: the job goes on when this process ends; not for what a task submits, which ends with that task.

        Raises:
            InvalidRequestError: something can't work as written; nothing was acquired.
            ControllerUnavailableError: the cluster's Controller could not be started or reached.
        """
        if name is not None and (not isinstance(name, str) or not name or "/" in name):
            raise InvalidRequestError(f"name is {name!r}; give a str without slashes, or leave it out")
        if env is not None and not (
            isinstance(env, Mapping) and all(isinstance(part, str) for item in env.items() for part in item)
        ):
            raise InvalidRequestError("env must be a mapping of names to values, all str")
        if detached and (parent := get_job_info()) is not None:
            raise InvalidRequestError(
                f"detached=True in {parent.task_id}: a job that a task submits is a part of its job and ends with that"
                " task. Leave detached out and wait for the job's results, or submit it from outside"
            )
        need = ResourceSpec() if resources is None else resources
        if not isinstance(need, ResourceSpec):
            raise InvalidRequestError(f"resources is a {type(need).__name__}; give ResourceSpec(cpu=…, memory_gb=…, …)")
        what = placement(need, coscheduling)
        job = make_job(
            fn,
            need.device,
            name,
            env or {},
            keep_warm,
            preload,
            stall_timeout,
            **what
            | {
                "constraints": (*what["constraints"], *constraints),
                "preferences": (*what["preferences"], *preferences),
            },
            tolerations=tuple(tolerations),
            max_retries_failure=max_retries_failure,
            max_retries_preemption=max_retries_preemption,
            max_task_failures=max_task_failures,
            priority=priority,
            scheduling_timeout=scheduling_timeout,
            spares=spares,
            grow_after=grow_after,
        )
        return launch(identified(job), detached)

    def list_jobs(self) -> list[JobStatus]:
        """All jobs that the Controller knows, the oldest first."""
        jobs: list[JobStatus] = ControllerConnection().ask("list_jobs")
        return jobs

    def job_status(self, job: JobHandle | str) -> JobStatus:
        """How a job stands.

        Raises:
            UnknownNameError: there is none of that id; the message has the nearest. So for all that take a job.
        """
        status: JobStatus = ask("job_status", job_id(job))
        return status

    def list_tasks(self, job: JobHandle | str) -> list[TaskStatus]:
        """The tasks of a job, by index."""
        tasks: list[TaskStatus] = ask("list_tasks", job_id(job))
        return tasks

    def task_status(self, job: JobHandle | str, task_index: int) -> TaskStatus:
        """How one task stands.

        Raises:
            InvalidRequestError: ``task_index`` is no number.
            UnknownNameError: the job has no such task, or there is no such job.
        """
        require_number("task_index", task_index)
        status: TaskStatus = ask("task_status", job_id(job), task_index)
        return status

    def fetch_task_logs(
        self,
        job: JobHandle | str,
        task_index: int,
        attempt: int | None = None,
        offset: int = 0,
        max_bytes: int = 1 << 20,
        tail_lines: int | None = None,
    ) -> TaskLog:
        """A piece of what a task has printed, from its host; if that is gone, the last lines that left it.

        Args:
            job, task_index: which task.
            attempt: its attempt, from 1; None for the latest.
            offset: where the piece begins, in bytes; ``next_offset`` of the piece before.
            max_bytes: how long it may be.
            tail_lines: give the last lines instead, so many.

        Raises:
            InvalidRequestError: one of the numbers is none.
            UnknownNameError: there is no such job, task or attempt.
        """
        numbers = {"task_index": task_index, "offset": offset, "max_bytes": max_bytes}
        numbers |= {} if attempt is None else {"attempt": attempt}
        numbers |= {} if tail_lines is None else {"tail_lines": tail_lines}
        for what, number in numbers.items():
            require_number(what, number)
        log: TaskLog = ask("fetch_task_logs", job_id(job), task_index, attempt, offset, max_bytes, tail_lines)
        return log

    def explain(self, job: JobHandle | str) -> str:
        """Why a job waits, or what it does instead, in a sentence."""
        return self.job_status(job).explanation

    def cancel(self, job: JobHandle | str) -> JobStatus:
        """End a job, whether it waits or runs; how it stood before."""
        before: JobStatus = ask("cancel", job_id(job), f"cancelled by {current_user()}")
        return before

    # -- hosts -----------------------------------------------------------------------------------------------------

    def list_workers(self) -> list[WorkerStatus]:
        """All live hosts, by slice and number; hosts without TPU first."""
        workers: list[WorkerStatus] = ControllerConnection().ask("list_workers")
        return workers


def ask(method: str, *args: Any) -> Any:
    """Something about a job: where there is one there was a Controller, so it is worth waiting until one runs again."""
    return ControllerConnection(patience_s=RESTART_S).ask(method, *args)


def print_logs(job: str, task_index: int | None) -> None:
    """Print what a job's tasks print, until it ends."""
    for line in stream_logs(ControllerConnection(patience_s=math.inf).ask, job, task_index):
        text = printable(line.data)
        if line.note:
            whose = job if line.task_index is None else f"{job} task {line.task_index}"
            print(f"{whose}: {text}", file=sys.stderr, flush=True)
        else:
            print(text if task_index is not None else f"task-{line.task_index}| {text}", flush=True)


def launch(job: RunRequest, detached: bool) -> JobHandle:
    """Hand a job over; returns when the Controller has it.

    Raises:
        IrisError: it does not get there.
    """
    require_cluster()
    results, pool = submit_detached(job) if detached else pool_of_this_process.submit(job)
    handle = JobHandle(job.spec.job_id, results)
    if not ray.get(pool.accepted.options(**REPEATED).remote(job.spec.job_id)):
        handle.results()  # which raises the reason
    return handle


def placement(need: ResourceSpec, coscheduling: CoschedulingConfig | None) -> dict[str, Any]:
    """What a job says about its tasks and their hosts in its `JobSpec`.

    Raises:
        InvalidJobError: the parts don't go together.
    """
    config, amounts = need.device, {"CPU": float(need.cpu), "memory": need.memory_gb * BYTES_PER_GB}
    amounts = {resource: amount for resource, amount in amounts.items() if amount}
    if coscheduling is not None and not isinstance(coscheduling, CoschedulingConfig):
        raise InvalidJobError(f"coscheduling is {coscheduling!r}; give a CoschedulingConfig, or leave it out")
    if config is None:
        if coscheduling is not None:
            raise InvalidJobError('coscheduling needs a TPU type; say which, for example device=tpu_device("v4-32")')
        return {
            "replicas": need.replicas or 1,
            "resources": amounts or {"CPU": 1.0},
            "constraints": (),
            "preferences": (_OFF_SLICES,),  # a slice may be needed whole
        }
    if coscheduling is None and config.vm_count == 1:
        return {
            "replicas": need.replicas or 1,
            "resources": {TPU: float(config.chips_per_vm), **amounts},
            "constraints": (of_type(config),),
            "preferences": (),
        }
    coscheduling = coscheduling or CoschedulingConfig()
    if coscheduling.group_by != TPU_NAME:
        raise InvalidJobError(f"group_by is {coscheduling.group_by!r}; gangs are started on slices: {TPU_NAME!r}")
    if need.replicas not in (None, config.vm_count):
        raise InvalidJobError(
            f"replicas is {need.replicas}, but a gang has one task on each of the {config.vm_count} hosts of a"
            f" {config.name} slice; leave replicas out, and ask for several slices with"
            " coscheduling=CoschedulingConfig(num_groups=…)"
        )
    slices = slices_of(config, coscheduling)
    return slices | {"resources": slices["resources"] | amounts, "preferences": ()}


def job_id(job: JobHandle | str) -> str:
    if not isinstance(job, (JobHandle, str)):
        raise UnknownNameError(f"a job is named by its id or its handle, not by a {type(job).__name__}")
    return job if isinstance(job, str) else job.job_id


def require_number(what: str, number: object) -> None:
    """Refuse, by its name, what is no int of 0 or more."""
    if isinstance(number, bool) or not isinstance(number, int) or number < 0:
        raise InvalidRequestError(f"{what} is {number!r}; give an int of 0 or more")
