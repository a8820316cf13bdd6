"""Hosts and slices: taints that end, hosts that come back as others, slices that are kept warm."""

from dataclasses import replace
from typing import Any, NoReturn

import pytest

from iris_ray.model.constraints import TAINT_PREFIX, AttributeValue
from iris_ray.model.jobs import Job
from iris_ray.model.lifecycle import JobState
from iris_ray.model.notices import NoticeKind
from iris_ray.state.events import (
    SliceReleasedEvent,
    TaintedEvent,
    TasksAssignedEvent,
    TimePassedEvent,
    WorkerDrainedEvent,
    WorkerRegisteredEvent,
)
from iris_ray.state.instructions import ReclaimSlice
from tests.support.worlds import S, World, charged, cpu_host, host

# -- taints that end --------------------------------------------------------------------------------------------------


def taint(world: World, until: float | None, target: str = "a-0", name: str = "bad") -> None:
    world.do(TaintedEvent(target, name, "an operator says so", until))


def tainted_at(world: World, now: float) -> set[str]:
    """Hosts that have the taint once it is so late."""
    world.state.handle_event(TimePassedEvent(now))
    world.state.check()
    found = {w.node_id for w in world.state.workers.values() if TAINT_PREFIX + "bad" in w.attributes}
    assert bool(found) == bool(world.state.fleet.taints)
    return found


@pytest.mark.parametrize(("target", "hosts"), [("a-0", {"a-0"}), ("a", {"a-0", "a-1"})])
def test_taint_ends_exactly_at_its_time(world: World, target: str, hosts: set[str]) -> None:
    taint(world, 200.0, target)
    assert tainted_at(world, 199.9) == hosts
    assert tainted_at(world, 200.0) == set()


@pytest.mark.parametrize(("second", "ends"), [(300.0, 300.0), (150.0, 150.0), (200.0, 200.0), (None, 1e9)])
def test_renewed_taint_ends_at_new_time(world: World, second: float | None, ends: float) -> None:
    taint(world, 200.0)
    taint(world, second)
    assert tainted_at(world, ends - 0.1) == {"a-0"}
    assert tainted_at(world, ends) == ({"a-0"} if second is None else set())


class NotToBeLookedThrough(dict[str, Any]):
    """Hundreds of thousands of taints may be in it."""

    def __iter__(self) -> NoReturn:
        raise AssertionError("somebody looks at all taints")

    items = keys = values = __iter__


def test_expired_taints_are_found_without_full_scan(world: World) -> None:
    taint(world, None, "a-0")
    taint(world, 200.0, "a-1")
    world.state.fleet.taints = NotToBeLookedThrough(world.state.fleet.taints)
    world.state.handle_event(TimePassedEvent(150.0))
    world.state.handle_event(TimePassedEvent(250.0))
    assert len(world.state.fleet.taints) == 1


# -- hosts that come back as others -----------------------------------------------------------------------------------


def running(world: World) -> Job:
    job = world.start(max_retries_preemption=5)
    assert job.gang.groups == ("a",)
    return job


@pytest.mark.parametrize(
    ("event", "why"),
    [
        (host("b", 0, node_id="a-0"), "came back in tpu-name b; it was in a"),
        (host("a", 0, resources={"TPU": 2.0, "CPU": 8.0}), "came back with 2 TPU"),
        (host("a", 0, resources={"CPU": 8.0}), "came back with 0 TPU"),
        (cpu_host("a-0"), "came back with 0 TPU"),
    ],
    ids=lambda one: one if isinstance(one, str) else "",
)
def test_replaced_occupied_host_ends_what_ran_there(world: World, event: WorkerRegisteredEvent, why: str) -> None:
    job = running(world)
    instructions = world.do(event)
    assert [stop.attempt.number for stop in instructions.stop] == [1]
    assert (job.state, charged(job)) == (JobState.PENDING, (0, 1))
    assert job.error is not None
    assert why in job.error
    worker = world.state.workers["a-0"]
    assert (worker.occupants, worker.resources) == ({}, event.resources)
    assert world.busy() == {"a-1"}
    assert world.state.knows(event)
    world.check()
    world.confirm(job, 1)
    assert not world.state.usage


