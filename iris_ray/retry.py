"""Judgement: from the facts about each task to one verdict for the gang, and what it charges.

When one member ends, the others fail with collateral errors: peers abort with SIGABRT or raise "Socket closed". So
the gang is judged, not each task. A lost host explains everything else; otherwise the earliest error does. Message
texts are never read: a user's error may well say "timed out".

============================================  ============  ====================
what happened to the first cause              outcome       charged
============================================  ============  ====================
host lost or its processes gone, had notice   TpuPreempted  preemption budget
host lost, or a process of ours on it         TpuFailed     preemption budget
process ended by itself on a host with notice TpuPreempted  preemption budget
exception, exit code or crash, healthy host   TpuRunError   failure budget
process had died before any user code ran     TpuFailed     nothing, but a pause
ended by us, nobody else to blame             TpuCancelled  failure budget
============================================  ============  ====================

The last row can't happen unless we err; charging it keeps such an error from looping for ever.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from iris_ray.lifecycle import TaskState
from iris_ray.outcomes import (
    EndKind,
    HostEvidence,
    TaskEnd,
    TaskKey,
    TpuCancelled,
    TpuFailed,
    TpuPreempted,
    TpuResult,
    TpuRunError,
    TpuSuccess,
)

MAX_RETRIES_FAILURE = 10
MAX_RETRIES_PREEMPTION = 10_000


SUSPICION_S = 20.0
"""A host that did not answer is left alone so long, unless Ray declares it dead before: with its default health checks
that takes about 15 s after a crash."""


def dispatch_backoff_s(failures: int) -> float:
    """Seconds to wait before the next launch after so many failed ones in a row: 0.5, 1, 2, … 30."""
    return float(min(30.0, 0.5 * 2 ** min(failures - 1, 10)))


def judge_task(end: TaskEnd | None, host: HostEvidence) -> TpuResult:
    """One task's outcome, from how its process ended (None: nobody can tell) and from the state of its host."""
    if end is not None and end.kind is EndKind.RETURNED:
        assert end.payload is not None
        return TpuSuccess(end.payload)
    if host.lost is not None:
        return TpuPreempted(f"{host.lost}; {host.draining}") if host.draining else TpuFailed(host.lost)
    if end is not None and end.kind is EndKind.STOPPED:
        return TpuCancelled(end.error)
    if host.draining:
        return TpuPreempted(f"{host.draining}; the task ended with: {end.error if end else 'no report'}")
    if end is None:
        return TpuFailed("the task's end was not reported, though its host answers")
    if end.kind is EndKind.NEVER_STARTED:
        return TpuFailed(end.error)
    return TpuRunError(end.error, end.traceback, end.payload)


@dataclass(frozen=True, slots=True)
class Verdict:
    """Why an attempt ended.

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
        """The state that the first cause is reported in; it names the budget. Not for successes."""
        assert not self.succeeded
        return TaskState.WORKER_FAILED if isinstance(self.result, (TpuPreempted, TpuFailed)) else TaskState.FAILED


def judge_gang(ends: Mapping[TaskKey, TaskEnd | None], hosts: Mapping[TaskKey, HostEvidence]) -> Verdict:
    """One verdict for the gang, with its first cause.

    Args:
        ends: how each task's process ended; None where the report is missing.
        hosts: the state of each task's host.
    """
    results = {key: judge_task(end, hosts[key]) for key, end in ends.items()}
    blamed = [key for key, result in results.items() if not isinstance(result, TpuSuccess)]
    if not blamed:
        return Verdict(None, next(iter(results.values())), results)

    def suspicion(key: TaskKey) -> tuple[int, float]:
        result, end, host = results[key], ends[key], hosts[key]
        if isinstance(result, (TpuPreempted, TpuFailed)) and (host.lost or host.draining):
            rank = 0
        elif isinstance(result, TpuRunError):
            rank = 1
        else:
            rank = 2 if isinstance(result, TpuFailed) else 3
        return rank, end.ended_at if end else 0.0

    cause = min(blamed, key=suspicion)
    return Verdict(cause, results[cause], results)
