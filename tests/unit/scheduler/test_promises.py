"""What a waiting job is told it will get, it gets: through limits, late ends, suspicions, crashes and other jobs."""

import pytest

from iris_ray.model.job_spec import CoschedulingConfig
from iris_ray.model.jobs import Job
from iris_ray.model.lifecycle import AttemptId, TaskState
from iris_ray.model.limits import Limits
from iris_ray.model.notices import NoticeKind
from iris_ray.model.options import EACH_SLICE, PriorityBand
from iris_ray.model.workers import UNCONFIRMED_S
from iris_ray.scheduler.eviction_costs import GRACE_S
from iris_ray.scheduler.pending_reason import PendingKind
from iris_ray.scheduler.scheduler import BACKFILL_BOUND_S
from iris_ray.state.events import (
    AttemptEndConfirmedEvent,
    GangAssignedEvent,
    JobCancelledEvent,
    JobYieldsEvent,
    LimitsSetEvent,
    WorkerDrainedEvent,
)
from iris_ray.state.fleet import SUSPICION_S
from tests.support.worlds import (
    MANY,
    PlannedWorld,
    add_slices,
    asked_to_leave,
    cpu_host,
    gang_spec,
    hosts_of,
    is_told_to_leave,
    on,
    promised,
    submit_group,
    tagged,
)

S = TaskState
_, PRODUCTION, INTERACTIVE, BATCH = PriorityBand
LATE = BACKFILL_BOUND_S + 1
OF_EQUAL_SLICES = {"failure_domain": EACH_SLICE, "whole_groups": True, "constraints": (), "max_retries_preemption": 9}
"""The options of a job whose gangs take whole slices of one size."""


@pytest.fixture
def world() -> PlannedWorld:
    """Two slices."""
    return PlannedWorld("a", "b")


def has_left(job: Job) -> bool:
    return job.evictions > 0


# -- ends that are never confirmed -------------------------------------------------------------------------------------


def hang(world: PlannedWorld, slice_name: str, unconfirmed_s: float) -> Job:
    """A gang has ended on a slice, and of its processes nothing is heard any more."""
    job = world.run(f"ended-on-{slice_name}", user="hung", priority=PRODUCTION, **on(slice_name))
    world.report_all(job, S.SUCCEEDED)
    world.now += unconfirmed_s
    return job


def test_job_evicts_once_an_end_stays_unconfirmed(world: PlannedWorld) -> None:
    victim = world.run("batch", priority=BATCH, **on("b"))
    hang(world, "a", unconfirmed_s=0.0)
    prod = world.submit("prod", priority=PRODUCTION)
    world.turn()
    assert not is_told_to_leave(victim)
    world.turn(UNCONFIRMED_S + 1)
    assert is_told_to_leave(victim)
    world.turn(GRACE_S)
    world.confirm(victim, 1)
    world.turn()
    assert prod.gang.groups == ("b",)


def test_eviction_is_called_off_once_an_end_stays_unconfirmed(world: PlannedWorld) -> None:
    victim = world.run("batch", priority=BATCH, **on("b"))
    ended = hang(world, "a", unconfirmed_s=5.0)
    pair = world.submit("pair", priority=PRODUCTION, slices=(2,))
    for _ in range(100):
        world.turn(1.0)
        assert not has_left(victim)
    assert not is_told_to_leave(victim)
    world.confirm(ended)
    world.turn()
    assert is_told_to_leave(victim), "now the job will run"
    world.turn(GRACE_S)
    world.confirm(victim, 1)
    world.turn()
    assert pair.gang.placed


