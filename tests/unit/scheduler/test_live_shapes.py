"""What live nodes report wins over the rule for their type."""

from dataclasses import replace
from typing import Any

from iris_ray.model.constraints import AttributeValue
from iris_ray.model.jobs import Job
from iris_ray.model.lifecycle import TaskState
from iris_ray.model.limits import Limits
from iris_ray.model.options import PriorityBand
from iris_ray.model.workers import TPU_VM_COUNT
from iris_ray.scheduler import Scheduler
from iris_ray.scheduler.scheduler import BACKFILL_BOUND_S
from iris_ray.state.events import LimitsSetEvent, WorkerSuspectedEvent
from tests.support.worlds import World, assigned_gangs, host, placed


def add_split_slice(world: World, name: str) -> None:
    """A v5litepod-8 as GKE builds it: two VMs of four chips, where the rule says one of eight."""
    for number in (0, 1):
        event = host(name, number, "v5litepod-8")
        world.do(event.__class__(
            event.node_id, event.address, {**event.attributes, TPU_VM_COUNT: AttributeValue(2)}, {"TPU": 4.0}
        ))  # fmt: skip


def submit_whole(world: World, slices: tuple[int, ...] = (1,), **changes: Any) -> Job:
    """The gang that run_on_pod submits by the rule: one host with eight chips."""
    return world.submit(tpu_type="v5litepod-8", slices=slices, resources={"TPU": 8.0}, whole_groups=True, **changes)


def test_whole_gang_takes_every_host_that_the_live_slice_has(world: World) -> None:
    add_split_slice(world, "a")
    job = submit_whole(world)
    world.schedule()
    assert [task.node_id for task in job.tasks] == ["a-0", "a-1"]
    assert world.state.workers["a-0"].free["TPU"] == 0.0
    world.report_all(job, TaskState.SUCCEEDED)
    world.confirm(job)
    assert world.state.workers["a-0"].free["TPU"] == 4.0


def test_whole_gang_needs_all_hosts_that_the_live_slice_has(world: World) -> None:
    add_split_slice(world, "a")
    world.lose("a-1")
    submit_whole(world)
    assert world.plan().assignments == []
    assert "host 1 of 2 is missing" in world.why("job")


def test_slices_of_one_gang_are_of_one_shape(world: World) -> None:
    world.do(host("a", 0, "v5litepod-8", resources={"TPU": 8.0}))
    add_split_slice(world, "b")
    add_split_slice(world, "c")
    submit_whole(world, slices=(2, 3))
    (assignment,) = assigned_gangs(world.plan())
    assert assignment.group_names == ("b", "c")


def test_gang_with_own_host_count_takes_slice_of_shape(world: World) -> None:
    add_split_slice(world, "a")
    world.add_slice("b", "v5litepod-8")
    world.submit("one", tpu_type="v5litepod-8")
    world.submit("two", tpu_type="v5litepod-8", replicas=2)
    assert [a.group_names for a in assigned_gangs(world.plan())] == [("b",), ("a",)]


def live_slice(world: World, name: str, tpu_type: str, *vm_counts: int, chips: float = 4.0) -> None:
    """One host for each number of VMs that a host says its slice has."""
    for number, vm_count in enumerate(vm_counts):
        plain = host(name, number, tpu_type, resources={"TPU": chips})
        world.do(replace(plain, attributes={**plain.attributes, TPU_VM_COUNT: AttributeValue(vm_count)}))


def test_slice_whose_hosts_disagree_about_its_size_is_not_used(world: World) -> None:
    live_slice(world, "a", "v5litepod-8", 2, 1)
    world.submit(tpu_type="v5litepod-8", resources={"TPU": 8.0}, whole_groups=True)
    assert placed(world) == {}


def test_scheduler_knowing_busy_shape_plans_like_new_one(world: World) -> None:
    """All slices of a live shape may be lost for a moment. The plan says the same as after the Controller's restart."""
    add_split_slice(world, "a")
    world.add_slice("of another type")
    world.do(LimitsSetEvent("ann", PriorityBand.INTERACTIVE, Limits(chips=8.0)))
    submit_whole(world, job_id="running", user="ann")
    world.schedule()
    submit_whole(world, job_id="waiting", user="ann")
    world.now += BACKFILL_BOUND_S + 1.0
    world.do(WorkerSuspectedEvent("a-0", "no answer", world.now + 20.0))
    reason = world.plan().pending_reasons["waiting"]
    assert reason.keeps
    world.scheduler = Scheduler()
    assert world.plan().pending_reasons["waiting"] == reason
