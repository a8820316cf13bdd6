"""A cluster in this process: the real Controller, pools and slices, on made-up nodes and hosts.

Real are the Controller, SlicePoolManager, SliceActor, LogReader, OutputReader and HostSession with all that they use.
Made up are Ray (see `ray_in_process`), its node table, reservations and key-value store, and on each host the
processes: a `Host` stands for a TPUHostActor and a `Process` for a task's process, whose tasks do what the test says.
"""

import asyncio
import hashlib
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import ray

from iris_ray.actors.calls.names import CONTROLLER_NAME
from iris_ray.actors.calls.ray_internals import ClusterStore
from iris_ray.actors.controller import pool_registry
from iris_ray.actors.controller.controller import Controller
from iris_ray.actors.controller.node_table import POD_TYPE_LABEL, SLICE_NAME_LABEL, WORKER_ID_LABEL, NodeTable
from iris_ray.actors.host.host_actor import TPUHostActor
from iris_ray.actors.pool import actor as pool_actor
from iris_ray.actors.pool import reserved_slice, slice_pool_manager
from iris_ray.actors.pool.slice_pool_manager import SlicePoolManager
from iris_ray.actors.protocol.messages import ProcessSpec, RunRequest, TaskLaunch
from iris_ray.actors.protocol.services import installed_services
from iris_ray.client import caller_pool
from iris_ray.model.job_spec import JobSpec
from iris_ray.model.topology import get_tpu_config
from tests.support.hosts_in_process import Host, NodeProcesses, Reservation, Task, Work, wait_for_end
from tests.support.meters import RecordedMeter
from tests.support.ray_in_process import HEAD_NODE, Handle, RayInProcess, Store

