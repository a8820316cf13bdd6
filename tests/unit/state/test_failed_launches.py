"""Launches that fail: the job pauses and keeps nothing meanwhile, avoids the hosts, and a new one ends after ten."""

import math
from collections.abc import Iterable

import pytest

from iris_ray.model.job_spec import CoschedulingConfig
from iris_ray.model.jobs import MOST_FAILED_LAUNCHES, Job
from iris_ray.model.lifecycle import AttemptId, JobState
from iris_ray.model.options import PriorityBand
from iris_ray.model.outcomes import Fault
from iris_ray.scheduler.pending_reason import PendingKind
from iris_ray.scheduler.scheduler import BACKFILL_BOUND_S
from iris_ray.state.attempt_ends import MOST_LAUNCHES_BEFORE_A_RUN
from iris_ray.state.events import TaskDispatchFailedEvent, WorkerBlamedEvent
from iris_ray.state.instructions import Instructions
from iris_ray.state.quarantine import MOST_AVOIDED, avoided_by
from tests.support.worlds import S, World, charged, cpu_host, task_states


def fail_launch(world: World, job: Job, groups: Iterable[str] = (), counts: bool = True) -> tuple[str, ...]:
    """Let the job be placed and its launch fail; return the groups that it was placed on."""
    world.now = max(world.now, job.gang.not_before)
    assert job.spec.job_id in world.schedule()
    tried, attempt = job.gang.groups, job.current_attempt(job.gang)
    world.do(TaskDispatchFailedEvent(attempt, "the interpreter ended", world.now, tuple(groups), counts))
    world.confirm(job, attempt.number)
    world.check()
    return tried


@pytest.fixture
def wide() -> World:
    """Ten slices."""
    return World(*"abcdefghij")


# -- pauses ----------------------------------------------------------------------------------------------------------


def test_dispatch_failure_requeues_gang_uncharged_after_pause(world: World) -> None:
    job = world.submit(slices=(2,))
    world.schedule()
    assert world.dispatch_fails(job) == Instructions()
    assert task_states(job) == [S.PENDING] * 4
    assert (charged(job), job.error) == ((0, 0), "no answer")
    assert job.gang.not_before == world.now + 0.5
    world.confirm(job)
    assert world.plan().assignments == []
    world.now = job.gang.not_before
    assert [a.job_id for a in world.plan().assignments] == ["job"]


def test_dispatch_failures_in_a_row_lengthen_the_pause(world: World) -> None:
    job = world.submit(max_retries_failure=1)
    pauses = []
    for _ in range(3):
        world.now = max(world.now, job.gang.not_before)
        world.schedule()
        world.dispatch_fails(job)
        world.confirm(job)
        pauses.append(job.gang.not_before - world.now)
    assert pauses == [0.5, 1.0, 2.0]
    world.now = job.gang.not_before
    world.schedule()
    world.report_all(job, S.RUNNING)
    world.report(job, S.FAILED)
    world.confirm(job)
    world.schedule()
    world.dispatch_fails(job)
    assert job.gang.not_before - world.now == 0.5


# -- hosts that are avoided ------------------------------------------------------------------------------------------


def test_launches_use_other_hosts_and_a_fault_of_half_an_hour_ends_no_job(wide: World) -> None:
    job = wide.submit(max_retries_failure=100, max_retries_preemption=100)
    began, tried = wide.now, [fail_launch(wide, job) for _ in range(MOST_FAILED_LAUNCHES)]
    assert tried == [(name,) for name in "abcdefghij"]
    while job.state is JobState.PENDING:
        fail_launch(wide, job)
    assert wide.now - began > 1800
    assert (job.state, set(job.counts)) == (JobState.UNSCHEDULABLE, {S.UNSCHEDULABLE})
    assert job.error == "19 launches in a row failed; the last one: the interpreter ended"
    assert (job.failures, job.preemptions) == (0, 0)
    assert not wide.state.pending()


def test_job_waits_for_busy_alternatives_and_names_avoided_hosts(world: World) -> None:
    world.start("other", owner="pool-b")
    job = world.submit()
    assert fail_launch(world, job) == ("b",)
    world.now = job.gang.not_before
    reason = world.plan().pending_reasons["job"]
    assert (reason.kind, reason.free, reason.avoided) == (PendingKind.IN_USE, 0, ("b",))
    said = "it avoids b for a while: launches or tasks have failed there, the last one: the interpreter ended; "
    assert said in str(reason)
    world.now = job.avoided_until
    assert list(world.schedule()) == ["job"]
    assert job.gang.groups == ("b",)


