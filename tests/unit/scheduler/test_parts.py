"""Gangs on parts of slices: which part a gang gets, what it leaves whole, and what it shares with its neighbours."""

from random import Random
from typing import Any

import pytest

from iris_ray.errors import IllegalTransitionError, InvalidJobError, InvalidTopologyError
from iris_ray.model.constraints import AttributeValue, Constraint, ConstraintOp
from iris_ray.model.job_spec import CoschedulingConfig, JobSpec
from iris_ray.model.jobs import Job
from iris_ray.model.lifecycle import TaskState
from iris_ray.model.options import PriorityBand
from iris_ray.model.parts import hosts_of_shape, part_attribute, part_shapes
from iris_ray.model.workers import TOPOLOGY_LABEL, TPU_TOPOLOGY
from iris_ray.state.events import (
    GangAssignedEvent,
    SliceReleasedEvent,
    TaintedEvent,
    WorkerDrainedEvent,
    WorkerSuspectedEvent,
)
from iris_ray.state.instructions import ReclaimSlice
from tests.support.costs import calls
from tests.support.worlds import (
    PlannedWorld,
    World,
    add_slices,
    gang_spec,
    host,
    hosts_of,
    is_told_to_leave,
    placed,
    submit_group,
    tagged,
)

S = TaskState
TYPE = "v6e-16"  # four hosts, whose 2x4 parts are 0, 2 and 1, 3


def of_parts(shape: str = "2x4", tpu_type: str = TYPE, parts: int = 1, **changes: Any) -> dict[str, Any]:
    """The changes of a gang's spec that put it on a part."""
    found: dict[str, Any] = {
        "tpu_type": tpu_type,
        "replicas": hosts_of_shape(shape),
        "coscheduling": CoschedulingConfig(part_attribute(shape), parts),
        "failure_domain": "slice" if parts > 1 else "job",
    }
    return found | changes


def part_gang(world: World, job_id: str, shape: str = "2x4", **changes: Any) -> Job:
    return world.submit(job_id, **of_parts(shape, **changes))


def run(world: World, job_id: str, shape: str = "2x4", **changes: Any) -> Job:
    """A gang that runs on a part."""
    return world.start(job_id, **of_parts(shape, **changes))


@pytest.fixture
def world() -> World:
    world = World()
    add_slices(world, "a", tpu_type=TYPE)
    return world


# -- one slice ---------------------------------------------------------------------------------------------------------


def test_two_jobs_share_a_slice_and_a_third_waits(world: World) -> None:
    for job_id in ("first", "second", "third"):
        part_gang(world, job_id)
    world.schedule()
    jobs = world.state.jobs
    assert (jobs["first"].gang.groups, hosts_of(jobs["first"])) == (("a:2x4:0",), ("a-0", "a-2"))
    assert (jobs["second"].gang.groups, hosts_of(jobs["second"])) == (("a:2x4:1",), ("a-1", "a-3"))
    waits = (
        "waiting for 1 2x4 part (tpu-topology == v6e-16); 0 free; a:2x4:0: in use by first; a:2x4:1: in use by second"
    )
    assert world.why("third") == waits


def test_parts_of_one_job_are_gangs_of_their_own(world: World) -> None:
    job = world.submit("job", **of_parts(parts=2))
    world.schedule()
    assert [gang.groups for gang in job.gangs] == [("a:2x4:0",), ("a:2x4:1",)]


def test_parts_of_several_shapes_do_not_overlap(world: World) -> None:
    run(world, "small", "2x2")
    part_gang(world, "large")
    part_gang(world, "next", "2x2")
    world.schedule()
    jobs = world.state.jobs
    assert [jobs[i].gang.groups for i in ("small", "large", "next")] == [("a:2x2:0",), ("a:2x4:1",), ("a:2x2:1",)]


def test_slice_with_a_used_part_is_in_use_for_a_gang_on_the_whole(world: World) -> None:
    run(world, "part")
    world.submit("whole", tpu_type=TYPE)
    assert placed(world) == {}
    assert "a: 2 of 4 hosts in use by part" in world.why("whole")


def test_used_slice_has_no_free_part(world: World) -> None:
    world.start("whole", tpu_type=TYPE)
    part_gang(world, "part")
    assert placed(world) == {}


