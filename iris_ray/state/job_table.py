"""All jobs with their indexes, the transitions of their tasks, their latest events and their times."""

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Set
from itertools import count, islice
from operator import attrgetter, itemgetter

from iris_ray.errors import IllegalTransitionError
from iris_ray.model.goodput import ForgottenJob, Totals, measure, settle
from iris_ray.model.job_spec import JobSpec
from iris_ray.model.jobs import ATTEMPT_ERROR_CHARACTERS, ATTEMPTS_KEPT, Allocation, Gang, Job, PastAttempt, Task
from iris_ray.model.lifecycle import TRANSITIONS, AttemptId, JobState, TaskState, task_id
from iris_ray.model.workers import TPU
from iris_ray.state.events import Event
from iris_ray.state.fleet import Allocations
from iris_ray.state.instructions import ChangeLog
from iris_ray.state.records import chunk_of, chunks_in, is_large
from iris_ray.state.user_limits import UserLimits
from iris_ray.state.waiting_jobs import WaitingJobs

FINISHED_JOBS_KEPT = 1000
FINISHED_BYTES_KEPT = 128 << 20
FORGOTTEN_KEPT = 10_000
"""The largest number of forgotten jobs that are kept until `ControllerState.take_forgotten` removes them."""
TASK_BYTES = 1000
"""An upper bound for the memory of a task and its gang in bytes, without the text of errors."""


