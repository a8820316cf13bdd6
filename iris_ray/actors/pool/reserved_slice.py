"""One slice that a pool holds: its reservation in Ray, and the actors that watch its hosts."""

import asyncio
import secrets
from collections.abc import Collection, Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from iris_ray.actors.calls.asking import ANSWER_TIMEOUT_S, Actor, answer
from iris_ray.actors.calls.background import BackgroundTasks
from iris_ray.actors.calls.liveness import FailureDetector, SharedWatches
from iris_ray.actors.calls.misfit import misfit
from iris_ray.actors.calls.names import reservations_of
from iris_ray.actors.calls.ray_internals import has_setup_hook
from iris_ray.actors.host.environment_actor import EnvironmentActor
from iris_ray.actors.host.host_actor import TPUHostActor
from iris_ray.actors.host.ledger import end_leftovers
from iris_ray.actors.host.task_process import TaskProcess
from iris_ray.actors.pool.slice_actor import SliceActor
from iris_ray.actors.protocol.answers import Gone, Unreachable
from iris_ray.actors.protocol.host_interface import HostInterface
from iris_ray.actors.protocol.messages import HOST_SILENCE_S, HostPlace, ProcessSpec, SliceReady
from iris_ray.model.lifecycle import AttemptId
from iris_ray.model.workers import GPU, TPU

# Made once: Ray exports a class anew for each ray.remote(...).
_SliceActor, _TPUHostActor = ray.remote(SliceActor), ray.remote(TPUHostActor)
_TaskProcess, _EnvironmentActor = ray.remote(TaskProcess), ray.remote(EnvironmentActor)
_end_leftovers = ray.remote(end_leftovers)

# -- actors of a slice, or of tasks on shared hosts --------------------------------------------------------------------

FEW_HOSTS = 2
"""The SliceActor of a slice of at most this size is an object in this process. An actor would save the pool every
second call at most, and its start costs a second of CPU."""
SHARED_IDLE_S = 30.0
"""The time that the TPUHostActor of a shared host waits for its next task."""
KEPT_S = 0.1
"""The time that a reservation waits for its next task. It is short because others can't have its CPUs meanwhile."""

Bundle = dict[str, float]


@dataclass(frozen=True, slots=True)
class SliceActors:
    """The actors of a slice that has its hosts to itself. They run in its reservation and end with it.

    Attributes:
        speaker: the SliceActor.
        hosts: the TPUHostActors by host index.
        actors: the handles of all of these that are Ray actors; the SliceActor may be an object instead.
        here: the SliceActor, if it is an object in this process.
    """

    speaker: Actor[SliceActor]
    hosts: tuple[Actor[HostInterface], ...]
    actors: tuple[ActorHandle, ...]
    here: SliceActor | None = None

    @staticmethod
    def start(hosts: Sequence[HostPlace], group: PlacementGroup) -> "SliceActors":
        """Start the actors in a reservation. Return at once."""
        pool, name = ray.get_runtime_context().current_actor, hosts[0].slice_name
        host_actors = tuple(
            _TPUHostActor.options(
                num_cpus=0, max_concurrency=100, scheduling_strategy=on_bundle(group, host.host_index)
            ).remote(host, True, pool)
            for host in hosts
        )
        named = tuple(Actor[HostInterface](actor, f"{name} host {i}") for i, actor in enumerate(host_actors))
        if len(hosts) <= FEW_HOSTS:
            here = SliceActor(name, host_actors)
            return SliceActors(Actor[SliceActor].here(here, f"slice {name}"), named, host_actors, here)
        options = _SliceActor.options(num_cpus=0, max_concurrency=100, scheduling_strategy=on_bundle(group, 0))
        slice_actor = options.remote(name, host_actors)
        return SliceActors(Actor[SliceActor](slice_actor, f"slice {name}"), named, (*host_actors, slice_actor))

    def end(self) -> None:
        """End the actors. Return at once."""
        if self.here is not None:
            self.here.close()
        for actor in self.actors:
            ray.kill(actor)


