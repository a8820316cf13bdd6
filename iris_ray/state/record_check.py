"""Checks that a record is complete before a job is restored from it."""

from collections import Counter
from dataclasses import fields
from operator import attrgetter
from typing import Any

from iris_ray.errors import CorruptRecordError
from iris_ray.model.jobs import Gang, Job, Task
from iris_ray.state.records import JobRecord

_fields_of_job = attrgetter(*(field.name for field in fields(Job)))
_fields_of_gang = attrgetter(*(field.name for field in fields(Gang)))
_fields_of_task = attrgetter(*(field.name for field in fields(Task)))


def require_whole(record: Any, job_id: str) -> JobRecord:
    """Return an unpickled value if it is a complete record of this job.

    Raises:
        CorruptRecordError: a part is missing, or the parts are inconsistent.
    """
    try:
        problem = _problem_of(record, job_id)
    except Exception as error:  # a field is missing, or of another type
        raise CorruptRecordError(f"the record of {job_id} is damaged: {type(error).__name__}: {error}") from error
    if problem is not None:
        raise CorruptRecordError(f"the record of {job_id} is damaged: {problem}")
    found: JobRecord = record
    return found


def _problem_of(record: Any, job_id: str) -> str | None:
    if not isinstance(record, JobRecord):
        return f"it is a {type(record).__name__}"
    job = record.job
    _fields_of_job(job)
    for gang in job.gangs:
        _fields_of_gang(gang)
        for task in gang.tasks:
            _fields_of_task(task)
    if job.spec.job_id != job_id:
        return f"it is that of {job.spec.job_id}"
    sizes = {len(gang.tasks) for gang in job.gangs}
    if (
        len(job.gangs) != job.spec.num_gangs
        or len(sizes) != 1
        or [task.index for task in job.tasks] != list(range(len(job.tasks)))
    ):
        return "some of its tasks are missing"
    if job.counts != Counter(task.state for task in job.tasks):
        return "its counts are not those of its tasks"
    if job.state.finished and any(gang.placed or gang.pending for gang in job.gangs):
        return "it is over, and some of its tasks are not"
    return _problem_of_allocations(record)


def _problem_of_allocations(record: JobRecord) -> str | None:
    for attempt, allocation in record.allocations.items():
        if attempt.job_id != record.job.spec.job_id or not 0 <= attempt.gang < len(record.job.gangs):
            return f"{attempt} is not one of its attempts"
        for node_id, task_id, demand in allocation:
            if not isinstance(node_id, str) or not isinstance(task_id, str) or not sum(demand.values(), 0.0) >= 0:
                return f"{attempt} holds something that makes no sense"
    return None