def test_type_without_slices_is_named(world: World) -> None:
    part_gang(world, "part", "2x2x2", tpu_type="v5p-64")
    assert "none like that in the cluster, which has 1 × v6e-16" in world.why("part")


def test_parts_follow_the_shape_that_the_live_slice_has() -> None:
    """A v5p-64 has 2x4x4 chips by default, and others are offered."""
    world = World()
    add_slices(world, "long", tpu_type="v5p-64", **{TOPOLOGY_LABEL: "2x2x8"})
    job = part_gang(world, "job", "2x2x4", tpu_type="v5p-64")
    world.schedule()
    assert hosts_of(job) == ("long-0", "long-1", "long-2", "long-3")


def test_hosts_that_report_different_shapes_make_no_part() -> None:
    """By their numbers, these four hosts would be a part. Neither shape has one of them."""
    world, shapes = World(), {"2x4x4": (0, 2, 5, 7), "2x2x8": (1, 3, 4, 6)}
    for shape, numbers in shapes.items():
        for number in numbers:
            world.do(tagged(host("a", number, "v5p-64"), {TOPOLOGY_LABEL: shape}))
    part_gang(world, "part", "2x2x4", tpu_type="v5p-64")
    assert placed(world) == {}
    assert f"a:2x2x4:0: its hosts report different values of {TOPOLOGY_LABEL}" in world.why("part")


def test_cost_of_a_placement_does_not_grow_with_the_square_of_the_parts() -> None:
    """One user fills a slice with gangs on its smallest parts. The larger slice has four times as many."""

    def cost(tpu_type: str, parts: int) -> int:
        world = World()
        add_slices(world, "a", tpu_type=tpu_type)
        for number in range(parts):
            part_gang(world, f"job-{number}", "2x2x1", tpu_type=tpu_type)
        plan = world.plan()
        assert len(plan.assignments) == parts

        def commit() -> None:
            for assignment in plan.assignments:
                world.do(assignment)
            world.plan()

        return calls(commit)

    assert cost("v4-512", 64) < 4 * 2 * cost("v4-128", 16)


# -- faults ------------------------------------------------------------------------------------------------------------


def test_lost_host_costs_its_part_only(world: World) -> None:
    first, second = (run(world, name, max_retries_preemption=3) for name in ("first", "second"))
    world.lose("a-2")
    assert (first.gang.pending, second.gang.placed) == (True, True)
    assert [task.state for task in second.tasks] == [S.RUNNING] * 2
    assert placed(world) == {}
    assert "a:2x4:0: has 1 of its 2 hosts" in world.why("first")


def test_part_without_the_lost_host_is_used(world: World) -> None:
    world.lose("a-2")
    part_gang(world, "part")
    assert placed(world) == {"part": ("a:2x4:1",)}
    world.submit("whole", tpu_type=TYPE)
    assert "a: host 2 of 4 is missing" in world.why("whole")


def test_lost_gang_returns_to_a_part_of_another_slice(world: World) -> None:
    add_slices(world, "b", tpu_type=TYPE)
    job = run(world, "job", max_retries_preemption=3)
    world.lose("a-0")
    world.confirm(job)
    world.now += 60
    world.schedule()
    assert job.gang.groups == ("a:2x4:1",)  # the slice that is broken anyway


@pytest.mark.parametrize("fault", ["drain", "suspicion", "taint"])
def test_host_that_takes_nothing_new_closes_its_part_only(world: World, fault: str) -> None:
    if fault == "drain":
        world.do(WorkerDrainedEvent("a-0", "maintenance"))
    elif fault == "suspicion":
        world.do(WorkerSuspectedEvent("a-0", "no answer", world.now))
    else:
        world.do(TaintedEvent("a-0", "burnt", "it failed"))
    for job_id in ("first", "second"):
        part_gang(world, job_id)
    assert placed(world) == {"first": ("a:2x4:1",)}


def test_two_hosts_with_one_number_are_in_no_part(world: World) -> None:
    world.do(host("a", 0, TYPE, node_id="another"))
    part_gang(world, "part")
    assert placed(world) == {"part": ("a:2x4:1",)}
    world.schedule()
    part_gang(world, "next")
    assert "a:2x4:0: has 3 of its 2 hosts" in world.why("next")


