"""The slices that one calling process holds, and the jobs that it runs on them.

A SlicePoolManager lives in the caller's Ray job and ends with the calling process; all that it started ends with it.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.actor import ActorHandle

from iris_ray.actors.controller_client import get_or_start_controller
from iris_ray.actors.gang_run import GangRun
from iris_ray.actors.held_slice import HeldSlice
from iris_ray.actors.messages import AttemptOrder, ProcessSpec, RunRequest
from iris_ray.actors.resource_pool import ResourcePoolManager, Unreachable, answer
from iris_ray.events import SliceReleasedEvent

logger = logging.getLogger(__name__)

IDLE_CHECK_S = 0.5
USED_PORTS_KEPT = 1000


class SlicePoolManager(ResourcePoolManager[str]):
    """Runs gangs on slices that the Controller assigns, and keeps idle slices warm for a while."""

    def __init__(self) -> None:
        logging.basicConfig(level=logging.INFO, format="%(message)s")
        self.pool_id = ray.get_runtime_context().get_actor_id()
        self.slices: dict[str, HeldSlice] = {}
        self.runs: dict[str, GangRun] = {}
        self.controller: ActorHandle | None = None
        self.changed = asyncio.Condition()
        self.used_ports: deque[int] = deque(maxlen=USED_PORTS_KEPT)
        self._done = 0
        self._keeper: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return "iris_ray"  # what Ray's driver shows before our own messages

    def members(self) -> Mapping[str, ActorHandle]:
        return {name: held.actor for name, held in self.slices.items()}

    def member_name(self, key: str) -> str:
        return f"slice {key}"

    async def ask_hosts(self, name: str) -> dict[int, str | None]:
        """Why each host of a slice counts as lost, asked without its SliceActor; None for those that answer."""
        hosts = dict(enumerate(self.slices[name].host_actors))
        calls = (answer(actor.healthy.remote(), f"{name} host {i}", 3.0) for i, actor in hosts.items())
        answers = await asyncio.gather(*calls)
        return {i: a.reason if isinstance(a, Unreachable) else None for i, a in zip(hosts, answers, strict=True)}

    # -- called by the driver --------------------------------------------------------------------------------------

    async def run(self, request: RunRequest) -> list[Any]:
        """Run one job to its end; the results in (slice, worker) order, or the job's own error."""
        if self._keeper is None:
            self._keeper = asyncio.create_task(self._keep_idle_slices())
        if self.controller is None:
            self.controller = await get_or_start_controller()
        run = GangRun(self, request)
        self.runs[run.job_id] = run
        try:
            return await run.run()
        finally:
            del self.runs[run.job_id]
            await self._release([s for s in self.slices.values() if s.used_by == run.job_id and s.keep_warm <= 0])
            self._done += 1
            await self._notify()

    async def release(self) -> int:
        """Give up every idle slice; returns how many jobs still run."""
        await self._release([held for held in self.slices.values() if not held.in_use])
        return len(self.runs)

    async def until_idle(self, calls: int) -> None:
        """Returns when that many runs have come and gone and no slice is left."""
        async with self.changed:
            await self.changed.wait_for(lambda: self._done >= calls and not self.runs and not self.slices)

    # -- called by the Controller ----------------------------------------------------------------------------------

    async def watched(self) -> None:
        """Never returns; whoever waits for it learns of this process's end."""
        await asyncio.Event().wait()

    async def assign(self, order: AttemptOrder) -> bool:
        """Start an attempt; False if the job is not known here (any more)."""
        run = self.runs.get(order.job_id)
        if run is None:
            return False
        run.orders.put_nowait(order)
        return True

    async def stop_attempt(self, job_id: str, attempt: int, reason: str) -> None:
        """End an attempt; returns when no process of it is left."""
        if run := self.runs.get(job_id):
            await run.stop_attempt(attempt, reason)

    async def give_up_slice(self, name: str) -> bool:
        """Let go of an idle slice that somebody else needs; False if it is in use after all."""
        held = self.slices.get(name)
        if held is not None and held.in_use:
            return False
        if held is not None:
            logger.info("%s goes to another job", name)
            await self._release([held])
        return True

    # -- slices ----------------------------------------------------------------------------------------------------

    def scale_multislice(self, order: AttemptOrder, process: ProcessSpec, keep_warm: float) -> None:
        """Hold every slice of the order, ready for this kind of task: warm ones are kept, the others reserved."""
        for hosts in order.slices:
            name = hosts[0].slice_name
            held = self.slices.get(name)
            if held is not None and (held.hosts != hosts or held.bundle != order.bundle):
                self._discard(held)
                held = None
            if held is None:
                held = self.slices[name] = HeldSlice.reserve(
                    self.pool_id, hosts, order.bundle, process, self.used_ports
                )
            elif held.process != process:
                for standby in held.standbys:
                    ray.kill(standby)
                held.needs_standbys = True
            held.in_use, held.used_by = True, order.job_id
            held.keep_warm = keep_warm

    def use_standbys(self, names: Sequence[str]) -> None:
        """The standbys of these slices run tasks now; nobody else gets them."""
        for name in names:
            self.slices[name].needs_standbys = True

    def renew_standbys(self, names: Sequence[str], process: ProcessSpec) -> None:
        """Replace the standbys that were used."""
        for name in names:
            held = self.slices.get(name)
            if held is not None and held.needs_standbys:
                held.renew_standbys(process, self.used_ports)

    def retire(self, names: Sequence[str]) -> list[SliceReleasedEvent]:
        """Drop broken slices at once; their hosts may be gone."""
        events = []
        for name in names:
            if held := self.slices.get(name):
                self._discard(held)
            events.append(SliceReleasedEvent(name, self.pool_id))
        return events

    def set_idle(self, names: Sequence[str], process: ProcessSpec, job_goes_on: bool) -> None:
        """An attempt on these slices is over; get them ready for the next one if there may be one."""
        now = asyncio.get_running_loop().time()
        for name in names:
            if held := self.slices.get(name):
                held.in_use, held.idle_since = False, now
        kept = [name for name in names if name in self.slices and (job_goes_on or self.slices[name].keep_warm > 0)]
        self.renew_standbys(kept, process)

    async def _keep_idle_slices(self) -> None:
        while True:
            await asyncio.sleep(IDLE_CHECK_S)
            now = asyncio.get_running_loop().time()
            idle = [s for s in self.slices.values() if not s.in_use and s.used_by not in self.runs]
            await self._release([s for s in idle if now - s.idle_since > s.keep_warm])

    async def _release(self, slices: Sequence[HeldSlice]) -> None:
        if not slices:
            return
        for held in slices:
            held.in_use = True
        await asyncio.gather(*(self.ask(held.name, "teardown", timeout_s=20.0) for held in slices))
        for held in slices:
            self._discard(held)
        if self.controller is not None:
            await self.controller.report.remote(None, [SliceReleasedEvent(s.name, self.pool_id) for s in slices])
        await self._notify()

    def _discard(self, held: HeldSlice) -> None:
        held.discard()
        if self.slices.get(held.name) is held:
            del self.slices[held.name]

    async def _notify(self) -> None:
        async with self.changed:
            self.changed.notify_all()