def test_nobody_leaves_for_a_promise_that_waits_for_others_now(world: PlannedWorld) -> None:
    """Past the bound, a promise of slices in use takes the place of one that was called off, on some of its hosts."""
    add_slices(world, "c")
    over, idle = (world.run(name, **on(where)) for name, where in (("over", "a"), ("idle", "b")))
    world.run("busy", user="bob", **on("c"))
    waits = world.submit("waits", user="cy", slices=(2,))
    world.turn(LATE)
    world.report_all(over, S.SUCCEEDED)
    world.turn(UNCONFIRMED_S - 10)
    world.do(JobYieldsEvent("idle", True))
    world.turn()
    assert (is_told_to_leave(idle), promised(waits)) == (True, ("a-0", "a-1", "b-0", "b-1"))
    world.turn(11.0)
    assert (is_told_to_leave(idle), sorted(promised(waits))) == (False, ["b-0", "b-1", "c-0", "c-1"])


def test_starving_job_gets_the_next_slice_that_is_free(world: PlannedWorld) -> None:
    """Later users have nothing, and come first by their share."""
    add_slices(world, "c")
    world.run("mine", user="me", **on("c"))
    busy = world.run("busy", user="bob", **on("b"))
    hang(world, "a", unconfirmed_s=UNCONFIRMED_S + 1)
    waits = world.submit("waits", user="me")
    world.turn(LATE)
    later = [world.submit(f"later-{number}", user=f"new-{number}") for number in range(3)]
    world.turn()
    world.finish(busy)
    world.turn()
    assert waits.gang.groups == ("b",)
    assert not any(job.gang.placed for job in later)


# -- suspicions --------------------------------------------------------------------------------------------------------


def test_kept_room_outlives_the_suspicion_of_a_host(world: PlannedWorld) -> None:
    busy = world.run("busy", user="bob", **on("b"))
    large = world.submit("large", user="me", slices=(2,))
    world.turn(LATE)
    later = world.submit("later", user="new")
    world.turn()
    world.suspect("b-0")
    for _ in range(2):
        world.turn(SUSPICION_S / 2)
        assert not later.gang.placed
    world.finish(busy)
    world.turn(1.0)
    assert (large.gang.placed, later.gang.placed) == (True, False)


@pytest.mark.parametrize("suspected", ["b-0", "a-0"])
def test_evictions_outlive_the_suspicion_of_a_host(world: PlannedWorld, suspected: str) -> None:
    """One of two victims has heeded its notice. Its job would start again, with nothing gained."""
    quick, slow = (world.run(f"batch-{name}", priority=BATCH, **on(name)) for name in "ab")
    pair = world.submit("pair", priority=PRODUCTION, slices=(2,))
    world.turn()
    assert is_told_to_leave(quick)
    assert is_told_to_leave(slow)
    world.leave(quick)
    world.confirm(quick, 1)
    world.suspect(suspected)
    world.turn(1.0, times=int(GRACE_S) - 1)
    assert quick.gang.pending
    assert is_told_to_leave(slow)
    world.turn(1.0)
    assert slow.gang.pending
    world.confirm(slow, 1)
    world.turn()
    assert pair.gang.placed


def test_reserved_slice_outlives_its_suspicion_if_most_others_have_another_size(world: PlannedWorld) -> None:
    """Each slice is a gang of the job, which takes the size of most slices."""
    add_slices(world, "c", tpu_type="v4-32")
    world.run("large", user="bob", priority=PRODUCTION, tpu_type="v4-32")
    busy = [world.run(f"busy-{name}", user="bob", priority=PRODUCTION, **on(name)) for name in "ab"]
    waits = world.submit("waits", user="me", slices=(2,), **OF_EQUAL_SLICES)
    world.turn(LATE)
    before = promised(waits)
    assert len(before) == 2
    world.suspect(before[0])
    world.turn(SUSPICION_S / 2)
    assert promised(waits) == before
    for job in busy:
        world.finish(job)
    world.turn(SUSPICION_S)
    assert {gang.groups for gang in waits.gangs} == {("a",), ("b",)}