# -- packing -----------------------------------------------------------------------------------------------------------


def test_gang_takes_the_part_that_splits_the_least(world: World) -> None:
    add_slices(world, "b", tpu_type=TYPE)
    blocked = world.submit("blocked", constraints=on_slice("b"), **of_parts("2x2"))
    world.schedule()
    assert blocked.gang.groups == ("b:2x2:0",)
    part_gang(world, "small", "2x2")
    assert placed(world) == {"small": ("b:2x2:1",)}  # not a whole slice, nor the other 2x4 part of b
    world.schedule()
    part_gang(world, "large")
    assert placed(world) == {"large": ("b:2x4:1",)}


def on_slice(name: str) -> tuple[Constraint, ...]:
    of_type = Constraint(TPU_TOPOLOGY, ConstraintOp.EQ, AttributeValue(TYPE))
    return of_type, Constraint("tpu-name", ConstraintOp.EQ, AttributeValue(name))


def test_place_in_the_order_follows_what_neighbours_do(world: World) -> None:
    """The parts of slice b become worse when b is whole again, although their own hosts have not changed."""
    add_slices(world, "b", tpu_type=TYPE)
    first = world.submit("first", constraints=on_slice("b"), **of_parts())
    world.schedule()
    waiting = part_gang(world, "waiting")
    assert placed(world) == {"waiting": ("b:2x4:1",)}
    world.report_all(first, S.RUNNING)
    world.finish(first)
    world.do(SliceReleasedEvent("b:2x4:0", "pool-a"))
    assert placed(world) == {"waiting": ("a:2x4:0",)}
    assert waiting.gang.pending


def test_gangs_of_one_plan_fill_one_slice_before_the_next(world: World) -> None:
    add_slices(world, "b", tpu_type="v6e-64")
    for number in range(4):
        part_gang(world, f"job-{number}", "2x4", tpu_type="v6e-64")
    world.submit("half", **of_parts("4x8", "v6e-64"))
    world.schedule()
    used = {node_id for number in range(4) for node_id in hosts_of(world.state.jobs[f"job-{number}"])}
    assert world.state.jobs["half"].gang.placed, "they have left a half whole"
    assert len(used) == 8


# -- who holds what ----------------------------------------------------------------------------------------------------


def test_owners_hold_parts_next_to_each_other(world: World) -> None:
    first, second = run(world, "first", owner="pool-a"), run(world, "second", owner="pool-b")
    assert world.state.holders == {"a:2x4:0": "pool-a", "a:2x4:1": "pool-b"}
    world.finish(first)
    fleet = world.state.fleet
    assert {i: fleet.holder_of(fleet.workers[f"a-{i}"]) for i in range(4)} == {
        0: "pool-a",
        1: "pool-b",
        2: "pool-a",
        3: "pool-b",
    }
    world.do(SliceReleasedEvent("a:2x4:0", "pool-a"))
    assert world.state.holders == {"a:2x4:1": "pool-b"}
    assert second.gang.placed


def test_warm_slice_is_reclaimed_for_a_part_even_from_the_same_owner(world: World) -> None:
    job = world.start("whole", tpu_type=TYPE)
    world.finish(job)
    part_gang(world, "part")
    assert world.schedule()["part"].reclaim == [ReclaimSlice("a", "pool-a", "a:2x4:0")]
    world.do(SliceReleasedEvent("a", "pool-a"))
    assert world.state.holders == {"a:2x4:0": "pool-a"}


def test_warm_parts_are_reclaimed_for_the_slice(world: World) -> None:
    for job in [run(world, "first"), run(world, "second", owner="pool-b")]:
        world.finish(job)
    world.submit("whole", tpu_type=TYPE, owner="pool-b")
    assert world.schedule()["whole"].reclaim == [
        ReclaimSlice("a:2x4:0", "pool-a", "a"),
        ReclaimSlice("a:2x4:1", "pool-b", "a"),
    ]


def test_warm_part_is_reclaimed_for_parts_that_share_its_hosts_only(world: World) -> None:
    world.finish(run(world, "first"))
    for number in range(4):
        part_gang(world, f"small-{number}", "2x2")
    reclaims = [one for done in world.schedule().values() for one in done.reclaim]
    assert reclaims == [ReclaimSlice("a:2x4:0", "pool-a", f"a:2x2:{number}") for number in (0, 1)]


