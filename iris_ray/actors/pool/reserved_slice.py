"""One slice that a pool holds: its reservation in Ray, its actors and its standbys."""

import asyncio
import secrets
from collections.abc import Collection, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group

from iris_ray.actors.host.task_process import TaskProcess
from iris_ray.actors.pool.slice_crew import SharedCrew, SharedHosts, SliceCrew, on_bundle
from iris_ray.actors.pool.slice_stub import SliceStub
from iris_ray.actors.wire.answers import Gone, Unreachable, answer
from iris_ray.actors.wire.messages import HostPlace, ProcessSpec, SliceReady
from iris_ray.actors.wire.shared_names import reservations_of
from iris_ray.actors.wire.standby_stub import StandbyStub
from iris_ray.model.ids import AttemptId
from iris_ray.model.workers import GPU, TPU

END_TIMEOUT_S = 10.0
"""How long the next attempt waits for a host to end what is left of the one before."""
LOOK_AGAIN_S = 0.2
START_TIMEOUT_S = 300.0
"""How long all hosts of a slice may take to start their processes (their runtime environment included)."""

_TaskProcess = ray.remote(TaskProcess)  # made once: Ray exports a class anew for each ray.remote(...)

Bundle = dict[str, float]


@dataclass(slots=True)
class ReservedSlice:
    """A reserved slice.

    Attributes:
        hosts: by host index.
        bundle: what is reserved on each host, the chips included.
        crew: the actors that watch its hosts.
        process: what its standbys were started with.
        ready: done once every host's next task could start at once.
        used_by: the job that uses it now or did last; while that job lives, the slice is kept for it.
        in_use: an attempt runs on it.
        spare: the attempt of the job that only holds it ready, or None.
        idle_since: seconds on the event loop's clock, while idle.
        keep_warm: seconds that it may idle.
        needs_standbys: the standbys were used and not yet replaced.
    """

    hosts: tuple[HostPlace, ...]
    bundle: Bundle
    process: ProcessSpec
    group: PlacementGroup
    crew: SliceCrew | SharedCrew
    standbys: list[ActorHandle]
    ready: "asyncio.Future[SliceReady | Unreachable]"
    used_by: str = ""
    in_use: bool = False
    spare: AttemptId | None = None
    idle_since: float = 0.0
    keep_warm: float = 0.0
    needs_standbys: bool = False

    @property
    def name(self) -> str:
        return self.hosts[0].slice_name

    @property
    def stub(self) -> SliceStub:
        """Its SliceActor."""
        return self.crew.speaker

    @staticmethod
    def reserve(
        owner: str,
        hosts: tuple[HostPlace, ...],
        bundle: Bundle,
        process: ProcessSpec,
        avoid_ports: Collection[int],
        shared: SharedHosts,
    ) -> "ReservedSlice":
        """Ask Ray for the reservation, the actors that watch its hosts, and their standbys, all at once.

        Returns at once; nothing has started yet. Bundle i is on worker i. The reservation's name says whose it is, so
        that the Controller finds it again if its owner vanishes. The standbys come last: if a host's memory is nearly
        used up, Ray kills the newest process first, and the others can then say what became of the task.
        """
        group = placement_group(
            [bundle] * len(hosts),
            name=f"{reservations_of(owner)}{hosts[0].slice_name}/{secrets.token_hex(4)}",
            bundle_label_selector=[{"ray.io/node-id": host.node_id} for host in hosts],
        )
        crew = SliceCrew.start(hosts, group) if TPU in bundle else shared.crew(hosts)
        standbys = [_start_standby(group, host, process, avoid_ports, bundle.get(GPU, 0.0)) for host in hosts]
        ready = _prepare(crew, standbys)
        return ReservedSlice(hosts, bundle, process, group, crew, standbys, ready)

    def renew_standbys(self, process: ProcessSpec, avoid_ports: Collection[int]) -> None:
        """Start a fresh task process on every host, for the next task. Return at once."""
        self.needs_standbys = False
        self.process = process
        # The used ones are dropped here; their hosts' actors keep handles of their own until they are gone.
        gpus = self.bundle.get(GPU, 0.0)
        self.standbys = [_start_standby(self.group, host, process, avoid_ports, gpus) for host in self.hosts]
        self.ready = _prepare(self.crew, self.standbys)

    def is_reserved(self) -> bool:
        """Return whether Ray has set the resources aside. This blocks for a millisecond or two."""
        return bool(placement_group_table(self.group)["state"] == "CREATED")

    async def end_tasks(self, host_index: int) -> str | None:
        """End every task process on one of the hosts. Return why that is not sure, or None; raise nothing.

        If the host's actor is gone, the next task's process does it, or one that is started for that. So the slice
        can't be used again.
        """
        host = self.hosts[host_index]
        name = f"{self.name} host {host_index}"
        try:
            async with asyncio.timeout(END_TIMEOUT_S):
                reply: Any = await self.crew.hosts[host_index].teardown(None)
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
        ended = StandbyStub(heir).end_leftovers(TPU in self.bundle)
        call = answer(ended, f"a process on {self.name} host {host_index}", None)
        return await _unless_lost(call, self.hosts[host_index].node_id)

    def _idle_standby(self, host_index: int) -> ActorHandle | None:
        started = self.ready.done() and not self.ready.cancelled() and self.ready.exception() is None
        if self.needs_standbys or not started or isinstance(self.ready.result(), Unreachable):
            return None
        return self.standbys[host_index]

    def discard(self) -> None:
        """Give the reservation back to Ray, which ends every process that runs in it. Return at once."""
        self.ready.cancel()
        for standby in self.standbys:
            ray.kill(standby)
        self.crew.end()
        remove_placement_group(self.group)


async def _unless_lost(reply: Coroutine[Any, Any, Any], node_id: str) -> Any:
    """Return what a process on that host answers; None if Ray has given up the host, and so all that ran there."""
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


def _prepare(
    crew: SliceCrew | SharedCrew, standbys: Sequence[ActorHandle]
) -> "asyncio.Future[SliceReady | Unreachable]":
    ready = asyncio.ensure_future(crew.speaker.prepare(standbys, START_TIMEOUT_S))
    ready.add_done_callback(lambda done: done.cancelled() or done.exception())  # the next launch sees it
    return ready


def _start_standby(
    group: PlacementGroup, host: HostPlace, process: ProcessSpec, avoid_ports: Collection[int], gpus: float = 0.0
) -> ActorHandle:
    """Start a task process. It claims the GPUs of its task, so that Ray names them in ``CUDA_VISIBLE_DEVICES``."""
    options = {"runtime_env": process.runtime_env} if process.runtime_env else {}
    strategy = on_bundle(group, host.host_index)
    return _TaskProcess.options(num_cpus=0, num_gpus=gpus, scheduling_strategy=strategy, **options).remote(
        host.address, frozenset(avoid_ports), process.preload
    )
