"""What a waiting job is told it will get, it gets: through limits, late ends, suspicions, crashes and other jobs."""

from collections.abc import Iterator

import pytest

from iris_ray.model.constraints import Constraint, ConstraintOp
from iris_ray.model.jobs import Job
from iris_ray.model.lifecycle import AttemptId, TaskState
from iris_ray.model.limits import Limits
from iris_ray.model.notices import NoticeKind
from iris_ray.model.options import PriorityBand
from iris_ray.model.workers import TPU_NAME, UNCONFIRMED_S
from iris_ray.scheduler.pending_reason import PendingKind
from iris_ray.scheduler.planner import Planner
from iris_ray.scheduler.scheduler import BACKFILL_BOUND_S
from iris_ray.scheduler.victims import GRACE_S
from iris_ray.state.events import (
    AttemptEndConfirmedEvent,
    GangMovedEvent,
    JobCancelledEvent,
    JobYieldsEvent,
    LimitsSetEvent,
    TimePassedEvent,
    WorkerDrainedEvent,
    WorkerSuspectedEvent,
)
from iris_ray.state.fleet import SUSPICION_S
from iris_ray.state.instructions import Instructions
from tests.support.worlds import World, add_slices, asked_to_leave, hosts_of, promised

S = TaskState
PRODUCTION, INTERACTIVE, BATCH = PriorityBand
LATE = BACKFILL_BOUND_S + 1
LONG = 1000.0
MANY = {"max_retries_preemption": 1000, "max_retries_failure": 1000}


class Played(World):
    """A world whose plans are the Controller's, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 10_000.0
        self.planner = Planner(self.state, look_again_s=0.5)

    def turn(self, seconds: float = 0.0, times: int = 1) -> None:
        """Let time pass and plan, so many times."""
        for _ in range(times):
            self.now += seconds
            self.do(TimePassedEvent(self.now))
            self.planner.plan(self.now, Instructions())

    def run(self, job_id: str, **changes: object) -> Job:
        """A gang on one slice that has run for so long that it may be evicted."""
        job = self.submit(job_id, **{**MANY, **changes})
        self.turn()
        assert job.gang.placed, job_id
        self.report_all(job, S.RUNNING)
        self.now += LONG
        self.do(TimePassedEvent(self.now))
        return job

    def leave(self, job: Job) -> None:
        """The gang heeds its notice. Its end is still to be confirmed."""
        self.do(GangMovedEvent(job.current_attempt(job.gang), "all its tasks have saved"))

    def suspect(self, node_id: str) -> None:
        self.do(WorkerSuspectedEvent(node_id, "no answer", self.now))


@pytest.fixture
def world() -> Iterator[Played]:
    """Two slices."""
    world = Played()
    add_slices(world, "a", "b")
    yield world
    world.check()


def on(slice_name: str) -> dict[str, object]:
    """The options of a job that can use this slice alone."""
    return {"constraints": (Constraint(TPU_NAME, ConstraintOp.EQ, slice_name),)}


def is_told_to_leave(job: Job) -> bool:
    return job.gang.notice is not None and job.gang.notice.kind is NoticeKind.EVICTION


def has_left(job: Job) -> bool:
    return job.evictions > 0


# -- limits ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limits", [{"chips": 8}, {"running_jobs": 1}], ids=str)
def test_hosts_of_a_stopped_victim_count_against_the_takers_limit(world: Played, limits: dict[str, int]) -> None:
    """The victim's end is not confirmed yet. Its job would start again, with nothing gained."""
    busy = world.run("busy", user="bob", priority=PRODUCTION, **on("b"))
    victim = world.run("batch", priority=BATCH, **on("a"))
    world.do(LimitsSetEvent("ann", PRODUCTION, Limits(**limits)))
    takes = world.submit("takes", user="ann", priority=PRODUCTION, **on("a"))
    other = world.submit("other", user="ann", priority=PRODUCTION, **on("b"))
    world.turn()
    assert is_told_to_leave(victim)
    world.turn(GRACE_S)
    assert victim.gang.pending
    world.finish(busy)
    world.turn()
    assert not other.gang.placed
    assert "waiting for the limit of ann" in str(world.planner.pending_reasons["other"])
    world.confirm(victim, 1)
    world.turn()
    assert (takes.gang.placed, other.gang.placed, victim.gang.placed) == (True, False, False)


