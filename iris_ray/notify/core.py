"""What there is to tell about a job, decided from its state alone. Pure: no Ray, no clock, no I/O.

Each event of a job has a number: the attempt that was lost, for example. A job's state shows the latest number of each
event, so nothing is missed if the service was away for a while.
"""

import hashlib
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Final

from iris_ray.model.goodput import JobTimes, measure
from iris_ray.model.jobs import Job
from iris_ray.model.lifecycle import JobState, TaskState
from iris_ray.model.time_lost import FailureCause
from iris_ray.notify.destination import Destination, What
from iris_ray.state.attempt_ends import dispatch_backoff_s
from iris_ray.terminal import one_line

OFTEN_S: Final = 3600.0
"""Notifications of one event of one job to one place are this far apart. Those in between become one, with a count."""
MOST_AGE_S: Final = 24 * 3600.0
"""Older events are not sent any more."""
MOST_CHARACTERS: Final = 500
"""The limit for a text of a notification."""
MOST_NAME: Final = 120

_FIRST_CLAUSE: Final = re.compile("[:;] ")
LOSSES: Final = frozenset({FailureCause.PREEMPTED, FailureCause.LOST, FailureCause.EVICTED})


@dataclass(frozen=True, slots=True)
class News:
    """One event of a job, for one destination.

    Attributes:
        id: the same for each attempt to send it, also by a later Controller.
        what: the event.
        number: counts the event's occurrences in the job.
        job_id, name, user, team: the job.
        state: the job's state at the event.
        at: the time of the event, in seconds since the epoch.
        text: a sentence, without output of the job.
        place: the destination without its options.
        lines: the number of last lines of output that the user asked for.
        task: the process whose lines they are.
        key: the name of the secret that signs it.
        by_rule: whether it is for the operator's rule, and not for the user's own destination.
        times: how many events it stands for.
    """

    id: str
    what: What
    number: int
    job_id: str
    name: str
    user: str
    team: str
    state: str
    at: float
    text: str
    place: str
    lines: int = 0
    task: int = 0
    key: str = ""
    by_rule: bool = False
    times: int = 1

    @property
    def thread(self) -> tuple[str, What]:
        """Its job and event. News of one thread for one place are at least `OFTEN_S` apart."""
        return self.job_id, self.what

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"what": self.what.value}

    @classmethod
    def of_dict(cls, values: Mapping[str, Any]) -> "News":
        """Return news from `as_dict`. Raise TypeError, KeyError or ValueError for anything else."""
        names = {field.name for field in fields(cls)}
        found = cls(**{name: value for name, value in values.items() if name in names})
        return replace(found, what=What(found.what))


@dataclass(frozen=True, slots=True)
class Fact:
    """An event of a job, before anybody is told.

    Attributes:
        what, number: the event.
        at: the time of the event, in seconds on the Controller's clock.
        text: a sentence about it.
        task: the process to whose output it leads.
    """

    what: What
    number: int
    at: float
    text: str
    task: int = 0


def facts_of(job: Job, destination: Destination, now: float, stalls: int = 0) -> Iterator[Fact]:
    """Yield the latest event of each kind that the job has had and the destination wants.

    Args:
        job: the job.
        destination: says what is wanted.
        now: seconds on the Controller's clock.
        stalls: the number of the latest attempt that is known to have stalled, if the job's times don't say so.
    """
    wanted = destination.on
    if What.STARTED in wanted and job.started and not math.isinf(job.began_at):
        yield Fact(What.STARTED, 1, job.began_at, "its first task runs")
    if job.over is not None:
        succeeded = job.over is JobState.SUCCEEDED
        what = What.SUCCEEDED if succeeded else What.FAILED
        if what in wanted:
            at = job.times.ended_at if job.times.ended_at is not None else now
            yield Fact(what, 1, at, _end(job), _culprit(job))
        return
    if What.LOST in wanted and (number := _losses(job)):
        at, evicted = _last_end(job.times, LOSSES, now), job.evictions
        also = f", {evicted} of them to other jobs" if evicted else ""
        yield Fact(What.LOST, number, at, f"it has lost hosts, and goes on; attempts so far: {job.attempt}{also}")
    if What.STALLED in wanted and (number := max(stalls, _latest(job.times, {FailureCause.HUNG}))):
        at = _last_end(job.times, {FailureCause.HUNG}, now)
        yield Fact(What.STALLED, number, at, f"attempt {number} made no progress for too long, and was ended")
    if What.WAITING in wanted and (since := waits_since(job)) is not None and now - since >= destination.wait_s:
        # its number is that of the wait, as a job may wait again after it has lost hosts; failed launches are one wait
        words = f"it has waited for hosts for {_hours(now - since)}; iris-ray why {job.spec.job_id} says what it lacks"
        failed = job.gangs[0].dispatch_failures if len(job.gangs) == 1 else 0
        yield Fact(What.WAITING, job.requeues - failed + 1, since + destination.wait_s, words)
    limit = destination.chip_hours
    if What.BUDGET in wanted and limit is not None and (used := chip_hours(job, now)) >= limit:
        yield Fact(What.BUDGET, 1, now, f"it has used {used:.1f} chip-hours, of {limit:g}, and goes on")


