"""Jobs that wait too long, or that can never run, are given up."""

import pytest

from iris_ray.model.lifecycle import JobState, TaskState
from iris_ray.state.events import TaskUnschedulableEvent
from iris_ray.state.instructions import Instructions
from tests.support.worlds import S, World, task_states


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
