"""Assignments that do not fit the state are refused, and change nothing."""

from collections.abc import Callable

import pytest

from iris_ray.errors import IllegalTransitionError
from iris_ray.state.events import Event, GangAssignedEvent, TasksAssignedEvent
from tests.support.worlds import S, World, attempts, cpu_host, task_states


def gang(host: str, *more: str) -> GangAssignedEvent:
    return GangAssignedEvent("job", ("a",), ((host, *more),))


def refuse(world: World, event: Event) -> None:
    """The event is refused, and changes nothing."""
    before = {
        job_id: (job.state, task_states(job), attempts(world, job_id)) for job_id, job in world.state.jobs.items()
    }
    busy, holders = world.busy(), dict(world.state.holders)
    with pytest.raises(IllegalTransitionError):
        world.do(event)
    after = {job_id: (job.state, task_states(job), attempts(world, job_id)) for job_id, job in world.state.jobs.items()}
    assert (after, world.busy(), world.state.holders) == (before, busy, holders)


JOBS: dict[str, Callable[[World], object]] = {
    "no job": lambda world: None,
    "a gang": lambda world: world.submit(),
    "a gang and another": lambda world: (world.start("other"), world.submit()),
    "a gang that runs": lambda world: world.start(),
    "tasks": lambda world: world.submit_tasks(),
    "tasks and another": lambda world: (
        world.start_tasks("other", replicas=1, resources={"TPU": 1.0}),
        world.submit_tasks(resources={"TPU": 1.0}),
    ),
}


@pytest.mark.parametrize(
    ("jobs", "event"),
    [
        ("no job", TasksAssignedEvent("job", (0,), "a-0")),
        ("no job", gang("a-0")),
        ("a gang", gang("a-0", "nobody")),
        ("a gang", gang("a-0")),
        ("a gang", gang("a-0", "a-1", "b-0")),
        ("a gang", gang("a-0", "a-0")),
        ("a gang", TasksAssignedEvent("job", (0,), "a-0")),
        ("a gang and another", gang("a-0", "a-1")),
        ("a gang that runs", GangAssignedEvent("job", ("b",), (("b-0", "b-1"),))),
        ("tasks", gang("a-0", "a-1")),
        ("tasks", TasksAssignedEvent("job", (-1,), "a-0")),
        ("tasks", TasksAssignedEvent("job", (2,), "a-0")),
        ("tasks", TasksAssignedEvent("job", (99,), "a-0")),
        ("tasks and another", TasksAssignedEvent("job", (0,), "a-0")),
    ],
    ids=str,
)
def test_assignment_that_does_not_fit_changes_nothing(world: World, jobs: str, event: Event) -> None:
    JOBS[jobs](world)
    refuse(world, event)


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