def waits_since(job: Job) -> float | None:
    """Return since when a job waits for hosts with all of its tasks, in seconds; None if it does not.

    A job queues anew after a failed launch. The pauses between such launches count, and are most of that wait.
    """
    if job.over is not None or job.awaits or job.counts[TaskState.PENDING] != job.size:
        return None
    since = max(gang.waiting_since for gang in job.gangs[:100])
    return since - sum(map(dispatch_backoff_s, range(1, job.gangs[0].dispatch_failures)))


def chip_hours(job: Job, now: float) -> float:
    """Return the chip-hours that a job of one gang has held so far; 0 for other jobs, whose time is not measured."""
    return sum(span.seconds * span.chips for span in measure(job.times, job.submitted_at, now)) / 3600


def news_of(job: Job, destination: Destination, fact: Fact, at: float, by_rule: bool) -> News:
    """Return the news of an event for a destination.

    Args:
        job, destination, fact: who, where and what.
        at: the time of the event, in seconds since the epoch.
        by_rule: whether an operator's rule names the destination.
    """
    spec = job.spec
    return News(
        news_id(spec.job_id, fact.what, fact.number, destination.place),
        fact.what,
        fact.number,
        spec.job_id,
        _cut(spec.name or spec.job_id, MOST_NAME),
        spec.user,
        spec.team,
        job.state.value,
        at,
        _cut(fact.text, MOST_CHARACTERS),
        destination.place,
        destination.lines if fact.what in (What.SUCCEEDED, What.FAILED, What.STALLED) else 0,
        fact.task,
        destination.key,
        by_rule,
    )


def news_id(job_id: str, what: What, number: int, place: str) -> str:
    """Return the id of news, which any Controller of the cluster gives to the same event."""
    return hashlib.sha256("\0".join((job_id, what, str(number), place)).encode()).hexdigest()[:32]


def batch_id(news: Iterable[News]) -> str:
    """Return the id of a message with several news; that of the news if it is only one."""
    ids = [one.id for one in news]
    return ids[0] if len(ids) == 1 else hashlib.sha256("\0".join(ids).encode()).hexdigest()[:32]


def merged(before: News, after: News) -> News:
    """Return the later of two news of one thread, which stands for both."""
    return replace(after, times=before.times + after.times)


def _end(job: Job) -> str:
    ran = f"; attempts: {job.attempt}, failures: {job.failures}, hosts lost: {job.preemptions}"
    if job.over is JobState.SUCCEEDED:
        return f"it has succeeded{ran}"
    codes = {task.exit_code for task in _tasks(job) if task.state is TaskState.FAILED} - {None}
    with_codes = f" with exit code {', '.join(map(str, sorted(codes)[:3]))}" if codes else ""
    why = _cut(f": {reason}", MOST_CHARACTERS // 2) if (reason := _reason_without_output(job)) else with_codes
    return f"it has ended as {job.state.value.lower()}{why}{ran}; iris-ray job status {job.spec.job_id} shows more"


def _reason_without_output(job: Job) -> str | None:
    """Return why a job was ended or never ran, without what the reason quotes; None for other ends.

    The error of a failed job is its own output, and that of a lost one may quote how a task ended. The reason of a job
    that ends because of another one quotes that one's error; that of a job which could not be launched, the last try's.
    """
    if job.over not in (JobState.KILLED, JobState.UNSCHEDULABLE) or not job.error:
        return None
    is_quoting = job.over is JobState.UNSCHEDULABLE or job.spec.group is not None
    return _FIRST_CLAUSE.split(job.error, maxsplit=1)[0] if is_quoting else job.error


def _tasks(job: Job) -> Iterator[Any]:
    return (task for gang in job.gangs for task in gang.tasks)


def _culprit(job: Job) -> int:
    """Return the first process of the task whose output tells most: one that failed, or the first."""
    failed = next((task.index for task in _tasks(job) if task.state is TaskState.FAILED), 0)
    return failed * job.spec.processes_per_host


def _losses(job: Job) -> int:
    return max(_latest(job.times, LOSSES), 0 if job.spec.is_one_gang else job.preemptions + job.evictions)


def _latest(times: JobTimes, causes: Set[FailureCause]) -> int:
    """Return the number of the latest attempt that ended for one of these causes; 0 if none is known."""
    return max((attempt.number for attempt in times.attempts if attempt.cause in causes), default=0)


def _last_end(times: JobTimes, causes: Set[FailureCause], now: float) -> float:
    ends = [one.ended_at for one in times.attempts if one.cause in causes and one.ended_at is not None]
    return max(ends, default=now)


def _hours(seconds: float) -> str:
    return f"{seconds / 3600:.1f} h" if seconds >= 3600 else f"{seconds / 60:.0f} min"


def _cut(text: str, most: int) -> str:
    text = one_line(text)
    return text if len(text) <= most else f"{text[: most - 1]}…"
