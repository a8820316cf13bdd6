"""The processes of slots, from their creation to the confirmed end, and the status of all slots for people."""

import asyncio
import functools
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from iris_ray.actors.calls.asking import Actor
from iris_ray.actors.calls.background import BackgroundTasks
from iris_ray.processes.identity import ProcessIdentity
from iris_ray.slots.actors.messages import ModelRow, SlotRow, SlotStatus
from iris_ray.slots.actors.runner_agent import RunnerAgent
from iris_ray.slots.actors.runners import HostHere, RunnerHere
from iris_ray.slots.actors.slot_actor import CALLS, SlotActor
from iris_ray.slots.actors.streams import SlotStreams
from iris_ray.slots.core.devices import DeviceKind
from iris_ray.slots.core.events import Event, SlotEnded, SlotFailed, SlotReady
from iris_ray.slots.core.instructions import CreateSlot
from iris_ray.slots.core.reconciler import Reconciler
from iris_ray.slots.core.served_models import ServedModel
from iris_ray.slots.core.slot import Slot, SlotState

UNLOAD_S = 5.0
"""How long a user's ``unload`` may take."""
GONE_S = 10.0
"""How long one look waits for a killed process to be gone."""
LONGEST_REASON = 4_000
"""The number of characters that are kept of the reason of a failed load, which status and answers repeat."""
SHARE_BYTES = "IRIS_SLOT_MEMORY"
"""The variable that tells a slot its bytes on each of its devices, with commas between them."""
SHARE = "IRIS_SLOT_MEMORY_SHARE"
"""The variable that tells a slot the part of each device that it may use: 0.5 for half, the least of all. It is a part
of the whole GPU where NVIDIA's driver says its size."""
BESIDE_SEATS = 8
"""Threads of an actor for our own calls, and for sessions that end, beside those of its seats."""


@functools.cache
def _slot_actor(seats: int) -> Any:
    """Return the actor class of slots with this number of seats: in Ray, the number of threads belongs to the class."""
    return ray.remote(concurrency_groups={CALLS: seats})(SlotActor)


@dataclass(eq=False)
class SlotProcess:
    """The process of a slot, or its processes if the runner has several hosts.

    Attributes:
        order: the instruction that created it.
        actors: one for each host of the runner. The first one is the leader, which gets the requests.
        processes: the processes of the actors, once all have begun.
        ending: whether its end was ordered.
        streams: reads the pieces of its streams.
    """

    order: CreateSlot
    actors: tuple[Actor[SlotActor], ...]
    processes: tuple[ProcessIdentity, ...] = ()
    ending: bool = False
    streams: SlotStreams = field(init=False)

    def __post_init__(self) -> None:
        self.streams = SlotStreams(lambda: self.actor.call(SlotActor.take))

    @property
    def actor(self) -> Actor[SlotActor]:
        """The leader, which gets the requests."""
        return self.actors[0]

    def kill(self) -> None:
        """End all processes at once."""
        for actor in self.actors:
            ray.kill(actor.handle)


