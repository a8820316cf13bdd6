"""Evictions: a job that waits takes hosts from lower bands. What runs there gets notice, and is stopped at a deadline.

So do jobs that yield, whose hosts are for whoever waits.

`iris_ray.scheduler.evictions` chooses the victims. The hosts are kept for the job that takes them (`Job.kept`). If they
are not kept for it any more, because it has got others or does not wait any more, what has not ended by then goes on.
"""

import heapq
from collections.abc import Mapping

from iris_ray.errors import IllegalTransitionError
from iris_ray.model.ids import AttemptId
from iris_ray.model.jobs import Eviction, Gang, Job
from iris_ray.model.notices import NoticeKind
from iris_ray.state.attempt_ends import AttemptEnds
from iris_ray.state.change import Change
from iris_ray.state.events import EvictionEvent, GivesWayEvent
from iris_ray.state.gang_notices import GangNotices
from iris_ray.state.job_table import JobTable
from iris_ray.state.kept_room import KeptRoom
from iris_ray.state.spare_jobs import SpareJobs


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
        self._victims: dict[AttemptId, None] = {}  # that were told; some may be over
        self._due: list[tuple[float, AttemptId]] = []  # a heap: when which of them is stopped
        self._settled_for = 0  # the version of what is kept

    # -- events ----------------------------------------------------------------------------------------------------

    def begin(self, event: EvictionEvent, change: Change) -> None:
        """Give notice to attempts whose hosts a job takes, unless they have it.

        Victims that have ended meanwhile are left out.

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
        """Give notice to a job that yields: its hosts are for those that wait. Nothing is kept for any of them.

        Raises:
            IllegalTransitionError: it does not yield.
        """
        job = self._table.known(event.job_id)
        if not job.yields:
            raise IllegalTransitionError(f"{event.job_id} does not yield its hosts")
        if job.gang.placed and job.gang.eviction is None:
            eviction = Eviction("", event.deadline, "its owner has no use for its hosts now, and others wait")
            self._give_notice(job, job.gang, eviction, change)

    def time_passed(self, change: Change) -> None:
        """Stop the attempts whose time is up."""
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
        """Take up what the record of a job says."""
        for gang in job.gangs:
            if gang.eviction is not None:
                self._note(job.current_attempt(gang), gang.eviction)
                self._settled_for = -1  # records may be of different moments

    def settle(self, change: Change) -> None:
        """Let those go on whose hosts are not taken any more."""
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
        """Refuse what is no victim."""
        who = f"{victim.current_attempt(gang)} does not give its hosts to {job.spec.job_id}"
        if victim.spec.priority <= job.spec.priority:
            raise IllegalTransitionError(f"{who}: it is of no lower band")
        if not self._gives_way(gang, job.spec.job_id):
            raise IllegalTransitionError(f"{who}, for which they are not kept")
        if gang.eviction is not None and gang.eviction.job_id != job.spec.job_id:
            raise IllegalTransitionError(f"{who}: {gang.eviction.job_id} takes them")

    def _gives_way(self, gang: Gang, job_id: str) -> bool:
        """Return whether some host of a gang is kept for a job, or for nobody but those that wait."""
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
        """Call an eviction off. Tasks that have heard the notice keep it."""
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
                    assert not told, f"{job_id} has notice of an eviction that is none"
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
