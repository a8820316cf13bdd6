"""Simulated clusters that tests share: one at a time, set right again between two tests, checked after each."""

import contextlib
from collections.abc import Callable, Container
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from typing import Any

import psutil
import ray
from ray.util.placement_group import placement_group_table

from iris_ray import release
from iris_ray.actors.calls.controller_connection import find_controller
from iris_ray.actors.calls.names import PLACEMENT_GROUP_PREFIX
from iris_ray.actors.protocol.controller_interface import ControllerInterface
from iris_ray.client.connection import current_user
from iris_ray.errors import UnknownNameError
from iris_ray.model.lifecycle import job_of
from iris_ray.testing import SimulatedCluster
from tests.support.gangs import all_jobs, all_workers, free_chips, the_controller
from tests.support.waiting import wait_until

ZYGOTE, TASK = "iris_ray::zygote", "iris_ray::task"
OUR_ACTORS = ("ray::SlicePoolManager", "ray::iris_ray", "ray::SliceActor", "ray::TPUHostActor", ZYGOTE, TASK)


@dataclass(frozen=True)
class Shape:
    """A cluster as some tests want it.

    Attributes:
        name: of the shape.
        start: makes the cluster, which starts when its context is entered.
        slices: how many v4-16 slices every test finds; each has two hosts.
    """

    name: str
    start: Callable[[], AbstractContextManager[SimulatedCluster]] = field(compare=False)
    slices: int = 3


class Clusters:
    """Keeps the cluster of one shape running, until a test wants another one or none."""

    def __init__(self) -> None:
        self._shape: Shape | None = None
        self._world: World | None = None
        self._end = ExitStack()

    def of(self, shape: Shape) -> "World":
        """Return a cluster of that shape on which no job runs; another one that runs is ended."""
        if self._world is None or self._shape != shape:
            self.give_back_and_end()
            self._world, self._shape = World(self._end.enter_context(shape.start()), shape.slices), shape
        return self._world

    @property
    def world(self) -> "World":
        """The cluster that runs."""
        assert self._world is not None
        return self._world

    def run(self, world: "World") -> bool:
        """Return whether this cluster runs still: a test of the same module may have wanted another shape."""
        return self._world is world

    def end(self) -> None:
        """End the cluster that runs, if there is one."""
        self._world = None
        self._end.close()

    def give_back_and_end(self) -> None:
        """End the cluster that runs. Raise AssertionError if it can't be made as free as it was at its start."""
        try:
            if self._world is not None:
                self._world.give_everything_back()
        finally:
            self.end()


