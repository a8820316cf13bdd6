"""Judges a gang: derives one verdict from the evidence about its tasks, which determines the budget that is charged.

When one task ends, the others fail with collateral errors: peers abort with SIGABRT or raise "Socket closed". The gang
is therefore judged as a whole. Exhausted memory is the first candidate for the cause, since it also explains the loss
of iris_ray's processes. Next come a task that could not run, one whose zygote has ended, and a lost host, even if its
task had returned, since its peers may have needed the process; then the earliest error. The text of a message never
counts: a user's error may also say "timed out".

============================================  ============  ====================
first cause                                   outcome       charged
============================================  ============  ====================
host lost or its processes gone, had notice   TpuPreempted  preemption budget
host lost, the provider says that it took it  TpuPreempted  preemption budget
host lost, or a process of iris_ray on it     TpuFailed     preemption budget
the same, though its task had returned        the same      the same
process ended by itself on a host with notice TpuPreempted  preemption budget
exit code or signal, after a notice           as the move   as the move
all tasks had saved after a notice            TpuPreempted  preemption budget
exception, exit code, crash, out of memory    TpuRunError   failure budget
no heartbeat of any task for stall_timeout    TpuRunError   failure budget
no heartbeat for as long as the job's steps   TpuFailed     preemption budget
the zygote of a task has ended                TpuFailed     preemption budget
process had died before any user code ran     TpuFailed     nothing, but a pause
the host's disk is full, no user code ran     TpuFailed     nothing, but a pause
moved to more slices, or evicted              TpuCancelled  nothing
another process holds the host's chips        TpuFailed     nothing, but a pause
ended by iris_ray without another cause       TpuCancelled  failure budget
============================================  ============  ====================

The last row occurs only if iris_ray has a defect; the charge prevents an endless loop. The state adds one rule: a job
that repeatedly loses a task on a live host, or its pool's process, within seconds after each start
(`QUICK_ENDS_ARE_FAILURES`), is charged a failure. `docs/failures.md` has the complete table for users.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from iris_ray.model.lifecycle import TaskState
from iris_ray.model.outcomes import (
    DID_NOT_RUN,
    EndKind,
    HostEvidence,
    ProviderState,
    RunErrorKind,
    TaskEnd,
    TaskKey,
    TpuCancelled,
    TpuFailed,
    TpuPreempted,
    TpuResult,
    TpuRunError,
    TpuSuccess,
)


def judge_task(end: TaskEnd | None, host: HostEvidence) -> TpuResult:
    """Return the outcome of a task.

    Args:
        end: the end of its process; None if it was not reported.
        host: the evidence about its host.
    """
    if end is not None and end.kind is EndKind.RETURNED:
        assert end.payload is not None
        return TpuSuccess(end.payload)
    if not host.draining:
        if end is not None and end.kind is EndKind.OUT_OF_MEMORY:
            return TpuRunError(end.error, end.traceback, end.payload, RunErrorKind.OUT_OF_MEMORY)
        if host.out_of_memory is not None:
            return TpuRunError(host.out_of_memory, kind=RunErrorKind.OUT_OF_MEMORY)
    if host.lost is not None:
        return _judge_lost(host, host.lost)
    if end is not None and end.kind is EndKind.STOPPED:
        return TpuCancelled(end.error)
    if host.draining:
        return TpuPreempted(f"{host.draining}; the task ended with: {end.error if end else 'no report'}")
    if end is None:
        return TpuFailed("the task's end was not reported, though its host answers")
    if end.kind in DID_NOT_RUN or end.kind is EndKind.ZYGOTE_ENDED:
        return TpuFailed(end.error)
    return TpuRunError(end.error, end.traceback, end.payload, _RUN_ERRORS.get(end.kind, RunErrorKind.APPLICATION))


_RUN_ERRORS = {EndKind.CRASHED: RunErrorKind.CRASH, EndKind.DISK_ERROR: RunErrorKind.DISK}


def _judge_lost(host: HostEvidence, lost: str) -> TpuResult:
    if host.draining:
        return TpuPreempted(f"{lost}; {host.draining}")
    word = host.provider
    if word is None or word.state is ProviderState.UNKNOWN:  # an unreachable API is no evidence
        return TpuFailed(lost)
    said = f"{lost}; {word.reason}"
    return TpuPreempted(said) if word.state is ProviderState.PREEMPTED else TpuFailed(said)


_ENDS_BY_SIGTERM = frozenset({EndKind.EXITED, EndKind.CRASHED})
"""Ends that the SIGTERM of a notice may cause, so that the task counts as ended by iris_ray."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The verdict on an attempt.

    Attributes:
        cause: the task that ended first, or None after success.
        result: that task's outcome.
        results: every task's outcome.
    """

    cause: TaskKey | None
    result: TpuResult
    results: Mapping[TaskKey, TpuResult]

    @property
    def succeeded(self) -> bool:
        return self.cause is None

    @property
    def charged_as(self) -> TaskState:
        """The state of the first cause, which selects the budget to charge. Only for failed attempts."""
        assert not self.succeeded
        return TaskState.WORKER_FAILED if isinstance(self.result, (TpuPreempted, TpuFailed)) else TaskState.FAILED


def judge_gang(
    ends: Mapping[TaskKey, TaskEnd | None],
    hosts: Mapping[TaskKey, HostEvidence],
    our_reason: tuple[TaskKey, TpuResult] | None = None,
    was_told: bool = False,
) -> Verdict:
    """Return the verdict for a gang, with its first cause.

    Args:
        ends: the end of each task's process; None if it was not reported.
        hosts: the evidence about each task's host.
        our_reason: if iris_ray ended the gang, the task that it was ended for and the reason, which are the cause
            unless there is another.
        was_told: whether the gang had a notice, whose SIGTERM explains an exit code or a signal.
    """
    by_notice = {
        key
        for key, end in ends.items()
        if was_told and end and end.kind in _ENDS_BY_SIGTERM and not hosts[key].draining
    }
    results = {
        key: judge_task(replace(end, kind=EndKind.STOPPED) if end and key in by_notice else end, hosts[key])
        for key, end in ends.items()
    }
    if all(isinstance(result, TpuSuccess) for result in results.values()):
        return Verdict(None, next(iter(results.values())), results)

    causes = {
        key: judge_task(None, hosts[key]) if isinstance(result, TpuSuccess) else result
        for key, result in results.items()
        if not isinstance(result, TpuSuccess) or _is_lost(hosts[key])
    }
    cause = min(causes, key=lambda key: _suspicion(causes[key], ends[key], hosts[key], key in by_notice))
    if our_reason is not None and isinstance(causes[cause], TpuCancelled):
        cause, result = our_reason
        return Verdict(cause, result, results)
    return Verdict(cause, causes[cause], results)


def _is_lost(host: HostEvidence) -> bool:
    return host.lost is not None or host.out_of_memory is not None


def _suspicion(result: TpuResult, end: TaskEnd | None, host: HostEvidence, by_notice: bool) -> tuple[int, float]:
    """Return the sort key of a task as a candidate for the first cause; the smallest wins."""
    was_user_code = end is None or (end.kind not in DID_NOT_RUN and end.kind is not EndKind.ZYGOTE_ENDED)
    if isinstance(result, TpuRunError) and result.kind is RunErrorKind.OUT_OF_MEMORY:
        rank = 0
    elif isinstance(result, (TpuPreempted, TpuFailed)) and (host.lost or host.draining or not was_user_code):
        rank = 1
    elif isinstance(result, TpuRunError) or by_notice:
        rank = 2
    else:
        rank = 3 if isinstance(result, TpuFailed) else 4
    return rank, end.ended_at if end else 0.0
