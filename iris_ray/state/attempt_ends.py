"""Ends of attempts: the retry budget that is charged, the attempts that are stopped, and when hosts are freed.

`iris_ray.model.verdict` determines why an attempt ended. This module applies the consequences, once for each attempt.
"""

import math
from collections.abc import Iterable
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

from iris_ray.errors import IllegalTransitionError
from iris_ray.model.job_spec import JobSpec
from iris_ray.model.jobs import MOST_FAILED_LAUNCHES, Eviction, Gang, Job, Task
from iris_ray.model.lifecycle import AttemptId, TaskState
from iris_ray.model.notices import OUR_MOVES, NoticeKind
from iris_ray.model.time_lost import FailureCause
from iris_ray.model.workers import Worker
from iris_ray.state import job_table, quarantine
from iris_ray.state.events import (
    GangMovedEvent,
    GangReturnedEvent,
    JobCancelledEvent,
    TaskDispatchFailedEvent,
    TaskUnschedulableEvent,
)
from iris_ray.state.fleet import Allocations, Fleet
from iris_ray.state.instructions import Change, StopAttempt
from iris_ray.state.job_table import STATES_TO_SUCCESS, JobTable, move, move_all
from iris_ray.state.spares import Spares

BUDGET_S = 3600.0
"""The period of eviction budgets, for which the state remembers evictions, in seconds."""
MOST_SPARED_S = 3600.0
"""The longest time for which a gang is spared because of the work that its eviction lost; seconds."""


class Owner(NamedTuple):
    """A user or a team with an eviction budget."""

    name: str
    is_team: bool = False

    def __str__(self) -> str:
        return f"team {self.name}" if self.is_team else self.name


def owners(spec: JobSpec) -> tuple[Owner, ...]:
    """Return the owners of the eviction budgets that count a job's evictions: its user, its team and its ancestors."""
    return _owners(spec.user, spec.team)


@lru_cache(maxsize=10_000)
def _owners(user: str, team: str) -> tuple[Owner, ...]:
    teams = accumulate(team.split("/"), "{}/{}".format) if team else ()
    return Owner(user), *(Owner(name, is_team=True) for name in teams)


