"""Rows of jobs and of the queue."""

from iris_ray.actors.wire.overview import Waiting
from iris_ray.actors.wire.status import JobStatus
from iris_ray.dashboard.tables import Row

ERROR_CHARACTERS = 300
"""Of an error, so many are in a list; the job's page has them all."""


def job_row(job: JobStatus) -> Row:
    gives_way = None if job.gives_way is None else {"to": job.gives_way[0], "until": job.gives_way[1]}
    return {
        "id": job.job_id,
        "number": job.number,
        "name": job.name,
        "user": job.user,
        "band": job.priority.name.lower(),
        "type": job.device,
        "wants": list(job.num_groups),
        "state": "starting" if job.starting else job.state.value,
        "over": job.state.finished,
        "submitted": job.submitted_at,
        "attempt": job.attempt,
        "failures": job.failures,
        "preemptions": job.preemptions,
        "evictions": job.evictions,
        "tasks": {state.value: count for state, count in job.tasks.items() if count},
        "groups": list(job.groups),
        "error": job.error[:ERROR_CHARACTERS] if job.error else None,
        "gives_way": gives_way,
        "step": job.step,
        "says": job.status,
        "spare_for": job.spare_for,
    }


def queue_row(waiting: Waiting) -> Row:
    return {"why": waiting.why, "kind": waiting.kind.lower(), "since": waiting.since}
