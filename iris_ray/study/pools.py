"""The simulated pools: they launch attempts, report how these end, and obey stops and notices.

They report what `iris_ray.actors.pool.gang_run` reports, in the same order: `all_reached` and `attempt_over`. The end
of an attempt is confirmed when its last process is gone. Broken slices are released then, others after a while.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from iris_ray.model.goodput import Marks
from iris_ray.model.jobs import Gang, Job
from iris_ray.model.lifecycle import AttemptId, TaskState
from iris_ray.model.notices import OUR_MOVES, Notice, NoticeKind
from iris_ray.model.outcomes import Fault
from iris_ray.model.parts import shape_of_part, slice_of
from iris_ray.model.workers import Worker
from iris_ray.scheduler.planner import PlacedGang
from iris_ray.state import ControllerState
from iris_ray.state.events import (
    AttemptMarkedEvent,
    AttemptSavesEvent,
    Event,
    GangMovedEvent,
    SliceReleasedEvent,
    TaskDispatchFailedEvent,
    TaskStateChangedEvent,
    WorkerBlamedEvent,
    all_reached,
    attempt_over,
)
from iris_ray.state.groups import part_name
from iris_ray.state.instructions import Instructions, NotifyGang, StopAttempt
from iris_ray.study.agenda import Agenda, Timings
from iris_ray.study.history import History
from iris_ray.study.jobs import SimulatedJob


@dataclass(slots=True)
class SimulatedAttempt:
    """One attempt that has not ended.

    Attributes:
        owner: the id of its pool.
        work: its job; None for a spare.
        slices: names of its slices, or of its parts of slices; empty for tasks that share hosts.
        tasks: indexes of its tasks.
        node_id: the host of its first task.
        speed: seconds of work that it does in a second.
        began_at: when its tasks began to run; infinite before that.
    """

    id: AttemptId
    owner: str
    work: SimulatedJob | None
    slices: tuple[str, ...]
    tasks: range
    node_id: str
    speed: float
    began_at: float = math.inf

    @property
    def is_elastic(self) -> bool:
        """Whether its job can use several numbers of slices, so that what a move costs it counts."""
        return self.work is not None and len(self.work.spec.groups_per_gang) > 1


STEPS_SEEN_S = 20.0
"""Seconds after which a gang that can grow has made two steps, and its pool has told the Controller."""


class SimulatedPools:
    """All pools of a simulation.

    Args:
        state: the Controller's state; only `apply` changes it.
        apply: takes events.
        look_at: requests a plan at a time.
        history: records what happens.
        timings: how long actions take.

    Attributes:
        bad_hosts: ids of hosts where no launch succeeds.
    """

    def __init__(
        self,
        agenda: Agenda,
        state: ControllerState,
        apply: Callable[[Iterable[Event]], None],
        look_at: Callable[[float], None],
        history: History,
        timings: Timings,
    ) -> None:
        self.bad_hosts: set[str] = set()
        self._agenda = agenda
        self._state = state
        self._apply = apply
        self._look_at = look_at
        self._history = history
        self._timings = timings
        self._work: dict[str, SimulatedJob] = {}
        self._live: dict[AttemptId, SimulatedAttempt] = {}
        self._saved: dict[tuple[str, int], float] = {}  # job id and gang → seconds of work
        self._warm: dict[str, str] = {}  # slice → owner that has processes there
        self._uses: Counter[str] = Counter()  # by slice

    # -- orders ----------------------------------------------------------------------------------------------------

    def accept(self, work: SimulatedJob) -> None:
        """Take a job that is about to be submitted."""
        self._work[work.spec.job_id] = work

    def carry_out(self, instructions: Instructions, placements: Iterable[PlacedGang]) -> None:
        """Obey the state's instructions, and start the gangs that have got hosts."""
        for stop in instructions.stop:
            self._stop(stop)
        dropped = [spare.job_id for spare in instructions.dropped]
        for job_id in dropped:
            self._drop(job_id)
        for placement in placements:
            if placement.job.spec.job_id in dropped:  # the same plan has placed it
                self._history.freed(placement.job.current_attempt(placement.gang), self._agenda.now)
            else:
                self._start(placement)
        for told in instructions.notices:
            self._notify(told)
        for job_id in instructions.finished:
            self._forget(job_id)

    def finish(self, job_id: str) -> None:
        """Have all running tasks of a job return now."""
        for attempt in [attempt for attempt in self._live.values() if attempt.id.job_id == job_id]:
            if attempt.began_at <= self._agenda.now:
                self._returned(attempt)

    def host_is_lost(self, worker: Worker) -> None:
        """Note that a host is lost: the pools keep no processes on its slice, or on its parts of the slice."""
        for name in [name for name in self._warm if slice_of(name) == worker.slice_name]:
            if (shape := shape_of_part(name)) is None or part_name(worker, shape) == name:
                owner = self._warm.pop(name)
                if not any(name in attempt.slices for attempt in self._live.values()):
                    self._apply([SliceReleasedEvent(name, owner)])

    # -- an attempt's course ---------------------------------------------------------------------------------------

    def _start(self, placement: PlacedGang) -> None:
        """Start a gang's attempt once the holders of its slices have released them."""
        job, gang, pause = placement.job, placement.gang, 0.0
        for wanted in placement.reclaim:
            pause = self._timings.reclaim
            self._warm.pop(wanted.slice_name, None)
            self._agenda.after(pause, self._apply, (SliceReleasedEvent(wanted.slice_name, wanted.holder),))
        attempt = self._attempt(job, gang)
        self._live[attempt.id] = attempt
        if self._will_fail(attempt, gang):
            self._agenda.after(pause + self._timings.failed_launch, self._launch_failed, attempt)
            return
        warm = bool(attempt.slices) and all(self._warm.get(name) == attempt.owner for name in attempt.slices)
        self._uses.update(attempt.slices)
        self._warm.update(dict.fromkeys(attempt.slices, attempt.owner))
        seconds = self._timings.warm_launch if warm else self._timings.launch
        self._agenda.after(pause + seconds, self._launched, attempt)

    def _attempt(self, job: Job, gang: Gang) -> SimulatedAttempt:
        spec = job.spec
        most = max(spec.groups_per_gang)
        slices = gang.groups if job.requirement.chips else ()
        first = gang.tasks[0]
        tasks = range(first.index, first.index + len(gang.tasks))
        work = self._work[spec.job_id] if spec.spare_for is None else None
        attempt_id, speed = job.current_attempt(gang), len(gang.groups) / most
        return SimulatedAttempt(attempt_id, spec.owner, work, slices, tasks, first.node_id or "", speed)

    def _will_fail(self, attempt: SimulatedAttempt, gang: Gang) -> bool:
        hopeless = attempt.work is not None and attempt.work.launch_fails
        return hopeless or any(task.node_id in self.bad_hosts for task in gang.tasks)

    def _goes_to_another_team(self, attempt: SimulatedAttempt) -> bool:
        team = self._state.jobs[attempt.id.job_id].spec.team
        takers = (job for job in self._state.pending() if job.promise and attempt.node_id in job.promise.node_ids)
        return any(job.spec.team != team for job in takers)

    def _launch_failed(self, attempt: SimulatedAttempt) -> None:
        if self._live.pop(attempt.id, None) is not None:
            self._history.ended(attempt.id, self._agenda.now, "no launch", 0.0)
            failed = TaskDispatchFailedEvent(attempt.id, "its processes could not be started", self._agenda.now)
            self._confirm(attempt, failed)

    def _launched(self, attempt: SimulatedAttempt) -> None:
        if attempt.id not in self._live:
            return
        attempt.began_at = self._agenda.now
        self._history.began(attempt.id, self._agenda.now)
        self._report(attempt, TaskState.RUNNING)
        if (work := attempt.work) is None:
            return
        if attempt.is_elastic:
            self._agenda.after(STEPS_SEEN_S, self._tell_steps, attempt)
        if work.heeds_notices:
            self._apply([AttemptSavesEvent(attempt.id, heeds_notices=True)])
        elif work.save_every_s < math.inf:
            self._agenda.after(work.save_every_s / attempt.speed, self._saved_again, attempt, work)
        left_s = (work.run_s - self._saved.get(_key(attempt.id), 0.0)) / attempt.speed
        if work.fails_after_s < left_s:
            self._agenda.after(work.fails_after_s, self._failed, attempt, work)
        else:
            self._agenda.after(left_s, self._returned, attempt)

    def _saved_again(self, attempt: SimulatedAttempt, work: SimulatedJob) -> None:
        """Report a regular save. Those of gangs that save when they are told to leave don't matter."""
        if attempt.id in self._live:
            now, every_s = self._agenda.now, work.save_every_s / attempt.speed
            is_first = now < attempt.began_at + 1.5 * every_s
            self._apply([AttemptSavesEvent(attempt.id, now, math.inf if is_first else every_s)])
            self._agenda.after(every_s, self._saved_again, attempt, work)

    def _tell_steps(self, attempt: SimulatedAttempt) -> None:
        if attempt.id in self._live:
            self._apply([self._marked(attempt)])

    def _marked(self, attempt: SimulatedAttempt) -> AttemptMarkedEvent:
        """Return the report of the steps of an attempt that runs, each a second of work."""
        before, ran = self._saved.get(_key(attempt.id), 0.0), self._agenda.now - attempt.began_at
        first, last = int(before), int(before + ran * attempt.speed)
        later = ((last, min(ran, (last - before) / attempt.speed)),) if last > first else ()
        return AttemptMarkedEvent(attempt.id, Marks(((first, 0.0), *later)))

    def _returned(self, attempt: SimulatedAttempt) -> None:
        if attempt.id in self._live:
            self._end(attempt, "success", saved=True)
            self._report(attempt, TaskState.SUCCEEDED)
            self._agenda.after(self._timings.exit, self._confirm, attempt)

    def _failed(self, attempt: SimulatedAttempt, work: SimulatedJob) -> None:
        if attempt.id not in self._live:
            return
        self._end(attempt, "failure")
        error, events = "it failed", list[Event]()
        if work.crashes:
            events.append(WorkerBlamedEvent(attempt.node_id, attempt.id.job_id, error, Fault.CRASH))
        events.append(TaskStateChangedEvent(attempt.id, attempt.tasks[0], TaskState.FAILED, error))
        self._agenda.after(self._timings.stop, self._confirm, attempt, *events)

    def _stop(self, stop: StopAttempt) -> None:
        if (attempt := self._live.get(stop.attempt)) is not None:
            self._end(attempt, "evicted" if stop.is_eviction else "stopped")
            self._agenda.after(self._timings.stop, self._confirm, attempt)

    def _drop(self, job_id: str) -> None:
        for attempt in [attempt for attempt in self._live.values() if attempt.id.job_id == job_id]:
            self._end(attempt, "dropped")
            self._history.freed(attempt.id, self._agenda.now)
            self._apply(self._broken(attempt))
            self._leave(attempt)

    # -- notices ---------------------------------------------------------------------------------------------------

    def _notify(self, told: NotifyGang) -> None:
        attempt = self._live.get(told.attempt)
        if attempt is None or attempt.work is None:
            return
        work, notice, now = attempt.work, told.notice, self._agenda.now
        if notice.kind is NoticeKind.EVICTION and self._goes_to_another_team(attempt):
            self._history.reclaimed.setdefault(attempt.id, now)
        if attempt.began_at > now:
            if notice.kind is not NoticeKind.GROWTH:
                self._launch_failed(attempt)
        elif work.heeds_notices and now + work.save_s <= notice.deadline:
            self._agenda.after(work.save_s, self._move, attempt, notice, True)
        elif notice.kind is NoticeKind.GROWTH:
            self._agenda.at(notice.deadline, self._move, attempt, notice, False)
        if notice.kind is NoticeKind.EVICTION:
            self._look_at(notice.deadline)  # it is stopped then

    def _move(self, attempt: SimulatedAttempt, notice: Notice, saved: bool) -> None:
        """End an attempt so that its gang can run elsewhere, unless the move is called off."""
        job = self._state.jobs.get(attempt.id.job_id)
        if attempt.id not in self._live or job is None:
            return
        known = job.gangs[attempt.id.gang].notice
        if known is None or known.kind is not notice.kind:
            return
        self._end(attempt, "evicted" if notice.kind is NoticeKind.EVICTION else "moved", saved)
        lost = TaskStateChangedEvent(attempt.id, attempt.tasks[0], TaskState.WORKER_FAILED, notice.reason)
        event = GangMovedEvent(attempt.id, notice.reason) if notice.kind in OUR_MOVES else lost
        self._agenda.after(self._timings.stop, self._confirm, attempt, event)

    # -- shared ----------------------------------------------------------------------------------------------------

    def _report(self, attempt: SimulatedAttempt, state: TaskState) -> None:
        self._apply(all_reached(attempt.id, attempt.tasks, state))

    def _end(self, attempt: SimulatedAttempt, outcome: str, saved: bool = False) -> None:
        """Note that an attempt has ended, and how much of its work is saved: all, or up to the last regular save."""
        del self._live[attempt.id]
        now, kept_s = self._agenda.now, 0.0
        if attempt.is_elastic and attempt.began_at <= now:
            self._apply([self._marked(attempt)])
        if attempt.work is not None and attempt.began_at <= now:
            done = (now - attempt.began_at) * attempt.speed
            if not saved:
                every_s = attempt.work.save_every_s
                done = done // every_s * every_s if every_s < math.inf else 0.0
            self._saved[_key(attempt.id)] = self._saved.get(_key(attempt.id), 0.0) + done
            kept_s = done / attempt.speed
        self._history.ended(attempt.id, now, outcome, kept_s)

    def _confirm(self, attempt: SimulatedAttempt, *events: Event) -> None:
        """Report other events about the end of an attempt, and then that its last process is gone."""
        self._apply(attempt_over(attempt.id, events, self._broken(attempt)))
        self._history.freed(attempt.id, self._agenda.now)
        self._leave(attempt)
        job = self._state.jobs.get(attempt.id.job_id)
        if job is not None and (gang := job.gangs[attempt.id.gang]).pending:
            for when in (gang.not_before, gang.returning_until, job.avoided_until):
                if when > self._agenda.now:
                    self._look_at(when)

    def _broken(self, attempt: SimulatedAttempt) -> list[SliceReleasedEvent]:
        gone = (name for name in attempt.slices if self._warm.get(name) != attempt.owner)
        return [SliceReleasedEvent(name, attempt.owner) for name in gone]

    def _leave(self, attempt: SimulatedAttempt) -> None:
        """Keep the unbroken slices of an attempt warm for a while."""
        job = self._state.jobs.get(attempt.id.job_id)
        goes_on = job is not None and not job.state.finished
        keep_s = self._timings.keep_warm if goes_on or attempt.work is None else attempt.work.keep_warm_s
        for name in [name for name in attempt.slices if self._warm.get(name) == attempt.owner]:
            if keep_s > 0:
                self._agenda.after(keep_s, self._release_idle, name, attempt.owner, self._uses[name])
            else:
                self._release_idle(name, attempt.owner, self._uses[name])

    def _release_idle(self, name: str, owner: str, uses: int) -> None:
        if self._warm.get(name) == owner and self._uses[name] == uses:
            del self._warm[name]
            self._apply([SliceReleasedEvent(name, owner)])

    def _forget(self, job_id: str) -> None:
        work = self._work.pop(job_id, None)
        job = self._state.jobs.get(job_id)
        if work is not None and job is not None:
            self._history.finished(job_id, job.state.name, self._agenda.now)
            for gang in job.gangs:
                self._saved.pop((job_id, gang.position), None)


def _key(attempt: AttemptId) -> tuple[str, int]:
    return attempt.job_id, attempt.gang