def test_nobody_leaves_while_a_slice_is_kept_for_a_job_past_its_limit(world: Played) -> None:
    """The job lost its promise later in the same plan."""
    add_slices(world, "c")
    world.run("batch", user="bob", priority=BATCH, **on("b"))
    world.run("first", user="ann", **on("c"))
    over = world.run("over", user="bob", **on("a"))
    world.submit("starving", user="ann", **on("a"))
    world.turn(LATE)
    world.report_all(over, S.SUCCEEDED)
    world.do(LimitsSetEvent("ann", INTERACTIVE, Limits(chips=8)))
    world.submit("takes", user="cy", priority=INTERACTIVE)
    assert not asked_to_leave(world.plan())


def test_nobody_leaves_for_tasks_that_others_of_their_job_keep_from_running(world: Played) -> None:
    """A slice comes that nobody expected. With the tasks there, the job has all that its user may have."""
    for name in "ab":
        world.run(f"batch-{name}", priority=BATCH, **on(name))
    world.do(LimitsSetEvent("ann", PRODUCTION, Limits(chips=12)))
    tasks = world.submit_tasks("tasks", 6, user="ann", priority=PRODUCTION)
    world.turn()
    assert len(promised(tasks)) == 3
    add_slices(world, "c")
    world.turn()
    assert hosts_of(tasks) == ("c-0", "c-1")
    assert len(promised(tasks)) == 1
    world.turn(1.0)
    assert len(promised(tasks)) == 1


def test_nobody_leaves_for_tasks_that_a_lower_limit_keeps_from_running(world: Played) -> None:
    """What the first victim has left is enough for all tasks that may run."""
    first, second = (world.run(f"batch-{name}", priority=BATCH, **on(name)) for name in "ab")
    tasks = world.submit_tasks("tasks", 4, user="ann", priority=PRODUCTION)
    world.turn()
    assert len(promised(tasks)) == 4
    world.leave(second)
    world.do(LimitsSetEvent("ann", PRODUCTION, Limits(chips=8)))
    world.turn()
    assert promised(tasks) == ("b-0", "b-1")
    assert not is_told_to_leave(first)


def test_promise_to_a_task_lasts_when_another_task_runs_again_elsewhere(world: Played) -> None:
    """What is left of the limit was kept for an older job, as if the task had used up what is reserved for it."""
    world.run("batch", priority=BATCH, **on("a"))
    world.run("busy", user="bob", priority=PRODUCTION, **on("b"))
    world.do(LimitsSetEvent("ann", INTERACTIVE, Limits(chips=8)))
    add_slices(world, "c")
    world.submit("large", user="ann", priority=INTERACTIVE, **on("b"))
    tasks = world.start_tasks("tasks", 2, user="ann", priority=INTERACTIVE)
    world.turn(5.0)  # sooner than the bound
    world.lose("c-0")
    world.turn()
    assert promised(tasks) == ("a-0",)
    world.report(tasks, S.WORKER_FAILED, 1)
    world.confirm(tasks, index=1)
    world.turn(BACKFILL_BOUND_S)
    assert "the rest is kept for it" in str(world.planner.pending_reasons["large"])
    assert (hosts_of(tasks), promised(tasks)) == (("c-1",), ("a-0",))


# -- ends that are never confirmed -------------------------------------------------------------------------------------


def hang(world: Played, slice_name: str, unconfirmed_s: float) -> Job:
    """A gang has ended on a slice, and of its processes nothing is heard any more."""
    job = world.run(f"ended-on-{slice_name}", user="hung", priority=PRODUCTION, **on(slice_name))
    world.report_all(job, S.SUCCEEDED)
    world.now += unconfirmed_s
    return job


def test_job_evicts_once_an_end_stays_unconfirmed(world: Played) -> None:
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


def test_yielding_job_leaves_once_an_end_stays_unconfirmed(world: Played) -> None:
    idle = world.run("idle", **on("b"))
    world.do(JobYieldsEvent("idle", True))
    hang(world, "a", unconfirmed_s=0.0)
    waits = world.submit("waits")
    world.turn()
    assert not is_told_to_leave(idle)
    world.turn(UNCONFIRMED_S + 1)
    assert is_told_to_leave(idle)
    world.leave(idle)
    world.confirm(idle, 1)
    world.turn()
    assert waits.gang.groups == ("b",)


def test_slice_whose_end_stays_unconfirmed_justifies_no_eviction(world: Played) -> None:
    """The job needs it, too. It would get one of its two slices."""
    victim = world.run("batch", priority=BATCH, **on("b"))
    hang(world, "a", unconfirmed_s=UNCONFIRMED_S + 1)
    world.submit("pair", priority=PRODUCTION, slices=(2,))
    world.turn(10.0, times=20)
    assert not is_told_to_leave(victim)
    assert victim.gang.placed


def test_eviction_is_called_off_once_an_end_stays_unconfirmed(world: Played) -> None:
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