class World:
    """One running cluster.

    Args:
        cluster: it runs, and this process is a driver of it.
        slices: how many v4-16 slices it should have.
    """

    def __init__(self, cluster: SimulatedCluster, slices: int) -> None:
        self.cluster = cluster
        self._slices = slices

    def repair(self) -> None:
        """Lift every taint, and replace what is not sound, so that all slices can be used. Warm slices stay warm."""
        wait_until(self._repaired, 120)

    def _repaired(self) -> bool:
        """Do that once; return whether all is well then."""
        self._lift_taints()
        kept = [name for name in self._sound_slices() if name.startswith("v4-16-")][: self._slices]
        for name in set(self.cluster.slice_names) - set(kept):
            self.cluster.preempt_slice(name)
        for _ in range(self._slices - len(kept)):
            kept.append(self.cluster.add_slice("v4-16"))
        hosts = {self.cluster.node_id(name, number) for name in kept for number in (0, 1)}
        wait_until(lambda: _hosts_in_ray() == hosts)
        if find_controller() is not None:
            wait_until(lambda: _hosts_at_controller(usable=False) == hosts)
            return _hosts_at_controller() == hosts
        return True

    def check(self, may_run: Container[str] = ()) -> None:
        """Raise AssertionError unless every job is over, on its hosts too, and the Controller's state is consistent.

        Args:
            may_run: ids of the jobs that need not be over.
        """
        wait_until(lambda: all(job in may_run for job in unfinished_jobs()), 20)
        wait_until(lambda: all(job in may_run for job in jobs_with_hosts()), 30)
        if (controller := find_controller()) is not None:
            ray.get(controller.__ray_call__.remote(lambda self: self._state.check()))

    def clear(self, may_run: Container[str] = ()) -> None:
        """Cancel what a test that failed has left. Argument as for `check`."""
        for job_id in unfinished_jobs():
            if job_id not in may_run:
                with contextlib.suppress(UnknownNameError):  # a spare is gone with its job
                    the_controller().ask(ControllerInterface.cancel, job_id, "the test is over", current_user())
        wait_until(lambda: all(job in may_run for job in unfinished_jobs()), 30)

    def give_everything_back(self) -> None:
        """Raise AssertionError unless then every slice is free and no process of ours but the Controller is there."""
        release()
        chips = sum(node["Resources"].get("TPU", 0.0) for node in ray.nodes() if node["Alive"])
        wait_until(lambda: free_chips() == chips, 30)
        wait_until(lambda: not reservations(), 30)
        wait_until(lambda: not actors_left(self.cluster), 30)

    def _sound_slices(self) -> list[str]:
        """Slices with all their hosts, on which nothing keeps new gangs away."""
        living, names = _hosts_in_ray(), self.cluster.slice_names
        if find_controller() is not None:
            wait_until(lambda: _hosts_at_controller(usable=False) == _hosts_in_ray())
            with contextlib.suppress(AssertionError):  # some reasons against a host are over in a moment
                wait_until(lambda: _hosts_at_controller() == _hosts_in_ray(), 2)
            living = _hosts_at_controller()
        return [name for name in names if self._whole(name, living)]

    def _whole(self, name: str, living: set[str]) -> bool:
        running = self.cluster.worker_ids(name)
        hosts = {self.cluster.node_id(name, number) for number in running}
        return len(running) == 2 and hosts <= living and not any(self._frozen(name, number) for number in running)

    def _frozen(self, name: str, number: int) -> bool:
        pids = self.cluster.host_pids(name, number)
        return bool(pids) and psutil.Process(pids[0]).status() == psutil.STATUS_STOPPED

    def _lift_taints(self) -> None:
        if find_controller() is None:
            return
        for worker in all_workers():
            for attribute in worker.attributes:
                if attribute.startswith("taint:"):
                    the_controller().ask(
                        ControllerInterface.lift_taint, worker.node_id, attribute.removeprefix("taint:"), current_user()
                    )


def _hosts_in_ray() -> set[str]:
    """Node ids of the TPU hosts that Ray thinks are there."""
    return {node["NodeID"] for node in ray.nodes() if node["Alive"] and "TPU" in node["Resources"]}


def _hosts_at_controller(usable: bool = True) -> set[str]:
    """Node ids of the TPU hosts that the Controller knows; those that take new gangs, or all."""
    workers = all_workers()
    return {w.node_id for w in workers if w.slice_name and not (usable and w.unavailable)}


def unfinished_jobs() -> list[str]:
    """Ids of jobs that are not over; none where no Controller is."""
    if find_controller() is None:
        return []
    return [job.job_id for job in all_jobs() if not job.state.finished]


def jobs_with_hosts() -> set[str]:
    """Return the ids of the jobs whose tasks hold hosts. A job may be over while its processes still end."""
    if find_controller() is None:
        return set()
    return {job_of(task) for worker in all_workers() for task in worker.tasks}


def reservations() -> list[str]:
    """Names of the placement groups of ours that are there."""
    groups: list[dict[str, Any]] = list(placement_group_table().values())
    return [g["name"] for g in groups if g["name"].startswith(PLACEMENT_GROUP_PREFIX) and g["state"] != "REMOVED"]


def processes_of(cluster: SimulatedCluster, *titles: str) -> list[psutil.Process]:
    """The cluster's Ray workers, zygotes and forked tasks whose command lines begin with one of these titles.

    A zygote is a child of what takes the orphans of its simulated host, as the raylet is.
    """
    raylets = {process.pid: process for process in psutil.process_iter() if _is_raylet_of(process, cluster.address)}
    parents = {*raylets, *(process.ppid() for process in raylets.values())}
    found = list(psutil.process_iter(["cmdline", "ppid"]))
    parents |= {p.pid for p in found if p.info["ppid"] in parents and _title(p).startswith(ZYGOTE)}
    return [process for process in found if process.info["ppid"] in parents and _title(process).startswith(titles)]


def _title(process: psutil.Process) -> str:
    return " ".join(process.info["cmdline"] or ())


def actors_left(cluster: SimulatedCluster) -> list[psutil.Process]:
    """The cluster's processes of ours, the Controller excepted."""
    return processes_of(cluster, *OUR_ACTORS)


def _is_raylet_of(process: psutil.Process, address: str) -> bool:
    with contextlib.suppress(psutil.Error):
        return process.name() == "raylet" and f"--gcs-address={address}" in process.cmdline()
    return False