@pytest.mark.parametrize("happens", ["suspicion", "larger slices"])
def test_victim_leaves_for_a_job_of_equal_slices_when_most_slices_get_another_size(
    world: PlannedWorld, happens: str
) -> None:
    """The slice suits the job as before. The victim would start again, with nothing gained."""
    add_slices(world, "c", tpu_type="v4-32")
    world.run("large", user="cy", priority=PRODUCTION, tpu_type="v4-32")
    world.run("busy", user="bob", priority=PRODUCTION, **on("b"))
    victim = world.run("batch", priority=BATCH, **on("a"))
    taker = world.submit("taker", priority=PRODUCTION, slices=(2,), **OF_EQUAL_SLICES)
    world.turn()
    assert is_told_to_leave(victim)
    if happens == "suspicion":
        world.suspect("b-0")
    else:
        add_slices(world, "d", "e", tpu_type="v4-32")
        for name in "de":
            later = world.submit(f"on-{name}", user="cy", priority=PRODUCTION, tpu_type="v4-32", **on(name))
            world.do(GangAssignedEvent(later.spec.job_id, (name,), (tuple(f"{name}-{n}" for n in range(4)),)))
    world.turn()
    assert is_told_to_leave(victim)
    world.turn(GRACE_S)
    world.confirm(victim, 1)
    world.turn()
    assert taker.gangs[0].groups == ("a",)


def test_suspicion_of_reserved_host_lets_no_second_job_of_the_kind_reserve_hosts(world: PlannedWorld) -> None:
    for name in "ab":
        world.run(f"busy-{name}", user="bob", priority=PRODUCTION, **on(name))
    first = world.submit("first", user="me", priority=PRODUCTION)
    world.turn()
    world.suspect(promised(first)[0])
    second = world.submit("second", user="me", priority=PRODUCTION)
    world.turn()
    assert (bool(promised(first)), bool(promised(second))) == (True, False)


@pytest.mark.parametrize("with_victim", [False, True])
def test_hosts_of_a_group_of_jobs_outlive_the_suspicion_of_one(world: PlannedWorld, with_victim: bool) -> None:
    busy = world.run("busy", user="bob", priority=BATCH if with_victim else PRODUCTION, **on("b"))
    first, second = submit_group(world, *(gang_spec(i, user="me", priority=PRODUCTION) for i in ("x", "y")))
    world.turn()
    assert sorted(before := promised(first)) == ["a-0", "a-1", "b-0", "b-1"]
    assert is_told_to_leave(busy) == with_victim
    world.suspect("a-0")
    world.turn(1.0, times=3)
    assert (promised(first), is_told_to_leave(busy)) == (before, with_victim)
    world.finish(busy)
    world.turn(SUSPICION_S)
    assert (first.gang.placed, second.gang.placed) == (True, True)


def test_nobody_leaves_for_a_group_of_jobs_that_waits_for_others(world: PlannedWorld) -> None:
    """Else the hosts were promised to it as if all would leave, and taken back by the next plan."""
    idle = world.run("idle", user="ann", **on("a"))
    busy = world.run("busy", user="bob", priority=PRODUCTION, **on("b"))
    world.do(JobYieldsEvent("idle", yields=True))
    first, second = submit_group(world, *(gang_spec(i, user="me", priority=PRODUCTION) for i in ("x", "y")))
    for _ in range(3):
        world.turn(1.0)
        assert (len(promised(first)), is_told_to_leave(idle)) == (4, False)
    world.finish(busy)
    world.turn()
    assert is_told_to_leave(idle)
    world.turn(GRACE_S)
    world.confirm(idle, 1)
    world.turn()
    assert (first.gang.placed, second.gang.placed) == (True, True)


