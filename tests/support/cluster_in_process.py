"""A cluster in this process: the real Controller, pools and slices, on made-up nodes and hosts.

Real are the Controller, SlicePoolManager, SliceActor and LogReader with all that they use. Made up are Ray (see
`ray_in_process`), its node table, reservations and key-value store, and on each host the processes: a `Host` stands
for a TPUHostActor and a `Process` for a TaskProcess, whose tasks do what the test says.
"""

import asyncio
import contextlib
import hashlib
import itertools
import os
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import ray

from iris_ray.actors.controller import pool_registry
from iris_ray.actors.controller.controller import Controller
from iris_ray.actors.controller.node_table import POD_TYPE_LABEL, SLICE_NAME_LABEL, WORKER_ID_LABEL, NodeTable
from iris_ray.actors.host.host_actor import TPUHostActor
from iris_ray.actors.host.log_files import AttemptLog, logs_directory
from iris_ray.actors.host.log_reader import LogReader
from iris_ray.actors.host.log_writer import LogWriter
from iris_ray.actors.host.result_pickling import exited, raised, returned
from iris_ray.actors.host.task_process import TaskProcess
from iris_ray.actors.pool import reserved_slice
from iris_ray.actors.pool.slice_pool_manager import SlicePoolManager
from iris_ray.actors.wire.answers import Unfit
from iris_ray.actors.wire.messages import HostPlace, ProcessSpec, Progress, RunRequest, StandbyReady, TaskLaunch
from iris_ray.actors.wire.ray_internals import ClusterStore
from iris_ray.actors.wire.shared_names import CONTROLLER_NAME
from iris_ray.model.job_info import JobInfo
from iris_ray.model.job_spec import JobSpec
from iris_ray.model.notices import Notice
from iris_ray.model.outcomes import EndKind, TaskEnd
from iris_ray.model.topology import get_tpu_config
from tests.support.ray_in_process import HEAD_NODE, Handle, RayInProcess

_pids = itertools.count(100_001)


class Store:
    """The cluster's key-value store, as a dictionary.

    Attributes:
        values: by key.
        before_write: called before anything changes.
        newest_first: of the values that are set at the same time, the last one is written first.
    """

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.before_write: Callable[[], None] = lambda: None
        self.newest_first = False
        self._being_set = 0

    async def set(self, key: str, value: bytes | None) -> None:
        self._being_set += 1
        for _ in range(100 - self._being_set if self.newest_first else 0):
            await asyncio.sleep(0)
        self._being_set -= 1
        if value is None:
            self.delete(key)
        else:
            self.put(key, value)

    async def add(self, key: str, value: bytes) -> bool:
        return self.put_new(key, value)

    async def fetch(self, key: str) -> bytes | None:
        return self.get(key)

    def put(self, key: str, value: bytes) -> None:
        self.before_write()
        self.values[key] = value

    def put_new(self, key: str, value: bytes) -> bool:
        self.before_write()
        is_new = key not in self.values
        self.values.setdefault(key, value)
        return is_new

    def get(self, key: str) -> bytes | None:
        return self.values.get(key)

    def delete(self, key: str) -> None:
        self.before_write()
        self.values.pop(key, None)

    def delete_all(self, prefix: str) -> None:
        for key in self.keys(prefix):
            self.delete(key)

    def keys(self, prefix: str) -> list[str]:
        return [key for key in list(self.values) if key.startswith(prefix)]

    def items(self, prefix: str) -> dict[str, bytes]:
        return {key: self.values[key] for key in self.keys(prefix)}


class Crash(BaseException):
    """A task raises it to end its process before it can answer; its text says how: "was killed by SIGKILL"."""


class OutOfMemory(Crash):
    """The kernel kills the process, because the host's memory is used up."""


