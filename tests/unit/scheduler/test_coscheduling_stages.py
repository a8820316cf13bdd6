"""The coscheduling design, stage by stage: attributes, constraints, gangs, their failures, and large fleets."""

from dataclasses import Field, fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest

import iris_ray
from iris_ray.model.constraints import AttributeValue, Constraint, ConstraintOp, Scalar
from iris_ray.model.job_spec import JobSpec
from iris_ray.model.jobs import Gang, Job, Task
from iris_ray.model.lifecycle import AttemptId, JobState, TaskState
from iris_ray.scheduler import SchedulingResult
from iris_ray.state import ControllerState, events
from iris_ray.state.events import GangAssignedEvent, WorkerRegisteredEvent
from iris_ray.state.instructions import Instructions, StopAttempt
from tests.support.worlds import World, add_slices, assigned_gangs, assigned_tasks, host, tagged, task_states

OP = ConstraintOp
S = TaskState


# -- stage 1: workers report attributes -----------------------------------------------------------------------------


@pytest.mark.parametrize("value", ["my-tpu", "", 0, 7, 1.5, True, False], ids=repr)
def test_worker_registers_with_typed_attributes(world: World, value: str | int | float | bool) -> None:
    world.do(WorkerRegisteredEvent("w1", "10.0.0.1", {"key": AttributeValue(value)}, {"TPU": 4.0}))
    stored = world.state.workers["w1"].attributes["key"].value
    assert stored == value
    assert type(stored) is type(value)


def test_worker_registered_again_has_its_new_attributes_and_no_old_ones(world: World) -> None:
    world.do(tagged(host("a", 0, "v4-8"), {"old": 1, "pool": "small"}))
    world.do(tagged(host("a", 0, "v4-8"), {"pool": "large"}))
    attributes = world.state.workers["a-0"].attributes
    assert "old" not in attributes
    assert attributes["pool"] == AttributeValue("large")
    world.submit(tpu_type="v4-8", constraints=(Constraint("pool", OP.EQ, "large"),))
    assert [a.groups for a in assigned_gangs(world.plan())] == [(("a-0",),)]


# -- stage 2: constraints of jobs -----------------------------------------------------------------------------------


def workers_that_satisfy(world: World, *constraints: Constraint) -> set[str]:
    """Where the tasks of a TPU job go if it has one task more than there are workers."""
    count = len(world.state.workers) + 1
    world.submit_tasks(replicas=count, device="v4-8", constraints=constraints)
    chosen = [a.node_id for a in assigned_tasks(world.plan())]
    assert len(set(chosen)) == len(chosen)
    return set(chosen)


def test_constraint_filters_workers_by_attribute(world: World) -> None:
    add_slices(world, "tpu-a", "tpu-b", tpu_type="v4-8")
    assert workers_that_satisfy(world, Constraint("tpu-name", OP.EQ, "tpu-a")) == {"tpu-a-0"}


@pytest.mark.parametrize(
    ("op", "value", "expected"),
    [
        (OP.EQ, 2, {"two-0"}),
        (OP.EQ, 2.0, {"two-0"}),
        (OP.EQ, "2", set()),
        (OP.NE, 2, {"one-0", "three-0"}),
        (OP.GT, 2, {"three-0"}),
        (OP.GE, 2, {"two-0", "three-0"}),
        (OP.LT, 2, {"one-0"}),
        (OP.LE, 2, {"one-0", "two-0"}),
        (OP.IN, (1, 3, 5), {"one-0", "three-0"}),
        (OP.EXISTS, None, {"one-0", "two-0", "three-0"}),
        (OP.NOT_EXISTS, None, {"none-0"}),
    ],
)
def test_constraint_of_every_operator_leaves_the_workers_that_satisfy_it(
    world: World, op: ConstraintOp, value: Any, expected: set[str]
) -> None:
    for name, number in {"one": 1, "two": 2, "three": 3}.items():
        world.add_slice(name, "v4-8", disk=number)
    world.add_slice("none", "v4-8")
    assert workers_that_satisfy(world, Constraint("disk", op, value)) == expected


def test_constraints_must_all_be_satisfied(world: World) -> None:
    world.add_slice("both", "v4-8", pool="large", disk=9)
    world.add_slice("pool-only", "v4-8", pool="large", disk=1)
    world.add_slice("disk-only", "v4-8", disk=9)
    both = Constraint("pool", OP.EQ, "large"), Constraint("disk", OP.GT, 5)
    assert workers_that_satisfy(world, *both) == {"both-0"}


