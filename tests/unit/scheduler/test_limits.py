"""Limits by user: no plan exceeds one, a job over one waits and says so, and others are not kept from anything."""

import pytest

from iris_ray.model.lifecycle import AttemptId
from iris_ray.model.limits import Limits
from iris_ray.model.options import PriorityBand
from iris_ray.scheduler.pending_reason import PendingKind
from iris_ray.scheduler.planner import Planner
from iris_ray.scheduler.scheduler import BACKFILL_BOUND_S
from iris_ray.state.events import AttemptEndConfirmedEvent, GangMovedEvent, LimitsSetEvent
from iris_ray.state.instructions import Instructions
from tests.support.worlds import S, World, host

BAND = PriorityBand.INTERACTIVE
LONG = BACKFILL_BOUND_S + 1


@pytest.fixture
def world() -> World:
    """Four slices of eight chips each."""
    return World(*"abcd")


def limit(world: World, user: str = "ann", band: PriorityBand = BAND, **limits: float) -> None:
    world.do(LimitsSetEvent(user, band, Limits(**limits)))  # type: ignore[arg-type]


def placed(world: World) -> list[str]:
    """Commit one plan; the ids of the jobs that got hosts."""
    found = list(world.schedule())
    world.check()
    return found


def chips(world: World, user: str = "ann", band: PriorityBand = BAND) -> float:
    return world.state.limits.held(user, band).chips


def test_gangs_of_one_plan_stay_within_limit_others_say_why(world: World) -> None:
    limit(world, chips=16)
    for number in range(4):
        world.submit(f"job-{number}", user="ann")
    reason = world.plan().pending_reasons["job-2"]
    assert (reason.kind, reason.keeps) == (PendingKind.LIMITED, False)
    assert str(reason) == (
        "waiting for the limit of ann in band interactive: 16 chips, of which 16 are taken, and it needs 8;"
        " iris-ray cluster limits shows all"
    )
    assert placed(world) == ["job-0", "job-1"]
    assert chips(world) == 16
    assert placed(world) == []
    world.finish(world.state.jobs["job-0"])  # it is nowhere running yet
    assert placed(world) == ["job-2"]


def test_limit_counts_by_user_and_band_and_keeps_nothing_from_others(world: World) -> None:
    limit(world, chips=8)
    for user, band in (("ann", BAND), ("ann", BAND), ("ann", PriorityBand.BATCH), ("bob", BAND)):
        world.submit(f"job-{len(world.state.jobs)}", user=user, priority=band)
    assert placed(world) == ["job-0", "job-3", "job-2"]


def test_gang_takes_the_largest_count_that_its_user_may_have(world: World) -> None:
    limit(world, chips=24)
    world.submit("other", user="ann")
    job = world.submit(user="ann", slices=(1, 2, 3))
    placed(world)
    assert (len(job.gang.groups), chips(world)) == (2, 24)


def test_gang_waits_for_no_larger_count_than_its_user_may_have(world: World) -> None:
    for number in range(3):
        world.start(f"other-{number}", user="bob")
    world.report_all(world.state.jobs["other-0"], S.SUCCEEDED)  # its slice is about to be free
    flexible = world.submit(user="ann", slices=(1, 2))
    assert placed(world) == []
    limit(world, chips=8)
    assert placed(world) == ["job"]
    assert len(flexible.gang.groups) == 1


def test_hosts_with_more_chips_than_expected_count_with_all_of_them(world: World) -> None:
    for number in range(3):
        world.do(host(f"large-{number}", 0, resources={"TPU": 8.0, "CPU": 8.0}))
    limit(world, chips=20)
    for number in range(3):
        world.submit_tasks(f"job-{number}", 1, user="ann", constraints=(), resources={"TPU": 8.0})
    assert placed(world) == ["job-0", "job-1"]
    small = world.submit_tasks("small", 1, user="ann", resources={"TPU": 1.0})
    assert placed(world) == ["small"]  # on a host with four
    assert (chips(world), small.state.value) == (20, "running")


def test_limit_on_running_jobs_counts_jobs_not_their_tasks_or_spares(world: World) -> None:
    limit(world, running_jobs=1)
    world.submit_tasks("tasks", 2, user="ann")
    world.submit("next", user="ann")
    assert placed(world) == ["tasks"]
    assert "1 running jobs, of which 1 are taken, and it needs 1" in world.why("next")
    world.finish(world.state.jobs["tasks"])
    job = world.state.jobs["next"]
    assert placed(world) == ["next"]
    world.report_all(job, S.RUNNING)
    world.submit("last", user="ann")
    world.finish(job)
    world.start("last-with-a-spare", user="bob", spares=1)
    limit(world, "bob", running_jobs=1)
    assert "last-with-a-spare/spare-1" in placed(world)


