"""Jobs that wait for a limit are left out of plans, but not for ever."""

from collections.abc import Iterable
from typing import Any

from iris_ray.model.jobs import Job
from iris_ray.model.limits import Limits
from iris_ray.model.options import PriorityBand
from iris_ray.model.teams import Quota, Team, Teams
from iris_ray.scheduler import Scheduler
from iris_ray.scheduler.cycle import SchedulingResult
from iris_ray.scheduler.limited_kinds import LimitedKinds
from iris_ray.scheduler.planner import Planner
from iris_ray.scheduler.reasons import Reasons
from iris_ray.state.events import LimitsSetEvent, TeamsSetEvent
from iris_ray.state.instructions import Instructions
from tests.support.worlds import World

LOOK_AGAIN_S = 60.0


class Watched(Scheduler):
    """Counts its plans, and those that look at the job that is limited."""

    def __init__(self) -> None:
        super().__init__()
        self.plans = self.with_limited = 0

    def find_assignments(self, pending: Iterable[Job], *args: Any, **options: Any) -> SchedulingResult:
        jobs = [*pending]
        self.plans += 1
        self.with_limited += any(job.spec.job_id == "limited" for job in jobs)
        return super().find_assignments(jobs, *args, **options)


def test_busy_cluster_looks_at_all_jobs_now_and_then() -> None:
    world = World("a", "b", "c")
    world.do(LimitsSetEvent("ann", PriorityBand.INTERACTIVE, Limits(running_jobs=0)))
    world.submit("limited", user="ann")
    scheduler = Watched()
    planner = Planner(world.state, LOOK_AGAIN_S, scheduler)
    for number in range(20):  # something changes all the time
        world.now += 10.0
        job = world.submit(f"other-{number}", user="bob")
        planner.plan(world.now, Instructions())
        assert "limited" in planner.pending_reasons
        world.finish(job)
    assert scheduler.plans == 20
    assert scheduler.with_limited == 4, "every 60 s: in every sixth plan"


def test_time_alone_does_not_bring_limited_jobs_into_plans() -> None:
    world = World("a")
    world.do(LimitsSetEvent("ann", PriorityBand.INTERACTIVE, Limits(running_jobs=0)))
    world.submit("limited", user="ann")
    scheduler = Watched()
    planner = Planner(world.state, 0.5, scheduler)
    for _ in range(100):
        world.now += 1.0
        planner.plan(world.now, Instructions())
        assert "limited" in planner.pending_reasons
    assert scheduler.plans == 100
    assert scheduler.with_limited == 2, "every 60 s"
    planner.look_again()
    planner.plan(world.now, Instructions())
    assert scheduler.with_limited == 3, "look_again considers all jobs"


def test_accounts_are_those_of_the_teams_that_there_are() -> None:
    world = World()
    limited = LimitedKinds(world.state)
    world.do(TeamsSetEvent(tuple(Teams([Team("one", {"v4-16": Quota(8.0)})]))))
    spec = world.submit("job", team="one").spec
    limited.planned()
    assert ("one", "v4-16") in limited._of(spec)
    world.do(TeamsSetEvent(tuple(Teams([Team("other", {"v4-16": Quota(8.0)})]))))
    limited.release_changed(released := Reasons())
    assert not released
    limited.planned()
    assert ("one", "v4-16") not in limited._of(spec)
