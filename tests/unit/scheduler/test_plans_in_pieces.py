"""A plan may end after some gangs. Once they are committed, the next plan goes on where the whole plan would have."""

import random
from collections.abc import Iterator

import pytest

from iris_ray.model.options import PriorityBand
from iris_ray.scheduler import SchedulingResult
from iris_ray.scheduler.planner import Planner
from iris_ray.state.events import AssignedEvent
from iris_ray.state.instructions import Instructions
from tests.support.worlds import World, add_slices, cpu_host, one_by_one


def random_world(seed: int) -> World:
    """Slices and hosts without chips, and jobs of several users, bands and kinds that don't all fit."""
    chance, world = random.Random(seed), World()
    add_slices(world, *"abcdef")
    for name in ("x", "y", "z"):
        world.do(cpu_host(name, cpus=float(chance.randint(2, 8))))
    for number in range(12):
        wishes = {"user": chance.choice("uvw"), "priority": chance.choice(list(PriorityBand)), "owner": "pool-a"}
        if chance.random() < 0.5:
            world.submit(f"gang-{number}", slices=chance.choice([(1,), (1, 2), (2,), (3,)]), **wishes)
        else:
            resources = chance.choice([{"CPU": 1.0}, {"CPU": 3.0}])
            world.submit_tasks(f"tasks-{number}", chance.randint(1, 9), resources=resources, **wishes)
    world.now += chance.choice([0.0, 1000.0])  # the second: all of them have waited long
    return world


def plan(world: World, most: int | None) -> SchedulingResult:
    state = world.state
    return world.scheduler.find_assignments(state.pending(), state.fleet, state.usage, world.now, None, most)


def pieces(world: World, most: int) -> Iterator[SchedulingResult]:
    """Plan and commit until nothing is left to be planned."""
    complete = False
    while not complete:
        result = plan(world, most)
        for assignment in result.assignments:
            world.do(assignment)
        complete = result.complete
        yield result


@pytest.mark.parametrize("seed", range(20))
def test_plans_in_pieces_place_like_one_plan(seed: int) -> None:
    whole = plan(random_world(seed), None)
    assert whole.complete
    for most in (1, 3):
        world = random_world(seed)
        placed: list[AssignedEvent] = []
        for piece in pieces(world, most):
            assert len(one_by_one(piece.assignments)) <= most
            placed += one_by_one(piece.assignments)
        assert placed == one_by_one(whole.assignments)
        assert piece.pending_reasons.keys() == whole.pending_reasons.keys()
        world.check()


def test_plan_ends_sooner_if_its_gangs_have_many_tasks() -> None:
    world = World()
    for name in "abcd":
        world.add_slice(name, "v4-256")
        world.submit(f"job-{name}", tpu_type="v4-256")
    assert [len(piece.assignments) for piece in pieces(world, 5)] == [2, 2, 0]


@pytest.fixture
def world() -> World:
    """Room for eight tasks."""
    world = World()
    world.do(cpu_host("h"))
    return world


def test_planner_goes_on_until_the_queue_is_planned(world: World) -> None:
    job = world.submit_tasks("many", 10, resources={"CPU": 1.0})
    planner, counts = Planner(world.state, 1.0, most_placed=3), list[int]()
    while not counts or planner.unfinished:
        counts.append(len(planner.plan(world.now, Instructions())))
    assert counts == [3, 3, 2]
    assert str(planner.pending_reasons["many"]).startswith("waiting for 1 host (any); 0 free")
    assert len(job.pending) == 2
    assert planner.plan(world.now, Instructions()) == []


def test_unreached_job_keeps_reason_of_previous_plan(world: World) -> None:
    world.submit_tasks("large", 1, resources={"CPU": 100.0})
    planner = Planner(world.state, 1.0, most_placed=3)
    planner.plan(world.now, Instructions())
    world.submit_tasks("first", 4, resources={"CPU": 1.0}, priority=PriorityBand.PRODUCTION)
    world.do(cpu_host("other", cpus=1.0))
    planner.plan(world.now, Instructions())
    assert planner.unfinished
    assert planner.pending_reasons.keys() == {"large"}
    planner.plan(world.now, Instructions())
    assert not planner.unfinished
    assert planner.pending_reasons.keys() == {"large"}
