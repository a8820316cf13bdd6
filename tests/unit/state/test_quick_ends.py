"""Attempts that are over as soon as they have begun: pauses, and when a lost task is the job's own failure."""

import pytest

from iris_ray.errors import IllegalTransitionError
from iris_ray.model.jobs import Job
from iris_ray.model.lifecycle import JobState, TaskState
from iris_ray.state.attempt_ends import QUICK_ENDS_ARE_FAILURES, QUICK_S
from iris_ray.state.events import GangMovedEvent, WorkerDrainedEvent
from tests.support.worlds import World, charged

S = TaskState


def run_again(world: World, job: Job, ran: float = 0.0) -> None:
    """Once its pause is over the gang runs, for some seconds."""
    world.now = max(world.now, job.gang.not_before)
    world.schedule()
    world.report_all(job, S.RUNNING)
    world.now += ran


def end(world: World, job: Job, state: TaskState = S.WORKER_FAILED) -> float:
    """A task of it ends; how long the pause is, in seconds."""
    world.report(job, state)
    world.confirm(job)
    world.state.check()
    return max(0.0, job.gang.not_before - world.now)


@pytest.mark.parametrize("how", [S.FAILED, S.WORKER_FAILED])
def test_pauses_grow_with_quick_ends_in_a_row(world: World, how: TaskState) -> None:
    job = world.submit(max_retries_failure=99, max_retries_preemption=99)
    pauses = []
    for _ in range(9):
        run_again(world, job, QUICK_S - 1)
        pauses.append(end(world, job, how))
    assert pauses == [0.0, 1.0, 2.0, 4.0, 8.0, 10.0, 10.0, 10.0, 10.0]


def test_task_ending_before_all_have_begun_ends_quickly(world: World) -> None:
    """The first to start may crash before the last has started: it is the same crash, whichever is faster."""
    job = world.submit(max_retries_failure=99)
    pauses = []
    for _ in range(3):
        world.now = max(world.now + 100.0, job.gang.not_before)
        world.schedule()
        world.report(job, S.RUNNING, 0)
        pauses.append(end(world, job, S.FAILED))
    assert pauses == [0.0, 1.0, 2.0]


def test_long_run_forgets_the_quick_ends(world: World) -> None:
    job = world.submit(max_retries_preemption=99)
    for _ in range(4):
        run_again(world, job)
        end(world, job)
    run_again(world, job, QUICK_S)
    assert end(world, job) == 0.0
    run_again(world, job)
    assert end(world, job) == 0.0
    run_again(world, job)
    assert end(world, job) == 1.0


def test_growth_move_is_no_quick_end(world: World) -> None:
    job = world.submit(max_retries_preemption=99)
    for _ in range(4):
        run_again(world, job)
        world.do(GangMovedEvent(job.current_attempt(job.gang), "more slices"))
        world.confirm(job)
        assert job.gang.not_before <= world.now


def test_failed_launches_are_no_quick_ends(world: World) -> None:
    """They have pauses of their own."""
    job = world.submit()
    for _ in range(5):
        world.now = max(world.now, job.gang.not_before)
        world.schedule()
        world.dispatch_fails(job)
        world.confirm(job)
    assert job.gang.quick_ends == 0


def test_task_repeatedly_lost_on_living_host_fails(world: World) -> None:
    """Else a job that kills its own process at once would be tried as often as the preemption budget allows."""
    job = world.submit(max_retries_preemption=99)
    for _ in range(QUICK_ENDS_ARE_FAILURES):
        run_again(world, job)
        end(world, job)
    assert charged(job) == (0, QUICK_ENDS_ARE_FAILURES)
    run_again(world, job)
    world.report(job, S.WORKER_FAILED)
    assert (job.state, charged(job)) == (JobState.FAILED, (1, QUICK_ENDS_ARE_FAILURES))


def test_repeatedly_lost_hosts_are_preemptions(world: World) -> None:
    job = world.submit(max_retries_preemption=99)
    for number in range(QUICK_ENDS_ARE_FAILURES + 3):
        world.add_slice(f"new-{number}")
        run_again(world, job)
        for task in list(job.tasks):
            if task.node_id is not None:
                world.lose(task.node_id)
        world.confirm(job)
    assert charged(job) == (0, QUICK_ENDS_ARE_FAILURES + 3)


def test_task_lost_on_noticed_host_is_a_preemption(world: World) -> None:
    job = world.submit(max_retries_preemption=99)
    for _ in range(QUICK_ENDS_ARE_FAILURES):
        run_again(world, job)
        end(world, job)
    run_again(world, job)
    world.do(WorkerDrainedEvent(job.tasks[0].node_id or "", "preempted"))
    end(world, job)
    assert charged(job) == (0, QUICK_ENDS_ARE_FAILURES + 1)


def test_returned_task_is_lost_but_never_failed(world: World) -> None:
    """SUCCEEDED → FAILED is no legal move; the host of its result is gone, whatever the reason."""
    job = world.submit(max_retries_preemption=QUICK_ENDS_ARE_FAILURES)
    for _ in range(QUICK_ENDS_ARE_FAILURES):
        run_again(world, job)
        end(world, job)
    run_again(world, job)
    world.report(job, S.SUCCEEDED, 0)
    world.report(job, S.WORKER_FAILED, 0)
    assert job.state is JobState.WORKER_FAILED
    world.state.check()


def test_spare_reporting_success_is_refused(world: World) -> None:
    world.start(spares=1)
    world.schedule()
    held = next(job for job in world.state.jobs.values() if job.spec.spare_for)
    with pytest.raises(IllegalTransitionError, match="only holds a slice"):
        world.report(held, S.SUCCEEDED)
    world.state.check()
