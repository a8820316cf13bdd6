"""Judgement: from facts about tasks and hosts to one verdict for the gang."""

import pytest

from iris_ray.model.lifecycle import TaskState
from iris_ray.model.outcomes import (
    EndKind,
    HostEvidence,
    ProviderState,
    ProviderWord,
    RunErrorKind,
    TaskEnd,
    TaskKey,
    TpuCancelled,
    TpuFailed,
    TpuPreempted,
    TpuRunError,
    TpuSuccess,
)
from iris_ray.model.verdict import Verdict, judge_gang, judge_task
from iris_ray.state.attempt_ends import dispatch_backoff_s

HEALTHY = HostEvidence()
LOST = HostEvidence(lost="host died")
NOTICE = HostEvidence(draining="preemption in 30 s")
LOST_AFTER_NOTICE = HostEvidence("host died", "preemption in 30 s")

TAKEN, BROKEN, UP, NO_WORD = (
    HostEvidence("host died", provider=ProviderWord(state, "what the API said")) for state in ProviderState
)

RETURNED = TaskEnd(EndKind.RETURNED, 9.0, b"result")
STOPPED = TaskEnd(EndKind.STOPPED, 9.0, error="another task ended")
BUSY = TaskEnd(EndKind.HOST_UNFIT, 6.0, error="its chips are held by pid 1 (python3)")
NEVER_STARTED = TaskEnd(EndKind.NEVER_STARTED, 6.0, error="was killed by SIGKILL")
ZYGOTE_ENDED = TaskEnd(EndKind.ZYGOTE_ENDED, 6.0, error="the process that had forked it has ended")


def raised(at: float = 5.0, error: str = "ValueError: x") -> TaskEnd:
    return TaskEnd(EndKind.RAISED, at, b"pickled", error, "Traceback: …")


def crashed(at: float = 5.0) -> TaskEnd:
    return TaskEnd(EndKind.CRASHED, at, error="was killed by SIGABRT")


def gang(*tasks: tuple[TaskEnd | None, HostEvidence]) -> Verdict:
    """The verdict on a gang of one slice."""
    keys = [TaskKey(0, i) for i in range(len(tasks))]
    ends, hosts = zip(*tasks, strict=True)
    return judge_gang(dict(zip(keys, ends, strict=True)), dict(zip(keys, hosts, strict=True)))


@pytest.mark.parametrize(
    ("end", "host", "outcome"),
    [
        (RETURNED, HEALTHY, TpuSuccess),
        (RETURNED, LOST, TpuSuccess),  # it had its result before
        (RETURNED, NOTICE, TpuSuccess),
        (raised(), HEALTHY, TpuRunError),
        (crashed(), HEALTHY, TpuRunError),
        (raised(), NOTICE, TpuPreempted),
        (crashed(), NOTICE, TpuPreempted),
        (raised(), LOST, TpuFailed),
        (crashed(), LOST, TpuFailed),
        (crashed(), LOST_AFTER_NOTICE, TpuPreempted),
        (None, LOST, TpuFailed),
        (None, LOST_AFTER_NOTICE, TpuPreempted),
        (None, HEALTHY, TpuFailed),
        (None, NOTICE, TpuPreempted),  # its processes are gone and it had notice
        (STOPPED, HEALTHY, TpuCancelled),
        (STOPPED, NOTICE, TpuCancelled),
        (STOPPED, LOST, TpuFailed),
        (BUSY, HEALTHY, TpuFailed),
        (NEVER_STARTED, HEALTHY, TpuFailed),
        (ZYGOTE_ENDED, HEALTHY, TpuFailed),
        (ZYGOTE_ENDED, NOTICE, TpuPreempted),
        (BUSY, LOST_AFTER_NOTICE, TpuPreempted),
        (None, TAKEN, TpuPreempted),  # without notice, but the provider says so
        (crashed(), TAKEN, TpuPreempted),
        (RETURNED, TAKEN, TpuSuccess),
        (None, BROKEN, TpuFailed),
        (None, UP, TpuFailed),
        (None, NO_WORD, TpuFailed),  # that it can't be asked says nothing
    ],
)
def test_judge_task_follows_the_table(end: TaskEnd | None, host: HostEvidence, outcome: type) -> None:
    assert type(judge_task(end, host)) is outcome


