"""Task and attempt ids, the states of jobs and tasks, and the legal transitions between task states."""

from collections.abc import Mapping
from enum import Enum
from typing import NamedTuple


class TaskState(Enum):
    """The state of a task. ASSIGNED: it has a host and starts. COSCHED_FAILED: another task of its gang ended first."""

    PENDING = "pending"
    ASSIGNED = "assigned"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    KILLED = "killed"
    WORKER_FAILED = "worker_failed"
    UNSCHEDULABLE = "unschedulable"
    COSCHED_FAILED = "cosched_failed"

    __hash__ = object.__hash__  # each state exists once; Enum's own hash is slower


class JobState(Enum):
    """The state of a job, derived from the counts of its tasks' states.

    A job has ended in every state except PENDING and RUNNING. FAILED: by its own errors, or for lack of progress
    (``stop_without_progress``). KILLED: it was cancelled, ended with its group, or reached its ``max_runtime``.
    WORKER_FAILED: it lost its hosts more often than allowed, or was evicted and may not run again. UNSCHEDULABLE: it
    was given up before any of its tasks ran.
    """

    PENDING = "pending"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    KILLED = "killed"
    WORKER_FAILED = "worker_failed"
    UNSCHEDULABLE = "unschedulable"

    @property
    def finished(self) -> bool:
        """Whether the job has ended, which is final."""
        return self not in (JobState.PENDING, JobState.RUNNING)


_S = TaskState

# SUCCEEDED → PENDING: a gang restarts as a whole, including the tasks that had already finished.
TRANSITIONS: Mapping[TaskState, frozenset[TaskState]] = {
    _S.PENDING: frozenset({_S.ASSIGNED, _S.KILLED, _S.UNSCHEDULABLE}),
    _S.ASSIGNED: frozenset({_S.PENDING, _S.RUNNING, _S.KILLED, _S.FAILED, _S.WORKER_FAILED, _S.COSCHED_FAILED}),
    _S.RUNNING: frozenset({_S.PENDING, _S.SUCCEEDED, _S.KILLED, _S.FAILED, _S.WORKER_FAILED, _S.COSCHED_FAILED}),
    _S.SUCCEEDED: frozenset({_S.PENDING, _S.KILLED, _S.WORKER_FAILED, _S.COSCHED_FAILED}),
    _S.FAILED: frozenset(),
    _S.KILLED: frozenset(),
    _S.WORKER_FAILED: frozenset(),
    _S.UNSCHEDULABLE: frozenset(),
    _S.COSCHED_FAILED: frozenset(),
}
ACTIVE = frozenset({_S.ASSIGNED, _S.RUNNING})


class AttemptId(NamedTuple):
    """One attempt to run a gang.

    Attributes:
        job_id: the job.
        number: the attempt's number within the gang, from 1; never reused.
        gang: the gang's position in the job; 0 for a job of one gang.
    """

    job_id: str
    number: int
    gang: int = 0

    def __str__(self) -> str:
        return f"attempt {self.number} of {self.job_id}" + (f"/task-{self.gang}" if self.gang else "")


class TaskAttemptId(NamedTuple):
    """One attempt of one task, which has a log of its own. An `AttemptId` names an attempt of a whole gang.

    Attributes:
        job_id: the job.
        task_index: the task's index in the job.
        attempt: the attempt's number, from 1.
    """

    job_id: str
    task_index: int
    attempt: int


def task_id(job_id: str, index: int) -> str:
    """Return the id of a job's task."""
    return f"{job_id}/task-{index}"


def job_of(task_id: str) -> str:
    """Return the id of the job that a task belongs to."""
    return task_id.rpartition("/")[0]
