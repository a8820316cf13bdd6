"""Jobs on parts of slices in a simulation, and the policy without parts."""

from collections import Counter

import pytest

from iris_ray.errors import InvalidStudyError
from iris_ray.model.workers import TPU_NAME
from iris_ray.study.jobs import JobStream, RunTimes, SimulatedJob, slice_spec
from iris_ray.study.report import Report, report_on
from iris_ray.study.simulation import Simulation
from iris_ray.study.study import SliceKind, Study, StudyPolicy
from iris_ray.study.traces import TraceRules, as_trace, read_trace
from tests.unit.study.test_description import LEAST, study_of

HOUR, DAY = 3600.0, 86_400.0
PARTS, WHOLE = StudyPolicy(name="parts"), StudyPolicy(name="whole slices", parts=False)


def study(seed: int = 0) -> Study:
    """Two days of small and large jobs on four slices of four hosts, which are preempted and lose hosts."""
    users = (("ann", 1.0), ("bob", 1.0))
    kinds = ((None, 6, ((1,), 1.0)), ("2x4", 20, ((1,), 1.0)), ("2x2", 40, ((1,), 1.0)))
    streams = tuple(
        JobStream(name=shape or "whole", per_day=per_day, run=RunTimes(HOUR, 3 * HOUR), users=users, tpu_type="v6e-16",
                  num_slices=(count,), topology=shape, save_every_s=600.0)
        for shape, per_day, count in kinds
    )  # fmt: skip
    slices = SliceKind(
        tpu_type="v6e-16", count=4, preempted_every_s=12 * HOUR, notice_s=30.0, away_s=HOUR, host_dies_every_s=DAY
    )
    return Study(seconds=2 * DAY, seed=seed, slices=(slices,), streams=streams, look_again_s=600.0)


def played(study: Study, policy: StudyPolicy) -> tuple[Simulation, Report]:
    simulation = study.simulation(policy, check_every=7)
    simulation.run_until(study.seconds)
    simulation.state.check()
    return simulation, report_on(simulation.history, study.seconds)


@pytest.mark.parametrize("seed", [0, 1])
def test_state_holds_and_small_jobs_share_slices(seed: int) -> None:
    simulation, found = played(study(seed), PARTS)
    attempts = [run for run in simulation.history.attempts if ":2x2:" in run.groups[0]]
    slices = {run.groups[0].partition(":")[0] for run in attempts}
    assert slices <= set(simulation.hosts.slices)
    assert found.finished["SUCCEEDED"] > 100
    assert found.preempted > 5
    together = (
        (one, other)
        for one in attempts
        for other in attempts
        if one.id < other.id and one.groups[0] != other.groups[0]
        and one.groups[0].partition(":")[0] == other.groups[0].partition(":")[0]
        and one.assigned_at < (other.freed_at or DAY) and other.assigned_at < (one.freed_at or DAY)
    )  # fmt: skip
    assert next(together, None), "two gangs on parts of one slice at a time"


def test_without_parts_the_same_jobs_take_whole_slices_and_wait_longer() -> None:
    (_, parts), (simulation, whole) = (played(study(), policy) for policy in (PARTS, WHOLE))
    assert parts.waits.jobs == whole.waits.jobs
    assert all(run.groups[0] in simulation.hosts.slices for run in simulation.history.attempts)
    assert {run.held["TPU"] for run in simulation.history.attempts} == {16.0}
    assert parts.waits.p90_s < whole.waits.p90_s
    assert parts.use.utilisation < whole.use.utilisation


def test_lost_host_costs_its_part_and_neighbours_keep_their_processes() -> None:
    simulation = Simulation()
    simulation.hosts.add_slices("v6e-16")
    gangs = [slice_spec(name, "v6e-16", topology="2x2") for name in "abcd"]
    simulation.submit_all((0.0, SimulatedJob(spec, run_s=HOUR)) for spec in gangs)
    simulation.run_until(60.0)
    on = {run.id.job_id: run.groups[0] for run in simulation.history.attempts}
    assert len(set(on.values())) == 4, "each has a part of its own"
    (host,) = simulation.state.fleet.slice_workers(on["b"])
    simulation.hosts.lose([host.node_id], "it died", away_s=600.0)
    simulation.run_until(2 * HOUR)
    simulation.state.check()
    attempts = Counter(run.id.job_id for run in simulation.history.attempts)
    assert attempts == {"a": 1, "b": 2, "c": 1, "d": 1}
    assert {job.state for job in simulation.history.jobs.values()} == {"SUCCEEDED"}


def test_jobs_of_a_trace_take_the_smallest_part_with_enough_chips() -> None:
    text = "user,gpu_num,submit_time,duration\nann,3,0,60\nann,5,0,60\nann,9,0,60\nann,17,0,60\n"
    for parts, shapes in ((True, ["tpu-part-2x2", "tpu-part-2x4", TPU_NAME, TPU_NAME]), (False, [TPU_NAME] * 4)):
        rules = TraceRules(name="t", tpu_type="v6e-16", parts=parts)
        jobs = [job.spec for _, job in as_trace(read_trace(text.splitlines(), "csv", "t"), rules, "t").arrivals]
        assert [spec.coscheduling.group_by for spec in jobs if spec.coscheduling] == shapes
        assert [spec.coscheduling.num_groups for spec in jobs if spec.coscheduling] == [(1,), (1,), (1,), (2,)]


def test_description_names_parts_and_refuses_those_that_no_slice_has() -> None:
    jobs = LEAST + '[[jobs]]\nper_day = 1\ntype = "v6e-16"\nrun_h = 1\ntopology = "{}"\n'
    found = study_of(jobs.format("2X4") + '[[policies]]\nname = "whole"\nparts = false\n')
    assert (found.streams[0].topology, found.policies[0].parts) == ("2x4", False)
    with pytest.raises(InvalidStudyError, match="number 1: num_slices is 2; give 1, since a job with a topology"):
        study_of(jobs.format("2x4") + "num_slices = 2\n")
    with pytest.raises(InvalidStudyError, match="number 1: topology: topology is '3x4'"):
        study_of(jobs.format("3x4"))
    with pytest.raises(InvalidStudyError, match=r"number 1: type is missing"):
        study_of(jobs.replace('type = "v6e-16"', "").format("2x4"))