class SharedHost:
    """The TPUHostActor of a host on which a pool runs tasks without chips.

    Attributes:
        places: how many places use it.
        fits: whether its iris_ray is known to fit this one.
        watches: what watches it for its tasks.
    """

    def __init__(self, host: HostPlace) -> None:
        strategy = NodeAffinitySchedulingStrategy(host.node_id, soft=False)
        pool = ray.get_runtime_context().current_actor
        here = HostPlace(host.node_id, host.address, host.address, 0)
        options = _TPUHostActor.options(num_cpus=0, max_concurrency=1000, scheduling_strategy=strategy)
        self.actor: ActorHandle = options.remote(here, False, pool)
        self.node_id = host.node_id
        self.places = 0
        self.fits = False
        self.watches = SharedWatches(Actor[HostInterface](self.actor, f"host {host.address}"), f"host {host.address}")


class SharedHosts:
    """What a pool has on the hosts of its tasks without chips: a TPUHostActor for each host, and kept reservations."""

    def __init__(self) -> None:
        self._hosts: dict[str, SharedHost] = {}
        self.kept_reservations = KeptReservations()
        self._giving_back, self._watching = BackgroundTasks(), BackgroundTasks()

    @property
    def actors(self) -> Collection[SharedHost]:
        """Those that run, or start."""
        return self._hosts.values()

    def actors_for(self, hosts: Sequence[HostPlace]) -> "SharedActors":
        """Return the actors for tasks on these hosts at once, starting those that are missing."""
        return SharedActors(hosts[0].slice_name, self, [self._take(host) for host in hosts])

    def give_back(self, actors: "SharedActors", used: Sequence[SharedHost]) -> None:
        """End the tasks of a place, and the actors of hosts that stay unused. Return at once."""
        self._giving_back.start(self._give_back(actors, used), f"giving back {actors.name}")

    async def _give_back(self, actors: "SharedActors", used: Sequence[SharedHost]) -> None:
        try:
            await asyncio.gather(*(host.ask_once(HostInterface.teardown, actors.name) for host in actors.hosts))
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

    def fits(self, host: HostPlace) -> bool:
        """Return whether a task's process has started on a host, whose actor still runs."""
        return (shared := self._hosts.get(host.node_id)) is not None and shared.fits

    async def end_idle(self) -> None:
        """End the actors of hosts that no place uses, before `SHARED_IDLE_S` is up."""
        await self._giving_back.all_ended()
        for shared in list(self._hosts.values()):
            self._end_if_idle(shared)

    async def _forget_if_lost(self, host: HostPlace, shared: SharedHost) -> None:
        """Forget an actor that is gone or hangs, so that later tasks get another one. Its own tasks watch it as well.

        The limit is the default, whatever limit the jobs have: an actor forgotten too soon only costs a new one.
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


Shape = tuple[list[str], Bundle]
"""The nodes of a reservation, and what it has of each."""
KeptReservation = tuple[Shape, PlacementGroup]


class KeptReservations:
    """Reservations of tasks that have just ended, for the next task of the same shape on the same hosts.

    Ray takes milliseconds to make a reservation, and keeps the record of each one that was removed for ever.
    """

    def __init__(self) -> None:
        self._kept: list[KeptReservation] = []

    def keep(self, hosts: Sequence[HostPlace], bundle: Bundle, group: PlacementGroup) -> None:
        """Keep a reservation in which no process runs for `KEPT_S`. Return at once."""
        kept = self._shape(hosts, bundle), group
        self._kept.append(kept)
        asyncio.get_running_loop().call_later(KEPT_S, self._remove, kept)

    def take(self, hosts: Sequence[HostPlace], bundle: Bundle) -> PlacementGroup | None:
        """Return a reservation of this shape, if there is one. It is the caller's then.

        If there is none, those that are kept on these hosts go at once: the task may need their CPUs.
        """
        shape = self._shape(hosts, bundle)
        for kept in self._kept:
            if kept[0] == shape:
                self._kept.remove(kept)
                return kept[1]
        for kept in [kept for kept in self._kept if not set(kept[0][0]).isdisjoint(shape[0])]:
            self._remove(kept)
        return None

    def _remove(self, kept: KeptReservation) -> None:
        for i, one in enumerate(self._kept):
            if one is kept:  # not kept anew since
                del self._kept[i]
                _remove_later(kept[1])

    @staticmethod
    def _shape(hosts: Sequence[HostPlace], bundle: Bundle) -> Shape:
        return [host.node_id for host in hosts], bundle


class SharedActors:
    """The actors of a place on shared hosts: a SliceActor in this process, and the TPUHostActors of the hosts.

    Args:
        name: the place's name.
        owner: takes the hosts back.
        shared: the hosts by index.
    """

    def __init__(self, name: str, owner: SharedHosts, shared: Sequence[SharedHost]) -> None:
        self.name = name
        fitting = [i for i, host in enumerate(shared) if host.fits]
        watches = shared[0].watches if len(shared) == 1 else None
        self._slice = SliceActor(name, [host.actor for host in shared], fitting, watches)
        self.owner = owner
        self._shared = shared
        self.speaker = Actor[SliceActor].here(self._slice, f"slice {name}")
        self.hosts = tuple(self._slice.hosts.values())

    def have_started(self) -> None:
        """Note that a task's process has started on each host, so the iris_ray there fits this one."""
        for host in self._shared:
            host.fits = True

    def end(self) -> None:
        """End the tasks of the place. Return at once."""
        self._slice.close()
        self.owner.give_back(self, self._shared)
        self._shared = ()