def test_job_tries_avoided_hosts_one_after_the_other(world: World) -> None:
    """Otherwise it would go back and forth between two of them, though the third is in order again."""
    world.add_slice("c")
    job = world.submit()
    tried = [*(fail_launch(world, job) for _ in range(3))]
    assert len(set(tried)) == 3
    assert [fail_launch(world, job) for _ in range(6)] == tried * 2


def test_avoided_host_is_open_to_others(world: World) -> None:
    world.start("other", owner="pool-b")
    job = world.submit()
    assert fail_launch(world, job) == ("b",)
    behind = world.submit("behind", owner="pool-c")
    world.now = job.gang.not_before
    assert list(world.schedule()) == ["behind"]
    assert behind.gang.groups == ("b",)


def test_only_slices_at_fault_are_avoided(wide: World) -> None:
    job = wide.submit(slices=(3,))
    assert fail_launch(wide, job, ["b"]) == ("a", "b", "c")
    assert avoided_by(job, wide.now) == ("b-0",)  # of a slice taken whole one host is enough
    assert fail_launch(wide, job, ["unknown"]) == ("a", "c", "d")
    assert avoided_by(job, wide.now) == ("b-0", "a-0", "c-0", "d-0")


def test_single_tasks_and_siblings_avoid_hosts() -> None:
    world = World()
    for number in range(3):
        world.do(cpu_host(f"cpu-{number}", 8.0))
    job = world.submit_tasks(replicas=2, resources={"CPU": 1.0}, task_placement="pack")
    world.schedule()
    hosts = [task.node_id for task in job.tasks]
    assert hosts == ["cpu-0", "cpu-0"]
    for index in range(2):
        world.do(TaskDispatchFailedEvent(AttemptId("job", 1, index), "no room", world.now))
        world.confirm(job, 1, index)
    world.now += 1.0
    world.schedule()
    assert [task.node_id for task in job.tasks] == ["cpu-1", "cpu-1"]


@pytest.mark.parametrize(
    ("named", "avoided"),
    [(("job/task-2",), ("b-0", "b-1")), (("a",), ("a-0", "a-1")), (("?",), ("a-0", "a-1", "b-0", "b-1"))],
    ids=str,
)
def test_only_rack_at_fault_is_avoided_named_by_first_task(named: tuple[str, ...], avoided: tuple[str, ...]) -> None:
    world = World()
    for rack in "ab":
        for number in range(2):
            world.do(cpu_host(f"{rack}-{number}", rack=rack))
    job = world.submit_tasks(replicas=2, coscheduling=CoschedulingConfig("rack", 2), resources={"CPU": 1.0})
    world.schedule()
    world.do(TaskDispatchFailedEvent(job.current_attempt(job.gang), "no answer", world.now, named))
    assert avoided_by(job, world.now) == avoided
    world.confirm(job)


def test_successful_start_ends_avoidance(world: World) -> None:
    job = world.submit(max_retries_preemption=5)
    for _ in range(3):
        fail_launch(world, job)
    world.now = job.gang.not_before
    world.schedule()
    world.report_all(job, S.RUNNING)
    assert job.gang.groups == ("b",)
    assert (job.gang.dispatch_failures, job.avoided) == (0, ("a-0",))


@pytest.mark.parametrize("fault", [Fault.DISK, Fault.HANG])
def test_host_at_fault_stays_avoided_after_start(world: World, fault: Fault) -> None:
    """The other tasks that begin are no word for it. To forgive at each of them took a look at all tasks, too."""
    job = world.submit()
    world.schedule()
    world.report(job, S.RUNNING, 0)
    world.do(WorkerBlamedEvent("a-0", "job", "no space left on device", fault))
    world.report(job, S.RUNNING, 1)
    assert avoided_by(job, world.now) == ("a-0",)


def test_job_avoids_only_latest_failed_hosts() -> None:
    world = World()
    for number in range(MOST_AVOIDED + 10):
        world.do(cpu_host(f"cpu-{number:03}", 1.0))
    job = world.submit_tasks(replicas=MOST_AVOIDED + 10, resources={"CPU": 1.0})
    world.schedule()
    for index in range(MOST_AVOIDED + 10):
        world.do(TaskDispatchFailedEvent(AttemptId("job", 1, index), "no room", world.now))
    assert len(job.avoided) == MOST_AVOIDED
    assert job.avoided[-1] == f"cpu-{MOST_AVOIDED + 9:03}"


def test_launches_waiting_for_another_task_end_no_job(world: World) -> None:
    job = world.submit()
    for _ in range(2 * MOST_FAILED_LAUNCHES):
        fail_launch(world, job, counts=False)
        assert job.gang.not_before == world.now + 0.5
    assert job.gang.dispatch_failures == 0
    for number in range(1, MOST_LAUNCHES_BEFORE_A_RUN):
        fail_launch(world, job)
        assert (job.gang.dispatch_failures, job.state) == (number, JobState.PENDING)
        fail_launch(world, job, counts=False)
    fail_launch(world, job)
    assert job.state is JobState.UNSCHEDULABLE