def test_judge_task_passes_on_providers_word() -> None:
    assert judge_task(None, TAKEN) == TpuPreempted("host died; what the API said")
    assert judge_task(None, BROKEN) == TpuFailed("host died; what the API said")
    assert judge_task(None, NO_WORD) == TpuFailed("host died")


@pytest.mark.parametrize("text", ["operation timed out", "preempted", "Socket closed", "node died", "UNAVAILABLE"])
def test_judge_gang_never_reads_the_text_of_an_error(text: str) -> None:
    """A user's error that said "timed out" was taken for a preemption (defect 4)."""
    verdict = gang((raised(error=text), HEALTHY), (STOPPED, HEALTHY))
    assert isinstance(verdict.result, TpuRunError)
    assert verdict.charged_as is TaskState.FAILED


def test_judge_gang_all_returned_is_success() -> None:
    verdict = gang((RETURNED, HEALTHY), (RETURNED, HEALTHY))
    assert verdict.succeeded
    assert verdict.cause is None
    assert set(verdict.results) == {TaskKey(0, 0), TaskKey(0, 1)}


def test_judge_gang_lost_host_explains_peers_earlier_aborts() -> None:
    verdict = gang((crashed(1.0), HEALTHY), (raised(2.0), HEALTHY), (None, LOST))
    assert verdict.cause == TaskKey(0, 2)
    assert isinstance(verdict.result, TpuFailed)
    assert verdict.charged_as is TaskState.WORKER_FAILED


@pytest.mark.parametrize("end", [BUSY, NEVER_STARTED, ZYGOTE_ENDED])
def test_judge_gang_unstarted_task_explains_its_peers(end: TaskEnd) -> None:
    verdict = gang((raised(5.0), HEALTHY), (end, HEALTHY))
    assert verdict.cause == TaskKey(0, 1)
    assert verdict.charged_as is TaskState.WORKER_FAILED
    assert gang((end, HEALTHY), (None, LOST)).cause == TaskKey(0, 1), "a lost host comes first"


def test_judge_gang_of_several_errors_names_the_first() -> None:
    verdict = gang((crashed(3.0), HEALTHY), (raised(2.0), HEALTHY), (crashed(4.0), HEALTHY), (STOPPED, HEALTHY))
    assert verdict.cause == TaskKey(0, 1)
    assert verdict.charged_as is TaskState.FAILED


def test_judge_gang_survivors_stopped_by_us_are_never_the_cause() -> None:
    early_stop = TaskEnd(EndKind.STOPPED, 0.5, error="stopped")
    verdict = gang((early_stop, HEALTHY), (raised(2.0), HEALTHY))
    assert verdict.cause == TaskKey(0, 1)


@pytest.mark.parametrize("peers", [(STOPPED, STOPPED), (STOPPED, None), (raised(), crashed()), (RETURNED, raised())])
@pytest.mark.parametrize(
    ("host", "outcome", "charged_as"),
    [
        (LOST, TpuFailed, TaskState.WORKER_FAILED),
        (LOST_AFTER_NOTICE, TpuPreempted, TaskState.WORKER_FAILED),
        (TAKEN, TpuPreempted, TaskState.WORKER_FAILED),
        (HostEvidence(out_of_memory="Ray killed processes there"), TpuRunError, TaskState.FAILED),
    ],
)
def test_judge_gang_host_lost_after_return_explains_the_others(
    peers: tuple[TaskEnd | None, TaskEnd | None], host: HostEvidence, outcome: type, charged_as: TaskState
) -> None:
    verdict = gang((peers[0], HEALTHY), (RETURNED, host), (peers[1], HEALTHY))
    assert (verdict.cause, type(verdict.result), verdict.charged_as) == (TaskKey(0, 1), outcome, charged_as)
    assert isinstance(verdict.results[TaskKey(0, 1)], TpuSuccess)


def test_judge_gang_of_cancelled_tasks_still_charges_a_budget() -> None:
    """An attempt in which all tasks were cancelled charged nothing and looped for ever (defect 8)."""
    verdict = gang((STOPPED, HEALTHY), (STOPPED, HEALTHY))
    assert not verdict.succeeded
    assert verdict.charged_as is TaskState.FAILED