def test_nobody_leaves_for_a_group_of_jobs_whose_slice_a_returning_gang_takes(world: PlannedWorld) -> None:
    loops = world.run("loops", user="bob", priority=PRODUCTION, max_retries_failure=9, **on("a"))
    victim = world.run("batch", priority=BATCH, **on("b"))
    first, _ = submit_group(world, *(gang_spec(i, user="me", priority=PRODUCTION) for i in ("x", "y")))
    world.turn()
    assert (len(promised(first)), is_told_to_leave(victim)) == (4, False)
    world.report(loops, S.FAILED)
    world.confirm(loops)
    world.turn(max(0.0, loops.gang.not_before - world.now))
    assert (loops.gang.placed, is_told_to_leave(victim)) == (True, False)


def test_victim_leaves_a_host_of_a_rack_that_is_suspected() -> None:
    """The rack has one more host, which suits the job and which nobody leaves."""
    world = PlannedWorld()
    for name in "ab":
        world.do(tagged(cpu_host(name), {"rack": "r"}))
    need = {"resources": {"CPU": 8.0}, "max_retries_preemption": 9}
    one = {"replicas": 1, "coscheduling": CoschedulingConfig("rack"), "device": None, "constraints": ()}
    world.run("busy", priority=PRODUCTION, **one, **need)
    victim = world.run("batch", priority=BATCH, **one, **need)
    taker = world.submit("taker", priority=INTERACTIVE, **one, **need)
    world.turn()
    assert is_told_to_leave(victim)
    world.suspect(victim.tasks[0].node_id or "")
    world.turn(1.0)
    assert is_told_to_leave(victim)
    world.turn(GRACE_S)
    world.confirm(victim, 1)
    world.turn()
    assert taker.gang.placed


# -- gangs that return -------------------------------------------------------------------------------------------------


def test_returning_gang_takes_no_slice_that_others_evict_for(world: PlannedWorld) -> None:
    """Else the victim had left in vain, and its slice stayed idle for as long as the gang runs."""
    loops = world.run("loops", priority=PRODUCTION, user="bob", **on("a"))
    victim = world.run("batch", priority=BATCH, **on("b"))
    for _ in range(4):
        world.report(loops, S.FAILED)
        world.turn()
        world.confirm(loops)
        world.turn(max(0.0, loops.gang.not_before - world.now))
        assert loops.gang.placed
        world.report_all(loops, S.RUNNING)
    pair = world.submit("pair", priority=PRODUCTION, user="ann", slices=(2,))
    world.turn()
    world.report(loops, S.FAILED)
    world.turn()
    world.confirm(loops)
    for _ in range(200):
        world.turn(1.0)
        if loops.gang.placed:
            world.report_all(loops, S.RUNNING)
        if has_left(victim):
            world.confirm(victim, 1)
    assert pair.gang.placed or not has_left(victim)


# -- spares and jobs that yield ----------------------------------------------------------------------------------------


def test_slice_of_a_spare_goes_where_it_was_given(world: PlannedWorld) -> None:
    """A larger job has waited for longer. With that slice alone it could not run either."""
    add_slices(world, "c")
    world.run("gang", spares=1)
    world.run("busy", user="bob", **on("b"))
    world.turn()
    assert [job.gang.groups for job in world.state.spares()] == [("c",)]
    world.submit("large", user="me", slices=(2,))
    world.turn(LATE)
    small = world.submit("small", user="you")
    world.turn(times=3)
    assert small.gang.groups == ("c",)


def test_yielding_gang_gets_no_replacement_for_which_it_would_leave(world: PlannedWorld) -> None:
    gang = world.run("gang", slices=(2,))
    world.do(JobYieldsEvent("gang", True))
    world.do(WorkerDrainedEvent("b-0", "notice", NoticeKind.PREEMPTION, world.now + 60.0))
    world.turn()
    assert not is_told_to_leave(gang)
    assert not world.state.spares()
    world.do(JobYieldsEvent("gang", False))
    assert "gang/replacement-1" in world.state.jobs


