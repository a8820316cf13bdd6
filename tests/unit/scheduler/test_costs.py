"""What a plan costs: twice the hosts and twice the jobs, of all sizes, cost about twice as much and not four times."""

from collections.abc import Callable

import pytest

from iris_ray.model.constraints import Constraint, ConstraintOp
from iris_ray.model.job_spec import JobSpec
from iris_ray.model.options import PriorityBand
from iris_ray.model.requirement import Requirement
from iris_ray.scheduler import Scheduler, candidates
from iris_ray.scheduler.evaluation import Evaluation, evaluate
from iris_ray.scheduler.scheduler import BACKFILL_BOUND_S
from iris_ray.state.events import JobSubmittedEvent, TasksAssignedEvent
from iris_ray.state.groups import Group
from tests.support.costs import calls, peak_bytes
from tests.support.worlds import World, cpu_host, gang_spec, one_by_one, promised, submit_group, tagged

ABOUT_TWICE = 2.6
_, PRODUCTION, _, BATCH = PriorityBand


def cpu_spec(job_id: str, cpus: float) -> JobSpec:
    return JobSpec(job_id=job_id, owner="pool-a", resources={"CPU": cpus})


def hosts_and_sizes(count: int, sizes: int, in_use: float = 0.0) -> World:
    """Hosts of 8 CPUs, each with a task on it, and as many jobs of one task: so many different sizes of tasks."""
    world = World()
    for number in range(count):
        world.do(cpu_host(f"w{number:04}"))
        if in_use:
            world.do(JobSubmittedEvent(cpu_spec(f"busy-{number}", in_use - number % 7 / 100), world.now))
            world.do(TasksAssignedEvent(f"busy-{number}", (0,), f"w{number:04}"))
    for number in range(count):
        world.do(JobSubmittedEvent(cpu_spec(f"job-{number}", 1 + number % sizes / sizes), world.now))
    return world


def empty_fleet(count: int) -> World:
    return hosts_and_sizes(count, sizes=count)


def full_fleet(count: int) -> World:
    return hosts_and_sizes(count, sizes=count, in_use=7.5)


def slices_in_use(count: int) -> World:
    """Slices of two hosts, all in use, and as many gangs, no two of which ask for the same."""
    world = World()
    for number in range(count):
        world.add_slice(f"s{number:04}")
        world.start(f"running-{number}")
    for number in range(count):
        spec = gang_spec(f"job-{number}", resources={"TPU": 4.0, "CPU": 1 + number / count})
        world.do(JobSubmittedEvent(spec, world.now))
    return world


def free_slices(count: int) -> World:
    world = World()
    for number in range(count):
        world.add_slice(f"s{number:04}")
    for number in range(count):
        spec = gang_spec(f"job-{number}", resources={"TPU": 4.0, "CPU": 1 + number / count})
        world.do(JobSubmittedEvent(spec, world.now))
    return world


@pytest.mark.parametrize("make", [empty_fleet, full_fleet, slices_in_use, free_slices])
def test_first_plan_of_unequal_jobs_costs_in_proportion(make: Callable[[int], World]) -> None:
    small, large = make(150), make(300)
    once, twice = calls(small.plan), calls(large.plan)
    assert twice < ABOUT_TWICE * once


def backlog(count: int) -> World:
    """Equal jobs that have waited for longer than the backfill bound, for the first of which slices are reserved."""
    world = World("a", "b")
    world.start("running", slices=(2,))
    for number in range(count):
        world.do(JobSubmittedEvent(gang_spec(f"job-{number}", priority=BATCH, max_retries_preemption=9), world.now))
    world.now += 2 * BACKFILL_BOUND_S
    world.schedule()
    assert promised(world.state.jobs["job-0"])
    return world


def test_backlog_of_equal_jobs_that_starve_costs_little_more_than_one_of_them() -> None:
    small, large = backlog(30), backlog(300)
    once, ten_times = calls(small.plan), calls(large.plan)
    assert ten_times < 3 * once


@pytest.mark.parametrize("in_use", [0.0, 7.5])
def test_sizes_of_tasks_share_the_memory_of_their_evaluations(in_use: float) -> None:
    same, different = hosts_and_sizes(300, 1, in_use), hosts_and_sizes(300, 100, in_use)
    assert peak_bytes(different.plan) < 3 * peak_bytes(same.plan)