def test_occupied_host_with_other_facts_is_the_same(world: World) -> None:
    job = running(world)
    for event in (
        host("a", 0, resources={"TPU": 4.0, "CPU": 4.0}),
        host("a", 0, resources={"TPU": 8.0, "CPU": 8.0}),
        replace(host("a", 0), address="10.0.0.7", attributes={**host("a", 0).attributes, "x": AttributeValue(1)}),
        host("a", 0, foreign="a stranger"),
    ):
        assert not world.do(event).stop
    assert job.state is JobState.RUNNING


def test_single_task_survives_change_of_slice(world: World) -> None:
    job = world.submit_tasks(replicas=1, resources={"CPU": 3.0})
    world.do(TasksAssignedEvent("job", (0,), "a-0"))
    assert not world.do(host("b", 0, node_id="a-0")).stop
    assert world.do(host("b", 0, node_id="a-0", resources={"CPU": 2.0})).stop
    assert job.state is JobState.PENDING


def test_rack_gang_ends_when_host_changes_rack(world: World) -> None:
    from iris_ray.model.job_spec import CoschedulingConfig

    for name in ("x", "y"):
        world.do(replace(host("", 0), node_id=name, attributes={"rack": AttributeValue("r1")}))
    rack = CoschedulingConfig("rack")
    job = world.start(coscheduling=rack, constraints=(), max_retries_preemption=5)
    assert job.gang.groups == ("r1",)
    world.do(replace(host("", 0), node_id="x", attributes={"rack": AttributeValue("r2")}))
    assert job.state is JobState.PENDING


def test_drain_of_machine_is_remembered(world: World) -> None:
    running(world)
    world.do(WorkerDrainedEvent("a-0", "it goes", NoticeKind.PREEMPTION, 130.0))
    world.do(host("b", 0, node_id="a-0"))
    worker = world.state.workers["a-0"]
    assert worker.draining == "it goes"
    assert worker.final is not None


def test_small_tasks_fit_exactly_on_returning_host(world: World) -> None:
    """Twenty times 0.1 is a little more than 2 for a computer."""
    world.do(cpu_host("small", 2.0))
    job = world.start_tasks("many", 20, resources={"CPU": 0.1})
    world.do(cpu_host("small", 2.0, label="new"))
    assert job.counts == {S.RUNNING: 20}


# -- warm slices ------------------------------------------------------------------------------------------------------


def test_slice_belongs_to_gangs_owner_until_released(world: World) -> None:
    job = world.start()
    world.report_all(job, S.SUCCEEDED)
    world.confirm(job)
    assert world.state.holders == {"a": "pool-a"}
    world.do(SliceReleasedEvent("a", "pool-b"))  # not its to release
    assert world.state.holders == {"a": "pool-a"}
    world.do(SliceReleasedEvent("a", "pool-a"))
    assert world.state.holders == {}


def test_anothers_warm_slice_is_reclaimed_despite_late_release(world: World) -> None:
    world.keep_warm("pool-b")
    world.submit()
    assert world.schedule()["job"].reclaim == [ReclaimSlice("a", "pool-b", "a")]
    world.do(SliceReleasedEvent("a", "pool-b"))
    assert world.state.holders["a"] == "pool-a"


def test_own_warm_slice_is_not_reclaimed(world: World) -> None:
    world.keep_warm("pool-a")
    world.do(SliceReleasedEvent("a", "pool-a"))
    job = world.submit()
    assert world.schedule()["job"].reclaim == []
    assert job.gang.groups == ("b",)


def test_slice_kept_by_its_holder_is_reclaimed_again(world: World) -> None:
    """``holders`` says who keeps actors on a slice; a launch that failed changed nothing about that."""
    world.keep_warm("pool-b")
    job = world.submit()
    reclaimed = []
    for _ in range(3):
        reclaimed += world.schedule()["job"].reclaim
        world.dispatch_fails(job)
        world.confirm(job)
        world.now = job.gang.not_before
    assert reclaimed == [
        ReclaimSlice(name, "pool-b", name) for name in "aba"
    ]  # another one first, as long as there is one
