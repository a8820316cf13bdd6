"""Which job comes first, which may pass it, and for how long."""

from collections.abc import Callable
from itertools import permutations

import pytest

from iris_ray.model.constraints import Constraint, ConstraintOp
from iris_ray.model.jobs import Job
from iris_ray.model.lifecycle import JobState, TaskState
from iris_ray.model.options import EACH_SLICE, PriorityBand
from iris_ray.scheduler.scheduler import BACKFILL_BOUND_S
from iris_ray.state.attempt_ends import RETURNING_S
from iris_ray.state.events import AssignedEvent, GangAssignedEvent
from tests.support.worlds import World, add_slices, assigned_tasks, cpu_host

S = TaskState
SYSTEM, PRODUCTION, INTERACTIVE, BATCH = PriorityBand
LATE = BACKFILL_BOUND_S + 1
ON_TPU = (Constraint("tpu-name", ConstraintOp.EXISTS),)


def order(world: World) -> list[str]:
    """The ids of the jobs that get something, in the order of the plan."""
    return [a.job_id for a in world.plan().assignments]


def groups(assignment: AssignedEvent) -> tuple[str, ...]:
    assert isinstance(assignment, GangAssignedEvent)
    return assignment.group_names


# -- priority bands -------------------------------------------------------------------------------------------------


def test_bands_come_one_after_the_other_whatever_the_age(world: World) -> None:
    add_slices(world, "a", "b", "c")
    for band in (BATCH, INTERACTIVE, PRODUCTION):
        world.submit(band.name, priority=band)
    assert order(world) == ["PRODUCTION", "INTERACTIVE", "BATCH"]


# -- fair share, then age -------------------------------------------------------------------------------------------


def test_jobs_of_one_user_come_by_age(world: World) -> None:
    add_slices(world, *"abc")
    for name in ("z", "m", "a"):
        world.submit(name, user="me")
    assert order(world) == ["z", "m", "a"]


def test_user_who_holds_less_comes_first(world: World) -> None:
    add_slices(world, "a", "b")
    world.start("running", user="hog")
    world.submit("older", user="hog")
    world.submit("younger", user="modest")
    assert order(world) == ["younger"]


def test_share_ends_when_the_end_is_confirmed(world: World) -> None:
    add_slices(world, "a", "b")
    over = world.start("over", user="hog")
    world.report_all(over, S.SUCCEEDED)
    world.submit("older", user="hog")
    world.submit("younger", user="modest")
    assert order(world) == ["younger"]
    world.confirm(over)
    assert order(world) == ["older", "younger"]


def test_share_counts_what_the_plan_hands_out(world: World) -> None:
    add_slices(world, *"abcd")
    for name in ("hog-1", "hog-2", "hog-3"):
        world.submit(name, user="hog")
    world.submit("modest-1", user="modest")
    assert order(world) == ["hog-1", "modest-1", "hog-2", "hog-3"]


def test_share_is_of_the_resource_that_the_user_holds_most_of(world: World) -> None:
    """Dominant shares: 3/4 of all CPUs (none of the chips) is more than 1/2 of all chips (and no CPU)."""
    add_slices(world, "a", "b", tpu_type="v4-8")
    world.do(cpu_host("cpu", cpus=16.0))
    assert world.state.fleet.totals == {"TPU": 8.0, "CPU": 32.0}
    world.start_tasks("cpus", replicas=3, user="cpus", resources={"CPU": 8.0})
    world.start("chips", user="chips", tpu_type="v4-8")
    world.submit("older", user="cpus", tpu_type="v4-8")
    world.submit("younger", user="chips", tpu_type="v4-8")
    assert order(world) == ["younger"]


# -- backfill -------------------------------------------------------------------------------------------------------


def test_backfill_before_the_bound_nothing_is_kept(world: World) -> None:
    add_slices(world, "a", "b")
    world.start("busy")
    world.submit("large", slices=(2,))
    world.now += BACKFILL_BOUND_S - 1
    world.submit("small")
    plan = world.plan()
    assert [a.job_id for a in plan.assignments] == ["small"]
    assert (plan.pending_reasons["large"].kept, plan.starving) == ((), [])


def test_backfill_past_bound_keeps_free_and_busy_slices_for_gang(world: World) -> None:
    add_slices(world, "a", "b")
    busy = world.start("busy")
    world.submit("large", slices=(2,))
    world.now += LATE
    world.submit("small")
    plan = world.plan()
    assert plan.assignments == []
    assert (set(plan.pending_reasons["large"].kept), plan.starving) == ({"a", "b"}, ["large"])
    world.finish(busy)
    assert order(world) == ["large"]