class JobTable:
    """Jobs by id, in the order of submission.

    Attributes:
        jobs: all jobs.
        yielding: the unfinished jobs that yield their hosts to any waiting job.
        grouped_by: attribute → ids of the unfinished jobs that group hosts by it.
        finished: job id → memory in bytes, of the finished jobs in the order of their ends.
        unrecorded, changes, changed_specs, queue_version, yields_version: see the properties of `ControllerState`.
        event_log: the latest events of each job.
        forgotten: totals of forgotten jobs that were not taken yet.
    """

    def __init__(self, limits: UserLimits) -> None:
        self.jobs: dict[str, Job] = {}
        self.yielding: dict[str, Job] = {}
        self.grouped_by: dict[str, set[str]] = {}
        self.finished: dict[str, int] = {}
        self.unrecorded: dict[str, set[int]] = {}
        self.changes: ChangeLog[str] = ChangeLog()
        self.changed_specs: ChangeLog[JobSpec] = ChangeLog()
        self.queue_version = 0
        self.yields_version = 0
        self.event_log = EventLog()
        self.forgotten: deque[ForgottenJob] = deque(maxlen=FORGOTTEN_KEPT)
        self._limits = limits
        self._waiting = WaitingJobs()
        self._not_sorted_in: set[str] = set()  # ids of jobs changed since `waiting` was last read
        self._submitted = 0
        self._finished_bytes = 0
        self._finished_in_order = True

    # -- finding ---------------------------------------------------------------------------------------------------

    @property
    def waiting(self) -> WaitingJobs:
        """The jobs that have gangs waiting for hosts."""
        waiting = []
        for job_id in self._not_sorted_in:
            job = self.jobs.get(job_id)
            if job is not None and _is_queued(job):
                waiting.append(job)
            else:
                self._waiting.discard(job_id)
        for job in sorted(waiting, key=attrgetter("number")):
            self._waiting.sort_in(job)
        self._not_sorted_in.clear()
        return self._waiting

    def known(self, job_id: str) -> Job:
        """Return a job by id.

        Raises:
            IllegalTransitionError: there is no such job.
        """
        if job_id not in self.jobs:
            raise IllegalTransitionError(f"there is no job {job_id}")
        return self.jobs[job_id]

    def gang(self, job: Job, position: int) -> Gang:
        """Return a gang of a job by its position.

        Raises:
            IllegalTransitionError: the job has no such gang.
        """
        if not 0 <= position < len(job.gangs):
            raise IllegalTransitionError(f"job {job.spec.job_id} has no gang {position}")
        return job.gangs[position]

    def live(self, attempt: AttemptId) -> tuple[Job, Gang] | None:
        """Return an attempt's job and gang, or None if the attempt is not live.

        Raises:
            IllegalTransitionError: the job has no such gang.
        """
        job = self.jobs.get(attempt.job_id)
        if job is None or job.state.finished:
            return None
        gang = self.gang(job, attempt.gang)
        return (job, gang) if gang.attempt == attempt.number and gang.placed else None

    # -- changing --------------------------------------------------------------------------------------------------

    def submit(self, spec: JobSpec, now: float) -> Job | None:
        """Add a new job and return it, or return None for a duplicate submission.

        Raises:
            IllegalTransitionError: there is a different job with this id.
        """
        known = self.jobs.get(spec.job_id)
        if known is not None:
            if known.spec != spec:
                raise IllegalTransitionError(f"job {spec.job_id} is there already, with another spec")
            return None
        tasks = new_gangs(spec.job_id, spec.num_gangs, spec.most_tasks_per_gang)
        gangs = [Gang(of_gang, waiting_since=now) for of_gang in tasks]
        self._submitted += 1
        job = self.jobs[spec.job_id] = Job(
            spec=spec,
            number=self._submitted,
            submitted_at=now,
            requirement=spec.requirement,
            gangs=gangs,
            counts=Counter({TaskState.PENDING: sum(len(gang.tasks) for gang in gangs)}),
            pending=dict.fromkeys(range(len(gangs))),
        )
        self._add_to_groups(spec)
        self._limits.submitted(spec)
        self.all_changed(job)
        self.queue_changed(spec.job_id)
        return job

    def hold_back(self, job: Job) -> None:
        """Keep a job that awaits other jobs out of the queue until `enters`."""
        self._not_sorted_in.add(job.spec.job_id)

    def enters(self, *jobs: Job, now: float) -> None:
        """Put a job that awaited other jobs, or a group represented by its first job, into the queue.

        Their waiting time begins now, unless they had entered the queue under an earlier Controller.
        """
        for job in jobs:
            if not job.ready_at:
                job.ready_at = now
                for gang in job.gangs:
                    gang.waiting_since = now
                self.all_changed(job)
        self.queue_changed(jobs[0].spec.job_id)

    def restore(self, job: Job) -> None:
        """Add a job from an earlier Controller's record."""
        job_id = job.spec.job_id
        self.jobs[job_id] = job
        self._submitted = max(self._submitted, job.number)
        if job.state.finished:
            self._note_finished(job)
            self._finished_in_order = False  # jobs are restored in the order of submission
        else:
            self._add_to_groups(job.spec)
            self._limits.submitted(job.spec)
        if job.yields and not job.state.finished:
            self.yielding[job_id] = job
        self.all_changed(job)

    def changed(self, job_id: str) -> None:
        """Record a change of a job that does not concern its gangs."""
        if (job := self.jobs.get(job_id)) is not None:
            self._note(job)

    def gang_changed(self, job: Job, *gangs: Gang) -> None:
        """Record a change of gangs or of their attempts' resources."""
        chunks = self._note(job)
        if is_large(job):
            chunks.update(chunk_of(gang.position) for gang in gangs)

    def all_changed(self, job: Job) -> None:
        """Record a change of a job with all its gangs, or its removal."""
        self._note(job).update(chunks_in(job))

    def show_anew(self, job_id: str) -> None:
        """Add a job to `changes`."""
        self.changes.note(job_id, self._most_changes)

    @property
    def _most_changes(self) -> int:
        return 4 * len(self.jobs) + 1000

    def _note(self, job: Job) -> set[int]:
        """Log a change, and return the job's set of record chunks to be rewritten."""
        job_id = job.spec.job_id
        self.show_anew(job_id)
        self.changed_specs.note(job.spec, self._most_changes)
        self._not_sorted_in.add(job_id)
        return self.unrecorded.setdefault(job_id, set())

    def queue_changed(self, job_id: str) -> None:
        """Record a change of the queue by a gang of this job."""
        self.queue_version += 1
        self.changed(job_id)

    def waits(self, job: Job, gang: Gang) -> None:
        """Put a gang back into the queue, behind the others of its job."""
        job.requeues += 1
        gang.requeued = job.requeues
        job.pending[gang.position] = None
        self.gang_changed(job, gang)
        self.queue_changed(job.spec.job_id)

    def dequeue(self, job: Job, *gangs: Gang) -> None:
        """Remove gangs of a job from the queue: they have hosts or have ended."""
        for gang in gangs:
            job.pending.pop(gang.position, None)
        self.gang_changed(job, *gangs)

    def set_yields(self, job_id: str, yields: bool) -> None:
        """Set whether a job yields its hosts to any waiting job.

        Raises:
            IllegalTransitionError: there is no such job, or it has several gangs.
        """
        job = self.known(job_id)
        if len(job.gangs) != 1:
            raise IllegalTransitionError(f"{job_id} has {len(job.gangs)} gangs; only a job of one gang yields")
        if job.state.finished or job.yields is yields:
            return
        job.yields = yields
        self.yields_version += 1
        if yields:
            self.yielding[job_id] = job
        else:
            del self.yielding[job_id]
        self.queue_changed(job_id)

    def has_finished(self, job_id: str) -> None:
        """Record that a job has finished."""
        job = self.jobs[job_id]
        job.over = job.state
        self._note_finished(job)
        self._limits.ended(job.spec)
        self._remove_from_groups(job.spec)
        self.yielding.pop(job_id, None)
        self.queue_changed(job_id)

    def remove(self, job_id: str) -> Job:
        """Remove a job that holds no resources, and return it."""
        job = self.jobs.pop(job_id)
        self._finished_bytes -= self.finished.pop(job_id, 0)
        self.all_changed(job)
        self._remove_from_groups(job.spec)
        self.yielding.pop(job_id, None)
        self.event_log.forget(job_id)
        self.queue_changed(job_id)
        return job

    def forget_old(self, allocations: Allocations) -> None:
        """Forget the jobs that finished first, once their attempts hold no resources.

        At most `FINISHED_JOBS_KEPT` jobs in `FINISHED_BYTES_KEPT` bytes are kept, and always the last that finished.
        """
        if not self._finished_in_order:
            self._finished_in_order = True
            self.finished = dict(
                sorted(self.finished.items(), key=lambda item: self.jobs[item[0]].times.ended_at or 0.0)
            )
        count, taken = len(self.finished), self._finished_bytes
        forgotten = []
        for job_id, size in islice(self.finished.items(), count - 1):
            if count <= FINISHED_JOBS_KEPT and taken <= FINISHED_BYTES_KEPT:
                break
            count, taken = count - 1, taken - size
            if not allocations.of(job_id):
                forgotten.append(job_id)
        for job_id in forgotten:
            self.forgotten.extend(times_of_forgotten(self.remove(job_id)))

    def _add_to_groups(self, spec: JobSpec) -> None:
        if spec.coscheduling:
            self.grouped_by.setdefault(spec.coscheduling.group_by, set()).add(spec.job_id)

    def _remove_from_groups(self, spec: JobSpec) -> None:
        if spec.coscheduling and (ids := self.grouped_by.get(spec.coscheduling.group_by)):
            ids.discard(spec.job_id)
            if not ids:
                del self.grouped_by[spec.coscheduling.group_by]

    def _note_finished(self, job: Job) -> None:
        if job.spec.job_id not in self.finished:
            size = self.finished[job.spec.job_id] = _memory_of(job)
            self._finished_bytes += size


