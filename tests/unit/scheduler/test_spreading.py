"""Tasks without a device go to as many hosts as there are, and then to a host that has some; packing is an option."""

from collections import Counter
from typing import Any

import pytest

from iris_ray.model.constraints import Constraint, ConstraintOp
from iris_ray.model.jobs import Job
from tests.support.costs import calls
from tests.support.worlds import World, add_slices, cpu_host


@pytest.fixture
def world() -> World:
    """Three hosts of 8 CPUs."""
    world = World()
    for number in range(3):
        world.do(cpu_host(f"cpu-{number}"))
    return world


def start(world: World, job_id: str = "job", replicas: int = 2, cpus: float = 1.0, **changes: Any) -> Job:
    return world.start_tasks(job_id, replicas, resources={"CPU": cpus}, **changes)


def on_hosts(job: Job) -> dict[str, int]:
    return dict(Counter(task.node_id for task in job.tasks if task.node_id is not None))


@pytest.mark.parametrize(
    ("replicas", "hosts"),
    [
        (2, {"cpu-0": 1, "cpu-1": 1}),
        (3, {"cpu-0": 1, "cpu-1": 1, "cpu-2": 1}),
        (6, {"cpu-0": 2, "cpu-1": 2, "cpu-2": 2}),
        (24, {"cpu-0": 8, "cpu-1": 8, "cpu-2": 8}),
    ],
)
def test_tasks_have_hosts_of_their_own_while_there_are_some(world: World, replicas: int, hosts: dict[str, int]) -> None:
    assert on_hosts(start(world, replicas=replicas)) == hosts


@pytest.mark.parametrize("hosts", range(1, 10))
def test_equal_hosts_differ_by_one_task_at_most(hosts: int) -> None:
    for replicas in range(1, 4 * hosts + 2):
        world = World()
        for number in range(hosts):
            world.do(cpu_host(f"cpu-{number}", 100.0))
        had = [on_hosts(start(world, replicas=replicas)).get(f"cpu-{number}", 0) for number in range(hosts)]
        assert (sum(had), max(had) - min(had) <= 1) == (replicas, True), (replicas, had)


def test_tasks_go_on_to_hosts_with_room_once_others_are_full(world: World) -> None:
    start(world, "large", 1, 8.0)
    start(world, "other", 1, 6.0)
    assert on_hosts(start(world, replicas=6)) == {"cpu-1": 2, "cpu-2": 4}


def test_jobs_are_spread_each_by_itself(world: World) -> None:
    assert on_hosts(start(world, "one")) == on_hosts(start(world, "other")) == {"cpu-0": 1, "cpu-1": 1}


def test_spread_tasks_of_alternating_users_have_own_hosts(world: World) -> None:
    jobs = [world.submit_tasks(user, 3, resources={"CPU": 1.0}, user=user) for user in ("ann", "bob")]
    world.schedule()
    for job in jobs:
        assert on_hosts(job) == {"cpu-0": 1, "cpu-1": 1, "cpu-2": 1}


def test_returning_task_goes_to_host_without_sibling(world: World) -> None:
    job = start(world, replicas=2)
    world.do(cpu_host("another"))  # the first by name
    world.lose("cpu-1")
    world.now += 10.0
    world.schedule()
    assert on_hosts(job) == {"cpu-0": 1, "another": 1}


def test_better_hosts_count_more_than_spreading(world: World) -> None:
    """Hosts with chips stay free for those that need chips, and preferences are heard."""
    add_slices(world, "a")
    assert on_hosts(start(world, "on-cpus", 6)) == {"cpu-0": 2, "cpu-1": 2, "cpu-2": 2}
    world.do(cpu_host("liked", disk="ssd"))
    liked = Constraint("disk", ConstraintOp.EQ, "ssd")
    assert on_hosts(start(world, "prefers", 4, preferences=(liked,))) == {"liked": 4}


@pytest.mark.parametrize("resources", [{"GPU": 1.0}, {"TPU": 4.0}])
def test_tasks_with_accelerators_are_packed(resources: dict[str, float]) -> None:
    world = World()
    for number in range(3):
        world.do(cpu_host(f"gpu-{number}", gpus=8.0))
    add_slices(world, "a")
    job = world.start_tasks("job", 2, resources=resources)
    assert on_hosts(job) == ({"gpu-0": 2} if "GPU" in resources else {"a-0": 1, "a-1": 1})


@pytest.mark.parametrize("extra", [0, 1, -1])
@pytest.mark.parametrize("hosts", [50, 100])
def test_spreading_costs_per_task_no_more_on_many_hosts(hosts: int, extra: int) -> None:
    """Each host has room for more than its share, so that all hosts must be looked at."""
    world = World()
    for number in range(hosts):
        world.do(cpu_host(f"cpu-{number:03}", 100.0))
    job = world.submit_tasks("job", 10 * hosts + extra, resources={"CPU": 1.0})
    cost = calls(world.schedule)
    assert set(on_hosts(job).values()) == {10, 10 + extra}
    assert cost < 100 * 10 * hosts
