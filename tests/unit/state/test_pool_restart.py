"""The process of a pool dies and is started anew: what becomes of the jobs, slices and spares that were its."""

import pytest

from iris_ray.actors.pool.gang_run import GangRun
from iris_ray.actors.protocol.messages import JobView, ProcessSpec, RunRequest
from iris_ray.errors import JobCancelledError
from iris_ray.model.jobs import Job
from iris_ray.model.lifecycle import AttemptId, JobState
from iris_ray.model.tracebacks import SeenTracebacks
from iris_ray.state.attempt_ends import MOST_LAUNCHES_BEFORE_A_RUN, QUICK_ENDS_ARE_FAILURES, RETURNING_S
from iris_ray.state.events import PoolRestartedEvent, SliceHeldEvent
from iris_ray.state.instructions import DropSpare, Instructions, StopAttempt
from tests.support.worlds import S, World, charged, task_states, tasks_spec

RESTARTED = PoolRestartedEvent("pool-a")
REASON = "the process of its SlicePoolManager died"


@pytest.fixture
def slices() -> str:
    return "abcd"


def restart(world: World) -> Instructions:
    """It says so once; what it says again changes nothing more."""
    instructions = world.do(RESTARTED)
    world.state.check()
    before = repr((world.state.jobs, world.state.holders, world.state.workers, world.state.usage))
    assert world.do(RESTARTED) == Instructions()
    assert repr((world.state.jobs, world.state.holders, world.state.workers, world.state.usage)) == before
    return instructions


def test_running_gang_of_dead_pool_is_charged_and_requeued(world: World) -> None:
    job = world.start(slices=(2,), max_retries_preemption=1)
    world.long_run()
    assert restart(world).stop == [StopAttempt(AttemptId("job", 1), REASON)]
    assert (job.state, charged(job), task_states(job)) == (JobState.PENDING, (0, 1), [S.PENDING] * 4)
    assert (world.busy(), dict(world.state.usage)) == (set(), {})
    assert not world.state.holds_capacity(AttemptId("job", 1))
    assert world.state.attempts_of("pool-a") == []
    assert (job.gang.waiting_since, job.gang.returning_until) == (world.now, world.now + RETURNING_S)
    world.schedule()
    assert (job.gang.attempt, job.state) == (2, JobState.RUNNING)


def test_unstarted_gang_of_dead_pool_pauses_uncharged(world: World) -> None:
    job = world.submit()
    world.now += 5
    world.schedule()
    world.now += 5
    restart(world)
    assert (job.state, charged(job), world.busy()) == (JobState.PENDING, (0, 0), set())
    assert (job.gang.waiting_since, job.gang.not_before, job.avoided) == (world.now, world.now + 0.5, ())


def test_job_whose_pool_dies_at_every_launch_ends(world: World) -> None:
    """Whether any user code had run, nobody knows; else a result that kills its pool would be returned for ever."""
    job = world.submit(max_retries_preemption=99, max_retries_failure=99)
    for _ in range(MOST_LAUNCHES_BEFORE_A_RUN):
        assert job.state is JobState.PENDING
        world.now = max(world.now, job.gang.not_before)
        world.schedule()
        instructions = restart(world)
    assert (job.state, charged(job), instructions.finished) == (JobState.UNSCHEDULABLE, (0, 0), ["job"])
    assert job.error == f"19 launches in a row failed; the last one: {REASON}"


@pytest.mark.parametrize("returned", [False, True])
def test_exhausted_budget_ends_the_job(world: World, returned: bool) -> None:
    job = world.start()
    if returned:
        world.report(job, S.SUCCEEDED, 0)
    instructions = restart(world)
    assert instructions == Instructions(stop=[StopAttempt(AttemptId("job", 1), REASON)], finished=["job"])
    assert (job.state, charged(job), job.error) == (JobState.WORKER_FAILED, (0, 1), REASON)
    lost, other = (1, 0) if returned else (0, 1)
    assert (job.tasks[lost].state, job.tasks[other].state) == (S.WORKER_FAILED, S.COSCHED_FAILED)
    assert (world.busy(), dict(world.state.holders)) == (set(), {})


@pytest.mark.parametrize("confirmed", [False, True])
def test_results_not_handed_over_are_lost_and_rerun(world: World, confirmed: bool) -> None:
    job = world.start_tasks(replicas=3, max_retries_preemption=1)
    world.report(job, S.SUCCEEDED, 1)
    if confirmed:
        world.confirm(job, index=1)
    world.now += 700.0
    instructions = restart(world)
    assert {stop.attempt.gang for stop in instructions.stop} == {0, 2}, "task 1 is over already"
    assert [gang.preemptions for gang in job.gangs] == [1, 1, 1]
    assert (job.state, task_states(job)) == (JobState.PENDING, [S.PENDING] * 3)
    assert "results were lost" in (job.gangs[1].error or "")
    assert job.gangs[1].waiting_since == world.now, "it has not waited for the hosts that it had"
    assert "job" in world.state.unrecorded
    world.schedule()
    for task in job.tasks:
        world.report(job, S.SUCCEEDED, task.index)
    assert (job.state, [gang.attempt for gang in job.gangs]) == (JobState.SUCCEEDED, [2, 2, 2])


