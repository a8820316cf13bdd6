"""Studies in which all slice sizes share the chips of one reservation."""

from collections import Counter

import pytest

from iris_ray.capacity.simulated import SimulatedReservation
from iris_ray.model.options import PriorityBand
from iris_ray.model.workers import TPU
from iris_ray.scheduler.eviction_costs import DEFAULT_RULES
from iris_ray.study import SimulatedJob, Simulation, report_on, slice_spec
from iris_ray.study.agenda import Timings
from iris_ray.study.jobs import JobStream, RunTimes
from iris_ray.study.study import SliceKind, Study, StudyPolicy

HOUR, DAY = 3600.0, 86_400.0
_, PRODUCTION, INTERACTIVE, BATCH = PriorityBand
CHIPS = 64


def shared(take_back: str, timings: Timings | None = None) -> tuple[Simulation, SimulatedReservation]:
    """A cluster of v6e-16 and v6e-64 that share 64 chips."""
    simulation, types = Simulation(check_every=5), {"v6e-16": 60.0, "v6e-64": 120.0}
    return simulation, SimulatedReservation(simulation, types, CHIPS, take_back, DEFAULT_RULES, timings or Timings())


def slices_in(simulation: Simulation) -> Counter[str]:
    """How many slices of each type there are."""
    return Counter(name.removeprefix("iris-study-")[:6] for name in simulation.hosts.slices)


def job(job_id: str, tpu_type: str, hours: float, band: PriorityBand) -> SimulatedJob:
    spec = slice_spec(job_id, tpu_type, user=job_id.partition("-")[0], priority=band)
    return SimulatedJob(spec, hours * HOUR, save_every_s=60.0)


@pytest.mark.parametrize(("take_back", "at_least_h", "at_most_h"), [("idle", 5.0, 6.0), ("lower-bands", 0.1, 0.3)])
def test_large_job_gets_the_chips_of_lower_bands_if_told(take_back: str, at_least_h: float, at_most_h: float) -> None:
    """Four small BATCH jobs use all chips for six hours."""
    simulation, reservation = shared(take_back)
    for number in range(4):
        simulation.submit(job(f"small-{number}", "v6e-16", 6.0, BATCH))
    simulation.submit(job("large", "v6e-64", 1.0, PRODUCTION), at=HOUR)
    simulation.run_until(0.5 * HOUR)
    assert slices_in(simulation) == {"v6e-16": 4}
    simulation.run_until(DAY)
    assert at_least_h < simulation.history.jobs["large"].waited_s(DAY) / HOUR < at_most_h
    assert all(one.ended_at is not None for one in simulation.history.jobs.values())
    assert slices_in(simulation) == {}, "they are deleted once no job needs them"
    assert reservation.made >= 5


@pytest.mark.parametrize(("take_back", "at_least_h", "at_most_h"), [("lower-bands", 2.5, 6.0), ("held", 0.2, 1.0)])
def test_slices_are_held_for_a_large_job_if_told(take_back: str, at_least_h: float, at_most_h: float) -> None:
    """Small jobs of its band that come later take each small slice as soon as it is idle."""
    simulation, _ = shared(take_back)
    for number in range(24):
        small = job(f"small-{number}", "v6e-16", 0.6 + 0.05 * (number % 4), INTERACTIVE)
        simulation.submit(small, at=0.0 if number < 4 else 0.4 * HOUR)
    simulation.submit(job("large", "v6e-64", 1.0, INTERACTIVE), at=0.3 * HOUR)
    simulation.run_until(DAY)
    assert at_least_h < simulation.history.jobs["large"].waited_s(DAY) / HOUR < at_most_h


def test_making_and_deleting_slices_takes_time_in_which_their_chips_count_as_idle() -> None:
    simulation, _ = shared("idle", Timings(make_slice=HOUR, delete_slice=HOUR))
    simulation.submit(job("small", "v6e-16", 1.0, BATCH))
    simulation.run_until(HOUR)
    assert slices_in(simulation) == {}
    simulation.run_until(4 * HOUR)
    assert {totals[TPU] for _, totals in simulation.history.capacity} == {CHIPS}
    used = report_on(simulation.history, 4 * HOUR).use
    assert used.utilisation == pytest.approx(16 / CHIPS / 4, rel=0.05)


def test_hosts_have_the_cpus_of_their_type() -> None:
    simulation, _ = shared("idle")
    simulation.submit(job("small", "v6e-16", 1.0, BATCH))
    simulation.run_until(0.5 * HOUR)
    assert {host.resources["CPU"] for host in simulation.state.workers.values()} == {60.0}


def test_policies_of_a_study_share_the_chips_of_its_slices_or_do_not() -> None:
    small = JobStream(
        name="small", per_day=60, run=RunTimes(2 * HOUR, 2 * HOUR), users=(("ann", 1.0),), tpu_type="v6e-16",
        band=BATCH, save_every_s=600.0,
    )  # fmt: skip
    large = JobStream(name="large", per_day=2, run=RunTimes(HOUR, HOUR), users=(("bob", 1.0),), tpu_type="v6e-64")
    slices = SliceKind(tpu_type="v6e-16", count=2), SliceKind(tpu_type="v6e-64", count=1)
    policies = StudyPolicy(name="divided"), StudyPolicy(name="shared", take_back="held")
    study = Study(seconds=2 * DAY, slices=slices, streams=(small, large), policies=policies, plan_every_s=5.0)
    found = {}
    for policy in policies:
        simulation = study.simulation(policy, check_every=17)
        simulation.run_until(study.seconds)
        found[policy.name] = report_on(simulation.history, study.seconds)
        assert {totals[TPU] for _, totals in simulation.history.capacity} == {96.0}
    divided, together = found["divided"], found["shared"]
    assert divided.waits.jobs == together.waits.jobs
    assert together.use.useful > divided.use.useful + 0.1
    assert together.waits_by_band["batch"].p90_s < divided.waits_by_band["batch"].p90_s / 2
