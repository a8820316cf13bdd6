"""`IrisClient`: submits jobs of any kind to a shared cluster, and answers questions about jobs, tasks and hosts."""

import contextlib
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, Unpack

import ray

from iris_ray.actors.calls.controller_connection import RESTART_S
from iris_ray.actors.protocol.controller_interface import ControllerInterface
from iris_ray.actors.protocol.messages import RunRequest
from iris_ray.actors.protocol.services import module_of
from iris_ray.actors.protocol.status import JobStatus, TaskStatus, WorkerStatus
from iris_ray.client.caller_pool import pool_of_this_process
from iris_ray.client.children import as_child, children_outlive_attempts
from iris_ray.client.connection import current_user, join, require_cluster
from iris_ray.client.job_group import GroupHandle, JobGroup, submit_all
from iris_ray.client.job_handle import JobHandle, job_id_of
from iris_ray.client.job_request import make_request
from iris_ray.client.placement import placement_of
from iris_ray.client.run_options import require_no_local_mode, takes
from iris_ray.client.transport import DirectTransport, Transport, remote_transport
from iris_ray.errors import InvalidQueryError, InvalidRequestError
from iris_ray.model.checks import Whole, require
from iris_ray.model.job_spec import CoschedulingConfig
from iris_ray.model.options import JobOptions
from iris_ray.model.requirement import ResourceSpec
from iris_ray.task.job_info import get_job_info

if TYPE_CHECKING:
    from iris_ray.logs.core import TaskLog