def _is_queued(job: Job) -> bool:
    """Return whether a job is in the queue: it does not await other jobs, and no leader of a group represents it."""
    if not job.pending or job.awaits or job.state.finished:
        return False
    return bool(job.members) or not job.forms_group


def _memory_of(job: Job) -> int:
    """Return a finished job's approximate memory in bytes. An error that tasks share counts once."""
    words = {id(task.error): len(task.error) for gang in job.gangs for task in gang.tasks if task.error}
    return TASK_BYTES * job.size + 4 * sum(words.values())


# -- transitions -------------------------------------------------------------------------------------------------------

_SUCCESS_PATH = (TaskState.PENDING, TaskState.ASSIGNED, TaskState.RUNNING, TaskState.SUCCEEDED)
STATES_TO_SUCCESS = {state: _SUCCESS_PATH[i + 1 :] for i, state in enumerate(_SUCCESS_PATH)}
"""State → the states that a task still passes through until it has succeeded."""


def new_gangs(job_id: str, gangs: int, size: int) -> list[list[Task]]:
    """Make the tasks of a new job by gang; ``size`` is the number of tasks in each gang."""
    return [[Task(task_id(job_id, i), i) for i in range(gang * size, (gang + 1) * size)] for gang in range(gangs)]


def move(job: Job, gang: Gang, task: Task, new: TaskState, error: str | None = None) -> None:
    """Change a task's state, and update the counts of its job and gang. The only function that changes task states.

    Raises:
        IllegalTransitionError: `TRANSITIONS` does not allow this.
    """
    if new not in TRANSITIONS[task.state]:
        raise IllegalTransitionError(f"{task.task_id} (attempt {gang.attempt}): {task.state.name} → {new.name}")
    job.counts[task.state] -= 1
    if not job.counts[task.state]:
        del job.counts[task.state]
    job.counts[new] += 1
    gang.succeeded += (new is TaskState.SUCCEEDED) - (task.state is TaskState.SUCCEEDED)
    task.state, task.error = new, error


