"""A cluster in this process: the real Controller and everything of the command line, without Ray.

The Controller is the real object on a loop in a thread, started by the real bootstrap. Made up are the nodes, the
cluster's key-value store, and the pools: a task that a pool is ordered to start runs until the test ends it.
"""

import asyncio
import contextlib
import hashlib
import itertools
import json
import os
import secrets
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import ray
from click.testing import Result

import iris_ray
from iris_ray.actors.controller import bootstrap, pool_registry
from iris_ray.actors.controller.controller import Controller
from iris_ray.actors.controller.log_service import LogReader
from iris_ray.actors.controller.node_table import POD_TYPE_LABEL, SLICE_NAME_LABEL, WORKER_ID_LABEL, NodeTable
from iris_ray.actors.host.log_files import AttemptLog, LogWriter, logs_directory
from iris_ray.actors.pool.slice_pool_manager import SlicePoolManager
from iris_ray.actors.wire.controller_client import ControllerClient, get_or_start_controller
from iris_ray.actors.wire.messages import AttemptOrder, HostPlace, JobView, PoolView, RunRequest
from iris_ray.actors.wire.protocol import PROTOCOL_VERSION
from iris_ray.actors.wire.ray_internals import ClusterStore
from iris_ray.actors.wire.shared_names import CONTROLLER_NAME
from iris_ray.actors.wire.status import JobStatus
from iris_ray.cli.exits import FAILED, OK
from iris_ray.client.submission import pool_of_this_process
from iris_ray.errors import JobCancelledError, TaskCrashedError
from iris_ray.model.jobs import JobSpec
from iris_ray.model.lifecycle import JobState, TaskState
from iris_ray.model.topology import get_tpu_config
from iris_ray.state.events import (
    AttemptEndConfirmedEvent,
    Event,
    JobCancelledEvent,
    SliceReleasedEvent,
    TaskStateChangedEvent,
)
from tests.support.command_line import Terminal, invoke
from tests.support.ray_in_process import HEAD_NODE, RayInProcess
from tests.support.worlds import gang_spec, tasks_spec

_owners = itertools.count(1)