def test_constraint_keeps_a_gang_off_slices_that_fail_it(world: World) -> None:
    world.add_slice("a")
    world.add_slice("b", **{"tpu-pool": "large-jobs"})
    world.submit(constraints=(Constraint("tpu-pool", OP.EQ, "large-jobs"),))
    assert [a.group_names for a in assigned_gangs(world.plan())] == [("b",)]


# -- stage 3: a job's tasks together --------------------------------------------------------------------------------


def test_coscheduled_job_is_assigned_atomically_with_task_i_on_worker_i(world: World) -> None:
    for number in (2, 0, 3, 1):
        world.do(host("tpu-a", number, "v4-32", node_id=f"w{number}"))
    job = world.submit(tpu_type="v4-32")
    assert world.plan().assignments == [GangAssignedEvent("job", ("tpu-a",), (("w0", "w1", "w2", "w3"),))]
    world.schedule()
    assert [task.task_id for task in job.tasks] == [f"job/task-{i}" for i in range(4)]
    assert [task.node_id for task in job.tasks] == ["w0", "w1", "w2", "w3"]
    assert task_states(job) == [S.ASSIGNED] * 4


def test_coscheduled_job_of_16_hosts_is_ordered_by_number(world: World) -> None:
    for number in reversed(range(16)):
        world.do(host("tpu-a", number, "v4-128", node_id=f"w{number}"))
    job = world.submit(tpu_type="v4-128")
    world.schedule()
    assert [task.node_id for task in job.tasks] == [f"w{i}" for i in range(16)]


def test_coscheduled_job_waits_for_last_worker_and_starts(world: World) -> None:
    job = world.submit(tpu_type="v4-32")
    for number in range(4):
        assert world.schedule() == {}
        assert job.state is JobState.PENDING
        world.do(host("tpu-a", number, "v4-32"))
    assert world.schedule().keys() == {"job"}


def test_coscheduled_job_is_not_spread_over_slices_that_are_too_small(world: World) -> None:
    add_slices(world, "a", "b")
    job = world.submit(tpu_type="v4-32", constraints=())
    assert world.schedule() == {}
    assert task_states(job) == [S.PENDING] * 4
    assert world.busy() == set()


def test_coscheduled_job_waits_for_one_host_that_another_job_has(world: World) -> None:
    world.add_slice("tpu-a", "v4-32")
    single = world.start_tasks("single", replicas=1, device="v4-8")
    world.submit(tpu_type="v4-32")
    assert world.schedule() == {}
    world.finish(single)
    assert world.schedule().keys() == {"job"}


# -- stage 4: one member's failure ----------------------------------------------------------------------------------


@pytest.mark.parametrize("culprit", [0, 2])
def test_coscheduled_task_failure_ends_the_siblings_and_names_the_trigger(world: World, culprit: int) -> None:
    world.add_slice("tpu-a", "v4-32")
    job = world.start(tpu_type="v4-32")
    instructions = world.report(job, S.FAILED, culprit, error="OOM")
    assert instructions == Instructions(stop=[StopAttempt(AttemptId("job", 1), "OOM")], finished=["job"])
    for task in job.tasks:
        if task.index == culprit:
            assert (task.state, task.error) == (S.FAILED, "OOM")
        else:
            assert task.state is S.COSCHED_FAILED
            assert f"job/task-{culprit}" in (task.error or "")
    assert (job.state, job.error) == (JobState.FAILED, "OOM")


def test_coscheduled_task_on_lost_host_ends_siblings_as_such(world: World) -> None:
    world.add_slice("tpu-a", "v4-32")
    job = world.start(tpu_type="v4-32", max_retries_preemption=0)
    instructions = world.lose("tpu-a-3")
    assert instructions == Instructions(stop=[StopAttempt(AttemptId("job", 1), "the host died")], finished=["job"])
    assert task_states(job) == [S.COSCHED_FAILED, S.COSCHED_FAILED, S.COSCHED_FAILED, S.WORKER_FAILED]
    assert all("job/task-3" in (task.error or "") for task in job.tasks[:3])
    assert job.state is JobState.WORKER_FAILED


def test_coscheduled_task_failure_touches_no_other_job(world: World) -> None:
    add_slices(world, "tpu-a", "tpu-b")
    job, other = world.start(), world.start("other")
    world.report(job, S.FAILED)
    assert (other.state, task_states(other)) == (JobState.RUNNING, [S.RUNNING, S.RUNNING])