class Task:
    """What user code in a task process sees and does.

    Attributes:
        info: its place in its gang.
        process: what it runs in.
        notice: the latest notice, or None.
        told: set once there is a notice.
        end: what the default task waits for; tests set its result or exception.
        exit_takes: how long its exit handlers run; seconds.
        saved: whether they have come to their end.
    """

    def __init__(self, info: JobInfo, host: "NodeProcesses", process: "Process") -> None:
        self.info = info
        self.process = process
        self.notice: Notice | None = None
        self.told = asyncio.Event()
        self.end: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.exit_takes = 0.0
        self.saved = False
        self._host = host
        self._saved = asyncio.Event()
        self._beat: tuple[float, int | None] | None = None

    def save(self) -> None:
        """Say that the state is saved."""
        self._saved.set()

    def heartbeat(self, step: int | None = None) -> None:
        self._beat = time.time(), step

    def say(self, text: str) -> None:
        """Print something."""
        self._host.log_of(self.info).write(text.encode())

    @property
    def progress(self) -> Progress:
        if self._beat is None:
            return Progress(None, None, self._saved.is_set())
        return Progress(time.time() - self._beat[0], self._beat[1], self._saved.is_set())

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


class Process:
    """Stands for a TaskProcess, which waits and then runs one task.

    Attributes:
        pid: its number.
        group: what it runs in.
        task: what runs in it, or None while it waits.
        gone: how it ended, once it has.
        left: what it has started may still run; only a host's actor, or the next one, can end that.
    """

    def __init__(self, cluster: "ClusterInProcess", host: "NodeProcesses", group: "Reservation") -> None:
        self.group = group
        self.pid = next(_pids)
        self.task: Task | None = None
        self.left = False
        self.hurry = asyncio.Event()
        self.gone: asyncio.Future[TaskEnd] = asyncio.get_running_loop().create_future()
        self.handle: Handle = ray.get_runtime_context().current_actor
        self._cluster = cluster
        self._born = asyncio.get_running_loop().time()
        self._host = host
        host.processes[self.pid] = self

    async def ready(self) -> StandbyReady:
        await asyncio.sleep(self._born + self._cluster.process_start_s - asyncio.get_running_loop().time())
        first = 20_000 + 3 * (self.pid % 4000)
        ports = first, first + 1, first + 2
        return StandbyReady(self.pid, 1, f"token {self.pid}", ports, self._cluster.cores, self._host.setup_error)

    def end_leftovers(self, exclusive: bool) -> None:
        """End the task that ran here before."""
        for process in self._host.left():
            if exclusive or process.group is self.group:
                process.kill("its host's actor is gone")

    async def run(self, launch: TaskLaunch) -> TaskEnd:
        """Run a task and return how it ended. If it crashes, this process is gone before it can answer."""
        self.left = True
        self._host.log_of(launch.info).begin()
        self.task = self._cluster.begun(Task(launch.info, self._host, self))
        try:
            result = await self._cluster.work_of(launch.info.job_id)(self.task)
        except asyncio.CancelledError:
            raise
        except Crash as crash:
            kind = EndKind.OUT_OF_MEMORY if isinstance(crash, OutOfMemory) else EndKind.CRASHED
            self._end(TaskEnd(kind, time.time(), error=f"the task process {crash}"))
            ray.kill(self.handle)
            await asyncio.Event().wait()
        except SystemExit as stop:
            return exited(stop)
        except Exception as error:
            return raised(error)
        return returned(result)

    def exit(self) -> None:
        self.kill("the task had returned")

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
        ray.kill(self.handle)

    def on_death(self) -> None:
        how = "was killed by SIGKILL"
        if self.task is None:
            self._end(TaskEnd(EndKind.NEVER_STARTED, time.time(), error=f"the waiting task process {how}"))
        self._end(TaskEnd(EndKind.CRASHED, time.time(), error=f"the task process {how}"))

    def _end(self, end: TaskEnd) -> None:
        if not self.gone.done():
            self.gone.set_result(end)


@dataclass
class NodeProcesses:
    """A node's processes and files. They outlast the actors there.

    Attributes:
        processes: task processes by pid.
        held_by: why it can't take a task, or None.
        setup_error: why it can't set up what a user asks for, or None.
    """

    node_id: str
    directory: Path
    processes: dict[int, Process] = field(default_factory=dict)
    held_by: str | None = None
    setup_error: str | None = None
    logs: dict[tuple[str, int, int], LogWriter] = field(default_factory=dict)

    def left(self) -> list[Process]:
        """Return the processes of which something may still run."""
        return [process for process in self.processes.values() if process.left]

    def log_of(self, info: JobInfo) -> LogWriter:
        key = info.job_id, info.task_index, info.attempt
        if key not in self.logs:
            self.logs[key] = LogWriter(AttemptLog(logs_directory(self.directory), *key))
        return self.logs[key]