class Store:
    """The cluster's key-value store, as a dictionary."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}

    async def set(self, key: str, value: bytes | None) -> None:
        if value is None:
            self.delete(key)
        else:
            self.put(key, value)

    async def has(self, key: str) -> bool:
        return key in self.values

    def put(self, key: str, value: bytes) -> None:
        self.values[key] = value

    def put_new(self, key: str, value: bytes) -> bool:
        return self.values.setdefault(key, value) is value

    def get(self, key: str) -> bytes | None:
        return self.values.get(key)

    def delete(self, key: str) -> None:
        self.values.pop(key, None)

    def delete_all(self, prefix: str) -> None:
        for key in self.keys(prefix):
            self.delete(key)

    def keys(self, prefix: str) -> list[str]:
        return [key for key in list(self.values) if key.startswith(prefix)]

    def items(self, prefix: str) -> dict[str, bytes]:
        return {key: self.values[key] for key in self.keys(prefix)}


@dataclass
class Run:
    """One job in a pool.

    Attributes:
        spec: as the Controller got it.
        end: its results, or the error that whoever waits for them gets.
        orders: the latest order of each of its gangs, by the index of its first task.
        hosts: where each attempt of each task runs or ran, by task index and attempt.
    """

    spec: JobSpec
    end: "asyncio.Future[list[Any]]"
    orders: dict[int, AttemptOrder] = field(default_factory=dict)
    hosts: dict[tuple[int, int], HostPlace] = field(default_factory=dict)


class Pool:
    """Stands for a SlicePoolManager. It holds a slice from an order until its attempt ends."""

    def __init__(self, alone: RunRequest | None = None) -> None:
        self.runs: dict[str, Run] = {}
        self._me = ray.get_runtime_context().current_actor
        self._owner = f"pool-{next(_owners)}"
        self._incarnation = secrets.token_hex(4)
        self._controller = ControllerClient()
        self._accepted: dict[str, asyncio.Future[bool]] = {}
        self._alone = None if alone is None else asyncio.ensure_future(self.run(alone))
        self._background: set[asyncio.Task[None]] = set()

    # -- called by drivers -----------------------------------------------------------------------------------------

    async def run(self, request: RunRequest) -> list[Any]:
        return await self.run_job(request.spec)

    async def begin(self, request: RunRequest) -> None:
        self._alone = asyncio.ensure_future(self.run(request))

    async def results(self) -> list[Any]:
        assert self._alone is not None
        return await asyncio.shield(self._alone)

    async def accepted(self, job_id: str) -> bool:
        return await asyncio.shield(self._acceptance(job_id))

    async def until_idle(self, calls: int) -> None:
        await asyncio.Event().wait()

    async def run_job(self, spec: JobSpec) -> list[Any]:
        spec = replace(spec, owner=self._owner)
        run = self.runs[spec.job_id] = Run(spec, asyncio.get_running_loop().create_future())
        await self._controller.ask("submit", spec, self._me, self._incarnation)
        self._acceptance(spec.job_id).set_result(True)
        try:
            return await run.end
        except asyncio.CancelledError:
            self._in_background(self._report(spec.job_id, [JobCancelledEvent(spec.job_id, "its run was cancelled")]))
            raise

    def _acceptance(self, job_id: str) -> "asyncio.Future[bool]":
        return self._accepted.setdefault(job_id, asyncio.get_running_loop().create_future())

    # -- called by the Controller ----------------------------------------------------------------------------------

    async def watched(self) -> None:
        await asyncio.Event().wait()

    async def reconnect(self, epoch: int) -> PoolView:
        orders = [order for run in self.runs.values() for order in run.orders.values()]
        return PoolView(self._incarnation, tuple(hosts[0].slice_name for order in orders for hosts in order.slices))

    async def assign(self, order: AttemptOrder) -> bool:
        run = self.runs.get(order.job_id)
        if run is None:
            return False
        known = run.orders.get(order.first_task)
        if known is None or known.attempt != order.attempt:
            run.orders[order.first_task] = order
            hosts = [host for hosts in order.slices for host in hosts]
            for index, host in enumerate(hosts, order.first_task):
                run.hosts[index, order.attempt] = host
            self._in_background(self._report(order.job_id, _changes(order, TaskState.RUNNING)))
        return True

    async def stop_attempt(self, job_id: str, first_task: int, attempt: int, reason: str, epoch: int) -> None:
        order = self.runs[job_id].orders.pop(first_task, None)
        if order is not None:
            self._in_background(self._report(job_id, self._released(order)))

    async def job_ended(self, job_id: str) -> None:
        view = await self._report(job_id, [])
        end = self.runs[job_id].end
        if not end.done():
            end.set_exception(JobCancelledError(f"job {job_id} was cancelled: {view.error}"))
            end.exception()  # maybe nobody waits for it

    async def give_up_slice(self, name: str, epoch: int) -> bool:
        return True

    async def drop_spare(self, job_id: str) -> None: ...

    async def notify_attempt(self, *told: Any) -> None: ...

    # -- what tests have its tasks do ------------------------------------------------------------------------------

    async def succeed(self, job_id: str) -> None:
        """Every task returns None."""
        run = self.runs[job_id]
        for order in list(run.orders.values()):
            view = await self._end_attempt(order, _changes(order, TaskState.SUCCEEDED))
        assert view.state is JobState.SUCCEEDED
        run.end.set_result([None] * len({index for index, _ in run.hosts}))

    async def fail(self, job_id: str, index: int, error: str) -> None:
        """One task fails; if the job is not tried again, it ends."""
        run = self.runs[job_id]
        (order,) = (order for order in run.orders.values() if index in _indices(order))
        failed: Event = TaskStateChangedEvent(job_id, index, order.attempt, TaskState.FAILED, error)
        view = await self._end_attempt(order, [*_changes(order, TaskState.RUNNING), failed])
        if view.state.finished:
            run.end.set_exception(TaskCrashedError(f"job {job_id} failed: {error}"))
            run.end.exception()  # maybe nobody waits for it

    async def _end_attempt(self, order: AttemptOrder, events: list[Event]) -> JobView:
        del self.runs[order.job_id].orders[order.first_task]
        confirmed = AttemptEndConfirmedEvent(order.job_id, order.attempt, order.first_task)
        return await self._report(order.job_id, [*events, *self._released(order), confirmed], order.first_task)

    def _released(self, order: AttemptOrder) -> list[Event]:
        return [SliceReleasedEvent(hosts[0].slice_name, self._owner) for hosts in order.slices]

    async def _report(self, job_id: str, events: list[Event], index: int = 0) -> JobView:
        view: JobView = await self._controller.ask("report", job_id, events, index)
        return view

    def _in_background(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)


def _indices(order: AttemptOrder) -> range:
    return range(order.first_task, order.first_task + sum(map(len, order.slices)))


def _changes(order: AttemptOrder, state: TaskState) -> list[Event]:
    return [TaskStateChangedEvent(order.job_id, index, order.attempt, state) for index in _indices(order)]


class ControllerOf(Controller):
    """A Controller that some version of iris_ray has started; it stays of that version."""

    def __init__(self, read_nodes: Callable[[], NodeTable], version: str, protocol: int) -> None:
        super().__init__(read_nodes)
        self._of = version, protocol

    async def versions(self) -> dict[str, Any]:
        return {"version": self._of[0], "protocol": self._of[1]}

    async def about(self) -> dict[str, Any]:
        return await super().about() | {"version": self._of[0]}


class ClusterInProcess:
    """Slices ``v4-16-0``, ``v4-16-1``, … and a head node without chips.

    Args:
        directory: for the files of hosts.
        slices: how many of each type.

    Attributes:
        store: what the Controller has recorded.
        claimed: ids of nodes whose chips are claimed from Ray.
        new_controller: what the next bootstrap starts.
        before_bootstrap: called when a process that is to start a Controller begins.
    """

    def __init__(self, directory: Path, slices: Mapping[str, int]) -> None:
        self.store = Store()
        self.claimed: set[str] = set()
        self.new_controller: Callable[[], Controller] = lambda: self.controller_of(iris_ray.__version__)
        self.before_bootstrap: Callable[[], None] = lambda: None
        self.ray = RayInProcess(self._make)
        self._directory = directory
        self._nodes = {HEAD_NODE: _node(HEAD_NODE, "10.0.0.1", {"CPU": 8.0, "node:__internal_head__": 1.0})}
        self._pools: list[Pool] = []
        for tpu_type, count in slices.items():
            for number in range(count):
                self.add_slice(f"{tpu_type}-{number}", tpu_type)

    @contextlib.contextmanager
    def installed(self, monkeypatch: pytest.MonkeyPatch) -> Iterator["ClusterInProcess"]:
        """Within, this process is a driver of the cluster."""
        self.ray.install(monkeypatch)
        for name in (name for name in vars(Store) if not name.startswith("_")):
            monkeypatch.setattr(ClusterStore, name, staticmethod(getattr(self.store, name)))
        monkeypatch.setattr(NodeTable, "read", staticmethod(self.read_nodes))
        monkeypatch.setattr(pool_registry, "placement_group_table", dict)
        monkeypatch.setattr(sys.modules["ray.util.placement_group"], "placement_group_table", dict)
        monkeypatch.setattr(asyncio, "create_subprocess_exec", self._start_process)
        monkeypatch.delenv("RAY_ADDRESS", raising=False)
        try:
            yield self
        finally:
            pool_of_this_process.__init__()  # type: ignore[misc]  # its pool was of this cluster
            self.ray.end()

    # -- the nodes -------------------------------------------------------------------------------------------------

    def read_nodes(self) -> NodeTable:
        nodes = tuple(dict(node) for node in self._nodes.values())
        free = {node["NodeID"]: dict(node["Resources"]) for node in nodes if node["NodeID"] not in self.claimed}
        return NodeTable(nodes, {}, free | {node_id: {"CPU": 8.0} for node_id in self.claimed})

    def add_slice(self, name: str, tpu_type: str) -> None:
        place = len(self._nodes)
        for number in range(get_tpu_config(tpu_type).vm_count):
            node_id = self.node_id(name, number)
            labels = {SLICE_NAME_LABEL: name, WORKER_ID_LABEL: str(number), POD_TYPE_LABEL: tpu_type}
            resources = {"TPU": 4.0, "CPU": 8.0}
            self._nodes[node_id] = _node(node_id, f"10.0.{place}.{number}", resources, labels)

    def node_id(self, slice_name: str, number: int) -> str:
        return hashlib.sha256(f"{slice_name}/{number}".encode()).hexdigest()[:56]

    def kill_host(self, slice_name: str, number: int) -> None:
        self._nodes[self.node_id(slice_name, number)]["Alive"] = False

    # -- its actors ------------------------------------------------------------------------------------------------

    def _make(self, actor_class: type, args: tuple[Any, ...], options: Mapping[str, Any]) -> object:
        if issubclass(actor_class, Controller):
            return self.new_controller()
        if issubclass(actor_class, SlicePoolManager):
            self._pools.append(Pool(*args))
            return self._pools[-1]
        assert issubclass(actor_class, LogReader), actor_class
        host = self._host_directory(options["scheduling_strategy"].node_id)
        with mock.patch.dict(os.environ, IRIS_RAY_HOST_DIR=str(host)):
            return LogReader()

    def controller_of(self, version: str, protocol: int = PROTOCOL_VERSION) -> Controller:
        return ControllerOf(self.read_nodes, version, protocol)

    def start_controller(self) -> None:
        """As the first job of a cluster does."""
        asyncio.run(get_or_start_controller())

    def freeze_controller(self) -> None:
        """As SIGSTOP does."""
        self.ray.freeze(ray.get_actor(CONTROLLER_NAME))

    async def _start_process(self, *command: str, **_: Any) -> Any:
        assert command[1:3] == ("-m", bootstrap.__name__)
        output, code = await asyncio.to_thread(self._bootstrap, command[3])

        async def communicate() -> tuple[bytes, None]:
            return output.encode(), None

        return SimpleNamespace(communicate=communicate, returncode=code)

    def _bootstrap(self, address: str) -> tuple[str, int]:
        """What the process prints, and its exit code."""
        try:
            self.before_bootstrap()
            bootstrap.main(address)
        except SystemExit as error:
            return str(error), 1
        except Exception:
            return traceback.format_exc(), 1
        return "", 0

    # -- its jobs --------------------------------------------------------------------------------------------------

    def submit(self, job_id: str, slices: tuple[int, ...] = (1,), **changes: Any) -> str:
        """A job on v4-16 slices, by a pool of its own; returns when the Controller has it."""
        return self._submitted(gang_spec(job_id, slices=slices, **{"user": "ann", "max_retries_failure": 0} | changes))

    def submit_tasks(self, job_id: str, replicas: int, **changes: Any) -> str:
        """A job of single tasks on one CPU each."""
        wanted = {"user": "ann", "resources": {"CPU": 1.0}, "max_retries_failure": 0}
        return self._submitted(tasks_spec(job_id, replicas, **wanted | changes))

    def _submitted(self, spec: JobSpec) -> str:
        pool = self.ray.create(SlicePoolManager, (), {})
        run, accepted = pool.run_job.remote(spec).future(), pool.accepted.remote(spec.job_id).future()
        wait_until(lambda: accepted.done() or run.done())
        if not accepted.done():
            run.result()
        return spec.job_id

    def start(self, job_id: str, slices: tuple[int, ...] = (1,), **changes: Any) -> str:
        """The same, and all its tasks run."""
        self.submit(job_id, slices, **changes)
        self.wait_for_state(job_id, JobState.RUNNING)
        return job_id

    def state(self, job_id: str) -> JobState:
        return self.status(job_id).state

    def status(self, job_id: str) -> JobStatus:
        found: JobStatus = self._ask("job_status", job_id)
        return found

    def wait_for_state(self, job_id: str, state: JobState) -> None:
        wait_until(lambda: self.state(job_id) is state and not self._ask("job_status", job_id).starting)

    def wait_for_attempt(self, job_id: str, attempt: int) -> None:
        wait_until(lambda: self._ask("job_status", job_id).attempt == attempt and self.state(job_id).name == "RUNNING")

    def succeed(self, job_id: str) -> None:
        self.ray.in_thread(self._pool_of(job_id).succeed(job_id)).result(20)

    def fail(self, job_id: str, index: int, error: str = "on purpose") -> None:
        self.ray.in_thread(self._pool_of(job_id).fail(job_id, index, error)).result(20)

    def prints(self, job_id: str, index: int, text: str, attempt: int = 1) -> None:
        """An attempt of a task prints something."""
        host = self._pool_of(job_id).runs[job_id].hosts[index, attempt]
        root = logs_directory(self._host_directory(host.node_id))
        writer = LogWriter(AttemptLog(root, job_id, index, attempt))
        writer.write(text.encode())
        writer.close()

    def jobs(self) -> list[str]:
        """The ids of all jobs."""
        return [job.job_id for job in self._ask("list_jobs")]

    def has_running_job(self) -> bool:
        return any(job.state is JobState.RUNNING and not job.starting for job in self._ask("list_jobs"))

    def only_job(self) -> str:
        """The id of the only job that has not ended."""
        (job,) = (job for job in self._ask("list_jobs") if not job.state.finished)
        return str(job.job_id)

    def _pool_of(self, job_id: str) -> Pool:
        (pool,) = (pool for pool in self._pools if job_id in pool.runs)
        return pool

    def _ask(self, method: str, *args: Any) -> Any:
        return getattr(ray.get_actor(CONTROLLER_NAME), method).remote(*args).future().result(20)

    def _host_directory(self, node_id: str) -> Path:
        path = self._directory / node_id
        path.mkdir(exist_ok=True)
        return path

    def wait_for_no_host(self, slice_name: str, number: int) -> None:
        """Until the Controller knows that the host is gone."""
        node_id = self.node_id(slice_name, number)
        wait_until(lambda: node_id not in {worker.node_id for worker in self._ask("list_workers")})

    # -- the command line ------------------------------------------------------------------------------------------

    def iris(self, *arguments: str, code: int = OK, user: str = "ann", quotes: bool = False) -> Result:
        """Run a command without a terminal; fail if it ends with another code.

        Args:
            arguments: of the command.
            code: the exit code that is expected; those of bad usage and of no cluster come with one line.
            user: who runs it.
            quotes: whether it quotes what another process has printed, which may be more than that line.
        """
        done = invoke(*arguments, IRIS_USER=user, RAY_ADDRESS=None)
        assert done.exit_code == code, done.output
        assert quotes or code in (OK, FAILED) or done.stderr.count("\n") == 1, done.stderr
        return done

    def json(self, *arguments: str, code: int = OK) -> Any:
        return json.loads(self.iris(*arguments, "--json", code=code).stdout)

    @contextlib.contextmanager
    def meanwhile(self, story: Callable[[], None]) -> Iterator[None]:
        """While a command runs within, something happens beside it; what goes wrong there is raised at the end."""
        with ThreadPoolExecutor(1) as beside:
            told = beside.submit(story)
            yield
            told.result()

    def on_terminal(self, *arguments: str, person: Terminal) -> int:
        """A command on a terminal, and its exit code."""
        self.ray.has_pressed_ctrl_c = person.has_pressed_ctrl_c
        with mock.patch.dict(os.environ, IRIS_USER="ann"):
            return person.run(*arguments)


def _node(
    node_id: str, address: str, resources: Mapping[str, float], labels: Mapping[str, str] | None = None
) -> dict[str, Any]:
    return {
        "NodeID": node_id,
        "Alive": True,
        "NodeManagerAddress": address,
        "Resources": resources,
        "Labels": labels or {},
    }


def wait_until(condition: Callable[[], Any], timeout_s: float = 20.0) -> Any:
    """The condition's first true value."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"waited {timeout_s} s in vain"
        time.sleep(0.01)
    return value
