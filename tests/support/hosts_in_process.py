"""The hosts of a cluster in this process: a `Host` stands for a TPUHostActor, a `Process` for a task's process."""

import asyncio
import contextlib
import contextvars
import itertools
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import ray

from iris_ray.actors.host.chips import NotFree
from iris_ray.actors.host.task_environment import PORTS_HELD
from iris_ray.actors.host.user_code import exited, raised, returned
from iris_ray.actors.protocol.answers import SetupFailed, Unfit, Unreachable
from iris_ray.actors.protocol.messages import HostPlace, HostReady, ProcessStart, Progress, Saves, TaskLaunch
from iris_ray.actors.protocol.services import installed_services
from iris_ray.actors.protocol.version import versions_here
from iris_ray.model.goodput import Marks, StepTime, with_step
from iris_ray.model.job_info import JobInfo
from iris_ray.model.lifecycle import AttemptId
from iris_ray.model.membership import Membership
from iris_ray.model.notices import Notice
from iris_ray.model.outcomes import EndKind, TaskEnd
from iris_ray.model.rhythm import RhythmMeter
from tests.support.ray_in_process import Handle

if TYPE_CHECKING:
    from iris_ray.hangs.calls import TaskLook
    from iris_ray.logs.files import LogWriter
    from iris_ray.preflight.calls import Link
    from tests.support.cluster_in_process import ClusterInProcess

_pids = itertools.count(100_001)


REAPED_S = 0.5
"""How long what a slice's tasks have left lives on after their host's actor."""


class Crash(BaseException):
    """A task raises it to end its process before it can answer; its text says how: "was killed by SIGKILL"."""


class OutOfMemory(Crash):
    """The kernel kills the process, because the host's memory is used up."""


class Task:
    """What user code in a task process sees and does.

    Attributes:
        info: its place in its gang.
        host: where it runs.
        process: what it runs in.
        notice: the latest notice, or None.
        membership, memberships: which slices of its job run, as it was told last, and each time.
        told: set once there is a notice.
        end: what the default task waits for; tests set its result or exception.
        exit_takes: how long its exit handlers run; seconds.
        saved: whether they have come to their end.
        stack: what its host sees of it when its gang hangs.
        saves_every_s: how often it saves its state besides, from its start on; None: never; seconds.
        asks: whether it asks for notices.
        joins_ray: whether it joins Ray, and may leave actors in its reservation.
    """

    def __init__(self, info: JobInfo, host: "NodeProcesses", process: "Process") -> None:
        self.info = info
        self.process = process
        self.notice: Notice | None = None
        self.membership = Membership(0)
        self.memberships: list[Membership] = []
        self.told = asyncio.Event()
        self.end: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.exit_takes = 0.0
        self.saved = False
        self.stack: tuple[str, ...] = ()
        self.saves_every_s: float | None = None
        self.joins_ray = False
        self.asks = False
        self.host = host
        self._saved = asyncio.Event()
        self._beat: tuple[float, int | None] | None = None
        self._status: str | None = None
        self._began = time.time()
        self._meter = RhythmMeter()
        self._first_steps: tuple[StepTime, ...] = ()

    def save(self) -> None:
        """Say that the state is saved."""
        self._saved.set()

    def heartbeat(self, step: int | None = None) -> None:
        self._beat = time.time(), step
        self._meter.beat(time.monotonic())
        if step is not None and len(self._first_steps) < 2:
            self._first_steps = with_step(self._first_steps, step, time.time() - self._began)

    def report_status(self, text: str) -> None:
        self._status = text

    def say(self, text: str) -> None:
        """Print something."""
        self.host.log_of(self.info).write(text.encode(), time.time())

    @property
    def progress(self) -> Progress:
        if self._beat is None:
            return Progress(None, None, self._saved.is_set(), self._status, saves=self._saves)
        (at, step), steps = self._beat, self._first_steps
        marks = Marks(steps if step is None else with_step(steps, step, at - self._began))
        return Progress(
            time.time() - at, step, self._saved.is_set(), self._status, marks, self._meter.told, self._saves
        )

    @property
    def _saves(self) -> Saves:
        ran_s, every_s = time.time() - self._began, self.saves_every_s
        if every_s is None or ran_s < every_s:
            return Saves(heeds_notices=self.asks)
        return Saves(ran_s % every_s, every_s if ran_s > 2 * every_s else None, self.asks)

    def tell(self, notice: Notice) -> None:
        self.notice = notice
        self.told.set()

    async def has_saved(self) -> None:
        await self._saved.wait()


Work = Callable[[Task], Awaitable[Any]]
"""What a task does; returns its result. What it raises is how it ends."""


async def wait_for_end(task: Task) -> Any:
    """Wait until the test ends the task, and end as it says: what a task does by default."""
    return await task.end


async def returns_at_once(task: Task) -> None:
    """What a task does that does nothing."""


