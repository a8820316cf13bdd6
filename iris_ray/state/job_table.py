"""All jobs, with the indexes over them: waiting, finished, changed since they were last recorded."""

from collections import Counter, deque
from itertools import islice

from iris_ray.errors import IllegalTransitionError
from iris_ray.goodput.user_times import ForgottenJob
from iris_ray.model.ids import AttemptId
from iris_ray.model.job_spec import JobSpec
from iris_ray.model.jobs import Gang, Job
from iris_ray.model.lifecycle import TaskState
from iris_ray.state import job_times
from iris_ray.state.allocations import Allocations
from iris_ray.state.change_log import ChangeLog
from iris_ray.state.records import chunk_of, chunks_in, is_large
from iris_ray.state.stories import Stories
from iris_ray.state.transitions import new_tasks
from iris_ray.state.user_limits import UserLimits

FINISHED_JOBS_KEPT = 1000
FINISHED_BYTES_KEPT = 128 << 20
FORGOTTEN_KEPT = 10_000
"""What is remembered of so many forgotten jobs waits until it is taken."""
TASK_BYTES = 1000
"""What a task and its gang take of memory at most, besides the words about their end."""


class JobTable:
    """Jobs by id, in the order of submission.

    Attributes:
        jobs: all of them.
        pending: those that have gangs waiting for hosts.
        yielding: those that have not ended and give their hosts to whoever waits.
        grouped_by: attribute → ids of those that have not ended and whose groups share a value of it.
        finished: ids of those that have ended, the first to finish first; each with the memory that the job takes.
        unrecorded: ids of jobs that have changed, or are forgotten, since the caller last cleared it; each with the
            numbers of the chunks of its record that have changed.
        changes: ids of jobs that have changed or are forgotten, for those who show them.
        queue_version: counts the changes to the queue.
        yields_version: counts the changes to which jobs yield.
        stories: the latest events of each job.
        forgotten: what is remembered of jobs that were forgotten since the caller last took it.
    """

    def __init__(self, limits: UserLimits) -> None:
        self.jobs: dict[str, Job] = {}
        self.pending: dict[str, Job] = {}
        self.yielding: dict[str, Job] = {}
        self.grouped_by: dict[str, set[str]] = {}
        self.finished: dict[str, int] = {}
        self.unrecorded: dict[str, set[int]] = {}
        self.changes: ChangeLog[str] = ChangeLog()
        self.queue_version = 0
        self.yields_version = 0
        self.stories = Stories()
        self.forgotten: deque[ForgottenJob] = deque(maxlen=FORGOTTEN_KEPT)
        self._limits = limits
        self._submitted = 0
        self._finished_bytes = 0
        self._finished_in_order = True

    # -- finding ---------------------------------------------------------------------------------------------------

    def known(self, job_id: str) -> Job:
        """Return a job.

        Raises:
            IllegalTransitionError: there is none of that id.
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
            raise IllegalTransitionError(f"job {job.spec.job_id} has no task {position}")
        return job.gangs[position]

    def live(self, attempt: AttemptId) -> tuple[Job, Gang] | None:
        """Return the job and the gang whose live attempt this is, or None if the attempt is not live.

        Raises:
            IllegalTransitionError: the job has no such gang.
        """
        job = self.jobs.get(attempt.job_id)
        if job is None or job.state.finished:
            return None
        gang = self.gang(job, attempt.gang)
        return (job, gang) if gang.attempt == attempt.number and gang.placed else None

    # -- changing --------------------------------------------------------------------------------------------------

    def submit(self, spec: JobSpec, now: float) -> None:
        """Add a new job. A submission that is delivered twice changes nothing.

        Raises:
            IllegalTransitionError: there is another job of this id.
        """
        known = self.jobs.get(spec.job_id)
        if known is not None:
            if known.spec != spec:
                raise IllegalTransitionError(f"job {spec.job_id} is there already, and asks for something else")
            return
        if spec.coscheduling:
            count = spec.replicas * max(spec.coscheduling.num_groups)
            gangs = [Gang(new_tasks(spec.job_id, count), waiting_since=now)]
        else:
            gangs = [Gang([task], waiting_since=now) for task in new_tasks(spec.job_id, spec.replicas)]
        self._submitted += 1
        job = self.jobs[spec.job_id] = self.pending[spec.job_id] = Job(
            spec=spec,
            number=self._submitted,
            submitted_at=now,
            requirement=spec.requirement,
            gangs=gangs,
            counts=Counter({TaskState.PENDING: sum(len(gang.tasks) for gang in gangs)}),
            pending=dict.fromkeys(range(len(gangs))),
        )
        self._is_grouped(spec)
        self._limits.submitted(spec)
        self.all_changed(job)
        self.queue_changed(spec.job_id)

    def restore(self, job: Job) -> None:
        """Add a job that an earlier Controller knew."""
        job_id = job.spec.job_id
        self.jobs[job_id] = job
        self._submitted = max(self._submitted, job.number)
        if job.state.finished:
            self._note_finished(job)
            self._finished_in_order = False  # jobs come back in the order of their submission
        else:
            self._is_grouped(job.spec)
            self._limits.submitted(job.spec)
        if job.pending and not job.state.finished:
            self.pending[job_id] = job
        if job.yields and not job.state.finished:
            self.yielding[job_id] = job
        self.all_changed(job)

    def changed(self, job_id: str) -> None:
        """Note that a job must be recorded again, but for its gangs."""
        self._note(job_id)

    def gang_changed(self, job: Job, gang: Gang) -> None:
        """Note that a gang, or what its attempts hold, must be recorded again."""
        chunks = self._note(job.spec.job_id)
        if is_large(job):
            chunks.add(chunk_of(gang.position))

    def all_changed(self, job: Job) -> None:
        """Note that a job must be recorded again with all its gangs, or that it is forgotten."""
        self._note(job.spec.job_id).update(chunks_in(job))

    def show_anew(self, job_id: str) -> None:
        """Note a job for those who show it."""
        self.changes.note(job_id, 4 * len(self.jobs) + 1000)

    def _note(self, job_id: str) -> set[int]:
        """Note a change, and return the chunks of the job's record that are to be recorded again."""
        self.show_anew(job_id)
        return self.unrecorded.setdefault(job_id, set())

    def queue_changed(self, job_id: str) -> None:
        """Note that the queue has changed by a gang of this job."""
        self.queue_version += 1
        self.changed(job_id)

    def waits(self, job: Job, gang: Gang) -> None:
        """Put a gang into the queue again, behind the others of its job."""
        job.requeues += 1
        gang.requeued = job.requeues
        job.pending[gang.position] = None
        self.pending[job.spec.job_id] = job
        self.gang_changed(job, gang)
        self.queue_changed(job.spec.job_id)

    def waits_no_more(self, job: Job, gang: Gang) -> None:
        """Take a gang out of the queue: it has hosts, or has ended."""
        job.pending.pop(gang.position, None)
        if not job.pending:
            self.pending.pop(job.spec.job_id, None)
        self.gang_changed(job, gang)

    def set_yields(self, job_id: str, yields: bool) -> None:
        """Note that a job gives its hosts to whoever waits, or does so no more.

        Raises:
            IllegalTransitionError: there is no such job, or it is not one gang.
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
        """Note that a job has finished."""
        job = self.jobs[job_id]
        job.over = job.state
        self._note_finished(job)
        self._limits.ended(job.spec)
        self._is_grouped_no_more(job.spec)
        self.pending.pop(job_id, None)
        self.yielding.pop(job_id, None)
        self.queue_changed(job_id)

    def remove(self, job_id: str) -> None:
        """Forget a job that has not finished: a spare that is dropped."""
        job = self.jobs.pop(job_id)
        self.all_changed(job)
        self._is_grouped_no_more(job.spec)
        self.pending.pop(job_id, None)
        self.yielding.pop(job_id, None)
        self.stories.forget(job_id)
        self.queue_changed(job_id)

    def forget_old(self, allocations: Allocations) -> None:
        """Forget the jobs that finished first, beyond what is kept, once their attempts hold nothing.

        `FINISHED_JOBS_KEPT` are kept if they take no more than `FINISHED_BYTES_KEPT`; the last one always is.
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
            self._finished_bytes -= self.finished.pop(job_id)
            self.stories.forget(job_id)
            job = self.jobs.pop(job_id)
            self.all_changed(job)
            self.forgotten.extend(job_times.forgotten(job))

    def _is_grouped(self, spec: JobSpec) -> None:
        if spec.coscheduling:
            self.grouped_by.setdefault(spec.coscheduling.group_by, set()).add(spec.job_id)

    def _is_grouped_no_more(self, spec: JobSpec) -> None:
        if spec.coscheduling and (ids := self.grouped_by.get(spec.coscheduling.group_by)):
            ids.discard(spec.job_id)
            if not ids:
                del self.grouped_by[spec.coscheduling.group_by]

    def _note_finished(self, job: Job) -> None:
        if job.spec.job_id not in self.finished:
            size = self.finished[job.spec.job_id] = _memory_of(job)
            self._finished_bytes += size


def _memory_of(job: Job) -> int:
    """Return how many bytes of memory a finished job takes, roughly. Words that tasks share count once."""
    words = {id(task.error): len(task.error) for gang in job.gangs for task in gang.tasks if task.error}
    return TASK_BYTES * job.size + 4 * sum(words.values())