class Host:
    """Stands for a TPUHostActor."""

    def __init__(self, node: NodeProcesses, place: HostPlace, exclusive: bool, pool: Handle) -> None:
        self.handle: Handle = ray.get_runtime_context().current_actor
        self.adopted: dict[int, str] = {}  # of which place the processes are
        self._node = node
        self._place = place
        self._exclusive = exclusive

    async def healthy(self) -> bool:
        return True

    async def adopt(self, place: str, standby: Handle, pid: int, started: int, token: str) -> Unfit | None:
        if self._exclusive and not self.adopted:
            for process in self._node.left():
                process.kill("an earlier actor has left it behind")
        self.adopted[pid] = place
        if self._node.held_by is None:
            return None
        name = f"{self._place.slice_name} host {self._place.host_index}"
        return Unfit(f"{name}: {self._node.held_by}", self._node.node_id, self._node.held_by)

    async def how_it_ended(self, pid: int) -> TaskEnd:
        return await asyncio.shield(self._node.processes[pid].gone)

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

    async def dump_stacks(self, pid: int) -> None: ...

    async def job_over(self, job_id: str) -> None: ...

    async def teardown(self, place: str) -> None:
        for pid in [pid for pid, whose in self.adopted.items() if whose == place]:
            self._node.processes[pid].kill("the slice is released")

    def on_death(self) -> None:
        """Have the reaper end the tasks of a shared host. A slice's are left to its next actor."""
        for pid in () if self._exclusive else self.adopted:
            self._node.processes[pid].kill("its host's actor is gone")


@dataclass(eq=False)
class Reservation:
    """Stands for a placement group. Its actors end with it.

    Attributes:
        number, name: Ray's.
        node_ids: of its bundles.
        bundles: what each of them claims.
    """

    number: str
    name: str
    node_ids: Sequence[str]
    bundles: Sequence[Mapping[str, float]]
    actors: list[Handle] = field(default_factory=list)