def test_yielding_jobs_leave_once_though_their_ends_take_long(world: PlannedWorld) -> None:
    """One took its slice again while the end of the other was confirmed, and then the other way round."""
    idle = [world.run(f"idle-{name}", user="slots", may_evict=False, **on(name)) for name in "ab"]
    for job in idle:
        world.do(JobYieldsEvent(job.spec.job_id, True))
    gang = world.submit("gang", user="ann", slices=(2,))
    told: dict[AttemptId, int] = {}
    left: dict[AttemptId, int] = {}
    for second in range(120):
        world.turn(1.0)
        for job, takes_s in zip(idle, (1, 4), strict=True):
            world.report_all(job, S.RUNNING)
            attempt = job.current_attempt(job.gang)
            if is_told_to_leave(job) and second == told.setdefault(attempt, second) + takes_s:
                left[attempt] = second
                world.leave(job)
        for attempt in [attempt for attempt, since in left.items() if second == since + 8]:
            world.do(AttemptEndConfirmedEvent(attempt))
    assert gang.gang.placed
    assert [job.evictions for job in idle] == [1, 1]


def test_promise_to_a_replacement_ends_with_the_replacement(world: PlannedWorld) -> None:
    """Its gang has left the slice that is about to go, so nothing is to be replaced any more."""
    idle = world.run("idle", user="slots", **on("a"))
    world.do(JobYieldsEvent("idle", True))
    gang = world.run("gang")
    world.do(WorkerDrainedEvent("b-0", "maintenance"))
    world.turn()
    assert is_told_to_leave(idle)
    world.leave(gang)
    world.turn()
    world.check()
    world.confirm(gang, 1)
    world.turn()
    assert gang.gang.pending or gang.gang.groups == ("a",)
    assert not is_told_to_leave(idle) or gang.promise is not None


# -- what `why` says ---------------------------------------------------------------------------------------------------


def test_waiting_job_says_what_it_gets_and_what_that_waits_for(world: PlannedWorld) -> None:
    world.run("batch", priority=BATCH, **on("a"))
    over = world.run("over", **on("b"))
    world.report_all(over, S.SUCCEEDED)
    world.now += 5.0
    world.submit("prod", priority=PRODUCTION, slices=(2,))
    world.turn()
    world.turn(10.0)
    assert world.planner.pending_reasons["prod"].waits_for == (
        "the end of batch, notice for 20 s more",
        "the confirmation that over has ended, 15 s so far",
    )
    gets = "gets a, b; waits for the end of batch, notice for 20 s more and for the confirmation that over has ended"
    assert gets in world.why("prod")
    assert gets in world.planner.pending_reasons["prod"].summary


def test_promise_that_is_called_off_says_why(world: PlannedWorld, caplog: pytest.LogCaptureFixture) -> None:
    world.run("batch", priority=BATCH, **on("a"))
    over = world.run("over", **on("b"))
    world.report_all(over, S.SUCCEEDED)
    world.submit("prod", priority=PRODUCTION, slices=(2,))
    world.turn(1.0)
    world.turn(UNCONFIRMED_S)
    assert "the promise to prod is called off: the end of what ran on b is not confirmed in time" in caplog.text


def test_promise_past_a_limit_is_called_off_and_names_the_limit(
    world: PlannedWorld, caplog: pytest.LogCaptureFixture
) -> None:
    world.run("busy", user="bob", **on("a"))
    starving = world.submit("starving", user="ann", **on("a"))
    world.turn(LATE)
    assert starving.promise is not None
    world.run("first", user="ann", **on("b"))
    world.do(LimitsSetEvent("ann", INTERACTIVE, Limits(running_jobs=1)))
    world.turn()
    why = "ann has reached the limit of 1 running jobs in band interactive"
    assert f"the promise to starving is called off: {why}" in caplog.text


