"""Identifiers of attempts and tasks."""

from typing import NamedTuple


class AttemptId(NamedTuple):
    """One attempt to run a gang.

    Attributes:
        job_id: the job.
        number: counts the gang's attempts from 1; never reused.
        gang: which gang of the job: the index of its first task. A coscheduled job has one gang, 0.
    """

    job_id: str
    number: int
    gang: int = 0

    def __str__(self) -> str:
        return f"attempt {self.number} of {self.job_id}" + (f"/task-{self.gang}" if self.gang else "")


def task_id(job_id: str, index: int) -> str:
    """Return the id of a job's task."""
    return f"{job_id}/task-{index}"


def job_of(task_id: str) -> str:
    """Return the id of the job that a task belongs to."""
    return task_id.rpartition("/")[0]
