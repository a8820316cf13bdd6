"""Jobs that make a plan fail are found, left out, and tried again; what is planned without them is a whole plan."""

from collections.abc import Collection, Sequence

import pytest

from iris_ray.model.jobs import Job
from iris_ray.scheduler.cycle import Cycle
from iris_ray.scheduler.planner import LEFT_OUT_S, UnplannableJobs, unplannable
from iris_ray.state.waiting_jobs import WaitingJobs
from tests.support.worlds import World


@pytest.fixture
def jobs() -> list[Job]:
    world = World()
    found = [world.submit(f"job-{number}") for number in range(100)]
    world.check()
    return found


class Plans:
    """Fails if all jobs of one of these groups are to be planned."""

    def __init__(self, *bad: Collection[int]) -> None:
        self.bad = [{f"job-{number}" for number in group} for group in bad]
        self.jobs = 0

    def plan(self, jobs: Sequence[Job]) -> None:
        self.jobs += len(jobs)
        there = {job.spec.job_id for job in jobs}
        if any(group <= there for group in self.bad):
            raise ValueError("a defect")


def found_by(plans: Plans, jobs: Sequence[Job]) -> list[str]:
    return [job.spec.job_id for job, _ in unplannable(jobs, plans.plan)]


def test_jobs_breaking_plan_are_found_at_little_cost(jobs: list[Job]) -> None:
    assert found_by(Plans(), jobs) == []
    for bad in ([0], [99], [3, 4], [0, 50, 99]):
        plans = Plans(*([number] for number in bad))
        assert found_by(plans, jobs) == [f"job-{number}" for number in bad]
        assert plans.jobs <= len(jobs) * (2 + 2 * len(bad))


def test_jobs_failing_together_leave_plannable_rest(jobs: list[Job]) -> None:
    plans = Plans([10, 90])
    left = [job for job in jobs if job.spec.job_id not in found_by(plans, jobs)]
    plans.plan(left)
    assert left


def test_job_is_left_out_for_a_while_and_then_tried_again(jobs: list[Job]) -> None:
    left_out = UnplannableJobs()
    left_out.leave_out(jobs[3], ValueError("a defect"), now=100.0)
    assert [*left_out.without(WaitingJobs(jobs), 100.0)] == [*jobs[:3], *jobs[4:]]
    (reason,) = left_out.reasons(jobs, 160.0).values()
    assert str(reason).startswith(f"pausing {LEFT_OUT_S - 60:.0f} s before it is tried again: ")
    assert "(ValueError: a defect)" in str(reason)
    assert [*left_out.without(WaitingJobs(jobs), 100.0 + LEFT_OUT_S)] == jobs
    assert left_out.reasons(jobs, 100.0 + LEFT_OUT_S) == {}


def test_plan_after_one_that_failed_halfway_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the scheduler has cached meanwhile is forgotten."""
    from iris_ray.scheduler.planner import Planner
    from iris_ray.state.instructions import Instructions

    world = World("a", "b")
    planner, as_it_was = Planner(world.state, look_again_s=0.5), Cycle._try

    def failing(cycle: Cycle, job: Job) -> object:
        if job.spec.job_id == "poison":
            cycle._cache._candidates = None  # type: ignore[assignment]  # as if it were half made
            raise ValueError("a defect")
        return as_it_was(cycle, job)

    monkeypatch.setattr(Cycle, "_try", failing)
    for job_id in ("first", "poison", "last"):
        world.submit(job_id)
    placed = planner.plan(world.now, Instructions())
    assert [placement.job.spec.job_id for placement in placed] == ["first", "last"]
    assert planner.pending_reasons.keys() == planner.left_out.keys() == {"poison"}
    monkeypatch.setattr(Cycle, "_try", as_it_was)
    world.finish(world.state.jobs["first"])
    world.now += LEFT_OUT_S
    (placement,) = planner.plan(world.now, Instructions())
    assert placement.job.spec.job_id == "poison"
    assert planner.left_out == {}