class Process:
    """Stands for a task's process, which waits and then runs one task.

    Attributes:
        pid: its number.
        place: of its task.
        exclusive: whether it has its host to itself, but for tasks without chips.
        task: what runs in it, or None while it waits.
        gone: how it ended, once it has.
        left: what it has started may still run; only a host's actor, or the next one, can end that.
    """

    def __init__(self, cluster: "ClusterInProcess", host: "NodeProcesses", place: str, exclusive: bool) -> None:
        self.place = place
        self.exclusive = exclusive
        self.pid = next(_pids)
        self.task: Task | None = None
        self.left = False
        self.hurry = asyncio.Event()
        self.gone: asyncio.Future[TaskEnd] = asyncio.get_running_loop().create_future()
        self._cluster = cluster
        self._host = host
        self._work: asyncio.Task[TaskEnd] | None = None
        host.processes[self.pid] = self

    @property
    def ports(self) -> tuple[int, ...]:
        return tuple(20_000 + PORTS_HELD * (self.pid % 3000) + port for port in range(PORTS_HELD))

    async def run(self, launch: TaskLaunch) -> TaskEnd:
        """Run a task and return how it ended. The task outlives the host's actor, which calls this."""
        if self.gone.done():
            return self.gone.result()
        self.left = True
        self._cluster.launches.append(launch)
        self._host.begin_log(launch.info)
        self.task = self._cluster.begun(Task(launch.info, self._host, self))
        loop = asyncio.get_running_loop()
        self._work = loop.create_task(self._do(self.task), context=contextvars.Context())
        await asyncio.wait({self._work, self.gone}, return_when=asyncio.FIRST_COMPLETED)
        if self.gone.done():
            return self.gone.result()
        return replace(self._work.result(), never_joined=not self.task.joins_ray)

    async def _do(self, task: Task) -> TaskEnd:
        try:
            result = await self._cluster.work_of(task.info.job_id)(task)
        except asyncio.CancelledError:
            raise
        except Crash as crash:
            kind = EndKind.OUT_OF_MEMORY if isinstance(crash, OutOfMemory) else EndKind.CRASHED
            self._end(TaskEnd(kind, time.time(), error=f"the task process {crash}"))
            return self.gone.result()
        except SystemExit as stop:
            return exited(stop)
        except Exception as error:
            return raised(error)
        return returned(result)

    async def let_exit(self, exit_grace: float) -> None:
        """Let the exit handlers of a task that has returned run, until somebody is in a hurry."""
        if self.task is not None and self.task.exit_takes:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.hurry.wait(), min(exit_grace, self.task.exit_takes))
            self.task.saved = self.task.exit_takes <= exit_grace and not self.hurry.is_set()

    def kill(self, reason: str) -> None:
        """End the process and all that it has started, for that reason."""
        self.left = False
        self._end(TaskEnd(EndKind.STOPPED, time.time(), error=reason))

    def die(self) -> None:
        """End the process by a signal that nobody has asked for."""
        how = "was killed by SIGKILL"
        if self.task is None:
            self._end(TaskEnd(EndKind.NEVER_STARTED, time.time(), error=f"the waiting task process {how}"))
        self._end(TaskEnd(EndKind.CRASHED, time.time(), error=f"the task process {how}"))

    def _end(self, end: TaskEnd) -> None:
        if not self.gone.done():
            self.gone.set_result(end)
        if self._work is not None and self._work is not asyncio.current_task():
            self._work.cancel()


@dataclass
class NodeProcesses:
    """A node's processes and files. They outlast the actors there.

    Attributes:
        processes: task processes by pid.
        held_by: why it can't take a task, or None.
        setup_error: why it can't set up what a user asks for, or None.
        versions: those in which it differs from this process.
        tested, fails_test: how often it was tested because it is suspected, and why it fails then, if it does.
        link: how fast it reaches any other.
    """

    node_id: str
    directory: Path
    processes: dict[int, Process] = field(default_factory=dict)
    held_by: NotFree | None = None
    setup_error: str | None = None
    versions: dict[str, Any] = field(default_factory=dict)
    tested: int = 0
    fails_test: str | None = None
    link: "Link | None" = None  # None: it is sound
    logs: "dict[tuple[str, int, int], LogWriter]" = field(default_factory=dict)

    def left(self) -> list[Process]:
        """Return the processes of which something may still run."""
        return [process for process in self.processes.values() if process.left]

    def begin_log(self, info: JobInfo) -> None:
        """Begin the file of a task's output, if a service keeps it."""
        if any(service.name == "logs" for service in installed_services()):
            self.log_of(info).begin()

    def log_of(self, info: JobInfo) -> "LogWriter":
        from iris_ray.logs.files import AttemptLog, LogWriter, logs_directory

        key = info.job_id, info.task_index, info.attempt
        if key not in self.logs:
            self.logs[key] = LogWriter(AttemptLog(logs_directory(self.directory), *key))
        return self.logs[key]