@pytest.mark.parametrize("limit", [0, 2])
def test_retried_coscheduled_failure_counts_once_towards_max_task_failures(world: World, limit: int) -> None:
    world.add_slice("tpu-a", "v4-32")
    job = world.submit(tpu_type="v4-32", max_retries_failure=9, max_task_failures=limit)
    for _ in range(limit + 1):
        assert job.state is JobState.PENDING
        world.now = max(world.now, job.gang.not_before)
        world.schedule()
        for index in range(4):  # peers crash together
            world.report(job, S.FAILED, index, attempt=job.gang.attempt)
        world.confirm(job)
    assert (job.state, job.failures, job.gang.attempt) == (JobState.FAILED, limit + 1, limit + 1)


def test_coscheduled_preemptions_are_no_task_failures(world: World) -> None:
    world.add_slice("tpu-a", "v4-32")
    job = world.start(tpu_type="v4-32", max_retries_preemption=1, max_task_failures=0)
    world.report(job, S.WORKER_FAILED)
    assert (job.state, job.failures, job.preemptions) == (JobState.PENDING, 0, 1)


# -- stage 5: no gang ids -------------------------------------------------------------------------------------------


def test_gang_is_one_job_and_has_no_id_of_its_own() -> None:
    known = {field.name for kind in (JobSpec, Job, Gang, Task) for field in fields(kind)}
    known |= {field.name for kind in vars(events).values() if isinstance(kind, type) for field in _fields(kind)}
    assert {"job_id", "task_index", "coscheduling"} <= known
    assert "gang_id" not in known
    assert not hasattr(ControllerState(), "get_gang_jobs")
    sources = Path(iris_ray.__file__).parent.rglob("*.py")
    assert [path.name for path in sources if "gang_id" in path.read_text()] == []


def _fields(kind: type) -> tuple[Field[Any], ...]:
    return fields(kind) if is_dataclass(kind) else ()


# -- stage 6: the same answers, however many workers ----------------------------------------------------------------

LARGE_POOL = Constraint("pool", OP.EQ, "large")
BIG_DISK = Constraint("disk", OP.GE, 500)


def plan_in_a_fleet_with(others: int) -> SchedulingResult:
    """A plan for three suitable slices among many unsuitable ones: of another pool, with small disks, or tainted."""
    world = World()
    useless: list[dict[str, Scalar]] = [
        {"pool": "small", "disk": 900},
        {"pool": "large", "disk": 100},
        {"pool": "large", "taint:x": True},
    ]
    for number in range(others):
        world.add_slice(f"other-{number}", "v4-32", **useless[number % 3])
    for name in ("p", "q", "r"):
        world.add_slice(name, "v4-32", pool="large", disk=500)
    world.submit("first", tpu_type="v4-32", slices=(2,), constraints=(LARGE_POOL, BIG_DISK))
    world.submit("second", tpu_type="v4-32", constraints=(BIG_DISK, LARGE_POOL))
    world.submit("third", tpu_type="v4-32", constraints=(LARGE_POOL, BIG_DISK))
    world.state.check()
    return world.plan()


def test_large_fleet_gives_the_same_answer_as_a_small_one() -> None:
    small, large = plan_in_a_fleet_with(others=0), plan_in_a_fleet_with(others=400)
    assert large.assignments == small.assignments
    assert [a.group_names for a in assigned_gangs(large)] == [("p", "q"), ("r",)]
    assert large.pending_reasons.keys() == small.pending_reasons.keys() == {"third"}


def test_changed_large_fleet_answers_like_new_one(world: World) -> None:
    """The evaluations that the scheduler keeps between plans follow every event."""
    names = [f"s{i:03}" for i in range(250)]
    for name in names:
        world.add_slice(name, pool="large")
    asked: dict[str, Any] = {"constraints": (Constraint("pool", OP.EQ, "large"),)}
    for name in names[:-3]:
        world.start(f"busy-{name}", **asked)
    world.submit(slices=(2,), **asked)
    assert [a.group_names for a in assigned_gangs(world.plan())] == [("s247", "s248")]
    world.do(tagged(host("s247", 1), {"pool": "small"}))
    assert [a.group_names for a in assigned_gangs(world.plan())] == [("s248", "s249")]
    world.lose("s249-0")
    assert world.plan().assignments == []
    world.finish(world.state.jobs["busy-s100"])
    assert [a.group_names for a in assigned_gangs(world.plan())] == [("s100", "s248")]
    world.do(tagged(host("s247", 1), {"pool": "large"}))
    world.do(tagged(host("s100", 0), {"pool": "large", "taint:hot": False}))
    assert [a.group_names for a in assigned_gangs(world.plan())] == [("s247", "s248")]