class IrisClient:
    """The way to a cluster's Controller and its queue.

    ``IrisClient()`` is for scripts that run in the cluster, ``IrisClient.remote(address)`` for others, and
    ``IrisClient.local({"v4-16": 2})`` for trying without a cluster. All three can be used in a ``with`` statement.

    Raises:
        NoClusterError: Ray is not initialised and there is no cluster to connect to.
        InvalidModeError: `IRIS_RAY_MODE` asks for a local mode; `IrisClient.local` is for that.
    """

    def __init__(self) -> None:
        require_no_local_mode()
        require_cluster()
        self._transport: Transport = DirectTransport()
        self._at_the_end = contextlib.ExitStack()

    @classmethod
    def _of(cls, transport: Transport, at_the_end: contextlib.ExitStack) -> Self:
        """Return a client with this transport, at whose end these callbacks run."""
        client = cls.__new__(cls)
        client._transport, client._at_the_end = transport, at_the_end
        client._at_the_end.callback(transport.close)
        return client

    @classmethod
    def remote(cls, address: str, workspace: Path | str | None = None) -> Self:
        """Connect to the cluster whose head is at ``address``.

        Args:
            address: HOST:PORT of the cluster's head, if this machine is one of its nodes, as Ray demands; elsewhere
                the URL of its dashboard, such as ``http://10.0.0.2:8265``. Each method then takes some seconds.
            workspace: a directory that travels to the hosts as the working directory of the tasks, without the files
                that its .gitignore and .rayignore name and, with the URL of a dashboard, files that look like secrets.

        With the URL of a dashboard, secrets of jobs must be in the cluster's store.

        Raises:
            NoClusterError: nothing answers there, or it is not the head of a Ray cluster, or HOST:PORT is given on a
                machine without a Ray node.
            InvalidRequestError: the address or the workspace makes no sense, or this process is connected already.
            VersionMismatchError: the cluster has another version of Ray or, with HOST:PORT, of Python. With the URL of
                a dashboard, the last part of Ray's version may differ.
            TokenRefusedError, RayJobError: as for `RayJobs`, with the URL of a dashboard.
            InvalidModeError: as for `IrisClient()`.
            ServiceUnavailableError: the service for the URL of a dashboard is not installed.
        """
        require_no_local_mode()  # before the process is connected
        if isinstance(address, str) and address.startswith(("http://", "https://")):
            return cls._of(remote_transport(address, workspace), contextlib.ExitStack())
        join(address, workspace)
        client = cls()
        client._at_the_end.callback(ray.shutdown)
        client._at_the_end.callback(pool_of_this_process.wait_for_tasks)
        return client

    @classmethod
    def local(cls, slices: Mapping[str, int], **options: Any) -> Self:
        """Start a simulated cluster on this machine, which lasts as long as the client is open.

        Args:
            slices: how many of each TPU type.
            options: more for `iris_ray.testing.SimulatedCluster`.
        """
        from iris_ray.testing import SimulatedCluster

        with contextlib.ExitStack() as starting:
            starting.enter_context(SimulatedCluster(slices, **options))
            require_cluster()
            client = cls._of(DirectTransport(), starting.pop_all())
        client._at_the_end.callback(pool_of_this_process.wait_for_tasks)
        return client

    @property
    def is_direct(self) -> bool:
        """Whether this process itself is connected to Ray; not so with the URL of a dashboard."""
        return self._transport.is_direct

    def close(self) -> None:
        """Leave the cluster, if this client joined it. Jobs that are not detached then end.

        This waits for tasks that have returned and still save or upload something; Ctrl-C skips the wait.
        """
        self._at_the_end.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- jobs ------------------------------------------------------------------------------------------------------

    @takes("IrisClient.submit")
    def submit(
        self,
        remote_fn: Callable[[], Any] | Any,
        name: str | None = None,
        *,
        resources: ResourceSpec | None = None,
        coscheduling: CoschedulingConfig | None = None,
        detached: bool = False,
        **options: Unpack[JobOptions],
    ) -> JobHandle:
        """Put a job into the cluster's queue; return as soon as it is there.

        On slices of several hosts, and with ``coscheduling``, the tasks are a gang, as with `run_on_pod`. Otherwise
        each task is placed, fails and is retried by itself. Unlike with `run_on_pod`, there is no further attempt after
        a failure unless you ask for some with ``max_retries_failure``.

        Args:
            remote_fn: a function without arguments, or a Ray remote function.
            name: what to call the job; the function's name if left out.
            resources: what each task needs, and how many tasks there are; one CPU and one task if left out.
            coscheduling: for several slices: ``CoschedulingConfig(num_groups=2)``, or ``[2, 4]``. Without TPU,
                ``CoschedulingConfig("rack")`` makes a gang: all tasks start together, each on a host of its own, on
                hosts with the same value of that attribute.
            detached: the job goes on when this process ends. A task can't submit detached jobs.
            options: those of docs/options.md, such as ``spares=1``; ``help(IrisClient.submit)`` explains each.

        Raises:
            InvalidRequestError: something can't work as written; nothing was acquired.
            TypeError: there is no such option; the message names a similar one, or all.
            LimitReachedError: the user has too many queued jobs, or too many tasks.
            NotPermittedError: the user may not use this team, secret or priority band.
            ControllerUnavailableError: the cluster's Controller could not be started or reached.
        """
        if detached:
            require_may_detach()
        request = request_for(remote_fn, name, resources, coscheduling, **options)
        return self._launch(as_child(request) if self.is_direct else request, detached)

    def submit_group(self, group: JobGroup, *, detached: bool = False) -> GroupHandle:
        """Put a group of jobs into the queue: they start together or not at all.

        Args:
            group: the jobs.
            detached: they go on when this process ends. A task can't submit detached jobs.

        Raises:
            InvalidRequestError: something can't work as written, or the cluster can never run them all at the same
                time, and no provisioner or autoscaler brings more slices; nothing was acquired.
            ControllerUnavailableError: the cluster's Controller could not be started or reached.
        """
        if not isinstance(group, JobGroup):
            raise InvalidRequestError(f'group is a {type(group).__name__}; give a JobGroup("rl"), with jobs added')
        if detached:
            require_may_detach()
        return submit_all(group, self._launch, detached)

    def _launch(self, request: RunRequest, detached: bool) -> JobHandle:
        return launch(request, detached, self._transport)

    @takes("IrisClient.submit")
    def run(
        self,
        remote_fn: Callable[[], Any] | Any,
        name: str | None = None,
        *,
        resources: ResourceSpec | None = None,
        coscheduling: CoschedulingConfig | None = None,
        **options: Unpack[JobOptions],
    ) -> list[Any]:
        """Submit a job, print what its tasks print, each line after its task, and return their results by index.

        The job ends with this call: an interruption, such as Ctrl-C, cancels it.

        Args:
            remote_fn, name, resources, coscheduling: as for `submit`.
            options: those of `submit`.

        Raises:
            ray.exceptions.RayTaskError: a task's own error, also an instance of the exception that it raised.
            InvalidRequestError, TypeError, LimitReachedError, NotPermittedError, ControllerUnavailableError: as for
                `submit`.
            JobCancelledError, JobUnschedulableError, PreemptedTooManyTimesError, TaskCrashedError, TaskSetupError:
                as for `run_on_pod`.
        """
        job = self.submit(remote_fn, name, resources=resources, coscheduling=coscheduling, **options)
        try:
            job.wait(stream_logs=True)
        except BaseException:
            if children_outlive_attempts():
                raise  # it ends with the job of this task, whose next attempt may adopt it
            with contextlib.suppress(Exception):  # the first error tells more
                job.cancel()
            raise
        return job.results()

    def list_jobs(self) -> list[JobStatus]:
        """Return all jobs that the Controller knows, the oldest first."""
        return self._transport.ask(0.0, ControllerInterface.list_jobs)

    def job_status(self, job: JobHandle | str) -> JobStatus:
        """Return the status of a job.

        Raises:
            UnknownNameError: there is no job of that id; the message names similar ones. All methods that take a job
                raise it.
        """
        return self._transport.ask(RESTART_S, ControllerInterface.job_status, job_id_of(job))

    def list_tasks(self, job: JobHandle | str) -> list[TaskStatus]:
        """Return the tasks of a job, by index."""
        return self._transport.ask(RESTART_S, ControllerInterface.list_tasks, job_id_of(job))

    def task_status(self, job: JobHandle | str, task_index: int) -> TaskStatus:
        """Return the status of one task.

        Raises:
            InvalidRequestError: ``task_index`` is not a number.
            UnknownNameError: the job has no such task, or there is no such job.
        """
        require("task_index", task_index, Whole())
        return self._transport.ask(RESTART_S, ControllerInterface.task_status, job_id_of(job), task_index)

    def fetch_task_logs(
        self,
        job: JobHandle | str,
        task_index: int,
        attempt: int | None = None,
        offset: int = 0,
        max_bytes: int = 1 << 20,
        tail_lines: int | None = None,
        timestamps: bool = False,
    ) -> "TaskLog":
        """Return a piece of what a task has printed, from its host.

        If the host is gone or does not answer, the piece comes from the archive of logs, if there is one, or else from
        the last lines that have reached the Controller (4 KiB).

        Args:
            job, task_index: which task.
            attempt: its attempt, from 1; None for the latest.
            offset: where the piece begins, in bytes; ``next_offset`` of the piece before.
            max_bytes: how long it may be; at most 4 MiB.
            tail_lines: how many of the last lines to return instead.
            timestamps: whether ``timed_lines`` of the piece has the time of each line.

        Raises:
            InvalidRequestError: an argument is not a number.
            UnknownNameError: there is no such job, task or attempt.
        """
        numbers = {"task_index": task_index, "offset": offset, "max_bytes": max_bytes}
        numbers |= {} if attempt is None else {"attempt": attempt}
        numbers |= {} if tail_lines is None else {"tail_lines": tail_lines}
        for what, number in numbers.items():
            require(what, number, Whole())
        calls, core = module_of("logs", "calls"), module_of("logs", "core")
        at = core.LogPosition(attempt, offset, tail_lines, with_times=bool(timestamps))
        log: TaskLog = self._transport.ask(
            RESTART_S, calls.LogCalls.fetch_task_logs, job_id_of(job), task_index, at, max_bytes
        )
        return log

    def exec(
        self, job: JobHandle | str, command: Sequence[str], task_index: int = 0, input: bytes = b""
    ) -> subprocess.CompletedProcess[bytes]:
        """Run a command on the host of a running task, with the task's variables and directory, and wait for its end.

        It does not get the task's chips: JAX runs on the CPU there. Whatever it starts ends with it, with this process
        and with the attempt of the task.

        Args:
            job, task_index: the task.
            command: the program and its arguments, such as ``["tpu-info"]``. No shell reads them.
            input: what it reads from stdin.

        Raises:
            InvalidRequestError: the command makes no sense, or ``task_index`` is not a number.
            NotPermittedError: it is another user's job, and this user is not an operator.
            TaskNotRunningError: the task does not run; the message says what it waits for, or how it ended.
            TaskMovedError: its attempt has ended meanwhile, and the command with it.
            CommandNotFoundError: there is no such program there.
            SessionError: the host does not answer, or takes no more sessions.
        """
        require("task_index", task_index, Whole())
        run_beside = module_of("sessions", "client").run_beside
        code, out, err = self._transport.call(run_beside, job_id_of(job), task_index, command, input)
        return subprocess.CompletedProcess(list(command), code, out, err)

    def explain(self, job: JobHandle | str) -> str:
        """Return why a job waits, or what it does instead, in a sentence."""
        return self.job_status(job).explanation

    def cancel(self, job: JobHandle | str) -> JobStatus:
        """End a job, whether it waits or runs. Return its status before.

        Raises:
            NotPermittedError: another user submitted the job, and this user is not one of the cluster's operators.
        """
        user = current_user()
        return self._transport.ask(RESTART_S, ControllerInterface.cancel, job_id_of(job), f"cancelled by {user}", user)

    # -- history ---------------------------------------------------------------------------------------------------

    def history(self, sql: str, **parameters: str | int | float | None) -> list[dict[str, str | int | float | None]]:
        """Return rows of the cluster's history, which also has jobs that the Controller has forgotten.

        Args:
            sql: a SELECT over the tables of docs/history.md; ``:name`` stands for a parameter.
            parameters: their values by name.

        Raises:
            InvalidQueryError: the statement writes, makes no sense, takes longer than 10 s or too much memory, or has
                more rows than an answer holds: 100,000, or 16 MB.
            HistoryUnavailableError: the cluster keeps no history, or it can't be read.
            ServiceUnavailableError: the history was taken out of iris_ray, or is failing.

        Example:
            >>> client.history("SELECT job_id, state FROM jobs WHERE user = :user", user="ann")
            [{'job_id': 'train-1a2b3c4d', 'state': 'succeeded'}]
        """
        calls = module_of("history", "calls")
        ask, most = calls.HistoryCalls.ask_history, calls.MOST_ROWS_EVER
        found = self._transport.ask(0.0, ask, sql, parameters, most, current_user())
        if found.cut:
            raise InvalidQueryError(f"there are more than {len(found.rows):,} rows; narrow the statement, or add LIMIT")
        rows: list[dict[str, str | int | float | None]] = found.as_dicts()
        return rows

    # -- hosts -----------------------------------------------------------------------------------------------------

    def list_workers(self) -> list[WorkerStatus]:
        """Return all live hosts, by slice and number; hosts without TPU first."""
        return self._transport.ask(0.0, ControllerInterface.list_workers)


