"""How a job failed by itself: which kind of error it is, and when our own reason for the end counts."""

import pytest

from iris_ray.model.lifecycle import TaskState
from iris_ray.model.outcomes import (
    EndKind,
    HostEvidence,
    RunErrorKind,
    TaskEnd,
    TaskKey,
    TpuFailed,
    TpuPreempted,
    TpuRunError,
    TpuSuccess,
)
from iris_ray.model.verdict import judge_gang, judge_task

HEALTHY, LOST, NOTICE = HostEvidence(), HostEvidence(lost="it died"), HostEvidence(draining="preempted")
RETURNED = TaskEnd(EndKind.RETURNED, 9.0, b"result")
STOPPED = TaskEnd(EndKind.STOPPED, 9.0, error="we stopped it")
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


@pytest.mark.parametrize("end", [EndKind.RAISED, EndKind.CRASHED])
def test_judge_task_on_lost_or_noticed_host_is_no_own_error(end: EndKind) -> None:
    assert isinstance(judge_task(TaskEnd(end, 5.0, error="x"), LOST), TpuFailed)
    assert isinstance(judge_task(TaskEnd(end, 5.0, error="x"), NOTICE), TpuPreempted)


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


def test_judge_task_exhausting_memory_after_notice_was_preempted() -> None:
    assert isinstance(judge_task(NO_MEMORY, NOTICE), TpuPreempted)
    assert isinstance(judge_task(None, HostEvidence(None, "preempted", out_of_memory="killed")), TpuPreempted)


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


def test_judge_gang_partly_returned_has_our_reason() -> None:
    verdict = judge_gang(*both(RETURNED), HANG)
    assert (verdict.cause, verdict.result) == HANG
    assert isinstance(verdict.results[FIRST], TpuSuccess)


def test_judge_gang_done_before_our_end_has_succeeded() -> None:
    ends, hosts = both(RETURNED)
    assert judge_gang(ends | {SECOND: RETURNED}, hosts, HANG).succeeded
