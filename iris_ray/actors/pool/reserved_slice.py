"""One slice that a pool holds: its reservation in Ray, the actors that watch its hosts, and its standbys."""

import asyncio
import secrets
from collections import deque
from collections.abc import Collection, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from iris_ray.actors.calls.asking import ANSWER_TIMEOUT_S, Actor, answer
from iris_ray.actors.calls.background import BackgroundTasks
from iris_ray.actors.calls.liveness import FailureDetector
from iris_ray.actors.calls.names import reservations_of
from iris_ray.actors.host.host_actor import TPUHostActor
from iris_ray.actors.host.task_process import TaskProcess
from iris_ray.actors.pool.slice_actor import SliceActor, misfit
from iris_ray.actors.protocol.answers import Gone, Unreachable
from iris_ray.actors.protocol.host_interface import HostInterface, TaskInterface
from iris_ray.actors.protocol.messages import HOST_SILENCE_S, HostPlace, ProcessSpec, SliceReady
from iris_ray.model.lifecycle import AttemptId
from iris_ray.model.workers import GPU, TPU

# Made once: Ray exports a class anew for each ray.remote(...).
_SliceActor, _TPUHostActor, _TaskProcess = ray.remote(SliceActor), ray.remote(TPUHostActor), ray.remote(TaskProcess)

# -- actors of a slice, or of tasks on shared hosts --------------------------------------------------------------------

SHARED_IDLE_S = 30.0
"""The time that the TPUHostActor of a shared host waits for its next task."""


@dataclass(frozen=True, slots=True)
class SliceActors:
    """The actors of a slice that has its hosts to itself. They run in its reservation and end with it.

    Attributes:
        speaker: the SliceActor.
        hosts: the TPUHostActors by host index.
        actors: both.
    """

    speaker: Actor[SliceActor]
    hosts: tuple[Actor[HostInterface], ...]
    actors: tuple[ActorHandle, ...]

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
        options = _SliceActor.options(num_cpus=0, max_concurrency=100, scheduling_strategy=on_bundle(group, 0))
        slice_actor = options.remote(name, host_actors)
        speaker = Actor[SliceActor](slice_actor, f"slice {name}")
        named = tuple(Actor[HostInterface](actor, f"{name} host {i}") for i, actor in enumerate(host_actors))
        return SliceActors(speaker, named, (*host_actors, slice_actor))

    def end(self) -> None:
        """End the actors. Return at once."""
        for actor in self.actors:
            ray.kill(actor)


class SharedHost:
    """The TPUHostActor of a host on which a pool runs tasks without chips, and how many places use it."""

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


class SharedActors:
    """The actors of a place on shared hosts: a SliceActor in this process, and the TPUHostActors of the hosts.

    Args:
        name: the place's name.
        owner: takes the hosts back.
        shared: the hosts by index.
    """

    def __init__(self, name: str, owner: SharedHosts, shared: Sequence[SharedHost]) -> None:
        self.name = name
        self._slice = SliceActor(name, [host.actor for host in shared])
        self._owner = owner
        self._shared = shared
        self.speaker = Actor[SliceActor].here(self._slice, f"slice {name}")
        self.hosts = tuple(self._slice.hosts.values())

    def end(self) -> None:
        """End the tasks of the place. Return at once."""
        self._slice.close()
        self._owner.give_back(self, self._shared)
        self._shared = ()


def on_bundle(group: PlacementGroup, index: int) -> PlacementGroupSchedulingStrategy:
    """Return Ray's scheduling strategy for an actor on a host of a reservation."""
    return PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)


# -- reserved slice ----------------------------------------------------------------------------------------------------

END_TIMEOUT_S = 10.0
"""The time that a host has to end the leftovers of the attempt before."""
LOOK_AGAIN_S = 0.2
PROBE_S = 3.0
START_TIMEOUT_S = 300.0
"""The time for all hosts of a slice to start their processes, including the runtime environment."""

Bundle = dict[str, float]


@dataclass(frozen=True, slots=True)
class Generation:
    """One standby on every host of a slice, for one attempt.

    Attributes:
        number: counts up within the slice.
        standbys: by host index.
        ready: done once all standbys could start a task at once.
    """

    number: int
    standbys: tuple[ActorHandle, ...]
    ready: "asyncio.Future[SliceReady | Unreachable]"