STAND_INS: dict[str, Any] = {
    "iris_ray.goodput.controller.ray_meter": RecordedMeter,
    "iris_ray.capacity.controller.find_demand": lambda: None,
}
"""What services use that is not in this process."""


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
        launches: what their processes were told, likewise.
        works: what the tasks of a job do, by job id; without an entry, `wait_for_end`.
        process_start_s: how long the first process of its kind takes to start on a host; seconds.
        history: the directory of the Controller's history; None: it keeps none.
    """

    def __init__(
        self, directory: Path, slices: Mapping[str, int], loop: asyncio.AbstractEventLoop | None = None
    ) -> None:
        self.store = Store()
        self.ray = RayInProcess(self._make, loop)
        self.tasks: list[Task] = []
        self.launches: list[TaskLaunch] = []
        self.works: dict[str, Work] = {}
        self.process_start_s = 0.0
        self.unreserved = ""  # reservations whose name has this are not made; "all": none is
        self.history: Path | None = None
        self._directory = directory
        self._table = {HEAD_NODE: _node(HEAD_NODE, "10.0.0.1", {"CPU": 8.0, "node:__internal_head__": 1.0})}
        self._nodes: dict[str, NodeProcesses] = {}
        self._draining: dict[str, int] = {}
        self._groups: dict[str, Reservation] = {}
        self.reservations_made = 0
        self._others: dict[str, dict[str, Any]] = {}  # placement groups of other Ray work
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
        installed = {service.name for service in installed_services()}
        for place, double in STAND_INS.items():
            if place.split(".")[1] in installed:
                monkeypatch.setattr(place, double)
        monkeypatch.setattr(NodeTable, "read", staticmethod(self.read_nodes))
        monkeypatch.setattr(reserved_slice, "FEW_HOSTS", 0)  # slices of two hosts stand for large ones
        monkeypatch.setattr(caller_pool, "begin_to_start_controller", lambda: None)
        monkeypatch.setattr(ray, "nodes", lambda: self.read_nodes().nodes)
        monkeypatch.setattr(reserved_slice, "_end_leftovers", SimpleNamespace(options=self._leftovers))
        for module in (reserved_slice, slice_pool_manager, pool_registry, sys.modules["ray.util.placement_group"]):
            for name, stand_in in (
                ("placement_group", self._reserve),
                ("remove_placement_group", self._remove),
                ("placement_group_table", self._group_table),
                ("placement_group_by_id", lambda group: self._groups.get(group, group)),
                ("placement_groups_in_use", self._group_names),
                ("waiting_placement_groups", self._waiting_groups),
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
        (found,) = (host for host in self._hosts if task.process.pid in host.started)
        self.ray.kill(found.handle)

    # -- actors ----------------------------------------------------------------------------------------------------

    def new_controller(self) -> Controller:
        return Controller(
            self.read_nodes,
            self.restart_controller,
            directory=lambda: self.history,
        )

    def restart_controller(self) -> None:
        """End the Controller's process, and start it anew as Ray does."""
        old = self.controller()
        self.ray.create(Controller, (), {"name": CONTROLLER_NAME, "lifetime": "detached"})
        self.ray.kill(old)

    def _make(self, actor_class: type, args: tuple[Any, ...], options: Mapping[str, Any]) -> object:
        if issubclass(actor_class, Controller):
            return self.new_controller()
        if issubclass(actor_class, (pool_actor.SlicePoolManager, SlicePoolManager)):
            return SlicePoolManager(*args)
        strategy = options["scheduling_strategy"]
        group: Reservation | None = getattr(strategy, "placement_group", None)
        if group is None:
            self._actors.setdefault(strategy.node_id, []).append(ray.get_runtime_context().current_actor)
            if issubclass(actor_class, TPUHostActor):
                self._hosts.append(Host(self, self.node(strategy.node_id), *args))
                return self._hosts[-1]
            with mock.patch.dict(os.environ, IRIS_RAY_HOST_DIR=str(self.node(strategy.node_id).directory)):
                if actor_class.__name__ == "HostSession":
                    from tests.support.sessions import SessionInProcess

                    return SessionInProcess(*args)
                assert actor_class.__name__ in ("LogReader", "OutputReader"), actor_class
                return actor_class()
        node = self.node(group.node_ids[strategy.placement_group_bundle_index])
        handle = ray.get_runtime_context().current_actor
        group.actors.append(handle)
        self._actors.setdefault(node.node_id, []).append(handle)
        if issubclass(actor_class, TPUHostActor):
            self._hosts.append(Host(self, node, *args))
            return self._hosts[-1]
        return actor_class(*args)

    def _reserve(
        self,
        bundles: Sequence[Mapping[str, float]],
        name: str,
        bundle_label_selector: Sequence[Mapping[str, str]] = (),
    ) -> Reservation:
        node_ids = [selector["ray.io/node-id"] for selector in bundle_label_selector]
        group = Reservation(os.urandom(16).hex(), name, node_ids, bundles, lambda: self._makes(name))
        self._groups[group.number] = group
        self.reservations_made += 1
        return group

    def _makes(self, name: str) -> bool:
        return not self.unreserved or (self.unreserved != "all" and self.unreserved not in name)

    def _remove(self, group: Reservation) -> None:
        self._groups.pop(group.number, None)
        for actor in group.actors:
            self.ray.kill(actor)

    def _leftovers(self, scheduling_strategy: Any, **_: Any) -> SimpleNamespace:
        """Stand for a process that ends the earlier tasks of a host."""
        group, index = scheduling_strategy.placement_group, scheduling_strategy.placement_group_bundle_index

        async def end(exclusive: bool) -> None:
            for process in self.node(group.node_ids[index]).left():
                if process.exclusive if exclusive else process.place == group.name.split("/")[2]:
                    process.kill("its host's actor is gone")

        return SimpleNamespace(remote=lambda exclusive: end(exclusive))

    def reserved_nodes(self) -> set[str]:
        """Return the ids of the nodes of which a pool has reserved something."""
        return {node_id for group in self._groups.values() for node_id in group.node_ids}

    def bundles_of(self, node_ids: set[str]) -> list[Sequence[Mapping[str, float]]]:
        """Return the bundles of the reservations of exactly these nodes."""
        return [group.bundles for group in self._groups.values() if {*group.node_ids} == node_ids]

    def _group_table(self, group: Reservation | str | None = None) -> dict[str, Any]:
        found = {
            number: {
                "name": one.name,
                "state": "CREATED" if one.is_made() else "PENDING",
                "bundles": dict(enumerate(one.bundles)),
                "bundles_to_node_id": dict(enumerate(one.node_ids)),
            }
            for number, one in list(self._groups.items())
        }
        everybodys: dict[str, Any] = found | self._others
        return everybodys if group is None else everybodys[group if isinstance(group, str) else group.number]

    def _group_names(self) -> dict[str, str]:
        return {number: group["name"] for number, group in self._group_table().items()}

    def _waiting_groups(self) -> dict[str, list[Mapping[str, float]]]:
        groups = self._group_table().items()
        return {number: [*group["bundles"].values()] for number, group in groups if group["state"] == "PENDING"}

    def others_wait(self, name: str, *bundles: Mapping[str, float]) -> None:
        """Other Ray work makes a placement group, which waits."""
        self._others[name] = {
            "name": name,
            "state": "PENDING",
            "bundles": dict(enumerate(bundles)),
            "bundles_to_node_id": {},
        }

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