def on_bundle(group: PlacementGroup, index: int) -> PlacementGroupSchedulingStrategy:
    """Return Ray's scheduling strategy for an actor on a host of a reservation."""
    return PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)


# -- reserved slice ----------------------------------------------------------------------------------------------------

END_TIMEOUT_S = 10.0
"""The time that a host has to end the leftovers of the attempt before."""
LOOK_AGAIN_S = 0.2
SOONEST_S, LATEST_S = 0.002, 0.2
"""The shortest and the longest pause between two looks whether Ray has reserved the resources of a task."""
PROBE_S = 3.0
START_TIMEOUT_S = 300.0
"""The time for all hosts of a slice to start their processes, including the runtime environment."""

_ENDING = BackgroundTasks()
"""Ends processes that no attempt needs."""


@dataclass(frozen=True, slots=True)
class Generation:
    """The processes that wait for one attempt on all hosts of a slice.

    Attributes:
        number: counts up within the slice.
        actors: those that Ray has made for them alone.
        ready: done once all of them could start a task at once.
    """

    number: int
    actors: tuple[ActorHandle, ...]
    ready: "asyncio.Future[SliceReady | Unreachable]"


@dataclass(slots=True)
class ReservedSlice:
    """A reserved slice.

    Attributes:
        hosts: by host index.
        bundle: the resources reserved on each host, the chips included.
        actors: the actors that watch its hosts.
        process: how its processes are started.
        waiting: the processes that start, or wait for the next attempt; None if there are none.
        generations: how often processes were started.
        environments: for each host the actor that has the environment of its processes, if they need one.
        had_actors: whether Ray has made actors for its processes. They end with the reservation.
        has_started: whether all hosts have been ready.
        fits: whether the iris_ray of the SliceActor is known to fit this one.
        is_certain: whether Ray is known to have reserved the resources.
        used_by: the job that uses the slice, or used it last; while that job lives, the slice is kept for it.
        in_use: whether an attempt runs on it.
        spare: the spare's attempt, if a job only holds the slice ready.
        idle_since: when it became idle; seconds on the event loop's clock.
        keep_warm: seconds that it may idle.
    """

    hosts: tuple[HostPlace, ...]
    bundle: Bundle
    process: ProcessSpec
    group: PlacementGroup
    actors: SliceActors | SharedActors
    waiting: Generation | None = None
    generations: int = 0
    environments: tuple[ActorHandle, ...] = ()
    had_actors: bool = False
    has_started: bool = False
    fits: bool = False
    is_certain: bool = False
    used_by: str = ""
    in_use: bool = False
    spare: AttemptId | None = None
    idle_since: float = 0.0
    keep_warm: float = 0.0

    @property
    def name(self) -> str:
        return self.hosts[0].slice_name

    @property
    def actor(self) -> Actor[SliceActor]:
        return self.actors.speaker

    @staticmethod
    def reserve(
        owner: str,
        hosts: tuple[HostPlace, ...],
        bundle: Bundle,
        process: ProcessSpec,
        avoid_ports: Collection[int],
        shared: SharedHosts,
    ) -> "ReservedSlice":
        """Ask Ray for a slice: its reservation, and the actors that watch its hosts. Return at once.

        Bundle i is on worker i. The reservation's name says who owns it, so that the Controller finds it if its owner
        vanishes.
        """
        kept = shared.kept_reservations.take(hosts, bundle)
        group = kept or placement_group(
            [bundle] * len(hosts),
            name=f"{reservations_of(owner)}{hosts[0].slice_name}/{secrets.token_hex(4)}",
            bundle_label_selector=[{"ray.io/node-id": host.node_id} for host in hosts],
        )
        actors = SliceActors.start(hosts, group) if TPU in bundle else shared.actors_for(hosts)
        reserved = ReservedSlice(hosts, bundle, process, group, actors, is_certain=kept is not None)
        reserved.start_processes(avoid_ports)
        return reserved

    def start_processes(self, avoid_ports: Collection[int]) -> None:
        """Start processes on every host that wait for one attempt. Return at once."""
        process = replace(self.process, as_actor=self.process.as_actor or has_setup_hook())
        own: tuple[ActorHandle, ...] = ()
        if process.as_actor:
            each = [host for host in self.hosts for _ in range(process.per_host)]
            arguments = [(host.address, frozenset(avoid_ports), process.preload) for host in each]
            own = tuple(self._actor(_TaskProcess, host, *given) for host, given in zip(each, arguments, strict=True))
        elif process.needs_environment and not self.environments:
            self.environments = tuple(self._actor(_EnvironmentActor, host) for host in self.hosts)
        self.generations += 1
        ready = asyncio.ensure_future(self._prepare(self.generations, process, own or self.environments, avoid_ports))
        ready.add_done_callback(lambda done: done.cancelled() or done.exception())  # the next launch sees it
        self.waiting = Generation(self.generations, own, ready)

    def _actor(self, actor_class: Any, host: HostPlace, *arguments: Any) -> ActorHandle:
        """Start an actor in the environment of the processes. It claims their GPUs, so that Ray names those for it."""
        self.had_actors = True
        options = {"runtime_env": self.process.runtime_env} if self.process.runtime_env else {}
        gpus = self.bundle.get(GPU, 0.0) if actor_class is _TaskProcess else 0.0
        strategy = on_bundle(self.group, host.host_index)
        made: ActorHandle = actor_class.options(
            num_cpus=0, num_gpus=gpus, scheduling_strategy=strategy, **options
        ).remote(*arguments)
        return made

    async def _prepare(
        self, generation: int, process: ProcessSpec, actors: Sequence[ActorHandle], avoid_ports: Collection[int]
    ) -> SliceReady | Unreachable:
        """Return the answer of `SliceActor.start_processes`. If its iris_ray does not fit this one, return that."""
        deadline_s, start = START_TIMEOUT_S + ANSWER_TIMEOUT_S, SliceActor.start_processes
        arguments = generation, process, actors, avoid_ports, self.group.id.hex(), START_TIMEOUT_S
        starting = asyncio.ensure_future(self.actor.ask_within(deadline_s, start, *arguments))
        starting.add_done_callback(lambda done: done.cancelled() or done.exception())
        try:
            if not self.fits:
                versions = self.actor.call(SliceActor.versions)
                if (why := await misfit(versions, f"{self.name} host 0", 0, deadline_s)) is not None:
                    return why
                self.fits = True
            ready = await starting
            if isinstance(ready, SliceReady):
                if isinstance(self.actors, SharedActors):
                    self.actors.have_started()
                    if not (actors or self.is_certain):
                        await self._reserved()
                self.has_started = True
            return ready
        finally:
            starting.cancel()

    async def _reserved(self) -> None:
        """Wait until Ray has reserved the resources.

        Actors in the reservation start only then. A shared host's zygote is not in it, and forks at once.
        """
        pause_s = SOONEST_S
        while not await asyncio.to_thread(self.is_reserved):
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LATEST_S)
        self.is_certain = True

    def take_processes(self) -> int:
        """Return the number of the processes that wait, for the attempt that runs in them."""
        assert self.waiting is not None, "they were started before"
        taken, self.waiting = self.waiting, None
        return taken.number

    def drop_processes(self) -> None:
        """End the processes that wait. Return at once."""
        if (number := self._forget_processes()) is not None:
            _ENDING.start(self.actor.ask_once(SliceActor.end_processes, number), f"ending what waits on {self.name}")

    def _forget_processes(self) -> int | None:
        """Return the number of the processes that waited; None without any."""
        if self.waiting is None:
            return None
        forgotten, self.waiting = self.waiting, None
        forgotten.ready.cancel()
        for actor in forgotten.actors:
            ray.kill(actor)
        return forgotten.number

    def use_for(self, process: ProcessSpec) -> None:
        """Have the slice start processes in another way from now on."""
        self.drop_processes()
        self._end_environments()
        self.process, self.has_started = process, False

    def _end_environments(self) -> None:
        for actor in self.environments:
            ray.kill(actor)
        self.environments = ()

    def is_reserved(self) -> bool:
        """Return whether Ray has reserved the resources. This blocks for a millisecond or two."""
        return bool(placement_group_table(self.group)["state"] == "CREATED")

    @staticmethod
    def reserves_nothing(owner: str) -> bool:
        """Return whether Ray reserves nothing at all: not even next to nothing of this host within `PROBE_S`.

        Ray makes one placement group after the other. If a host vanishes while Ray waits for its answer, Ray goes on
        only when the connection breaks: by default after up to seven minutes (Ray 2.60; the settings of its servers are
        ``grpc_client_keepalive_time_ms`` and ``…_timeout_ms``).
        """
        here = {f"node:{ray.util.get_node_ip_address()}": 0.001}
        group = placement_group([here], name=f"{reservations_of(owner)}probe/{secrets.token_hex(4)}")
        try:
            return not group.wait(PROBE_S)
        finally:
            remove_placement_group(group)

    async def end_tasks(self, host_index: int) -> str | None:
        """End every task process on one of the hosts. Return None, or why one may still run; raise nothing.

        If the TPUHostActor is gone, a process that is started for that ends them. The slice can't be used again then.
        """
        host = self.hosts[host_index]
        name = f"{self.name} host {host_index}"
        try:
            async with asyncio.timeout(END_TIMEOUT_S):
                reply: Any = await self.actors.hosts[host_index].ask_within(None, HostInterface.teardown, self.name)
                if isinstance(reply, Gone):
                    options = {
                        "num_cpus": 0,
                        "max_retries": 0,
                        "scheduling_strategy": on_bundle(self.group, host_index),
                    }
                    ended = _end_leftovers.options(**options).remote(TPU in self.bundle)
                    call = answer(ended, f"a process on {name}", None)
                    reply = await _unless_lost(call, host.node_id)
        except TimeoutError:
            return f"{name} has not ended it within {END_TIMEOUT_S:g} s"
        except Exception as error:
            return str(error)
        return reply.reason if isinstance(reply, Unreachable) else None

    def discard(self, is_broken: bool = True) -> None:
        """Give the reservation back to Ray, which ends every process that runs in it. Return at once.

        Args:
            is_broken: False: all its tasks have ended in order. If it has no accelerators and nothing runs in it, it
                may wait a moment for the pool's next task.
        """
        self._forget_processes()
        self._end_environments()
        self.actors.end()
        if self.bundle.keys() & {TPU, GPU}:
            remove_placement_group(self.group)
        elif not (is_broken or self.had_actors) and isinstance(self.actors, SharedActors):
            self.actors.owner.kept_reservations.keep(self.hosts, self.bundle, self.group)
        else:
            _remove_later(self.group)


def _remove_later(group: PlacementGroup) -> None:
    """Give a reservation back to Ray, whose answer would hold up the starts of others. Return at once."""

    async def remove() -> bool:
        await asyncio.to_thread(remove_placement_group, group)
        return True

    _ENDING.repeat(remove, "giving a reservation back to Ray")


async def _unless_lost(reply: Coroutine[Any, Any, Any], node_id: str) -> Any:
    """Return the answer of a process on that host; None once Ray counts the host as dead."""
    waiting = asyncio.ensure_future(reply)
    try:
        while True:
            await asyncio.wait({waiting}, timeout=LOOK_AGAIN_S)
            if waiting.done() and not isinstance(waiting.result(), Unreachable):
                return waiting.result()
            nodes = await asyncio.to_thread(ray.nodes)
            if not any(node["NodeID"] == node_id and node["Alive"] for node in nodes):
                return None
            if waiting.done():
                return waiting.result()
    finally:
        waiting.cancel()