@dataclass(slots=True)
class ReservedSlice:
    """A reserved slice.

    Attributes:
        hosts: by host index.
        bundle: the resources reserved on each host, the chips included.
        actors: the actors that watch its hosts.
        process: how its standbys are started.
        waiting: the generations of standbys that wait or start; the next attempt takes the first.
        generations: how many generations were started.
        kept: how many generations are to wait.
        refill: the timer that starts missing generations, a while after the latest attempt began.
        fits: whether the iris_ray of the SliceActor is known to fit this one.
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
    waiting: deque[Generation] = field(default_factory=deque)
    generations: int = 0
    kept: int = 1
    refill: asyncio.TimerHandle | None = None
    fits: bool = False
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

    @property
    def is_warm(self) -> bool:
        """Whether a standby is ready on every host, as far as the pool knows."""
        return bool(self.waiting) and self.waiting[0].ready.done()

    @staticmethod
    def reserve(
        owner: str,
        hosts: tuple[HostPlace, ...],
        bundle: Bundle,
        process: ProcessSpec,
        avoid_ports: Collection[int],
        shared: SharedHosts,
    ) -> "ReservedSlice":
        """Ask Ray for a slice: its reservation, the actors that watch its hosts, and their standbys. Return at once.

        Bundle i is on worker i. The reservation's name says who owns it, so that the Controller finds it if its owner
        vanishes. The standbys come last: if a host's memory is nearly used up, Ray kills the newest process first, and
        the actors can still say how the task ended.
        """
        group = placement_group(
            [bundle] * len(hosts),
            name=f"{reservations_of(owner)}{hosts[0].slice_name}/{secrets.token_hex(4)}",
            bundle_label_selector=[{"ray.io/node-id": host.node_id} for host in hosts],
        )
        actors = SliceActors.start(hosts, group) if TPU in bundle else shared.actors_for(hosts)
        reserved = ReservedSlice(hosts, bundle, process, group, actors)
        reserved.start_standbys(avoid_ports)
        return reserved

    def start_standbys(self, avoid_ports: Collection[int]) -> None:
        """Start fresh task processes on every host, for one attempt. Return at once."""
        gpus = self.bundle.get(GPU, 0.0)
        hosts = [host for host in self.hosts for _ in range(self.process.per_host)]
        standbys = tuple(_start_standby(self.group, host, self.process, avoid_ports, gpus) for host in hosts)
        self.generations += 1
        ready = asyncio.ensure_future(self._prepare(self.generations, standbys))
        ready.add_done_callback(lambda done: done.cancelled() or done.exception())  # the next launch sees it
        self.waiting.append(Generation(self.generations, standbys, ready))

    async def _prepare(self, generation: int, standbys: Sequence[ActorHandle]) -> SliceReady | Unreachable:
        """Return the SliceActor's answer to `prepare`. If its iris_ray does not fit this one, return that instead."""
        deadline_s = START_TIMEOUT_S + ANSWER_TIMEOUT_S
        prepare = self.actor.ask_within(deadline_s, SliceActor.prepare, generation, standbys, START_TIMEOUT_S)
        prepared = asyncio.ensure_future(prepare)
        prepared.add_done_callback(lambda done: done.cancelled() or done.exception())
        try:
            if not self.fits:
                versions = self.actor.call(SliceActor.versions)
                if (why := await misfit(versions, f"{self.name} host 0", 0, deadline_s)) is not None:
                    return why
                self.fits = True
            return await prepared
        finally:
            prepared.cancel()

    def take_standbys(self) -> int:
        """Remove the oldest waiting generation and return its number. Its hosts keep handles to its processes."""
        return self.waiting.popleft().number

    def drop_standbys(self) -> None:
        """End the waiting standbys. Return at once."""
        while self.waiting:
            generation = self.waiting.pop()
            generation.ready.cancel()
            for standby in generation.standbys:
                ray.kill(standby)

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

        If the TPUHostActor is gone, an idle standby ends them, or else a process that is started for that. The slice
        can't be used again after that.
        """
        host = self.hosts[host_index]
        name = f"{self.name} host {host_index}"
        try:
            async with asyncio.timeout(END_TIMEOUT_S):
                reply: Any = await self.actors.hosts[host_index].ask_within(None, HostInterface.teardown, self.name)
                if isinstance(reply, Gone) and (heir := self._idle_standby(host_index)) is not None:
                    reply = await self._have_ended_by(heir, host_index)
                if isinstance(reply, Gone):
                    reply = await self._have_ended_by(_start_standby(self.group, host, ProcessSpec(), ()), host_index)
        except TimeoutError:
            return f"{name} has not ended it within {END_TIMEOUT_S:g} s"
        except Exception as error:
            return str(error)
        return reply.reason if isinstance(reply, Unreachable) else None

    async def _have_ended_by(self, heir: ActorHandle, host_index: int) -> Any:
        ended = Actor[TaskInterface](heir).call(TaskInterface.end_leftovers, TPU in self.bundle)
        call = answer(ended, f"a process on {self.name} host {host_index}", None)
        return await _unless_lost(call, self.hosts[host_index].node_id)

    def _idle_standby(self, host_index: int) -> ActorHandle | None:
        for generation in self.waiting:
            ready = generation.ready
            started = ready.done() and not ready.cancelled() and ready.exception() is None
            if started and not isinstance(ready.result(), Unreachable):
                return generation.standbys[host_index * len(generation.standbys) // len(self.hosts)]
        return None

    def discard(self) -> None:
        """Give the reservation back to Ray, which ends every process that runs in it. Return at once."""
        self.drop_standbys()
        self.actors.end()
        remove_placement_group(self.group)


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


def _start_standby(
    group: PlacementGroup, host: HostPlace, process: ProcessSpec, avoid_ports: Collection[int], gpus: float = 0.0
) -> ActorHandle:
    """Start a task process. It claims the GPUs of its task, so that Ray names them in ``CUDA_VISIBLE_DEVICES``."""
    options = {"runtime_env": process.runtime_env} if process.runtime_env else {}
    strategy = on_bundle(group, host.host_index)
    return _TaskProcess.options(num_cpus=0, num_gpus=gpus, scheduling_strategy=strategy, **options).remote(
        host.address, frozenset(avoid_ports), process.preload
    )
