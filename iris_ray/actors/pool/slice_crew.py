"""The actors that watch the hosts of a reserved slice, or of the place of a task that shares its host."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import ray
from ray.actor import ActorHandle
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from iris_ray.actors.calls.actor import Actor
from iris_ray.actors.host.host_actor import TPUHostActor
from iris_ray.actors.pool.slice_actor import SliceActor
from iris_ray.actors.protocol.host_interface import HostInterface
from iris_ray.actors.wire.background import BackgroundTasks
from iris_ray.actors.wire.failure_detector import FailureDetector
from iris_ray.actors.wire.messages import HOST_SILENCE_S, HostPlace

SHARED_IDLE_S = 30.0
"""How long the TPUHostActor of a shared host waits for its next task."""

# Made once: Ray exports a class anew for each ray.remote(...).
_SliceActor, _TPUHostActor = ray.remote(SliceActor), ray.remote(TPUHostActor)


@dataclass(frozen=True, slots=True)
class SliceCrew:
    """The actors of a slice that has its hosts to itself. They run in its reservation and end with it.

    Attributes:
        speaker: the SliceActor.
        hosts: the TPUHostActors by host index.
        actors: all of them.
    """

    speaker: Actor[SliceActor]
    hosts: tuple[Actor[HostInterface], ...]
    actors: tuple[ActorHandle, ...]

    @staticmethod
    def start(hosts: Sequence[HostPlace], group: PlacementGroup) -> "SliceCrew":
        """Start the actors in a reservation. Return at once."""
        pool, name = ray.get_runtime_context().current_actor, hosts[0].slice_name
        host_actors = tuple(
            _TPUHostActor.options(
                num_cpus=0, max_concurrency=100, scheduling_strategy=on_bundle(group, host.host_index)
            ).remote(host, True, pool)
            for host in hosts
        )
        options = _SliceActor.options(num_cpus=0, max_concurrency=100, scheduling_strategy=on_bundle(group, 0))
        slice_actor = options.remote(name, host_actors)
        speaker = Actor[SliceActor](slice_actor, f"slice {name}")
        named = tuple(Actor[HostInterface](actor, f"{name} host {i}") for i, actor in enumerate(host_actors))
        return SliceCrew(speaker, named, (*host_actors, slice_actor))

    def end(self) -> None:
        """End the actors. Return at once."""
        for actor in self.actors:
            ray.kill(actor)


class SharedHost:
    """The TPUHostActor of a host on which a pool runs tasks without chips.

    Args:
        host: which host.

    Attributes:
        actor: the actor.
        node_id: the host's id in Ray.
        places: how many places use it.
    """

    def __init__(self, host: HostPlace) -> None:
        strategy = NodeAffinitySchedulingStrategy(host.node_id, soft=False)
        pool = ray.get_runtime_context().current_actor
        here = HostPlace(host.node_id, host.address, host.address, 0)
        options = _TPUHostActor.options(num_cpus=0, max_concurrency=1000, scheduling_strategy=strategy)
        self.actor: ActorHandle = options.remote(here, False, pool)
        self.node_id = host.node_id
        self.places = 0


class SharedHosts:
    """One TPUHostActor for each host on which the pool runs tasks without chips, as long as there are any."""

    def __init__(self) -> None:
        self._hosts: dict[str, SharedHost] = {}
        self._giving_back, self._watching = BackgroundTasks(), BackgroundTasks()

    def crew(self, hosts: Sequence[HostPlace]) -> "SharedCrew":
        """Return the actors of a place on these hosts, at once."""
        return SharedCrew(hosts[0].slice_name, self, [self._take(host) for host in hosts])

    def give_back(self, crew: "SharedCrew", used: Sequence[SharedHost]) -> None:
        """Have what a place has on its hosts ended. Return at once."""
        self._giving_back.start(self._give_back(crew, used), f"giving back {crew.name}")

    async def _give_back(self, crew: "SharedCrew", used: Sequence[SharedHost]) -> None:
        try:
            await asyncio.gather(*(host.ask_once(HostInterface.teardown, crew.name) for host in crew.hosts))
        finally:
            for shared in used:
                shared.places -= 1
                if not shared.places:
                    asyncio.get_running_loop().call_later(SHARED_IDLE_S, self._end_if_idle, shared)

    def _take(self, host: HostPlace) -> SharedHost:
        shared = self._hosts.get(host.node_id)
        if shared is None:
            shared = self._hosts[host.node_id] = SharedHost(host)
            self._watching.start(self._forget_if_lost(host, shared), f"watching host {host.address}")
        shared.places += 1
        return shared

    async def end_idle(self) -> None:
        """End the actors of hosts that no place uses, without waiting for a next task."""
        await self._giving_back.all_ended()
        for shared in list(self._hosts.values()):
            self._end_if_idle(shared)

    async def _forget_if_lost(self, host: HostPlace, shared: SharedHost) -> None:
        """Give later tasks another actor if this one is gone or hangs; the tasks that use it notice that themselves.

        The limit is the default, whatever limit the jobs have: to forget an actor too soon only costs a new one.
        """
        actor = Actor[HostInterface](shared.actor, f"host {host.address}")
        detector = FailureDetector(lambda _: actor.call(HostInterface.healthy), [0], HOST_SILENCE_S, since_first=True)
        try:
            await detector.found()
        finally:
            detector.stop()
        self._forget(shared)

    def _end_if_idle(self, shared: SharedHost) -> None:
        if not shared.places:
            self._forget(shared)
            ray.kill(shared.actor)

    def _forget(self, shared: SharedHost) -> None:
        if self._hosts.get(shared.node_id) is shared:
            del self._hosts[shared.node_id]


class SharedCrew:
    """The actors of a place that shares its hosts: a SliceActor in this process, and host actors of several places.

    Args:
        name: the place's name.
        owner: has the actors.
        shared: the hosts by index.
    """

    def __init__(self, name: str, owner: SharedHosts, shared: Sequence[SharedHost]) -> None:
        self.name = name
        self._slice = SliceActor(name, [host.actor for host in shared])
        self._owner = owner
        self._shared = shared
        self.speaker = Actor[SliceActor].here(self._slice, f"slice {name}")
        self.hosts = tuple(self._slice.members().values())

    def end(self) -> None:
        """End what the place has on its hosts. Return at once."""
        self._slice.close()
        self._owner.give_back(self, self._shared)
        self._shared = ()


def on_bundle(group: PlacementGroup, index: int) -> PlacementGroupSchedulingStrategy:
    """Return how Ray is told to start an actor on a host of a reservation."""
    return PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