def test_victim_of_two_jobs_leaves_for_the_one_that_is_left(world: PlannedWorld) -> None:
    """Else what another victim had left already was called off, and its end was in vain."""
    add_slices(world, "c")
    pair = world.run("pair", priority=BATCH, slices=(2,))
    single = world.run("single", priority=BATCH, **on("c"))
    world.submit("first", priority=PRODUCTION, user="ann", **on("a"))
    second = world.submit("second", priority=PRODUCTION, user="bob", slices=(2,))
    world.turn()
    world.leave(single)
    world.confirm(single, 1)
    world.turn(1.0)
    world.do(JobCancelledEvent("first", "enough"))
    assert is_told_to_leave(pair)
    world.turn()
    assert promised(second) == ("b-0", "b-1", "c-0", "c-1")
    world.turn(GRACE_S - 1.0)
    world.confirm(pair, 1)
    world.turn()
    assert (second.gang.placed, pair.gang.placed) == (True, False)


def test_victims_of_a_lower_band_count_as_little_as_those_that_stay(world: PlannedWorld) -> None:
    """The job took them for about to be free, and asked for nothing: it got what was left once the others had run."""
    add_slices(world, "c")
    for name in "abc":
        world.run(f"batch-{name}", priority=BATCH, **on(name))
    world.submit("middle", priority=INTERACTIVE, user="ann", **on("c"))
    world.turn()
    high = world.submit("high", priority=PRODUCTION, user="bob")
    world.turn()
    assert promised(high)


def test_victims_of_a_promise_leave_for_the_higher_band_that_takes_it_over(world: PlannedWorld) -> None:
    """Else one of them stayed when the promise ended, and the other got its notice for nothing."""
    first, second = (world.run(f"batch-{name}", priority=BATCH, **on(name)) for name in "ab")
    middle = world.submit("middle", priority=INTERACTIVE, user="ann", **on("b"))
    world.turn()
    assert [is_told_to_leave(job) for job in (first, second)] == [False, True]
    high = world.submit("high", priority=PRODUCTION, user="bob", slices=(2,))
    for _ in range(int(GRACE_S) - 1):
        world.turn(1.0)
        assert [is_told_to_leave(job) for job in (first, second)] == [True, True]
    world.turn(2.0)
    for job in (first, second):
        world.confirm(job, 1)
    world.turn()
    assert (high.gang.placed, middle.gang.placed) == (True, False)


def test_victims_of_a_job_are_asked_again_if_its_free_slice_goes_to_a_higher_band(world: PlannedWorld) -> None:
    """Its promise ends as a whole. The next one counted on a victim that was told to go on."""
    first, second = (world.run(f"batch-{name}", priority=BATCH, **on(name)) for name in "ab")
    add_slices(world, "c")
    world.submit("middle", priority=INTERACTIVE, user="ann", slices=(2,))
    world.turn()
    assert [is_told_to_leave(job) for job in (first, second)] == [False, True]
    world.submit("high", priority=PRODUCTION, user="bob", **on("c"))
    (promise,) = asked_to_leave(world.plan())
    assert promise.leave == (first.current_attempt(first.gang), second.current_attempt(second.gang))


def test_pause_leaves_what_others_give_up_for_the_gang(world: PlannedWorld) -> None:
    """A clock that jumps back has an earlier pause of the gang go on."""
    world.run("busy", priority=PRODUCTION, **on("a"))
    victim = world.run("batch", priority=BATCH, **on("b"))
    job = world.submit("job", priority=PRODUCTION, **MANY)
    world.turn()
    assert (promised(job), is_told_to_leave(victim)) == (("b-0", "b-1"), True)
    job.gang.not_before = world.now + 60.0
    world.turn(1.0)
    assert world.planner.pending_reasons["job"].kind is PendingKind.PAUSED
    assert (promised(job), is_told_to_leave(victim)) == (("b-0", "b-1"), True)
    world.leave(victim)
    world.confirm(victim, 1)
    world.submit("other", user="other", priority=PRODUCTION, **MANY)
    world.turn(60.0)
    assert hosts_of(job) == ("b-0", "b-1")
