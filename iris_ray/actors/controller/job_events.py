"""What has happened to a job, for people: from its record, so a restart of the Controller changes nothing."""

import heapq
from collections.abc import Iterator

from iris_ray.actors.controller.clock import Clock
from iris_ray.actors.wire.status import PAGE, JobEvent
from iris_ray.model.jobs import Gang, Job, PastAttempt
from iris_ray.model.lifecycle import JobState, TaskState

CHARGED = {
    TaskState.FAILED: "charged as a failure",
    TaskState.WORKER_FAILED: "charged as a preemption",
    TaskState.KILLED: "free of charge",
}


def job_events(job: Job, clock: Clock) -> list[JobEvent]:
    """Return what is known of a job's life, oldest first: at most `PAGE` events, the latest ones."""
    events = [event for gang in job.gangs for event in _of_gang(job, gang)]
    band = job.spec.priority.name.lower()
    events.append(JobEvent(job.submitted_at, None, None, f"submitted by {job.spec.user}, {band}"))
    if job.over is not None and job.times.ended_at is not None:
        because = f": {job.error}" if job.error and job.over is not JobState.SUCCEEDED else ""
        events.append(JobEvent(job.times.ended_at, None, None, f"the job ended: {job.over.value}{because}"))
    latest = heapq.nlargest(PAGE, enumerate(events), key=lambda event: (event[1].at, event[0]))
    in_order = (event for _, event in sorted(latest, key=lambda event: (event[1].at, event[0])))
    return [JobEvent(clock.wall(event.at), event.task_index, event.attempt, event.what) for event in in_order]


def _of_gang(job: Job, gang: Gang) -> Iterator[JobEvent]:
    task = None if job.spec.coscheduling else gang.position
    for past in gang.past:
        yield from _past(past, task)
    assigned = {attempt.number: attempt.assigned_at for attempt in job.times.attempts}
    where = ", ".join(gang.groups)
    is_over = any(past.number == gang.attempt for past in gang.past)
    if job.spec.coscheduling and not is_over and gang.attempt in assigned:
        yield JobEvent(assigned[gang.attempt], task, gang.attempt, f"got {where}")
    began = min((one.started_at for one in gang.tasks if one.started_at is not None), default=None)
    if began is not None:
        yield JobEvent(began, task, gang.attempt, f"runs on {where}")
    if gang.notice is not None:
        yield JobEvent(gang.notice.deadline, task, gang.attempt, f"is to move at the latest: {gang.notice.reason}")


def _past(past: PastAttempt, task: int | None) -> Iterator[JobEvent]:
    where = ", ".join(past.groups)
    if past.started_at is not None:
        yield JobEvent(past.started_at, task, past.number, f"runs on {where}")
    ended = "ended" if past.started_at is not None else f"did not start on {where}"
    yield JobEvent(past.ended_at, task, past.number, f"{ended} ({CHARGED[past.state]}): {past.error}")
