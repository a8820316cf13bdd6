"""Random fleets, users and endless queues over a virtual day: everybody's share, and how long anybody waits."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

import pytest

from iris_ray.model.lifecycle import AttemptId
from iris_ray.model.options import PriorityBand
from iris_ray.scheduler.eviction_costs import GRACE_S, LEAST_RUN_S
from iris_ray.scheduler.scheduler import BACKFILL_BOUND_S
from iris_ray.state.events import Event, PromiseEvent
from iris_ray.state.instructions import Instructions
from iris_ray.study import SimulatedJob, Simulation
from iris_ray.study.jobs import slice_spec
from iris_ray.study.report import report_on
from tests.support.proofs import examples, in_proofs
from tests.support.simulations import DAY, HOUR, MINUTE, TIMINGS
from tests.support.worlds import promised

SEEDS = (*range(2), *in_proofs(*range(2, 2 + examples(40))))
MOST_RUN_S = HOUR
SLACK_S = 2 * MINUTE
"""For launches, exits, and until the next plan."""


@dataclass(frozen=True)
class Crowd:
    """Users with endless queues on slices of one type.

    Attributes:
        seed: of how long they run, and in which order the sizes come.
        tpu_type: of the slices.
        slices: how many there are.
        sizes: on how many slices each user's gangs run, by user; as often as there are numbers.
    """

    seed: int
    tpu_type: str
    slices: int
    sizes: dict[str, tuple[int, ...]]

    @staticmethod
    def drawn(seed: int) -> "Crowd":
        chance = Random(seed)
        slices = chance.choice((2, 3, 4, 6, 8, 12, 16))
        users = chance.randint(2, min(6, slices))
        largest = slices * min(1.0, 0.1 / users * DAY / MOST_RUN_S)  # no single job makes a tenth of anybody's share
        possible = [size for size in (1, 1, 2, 3, 4, 8, 16) if size <= largest]
        sizes = {f"user-{n}": tuple(chance.choices(possible, k=chance.randint(1, 3))) for n in range(users)}
        return Crowd(seed, chance.choice(("v4-8", "v4-16", "v4-32")), slices, sizes)

    def simulation(self, priority: PriorityBand = PriorityBand.INTERACTIVE) -> Simulation:
        """Return a cluster where these users wait."""
        simulation = Simulation(TIMINGS)
        simulation.hosts.add_slices(self.tpu_type, self.slices)
        for user in self.sizes:
            simulation.keep_waiting(self._jobs(user, priority), waiting=3)
        return simulation

    def gang(self, job_id: str, user: str, size: int, run_s: float, priority: PriorityBand) -> SimulatedJob:
        spec = slice_spec(job_id, self.tpu_type, size, user=user, priority=priority)
        return SimulatedJob(spec, run_s, heeds_notices=int(run_s) % 2 == 0)

    def _jobs(self, user: str, priority: PriorityBand) -> Iterator[SimulatedJob]:
        chance = Random(f"{self.seed} {user}")
        for number in itertools.count():
            size, run_s = chance.choice(self.sizes[user]), chance.uniform(10 * MINUTE, MOST_RUN_S)
            yield self.gang(f"{user}-{number}", user, size, run_s, priority)


@pytest.mark.parametrize("seed", SEEDS)
def test_users_with_endless_queues_get_equal_shares_over_a_day(seed: int) -> None:
    crowd = Crowd.drawn(seed)
    simulation = crowd.simulation()
    simulation.run_until(DAY)
    simulation.state.check()
    found = report_on(simulation.history, DAY).shares
    assert found.keys() == crowd.sizes.keys()
    assert all(0.8 <= share * len(found) <= 1.2 for share in found.values()), (crowd, found)


@pytest.mark.parametrize("seed", SEEDS)
def test_who_is_first_starts_within_the_bound_and_the_longest_run_of_what_holds_its_place(seed: int) -> None:
    """A job that has room already when the bound is over holds the place, too: it runs first."""
    crowd = Crowd.drawn(seed)
    simulation, chance = crowd.simulation(), Random(seed)
    before: dict[str, int] = {}  # job → how many had room before it
    for number in range(5):
        name, at = f"new-{number}", (3 + 4 * number + chance.random()) * HOUR
        size = chance.choice((1, max(1, crowd.slices // 2), crowd.slices))
        simulation.submit(crowd.gang(name, name, size, 10 * MINUTE, PriorityBand.INTERACTIVE), at)
        simulation.agenda.at(at + BACKFILL_BOUND_S, note_room_before, simulation, name, before)
    simulation.run_until(DAY)
    simulation.state.check()
    for name, others in before.items():
        limit_s = BACKFILL_BOUND_S + (1 + others) * (MOST_RUN_S + SLACK_S)
        assert simulation.history.jobs[name].waited_s(DAY) <= limit_s, (crowd, name, others)


def note_room_before(simulation: Simulation, name: str, before: dict[str, int]) -> None:
    """Note how many jobs have room when a job's bound is over."""
    before[name] = sum(bool(promised(job)) for job in simulation.state.jobs.values() if job.spec.job_id != name)


@pytest.mark.parametrize("seed", SEEDS)
def test_nobody_gives_way_in_vain_or_too_early(seed: int) -> None:
    """Every evicted attempt has run for its minimum time, or its hosts were lent; its evictor then runs."""
    crowd = Crowd.drawn(seed)
    bands = PriorityBand.BATCH, PriorityBand.INTERACTIVE, PriorityBand.PRODUCTION
    low, chance = Random(seed).choice(bands[:2]), Random(f"{seed} evictions")
    simulation = crowd.simulation(low)
    for number in range(20):
        size = chance.choice((1, max(1, crowd.slices // 2), crowd.slices))
        band = chance.choice([band for band in bands if band < low])
        higher = crowd.gang(f"higher-{number}", f"new-{number}", size, chance.uniform(5, 60) * MINUTE, band)
        simulation.submit(higher, chance.uniform(1, 20) * HOUR)
    asked = note_evictions(simulation)
    simulation.run_until(DAY)
    simulation.state.check()
    attempts, jobs = simulation.history.attempts, simulation.history.jobs
    band_of = {job_id: job.spec.priority for job_id, job in jobs.items()}
    evicted = [one for one in attempts if one.id in asked and one.outcome in ("evicted", "moved")]
    assert evicted
    for one in evicted:
        evictor, asked_at, was_lent = asked[one.id]
        if not was_lent:
            assert band_of[evictor] < band_of[one.id.job_id]
            assert one.began_at is not None
            assert asked_at - one.began_at >= LEAST_RUN_S[band_of[one.id.job_id]]
        starts = [other.assigned_at - asked_at for other in attempts if other.id.job_id == evictor]
        assert starts, f"{one.id} gave way to {evictor}, which never ran"
        assert starts[0] <= GRACE_S + SLACK_S


def note_evictions(simulation: Simulation) -> dict[AttemptId, tuple[str, float, bool]]:
    """Return what will have, for each evicted attempt, the job that takes its hosts, when, and if they were lent."""
    found: dict[AttemptId, tuple[str, float, bool]] = {}
    handle = simulation.state.handle_event

    def note(event: Event) -> Instructions:
        if isinstance(event, PromiseEvent):
            promise = simulation.state.jobs[event.job_id].promise
            lent = promise.lent if promise is not None else ()
            found.update({one: (event.job_id, simulation.now, one.job_id in lent) for one in event.leave})
        return handle(event)

    simulation.state.handle_event = note  # type: ignore[method-assign]
    return found