@pytest.mark.parametrize("kind", ["slice", "part"])
def test_slice_or_part_that_nobody_keeps_warm_is_taken_first(world: World, kind: str) -> None:
    """A gang on the whole slice or on a part of another shape would have the owner of a warm part give it up."""
    add_slices(world, "b", tpu_type=TYPE)
    world.finish(run(world, "first"))
    if kind == "slice":
        world.submit("next", tpu_type=TYPE, owner="pool-b")
    else:
        part_gang(world, "next", "2x2", owner="pool-b")
    assert world.schedule()["next"].reclaim == []
    assert world.state.holders["a:2x4:0"] == "pool-a"


def test_own_warm_part_is_taken_again(world: World) -> None:
    run(world, "other", owner="pool-b")
    job = run(world, "mine")
    world.finish(job)
    world.finish(world.state.jobs["other"])
    part_gang(world, "again")
    assert world.schedule()["again"].reclaim == []
    assert world.state.jobs["again"].gang.groups == ("a:2x4:1",)


# -- rules of the queue ------------------------------------------------------------------------------------------------


def test_higher_band_evicts_parts_for_a_slice() -> None:
    world = PlannedWorld()
    add_slices(world, "a", tpu_type=TYPE)
    low = [world.run(f"low-{i}", priority=PriorityBand.BATCH, **of_parts()) for i in range(2)]
    world.submit("high", tpu_type=TYPE, priority=PriorityBand.PRODUCTION)
    world.turn(1.0, times=5)
    assert all(map(is_told_to_leave, low))


def test_higher_band_evicts_one_part_for_a_part() -> None:
    world = PlannedWorld()
    add_slices(world, "a", tpu_type=TYPE)
    low = [world.run(f"low-{i}", priority=PriorityBand.BATCH, **of_parts()) for i in range(2)]
    world.submit("high", priority=PriorityBand.PRODUCTION, **of_parts())
    world.turn(1.0, times=5)
    (left,) = [job for job in low if is_told_to_leave(job)]
    world.leave(left)
    world.confirm(left, left.attempt)
    world.turn(1.0)
    high = world.state.jobs["high"]
    assert high.gang.placed
    assert high.gang.groups[0].startswith("a:2x4:")


def test_group_evicts_no_more_parts_than_it_needs() -> None:
    """Three parts are free, and the group needs four. The free ones are the last in the order of names."""
    world = PlannedWorld()
    add_slices(world, "a", "b", tpu_type=TYPE)
    low = [world.run(f"low-{i}", priority=PriorityBand.BATCH, **of_parts("2x2")) for i in range(5)]
    high = [gang_spec(f"high-{i}", priority=PriorityBand.PRODUCTION, **of_parts("2x2")) for i in range(4)]
    submit_group(world, *high)
    world.turn(1.0, times=5)
    assert sum(map(is_told_to_leave, low)) == 1


def test_slice_is_kept_for_a_gang_that_has_waited_long_behind_parts() -> None:
    """Parts that become free one after the other don't go to newcomers for ever."""
    world = PlannedWorld()
    add_slices(world, "a", tpu_type=TYPE)
    first, second = (world.run(f"job-{i}", **of_parts()) for i in range(2))
    whole = world.submit("whole", tpu_type=TYPE)
    world.turn(400.0, times=4)
    world.submit("newcomer", **of_parts())
    world.finish(first)
    world.turn(1.0)
    assert world.state.jobs["newcomer"].gang.pending
    world.finish(second)
    world.turn(1.0)
    assert whole.gang.placed


def test_chips_of_the_part_count(world: World) -> None:
    run(world, "part", user="ann")
    assert world.state.usage["ann"]["TPU"] == 8.0


def test_group_of_jobs_starts_on_parts_together(world: World) -> None:
    specs = [gang_spec(name, **of_parts()) for name in ("learner", "actor")]
    jobs = submit_group(world, *specs)
    world.schedule()
    assert {job.gang.groups for job in jobs} == {("a:2x4:0",), ("a:2x4:1",)}