class AttemptEnds:
    """Ends attempts. When one task of a gang ends early, the gang's whole attempt ends.

    Attributes:
        evicted_at: the times of evictions in the past hour, by user and team; ascending, seconds.
    """

    def __init__(self, table: JobTable, fleet: Fleet, allocations: Allocations, spares: Spares) -> None:
        self.evicted_at: dict[Owner, list[float]] = {}
        self._table = table
        self._fleet = fleet
        self._allocations = allocations
        self._spares = spares

    def restored(self, job: Job, now: float) -> None:
        """Record the latest evictions of a restored job."""
        if times := [at for gang in job.gangs for at in gang.evicted_at]:
            self._note_evictions(job, times, now)

    def _note_evictions(self, job: Job, times: Iterable[float], now: float) -> None:
        for owner in owners(job.spec):
            known = (at for at in self.evicted_at.get(owner, ()) if at > now - BUDGET_S)
            self.evicted_at[owner] = sorted((*known, *times))

    # -- events ----------------------------------------------------------------------------------------------------

    def job_cancelled(self, event: JobCancelledEvent, change: Change) -> None:
        """Kill all gangs of an unfinished job. Spares can't be cancelled; they end with their job."""
        job = self._table.jobs.get(event.job_id)
        if job is not None and not job.state.finished and job.spec.spare_for is None:
            self.end_job(job, event.reason, change)

    def end_job(self, job: Job, reason: str, change: Change) -> None:
        """Kill all gangs of an unfinished job."""
        self._end_other_gangs(job, None, reason, change)
        job.error = reason
        change.instructions.finished.append(job.spec.job_id)

    def unschedulable(self, event: TaskUnschedulableEvent, change: Change) -> None:
        """End a job that never ran because one of its gangs can't be placed."""
        job = self._table.jobs.get(event.job_id)
        if job is None or job.state.finished:
            return
        gang = self._table.gang(job, event.task_index // len(job.gangs[0].tasks))
        if gang.pending and not job.started:  # else it has run after all
            self._give_up(job, gang, event.reason, change)

    def never_runs(self, job: Job, reason: str, change: Change) -> None:
        """End a job that never ran because one of its conditions on other jobs can no longer be met."""
        self._give_up(job, job.gangs[0], reason, change)

    def dispatch_failed(self, event: TaskDispatchFailedEvent, change: Change) -> None:
        """Requeue a gang whose launch failed. It pauses, and its job avoids hosts that may be at fault.

        No budget is charged; a job that has never run may end; see `too_many_failed_launches`.
        """
        if (found := self._table.live(event.attempt)) is None:
            return
        job, gang = found
        if event.blames_hosts:
            quarantine.avoid(job, gang, event.groups, self._fleet, event.now)
        self._launch_failed(job, gang, event.error, change, event.counts)

    def gang_moved(self, event: GangMovedEvent, change: Change) -> None:
        """Requeue a gang that has ended its attempt in order to move, without charging a budget.

        If it ended because the job's ``max_runtime`` is nearly over, it does not run again, and once no gang of the job
        runs, the job ends.
        """
        if (found := self._table.live(event.attempt)) is not None:
            job, gang = found
            if (last := gang.notice) is not None and last.kind is NoticeKind.TIME_LIMIT:
                gang.not_before = last.deadline
                self._requeue(job, gang, event.reason, change.now, started=event.started)
                if not any(one.placed for one in job.gangs):
                    self.end_job(job, last.reason, change)
                return
            if gang.eviction is not None:
                if event.started:
                    gang.heeds_notices = change.now < gang.eviction.deadline
                self._gives_way(job, gang, gang.eviction, change, event.started)
                return
            is_growth = gang.notice is None or gang.notice.kind in OUR_MOVES
            job.times.failed(FailureCause.GROWN if is_growth else FailureCause.PREEMPTED)
            returns_to_move(job, gang, change.now)
            self._requeue(job, gang, event.reason, change.now, started=event.started)

    def evicted(self, job: Job, gang: Gang, change: Change) -> None:
        """Stop the attempt of an evicted gang that has not moved by its deadline."""
        assert gang.eviction is not None
        if gang.running_since < math.inf:
            gang.heeds_notices = False
        reason = f"evicted: {gang.eviction.reason}"
        change.instructions.stop.append(StopAttempt(job.current_attempt(gang), reason, is_eviction=True))
        self._gives_way(job, gang, gang.eviction, change, started=gang.running_since < math.inf)

    def gang_returned(self, event: GangReturnedEvent, change: Change) -> None:
        """Mark a gang as succeeded: the caller has the results of an attempt that the state had already ended."""
        attempt, job = event.attempt, self._table.jobs.get(event.attempt.job_id)
        if job is None or job.state.finished or job.spec.spare_for is not None:
            return
        gang = self._table.gang(job, attempt.gang)
        if attempt.number > gang.attempt or not (gang.placed or gang.pending):
            return
        if gang.placed:
            self._end_attempt(job, gang, f"attempt {attempt.number} has returned all results", change)
        for task in gang.tasks:
            for state in STATES_TO_SUCCESS[task.state]:
                move(job, gang, task, state)
            job_table.note_task_success(task, change.now)
        self._table.dequeue(job, gang)
        self._table.queue_changed(attempt.job_id)
        self._spares.look_at(job)
        if job.state.finished:
            change.instructions.finished.append(attempt.job_id)

    def worker_lost(self, worker: Worker, reason: str, change: Change) -> None:
        """End the attempts that ran on a lost worker."""
        for task_id, attempt in worker.occupants:
            if attempt not in self._allocations.of(attempt.job_id):
                continue  # this attempt's end was confirmed before, and an earlier iteration has ended its job
            job = self._table.jobs[attempt.job_id]
            self._allocations.let_go(job, worker.node_id, attempt)
            self._table.gang_changed(job, job.gangs[attempt.gang])
            if (found := self._table.live(attempt)) is not None:
                job, gang = found
                task = next(task for task in gang.tasks if task.task_id == task_id)
                self.member_ended(job, gang, task, TaskState.WORKER_FAILED, reason, change, has_begun(gang))

    def pool_restarted(self, owner: str, change: Change) -> None:
        """Requeue all gangs of a pool whose process died, including those whose results were not delivered.

        The cause is unknown. The process ran with the driver and not on the gang's hosts, so each gang is charged a
        preemption. This includes gangs with results: otherwise a job whose results don't fit into memory would be
        retried for ever. A gang that repeatedly loses its pool within seconds after its start is charged failures
        instead, like a gang that loses tasks on healthy hosts. If no task of a gang has run, its launch has failed.
        """
        reason = "the process of its SlicePoolManager died"
        for attempt in self._allocations.of_owner(self._table.jobs, owner):
            job = self._table.jobs.get(attempt.job_id)
            if job is None or job.spec.spare_for is not None:
                continue  # a spare is dropped when its job's attempt ends
            if (found := self._table.live(attempt)) is not None:
                _, gang = found
                self._end_without_pool(job, gang, reason, change)
                self._spares.look_at(job)
            self.confirmed(attempt)
        for job in [job for job in self._table.jobs.values() if job.spec.owner == owner and not job.state.finished]:
            for gang in job.gangs:
                if gang.succeeded == len(gang.tasks) and not job.state.finished:
                    lost = "its results were lost: " + reason
                    self.member_ended(job, gang, gang.tasks[0], TaskState.WORKER_FAILED, lost, change, started=True)

    def lost_before_start(self, job: Job, gang: Gang, reason: str, change: Change) -> None:
        """Stop an attempt that lost a task before any task ran, as a failed launch."""
        change.instructions.stop.append(StopAttempt(job.current_attempt(gang), reason))
        self._launch_failed(job, gang, reason, change)

    def _end_without_pool(self, job: Job, gang: Gang, reason: str, change: Change) -> None:
        if not has_begun(gang):
            self.lost_before_start(job, gang, reason, change)
        else:
            cause = next(task for task in gang.tasks if task.state is not TaskState.SUCCEEDED)
            self.member_ended(job, gang, cause, TaskState.WORKER_FAILED, reason, change, started=True)

    def confirmed(self, attempt: AttemptId) -> None:
        """Free the resources of an attempt whose processes are all gone.

        The confirmation may overtake the tasks' own reports. The tasks then stay active and hold their hosts until
        the last report arrives.

        Raises:
            IllegalTransitionError: the attempt has never existed.
        """
        job = self._table.jobs.get(attempt.job_id)
        if job is None:
            return
        gang = self._table.gang(job, attempt.gang)
        if attempt.number > gang.attempt:
            raise IllegalTransitionError(f"{attempt} can't be over; there have been {gang.attempt}")
        if attempt.number == gang.attempt and gang.placed:
            gang.end_confirmed = True
            self._table.gang_changed(job, gang)
        elif self._allocations.end(job, attempt):
            self._table.gang_changed(job, gang)

    # -- shared --------------------------------------------------------------------------------------------------

    def member_ended(
        self,
        job: Job,
        gang: Gang,
        cause: Task,
        state: TaskState,
        error: str,
        change: Change,
        started: bool,
        exit_code: int | None = None,
        is_hopeless: bool = False,
        is_hang: bool = False,
    ) -> None:
        """Charge a retry budget for the end of a task, then requeue its whole gang or end it.

        Args:
            job, gang, cause: the job, the gang, and the task that ended first.
            state: FAILED or WORKER_FAILED; selects the budget.
            error: the first cause, for people.
            change: collects the instructions.
            started: whether any task of the attempt ran.
            exit_code: the task's exit code; None if unknown.
            is_hopeless: whether the gang ends even if its budget allows more attempts.
            is_hang: whether the attempt ended because no task made progress for too long.
        """
        cause.exit_code = exit_code
        self._table.gang_changed(job, gang)
        job.started = job.started or started
        if started:
            count_quick_end(gang, change.now)
            if counts_as_failure(gang, cause, self._fleet.workers.get(cause.node_id or "")):
                state = TaskState.FAILED
        job.times.failed(failure_cause(gang, state, is_hang))
        exhausted = charge(job, gang, state, started) or is_hopeless
        if started and (report := without_progress(job, gang, error)) is not None:
            exhausted, error = True, report
            state = state if cause.state is TaskState.SUCCEEDED else TaskState.FAILED
        elif state is TaskState.FAILED and job.too_many_failures:
            error += (
                f" (attempts of the job failed {job.failures} times; max_task_failures={job.spec.max_task_failures})"
            )
        self._end_attempt(job, gang, error, change)
        if not exhausted:
            returns_after_end(job, gang, state, started, change.now)
            self._requeue(job, gang, error, change.now, state, cause, started)
            return
        job.error = gang.error = error
        move(job, gang, cause, state, error)
        siblings = [task for task in gang.tasks if task is not cause]
        because = f"{cause.task_id} ended the gang: {error}" if siblings else None
        for sibling in siblings:
            move(job, gang, sibling, TaskState.COSCHED_FAILED, because)
        if job.state.finished:
            self._end_other_gangs(job, gang, f"{cause.task_id} ended the job: {error}", change)
            change.instructions.finished.append(job.spec.job_id)

    def mark_ending(self, job: Job, gang: Gang, now: float) -> None:
        """Mark a gang's attempt as ended. It holds its hosts until its end is confirmed, if it isn't already."""
        gang.notice = gang.eviction = None
        job_table.note_attempt_ended(job, now)
        self._allocations.mark_ending(job.current_attempt(gang), now)
        if gang.end_confirmed:
            gang.end_confirmed = False
            self._allocations.end(job, job.current_attempt(gang))

    def _launch_failed(self, job: Job, gang: Gang, error: str, change: Change, counts: bool = True) -> None:
        returns_after_failed_launch(gang, change.now, counts)
        if gang.dispatch_failures >= MOST_FAILED_LAUNCHES:
            error = f"{gang.dispatch_failures} launches in a row failed; the last one: {error}"
        self._requeue(job, gang, error, change.now)
        if counts and too_many_failed_launches(job, gang):
            self._give_up(job, gang, error, change)

    def _give_up(self, job: Job, gang: Gang, reason: str, change: Change) -> None:
        """End a job as unschedulable because one of its waiting gangs can't be started."""
        move_all(job, gang, TaskState.UNSCHEDULABLE, reason)
        self._table.gang_changed(job, gang)
        self._end_other_gangs(job, gang, f"{gang.tasks[0].task_id} is unschedulable: {reason}", change)
        job.error = gang.error = reason
        change.instructions.finished.append(job.spec.job_id)

    def _end_other_gangs(self, job: Job, cause: Gang | None, reason: str, change: Change) -> None:
        """Kill all unfinished gangs of a job except the cause, and stop their attempts."""
        for gang in job.gangs:
            if gang is cause or not (gang.placed or gang.pending):
                continue
            if gang.placed:
                self._end_attempt(job, gang, reason, change)
            move_all(job, gang, TaskState.KILLED, reason)
        job.pending.clear()
        self._table.all_changed(job)

    def _gives_way(self, job: Job, gang: Gang, eviction: Eviction, change: Change, started: bool) -> None:
        """Requeue an evicted gang without charging a budget. A gang that runs only once ends as preempted."""
        gang.evictions += 1
        job.evictions += 1
        if not job.yields:
            lately = (at for at in gang.evicted_at if at > change.now - BUDGET_S)
            gang.evicted_at = (*lately, change.now)
            if started:
                lost_s = change.now - gang.loses_since(change.now, eviction.deadline) + (job.times.back_s or 0.0)
                gang.spared_until = change.now + min(lost_s, MOST_SPARED_S)
            self._note_evictions(job, (change.now,), change.now)
        job.times.failed(FailureCause.EVICTED)
        if job.spec.runs_once and started:
            cause = next(task for task in gang.tasks if task.state is not TaskState.SUCCEEDED)
            error = f"evicted: {eviction.reason}"
            self.member_ended(job, gang, cause, TaskState.WORKER_FAILED, error, change, started)
            return
        job_table.note_attempt_end(gang, change.now)
        returns_after_eviction(job, gang, change.now)
        self._requeue(job, gang, f"evicted: {eviction.reason}", change.now)

    def _end_attempt(self, job: Job, gang: Gang, reason: str, change: Change) -> None:
        if gang.placed:  # otherwise all tasks have returned, and their results are lost
            change.instructions.stop.append(StopAttempt(job.current_attempt(gang), reason))
        job_table.note_attempt_end(gang, change.now)
        self.mark_ending(job, gang, change.now)

    def _requeue(
        self,
        job: Job,
        gang: Gang,
        error: str,
        now: float,
        state: TaskState = TaskState.KILLED,
        cause: Task | None = None,
        started: bool = False,
    ) -> None:
        """Put a gang back into the queue and record its attempt, with the charged budget and the task that ended first.

        The gang's layout is recorded if the attempt ran: if a task has reported so, or ``started`` is set.
        """
        if started or gang.running_since < math.inf:
            gang.last_ran = gang.layout
        job_table.note_past(gang, state, error, now, cause)
        self.mark_ending(job, gang, now)
        job.error = gang.error = error
        self._spares.look_at(job)
        for task in gang.tasks:
            move(job, gang, task, TaskState.PENDING, error)
            task.node_id = None
        self._table.waits(job, gang)


# -- retry budget ------------------------------------------------------------------------------------------------------

QUICK_S = 10.0
"""An attempt that ends within this many seconds after its start is a quick end."""
QUICK_ENDS_ARE_FAILURES = 5
"""After more than this number of consecutive quick ends, a task lost on a healthy host counts as a failure."""
MOST_LAUNCHES_BEFORE_A_RUN = 19
"""The number of consecutive failed launches of a gang after which a job that never ran ends. With the pauses between
them they take 34 minutes at least, so that a fault of some minutes on all hosts does not end the whole queue."""
YIELDED_S = 5.0
"""Seconds for which a yielding job waits after it has left its hosts to others."""
REPORTED_CHARACTERS = 100
"""The number of characters of each past attempt's error in the report on a job without progress."""
RETURNING_S = 30.0
"""Seconds for which a gang that has lost its hosts precedes the other gangs of its band."""


def has_begun(gang: Gang) -> bool:
    """Return whether any task of a gang's live attempt has run."""
    return any(task.state is not TaskState.ASSIGNED for task in gang.tasks)


def quick_end_backoff_s(quick_ends: int) -> float:
    """Return the pause after a number of consecutive quick ends, in seconds: 0, 0, 1, 2, 4, 8, 10, …"""
    return 0.0 if quick_ends < 2 else min(10.0, 2.0 ** min(quick_ends - 2, 10))


def dispatch_backoff_s(failures: int) -> float:
    """Return the pause after consecutive failed launches, in seconds: 0.5, 1, 2, … 30; later 60, 120, … 300."""
    if failures > MOST_FAILED_LAUNCHES:
        return float(min(300.0, 30.0 * 2 ** min(failures - MOST_FAILED_LAUNCHES, 10)))
    return float(min(30.0, 0.5 * 2 ** min(failures - 1, 10)))


def count_quick_end(gang: Gang, now: float) -> None:
    """Count consecutive quick ends. Called when an attempt that ran ends."""
    gang.quick_ends = gang.quick_ends + 1 if now < gang.running_since + QUICK_S else 0


def counts_as_failure(gang: Gang, lost: Task, worker: Worker | None) -> bool:
    """Return whether a lost task counts as failed: it was lost on a healthy host, after several quick ends in a row.

    The gang's quick ends must include this one. ``worker`` is the task's host, or None if the host is lost.
    """
    sound = worker is not None and not worker.draining
    return gang.quick_ends > QUICK_ENDS_ARE_FAILURES and sound and lost.state is not TaskState.SUCCEEDED


def failure_cause(gang: Gang, end: TaskState, is_hang: bool) -> FailureCause:
    """Return the cause to which the time lost by an attempt's early end is attributed.

    The gang must still have the notice of that attempt. ``end`` is FAILED or WORKER_FAILED, by the budget charged.
    """
    if is_hang:
        return FailureCause.HUNG
    if end is TaskState.FAILED:
        return FailureCause.CRASHED
    was_told = gang.notice is not None and gang.notice.kind not in OUR_MOVES
    return FailureCause.PREEMPTED if was_told else FailureCause.LOST


def charge(job: Job, gang: Gang, end: TaskState, started: bool) -> bool:
    """Charge a retry budget for the end of a gang's attempt. Return whether that budget is exhausted.

    ``end`` is FAILED or WORKER_FAILED and selects the budget. A host lost before any task ``started`` costs nothing.
    """
    spec = job.spec
    if end is TaskState.FAILED:
        gang.failures += 1
        job.failures += 1
        return gang.failures > spec.max_retries_failure or job.too_many_failures
    gang.preemptions += started
    job.preemptions += started
    return gang.preemptions > spec.max_retries_preemption


def without_progress(job: Job, gang: Gang, error: str) -> str | None:
    """Count consecutive attempts without a new step. Return a report if the job ends because of them, otherwise None.

    Called before the attempt, which ended with ``error``, is added to the gang's past attempts.
    """
    most = job.spec.stop_without_progress
    if most is None:
        return None
    steps = job.times.attempts[-1].marks.steps if job.times.attempts else ()
    if steps and (job.furthest_step is None or steps[-1][0] > job.furthest_step):
        job.furthest_step, job.fruitless = steps[-1][0], 0
        return None
    job.fruitless += 1
    if job.fruitless < most:
        return None
    beyond = "any step" if job.furthest_step is None else f"a step beyond {job.furthest_step}"
    earlier = [f"attempt {past.number}: {past.error[:REPORTED_CHARACTERS]}" for past in gang.past][1 - most :]
    return (
        f"{job.fruitless} attempts in a row have not made {beyond}, as many as stop_without_progress allows. "
        + "; ".join([*(earlier if most > 1 else ()), f"attempt {gang.attempt}: {error}"])
    )


def returns_after_end(job: Job, gang: Gang, end: TaskState, started: bool, now: float) -> None:
    """Set when a gang whose attempt has ended can be scheduled again. If no task ran, it keeps its queue position."""
    if started:
        gang.waiting_since = now
        gang.not_before = now + quick_end_backoff_s(gang.quick_ends)
        _comes_first(job, gang, gang.not_before)
    if end is TaskState.WORKER_FAILED:
        gang.groups_wanted = max(gang.groups_wanted, len(gang.groups))


def returns_after_failed_launch(gang: Gang, now: float, counts: bool) -> None:
    """Set when a gang whose launch failed can be scheduled again: after a pause.

    Its wait towards the backfill bound restarts, because the gang has had its turn.
    """
    gang.dispatch_failures += counts
    gang.not_before = now + dispatch_backoff_s(max(1, gang.dispatch_failures))
    gang.waiting_since = now


def too_many_failed_launches(job: Job, gang: Gang) -> bool:
    """Return whether a job ends because too many consecutive launches of a gang failed. Spares are retried for ever.

    A job that never ran ends after `MOST_LAUNCHES_BEFORE_A_RUN`, or else at its ``scheduling_timeout``. A job that has
    run may have days of work to lose: it waits until a launch succeeds, and says why.
    """
    if job.spec.spare_for is not None or job.started:
        return False
    return job.spec.scheduling_timeout is None and gang.dispatch_failures >= MOST_LAUNCHES_BEFORE_A_RUN


def returns_to_move(job: Job, gang: Gang, now: float) -> None:
    """Let a gang that moves be scheduled again at once."""
    gang.waiting_since = now
    gang.quick_ends = 0  # it has saved its state
    _comes_first(job, gang, now)


def returns_after_eviction(job: Job, gang: Gang, now: float) -> None:
    """Let an evicted gang be scheduled again at once, or after a pause if its job yields."""
    gang.waiting_since = now
    gang.quick_ends = 0
    gang.groups_wanted = max(gang.groups_wanted, len(gang.groups))
    if job.yields:
        gang.not_before = now + YIELDED_S
    _comes_first(job, gang, now)


def _comes_first(job: Job, gang: Gang, since: float) -> None:
    """Let a gang that has just run precede the others of its band. Spares don't, since replacements are urgent."""
    if job.spec.spare_for is None:
        gang.returning_until = since + RETURNING_S
