"""Promises: hosts reserved for a job until it runs there, and the evictions of attempts that occupy them.

`iris_ray.scheduler.promises` chooses the hosts and the victims. A spare leaves at once. Gangs of lower bands and jobs
that yield get a notice and are stopped at a deadline. If the promise ends first, victims that still run may continue.
"""

import heapq
from collections.abc import Collection, Mapping
from dataclasses import replace

from iris_ray.errors import IllegalTransitionError
from iris_ray.model.jobs import Eviction, Gang, Job, Promise
from iris_ray.model.lifecycle import AttemptId
from iris_ray.model.notices import NoticeKind
from iris_ray.state.attempt_ends import AttemptEnds
from iris_ray.state.events import PromiseEvent
from iris_ray.state.instructions import Change
from iris_ray.state.job_table import JobTable
from iris_ray.state.spares import GangNotices, SpareJobs
from iris_ray.state.team_use import TeamUse


class Promises:
    """The promised hosts of all jobs.

    Attributes:
        version: the number of changes so far.
    """

    def __init__(self, table: JobTable) -> None:
        self._table = table
        self.version = 0
        self._promised: dict[str, str] = {}  # node_id → job id

    def job_for(self, node_id: str | None) -> str | None:
        """Return the id of the job to which a host is promised, or None."""
        return self._promised.get(node_id or "")

    def promise(self, event: PromiseEvent, workers: Collection[str]) -> Job:
        """Promise exactly these hosts to a job, and return it. Other jobs that were promised any of them lose theirs.

        Args:
            event: the job, the hosts, and the attempts that are asked to leave for the job from now on.
            workers: node ids of all live hosts.

        Raises:
            IllegalTransitionError: the job does not wait, or a host is lost.
        """
        job_id, node_ids = event.job_id, event.node_ids
        job = self._table.known(job_id)
        if node_ids and not job.pending:
            raise IllegalTransitionError(f"job {job_id} does not wait; nothing is promised to it")
        if gone := [node_id for node_id in node_ids if node_id not in workers]:
            raise IllegalTransitionError(f"job {job_id}: {gone} are gone and can't be promised to it")
        promise = _changed(job.promise, event) if node_ids else None
        if job.promise != promise:
            self._drop(job)
            for node_id in node_ids:
                self.release_host(node_id)
            self._note(job, promise)
            self._table.changed(job_id)
        return job

    def kept_by(self, job: Job, node_ids: Collection[str], lent_by: Collection[str], returns: bool) -> None:
        """Record that a job gets hosts, which fulfils its promise and ends some promises of these hosts to other jobs.

        A promise stays if its job is in ``lent_by``, the jobs that lend the hosts. A promise without victims to a job
        of the same band or a higher one also stays if the job is a gang that ``returns`` to the hosts. A job of
        independent tasks keeps promised hosts for its remaining tasks. If the job gives up some of its hosts, the queue
        counts as changed, so that the next plan is made at once.
        """
        if (promise := job.promise) is not None:
            left = () if job.spec.coscheduling else tuple(i for i in promise.node_ids if i not in node_ids)
            left = left[: len(job.pending)]
            if not set(promise.node_ids) <= {*left, *node_ids}:
                self._table.queue_changed(job.spec.job_id)
            self._drop(job)
            self._note(job, replace(promise, node_ids=left) if left else None)
        for node_id in node_ids if self._promised else ():
            other = self._table.jobs.get(self._promised.get(node_id, ""))
            if other is None or other.promise is None:
                continue
            if other.spec.job_id in lent_by:
                self._lend(other, other.promise, job.spec.job_id)
            elif other.spec.priority > job.spec.priority or other.promise.is_firm or not returns:
                self.release(other)

    def _lend(self, job: Job, promise: Promise, to: str) -> None:
        """Record that a job with a reservation lends a host to another job, and forget loans that have ended."""
        jobs = self._table.jobs
        last = (one for one in promise.lent if one in jobs and any(gang.placed for gang in jobs[one].gangs))
        job.promise = replace(promise, lent=(*dict.fromkeys((*last, to)),))
        self._table.changed(job.spec.job_id)

    def release(self, job: Job) -> None:
        """End a job's promise."""
        if job.promise is not None:
            self._drop(job)
            self._table.queue_changed(job.spec.job_id)

    def release_host(self, node_id: str) -> None:
        """Revoke the whole promise that a host belongs to: the host is lost or goes to another job."""
        if (job_id := self._promised.get(node_id)) is not None:
            self.release(self._table.jobs[job_id])

    def restored(self, job: Job, workers: Collection[str]) -> None:
        """Restore an earlier Controller's promise to a job, if all its hosts are still alive."""
        promise, job.promise = job.promise, None
        if promise is None or not job.pending or job.state.finished:
            return
        if all(node_id in workers and node_id not in self._promised for node_id in promise.node_ids):
            self._note(job, promise)

    def _drop(self, job: Job) -> None:
        self.version += 1
        for node_id in job.promise.node_ids if job.promise is not None else ():
            del self._promised[node_id]
        job.promise = None

    def _note(self, job: Job, promise: Promise | None) -> None:
        self.version += 1
        job.promise = promise
        if promise is not None:
            self._promised.update(dict.fromkeys(promise.node_ids, job.spec.job_id))

    def check(self, workers: Mapping[str, object]) -> None:
        """Raise AssertionError if the promises disagree with the jobs and hosts. For tests."""
        jobs = self._table.jobs
        promised = [(i, job_id) for job_id, job in jobs.items() if job.promise for i in job.promise.node_ids]
        assert self._promised == dict(promised)
        assert len(self._promised) == len(promised), "a host is promised to two jobs"
        for node_id, job_id in promised:
            assert node_id in workers, f"{node_id} is promised to {job_id} and gone"
            assert jobs[job_id].pending, f"{node_id} is promised to {job_id}, which does not wait"