def test_backfill_keeps_the_slice_that_is_nearest_to_being_free(world: World) -> None:
    """Three hosts of "a" are in use, one of "b": the gang waits for "b", and small jobs go on using "a"."""
    add_slices(world, "a", "b", tpu_type="v4-32")
    in_a = (Constraint("tpu-name", ConstraintOp.EQ, "a"),)
    in_b = (Constraint("tpu-name", ConstraintOp.EQ, "b"),)
    world.start_tasks("in-a", replicas=3, constraints=in_a)
    world.start_tasks("in-b", replicas=1, constraints=in_b)
    world.submit("large", tpu_type="v4-32")
    world.now += LATE
    world.submit_tasks("small", replicas=9)
    plan = world.plan()
    assert plan.pending_reasons["large"].kept == ("b",)
    assert [a.node_id for a in assigned_tasks(plan)] == ["a-3"]


def test_backfill_keeps_nothing_for_a_job_that_can_not_run_anyway(world: World) -> None:
    add_slices(world, "a", "b")
    world.start("busy")
    world.submit("impossible", slices=(3,))
    world.submit("elsewhere", tpu_type="v4-32")
    world.now += 10 * LATE
    world.submit("small")
    plan = world.plan()
    assert [a.job_id for a in plan.assignments] == ["small"]
    assert (plan.pending_reasons["impossible"].kept, plan.pending_reasons["elsewhere"].kept, plan.starving) == (
        (),
        (),
        [],
    )


def test_backfill_keeps_nothing_on_incomplete_slices(world: World) -> None:
    add_slices(world, *"abc")
    world.lose("a-1")
    busy = world.start("busy")
    assert busy.gang.groups == ("b",)
    world.submit("large", slices=(2,))
    world.now += LATE
    assert set(world.plan().pending_reasons["large"].kept) == {"b", "c"}


@pytest.mark.parametrize("constraints", [None, ON_TPU], ids=["same requirement", "another requirement"])
def test_backfill_keeps_slices_for_one_competing_job_at_time(
    world: World, constraints: tuple[Constraint, ...] | None
) -> None:
    """Otherwise several gangs would each keep a part of what they need."""
    add_slices(world, *"abcd")
    busy = [world.start(f"busy-{i}") for i in range(4)]
    world.submit("first", slices=(2,))
    world.submit("second", slices=(2,), **({"constraints": constraints} if constraints else {}))
    world.now += LATE
    plan = world.plan()
    assert (len(plan.pending_reasons["first"].kept), plan.pending_reasons["second"].kept) == (2, ())
    assert plan.starving == ["first"]
    for job in busy[:2]:
        world.finish(job)
    assert world.schedule().keys() == {"first"}
    assert len(world.plan().pending_reasons["second"].kept) == 2


def test_age_does_not_override_a_share_after_the_bound(world: World) -> None:
    """A gang that has waited for long gets room, but it does not go before the user who holds less."""
    add_slices(world, *"abc")
    world.start("hogs", user="hog")
    world.submit("large", user="hog", slices=(2,))
    world.now += LATE
    world.submit("single", user="modest")
    assert order(world) == ["single"]
    world.schedule()
    world.submit("next", user="modest")
    assert order(world) == []
    assert len(world.plan().pending_reasons["large"].kept) == 2


@pytest.mark.parametrize("slices", [1, 2])
def test_backfill_bound_counts_queue_time_without_run_time(world: World, slices: int) -> None:
    """No job has passed a gang that ran for hours and has just lost a host."""
    add_slices(world, *"abc"[: slices + 1])
    job = world.start(slices=(slices,), max_retries_preemption=9)
    world.start("other")
    world.now += 10 * LATE
    world.report(job, S.WORKER_FAILED)
    assert world.plan().starving == []
    assert world.plan().pending_reasons.keys() == {"job"}
    world.now += RETURNING_S  # it does not come before all others any more
    assert world.plan().pending_reasons["job"].kept == ()


# -- streams of small jobs ------------------------------------------------------------------------------------------

STEP_S, SMALL_JOB_S = 20.0, 100.0