@dataclass(eq=False)
class SlotProcesses:
    """Starts, watches and ends the processes of slots, and tells the reconciler (``hear``) about them.

    Attributes:
        runners: the runners that are there, by id.
        by_slot: the processes that may exist, by slot id.
    """

    runners: Mapping[str, RunnerHere]
    hear: Callable[[Event], None]
    by_slot: dict[str, SlotProcess] = field(default_factory=dict)
    _by_runner: defaultdict[str, dict[str, SlotProcess]] = field(default_factory=lambda: defaultdict(dict))
    _background: BackgroundTasks = field(default_factory=BackgroundTasks)

    def create(self, order: CreateSlot, pickled: bytes) -> None:
        """Start a process on each host of the runner, which loads a model."""
        hosts = self.runners[order.allocation.runner_id].hosts
        actors: list[Actor[SlotActor]] = []
        try:
            actors.extend(_started(order, host) for host in hosts)
        except Exception:  # a slot needs a process on every host
            for actor in actors:
                ray.kill(actor.handle)
            raise
        made = self.by_slot[order.slot_id] = SlotProcess(order, tuple(actors))
        self._by_runner[order.allocation.runner_id][order.slot_id] = made
        self._background.start(self._load(made, pickled), f"loading slot {order.slot_id}")
        self._background.start(self._watch(made), f"watching slot {order.slot_id}")

    def delete(self, slot_id: str) -> None:
        """End a slot's processes; `SlotEnded` follows when they are gone."""
        made = self.by_slot.get(slot_id)
        if made is None:
            asyncio.get_running_loop().call_soon(self.hear, SlotEnded(slot_id))
        elif not made.ending:
            made.ending = True
            self._background.start(self._end(made), f"ending slot {slot_id}")

    async def alive_on(self, runner_id: str, runner: RunnerHere) -> set[str]:
        """Return the ids of the slots with processes on a runner, starting ones included.

        Raises:
            RayError: an agent of the runner can't be reached.
        """
        here = dict(self._by_runner.get(runner_id, {}))
        known = {slot_id: each.processes for slot_id, each in here.items() if each.processes}
        asked = [
            host.agent.call(RunnerAgent.alive, {slot_id: processes[number] for slot_id, processes in known.items()})
            for number, host in enumerate(runner.hosts)
        ]
        alive = set[str]().union(*await asyncio.gather(*asked))  # its place is in use while a process is on any host
        return {slot_id for slot_id in here if slot_id not in known or slot_id in alive}

    async def memory_on(self, runner: RunnerHere) -> dict[int, int]:
        """Return the bytes that are used of the memory of GPUs, or of a host by slots, by device; nothing for chips.

        Raises:
            RayError: the runner's agent can't be reached.
        """
        host = runner.hosts[0]
        if host.kind is DeviceKind.GPU:
            return dict(enumerate(await host.agent.call(RunnerAgent.gpu_memory_in_use, host.gpus)))
        if host.kind is not DeviceKind.CPU:
            return {}
        here = (each for each in self.by_slot.values() if each.order.allocation.runner_id == host.runner_id)
        processes = [process for each in here for process in each.processes]
        return {0: await host.agent.call(RunnerAgent.memory, processes)}

    async def _load(self, made: SlotProcess, pickled: bytes) -> None:
        try:
            why_not = await self._loaded(made, pickled)
        except RayTaskError as error:  # what a user's class does beside `load` may raise
            why_not = f"{type(error.cause).__name__}: {error.cause}"
        except RayError:
            return  # `_watch` sees that one is gone
        slot_id = made.order.slot_id
        self.hear(SlotFailed(slot_id, why_not[:LONGEST_REASON]) if why_not else SlotReady(slot_id))

    async def _loaded(self, made: SlotProcess, pickled: bytes) -> str | None:
        """Load the model in all processes. Return why that failed in one of them, or None."""
        made.processes = tuple(await asyncio.gather(*(actor.call(SlotActor.identity) for actor in made.actors)))
        try:
            others = [actor.handle for actor in made.actors[1:]]
            meeting = await made.actor.call(SlotActor.lead, others) if others else ""
        except RayTaskError as error:
            return f"its hosts can't meet: {error.cause}"
        for loaded in asyncio.as_completed([actor.call(SlotActor.load, pickled, meeting) for actor in made.actors]):
            if (why_not := await loaded) is not None:  # the others may wait for this one
                return why_not
        return None

    async def _watch(self, made: SlotProcess) -> None:
        """Wait until Ray loses the first process, kill all, and wait until their hosts confirm that they are gone."""
        why = ""
        while True:
            watches = [asyncio.ensure_future(_until_gone(actor)) for actor in made.actors]
            gone, _ = await asyncio.wait(watches, return_when=asyncio.FIRST_COMPLETED)
            why = why or gone.pop().result()
            made.kill()  # Ray may only have lost contact with one, and the others are of no use alone
            if await self._are_gone(made):
                break
        self._forget(made)
        self.hear(SlotEnded(made.order.slot_id, why))

    def _forget(self, made: SlotProcess) -> None:
        slot_id, runner_id = made.order.slot_id, made.order.allocation.runner_id
        self.by_slot.pop(slot_id, None)
        here = self._by_runner[runner_id]
        here.pop(slot_id, None)
        if not here:
            del self._by_runner[runner_id]

    async def _are_gone(self, made: SlotProcess) -> bool:
        runner = self.runners.get(made.order.allocation.runner_id)
        if runner is None:
            return True
        hosts = zip(runner.hosts, made.processes, strict=False)  # without processes no user code has run
        return all(await asyncio.gather(*(_is_gone(host, process) for host, process in hosts)))

    async def _end(self, made: SlotProcess) -> None:
        unloads = (actor.call(SlotActor.unload) for actor in made.actors)
        with suppress(TimeoutError):  # an exception on one host must not cut off the others
            async with asyncio.timeout(UNLOAD_S):
                await asyncio.gather(*unloads, return_exceptions=True)
        made.kill()


