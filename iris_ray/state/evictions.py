"""Evictions: a job that waits takes hosts from lower bands. Their gangs get notice, and are stopped at a deadline.

Jobs that yield are evicted in the same way, for any job that waits. `iris_ray.scheduler.evictions` chooses the victims.
The hosts are kept for the job that takes them (`Job.kept`). Once they are not kept for it any more, because it has got
others or does not wait any more, victims that still run go on.
"""

import heapq
from collections.abc import Collection, Mapping

from iris_ray.errors import IllegalTransitionError
from iris_ray.model.jobs import Eviction, Gang, Job
from iris_ray.model.lifecycle import AttemptId
from iris_ray.model.notices import NoticeKind
from iris_ray.state.attempt_ends import AttemptEnds
from iris_ray.state.events import EvictionEvent, GivesWayEvent
from iris_ray.state.instructions import Change
from iris_ray.state.job_table import JobTable
from iris_ray.state.spares import GangNotices, SpareJobs


class KeptRoom:
    """Keeps hosts for jobs that have waited too long: no other job of their bands gets these hosts until they run.

    Attributes:
        version: counts the changes.
    """

    def __init__(self, table: JobTable) -> None:
        self._table = table
        self.version = 0
        self._kept: dict[str, str] = {}  # node_id → job id

    def whose(self, node_id: str | None) -> str | None:
        """Return the id of the job that a host is kept for, or None."""
        return self._kept.get(node_id or "")

    def keep(self, job_id: str, node_ids: tuple[str, ...], workers: Collection[str]) -> None:
        """Keep exactly these hosts for a job, or nothing if there are none. Jobs that lose one of theirs lose all.

        Raises:
            IllegalTransitionError: the job does not wait, or a host is gone.
        """
        job = self._table.known(job_id)
        if node_ids and not job.pending:
            raise IllegalTransitionError(f"job {job_id} does not wait; nothing is kept for it")
        if gone := [node_id for node_id in node_ids if node_id not in workers]:
            raise IllegalTransitionError(f"job {job_id}: {gone} are gone and can't be kept for it")
        if job.kept == node_ids:
            return
        self._drop(job)
        for node_id in node_ids:
            self.release_host(node_id)
        self._restore(job, node_ids)
        self._table.changed(job_id)

    def taken_by(self, job: Job, node_ids: Collection[str]) -> None:
        """Note that a job gets hosts: it needs no more room, and jobs of lower bands lose the room that it takes.

        A job whose tasks are placed one by one still keeps room for its other tasks. Only if the job leaves some of
        its room to others does the queue count as changed, so that a plan is made at once.
        """
        left = () if job.spec.coscheduling else tuple(node_id for node_id in job.kept if node_id not in node_ids)
        left = left[: len(job.pending)]
        if left != job.kept:
            if not set(job.kept) <= {*left, *node_ids}:
                self._table.queue_changed(job.spec.job_id)
            self._drop(job)
            self._restore(job, left)
        for node_id in node_ids if self._kept else ():
            other = self._table.jobs.get(self._kept.get(node_id, ""))
            if other is not None and other.spec.priority > job.spec.priority:
                self.release(other)

    def release(self, job: Job) -> None:
        """Keep nothing for a job any more."""
        if job.kept:
            self._drop(job)
            self._table.queue_changed(job.spec.job_id)

    def release_host(self, node_id: str) -> None:
        """Note that a host is gone or goes to another job: the job that it was kept for needs other room."""
        if (job_id := self._kept.get(node_id)) is not None:
            self.release(self._table.jobs[job_id])

    def restored(self, job: Job, workers: Collection[str]) -> None:
        """Keep what an earlier Controller kept for a job, if all these hosts are still there."""
        kept, job.kept = job.kept, ()
        if job.pending and not job.state.finished and all(i in workers and i not in self._kept for i in kept):
            self._restore(job, kept)

    def _drop(self, job: Job) -> None:
        self.version += 1
        for node_id in job.kept:
            del self._kept[node_id]
        job.kept = ()

    def _restore(self, job: Job, node_ids: tuple[str, ...]) -> None:
        self.version += 1
        job.kept = node_ids
        self._kept.update(dict.fromkeys(node_ids, job.spec.job_id))

    def check(self, workers: Mapping[str, object]) -> None:
        """Raise AssertionError if this disagrees with the jobs and hosts. For tests."""
        jobs = self._table.jobs
        assert self._kept == {node_id: job_id for job_id, job in jobs.items() for node_id in job.kept}
        assert sum(len(job.kept) for job in jobs.values()) == len(self._kept), "a host is kept for two jobs"
        for node_id, job_id in self._kept.items():
            assert node_id in workers, f"{node_id} is kept for {job_id} and gone"
            assert jobs[job_id].pending, f"{node_id} is kept for {job_id}, which does not wait"