def move_all(job: Job, gang: Gang, new: TaskState, error: str | None = None) -> None:
    """Change the state of every task of a gang."""
    for task in gang.tasks:
        move(job, gang, task, new, error)


# -- event log ---------------------------------------------------------------------------------------------------------

EVENTS_KEPT = 12
"""The number of latest events that are kept for a job, and for each gang."""
GANGS_KEPT = 10_000
"""The largest number of gangs, of jobs with several gangs, whose events are kept: those with the latest events."""

_Events = list[tuple[int, float, Event]]
"""The latest events, oldest first, each with its number and time."""

_SHOWN = ("task_index", "new_state", "node_id", "group_names", "owner")
"""Fields to show in addition to the attempt. Others may contain users' text: errors, reasons, or the job."""


class EventLog:
    """The latest events of each job and, if it has several gangs, of each gang, which explain a refused event."""

    def __init__(self) -> None:
        self._of_jobs: dict[str, _Events] = {}  # by job id
        self._of_gangs: OrderedDict[tuple[str, int], _Events] = OrderedDict()  # the latest, by job id and gang
        self._gangs: defaultdict[str, set[int]] = defaultdict(set)  # the keys of `_of_gangs`, by job id
        self._count = count()

    @property
    def job_ids(self) -> Set[str]:
        """The ids of the jobs with events."""
        return self._of_jobs.keys() | self._gangs.keys()

    def add(self, job_id: str, gang: int | None, event: Event, now: float) -> None:
        """Add an event for the gang at a position, or for the whole job if ``gang`` is None."""
        events = self._of_jobs.setdefault(job_id, []) if gang is None else self._of_gang(job_id, gang)
        events.append((next(self._count), now, event))
        del events[:-EVENTS_KEPT]

    def forget(self, job_id: str) -> None:
        """Drop the events of a forgotten job."""
        self._of_jobs.pop(job_id, None)
        for gang in self._gangs.pop(job_id, ()):
            del self._of_gangs[job_id, gang]

    def lines(self, job_id: str, gang: int | None) -> tuple[str, ...]:
        """Return the latest events of a job and of one of its gangs, a line each, oldest first."""
        of_gang = () if gang is None else self._of_gangs.get((job_id, gang), ())
        events = sorted((*self._of_jobs.get(job_id, ()), *of_gang), key=itemgetter(0))
        return tuple(f"{now:.3f} {_as_line(event)}" for _, now, event in events[-EVENTS_KEPT:])

    def _of_gang(self, job_id: str, gang: int) -> _Events:
        """Return a gang's events, and mark them as the most recently used."""
        key = job_id, gang
        events = self._of_gangs.setdefault(key, [])
        self._of_gangs.move_to_end(key)
        self._gangs[job_id].add(gang)
        if len(self._of_gangs) > GANGS_KEPT:
            self._forget_oldest()
        return events

    def _forget_oldest(self) -> None:
        (job_id, gang), _ = self._of_gangs.popitem(last=False)
        self._gangs[job_id].remove(gang)
        if not self._gangs[job_id]:
            del self._gangs[job_id]