def test_judge_gang_asks_the_failed_host() -> None:
    """The preemption check asked the controller's own host (defect 7): notice elsewhere excuses nothing here."""
    verdict = gang((raised(), HEALTHY), (STOPPED, NOTICE))
    assert verdict.cause == TaskKey(0, 0)
    assert verdict.charged_as is TaskState.FAILED


MOVE = TaskKey(0, 1), TpuPreempted("preemption in 30 s; a task ended before all had saved")
EXITED = TaskEnd(EndKind.EXITED, 5.0, error="the function called sys.exit(1)")


@pytest.mark.parametrize("end", [crashed(), EXITED], ids=["signal", "code"])
@pytest.mark.parametrize("other", [STOPPED, raised(6.0), RETURNED], ids=["stopped", "raised", "returned"])
def test_judge_gang_exit_after_notice_counts_as_move(end: TaskEnd, other: TaskEnd) -> None:
    """SIGTERM went to every task, also to those on hosts that stay; what its peers raise then is its consequence."""
    ends, hosts = {TaskKey(0, 0): end, TaskKey(0, 1): other}, dict.fromkeys((TaskKey(0, 0), TaskKey(0, 1)), HEALTHY)
    verdict = judge_gang(ends, hosts, MOVE, was_told=True)
    assert (verdict.cause, verdict.result, verdict.charged_as) == (*MOVE, TaskState.WORKER_FAILED)
    untold = judge_gang(ends, hosts)
    assert (untold.cause, untold.charged_as) == (TaskKey(0, 0), TaskState.FAILED)


def test_judge_gang_notice_excuses_no_exception_or_lost_host() -> None:
    def verdict(first: TaskEnd | None, host: HostEvidence) -> Verdict:
        ends, hosts = {TaskKey(0, 0): first, TaskKey(0, 1): crashed(7.0)}, {TaskKey(0, 0): host, TaskKey(0, 1): HEALTHY}
        return judge_gang(ends, hosts, MOVE, was_told=True)

    assert verdict(raised(5.0), HEALTHY).result == judge_task(raised(5.0), HEALTHY)
    assert verdict(TaskEnd(EndKind.OUT_OF_MEMORY, 5.0, error="none left"), HEALTHY).charged_as is TaskState.FAILED
    assert verdict(None, LOST).result == TpuFailed("host died")
    assert verdict(crashed(5.0), NOTICE).result == judge_task(crashed(5.0), NOTICE)


def test_dispatch_backoff_doubles_to_half_minute_later_to_five() -> None:
    assert [dispatch_backoff_s(n) for n in (1, 2, 3, 4, 5, 6, 7, 8, 10)] == [0.5, 1, 2, 4, 8, 16, 30, 30, 30]
    assert [dispatch_backoff_s(n) for n in (11, 12, 13, 14, 15, 1000)] == [60, 120, 240, 300, 300, 300]


# -- failures of the job itself ---------------------------------------------------------------------------------------


FIRST, SECOND = TaskKey(0, 0), TaskKey(0, 1)
HANG = FIRST, TpuRunError("no progress", kind=RunErrorKind.HANG)
MOVED = SECOND, TpuPreempted("all had saved")


# -- kinds ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("end", "kind"),
    [
        (EndKind.RAISED, RunErrorKind.APPLICATION),
        (EndKind.EXITED, RunErrorKind.APPLICATION),
        (EndKind.CRASHED, RunErrorKind.CRASH),
        (EndKind.OUT_OF_MEMORY, RunErrorKind.OUT_OF_MEMORY),
    ],
)
def test_judge_task_names_kind_of_error(end: EndKind, kind: RunErrorKind) -> None:
    result = judge_task(TaskEnd(end, 5.0, b"pickled", "what happened", "where"), HEALTHY)
    assert result == TpuRunError("what happened", "where", b"pickled", kind)


KILLED_WITH_US = HostEvidence(out_of_memory="Ray killed processes there")
NO_MEMORY = TaskEnd(EndKind.OUT_OF_MEMORY, 5.0, error="killed")