class Stream:
    """Always more small jobs than can run, of various lengths, so that several hosts are rarely free at once."""

    def __init__(self, world: World, submit: Callable[[int], Job]) -> None:
        self.world = world
        self.submit = submit
        self.submitted = 0
        self.waiting: list[Job] = []
        self.running: list[tuple[float, Job]] = []

    def step(self) -> None:
        world = self.world
        world.now += STEP_S
        for _, job in [entry for entry in self.running if entry[0] <= world.now]:
            world.finish(job)
        self.running = [entry for entry in self.running if entry[0] > world.now]
        while len(self.waiting) < 6:
            self.waiting.append(self.submit(self.submitted))
            self.submitted += 1
        world.schedule()
        for job in [job for job in self.waiting if job.gangs[0].placed]:
            self.waiting.remove(job)
            length = SMALL_JOB_S - STEP_S * (int(job.spec.job_id.rpartition("-")[2]) % 3)
            self.running.append((world.now + length, job))
        world.state.check()


USERS = {
    "the same user": lambda number: "me",
    "another user": lambda number: "other",
    "ever new users": lambda number: f"user-{number}",
}


@pytest.mark.parametrize("holds_something", [False, True], ids=["holds nothing", "holds something"])
@pytest.mark.parametrize("user_of", USERS.values(), ids=USERS)
@pytest.mark.parametrize("one_by_one", [False, True], ids=["two slices", "hosts of one slice"])
def test_small_jobs_do_not_starve_large_gang_beyond_bound(
    world: World, one_by_one: bool, user_of: Callable[[int], str], holds_something: bool
) -> None:
    """The bound holds for small jobs of any user, and whatever else the large gang's user holds."""
    if holds_something:
        add_slices(world, "apart", tpu_type="v4-128")
        world.start("mine", user="me", tpu_type="v4-128")
    if one_by_one:
        add_slices(world, "a", tpu_type="v4-32")
        stream = Stream(world, lambda n: world.submit_tasks(f"small-{n}", replicas=1, user=user_of(n)))
    else:
        add_slices(world, "a", "b")
        stream = Stream(world, lambda n: world.submit(f"small-{n}", user=user_of(n)))
    for _ in range(10):
        stream.step()
    large = world.submit("large", user="me", **({"tpu_type": "v4-32"} if one_by_one else {"slices": (2,)}))
    patience = BACKFILL_BOUND_S + SMALL_JOB_S + 2 * STEP_S
    while not large.gang.placed and world.now <= large.submitted_at + patience:
        stream.step()
    assert large.gang.placed
    assert world.now - large.submitted_at > BACKFILL_BOUND_S / 2  # else this was no test


# -- several large gangs --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [(2, 2), (2, 3), (3, 3, 2), ((1, 3), (2, 3), 3)], ids=str)
@pytest.mark.parametrize("leaving", list(permutations(range(3))), ids=str)
@pytest.mark.parametrize("waited", [0.0, LATE], ids=["at once", "after the bound"])
def test_multislice_gangs_never_wait_for_each_other(
    world: World, sizes: tuple[int | tuple[int, ...], ...], leaving: tuple[int, ...], waited: float
) -> None:
    """Three slices become free one after the other, in any order. Every gang runs in the end."""
    add_slices(world, *"abc")
    busy = [world.start(f"busy-{i}") for i in range(3)]
    gangs = [
        world.submit(f"gang-{i}", user=f"user-{i}", slices=size if isinstance(size, tuple) else (size,))
        for i, size in enumerate(sizes)
    ]
    world.now += waited
    for position in leaving:
        world.finish(busy[position])
        world.schedule()
        assert all(job.gang.placed or job.gang.pending for job in gangs)
    for _ in gangs:
        for job in gangs:
            if job.gang.placed:
                world.finish(job)
        world.schedule()
    assert [job.state for job in gangs] == [JobState.SUCCEEDED] * len(gangs)


def test_slice_that_was_lost_takes_no_turn_from_the_other_slices_of_its_job(world: World) -> None:
    """It comes first, and the others come by share and age: before a younger job of the same user."""
    add_slices(world, "a", "b")
    job = world.submit("job", slices=(3,), failure_domain=EACH_SLICE, whole_groups=True, max_retries_preemption=9)
    world.schedule()
    for task in job.tasks[:4]:
        world.report(job, S.RUNNING, task.index)
    world.long_run()
    world.lose("a-0")
    world.confirm(job)
    world.submit("younger")
    add_slices(world, "c", "d")
    assert order(world) == ["job", "job"]