def _started(order: CreateSlot, host: HostHere) -> Actor[SlotActor]:
    seats = order.spec.requests_at_a_time
    options = {
        "num_cpus": 0,
        "max_concurrency": seats + BESIDE_SEATS,
        "scheduling_strategy": host.placement(),
        "name": f"slot {order.slot_id} of {order.spec.name}" + (f", host {host.host}" if host.hosts > 1 else ""),
    }
    each = order.allocation.bytes_each
    share = {SHARE_BYTES: ",".join(map(str, each)), SHARE: f"{host.share(order.allocation.devices, each):.4f}"}
    variables = {**host.variables_for(order.allocation.devices), **share}
    return Actor(_slot_actor(seats).options(**options).remote(variables))


async def _until_gone(actor: Actor[SlotActor]) -> str:
    """Return when an actor is gone: the error that its start has raised, or ""."""
    try:
        await actor.call(SlotActor.watch)
    except RayError as error:
        if getattr(error, "actor_init_failed", False):
            return str(error).strip().splitlines()[-1][:LONGEST_REASON]
    return ""


async def _is_gone(host: HostHere, process: ProcessIdentity) -> bool:
    try:
        return await host.agent.call(RunnerAgent.wait_gone, process, GONE_S)
    except RayError:  # the host is gone
        return True


# -- status ------------------------------------------------------------------------------------------------------------


def status_of(
    core: Reconciler,
    processes: Mapping[str, SlotProcess],
    now: float,
    in_use: Mapping[str, Mapping[int, int]] = MappingProxyType({}),
) -> SlotStatus:
    """Return the status of runners, slots and models.

    Args:
        in_use: the bytes that are used of each device, by runner, as they were last measured.
    """
    runners = {runner_id: tuple(core.fleet.books[runner_id].free_now()) for runner_id in core.fleet.runners}
    slots = tuple(_slot_row(core, slot, processes.get(slot.slot_id), now) for slot in core.fleet.slots.values())
    models = tuple(_model_row(core, model) for model in core.models.values())
    memory = {each.runner_id: tuple(device.memory for device in each.devices) for each in core.fleet.runners.values()}
    measured = {each: tuple(found.values()) for each, found in in_use.items() if found and each in runners}
    return SlotStatus(runners, slots, models, memory, measured)


def _slot_row(core: Reconciler, slot: Slot, made: SlotProcess | None, now: float) -> SlotRow:
    return SlotRow(
        slot_id=slot.slot_id,
        model=slot.model,
        runner=slot.allocation.runner_id,
        devices=slot.allocation.devices,
        memory=slot.allocation.total,
        state=slot.state.value,
        active=len(slot.active),
        sessions=len(core.sessions.on(slot)),
        idle_s=0.0 if slot.active else now - slot.last_activity,
        pid=made.processes[0].pid if made and made.processes else 0,
    )


def _model_row(core: Reconciler, model: ServedModel) -> ModelRow:
    slots = core.fleet.slots_of(model.spec.name)
    waiting = core.queue.waiting(model.spec.name)
    misses_replicas = sum(slot.wanted for slot in slots) < model.replicas
    return ModelRow(
        model=model.spec.name,
        slots=sum(slot.state is SlotState.READY for slot in slots),
        starting=sum(slot.state in (SlotState.PLANNED, SlotState.STARTING) for slot in slots),
        waiting=waiting,
        replicas=model.replicas,
        load_s=model.load_s,
        failures=model.failures,
        waits_for=model.waits_for if waiting or misses_replicas else "",
    )
