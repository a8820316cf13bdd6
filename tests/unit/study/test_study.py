"""Studies: the same chance for every policy, and a state that holds on random fleets."""

from dataclasses import replace
from functools import cache
from random import Random

import pytest

from iris_ray.model.options import PriorityBand
from iris_ray.study import Simulation
from iris_ray.study.jobs import JobStream, RunTimes
from iris_ray.study.report import report_on
from iris_ray.study.study import Backlog, HostKind, SliceKind, Study, StudyPolicy

HOUR, DAY = 3600.0, 86_400.0
TWO_USERS = (("ann", 1.0), ("bob", 1.0))


def small_study(seed: int = 0) -> Study:
    """Two days on six slices that are preempted every few hours, and two hosts without TPU."""
    gangs = JobStream(
        name="gang", per_day=30, run=RunTimes(2 * HOUR, 8 * HOUR), users=TWO_USERS, tpu_type="v4-16",
        num_slices=(((1,), 3.0), ((2,), 1.0), ((1, 3), 1.0)), save_every_s=600.0,
    )  # fmt: skip
    urgent = JobStream(
        name="urgent", per_day=6, run=RunTimes(HOUR, HOUR), users=TWO_USERS, tpu_type="v4-16", save_every_s=600.0,
        band=PriorityBand.PRODUCTION,
    )  # fmt: skip
    tasks = JobStream(name="tasks", per_day=30, run=RunTimes(HOUR, 3 * HOUR), users=TWO_USERS, replicas=3, cpus=2.0)
    kept = JobStream(
        name="kept", per_day=1, run=RunTimes(HOUR, HOUR), users=(("carl", 1.0),), tpu_type="v4-16",
        band=PriorityBand.BATCH, save_every_s=300.0,
    )  # fmt: skip
    return Study(
        seconds=2 * DAY,
        seed=seed,
        slices=(
            SliceKind(tpu_type="v4-16", count=6, preempted_every_s=8 * HOUR, notice_s=30.0, away_s=HOUR / 2,
                      host_dies_every_s=DAY, repair_s=HOUR),
        ),
        hosts=(HostKind(count=2, cpus=8.0, dies_every_s=DAY, repair_s=HOUR),),
        streams=(gangs, urgent, tasks),
        backlogs=(Backlog(stream=kept, user="carl", waiting=2),),
        look_again_s=600.0,
    )  # fmt: skip


@cache
def simulated(study: Study, policy: StudyPolicy) -> Simulation:
    """The end of a simulation, whose state was checked on the way."""
    simulation = study.simulation(policy, check_every=17)
    simulation.run_until(study.seconds)
    return simulation


POLICIES = (
    StudyPolicy(name="default"),
    StudyPolicy(name="one spare", spares=1),
    StudyPolicy(name="ignored", heed_notices=False),
)


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.name)
@pytest.mark.parametrize("seed", [0, 1])
def test_state_holds_whatever_happens(policy: StudyPolicy, seed: int) -> None:
    simulation = simulated(small_study(seed), policy)
    simulation.state.check()
    found = report_on(simulation.history, 2 * DAY)
    assert found.finished["SUCCEEDED"] > 50
    assert found.preempted > 10


def test_same_seed_gives_same_history() -> None:
    first, other = (simulated(small_study(seed), POLICIES[0]).history.attempts for seed in (0, 1))
    simulation = small_study(0).simulation(POLICIES[0])
    simulation.run_until(2 * DAY)
    again = simulation.history.attempts
    assert first == again
    assert first != other


def test_every_policy_meets_same_jobs_and_losses() -> None:
    histories = [simulated(small_study(), policy).history for policy in POLICIES]
    arrivals = [
        {name: job.submitted_at for name, job in history.jobs.items() if "kept" not in name} for history in histories
    ]
    assert arrivals[0] == arrivals[1] == arrivals[2]
    assert histories[0].capacity == histories[1].capacity == histories[2].capacity


def test_gangs_heeding_notices_lose_less() -> None:
    default, _, ignored = (report_on(simulated(small_study(), policy).history, 2 * DAY) for policy in POLICIES)
    assert default.use.lost < ignored.use.lost


def test_planning_at_intervals_changes_little() -> None:
    """Utilisation and shares stay within a few percent."""
    exact, coarse = (
        report_on(simulated(replace(small_study(), plan_every_s=every_s), POLICIES[0]).history, 2 * DAY)
        for every_s in (0.0, 30.0)
    )
    assert coarse.plans < exact.plans
    assert coarse.use.utilisation == pytest.approx(exact.use.utilisation, abs=0.03)
    assert coarse.shares == pytest.approx(exact.shares, abs=0.05)


def test_run_times_have_given_median_and_ninetieth_percentile() -> None:
    drawn = sorted(RunTimes(HOUR, 5 * HOUR).draw(chance) for chance in [Random(1)] for _ in range(4000))
    assert drawn[2000] == pytest.approx(HOUR, rel=0.1)
    assert drawn[3600] == pytest.approx(5 * HOUR, rel=0.1)
    assert RunTimes(HOUR, HOUR).draw(Random(1)) == HOUR


def test_jobs_arrive_at_given_rate() -> None:
    stream = replace(small_study().streams[0], per_day=500.0)
    arrivals = list(stream.arrivals(Random(1), 10 * DAY))
    assert len(arrivals) == pytest.approx(5000, rel=0.05)
    assert [at for at, _ in arrivals] == sorted(at for at, _ in arrivals)
    slices = [job.spec.coscheduling.num_groups for _, job in arrivals if job.spec.coscheduling]
    assert slices.count((1,)) == pytest.approx(3000, rel=0.05)


def test_production_waits_less_with_evictions() -> None:
    """The two policies side by side, on the same jobs and losses."""
    reports = []
    for policy in (StudyPolicy(name="default"), StudyPolicy(name="nobody gives way", evictions=False)):
        simulation = replace(small_study(), seconds=DAY).simulation(policy)
        simulation.run_until(DAY)
        reports.append(report_on(simulation.history, DAY))
    default, nobody = reports
    assert default.evicted > 0 == nobody.evicted
    assert default.waits_by_band["production"].longest_s < 0.5 * nobody.waits_by_band["production"].longest_s