def test_nobody_leaves_for_a_promise_that_waits_for_others_now(world: Played) -> None:
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
    assert (is_told_to_leave(idle), promised(waits)) == (False, ("b-0", "b-1", "c-0", "c-1"))


def test_starving_job_gets_the_next_slice_that_is_free(world: Played) -> None:
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


def test_kept_room_outlives_the_suspicion_of_a_host(world: Played) -> None:
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
def test_evictions_outlive_the_suspicion_of_a_host(world: Played, suspected: str) -> None:
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


# -- gangs that return -------------------------------------------------------------------------------------------------


def test_returning_gang_takes_no_slice_that_others_evict_for(world: Played) -> None:
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


def test_slice_of_a_spare_goes_where_it_was_given(world: Played) -> None:
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


def test_yielding_gang_gets_no_replacement_for_which_it_would_leave(world: Played) -> None:
    gang = world.run("gang", slices=(2,))
    world.do(JobYieldsEvent("gang", True))
    world.do(WorkerDrainedEvent("b-0", "notice", NoticeKind.PREEMPTION, world.now + 60.0))
    world.turn()
    assert not is_told_to_leave(gang)
    assert not world.state.spares()
    world.do(JobYieldsEvent("gang", False))
    assert "gang/replacement-1" in world.state.jobs


def test_yielding_jobs_leave_once_though_their_ends_take_long(world: Played) -> None:
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


def test_promise_to_a_replacement_ends_with_the_replacement(world: Played) -> None:
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


def test_waiting_job_says_what_it_gets_and_what_that_waits_for(world: Played) -> None:
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


def test_promise_that_is_called_off_says_why(world: Played, caplog: pytest.LogCaptureFixture) -> None:
    world.run("batch", priority=BATCH, **on("a"))
    over = world.run("over", **on("b"))
    world.report_all(over, S.SUCCEEDED)
    world.submit("prod", priority=PRODUCTION, slices=(2,))
    world.turn(1.0)
    world.turn(UNCONFIRMED_S)
    assert "what was promised to prod is called off: the end of what ran on b is not confirmed in time" in caplog.text


def test_promise_past_a_limit_is_called_off_and_names_the_limit(
    world: Played, caplog: pytest.LogCaptureFixture
) -> None:
    world.run("busy", user="bob", **on("a"))
    starving = world.submit("starving", user="ann", **on("a"))
    world.turn(LATE)
    assert starving.promise is not None
    world.run("first", user="ann", **on("b"))
    world.do(LimitsSetEvent("ann", INTERACTIVE, Limits(running_jobs=1)))
    world.turn()
    why = "ann has reached the limit of 1 running jobs in band interactive"
    assert f"what was promised to starving is called off: {why}" in caplog.text


def test_slice_that_a_victim_frees_besides_counts_until_free(world: Played) -> None:
    """It leaves for the other job. The notice to the second victim was taken back, and given again, plan after plan."""
    add_slices(world, "c")
    pair = world.run("pair", priority=BATCH, slices=(2,))
    single = world.run("single", priority=BATCH, **on("c"))
    first = world.submit("first", priority=PRODUCTION, user="ann", **on("a"))
    second = world.submit("second", priority=PRODUCTION, user="bob", slices=(2,))
    world.turn()
    assert is_told_to_leave(pair)
    for _ in range(int(GRACE_S) - 1):
        assert is_told_to_leave(single)
        world.turn(1.0)
    world.turn(1.0)
    world.confirm(pair, 1)
    world.confirm(single, 1)
    world.turn()
    assert (first.gang.groups, second.gang.groups) == (("a",), ("b", "c"))


def test_victim_of_two_jobs_leaves_for_the_one_that_is_left(world: Played) -> None:
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


def test_victims_of_a_lower_band_count_as_little_as_those_that_stay(world: Played) -> None:
    """The job took them for about to be free, and asked for nothing: it got what was left once the others had run."""
    add_slices(world, "c")
    for name in "abc":
        world.run(f"batch-{name}", priority=BATCH, **on(name))
    world.submit("middle", priority=INTERACTIVE, user="ann", **on("c"))
    world.turn()
    high = world.submit("high", priority=PRODUCTION, user="bob")
    world.turn()
    assert promised(high)


def test_victims_of_a_promise_leave_for_the_higher_band_that_takes_it_over(world: Played) -> None:
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


