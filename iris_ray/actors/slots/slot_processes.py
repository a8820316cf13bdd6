"""The processes of slots, from their creation to the confirmed end."""

import asyncio
import functools
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError

from iris_ray.actors.slots.runners import RunnerHere
from iris_ray.actors.slots.slot_actor import CALLS, ProcessIdentity, SlotActor
from iris_ray.actors.wire.background import BackgroundTasks
from iris_ray.slots.events import Event, SlotEnded, SlotFailed, SlotReady
from iris_ray.slots.instructions import CreateSlot
from iris_ray.slots.models import SlotIdentity

UNLOAD_S = 5.0
"""How long a user's ``unload`` may take."""
GONE_S = 10.0
"""How long to wait for a killed process to be gone before looking again."""
BESIDE_SEATS = 8
"""Threads of an actor for calls of ours, beside one for each session that ends."""


@functools.cache
def _slot_actor(seats: int) -> Any:
    """Return the actor class of slots with so many seats: Ray takes their threads from the class."""
    return ray.remote(concurrency_groups={CALLS: seats})(SlotActor)


@dataclass(eq=False)
class SlotProcess:
    """One slot's process."""

    order: CreateSlot
    actor: ActorHandle
    process: ProcessIdentity | None = None
    ending: bool = False

    @property
    def identity(self) -> SlotIdentity:
        """What it serves."""
        return self.order.spec.identity


@dataclass(eq=False)
class SlotProcesses:
    """Starts, watches and ends the processes of slots, and says what becomes of them.

    Attributes:
        runners: those that are there, by id.
        hear: takes the events.
        by_slot: those that may be there.
    """

    runners: Mapping[str, RunnerHere]
    hear: Callable[[Event], None]
    by_slot: dict[str, SlotProcess] = field(default_factory=dict)
    _background: BackgroundTasks = field(default_factory=BackgroundTasks)

    def create(self, order: CreateSlot, pickled: bytes) -> None:
        """Start a process that loads a model."""
        runner = self.runners[order.allocation.runner_id]
        seats = order.spec.requests_at_a_time
        options = {
            "num_cpus": 0,
            "max_concurrency": seats + BESIDE_SEATS,
            "scheduling_strategy": runner.placement(),
            "name": f"slot {order.slot_id} of {order.spec.identity}",
        }
        variables = runner.variables_for(order.allocation.devices)
        actor = _slot_actor(seats).options(**options).remote(variables)
        made = self.by_slot[order.slot_id] = SlotProcess(order, actor)
        self._background.start(self._load(made, pickled), f"loading slot {order.slot_id}")
        self._background.start(self._watch(made), f"watching slot {order.slot_id}")

    def delete(self, slot_id: str) -> None:
        """End a process; `SlotEnded` is said once it is gone."""
        made = self.by_slot.get(slot_id)
        if made is None:
            asyncio.get_running_loop().call_soon(self.hear, SlotEnded(slot_id))
        elif not made.ending:
            made.ending = True
            self._background.start(self._end(made), f"ending slot {slot_id}")

    def on_runner(self, runner_id: str) -> dict[str, SlotProcess]:
        """Return the processes on a runner."""
        return {n: each for n, each in self.by_slot.items() if each.order.allocation.runner_id == runner_id}

    async def _load(self, made: SlotProcess, pickled: bytes) -> None:
        with suppress(RayError):  # `_watch` sees that it is gone
            made.process = await made.actor.identity.remote()
            why_not = await made.actor.load.remote(pickled)
            event = SlotFailed(made.order.slot_id, why_not) if why_not else SlotReady(made.order.slot_id)
            self.hear(event)

    async def _watch(self, made: SlotProcess) -> None:
        """Wait until the process is gone: first Ray's word, then that of its host."""
        while True:
            with suppress(RayError):
                await made.actor.watch.remote()
            if await self._is_gone(made):
                break
        self.by_slot.pop(made.order.slot_id, None)
        self.hear(SlotEnded(made.order.slot_id))

    async def _is_gone(self, made: SlotProcess) -> bool:
        runner = self.runners.get(made.order.allocation.runner_id)
        ray.kill(made.actor)  # Ray may only have lost sight of it
        if made.process is None or runner is None:
            return True  # it never ran user code, or its host is gone
        try:
            return bool(await runner.agent.wait_gone.remote(made.process, GONE_S))
        except RayError:
            return True

    async def _end(self, made: SlotProcess) -> None:
        with suppress(RayError, TimeoutError):
            await asyncio.wait_for(made.actor.unload.remote(), UNLOAD_S)
        ray.kill(made.actor)
