"""Assignments that do not fit the state are refused, and change nothing."""

import pytest

from iris_ray.errors import IllegalTransitionError
from iris_ray.model.lifecycle import JobState
from iris_ray.state.events import Event, GangAssignedEvent, TasksAssignedEvent
from tests.support.worlds import S, World, attempts, cpu_host, task_states

# -- of gangs -------------------------------------------------------------------------------------------------------


def test_assignment_of_running_job_is_refused(world: World) -> None:
    job = world.start()
    with pytest.raises(IllegalTransitionError, match="PENDING"):
        world.do(GangAssignedEvent("job", ("b",), (("b-0", "b-1"),)))
    assert job.gang.attempt == 1


@pytest.mark.parametrize("groups", [(("a-0", "nobody"),), (("a-0",),), (("a-0", "a-1", "b-0"),)], ids=str)
def test_assignment_that_does_not_fit_changes_nothing(world: World, groups: tuple[tuple[str, ...], ...]) -> None:
    job = world.submit()
    with pytest.raises(IllegalTransitionError):
        world.do(GangAssignedEvent("job", ("a",), groups))
    assert (job.state, job.gang.attempt, world.busy()) == (JobState.PENDING, 0, set())
    assert "a" not in world.state.holders


def test_assignment_of_taken_hosts_is_refused(world: World) -> None:
    """The last line of defence against two tasks on one host."""
    world.start("first")
    world.submit("second")
    with pytest.raises(IllegalTransitionError):
        world.do(GangAssignedEvent("second", ("a",), (("a-0", "a-1"),)))


def test_assignment_of_one_host_twice_is_refused(world: World) -> None:
    world.submit()
    with pytest.raises(IllegalTransitionError):
        world.do(GangAssignedEvent("job", ("a",), (("a-0", "a-0"),)))


@pytest.mark.parametrize(
    ("names", "groups"),
    [
        (("a", "b"), (("a-0", "b-1"), ("b-0", "a-1"))),
        (("b", "a"), (("a-0", "a-1"), ("b-0", "b-1"))),
        (("a", "a"), (("a-0", "a-1"), ("b-0", "b-1"))),
        (("a",), (("a-0", "a-1"), ("b-0", "b-1"))),
        (("a", "b", "c"), (("a-0", "a-1"), ("b-0", "b-1"))),
        (("a", "nowhere"), (("a-0", "a-1"), ("b-0", "b-1"))),
    ],
    ids=str,
)
def test_assignment_splitting_a_gang_is_refused(
    world: World, names: tuple[str, ...], groups: tuple[tuple[str, ...], ...]
) -> None:
    world.submit(slices=(2,))
    refuse(world, GangAssignedEvent("job", names, groups))
    world.do(GangAssignedEvent("job", ("b", "a"), (("b-0", "b-1"), ("a-0", "a-1"))))


# -- of single tasks ------------------------------------------------------------------------------------------------


def refuse(world: World, event: Event) -> None:
    """The event is refused, and changes nothing."""
    before = {
        job_id: (job.state, task_states(job), attempts(world, job_id)) for job_id, job in world.state.jobs.items()
    }
    busy = world.busy()
    with pytest.raises(IllegalTransitionError):
        world.do(event)
    after = {job_id: (job.state, task_states(job), attempts(world, job_id)) for job_id, job in world.state.jobs.items()}
    assert (after, world.busy()) == (before, busy)


def test_assignment_of_one_gang_task_is_refused(world: World) -> None:
    world.submit()
    refuse(world, TasksAssignedEvent("job", (0,), "a-0"))


def test_assignment_of_gang_without_coscheduling_is_refused(world: World) -> None:
    world.submit_tasks()
    refuse(world, GangAssignedEvent("job", ("a",), (("a-0", "a-1"),)))


def test_assignment_of_host_with_taken_chips_is_refused(world: World) -> None:
    world.start_tasks("other", replicas=1, resources={"TPU": 1.0})
    world.submit_tasks(resources={"TPU": 1.0})
    refuse(world, TasksAssignedEvent("job", (0,), "a-0"))


@pytest.mark.parametrize("indices", [(0, 1, 2), (0, 0), ()])
def test_tasks_not_all_fitting_on_host_are_refused_together(world: World, indices: tuple[int, ...]) -> None:
    world.do(cpu_host("cpu"))
    world.submit_tasks(replicas=3, resources={"CPU": 3.0})
    refuse(world, TasksAssignedEvent("job", indices, "cpu"))
    world.do(TasksAssignedEvent("job", (0, 2), "cpu"))
    assert task_states(world.state.jobs["job"]) == [S.ASSIGNED, S.PENDING, S.ASSIGNED]
    assert world.state.workers["cpu"].free["CPU"] == 2.0


def test_assignment_of_ended_task_is_refused(world: World) -> None:
    job = world.start_tasks(max_task_failures=1)
    world.report(job, S.FAILED, 0)
    refuse(world, TasksAssignedEvent("job", (0,), "b-0"))
    world.report(job, S.SUCCEEDED, 1)
    refuse(world, TasksAssignedEvent("job", (1,), "b-0"))


@pytest.mark.parametrize("index", [-1, 2, 99])
def test_assignment_of_missing_task_is_refused(world: World, index: int) -> None:
    world.submit_tasks()
    refuse(world, TasksAssignedEvent("job", (index,), "a-0"))


@pytest.mark.parametrize(
    "event", [TasksAssignedEvent("job", (0,), "a-0"), GangAssignedEvent("job", ("a",), (("a-0",),))]
)
def test_assignment_for_missing_job_is_refused(world: World, event: Event) -> None:
    refuse(world, event)