class ClusterInProcess:
    """Slices ``v4-16-0``, ``v4-16-1``, … and a head node without chips.

    Args:
        directory: for the files of hosts.
        slices: how many of each type.
        loop: what all actors run on; without one, a new one in a thread.

    Attributes:
        ray: stands for Ray.
        store: what the Controller has recorded.
        tasks: all that have begun, in their order.
        works: what the tasks of a job do, by job id; without an entry, `wait_for_end`.
        process_start_s: how long a task process takes to start; seconds.
        cores: how many each host has.
    """

    def __init__(
        self, directory: Path, slices: Mapping[str, int], loop: asyncio.AbstractEventLoop | None = None
    ) -> None:
        self.store = Store()
        self.ray = RayInProcess(self._make, loop)
        self.tasks: list[Task] = []
        self.works: dict[str, Work] = {}
        self.process_start_s = 0.0
        self.cores = 2
        self._directory = directory
        self._table = {HEAD_NODE: _node(HEAD_NODE, "10.0.0.1", {"CPU": 8.0, "node:__internal_head__": 1.0})}
        self._nodes: dict[str, NodeProcesses] = {}
        self._draining: dict[str, int] = {}
        self._groups: dict[str, Reservation] = {}
        self._hosts: list[Host] = []
        self._actors: dict[str, list[Handle]] = {}  # by node id
        for tpu_type, count in slices.items():
            for number in range(count):
                self.add_slice(f"{tpu_type}-{number}", tpu_type)

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Make this process a driver of the cluster."""
        self.ray.install(monkeypatch)
        for name in (name for name in vars(Store) if not name.startswith("_")):
            monkeypatch.setattr(ClusterStore, name, staticmethod(getattr(self.store, name)))
        monkeypatch.setattr(NodeTable, "read", staticmethod(self.read_nodes))
        monkeypatch.setattr(ray, "nodes", lambda: self.read_nodes().nodes)
        for module in (reserved_slice, pool_registry, sys.modules["ray.util.placement_group"]):
            for name, stand_in in (
                ("placement_group", self._reserve),
                ("remove_placement_group", self._remove),
                ("placement_group_table", self._group_table),
                ("placement_group_by_id", self._groups.__getitem__),
            ):
                if hasattr(module, name):
                    monkeypatch.setattr(module, name, stand_in)

    # -- nodes -----------------------------------------------------------------------------------------------------

    def read_nodes(self) -> NodeTable:
        claimed: dict[str, float] = {}
        for group in list(self._groups.values()):
            for node_id, bundle in zip(group.node_ids, group.bundles, strict=True):
                if "TPU" in bundle:
                    claimed[node_id] = claimed.get(node_id, 0.0) + bundle["TPU"]
        nodes = tuple(dict(node) for node in self._table.values())
        available = {node["NodeID"]: dict(node["Resources"]) for node in nodes}
        for node_id in claimed:
            available[node_id]["TPU"] -= claimed[node_id]
        return NodeTable(nodes, dict(self._draining), available)

    def add_slice(self, name: str, tpu_type: str = "v4-16") -> None:
        place = len(self._table)
        for number in range(get_tpu_config(tpu_type).vm_count):
            node_id = self.node_id(name, number)
            labels = {SLICE_NAME_LABEL: name, WORKER_ID_LABEL: str(number), POD_TYPE_LABEL: tpu_type}
            self._table[node_id] = _node(node_id, f"10.0.{place}.{number}", {"TPU": 4.0, "CPU": 8.0}, labels)

    def add_node(self, node_id: str, address: str, resources: Mapping[str, float], labels: Mapping[str, str]) -> None:
        """Add a machine that is none of the hosts."""
        self._table[node_id] = _node(node_id, address, resources, labels)

    def remove_node(self, node_id: str) -> None:
        """End such a machine; Ray forgets it at once."""
        del self._table[node_id]

    def node_id(self, slice_name: str, number: int) -> str:
        return hashlib.sha256(f"{slice_name}/{number}".encode()).hexdigest()[:56]

    def node(self, node_id: str) -> NodeProcesses:
        if node_id not in self._nodes:
            directory = self._directory / node_id
            directory.mkdir(exist_ok=True)
            self._nodes[node_id] = NodeProcesses(node_id, directory)
        return self._nodes[node_id]

    def kill_host(self, slice_name: str, number: int) -> None:
        """End the machine; Ray knows it at once."""
        node_id = self.node_id(slice_name, number)
        self._table[node_id]["Alive"] = False
        for process in self.node(node_id).left():
            process.left = False
        for actor in self._actors.get(node_id, []):
            self.ray.kill(actor)

    def freeze_host(self, slice_name: str, number: int) -> None:
        """Make every actor on it answer nothing."""
        for actor in self._actors.get(self.node_id(slice_name, number), []):
            self.ray.freeze(actor)

    def thaw_host(self, slice_name: str, number: int) -> None:
        for actor in self._actors.get(self.node_id(slice_name, number), []):
            self.ray.thaw(actor)

    def drain(self, slice_name: str, notice_s: float) -> None:
        """Have Ray drain the slice's hosts, as before a preemption."""
        for node_id, node in self._table.items():
            if node["Labels"].get(SLICE_NAME_LABEL) == slice_name:
                self._draining[node_id] = int(1000 * (time.time() + notice_s))

    def kill_actor(self, actor_class: type, slice_name: str, number: int) -> None:
        """End the process of one of our actors on a host, which stays."""
        found = [a for a in self._actors[self.node_id(slice_name, number)] if self.ray.is_alive(a, actor_class)]
        self.ray.kill(found[-1])

    def host_actors(self) -> list[Handle]:
        """Return the TPUHostActors that there have ever been."""
        return [host.handle for host in self._hosts]

    def kill_host_actor_of(self, task: Task) -> None:
        """End the process that watches this task."""
        (found,) = (host for host in self._hosts if task.process.pid in host.adopted)
        self.ray.kill(found.handle)

    # -- actors ----------------------------------------------------------------------------------------------------

    def new_controller(self) -> Controller:
        return Controller(self.read_nodes, self.restart_controller)

    def restart_controller(self) -> None:
        """End the Controller's process, and start it anew as Ray does."""
        old = self.controller()
        self.ray.create(Controller, (), {"name": CONTROLLER_NAME})
        self.ray.kill(old)

    def _make(self, actor_class: type, args: tuple[Any, ...], options: Mapping[str, Any]) -> object:
        if issubclass(actor_class, Controller):
            return self.new_controller()
        if issubclass(actor_class, SlicePoolManager):
            return actor_class(*args)
        strategy = options["scheduling_strategy"]
        group: Reservation | None = getattr(strategy, "placement_group", None)
        if group is None:
            self._actors.setdefault(strategy.node_id, []).append(ray.get_runtime_context().current_actor)
            if issubclass(actor_class, TPUHostActor):
                self._hosts.append(Host(self.node(strategy.node_id), *args))
                return self._hosts[-1]
            assert issubclass(actor_class, LogReader), actor_class
            with mock.patch.dict(os.environ, IRIS_RAY_HOST_DIR=str(self.node(strategy.node_id).directory)):
                return LogReader()
        node = self.node(group.node_ids[strategy.placement_group_bundle_index])
        handle = ray.get_runtime_context().current_actor
        group.actors.append(handle)
        self._actors.setdefault(node.node_id, []).append(handle)
        if issubclass(actor_class, TPUHostActor):
            self._hosts.append(Host(node, *args))
            return self._hosts[-1]
        if issubclass(actor_class, TaskProcess):
            return Process(self, node, group)
        return actor_class(*args)

    def _reserve(
        self,
        bundles: Sequence[Mapping[str, float]],
        name: str,
        bundle_label_selector: Sequence[Mapping[str, str]],
    ) -> Reservation:
        node_ids = [selector["ray.io/node-id"] for selector in bundle_label_selector]
        group = Reservation(os.urandom(16).hex(), name, node_ids, bundles)
        self._groups[group.number] = group
        return group

    def _remove(self, group: Reservation) -> None:
        self._groups.pop(group.number, None)
        for actor in group.actors:
            self.ray.kill(actor)

    def reserved_nodes(self) -> set[str]:
        """Return the ids of the nodes of which a pool has reserved something."""
        return {node_id for group in self._groups.values() for node_id in group.node_ids}

    def _group_table(self, group: Reservation | None = None) -> dict[str, Any]:
        found = {
            number: {
                "name": one.name,
                "state": "CREATED",
                "bundles": dict(enumerate(one.bundles)),
                "bundles_to_node_id": dict(enumerate(one.node_ids)),
            }
            for number, one in list(self._groups.items())
        }
        return found if group is None else found[group.number]

    # -- jobs and tasks --------------------------------------------------------------------------------------------

    def work_of(self, job_id: str) -> Work:
        return self.works.get(job_id, wait_for_end)

    def begun(self, task: Task) -> Task:
        self.tasks.append(task)
        return task

    def is_running(self, task: Task) -> bool:
        """Return whether its process, or anything that it has started, may still run."""
        return task.process.left

    def last_attempt(self, job_id: str, count: int) -> list[Task]:
        """Return the tasks of the latest attempt if that many have begun and all run, else none."""
        tasks = self.tasks_of(job_id)
        found = [task for task in tasks if task.info.attempt == tasks[-1].info.attempt]
        return found if len(found) == count and all(map(self.is_running, found)) else []

    def tasks_of(self, job_id: str, attempt: int | None = None) -> list[Task]:
        """Return the tasks that have begun, of one attempt or of all, by attempt and index."""
        found = [t for t in self.tasks if t.info.job_id == job_id and attempt in (None, t.info.attempt)]
        return sorted(found, key=lambda task: (task.info.attempt, task.info.task_index))

    def request(self, spec: JobSpec, **more: Any) -> RunRequest:
        """Return what `run_on_pod` hands to its pool. `works` stands for the function."""
        return RunRequest(spec, b"", {}, **{"process": ProcessSpec(), "keep_warm": 0.0, **more})

    def controller(self) -> Handle:
        return self.ray.get_actor(CONTROLLER_NAME)


def _node(
    node_id: str, address: str, resources: Mapping[str, float], labels: Mapping[str, str] | None = None
) -> dict[str, Any]:
    return {
        "NodeID": node_id,
        "Alive": True,
        "NodeManagerAddress": address,
        "Resources": dict(resources),
        "Labels": dict(labels or {}),
    }