@takes()
def request_for(
    remote_fn: Callable[[], Any] | Any,
    name: str | None,
    resources: ResourceSpec | None,
    coscheduling: CoschedulingConfig | None,
    **options: Unpack[JobOptions],
) -> RunRequest:
    """Return the request of `IrisClient.submit`, without a cluster. Arguments and errors for bad ones as there."""
    if name is not None and (not isinstance(name, str) or not name or "/" in name):
        raise InvalidRequestError(f"name is {name!r}; give a str without slashes, or leave it out")
    need = ResourceSpec() if resources is None else resources
    if not isinstance(need, ResourceSpec):
        raise InvalidRequestError(f"resources is a {type(need).__name__}; give ResourceSpec(cpu=…, memory_gb=…, …)")
    return make_request(remote_fn, placement_of(need, coscheduling), name, **options)


def require_may_detach() -> None:
    """Raise InvalidRequestError if this process is a task's: such a process can't submit detached jobs."""
    if (parent := get_job_info()) is not None:
        raise InvalidRequestError(
            f"detached=True in {parent.task_id}: a job that a task submits is a part of its job and ends with that"
            " task. Leave detached out and wait for the job's results, as iris-ray run does, or submit it from outside"
        )


def launch(request: RunRequest, detached: bool, transport: Transport | None = None) -> JobHandle:
    """Submit a job; return its handle when the Controller has accepted it. Raises like `Transport.submit`.

    Args:
        request: the job.
        detached: whether the job goes on when this process ends.
        transport: the connection to the cluster; None: this process is connected.
    """
    transport = DirectTransport() if transport is None else transport
    job_id, results = transport.submit(request, detached)
    return JobHandle(job_id, results, transport)