class Evictions:
    """Knows which attempts are to give their hosts to another job, and until when."""

    def __init__(
        self, table: JobTable, kept: KeptRoom, notices: GangNotices, spares: SpareJobs, ends: AttemptEnds
    ) -> None:
        self._table = table
        self._kept = kept
        self._notices = notices
        self._spares = spares
        self._ends = ends
        self._victims: dict[AttemptId, None] = {}  # attempts that were told; some may be over
        self._due: list[tuple[float, AttemptId]] = []  # a heap: when which attempt is stopped
        self._settled_for = 0  # the version of the kept room

    # -- events ----------------------------------------------------------------------------------------------------

    def begin(self, event: EvictionEvent, change: Change) -> None:
        """Give notice to attempts whose hosts a job takes, unless they have it or have ended meanwhile.

        Raises:
            IllegalTransitionError: the job takes none of a victim's hosts, or may not.
        """
        job = self._table.known(event.job_id)
        victims = [found for attempt in event.victims if (found := self._table.live(attempt)) is not None]
        for victim, gang in victims:
            self._check(victim, gang, job)
        for victim, gang in victims:
            if victim.spec.spare_for is not None:
                self._spares.evict(victim, change)
            elif gang.eviction is None:
                self._evict(victim, gang, job, event.deadline, change)

    def give_way(self, event: GivesWayEvent, change: Change) -> None:
        """Give notice to a job that yields its hosts to jobs that wait. The hosts are kept for none of these.

        Raises:
            IllegalTransitionError: the job does not yield.
        """
        job = self._table.known(event.job_id)
        if not job.yields:
            raise IllegalTransitionError(f"{event.job_id} does not yield its hosts")
        if job.gang.placed and job.gang.eviction is None:
            eviction = Eviction("", event.deadline, "its owner has no use for its hosts now, and others wait")
            self._give_notice(job, job.gang, eviction, change)

    def time_passed(self, change: Change) -> None:
        """Stop the attempts whose deadline has come."""
        while self._due and self._due[0][0] <= change.now:
            _, attempt = heapq.heappop(self._due)
            found = self._table.live(attempt)
            if found is None or (eviction := found[1].eviction) is None:
                self._victims.pop(attempt, None)
            elif eviction.deadline <= change.now:
                self._ends.evicted(*found, change)
                self._victims.pop(attempt, None)

    @property
    def attempts(self) -> list[AttemptId]:
        """The attempts that are about to give their hosts to other jobs."""
        found = ((attempt, self._table.live(attempt)) for attempt in self._victims)
        return [attempt for attempt, one in found if one is not None and one[1].eviction is not None]

    def restored(self, job: Job) -> None:
        """Resume the evictions of a restored job."""
        for gang in job.gangs:
            if gang.eviction is not None:
                self._note(job.current_attempt(gang), gang.eviction)
                self._settled_for = -1  # records may be of different moments

    def settle(self, change: Change) -> None:
        """Call off the evictions whose hosts are not kept for the other job any more."""
        if self._victims and self._settled_for != self._kept.version:
            self._settled_for = self._kept.version
            for attempt in list(self._victims):
                if (found := self._table.live(attempt)) is None or found[1].eviction is None:
                    del self._victims[attempt]
                elif not self._gives_way(found[1], found[1].eviction.job_id):
                    del self._victims[attempt]
                    self._goes_on(*found, change)

    # -- parts -----------------------------------------------------------------------------------------------------

    def _check(self, victim: Job, gang: Gang, job: Job) -> None:
        """Refuse a victim that is not of a lower band, or whose hosts are not kept for the job."""
        who = f"{victim.current_attempt(gang)} does not give its hosts to {job.spec.job_id}"
        if victim.spec.priority <= job.spec.priority:
            raise IllegalTransitionError(f"{who}: it is of no lower band")
        if not self._gives_way(gang, job.spec.job_id):
            raise IllegalTransitionError(f"{who}: they are not kept for that job")
        if gang.eviction is not None and gang.eviction.job_id != job.spec.job_id:
            raise IllegalTransitionError(f"{who}: {gang.eviction.job_id} takes them")

    def _gives_way(self, gang: Gang, job_id: str) -> bool:
        """Return whether a host of the gang is kept for the job. Without a job id it yields: it always gives way."""
        return not job_id or any(self._kept.whose(task.node_id) == job_id for task in gang.tasks)

    def _evict(self, victim: Job, gang: Gang, job: Job, deadline: float, change: Change) -> None:
        bands = job.spec.priority.name, victim.spec.priority.name
        reason = f"{bands[0]} job {job.spec.job_id} of {job.spec.user} takes its hosts from {bands[1]}"
        self._give_notice(victim, gang, Eviction(job.spec.job_id, deadline, reason), change)

    def _give_notice(self, victim: Job, gang: Gang, eviction: Eviction, change: Change) -> None:
        gang.eviction = eviction
        self._table.gang_changed(victim, gang)
        self._spares.look_at(victim)  # it does not grow meanwhile
        self._note(victim.current_attempt(gang), eviction)
        self._notices.tell(victim, gang, eviction.notice, change)

    def _note(self, attempt: AttemptId, eviction: Eviction) -> None:
        self._victims[attempt] = None
        heapq.heappush(self._due, (eviction.deadline, attempt))

    def _goes_on(self, job: Job, gang: Gang, change: Change) -> None:
        """Call an eviction off. Tasks that have read the notice keep it."""
        gang.eviction = None
        if gang.notice is not None and gang.notice.kind is NoticeKind.EVICTION:
            gang.notice = None
        self._table.gang_changed(job, gang)
        self._spares.look_at(job)
        self._notices.tell_of_its_hosts(job, gang, change)

    # -- checking --------------------------------------------------------------------------------------------------

    def check(self, jobs: Mapping[str, Job]) -> None:
        """Raise AssertionError if this disagrees with the jobs. For tests."""
        for job_id, job in jobs.items():
            for gang in job.gangs:
                told = gang.notice is not None and gang.notice.kind is NoticeKind.EVICTION
                if (eviction := gang.eviction) is None:
                    assert not told, f"{job_id} has notice of an eviction, and is not evicted"
                    continue
                attempt = job.current_attempt(gang)
                assert gang.placed, f"{job_id} is evicted but does not run"
                assert gang.notice is not None, f"{job_id} is evicted without notice"
                assert job.spec.spare_for is None, f"{job_id} is a spare, which is dropped at once"
                assert self._gives_way(gang, eviction.job_id), f"{job_id}: nobody takes its hosts"
                if eviction.job_id:
                    taker = jobs[eviction.job_id]
                    assert taker.pending, f"{job_id} gives way to {eviction.job_id}, which does not wait"
                    assert taker.spec.priority < job.spec.priority, f"{job_id} gives way to {eviction.job_id}"
                assert attempt in self._victims, f"{job_id}: its eviction is not known"
                assert (eviction.deadline, attempt) in self._due, f"{job_id}: its eviction has no end"
