"""Capacity in the Controller: requests for missing slices, provisioners' reports, and the provider's word on losses."""

import asyncio
import logging
from collections.abc import Mapping

from iris_ray.actors.calls.service_parts import RunningPart
from iris_ray.actors.controller.services import Controller, ControllerPart, Gauge, Happening, PlainValue, Published
from iris_ray.capacity.autoscaler import Demand
from iris_ray.capacity.board import CapacityBoard, capacity_rows
from iris_ray.capacity.calls import CapacityCalls
from iris_ray.capacity.cloud_tpu import ProviderWords
from iris_ray.capacity.core import CapacityReport
from iris_ray.capacity.demand import WaitingGang, demand_of, missing_slices, slices_in, slices_to_remove
from iris_ray.capacity.kuberay_demand import find_demand
from iris_ray.capacity.lower_bands import ChipsLeft, ChipsWanted, left_for, promise_for
from iris_ray.capacity.settings import AUTOSCALER_DEMAND, CLOUD_TPU
from iris_ray.errors import ProviderError
from iris_ray.model.jobs import Job
from iris_ray.model.outcomes import ProviderWord
from iris_ray.scheduler.pending_reason import PendingReason
from iris_ray.state.instructions import ReclaimSlice

logger = logging.getLogger(__name__)

LOOK_S = 0.5
"""The interval between two looks at missing slices while somebody is asked for them."""
MEASURE_S = 5.0
"""The interval between two looks at missing slices otherwise, for metrics."""


class CapacityInController(ControllerPart):
    """See `CapacityCalls`."""

    calls = (CapacityCalls,)

    def __init__(self, controller: Controller, running: RunningPart[Happening]) -> None:
        super().__init__(controller, running)
        self._state = controller.state
        self._clock = controller.clock
        self._board = CapacityBoard(controller.clock)
        self.restored("the names of provisioners", self._board.restore)
        self._provider = ProviderWords()
        self._demand: Demand | None = None
        self._asked_types: set[str] = set()  # for which `Demand.words` may have something to say
        self._missing: Mapping[str, int] = {}
        self._missing_since: dict[str, float] = {}
        self._measured_at = float("-inf")
        self._published: Published | None = None

    async def started(self) -> None:
        self._provider.ask_at(self._state.settings.value(CLOUD_TPU))

    async def run(self) -> None:
        self._demand = await self.in_thread(find_demand)
        while True:
            await self._look()
            await self._reclaim()
            await asyncio.sleep(LOOK_S)

    def close(self) -> None:
        super().close()
        self._provider.close()

    async def _look(self) -> None:
        """Request the missing slices, and publish requests, reports and metrics."""
        demand = self._demand
        try:
            if demand is not None and ((is_shown := self._is_shown(demand)) or not demand.is_gone):
                missing = missing_slices(self._waits(), self._state.fleet) if is_shown else {}
                self._asked_types = {*missing, *demand.asked}
                await self.in_thread(demand.update, missing, slices_in(self._state.fleet))
        except ProviderError as error:
            logger.warning("asking for missing slices failed; trying again: %s", error)
        except Exception:
            logger.exception("asking for missing slices failed; trying again")
        if (now := self._clock.now()) >= self._measured_at + MEASURE_S:
            self._measured_at = now
            missing = missing_slices(self._waits(), self._state.fleet)
            self._missing = {tpu_type: sum(gangs) for tpu_type, gangs in missing.items()}
            self._missing_since = {kind: self._missing_since.get(kind, now) for kind in self._missing}
        self._publish()

    def _is_shown(self, demand: Demand) -> bool:
        return demand.is_shown(self._state.settings.value(AUTOSCALER_DEMAND))

    # -- what the kernel shows -------------------------------------------------------------------------------------

    def _publish(self) -> None:
        demand, reports = self._demand, self._board.reports()
        is_asked = demand is not None and self._is_shown(demand)
        about: dict[str, PlainValue] = {"way": demand.way, "problem": demand.problem} if demand and is_asked else {}
        published = Published(
            reasons=self._reasons(demand),
            brings_slices=is_asked or bool(reports),
            about=about,
            tables={"capacity": capacity_rows(reports)},
            prices=self._board.prices(),
            gauges=(*self._gauges_of_missing(), *self._board.gauges()),
        )
        if published != self._published:
            self.publish(published)
            self._published = published

    def _reasons(self, demand: Demand | None) -> dict[str, tuple[str, ...]]:
        found = self._board.words()
        if demand is None:
            return found
        asked = {tpu_type: demand.words(tpu_type) for tpu_type in self._asked_types}
        return {tpu_type: (*asked.get(tpu_type, ()), *found.get(tpu_type, ())) for tpu_type in {**asked, **found}}

    def _gauges_of_missing(self) -> list[Gauge]:
        now = self._clock.now()
        times = [("iris_missing_slices_seconds", (kind,), now - since) for kind, since in self._missing_since.items()]
        return [*(("iris_missing_slices", (kind,), float(n)) for kind, n in self._missing.items()), *times]

    async def _reclaim(self) -> None:
        """Have pools release the slices that they keep warm, and that are to be removed."""
        state = self._state
        waiting = (job for job in state.pending().others.values() if job.promise is not None)
        names = [name for job in waiting for name in slices_to_remove(job, state.fleet)]
        idle = [name for name in names if not any(host.occupants for host in state.fleet.slice_workers(name))]
        held = [ReclaimSlice(one, state.holders[one], name) for name in idle for one in state.fleet.held_on(name)]
        if held and (problem := await self.controller.reclaim(held)) is not None:
            logger.debug("a slice that is to be removed is not released yet: %s", problem)

    async def slices_lost(self, names: frozenset[str]) -> Mapping[str, ProviderWord]:
        self._provider.ask_at(self._state.settings.value(CLOUD_TPU))
        return await self._provider.about(names)

    # -- calls -----------------------------------------------------------------------------------------------------

    async def demand(self) -> list[WaitingGang]:
        return demand_of(self._state, self._waits(), self._clock.now())

    def _waits(self) -> list[tuple[Job, PendingReason]]:
        jobs = self._state.jobs
        return [(jobs[i], why) for i, why in self.controller.planner.pending_reasons.items() if i in jobs]

    async def leave_chips(self, wanted: ChipsWanted, user: str) -> ChipsLeft:
        self.controller.permissions.require_operator(user, "have jobs leave slices for another type of slices")
        state, planner = self._state, self.controller.planner
        event = promise_for(wanted, state, planner.rules, self._waits(), self._clock.now())
        if isinstance(event, str):
            return ChipsLeft(why_not=event)
        if event is not None:
            leave = [*map(str, event.leave)]
            level = logging.WARNING if leave else logging.INFO
            logger.log(level, "slices for %s: %s, left by %s %s", wanted.job_id, event.node_ids, leave, event.reason)
            planner.counts["evicted"] += len(event.leave)
            await self.controller.recorded([event])
        return left_for(wanted.job_id, state, self._clock.now())

    async def report_capacity(self, report: CapacityReport) -> None:
        self._board.take(report)
        self._publish()

    async def lease_provisioner(self, owner: str, instance: str, seconds: float) -> bool:
        is_last = self._board.lease(owner, instance, seconds)
        self.record(self._board.record())
        await self.controller.recorded([])
        return is_last
