"""A host that comes back as another one under its tasks is a lost host; what is known of the machine is kept."""

from dataclasses import replace

import pytest

from iris_ray.model.constraints import AttributeValue
from iris_ray.model.jobs import Job
from iris_ray.model.lifecycle import JobState, TaskState
from iris_ray.model.notices import NoticeKind
from iris_ray.state.events import TaskAssignedEvent, WorkerDrainedEvent, WorkerRegisteredEvent
from tests.support.worlds import World, charged, cpu_host, host

S = TaskState


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
def test_occupied_host_that_is_another_one_ends_what_ran_there(
    world: World, event: WorkerRegisteredEvent, why: str
) -> None:
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
    world.check()


def test_attempt_that_has_ended_lets_go_of_a_host_that_is_another_one(world: World) -> None:
    job = running(world)
    world.report(job, S.FAILED)
    world.do(host("b", 0, node_id="a-0"))
    assert world.busy() == {"a-1"}
    world.check()


def test_occupied_host_that_has_more_or_other_facts_is_the_same(world: World) -> None:
    job = running(world)
    for event in (
        host("a", 0, resources={"TPU": 4.0, "CPU": 4.0}),
        host("a", 0, resources={"TPU": 8.0, "CPU": 8.0}),
        replace(host("a", 0), address="10.0.0.7", attributes={**host("a", 0).attributes, "x": AttributeValue(1)}),
        host("a", 0, foreign="a stranger"),
    ):
        assert not world.do(event).stop
    assert job.state is JobState.RUNNING
    world.check()


def test_empty_host_may_become_anything(world: World) -> None:
    world.do(host("b", 7, node_id="a-0", resources={"CPU": 1.0}))
    assert world.state.workers["a-0"].slice_name == "b"
    world.check()


def test_task_by_itself_goes_on_in_another_slice_as_long_as_its_host_has_what_it_holds(world: World) -> None:
    job = world.submit_tasks(replicas=1, resources={"CPU": 3.0})
    world.do(TaskAssignedEvent("job", 0, "a-0"))
    assert not world.do(host("b", 0, node_id="a-0")).stop
    assert world.do(host("b", 0, node_id="a-0", resources={"CPU": 2.0})).stop
    assert job.state is JobState.PENDING
    world.check()


def test_gang_on_a_rack_is_ended_by_a_host_that_moves_to_another_rack(world: World) -> None:
    from iris_ray.model.job_spec import CoschedulingConfig

    for name in ("x", "y"):
        world.do(replace(host("", 0), node_id=name, attributes={"rack": AttributeValue("r1")}))
    rack = CoschedulingConfig("rack")
    job = world.start(coscheduling=rack, constraints=(), max_retries_preemption=5)
    assert job.gang.groups == ("r1",)
    world.do(replace(host("", 0), node_id="x", attributes={"rack": AttributeValue("r2")}))
    assert job.state is JobState.PENDING
    world.check()


def test_drain_of_the_machine_is_not_forgotten(world: World) -> None:
    running(world)
    world.do(WorkerDrainedEvent("a-0", "it goes", NoticeKind.PREEMPTION, 130.0))
    world.do(host("b", 0, node_id="a-0"))
    worker = world.state.workers["a-0"]
    assert worker.draining == "it goes"
    assert worker.final is not None
    world.check()


def test_many_small_tasks_fill_a_host_that_comes_back_as_it_was(world: World) -> None:
    """Twenty times 0.1 is a little more than 2 for a computer."""
    world.do(cpu_host("small", 2.0))
    job = world.start_tasks("many", 20, resources={"CPU": 0.1})
    world.do(cpu_host("small", 2.0, label="new"))
    assert job.counts == {S.RUNNING: 20}
    world.check()