def test_job_whose_results_kill_its_pool_exhausts_budget(world: World) -> None:
    """Say that a result is larger than the memory, and its pool is killed a moment after it has come."""
    job = world.submit_tasks(replicas=2, max_retries_preemption=3)
    pauses = []
    for _ in range(4):
        world.now = max(world.now, job.gangs[0].not_before)
        world.schedule()
        world.report(job, S.SUCCEEDED, 0)
        assert not job.state.finished
        instructions = restart(world)
        pauses.append(max(0.0, job.gangs[0].not_before - world.now))
    assert (job.gangs[0].preemptions, pauses[:3]) == (4, [0.0, 1.0, 2.0])
    assert (instructions.finished, job.state, job.failures) == (["job"], JobState.WORKER_FAILED, 0)
    assert "results were lost" in (job.error or "")


async def test_gang_with_lost_result_does_not_explain_jobs_end() -> None:
    """The caller hears of the gang that was lost too often instead."""

    class Controller:
        async def report(self, *_: object) -> JobView:
            return JobView(JobState.SUCCEEDED, 1, 0, 0, 0, REASON, JobState.WORKER_FAILED)

    request = RunRequest(tasks_spec(), b"", {}, ProcessSpec(), 60.0)
    gang = GangRun(None, Controller(), None, request, 1, lambda: None, SeenTracebacks())  # type: ignore[arg-type]
    gang.wake()
    error = await gang.run()
    assert isinstance(error, JobCancelledError)
    assert "results were lost" in str(error)


def start_again(world: World, *jobs: Job) -> None:
    """Once their pauses are over they run."""
    world.now = max(world.now, *(job.gang.not_before for job in jobs))
    world.schedule()
    for job in jobs:
        world.report_all(job, S.RUNNING)


def test_gangs_whose_pool_dies_at_start_repeatedly_fail(world: World) -> None:
    """One of them breaks it, and it is unknown which."""
    jobs = [world.submit(name, max_retries_preemption=99, max_retries_failure=1) for name in ("job", "other")]
    for _ in range(QUICK_ENDS_ARE_FAILURES):
        start_again(world, *jobs)
        restart(world)
    assert {charged(job) for job in jobs} == {(0, QUICK_ENDS_ARE_FAILURES)}
    for _ in range(2):
        start_again(world, *jobs)
        restart(world)
    assert {job.state for job in jobs} == {JobState.FAILED}
    assert {charged(job) for job in jobs} == {(2, QUICK_ENDS_ARE_FAILURES)}


# -- spares and slices ----------------------------------------------------------------------------------------------


def spares_of(world: World) -> list[Job]:
    return [job for job in world.state.jobs.values() if job.spec.spare_for]


@pytest.mark.parametrize("budget", [0, 1])
def test_spares_of_dead_pool_are_dropped(world: World, budget: int) -> None:
    world.start(spares=2, max_retries_preemption=budget)
    world.schedule()
    first, second = spares_of(world)
    world.report_all(first, S.RUNNING)
    assert set(world.state.holders) == {"a", "b", "c"}
    instructions = restart(world)
    assert {d.job_id for d in instructions.dropped} == {s.spec.job_id for s in (first, second)}
    assert instructions.dropped[0] == DropSpare(instructions.dropped[0].job_id, "pool-a")
    assert (spares_of(world), world.busy()) == ([], set())
    assert dict(world.state.holders) == {}, "its new process holds none of these slices"


def test_slice_promised_to_another_pool_goes_to_it(world: World) -> None:
    world.keep_warm("pool-a")
    world.do(SliceHeldEvent("c", "pool-a"))
    world.do(SliceHeldEvent("d", "pool-a"))
    other = world.submit(owner="pool-b", slices=(1,))
    world.schedule()
    assert world.state.holders[other.gang.groups[0]] == "pool-a", "until it has let go"
    restart(world)
    assert dict(world.state.holders) == {other.gang.groups[0]: "pool-b"}


def test_other_pools_are_not_touched(world: World) -> None:
    job = world.start("mine", max_retries_preemption=1)
    other = world.start("theirs", owner="pool-b", spares=1)
    tasks = world.start_tasks("their-tasks", owner="pool-b", replicas=2)
    world.report(tasks, S.SUCCEEDED, 0)
    world.schedule()
    (spare,) = spares_of(world)
    before = repr((other, tasks, spare))
    held = {name: owner for name, owner in world.state.holders.items() if owner == "pool-b"}
    busy = {w.node_id for w in world.state.workers.values() for task, _ in w.occupants if not task.startswith("mine")}
    instructions = restart(world)
    assert {stop.attempt.job_id for stop in instructions.stop} == {"mine"}
    assert instructions.dropped == []
    assert repr((other, tasks, spare)) == before
    assert (dict(world.state.holders), world.busy()) == (held, busy)
    assert charged(job) == (0, 1)
