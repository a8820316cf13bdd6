"""Goodput in the Controller: it measures jobs, hosts and users, and keeps the sums of time that outlive the jobs."""

import asyncio
import hashlib
import time
from dataclasses import replace
from itertools import islice

import iris_ray
from iris_ray.actors.calls.service_parts import RunningPart
from iris_ray.actors.controller.progress_board import with_latest
from iris_ray.actors.controller.services import Controller, ControllerPart, Happening
from iris_ray.actors.controller.views import conditions_of
from iris_ray.actors.protocol.status import PAGE, HostCondition, JobFacts
from iris_ray.errors import InvalidRequestError
from iris_ray.goodput.calls import GoodputCalls, JobGoodput, UserDay
from iris_ray.goodput.core import job_goodput
from iris_ray.goodput.metrics import ControllerFacts, Measurements, ray_meter
from iris_ray.goodput.sums import ChipState, Sums, day_of
from iris_ray.model.jobs import Job
from iris_ray.model.topology import get_tpu_config
from iris_ray.model.workers import TPU
from iris_ray.scheduler.planner import gangs_of
from iris_ray.state import ControllerState
from iris_ray.state.events import GangAssignedEvent, TasksAssignedEvent
from iris_ray.state.job_table import is_measured

MEASURE_S = 5.0
"""The interval between two measurements."""
COUNT_CHIPS_S = 10.0
"""The interval at which the chips in each state are counted."""
RECORD_S = 60.0
"""The interval at which sums are recorded. A crash loses the sums since the last record."""


class GoodputInController(ControllerPart):
    """See `GoodputCalls`."""

    calls = (GoodputCalls,)

    def __init__(self, controller: Controller, running: RunningPart[Happening]) -> None:
        super().__init__(controller, running)
        self._state = controller.state
        self._clock = controller.clock
        self._sums = self.restored("the time of earlier jobs and chips", Sums.read) or Sums()
        self._counted_at = self._sums_recorded_at = self._clock.now()
        self._measurements = Measurements(self._state, controller.nodes.unusable, ray_meter(), self._clock.now())

    # -- measuring -------------------------------------------------------------------------------------------------

    async def happened(self, events: list[Happening]) -> None:
        now = self._clock.now()
        for event in events:
            if isinstance(event, GangAssignedEvent | TasksAssignedEvent) and event.job_id in self._state.jobs:
                job = self._state.jobs[event.job_id]
                for position in gangs_of(event):
                    self._measurements.placed(job, job.gangs[position], now)

    async def run(self) -> None:
        while True:
            await asyncio.sleep(MEASURE_S)
            now = self._clock.now()
            self._measurements.look(now)
            self._measurements.look_at_controller(self._facts())
            self._measurements.look_at_services(self.controller.health(), self.controller.board.gauges())
            if now >= self._counted_at + COUNT_CHIPS_S:
                chips = chips_by_state(self._state, now)
                self._sums.fleet.add(day_of(self._clock.wall(now)), chips, now - self._counted_at)
                self._counted_at = now
            if now >= self._sums_recorded_at + RECORD_S:
                self._record_sums()

    def _facts(self) -> ControllerFacts:
        of = self.controller
        aside = {"job": {**of.contained.jobs, **of.planner.left_out}, "record": of.contained.records}
        since = {kind: [self._clock.wall(one.since or 0.0) for one in found.values()] for kind, found in aside.items()}
        return ControllerFacts(of.epoch(), iris_ray.__version__, time.time(), *of.measurements(), since)

    # -- sums ------------------------------------------------------------------------------------------------------

    def _record_sums(self) -> None:
        self._add_forgotten()
        self._sums_recorded_at = self._clock.now()
        if (found := self._sums.to_json()) != self.recorded_value():
            self.record(found)

    def _add_forgotten(self) -> None:
        """Add the time of jobs that were just forgotten, by the wall time of their end."""
        for job in self._state.take_forgotten():
            self._sums.users.add(replace(job, ended_at=self._clock.wall(job.ended_at)))

    # -- calls -----------------------------------------------------------------------------------------------------

    async def list_goodput(self, after: int = 0) -> list[JobGoodput]:
        jobs = (job for job in self._state.jobs.values() if job.number > after and is_measured(job))
        return [self._goodput(job) for job in islice(jobs, PAGE)]

    async def job_goodput(self, job_id: str) -> JobGoodput:
        job = self.controller.job(job_id)
        if not is_measured(job):
            raise InvalidRequestError(f"{job_id} is not a gang: goodput is measured of jobs whose tasks start together")
        return self._goodput(job)

    def _goodput(self, job: Job) -> JobGoodput:
        device, heard = job.spec.device, self.controller.progress.of(job.spec.job_id)
        price = None if device is None else self.controller.board.price(get_tpu_config(device).name)
        facts = JobFacts(job, self._state, self._clock.wall, heard)
        return job_goodput(facts, with_latest(job.times, heard), self._clock.now(), price)

    async def user_times(self, since: float) -> list[UserDay]:
        self._add_forgotten()
        return self._sums.users.since(since)

    async def fleet_times(self, since: str) -> dict[str, dict[str, float]]:
        return self._sums.fleet.since(since)

    async def take_over(self, lines: bytes, user: str) -> None:
        self.controller.permissions.require_operator(user, "import what another Controller has left")
        digest = hashlib.sha256(lines).hexdigest()
        if self._sums.included == digest:
            return  # an import that failed half-way is repeated
        self._add_forgotten()
        if self._sums.users.since(0.0):
            raise InvalidRequestError("this Controller has the time of earlier jobs already; import into a new cluster")
        self._sums.include(Sums.of_export(lines))
        self._sums.included = digest
        self._record_sums()


CHIP_STATES = {
    HostCondition.SPARE: ChipState.SPARE,
    HostCondition.BUSY: ChipState.BUSY,
    HostCondition.QUARANTINED: ChipState.QUARANTINED,
    HostCondition.DRAINING: ChipState.UNAVAILABLE,
    HostCondition.ELSEWHERE: ChipState.UNAVAILABLE,
    HostCondition.CLOSED: ChipState.UNAVAILABLE,
    HostCondition.WARM: ChipState.WARM,
    HostCondition.FREE: ChipState.FREE,
}
"""The state of a host's chips by its condition; of several, the first one here counts."""


def chips_by_state(state: ControllerState, now: float) -> dict[ChipState, float]:
    """Return the number of the cluster's chips in each state."""
    found: dict[ChipState, float] = {}
    for worker in state.workers.values():
        if chips := worker.resources.get(TPU, 0.0):
            conditions = set(conditions_of(worker, state, now))
            now_in = next(chip_state for condition, chip_state in CHIP_STATES.items() if condition in conditions)
            found[now_in] = found.get(now_in, 0.0) + chips
    return found