class Host:
    """Stands for a TPUHostActor."""

    def __init__(
        self, cluster: "ClusterInProcess", node: NodeProcesses, place: HostPlace, exclusive: bool, pool: Handle
    ) -> None:
        self.handle: Handle = ray.get_runtime_context().current_actor
        self.started: dict[int, str] = {}  # of which place the processes are
        self._cluster = cluster
        self._zygotes: dict[str, asyncio.Task[None]] = {}  # that start, or have started
        self._node = node
        self._place = place
        self._exclusive = exclusive

    async def versions(self) -> dict[str, Any]:
        return versions_here() | self._node.versions

    async def healthy(self) -> bool:
        return True

    async def start_process(self, start: ProcessStart) -> HostReady | Unreachable:
        key = start.process.key
        if self._exclusive and not self.started:
            for earlier in self._node.left():
                if earlier.exclusive:
                    earlier.kill("an earlier actor has left it behind")
        if key not in self._zygotes:
            self._zygotes[key] = asyncio.ensure_future(asyncio.sleep(self._cluster.process_start_s))
        await asyncio.shield(self._zygotes[key])
        name = f"{self._place.slice_name} host {self._place.host_index}"
        if self._node.setup_error:
            return SetupFailed(f"{name}: {self._node.setup_error}", ())
        if (held := self._node.held_by) is not None:
            return Unfit(f"{name}: {held.why}", self._node.node_id, held.why, held.ours)
        started = Process(self._cluster, self._node, start.place, self._exclusive)
        self.started[started.pid] = start.place
        return HostReady(started.pid, started.ports, "")

    async def run(self, pid: int, launch: TaskLaunch) -> TaskEnd:
        return await self._node.processes[pid].run(launch)

    async def stop(self, pid: int, reason: str | None, exit_grace: float = 0.0) -> TaskEnd | None:
        process = self._node.processes[pid]
        if reason is None:
            await process.let_exit(exit_grace)
        process.hurry.set()
        process.kill(reason or "the task had returned")
        return await asyncio.shield(process.gone)

    async def notify(self, pid: int, notice: Notice, sent_at: float) -> bool:
        process = self._node.processes[pid]
        if process.task is None:
            return False
        process.task.tell(notice)
        saved, patience = asyncio.ensure_future(process.task.has_saved()), max(0.0, notice.deadline - time.time()) + 5.0
        first: set[asyncio.Future[Any]] = {saved, process.gone}
        await asyncio.wait(first, timeout=patience, return_when=asyncio.FIRST_COMPLETED)
        saved.cancel()
        return saved.done() and not saved.cancelled()

    async def progress(self, pid: int) -> Progress:
        task = self._node.processes[pid].task
        return Progress(None, None) if task is None else task.progress

    async def meet_gang(self, pid: int, attempt: AttemptId, peers: Sequence[Any]) -> None: ...

    async def hear_membership(self, pid: int, membership: Membership) -> bool:
        task = self._node.processes[pid].task
        if task is not None and membership.epoch > task.membership.epoch:
            task.membership = membership
            task.memberships.append(membership)
        return task is not None

    async def hear_notice(self, attempt: AttemptId, notice: Notice, sent_at: float) -> None: ...

    async def dump_stacks(self, pid: int) -> None: ...

    async def look(self, pid: int) -> "TaskLook":
        from iris_ray.hangs.calls import TaskLook

        task = self._node.processes[pid].task
        return TaskLook("", 0.0, () if task is None else task.stack, 0.0)

    async def serve(self, service: str, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return await getattr(self, method)(*args, **kwargs)

    async def preflight(self) -> str | None:
        self._node.tested += 1
        return self._node.fails_test

    async def measure_link(self, peer: Handle, name: str) -> "Link":
        from iris_ray.preflight.calls import Link

        return self._node.link or Link(0.001, 1e8)

    async def job_over(self, job_id: str) -> None: ...

    async def teardown(self, place: str) -> None:
        for pid in [pid for pid, whose in self.started.items() if whose == place]:
            self._node.processes[pid].kill("the slice is released")

    def on_death(self) -> None:
        """Have the reaper end the tasks here. It takes a moment for those of a slice."""
        loop = asyncio.get_running_loop()
        for pid in self.started:
            if self._exclusive:
                loop.call_later(REAPED_S, self._reap, pid)
            else:
                self._reap(pid)

    def _reap(self, pid: int) -> None:
        process = self._node.processes[pid]
        if process.left or not process.gone.done():
            process.kill("its host's actor is gone")


@dataclass(eq=False)
class Reservation:
    """Stands for a placement group. Its actors end with it.

    Attributes:
        number, name: Ray's.
        node_ids: of its bundles.
        bundles: what each of them claims.
        is_made: whether Ray has made it.
    """

    number: str
    name: str
    node_ids: Sequence[str]
    bundles: Sequence[Mapping[str, float]]
    is_made: Callable[[], bool]
    actors: list[Handle] = field(default_factory=list)

    @property
    def id(self) -> SimpleNamespace:
        return SimpleNamespace(hex=lambda: self.number)

    def wait(self, timeout_s: float) -> bool:
        return self.is_made()
