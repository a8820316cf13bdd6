"""What jobs of higher bands take, on random fleets with random users: each decision is compared with all slices."""

from collections.abc import Collection
from random import Random

import pytest

from iris_ray.model.jobs import Job
from iris_ray.model.lifecycle import AttemptId
from iris_ray.model.options import PriorityBand
from iris_ray.scheduler.eviction_costs import GRACE_S, LEAST_RUN_S
from iris_ray.state.events import Event, GangAssignedEvent, PromiseEvent
from iris_ray.state.instructions import Instructions
from iris_ray.study import Simulation
from tests.proofs.test_fair_worlds import SEEDS, SLACK_S, Crowd
from tests.support.proofs import examples
from tests.support.simulations import DAY, HOUR, MINUTE
from tests.support.worlds import promised

_, PRODUCTION, INTERACTIVE, BATCH = PriorityBand
LOOKS_EVERY_S = 30.0


class Witness:
    """Looks at a cluster of equal slices, and at each decision.

    Attributes:
        able_since: PRODUCTION job that waited → since when there was enough for all of them to take.
        evictions: how often somebody was asked to give way.
    """

    def __init__(self, simulation: Simulation) -> None:
        self.able_since: dict[str, float] = {}
        self.evictions = 0
        self._simulation, self._state = simulation, simulation.state
        self._handle = simulation.state.handle_event
        simulation.state.handle_event = self._look_at  # type: ignore[method-assign]
        simulation.agenda.after(LOOKS_EVERY_S, self._look)

    def _look_at(self, event: Event) -> Instructions:
        match event:
            case PromiseEvent(job_id, leave=victims) if victims:
                self.evictions += 1
                taker = self._state.jobs[job_id]
                for victim in victims:
                    assert self._slices_for(taker, {*victims} - {victim}) < needs(taker), f"{victim}: one too many"
            case GangAssignedEvent(job_id):
                for other in self._state.pending():
                    if other.spec.priority < self._state.jobs[job_id].spec.priority:
                        assert self._free_for(other) < needs(other), f"{job_id} goes before {other.spec.job_id}"
        return self._handle(event)

    def _look(self) -> None:
        simulation, pending = self._simulation, self._state.pending()
        simulation.agenda.after(LOOKS_EVERY_S, self._look)
        for job in self._state.jobs.values():
            assert job.failures == job.preemptions == 0, f"{job.spec.job_id} is charged"
        waiting = [job for job in pending if job.spec.priority is PRODUCTION]
        protected = {attempt for attempt in self._attempts() if self._is_protected(attempt)}
        there = self._slices_for(None, self._attempts() - protected)
        if waiting and there >= sum(map(needs, waiting)):
            for job in waiting:
                self.able_since.setdefault(job.spec.job_id, simulation.now)

    def _attempts(self) -> set[AttemptId]:
        return {attempt for worker in self._state.workers.values() for _, attempt in worker.occupants}

    def _is_protected(self, attempt: AttemptId) -> bool:
        """Whether a PRODUCTION job may not take an attempt's hosts now."""
        job = self._state.jobs[attempt.job_id]
        gang = job.gangs[attempt.gang]
        least_s = LEAST_RUN_S[job.spec.priority]
        if job.spec.priority is PRODUCTION or gang.attempt != attempt.number or not gang.placed:
            return True
        return self._simulation.now < gang.running_since + least_s

    def _slices_for(self, taker: Job | None, victims: Collection[AttemptId]) -> int:
        """How many slices are free once these have ended, and what ends already, and are not kept for others."""
        taker_id = taker.spec.job_id if taker is not None else None
        return sum(
            all(
                attempt in victims or occupant in worker.ending or self._gives_way(attempt, taker_id)
                for worker in map(self._state.workers.__getitem__, hosts)
                for occupant in worker.occupants
                for attempt in [occupant[1]]
            )
            and not (taker is not None and self._is_kept(hosts, taker))
            for hosts in self._simulation.hosts.slices.values()
        )

    def _free_for(self, job: Job) -> int:
        slices = self._simulation.hosts.slices.values()
        idle = [hosts for hosts in slices if not any(self._state.workers[i].occupants for i in hosts)]
        return sum(not self._is_kept(hosts, job) for hosts in idle)

    def _gives_way(self, attempt: AttemptId, taker_id: str | None) -> bool:
        eviction = self._state.jobs[attempt.job_id].gangs[attempt.gang].eviction
        return eviction is not None and eviction.job_id == taker_id

    def _is_kept(self, hosts: Collection[str], job: Job) -> bool:
        """Whether some of the hosts are kept for another job that is of no lower band."""
        others = (
            o for o in self._state.pending() if o.promise and o is not job and o.spec.priority <= job.spec.priority
        )
        return any(not set(hosts).isdisjoint(promised(other)) for other in others)


def needs(job: Job) -> int:
    assert job.spec.coscheduling is not None
    return job.spec.coscheduling.num_groups[0]


@pytest.mark.parametrize("seed", SEEDS[: 2 + examples(20)])
def test_higher_bands_take_in_time_what_they_need_and_nobody_pays_or_passes_them(seed: int) -> None:
    """Never one victim too many. Who could take enough starts after the grace. Who returns stays behind them."""
    crowd, chance = Crowd.drawn(seed), Random(f"{seed} higher")
    simulation = crowd.simulation(BATCH)
    witness = Witness(simulation)
    for number in range(12):
        size, run_s = chance.choice((1, max(1, crowd.slices // 2), crowd.slices)), chance.uniform(5, 60) * MINUTE
        band, name = chance.choice((PRODUCTION, PRODUCTION, INTERACTIVE)), f"higher-{number}"
        simulation.submit(crowd.gang(name, name, size, run_s, band), chance.uniform(1, 20) * HOUR)
    simulation.run_until(DAY)
    simulation.state.check()
    assert witness.evictions
    for job_id, able_since in witness.able_since.items():
        job = simulation.history.jobs[job_id]
        assert job.assigned_at is not None
        assert job.assigned_at <= able_since + GRACE_S + SLACK_S, (crowd, job_id)