@pytest.mark.parametrize("spare", [True, False])
def test_spares_and_growth_stay_within_the_limit(world: World, spare: bool) -> None:
    limit(world, chips=8)
    terms = {"spares": 1} if spare else {"slices": (1, 2), "grow_after": 0.0}
    world.start("job", user="ann", **terms, max_retries_preemption=5)
    (held,) = (job_id for job_id in world.state.jobs if job_id != "job")
    assert world.plan().pending_reasons[held].kind is PendingKind.LIMITED
    assert placed(world) == []
    limit(world, chips=16)
    assert placed(world) == [held]
    assert chips(world) == 16


def test_replacement_over_the_limit_keeps_no_slice_from_others(world: World) -> None:
    from iris_ray.state.events import WorkerDrainedEvent

    limit(world, chips=8)
    job = world.start("job", user="ann", max_retries_preemption=5)
    world.do(WorkerDrainedEvent(f"{job.gang.groups[0]}-0", "preempted"))
    for number in range(3):
        world.submit(f"other-{number}", user="bob")
    assert placed(world) == ["other-0", "other-1", "other-2"]


def test_gang_that_returns_keeps_its_place_while_its_own_attempt_ends(world: World) -> None:
    limit(world, chips=8)
    job = world.start("job", user="ann", max_retries_preemption=5)
    for number in range(2):
        world.start(f"other-{number}", user="bob")
    world.long_run()
    world.report(job, S.WORKER_FAILED)
    world.submit("other", user="bob", slices=(2,))
    plan = world.plan()
    assert plan.pending_reasons["job"].kind is PendingKind.LIMITED  # the old attempt holds its chips still
    assert plan.pending_reasons["job"].kept
    world.do(AttemptEndConfirmedEvent(AttemptId("job", 1)))
    assert placed(world) == ["job"]


def test_gang_grows_to_as_many_slices_as_its_user_may_have(world: World) -> None:
    """While it moves, its old attempt holds a part of that still."""
    limit(world, chips=16)
    others = world.start("others", user="bob", slices=(3,))
    job = world.start("job", user="ann", slices=(1, 2), grow_after=0.0, max_retries_preemption=5)
    world.finish(others)
    assert placed(world) == ["job/growth-1"]
    world.report_all(world.state.jobs["job/growth-1"], S.RUNNING)
    assert job.gang.is_to_grow
    world.do(GangMovedEvent(job.current_attempt(job.gang), "it has saved its state"))
    assert placed(world) == []
    world.do(AttemptEndConfirmedEvent(AttemptId("job", 1)))
    assert placed(world) == ["job"]
    assert len(job.gang.groups) == 2


def test_users_later_jobs_do_not_pass_limited_job_past_bound(world: World) -> None:
    limit(world, chips=16)
    small = world.start("small", user="ann")
    world.submit("large", user="ann", slices=(2,))
    assert placed(world) == []
    world.now += LONG
    world.submit("later", user="ann")
    plan = world.plan()
    assert plan.pending_reasons["large"].keeps
    assert "the rest is kept for large" in str(plan.pending_reasons["later"])
    summaries = {job_id: reason.summary.split(" more. ")[1] for job_id, reason in plan.pending_reasons.items()}
    assert summaries == {"large": "The rest is kept for it.", "later": "The rest is kept for large."}
    world.submit("of-bob", user="bob")
    assert placed(world) == ["of-bob"]
    world.finish(small)
    assert placed(world) == ["large"]


def test_job_larger_than_limit_has_no_room_kept(world: World) -> None:
    limit(world, chips=8)
    world.submit("too-large", user="ann", slices=(2,))
    world.now += LONG
    world.submit("small", user="ann")
    assert placed(world) == ["small"]


def test_new_job_in_short_plan_does_not_take_kept_room(world: World) -> None:
    limit(world, chips=16)
    world.start("small", user="ann")
    world.submit("large", user="ann", slices=(2,))
    world.now += LONG
    reasons = world.plan().pending_reasons
    world.submit("later", user="ann")
    assert world.plan(reasons).assignments == []


def test_gang_that_returns_keeps_no_slice_while_its_users_other_jobs_hold_the_limit(world: World) -> None:
    for name in "abc":
        world.start(name, user="ann", max_retries_failure=1)
    returning = world.state.jobs["a"]
    limit(world, chips=16)
    world.report(returning, S.FAILED)
    world.submit("bobs", user="bob", slices=(2,))
    assert placed(world) == []  # the slice of the attempt that has failed is about to be free, and so are its chips
    world.confirm(returning)
    assert placed(world) == ["bobs"]


def test_planner_looks_again_when_a_limit_changes(world: World) -> None:
    limit(world, chips=0)
    planner = Planner(world.state, look_again_s=1e6)
    world.submit(user="ann")
    assert planner.plan(world.now, Instructions()) == []
    assert planner.pending_reasons["job"].kind is PendingKind.LIMITED
    limit(world, chips=8)
    (placement,) = planner.plan(world.now, Instructions())
    assert placement.job.spec.job_id == "job"