def test_restored_gang_keeps_its_part(world: World) -> None:
    run(world, "first")
    job = run(world, "second", owner="pool-b")
    new = World()
    add_slices(new, "a", tpu_type=TYPE)
    new.now = world.now
    new.restore(world)
    restored = new.state.jobs["second"]
    assert (restored.gang.groups, hosts_of(restored)) == (job.gang.groups, hosts_of(job))
    assert new.state.holders == world.state.holders


def test_hosts_of_two_parts_are_no_part(world: World) -> None:
    part_gang(world, "job")
    with pytest.raises(IllegalTransitionError, match="is not of tpu-part-2x4 a:2x4:0"):
        world.do(GangAssignedEvent("job", ("a:2x4:0",), (("a-0", "a-1"),), 0))


def test_grouping_goes_with_the_last_job_that_needs_it(world: World) -> None:
    """Hosts carry nothing for parts, and without jobs on parts no event updates groups of them."""
    job = run(world, "job")
    fleet, key = world.state.fleet, part_attribute("2x4")
    kept = fleet.grouping(key)
    assert fleet.keeps(key, kept)
    world.finish(job)
    world.do(SliceReleasedEvent("a:2x4:0", "pool-a"))
    assert not fleet.keeps(key, kept)


# -- whatever happens --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(12))
def test_indexes_and_invariants_hold_whatever_happens(seed: int) -> None:
    """Gangs on parts of all shapes and on whole slices, of two owners, come and go, and hosts are lost and return."""
    random, world = Random(seed), World()
    add_slices(world, "a", "b", tpu_type="v6e-64")
    shapes = [None, *part_shapes("8x8")]
    for number in range(60):
        if random.random() < 0.6:
            shape, owner = random.choice(shapes), random.choice(["pool-a", "pool-b"])
            options = {"owner": owner, "max_retries_preemption": 3}
            changes = {"tpu_type": "v6e-64"} if shape is None else of_parts(shape, "v6e-64")
            world.submit(f"job-{number}", **changes, **options)
        for done in world.schedule().values():
            for one in done.reclaim:
                world.do(SliceReleasedEvent(one.slice_name, one.holder))
        running = [job for job in world.state.jobs.values() if job.gang.placed]
        for job in running:
            world.report_all(job, S.RUNNING)
        if running and random.random() < 0.6:
            world.finish(random.choice(running))
        if random.random() < 0.3:
            node_id = f"{random.choice('ab')}-{random.randrange(16)}"
            if node_id in world.state.workers:
                lost = [attempt.job_id for _, attempt in world.state.workers[node_id].occupants]
                world.lose(node_id)
                for job_id in lost:
                    world.confirm(world.state.jobs[job_id])
            else:
                name, _, index = node_id.partition("-")
                world.do(host(name, int(index), "v6e-64"))
        held = [(name, owner) for name, owner in world.state.holders.items() if random.random() < 0.2]
        in_use = {name for job in world.state.jobs.values() if job.gang.placed for name in job.gang.groups}
        for name, owner in held:
            if name not in in_use:
                world.do(SliceReleasedEvent(name, owner))
        world.now += 40.0
        world.check()
    taken = [{w.node_id for w in world.state.fleet.slice_workers(name)} for name in world.state.holders]
    assert sum(map(len, taken)) == len(set().union(*taken)), "two owners hold one host"


# -- specs that can't work ---------------------------------------------------------------------------------------------


def spec(**changes: Any) -> JobSpec:
    return gang_spec("job", **(of_parts() | changes))


def test_gang_on_several_parts_is_refused_with_a_way_out() -> None:
    with pytest.raises(InvalidTopologyError, match=r"MEGASCALE.* failure_domain='slice' each part is a gang"):
        spec(coscheduling=CoschedulingConfig(part_attribute("2x4"), (1, 2)))


def test_shape_that_the_type_does_not_have_is_refused() -> None:
    with pytest.raises(InvalidTopologyError, match="in these shapes: 2x2, 2x4"):
        spec(coscheduling=CoschedulingConfig(part_attribute("8x8")))


@pytest.mark.parametrize("wrong", [{"replicas": 3}, {"whole_groups": True}])
def test_gang_of_another_size_than_its_part_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidJobError, match="a 2x4 part has 2 hosts"):
        spec(**wrong)


def test_parts_without_a_type_are_refused() -> None:
    with pytest.raises(InvalidJobError, match="name a TPU type"):
        spec(device=None)
