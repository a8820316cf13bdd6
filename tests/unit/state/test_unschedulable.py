"""Jobs that wait too long, or that can never run, are given up."""

import pytest

from iris_ray.model.constraints import Constraint, ConstraintOp
from iris_ray.model.lifecycle import AttemptId, JobState, TaskState
from iris_ray.state.events import TaskDispatchFailedEvent, TaskUnschedulableEvent
from iris_ray.state.instructions import Instructions
from tests.support.worlds import S, World, charged, host, task_states


def test_timeout_ends_job_of_which_nothing_ran(world: World) -> None:
    job = world.submit_tasks(replicas=6, scheduling_timeout=60.0)
    world.schedule()
    world.now += 60.0
    assert world.plan().timed_out == []
    world.now += 0.1
    plan = world.plan()
    (late,) = plan.timed_out
    assert (late.job_id, plan.assignments, dict(plan.pending_reasons)) == ("job", [], {})
    assert "60 s" in late.reason
    instructions = world.do(late)
    assert instructions.finished == ["job"]
    assert sorted(stop.attempt.gang for stop in instructions.stop) == [0, 1, 2, 3]
    assert task_states(job) == [S.KILLED, S.KILLED, S.KILLED, S.KILLED, S.UNSCHEDULABLE, S.KILLED]
    assert (job.state, job.tasks[4].error) == (JobState.UNSCHEDULABLE, late.reason)
    assert all("job/task-4" in (job.tasks[index].error or "") for index in (0, 1, 2, 3, 5))
    assert world.plan().timed_out == []


@pytest.mark.parametrize("state", [S.RUNNING, S.SUCCEEDED, S.WORKER_FAILED])
def test_timeout_spares_job_with_task_that_ran(world: World, state: TaskState) -> None:
    job = world.submit_tasks(replicas=6, scheduling_timeout=60.0, max_retries_preemption=1)
    world.schedule()
    world.report(job, S.RUNNING, 0)
    world.report(job, state, 0)
    world.now += 1000.0
    plan = world.plan()
    assert (plan.timed_out, plan.unschedulable) == ([], [])
    assert plan.pending_reasons.keys() == {"job"}
    assert world.do(TaskUnschedulableEvent("job", 5, "too late")) == Instructions()


def test_timeout_ends_gang_that_never_ran(world: World) -> None:
    job = world.submit(slices=(3,), scheduling_timeout=60.0)
    world.now += 61.0
    (late,) = world.plan().timed_out
    assert world.do(late) == Instructions(finished=["job"])
    assert task_states(job) == [S.UNSCHEDULABLE] * 6
    assert job.state is JobState.UNSCHEDULABLE


def test_unset_timeout_waits_for_ever(world: World) -> None:
    world.submit(slices=(3,))
    world.now += 1e9
    assert world.plan().timed_out == []
    assert world.plan().pending_reasons.keys() == {"job"}


@pytest.mark.parametrize("end", [S.FAILED, S.WORKER_FAILED])
def test_timeout_spares_task_that_ran_once(world: World, end: TaskState) -> None:
    job = world.start_tasks(replicas=1, scheduling_timeout=60.0, max_retries_failure=1)
    world.report(job, end)
    world.now += 1000.0
    assert world.plan().timed_out == []


def test_timeout_spares_task_failed_before_its_running_report(world: World) -> None:
    """The report may be late or lost: a task that failed, and was charged for it, has run."""
    job = world.submit_tasks(replicas=1, scheduling_timeout=60.0, max_retries_failure=1)
    world.schedule()
    world.report(job, S.FAILED)
    world.report(job, S.RUNNING, attempt=1)
    assert charged(job) == (1, 0)
    world.now += 1000.0
    assert world.plan().timed_out == []


@pytest.mark.parametrize("end", [S.FAILED, S.WORKER_FAILED])
def test_timeout_spares_gang_that_ran_once(world: World, end: TaskState) -> None:
    job = world.start(scheduling_timeout=60.0, max_retries_failure=1, max_retries_preemption=1)
    world.report(job, end)
    world.now += 1000.0
    assert world.plan().timed_out == []


def test_timeout_ends_task_whose_launches_all_failed(world: World) -> None:
    job = world.submit_tasks(replicas=1, scheduling_timeout=60.0)
    world.schedule()
    world.do(TaskDispatchFailedEvent(AttemptId("job", 1), "no answer", world.now))
    world.confirm(job)
    world.now += 61.0
    assert [late.job_id for late in world.plan().timed_out] == ["job"]


def test_timeout_of_one_job_leaves_the_others_alone(world: World) -> None:
    world.submit("late", slices=(3,), scheduling_timeout=60.0)
    world.submit("patient", slices=(3,))
    world.now += 61.0
    world.submit("next")
    plan = world.plan()
    assert [late.job_id for late in plan.timed_out] == ["late"]
    assert plan.pending_reasons.keys() == {"patient"}
    assert [a.job_id for a in plan.assignments] == ["next"]


def test_unschedulable_is_ignored_if_task_ran_after_all(world: World) -> None:
    job = world.submit_tasks()
    late = TaskUnschedulableEvent("job", 0, "too late")
    world.schedule()
    assert world.do(late) == Instructions()
    world.report(job, S.RUNNING, 0)
    assert world.do(late) == Instructions()
    world.report(job, S.WORKER_FAILED, 0)
    assert world.do(late) == Instructions()
    assert task_states(job) == [S.PENDING, S.ASSIGNED]


def test_repeated_or_misdirected_unschedulable_changes_nothing(world: World) -> None:
    world.submit_tasks()
    assert world.do(TaskUnschedulableEvent("job", 0, "no")).finished == ["job"]
    assert world.do(TaskUnschedulableEvent("job", 1, "no")) == Instructions()
    assert world.do(TaskUnschedulableEvent("nobody", 0, "no")) == Instructions()


def test_unevaluable_constraint_ends_only_its_job(world: World) -> None:
    world.do(host("a", 0))
    odd = world.submit_tasks("odd", constraints=(Constraint("tpu-topology", ConstraintOp.LT, 4),))
    world.submit_tasks("plain")
    plan = world.plan()
    assert {a.job_id for a in plan.assignments} == {"plain"}
    (given_up,) = plan.unschedulable
    assert "tpu-topology < 4" in given_up.reason
    world.do(given_up)
    assert (odd.state, task_states(odd)) == (JobState.UNSCHEDULABLE, [S.UNSCHEDULABLE, S.KILLED])


def test_abandoned_job_holds_hosts_until_launches_are_confirmed(world: World) -> None:
    job = world.submit_tasks(replicas=5, scheduling_timeout=60.0)
    world.schedule()
    world.do(TaskUnschedulableEvent("job", 4, "too late"))
    assert world.busy() == {"a-0", "a-1", "b-0", "b-1"}
    world.confirm(job, 1, index=1)
    assert world.busy() == {"a-0", "b-0", "b-1"}