def test_gangs_with_different_preferences_share_their_evaluations() -> None:
    costs = []
    for kinds in (1, 100):
        world = slices_in_use(100)
        world.submit("none")
        world.plan()
        for number in range(100):
            wish = Constraint("rack", ConstraintOp.EQ, f"r{number % kinds}")
            world.submit(f"wishes-{number}", preferences=(wish,))
        costs.append(calls(world.plan))
    assert costs[1] < ABOUT_TWICE * costs[0]


def test_first_plan_evaluates_about_as_many_groups_as_it_gives_away(monkeypatch: pytest.MonkeyPatch) -> None:
    evaluated = list[str]()

    def counted(group: Group, need: Requirement, held: bool, now: float, in_words: bool = True) -> Evaluation:
        evaluated.append(group.name)
        return evaluate(group, need, held, now, in_words)

    monkeypatch.setattr(candidates, "evaluate", counted)
    world = World()
    for number in range(100):
        world.add_slice(f"s{number:02}")
    for number in range(20):
        world.submit(f"job-{number}")
    assert len(world.plan().assignments) == 20
    assert len(evaluated) < 2 * 20


def small_tasks(count: int) -> World:
    """A host full of tasks of one CPU, and a job of a higher band that needs the whole host."""
    world = World()
    world.do(cpu_host("w", cpus=float(count)))
    world.start_tasks("low", count, priority=BATCH, resources={"CPU": 1.0})
    world.now += 1000.0
    world.do(JobSubmittedEvent(cpu_spec("high", float(count)), world.now))
    return world


def gangs_to_evict(count: int) -> World:
    """Slices in use by a gang each, and a gang of a higher band that needs all of them."""
    world = World()
    for number in range(count):
        world.add_slice(f"s{number:04}")
        world.start(f"low-{number}", priority=BATCH)
    world.now += 1000.0
    world.submit("high", slices=(count,))
    return world


@pytest.mark.parametrize("make", [small_tasks, gangs_to_evict])
def test_search_for_victims_costs_in_proportion(make: Callable[[int], World]) -> None:
    small, large = make(60), make(120)
    once, twice = calls(lambda: victims(small, 60)), calls(lambda: victims(large, 120))
    assert twice < ABOUT_TWICE * once


def victims(world: World, count: int) -> None:
    (promise,) = world.plan().promises
    assert len(promise.leave) == count


def test_host_is_compared_with_many_values_at_once() -> None:
    costs = []
    for values in (10, 1000):
        world = hosts_and_sizes(100, 1, in_use=7.5)
        elsewhere = Constraint("rack", ConstraintOp.IN, [f"r{number}" for number in range(values)])
        for number in range(100):
            world.do(tagged(cpu_host(f"w{number:04}"), {"rack": "none"}))
        world.submit_tasks("job", 1, constraints=(elsewhere,))
        costs.append(calls(world.plan))
    assert costs[1] < ABOUT_TWICE * costs[0]


def test_groups_that_do_not_fit_share_a_copy_of_the_fleet() -> None:
    """A few slices are too few for two jobs that each need most of them, even once all are free."""
    costs = []
    for groups in (1, 10):
        world = World()
        for number in range(40):
            world.add_slice(f"s{number:02}")
            world.start(f"running-{number}")
        for number in range(groups):
            each = [gang_spec(f"{number}-{part}", slices=(30 - number,), priority=PRODUCTION) for part in "ab"]
            submit_group(world, *each, name=f"group-{number}")
        costs.append(calls(world.plan))
    assert costs[1] < 4.5 * costs[0], "ten times as many groups"


def test_groups_whose_room_nothing_bounds_share_a_copy_of_the_fleet() -> None:
    """Each would fit once all that runs has ended, which may last, so none of them gets a reservation."""
    costs = []
    for groups in (1, 10):
        world = World()
        for number in range(40):
            world.add_slice(f"s{number:02}")
            world.start(f"running-{number}", priority=PRODUCTION)
        world.now += 100_000.0
        for number in range(groups):
            each = [gang_spec(f"{number}-{part}", priority=PRODUCTION) for part in "ab"]
            submit_group(world, *each, name=f"group-{number}")
        costs.append(calls(world.plan))
        assert not world.plan().promises
    assert costs[1] < 4.5 * costs[0], "ten times as many groups"


def test_plan_that_is_not_committed_leaves_no_trace() -> None:
    """Plans that are not committed leave no trace."""
    world = hosts_and_sizes(40, 7)
    first = world.plan()
    assert len(one_by_one(first.assignments)) == 40
    assert world.plan().assignments == first.assignments
    world.scheduler = Scheduler()
    assert world.plan().assignments == first.assignments