class Evictions:
    """The attempts that must leave promised hosts to other jobs, with their deadlines."""

    def __init__(
        self,
        table: JobTable,
        promises: Promises,
        notices: GangNotices,
        spares: SpareJobs,
        ends: AttemptEnds,
        teams: TeamUse,
    ) -> None:
        self._table = table
        self._teams = teams
        self._promises = promises
        self._notices = notices
        self._spares = spares
        self._ends = ends
        self._victims: dict[AttemptId, None] = {}  # attempts that were given a notice; some may have ended
        self._due: list[tuple[float, AttemptId]] = []  # a heap: deadlines and attempts
        self._settled_for = 0  # the version of the promises

    # -- events ----------------------------------------------------------------------------------------------------

    def promise(self, event: PromiseEvent, workers: Collection[str], change: Change) -> None:
        """Promise hosts to a job, and ask the victims on these hosts to leave, unless they have ended in the meantime.

        Raises:
            IllegalTransitionError: the promise isn't possible, or a victim holds none of the hosts or need not leave.
        """
        victims = [one for attempt in event.leave if (one := self._table.live(attempt)) is not None]
        for victim, gang in victims:
            self._check(victim, gang, event)
        job = self._promises.promise(event, workers)
        for victim, gang in victims:
            if victim.spec.spare_for is not None:
                self._spares.give_back(victim, change)
            elif gang.eviction is None:
                deadline = gang.leaves_by(change.now, event.deadline)
                self._give_notice(victim, gang, Eviction(event.job_id, deadline, self._reason(job, victim)), change)

    def time_passed(self, change: Change) -> None:
        """Stop the attempts whose deadline has passed."""
        while self._due and self._due[0][0] <= change.now:
            _, attempt = heapq.heappop(self._due)
            found = self._table.live(attempt)
            if found is None or (eviction := found[1].eviction) is None:
                self._victims.pop(attempt, None)
            elif eviction.deadline <= change.now:
                self._ends.evicted(*found, change)
                self._victims.pop(attempt, None)

    def tree_changed(self) -> None:
        """Revoke the promises for which attempts of other teams are still to leave, since the rights have changed.

        The next plan decides anew.
        """
        for attempt in self.attempts:
            victim, gang = self._table.jobs[attempt.job_id], self._table.jobs[attempt.job_id].gangs[attempt.gang]
            taker = self._table.jobs.get(gang.eviction.job_id) if gang.eviction is not None else None
            if taker is not None and taker.spec.team != victim.spec.team:
                self._promises.release(taker)

    @property
    def attempts(self) -> list[AttemptId]:
        """The attempts that are being evicted."""
        found = ((attempt, self._table.live(attempt)) for attempt in self._victims)
        return [attempt for attempt, one in found if one is not None and one[1].eviction is not None]

    def restored(self, job: Job) -> None:
        """Resume the evictions of a restored job."""
        for gang in job.gangs:
            if gang.eviction is not None:
                self._note(job.current_attempt(gang), gang.eviction)
                self._settled_for = -1  # records may be from different times

    def settle(self, change: Change) -> None:
        """Cancel the evictions of attempts whose hosts are no longer promised to any job.

        If an attempt leaves for several jobs and one of them loses its promise, the attempt leaves for the others.
        """
        if self._victims and self._settled_for != self._promises.version:
            self._settled_for = self._promises.version
            for attempt in list(self._victims):
                if (found := self._table.live(attempt)) is None or (eviction := found[1].eviction) is None:
                    del self._victims[attempt]
                elif self._gives_way(attempt, found[1], eviction.job_id):
                    continue
                elif (taker := self._taker(attempt, found[1])) is not None:
                    reason = self._reason(taker, found[0])
                    self._give_notice(*found, Eviction(taker.spec.job_id, eviction.deadline, reason), change)
                else:
                    del self._victims[attempt]
                    self._goes_on(*found, change)

    # -- parts -----------------------------------------------------------------------------------------------------

    def _check(self, victim: Job, gang: Gang, event: PromiseEvent) -> None:
        """Refuse a victim that is not allowed to be evicted for a job."""
        who = f"{victim.current_attempt(gang)} does not leave its hosts to {event.job_id}"
        is_idle = victim.yields or victim.spec.spare_for is not None
        taker = self._table.known(event.job_id)
        taking, lent = taker.spec, taker.promise is not None and victim.spec.job_id in taker.promise.lent
        by_quota = self._teams.share_quotas(taking, victim.spec)
        if not is_idle and not by_quota and not lent and victim.spec.priority <= taking.priority:
            raise IllegalTransitionError(f"{who}: it is of no lower band, and of no other team")
        if not any(task.node_id in event.node_ids for task in gang.tasks):
            raise IllegalTransitionError(f"{who}: they are not promised to that job")

    def _taker(self, attempt: AttemptId, gang: Gang) -> Job | None:
        """Return a job for which an attempt leaves its hosts, or None."""
        takers = filter(None, (self._promises.job_for(task.node_id) for task in gang.tasks))
        return next((self._table.jobs[one] for one in takers if self._gives_way(attempt, gang, one)), None)

    def _reason(self, job: Job, victim: Job) -> str:
        """Return the reason for which a gang leaves its hosts, for people."""
        taker = f"{job.spec.job_id} of {job.spec.user}"
        if job.promise is not None and victim.spec.job_id in job.promise.lent:
            return f"its hosts were lent to it until {taker}, for which they are reserved, can run"
        if victim.yields:
            return f"its owner has no use for its hosts now, and {taker} waits"
        if self._teams.share_quotas(job.spec, victim.spec):
            whose = f"the quota of team {job.spec.team}" if job.spec.team else "the quota that no team has"
            return f"{taker} takes back hosts within {whose}, and its own team has more than its quota"
        what = "its chips" if job.promise is not None and job.promise.removed_by else "its hosts"
        return f"{job.spec.priority.name} job {taker} takes {what} from {victim.spec.priority.name}"

    def _gives_way(self, attempt: AttemptId, gang: Gang, job_id: str) -> bool:
        """Return whether an attempt is a victim of a job's promise, and one of its hosts is promised to the job."""
        job = self._table.jobs.get(job_id)
        if job is None or job.promise is None or str(attempt) not in job.promise.given_up:
            return False
        return any(self._promises.job_for(task.node_id) == job_id for task in gang.tasks)

    def _give_notice(self, victim: Job, gang: Gang, eviction: Eviction, change: Change) -> None:
        gang.eviction = eviction
        self._table.gang_changed(victim, gang)
        self._spares.look_at(victim)  # it does not grow while it is evicted
        self._note(victim.current_attempt(gang), eviction)
        self._notices.tell(victim, gang, eviction.notice, change)

    def _note(self, attempt: AttemptId, eviction: Eviction) -> None:
        self._victims[attempt] = None
        heapq.heappush(self._due, (eviction.deadline, attempt))

    def _goes_on(self, job: Job, gang: Gang, change: Change) -> None:
        """Cancel an eviction. Tasks that have read the notice keep it."""
        gang.eviction = None
        if gang.notice is not None and gang.notice.kind is NoticeKind.EVICTION:
            gang.notice = None
        self._table.gang_changed(job, gang)
        self._spares.look_at(job)
        self._notices.tell_host_notices(job, gang, change)

    # -- checking --------------------------------------------------------------------------------------------------

    def check(self, jobs: Mapping[str, Job]) -> None:
        """Raise AssertionError if the evictions disagree with the jobs. For tests."""
        for job_id, job in jobs.items():
            for gang in job.gangs:
                told = gang.notice is not None and gang.notice.kind is NoticeKind.EVICTION
                if (eviction := gang.eviction) is None:
                    assert not told, f"{job_id} has notice of an eviction, and is not evicted"
                    continue
                attempt, taker = job.current_attempt(gang), jobs[eviction.job_id]
                assert gang.placed, f"{job_id} is evicted but does not run"
                assert gang.notice is not None, f"{job_id} is evicted without notice"
                assert job.spec.spare_for is None, f"{job_id} is a spare, which is dropped at once"
                assert self._gives_way(attempt, gang, eviction.job_id), f"{job_id}: no job takes its hosts"
                assert taker.pending, f"{job_id} gives way to {eviction.job_id}, which does not wait"
                assert attempt in self._victims, f"{job_id}: its eviction is not known"
                assert (eviction.deadline, attempt) in self._due, f"{job_id}: its eviction has no end"


def _changed(before: Promise | None, event: PromiseEvent) -> Promise:
    """Return the new promise. It keeps the victims of the earlier one, unless it has new hosts and no victims."""
    node_ids, given_up = event.node_ids, tuple(map(str, event.leave))
    goes_on = before is not None and (given_up or {*node_ids} <= {*before.node_ids})
    told = tuple(dict.fromkeys((*before.given_up, *given_up))) if before and goes_on else given_up
    return Promise(node_ids, told, before.lent if before is not None else (), event.removed_by)