@pytest.mark.parametrize(
    ("end", "host", "error"),
    [
        (NO_MEMORY, LOST, "killed"),
        (None, KILLED_WITH_US, "Ray killed processes there"),
        (STOPPED, KILLED_WITH_US, "Ray killed processes there"),
        (None, HostEvidence("it died", out_of_memory="Ray killed processes there"), "Ray killed processes there"),
    ],
)
def test_judge_task_exhausting_memory_failed_even_without_our_processes(
    end: TaskEnd | None, host: HostEvidence, error: str
) -> None:
    assert judge_task(end, host) == TpuRunError(error, kind=RunErrorKind.OUT_OF_MEMORY)


@pytest.mark.parametrize(("end", "host"), [(NO_MEMORY, HEALTHY), (None, KILLED_WITH_US)])
@pytest.mark.parametrize(
    ("other", "others_host"),
    [(TaskEnd(EndKind.RAISED, 4.0, error="Socket closed"), HEALTHY), (None, LOST)],
    ids=["a peer has noticed before", "another host is lost"],
)
def test_judge_gang_exhausted_memory_is_first_cause(
    end: TaskEnd | None, host: HostEvidence, other: TaskEnd | None, others_host: HostEvidence
) -> None:
    verdict = judge_gang({FIRST: other, SECOND: end}, {FIRST: others_host, SECOND: host})
    assert (verdict.cause, verdict.charged_as) == (SECOND, TaskState.FAILED)
    assert isinstance(verdict.result, TpuRunError)
    assert verdict.result.kind is RunErrorKind.OUT_OF_MEMORY


def test_judge_task_every_end_has_a_verdict() -> None:
    for end in EndKind:
        verdict = judge_task(TaskEnd(end, 5.0, b"", "x"), HEALTHY)
        assert isinstance(verdict, TpuSuccess) == (end is EndKind.RETURNED)


# -- our reason -----------------------------------------------------------------------------------------------------


def both(end: TaskEnd | None, host: HostEvidence = HEALTHY) -> tuple[dict, dict]:
    """The first task ended so, the second was stopped by us."""
    return {FIRST: end, SECOND: STOPPED}, {FIRST: host, SECOND: HEALTHY}


@pytest.mark.parametrize(("reason", "charged"), [(HANG, TaskState.FAILED), (MOVED, TaskState.WORKER_FAILED)])
def test_judge_gang_ended_by_us_has_our_reason(reason: tuple, charged: TaskState) -> None:
    verdict = judge_gang(*both(STOPPED), reason)
    assert (verdict.cause, verdict.result) == reason
    assert (verdict.charged_as, verdict.succeeded) == (charged, False)
    assert set(verdict.results) == {FIRST, SECOND}


@pytest.mark.parametrize("reason", [HANG, MOVED])
@pytest.mark.parametrize(
    ("end", "host", "charged"),
    [
        (TaskEnd(EndKind.RAISED, 5.0, error="ValueError"), HEALTHY, TaskState.FAILED),
        (TaskEnd(EndKind.CRASHED, 5.0, error="SIGSEGV"), HEALTHY, TaskState.FAILED),
        (TaskEnd(EndKind.NEVER_STARTED, 5.0, error="gone"), HEALTHY, TaskState.WORKER_FAILED),
        (None, HEALTHY, TaskState.WORKER_FAILED),
        (None, LOST, TaskState.WORKER_FAILED),
        (STOPPED, LOST, TaskState.WORKER_FAILED),
    ],
    ids=["raised", "crashed", "never started", "no report", "lost", "stopped on a lost host"],
)
def test_judge_gang_with_other_cause_has_that_cause(
    reason: tuple, end: TaskEnd | None, host: HostEvidence, charged: TaskState
) -> None:
    """A task that raises at the moment when we give the gang up says more than our reason does."""
    verdict = judge_gang(*both(end, host), reason)
    assert (verdict.cause, verdict.charged_as) == (FIRST, charged)
    assert verdict.result == judge_task(end, host)


def test_judge_gang_done_before_our_end_has_succeeded() -> None:
    ends, hosts = both(RETURNED)
    assert judge_gang(ends | {SECOND: RETURNED}, hosts, HANG).succeeded