def test_victims_of_a_job_are_asked_again_if_its_free_slice_goes_to_a_higher_band(world: Played) -> None:
    """Its promise ends as a whole. The next one counted on a victim that was told to go on."""
    first, second = (world.run(f"batch-{name}", priority=BATCH, **on(name)) for name in "ab")
    add_slices(world, "c")
    world.submit("middle", priority=INTERACTIVE, user="ann", slices=(2,))
    world.turn()
    assert [is_told_to_leave(job) for job in (first, second)] == [False, True]
    world.submit("high", priority=PRODUCTION, user="bob", **on("c"))
    (promise,) = asked_to_leave(world.plan())
    assert promise.leave == (first.current_attempt(first.gang), second.current_attempt(second.gang))


def test_promise_within_a_limit_lasts_until_the_yielding_job_of_its_user_has_left(world: Played) -> None:
    """Its chips count still, and those of its hosts do when it has ended before its time."""
    world.do(LimitsSetEvent("ann", INTERACTIVE, Limits(chips=8)))
    idle = world.run("idle", user="ann", **on("a"))
    world.run("busy", user="bob", **on("b"))
    world.do(JobYieldsEvent("idle", True))
    waits = world.submit("waits", user="ann")
    world.turn()
    for _ in range(10):
        assert is_told_to_leave(idle)
        world.turn(1.0)
    world.report(idle, S.FAILED)
    world.turn(1.0)
    world.confirm(idle, 1)
    world.turn()
    assert (waits.gang.placed, idle.gang.placed) == (True, False)


def test_promise_within_a_limit_lasts_while_a_yielding_job_of_its_user_leaves_to_another_job(world: Played) -> None:
    """Else the first job would be over the limit until then: it lost its hosts, and who had left them left in vain."""
    world.do(LimitsSetEvent("ann", INTERACTIVE, Limits(chips=16)))
    add_slices(world, "c")
    idle = world.run("idle", user="ann", **on("a"))
    batch = world.run("batch", user="bob", priority=BATCH, **on("b"))
    world.do(JobYieldsEvent("idle", True))
    first = world.submit("first", user="ann", **on("b"))
    world.turn()
    world.leave(batch)
    second = world.submit("second", user="ann", **on("a"))
    world.turn(1.0, times=10)
    assert (promised(first), promised(second), is_told_to_leave(idle)) == (("b-0", "b-1"), ("a-0", "a-1"), True)
    world.confirm(batch, 1)
    world.leave(idle)
    world.turn(1.0, times=10)  # its end is not confirmed yet
    assert (promised(first), promised(second)) == (("b-0", "b-1"), ("a-0", "a-1"))
    world.confirm(idle, 1)
    world.turn()
    assert (hosts_of(first), hosts_of(second)) == (("b-0", "b-1"), ("a-0", "a-1"))


def test_spare_that_takes_hosts_is_no_running_job_of_its_user(world: Played) -> None:
    world.do(LimitsSetEvent("ann", INTERACTIVE, Limits(running_jobs=2)))
    job = world.run("job", user="ann")
    add_slices(world, "c")
    for number in range(2):
        world.run(f"idle-{number}", user="slots", may_evict=False)
        world.do(JobYieldsEvent(f"idle-{number}", True))
    world.do(WorkerDrainedEvent(f"{job.gang.groups[0]}-0", "notice", NoticeKind.PREEMPTION, world.now + 60.0))
    waits = world.submit("waits", user="ann")
    world.turn()
    assert promised(world.state.jobs["job/replacement-1"])
    assert promised(waits)


def test_promise_within_a_limit_lasts_while_the_end_of_a_larger_job_of_its_user_is_confirmed(world: Played) -> None:
    idle = world.run("idle", user="ann", slices=(2,))
    world.do(JobYieldsEvent("idle", True))
    add_slices(world, "c")
    world.run("busy", user="bob", **on("c"))
    world.do(LimitsSetEvent("ann", INTERACTIVE, Limits(chips=8)))
    waits = world.submit("waits", user="ann", **on("b"))
    world.turn()
    world.leave(idle)
    world.turn(1.0)
    assert promised(waits) == ("b-0", "b-1")
    world.confirm(idle, 1)
    world.turn()
    assert hosts_of(waits) == ("b-0", "b-1")


def test_nobody_leaves_for_a_returning_gang_that_a_lower_limit_keeps_from_running(world: Played) -> None:
    victim = world.run("batch", priority=BATCH, **on("b"))
    job = world.submit("job", priority=PRODUCTION, user="ann", slices=(2,), **MANY)
    world.turn()
    assert is_told_to_leave(victim)
    job.gang.returning_until = world.now + LONG
    world.do(LimitsSetEvent("ann", PRODUCTION, Limits(chips=8)))
    world.turn()
    assert (promised(job), is_told_to_leave(victim)) == ((), False)


def test_pause_leaves_what_others_give_up_for_the_gang(world: Played) -> None:
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