def test_job_with_a_scheduling_timeout_is_launched_until_then_and_says_why_none_succeeded(world: World) -> None:
    job = world.submit(scheduling_timeout=3600.0)
    began = world.now
    for _ in range(MOST_LAUNCHES_BEFORE_A_RUN + 3):
        fail_launch(world, job)
    assert (job.state, world.now - began < 3600) == (JobState.PENDING, True)
    world.now = began + 3601
    (late,) = world.plan().timed_out
    assert late.reason.startswith("it did not get to run within its scheduling_timeout of 3600 s")


# -- what a launch that fails keeps from others ------------------------------------------------------------------------


def test_gang_with_failing_launches_holds_nothing_and_passes_nobody(world: World) -> None:
    """However long it has waited: the bound begins anew with each launch."""
    job = world.submit(slices=(2,), priority=PriorityBand.INTERACTIVE)
    world.now += BACKFILL_BOUND_S + 1.0
    fail_launch(world, job)
    small = [world.submit(f"small-{number}", owner="pool-b", user="bob") for number in range(2)]
    plan = world.plan()
    assert plan.pending_reasons["job"].kept == ()
    assert {assignment.job_id for assignment in plan.assignments} == {"small-0", "small-1"}
    world.schedule()
    assert all(one.gang.placed for one in small)
    world.now = job.gang.not_before
    assert world.plan().pending_reasons["job"].kept == ()


def test_spare_with_failing_launches_and_its_gang_go_on(world: World) -> None:
    job = world.start(spares=1, max_retries_preemption=5)
    (spare,) = (one for one in world.state.jobs.values() if one.spec.spare_for)
    for _ in range(MOST_FAILED_LAUNCHES + 2):
        fail_launch(world, spare)
        world.now = spare.avoided_until  # there is no other slice
    assert (job.state, spare.state) == (JobState.RUNNING, JobState.PENDING)
    assert spare.gang.not_before < math.inf


# -- jobs that have run ------------------------------------------------------------------------------------------------


def test_job_that_has_run_waits_longer_and_longer_with_its_reason(wide: World) -> None:
    """It may have days of work to lose."""
    job = wide.start(max_retries_preemption=100)
    wide.lose("a-0")
    wide.confirm(job)
    pauses = []
    for _ in range(MOST_FAILED_LAUNCHES + 5):
        fail_launch(wide, job)
        pauses.append(job.gang.not_before - wide.now)
    assert pauses == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0] + [30.0] * 4 + [60.0, 120.0, 240.0, 300.0, 300.0]
    assert (job.state, charged(job)) == (JobState.PENDING, (0, 1)), "the lost host"
    assert "15 launches in a row failed; the last one: the interpreter ended" in wide.why()


def test_job_that_has_run_is_ended_by_no_number_of_failed_launches(wide: World) -> None:
    """Even if a further lost host would end it."""
    job = wide.start(max_retries_preemption=1)
    wide.lose("a-0")
    wide.confirm(job)
    for number in range(1, 3 * MOST_LAUNCHES_BEFORE_A_RUN):
        fail_launch(wide, job)
        assert (job.state, charged(job), job.gang.dispatch_failures) == (JobState.PENDING, (0, 1), number)
        wide.now = max(wide.now, job.avoided_until)
    wide.now = max(wide.now, job.gang.not_before)
    wide.schedule()
    wide.report_all(job, S.RUNNING)
    assert (job.state, job.gang.dispatch_failures) == (JobState.RUNNING, 0)


def test_unlaunchable_gang_ends_jobs_other_gangs() -> None:
    world = World()
    for number in range(2 + MOST_LAUNCHES_BEFORE_A_RUN):
        world.do(cpu_host(f"cpu-{number}", 1.0))
    job = world.submit_tasks(replicas=2, resources={"CPU": 1.0}, max_task_failures=5)
    for attempt in range(1, 1 + MOST_LAUNCHES_BEFORE_A_RUN):
        world.now = max(world.now, job.gangs[1].not_before)
        world.schedule()
        stop = world.do(TaskDispatchFailedEvent(AttemptId("job", attempt, 1), "no room", world.now)).stop
        world.confirm(job, attempt, 1)
    assert job.state is JobState.UNSCHEDULABLE
    assert [task.state for task in job.tasks] == [S.KILLED, S.UNSCHEDULABLE]
    assert [one.attempt for one in stop] == [AttemptId("job", 1, 0)]
