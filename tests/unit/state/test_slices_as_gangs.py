"""Jobs whose failure domain is the slice: each slice is a gang that is placed, fails and is retried by itself."""

from dataclasses import replace
from typing import Any

import pytest

from iris_ray.errors import IllegalTransitionError, InvalidJobError
from iris_ray.model.job_spec import CoschedulingConfig, JobSpec
from iris_ray.model.jobs import Job
from iris_ray.model.lifecycle import AttemptId, JobState
from iris_ray.model.options import EACH_SLICE
from iris_ray.model.workers import TPU_VM_COUNT
from iris_ray.state.events import (
    GangAssignedEvent,
    TaskStateChangedEvent,
)
from iris_ray.state.instructions import Instructions, StopAttempt
from tests.support.worlds import S, World, attempts, charged, gang_spec, host, task_states, tasks_spec


@pytest.fixture
def slices() -> str:
    return "abc"


def submit(world: World, slices: int = 2, **changes: Any) -> Job:
    values = {"failure_domain": EACH_SLICE, "whole_groups": True, "max_retries_preemption": 5} | changes
    return world.submit("job", slices=(slices,), **values)


def start(world: World, slices: int = 2, **changes: Any) -> Job:
    job = submit(world, slices, **changes)
    world.schedule()
    for task in job.tasks:
        world.report(job, S.RUNNING, task.index)
    world.long_run()
    return job


def groups(job: Job) -> list[tuple[str, ...]]:
    return [gang.groups for gang in job.gangs]


def end_gang(world: World, job: Job, gang: int) -> None:
    for task in job.gangs[gang].tasks:
        world.report(job, S.SUCCEEDED, task.index)
    world.confirm(job, index=job.gangs[gang].tasks[0].index)


# -- placement ------------------------------------------------------------------------------------------------------


def test_each_slice_is_a_gang_with_numbers_of_the_job(world: World) -> None:
    job = start(world)
    assert groups(job) == [("a",), ("b",)]
    assert [[task.task_id for task in gang.tasks] for gang in job.gangs] == [
        ["job/task-0", "job/task-1"],
        ["job/task-2", "job/task-3"],
    ]
    assert (job.size, job.task(2).node_id, job.gang_of(3).position) == (4, "b-0", 1)
    assert set(world.state.attempts_of("pool-a")) == {AttemptId("job", 1, 0), AttemptId("job", 1, 1)}


def test_slices_start_as_they_come(world: World) -> None:
    job = submit(world, slices=4)
    world.schedule()
    assert task_states(job) == [S.ASSIGNED] * 6 + [S.PENDING] * 2
    assert world.why().startswith("waiting for 1 slice (")
    world.add_slice("d")
    world.schedule()
    assert groups(job)[3] == ("d",)


def test_first_slice_decides_the_number_of_hosts(world: World) -> None:
    """A type may have slices of another shape in a cluster than its rule says."""
    for name in "abc":
        for number in range(2):
            world.lose(f"{name}-{number}")
    for name in "xy":
        for number in range(4):
            shape = host(name, number)
            world.do(
                replace(shape, attributes={**shape.attributes, TPU_VM_COUNT: type(shape.attributes[TPU_VM_COUNT])(4)})
            )
    job = submit(world)
    world.schedule()
    assert (groups(job), job.size, attempts(world)) == ([("x",), ("y",)], 8, [1, 1])
    assert [task.index for task in job.gangs[1].tasks] == [4, 5, 6, 7]


def test_slice_of_another_size_than_the_first_is_refused(world: World) -> None:
    job = submit(world)
    world.do(GangAssignedEvent("job", ("a",), (("a-0", "a-1"),)))
    with pytest.raises(IllegalTransitionError, match="its other slices have 2 hosts each"):
        world.do(GangAssignedEvent("job", ("b",), (("b-0",),), gang=1))
    assert job.size == 4


# -- faults ---------------------------------------------------------------------------------------------------------


def test_lost_slice_returns_alone_on_another(world: World) -> None:
    job = start(world)
    before = [(task.state, task.node_id) for task in job.gangs[0].tasks]
    assert world.lose("b-1") == Instructions(stop=[StopAttempt(AttemptId("job", 1, 1), "the host died")])
    world.schedule()
    assert [(task.state, task.node_id) for task in job.gangs[0].tasks] == before
    assert (attempts(world), groups(job), charged(job)) == ([1, 2], [("a",), ("c",)], (0, 1))


def test_slice_that_fails_for_good_fails_the_job(world: World) -> None:
    job = start(world, max_retries_failure=0)
    instructions = world.report(job, S.FAILED, 2)
    assert {stop.attempt.gang for stop in instructions.stop} == {0, 1}
    assert instructions.finished == ["job"]
    assert task_states(job) == [S.KILLED, S.KILLED, S.FAILED, S.COSCHED_FAILED]
    assert (job.state, job.gang_state(0), job.gang_state(1)) == (JobState.FAILED, JobState.KILLED, JobState.FAILED)


def test_returning_slice_goes_before_other_jobs_but_its_siblings_do_not(world: World) -> None:
    job = start(world, slices=4)
    other = world.submit("other", user="bob")
    world.lose("b-0")
    world.add_slice("d")
    world.schedule()
    assert (groups(job)[1], other.state) == (("d",), JobState.PENDING)
    world.add_slice("e")
    world.schedule()
    assert (other.gang.groups, job.gangs[3].pending) == (("e",), True)


# -- ends -----------------------------------------------------------------------------------------------------------


def test_job_succeeds_once_every_slice_has(world: World) -> None:
    job = start(world)
    end_gang(world, job, 1)
    assert (job.state, job.gang_state(1), world.busy()) == (JobState.RUNNING, JobState.SUCCEEDED, {"a-0", "a-1"})
    end_gang(world, job, 0)
    assert (job.state, world.busy()) == (JobState.SUCCEEDED, set())


def test_report_of_another_slices_task_is_refused(world: World) -> None:
    job = start(world)
    with pytest.raises(IllegalTransitionError, match="has no task 3"):
        world.do(TaskStateChangedEvent(job.current_attempt(job.gangs[0]), 3, S.FAILED, "boom"))


# -- what does not go together --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "wrong"),
    [
        (lambda: gang_spec(slices=(2, 4), failure_domain=EACH_SLICE), r"\[2, 4\] slices; give the largest number"),
        (lambda: gang_spec(slices=(2,), failure_domain=EACH_SLICE, spares=1), "spares=1"),
        (lambda: tasks_spec(failure_domain=EACH_SLICE), "is for jobs on TPU slices"),
        (
            lambda: JobSpec(job_id="j", owner="o", coscheduling=CoschedulingConfig("rack"), failure_domain=EACH_SLICE),
            "is for jobs on TPU slices",
        ),
        (lambda: gang_spec(failure_domain="host"), "failure_domain is 'host'; give one of 'job', 'slice'"),
    ],
)
def test_job_that_can_not_be_run_by_slice_is_refused(spec: Any, wrong: str) -> None:
    with pytest.raises(InvalidJobError, match=wrong):
        spec()
