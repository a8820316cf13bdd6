"""One slice that a pool holds: its reservation in Ray, its actors and its standbys."""

import asyncio
import logging
from dataclasses import dataclass, field

import ray
from ray.actor import ActorHandle
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from iris_ray.actors.host_actor import TPUHostActor
from iris_ray.actors.messages import HostPlace, ProcessSpec
from iris_ray.actors.slice_actor import SliceActor
from iris_ray.actors.task_process import TaskProcess

logger = logging.getLogger(__name__)

PLACEMENT_GROUP_PREFIX = "iris_ray/"

Bundle = dict[str, float]


@dataclass(slots=True)
class HeldSlice:
    """A reserved slice.

    Attributes:
        hosts: by worker id.
        bundle: what is reserved on each host, the chips included.
        process: what its standbys were started with.
        busy_with: the job that uses it, or None.
        idle_since: seconds on the event loop's clock, while idle.
        keep_warm: seconds that it may idle.
        needs_standbys: the standbys were used and not yet replaced.
    """

    hosts: tuple[HostPlace, ...]
    bundle: Bundle
    process: ProcessSpec
    group: PlacementGroup
    actor: ActorHandle
    host_actors: tuple[ActorHandle, ...]
    standbys: list[ActorHandle]
    busy_with: str | None = None
    idle_since: float = 0.0
    keep_warm: float = 0.0
    needs_standbys: bool = False
    refill: asyncio.Task[None] | None = field(default=None)

    @property
    def name(self) -> str:
        return self.hosts[0].slice_name

    @staticmethod
    def reserve(owner: str, hosts: tuple[HostPlace, ...], bundle: Bundle, process: ProcessSpec) -> "HeldSlice":
        """Ask Ray for everything at once: the reservation, the slice's actor, its hosts' actors and their standbys.

        Returns at once; nothing has started yet. Bundle i is on worker i. The reservation's name says whose it is, so
        that the Controller finds it again if its owner vanishes.
        """
        group = placement_group(
            [bundle] * len(hosts),
            name=f"{PLACEMENT_GROUP_PREFIX}{owner}/{hosts[0].slice_name}",
            bundle_label_selector=[{"ray.io/node-id": host.node_id} for host in hosts],
        )
        standbys = [_start_standby(group, host, process) for host in hosts]
        host_actors = tuple(
            ray.remote(TPUHostActor)
            .options(num_cpus=0, max_concurrency=100, scheduling_strategy=_on_bundle(group, host.worker_id))
            .remote(host, standby)
            for host, standby in zip(hosts, standbys, strict=True)
        )
        actor = (
            ray.remote(SliceActor)
            .options(num_cpus=0, max_concurrency=100, scheduling_strategy=_on_bundle(group, 0))
            .remote(hosts[0].slice_name, host_actors)
        )
        return HeldSlice(hosts, bundle, process, group, actor, host_actors, standbys)

    async def renew_standbys(self, process: ProcessSpec) -> None:
        """Start a fresh task process on every host, for the next task."""
        self.needs_standbys = False
        self.process = process
        self.standbys = [_start_standby(self.group, host, process) for host in self.hosts]
        for host_actor, standby in zip(self.host_actors, self.standbys, strict=True):
            host_actor.adopt_standby.remote(standby)

    def discard(self) -> None:
        """Give the reservation back to Ray, which ends every process that runs in it. Returns at once."""
        if self.refill is not None:
            self.refill.cancel()
        for actor in (*self.standbys, *self.host_actors, self.actor):
            ray.kill(actor)
        remove_placement_group(self.group)


def _on_bundle(group: PlacementGroup, index: int) -> PlacementGroupSchedulingStrategy:
    return PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)


def _start_standby(group: PlacementGroup, host: HostPlace, process: ProcessSpec) -> ActorHandle:
    options = {"runtime_env": process.runtime_env} if process.runtime_env else {}
    strategy = _on_bundle(group, host.worker_id)
    return (
        ray.remote(TaskProcess).options(num_cpus=0, scheduling_strategy=strategy, **options).remote(process.preload)
    )
