"""Jobs with many different requirements hold up nobody else: plans in pieces, and a bound on what a plan looks at."""

import pytest

from iris_ray.model.constraints import AttributeValue, Constraint, ConstraintOp
from iris_ray.scheduler import SchedulingResult, candidate_cache
from iris_ray.scheduler.pending_reason import PendingKind
from iris_ray.scheduler.planner import Planner
from iris_ray.state.instructions import Instructions
from tests.support.worlds import World, cpu_host

HOSTS = 10


@pytest.fixture
def world() -> World:
    world = World()
    for number in range(HOSTS):
        world.do(cpu_host(f"cpu-{number}", zone="us"))
    return world


def submit_odd_jobs(world: World, count: int, user: str) -> None:
    """Jobs that no host suits, each with another constraint."""
    for number in range(count):
        elsewhere = Constraint("zone", ConstraintOp.EQ, AttributeValue(f"{user}-{number}"))
        world.submit_tasks(f"{user}-{number}", 1, user=user, resources={"CPU": 1.0}, constraints=(elsewhere,))


def plan(world: World, before: SchedulingResult | None, most: int) -> SchedulingResult:
    state = world.state
    reasons = before.pending_reasons if before else None
    return world.scheduler.find_assignments(state.pending(), state.fleet, state.usage, world.now, reasons, most)


def test_plan_with_many_evaluations_ends_and_next_goes_on(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("iris_ray.scheduler.cycle.EVALUATIONS_PER_GANG", HOSTS)
    submit_odd_jobs(world, 7, "odd")
    pieces = [plan(world, None, most=3)]
    while not pieces[-1].complete:
        pieces.append(plan(world, pieces[-1], most=3))
    assert len(pieces[0].pending_reasons) == 3
    assert len(pieces[-1].pending_reasons) == 7


def test_users_with_odd_requirements_do_not_hold_up_others(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(candidate_cache, "EVALUATIONS_KEPT", 8 * HOSTS)
    submit_odd_jobs(world, 20, "odd")
    submit_odd_jobs(world, 20, "strange")
    world.submit_tasks("usual", 1, user="usual", resources={"CPU": 1.0})
    result = world.plan()
    assert [assignment.job_id for assignment in result.assignments] == ["usual"]
    kinds = [reason.kind for reason in result.pending_reasons.values()]
    assert kinds.count(PendingKind.NOT_LOOKED_AT) == 2 * (20 - 2)
    assert "too many different requirements" in str(result.pending_reasons["odd-19"])


@pytest.mark.parametrize(("users", "jobs_each"), [(4, 3), (4, 40), (12, 1), (30, 2)])
def test_job_is_looked_at_soon_whatever_others_ask_for(
    world: World, monkeypatch: pytest.MonkeyPatch, users: int, jobs_each: int
) -> None:
    monkeypatch.setattr(candidate_cache, "EVALUATIONS_KEPT", 8 * HOSTS)
    monkeypatch.setattr(candidate_cache, "EVALUATIONS_IN_TURN", 2 * HOSTS)
    busy = world.start_tasks("busy", HOSTS, user="busy", resources={"CPU": 8.0})
    for number in range(users):
        submit_odd_jobs(world, jobs_each, f"odd-{number}")
    job = world.submit_tasks("usual", 1, user="usual", resources={"CPU": 1.0})
    planner = Planner(world.state, 1.0, most_placed=10)
    planner.plan(world.now, Instructions())
    world.finish(busy)
    for plans in range(users * jobs_each // 2 + 2):
        assert not job.pending or plans <= users // 2 + 1
        world.now += 1.0
        planner.plan(world.now, Instructions())
    assert not job.pending
    assert all(reason.kind is PendingKind.NO_SUCH_WORKERS for reason in planner.pending_reasons.values())