def _as_line(event: Event) -> str:
    """Return an event's class and its fields that can't contain users' text."""
    words = [type(event).__name__]
    if (attempt := getattr(event, "attempt", None)) is not None:
        words.append(str(attempt))
    shown = ((name, getattr(event, name)) for name in _SHOWN if hasattr(event, name))
    return ", ".join([*words, *(f"{name}={getattr(value, 'name', value)}" for name, value in shown)])


# -- job times ---------------------------------------------------------------------------------------------------------
# `model/goodput.py` measures the use of these times, for jobs that are one gang.


def note_assigned(job: Job, allocation: Allocation, now: float) -> None:
    """Record that an attempt of a job got its hosts, and settle earlier attempts to keep only a few."""
    if job.spec.is_one_gang:
        job.times.assigned(job.attempt, sum(demand.get(TPU, 0.0) for _, _, demand in allocation), now)
        settle(job.times, job.submitted_at)


def note_began(job: Job, now: float) -> None:
    """Record that a job's attempt runs user code."""
    if job.spec.is_one_gang:
        job.times.began(now)


def note_attempt_ended(job: Job, now: float) -> None:
    """Record the end of a job's attempt."""
    if job.spec.is_one_gang:
        job.times.ended(now)


def note_job_ended(job: Job, now: float) -> None:
    """Record the end of a job."""
    job.times.ended_at = now
    job.times.succeeded = job.over is JobState.SUCCEEDED


def is_measured(job: Job) -> bool:
    """Return whether a job's time is measured: the job is one gang and not a spare."""
    return job.spec.is_one_gang and job.spec.spare_for is None


def times_of_forgotten(job: Job) -> list[ForgottenJob]:
    """Return the totals of a finished job that is forgotten, or an empty list if its time is not measured."""
    if job.times.ended_at is None or not is_measured(job):
        return []
    ended_at = job.times.ended_at
    totals = Totals.of(measure(job.times, job.submitted_at, ended_at))
    return [ForgottenJob(job.spec.user, ended_at, totals, job.spec.team)]


# -- attempt history ---------------------------------------------------------------------------------------------------


def note_attempt_end(gang: Gang, now: float) -> None:
    """Record the end of a gang's attempt for its tasks that have not ended yet."""
    for task in gang.tasks:
        if task.ended_at is None:
            task.ended_at = now


def note_task_success(task: Task, now: float) -> None:
    """Record that a task has succeeded."""
    if task.started_at is None:
        task.started_at = now  # the RUNNING report was lost
    task.ended_at, task.exit_code = now, 0


def note_past(gang: Gang, state: TaskState, error: str, now: float, cause: Task | None) -> None:
    """Add a gang's ended attempt to its past attempts, before the gang is requeued.

    ``state`` is FAILED or WORKER_FAILED by the budget charged, or KILLED if none was. ``cause`` is the task that ended
    first, or None.
    """
    began = [task.started_at for task in gang.tasks if task.started_at is not None]
    past = PastAttempt(
        number=gang.attempt,
        state=state,
        groups=gang.groups,
        started_at=min(began, default=None),
        ended_at=now,
        cause=cause.index if cause else None,
        exit_code=cause.exit_code if cause else None,
        error=error[:ATTEMPT_ERROR_CHARACTERS],
    )
    others = (one for one in gang.past if one.number != gang.attempt)  # may be there if it has returned
    gang.past = (*others, past)[-ATTEMPTS_KEPT:]
    for task in gang.tasks:
        task.started_at = task.ended_at = task.exit_code = None
