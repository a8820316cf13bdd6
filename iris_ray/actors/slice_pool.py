"""The slices that one calling process holds: reserved when a job needs them, kept warm for a while, given back."""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence

import ray
from ray.actor import ActorHandle

from iris_ray.actors.held_slice import HeldSlice
from iris_ray.actors.messages import AttemptOrder, ProcessSpec
from iris_ray.actors.resource_pool import ResourcePoolManager, Unreachable, answer
from iris_ray.events import SliceReleasedEvent
from iris_ray.workers import TPU

logger = logging.getLogger(__name__)

USED_PORTS_KEPT = 1000
HEALTHY_TIMEOUT_S = 3.0
TEARDOWN_TIMEOUT_S = 20.0


class SlicePool(ResourcePoolManager[str]):
    """Slices by name. What it gives back it also says, as events for the Controller.

    Args:
        owner: the id of the SlicePoolManager that holds them.
    """

    def __init__(self, owner: str) -> None:
        self.owner = owner
        self.used_ports: deque[int] = deque(maxlen=USED_PORTS_KEPT)
        self._held: dict[str, HeldSlice] = {}
        self._leaving: dict[str, asyncio.Future[None]] = {}  # being given back; a new order reserves them afresh

    def __getitem__(self, name: str) -> HeldSlice:
        return self._held[name]

    def __contains__(self, name: str) -> bool:
        return name in self._held

    def __len__(self) -> int:
        return len(self._held) + len(self._leaving)

    def members(self) -> Mapping[str, ActorHandle]:
        return {name: held.actor for name, held in self._held.items()}

    def member_name(self, key: str) -> str:
        return f"slice {key}"

    async def ask_hosts(self, name: str) -> dict[int, str | None]:
        """Why each host of a slice counts as lost, asked without its SliceActor; None for those that answer."""
        hosts = dict(enumerate(self._held[name].host_actors))
        calls = (answer(actor.healthy.remote(), f"{name} host {i}", HEALTHY_TIMEOUT_S) for i, actor in hosts.items())
        answers = await asyncio.gather(*calls)
        return {i: a.reason if isinstance(a, Unreachable) else None for i, a in zip(hosts, answers, strict=True)}

    def slice_names(self) -> tuple[str, ...]:
        """The slices among what is held; the rest are places for single tasks."""
        return tuple(name for name, held in self._held.items() if TPU in held.bundle)

    # -- for an attempt --------------------------------------------------------------------------------------------

    def scale_multislice(self, order: AttemptOrder, process: ProcessSpec, keep_warm: float) -> None:
        """Hold every slice of the order, ready for this kind of task: warm ones are kept, the others reserved."""
        for hosts in order.slices:
            name = hosts[0].slice_name
            held = self._held.get(name)
            if held is not None and (held.hosts != hosts or held.bundle != order.bundle):
                self._discard(held)
                held = None
            if held is None:
                held = HeldSlice.reserve(self.owner, hosts, order.bundle, process, self.used_ports)
                self._held[name] = held
            elif held.process != process:
                for standby in held.standbys:
                    ray.kill(standby)
                held.needs_standbys = True
            held.in_use, held.used_by = True, order.job_id
            held.keep_warm = keep_warm
        self.renew_standbys([hosts[0].slice_name for hosts in order.slices], process)

    def is_warm(self, order: AttemptOrder) -> bool:
        """Whether every host of the order could start a task at once, as far as is known."""
        held = [self._held.get(hosts[0].slice_name) for hosts in order.slices]
        return all(one is not None and one.ready.done() and not one.needs_standbys for one in held)

    def use_standbys(self, names: Sequence[str]) -> None:
        """The standbys of these slices run tasks now; nobody else gets them."""
        for name in names:
            self._held[name].needs_standbys = True

    def renew_standbys(self, names: Sequence[str], process: ProcessSpec) -> None:
        """Replace the standbys that were used."""
        for name in names:
            held = self._held.get(name)
            if held is not None and held.needs_standbys:
                held.renew_standbys(process, self.used_ports)

    def set_idle(self, names: Sequence[str]) -> None:
        """An attempt on these slices is over; from now on others may use them."""
        now = asyncio.get_running_loop().time()
        for name in names:
            if held := self._held.get(name):
                held.in_use, held.idle_since = False, now

    def refill(self, names: Sequence[str], process: ProcessSpec, job_goes_on: bool) -> None:
        """Get these slices ready for the next attempt, if there may be one."""
        self.renew_standbys([n for n in names if job_goes_on or (n in self and self[n].keep_warm > 0)], process)

    def retire(self, names: Sequence[str]) -> list[SliceReleasedEvent]:
        """Drop broken slices at once; their hosts may be gone."""
        for name in names:
            if held := self._held.get(name):
                self._discard(held)
        return [SliceReleasedEvent(name, self.owner) for name in names]

    # -- giving back -----------------------------------------------------------------------------------------------

    async def release_if(self, condition: Callable[[HeldSlice], bool]) -> list[SliceReleasedEvent]:
        """Give back the idle slices for which the condition holds; returns when their processes are gone."""
        chosen = [held for held in self._held.values() if not held.in_use and condition(held)]
        for held in chosen:
            del self._held[held.name]
            self._leaving[held.name] = asyncio.ensure_future(self._tear_down(held))
        for held in chosen:
            await self.left(held.name)
        return [SliceReleasedEvent(held.name, self.owner) for held in chosen]

    async def settle(self, condition: Callable[[HeldSlice], bool]) -> None:
        """Returns when the slices for which the condition holds are idle, or after a while."""
        deadline = asyncio.get_running_loop().time() + TEARDOWN_TIMEOUT_S
        while any(held.in_use and condition(held) for held in self._held.values()):
            if asyncio.get_running_loop().time() > deadline:
                return
            await asyncio.sleep(0.02)

    async def left(self, name: str) -> None:
        """Returns when the slice is not being given back (any more)."""
        if leaving := self._leaving.get(name):
            await asyncio.shield(leaving)

    async def _tear_down(self, held: HeldSlice) -> None:
        try:
            await answer(held.actor.teardown.remote(), f"slice {held.name}", TEARDOWN_TIMEOUT_S)
        except Exception:
            logger.exception("%s could not be torn down; it ends with its reservation", held.name)
        finally:
            held.discard()
            del self._leaving[held.name]

    def _discard(self, held: HeldSlice) -> None:
        held.discard()
        if self._held.get(held.name) is held:
            del self._held[held.name]
