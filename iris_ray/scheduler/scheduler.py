"""Who runs where: a pure function of a snapshot.

A gang gets whole groups (slices), all that it needs, or nothing. The scheduler proposes; the controller commits.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice

from iris_ray.model.constraints import Constraint
from iris_ray.model.jobs import Gang, Job
from iris_ray.model.requirement import Requirement
from iris_ray.model.workers import Worker
from iris_ray.scheduler.availability import Availability, FailedPlacement, Plan
from iris_ray.scheduler.candidate_cache import CandidateCache
from iris_ray.scheduler.candidates import LARGER
from iris_ray.scheduler.fair_queue import FairQueue, Urgency, Usage
from iris_ray.scheduler.pending_reason import Obstacle, PendingKind, PendingReason, Shortage
from iris_ray.state.events import AssignedEvent, GangAssignedEvent, TaskAssignedEvent, TaskUnschedulableEvent
from iris_ray.state.fleet import Fleet
from iris_ray.state.groups import Group

BACKFILL_BOUND_S = 600.0
OBSTACLES_NAMED = 4


@dataclass(slots=True)
class SchedulingResult:
    """What to do now.

    Attributes:
        assignments: what to start: events for the state.
        waiting: why every other pending job waits, by job id.
        timed_out: jobs that did not get to run in time: events for the state.
        unschedulable: jobs with a constraint that can't be evaluated on any worker: events for the state.
        starving: jobs that have waited longer than the backfill bound and for which groups are kept.
    """

    assignments: list[AssignedEvent] = field(default_factory=list)
    waiting: dict[str, PendingReason] = field(default_factory=dict)
    timed_out: list[TaskUnschedulableEvent] = field(default_factory=list)
    unschedulable: list[TaskUnschedulableEvent] = field(default_factory=list)
    starving: list[str] = field(default_factory=list)


class Scheduler:
    """Everything it knows comes in through the arguments; what it keeps is a cache of its evaluations of the fleet.

    Order: gangs that have just lost their hosts, then priority band, fair share between users, age. A job that does
    not fit lets those behind it pass, but not for ever. Once it has waited for ``backfill_bound_s`` seconds, the groups
    that it needs are kept for it as they become free, for one job at a time among those that compete. And a gang whose
    hosts may never get together by themselves then comes before others of its band: gangs of several groups by age,
    those of one group with several hosts by fair share. So it waits no longer than that, plus as long as what runs on
    those groups still takes.

    Args:
        backfill_bound_s: how long a job may be passed by others that came later; seconds.
    """

    def __init__(self, backfill_bound_s: float = BACKFILL_BOUND_S) -> None:
        self._bound = backfill_bound_s
        self._cache = CandidateCache()

    def find_assignments(
        self,
        pending: Iterable[Job],
        fleet: Fleet,
        usage: Usage,
        now: float,
        waiting: Mapping[str, PendingReason] | None = None,
    ) -> SchedulingResult:
        """Place what can be placed. Changes nothing of what it is given, but for the fleet's own indexes.

        Args:
            pending: jobs of which some or all gangs wait.
            fleet: all live workers, and who holds what.
            usage: what each user's gangs hold.
            now: seconds on the clock of the events.
            waiting: why jobs wait, from a plan of a moment ago, if the fleet is still as that plan has left it. Then
                they wait on, and if all others can be placed, these are all that is looked at.
        """
        pending = list(pending)
        if waiting and (result := self._place_new(pending, fleet, usage, now, waiting)) is not None:
            return result
        cycle = _Cycle(fleet, self._cache, now, self._bound)
        result = cycle.run(pending, usage)
        self._cache.trim(cycle.requirements)
        return result

    def check(self, now: float) -> None:
        """Raise AssertionError if the cache is out of date. For tests."""
        self._cache.check(now)

    def _place_new(
        self, pending: list[Job], fleet: Fleet, usage: Usage, now: float, waiting: Mapping[str, PendingReason]
    ) -> SchedulingResult | None:
        """The plan if those that wait go on waiting, or None if that can't be told without looking at all of them.

        Looked at are jobs that are new, that pause, or that could run but hope for more.
        """
        looked_at, left = [], {}
        for job in pending:
            why = waiting.get(job.spec.job_id)
            if why is None or why.pause is not None or why.free >= why.counts[0]:
                looked_at.append(job)
            else:
                left[job.spec.job_id] = why
        if not left or any(why.kept for why in waiting.values()):
            return None  # which groups are kept for a job depends on all others
        result = _Cycle(fleet, self._cache, now, self._bound).run(looked_at, usage)
        placed = {assignment.job_id for assignment in result.assignments}
        if result.waiting.keys() - waiting.keys() or placed & waiting.keys():
            return None
        result.waiting |= left
        return result


class _Cycle:
    """One making of a plan."""

    def __init__(self, fleet: Fleet, cache: CandidateCache, now: float, bound: float) -> None:
        self._fleet = fleet
        self._cache = cache
        self._now = now
        self._bound = bound
        self._plan = Plan()
        self._available: dict[Requirement, Availability] = {}
        self._shortages: dict[Requirement, tuple[int, Shortage]] = {}
        self._hopeless: dict[Requirement, str | None] = {}
        self._gangs: dict[str, Iterator[int]] = {}  # job id → positions of its gangs that were not tried yet
        self._result = SchedulingResult()

    def run(self, pending: list[Job], usage: Usage) -> SchedulingResult:
        queue = FairQueue(pending, usage, self._fleet.totals, self._urgency)
        for job in queue:
            if (granted := self._try(job)) is not None:
                queue.granted(job, granted)
        return self._result

    @property
    def requirements(self) -> int:
        """How many different ones there were."""
        return len(self._available)

    def _waited_long(self, gang: Gang) -> bool:
        return self._now - gang.waiting_since > self._bound

    def _returns(self, job: Job) -> bool:
        """Whether its gang ran a moment ago: it is not to lose its place to others because it lost a host."""
        return job.spec.coscheduling is not None and self._now < job.gang.returning_until

    def _urgency(self, job: Job) -> Urgency:
        """What a gang of several hosts needs may never get together by itself, if others use it in part."""
        if self._returns(job):
            return Urgency.RETURNING
        if job.spec.coscheduling is None or not self._waited_long(job.gang):
            return Urgency.NONE
        if _counts(job)[0] > 1:
            return Urgency.BY_AGE
        return Urgency.BY_SHARE if job.spec.replicas > 1 else Urgency.NONE

    def _try(self, job: Job) -> Mapping[str, float] | None:
        """Place one gang of the job; what it takes, or None with the reason put down."""
        job_id = job.spec.job_id
        if job_id not in self._gangs:
            if (late := self._timed_out(job)) is not None:
                self._result.timed_out.append(late)
                return None
            self._gangs[job_id] = iter(job.pending)
        for position in self._gangs[job_id]:
            gang = job.gangs[position]
            if gang.not_before > self._now:
                self._pause(job, gang)
                continue
            available, counts = self._available_to(job.requirement), _counts(job)
            failed = available.failed_placements.get(counts)
            if failed is None:
                buckets = self._buckets(job, available)
                names = self._choose(job, available, buckets)
                if names:
                    return self._assign(job, gang, available, names)
                failed = available.failed_placements[counts] = self._failed_placement(counts, available, buckets)
            self._wait(job, gang, available, failed)
            break
        return None

    def _timed_out(self, job: Job) -> TaskUnschedulableEvent | None:
        timeout = job.spec.scheduling_timeout
        waited = self._now - job.submitted_at
        if timeout is None or waited <= timeout:
            return None
        never_ran = next((job.gangs[p] for p in job.pending if not job.gangs[p].started), None)
        if never_ran is None:
            return None
        why = f"it did not get to run within its scheduling_timeout of {timeout:g} s"
        return TaskUnschedulableEvent(job.spec.job_id, never_ran.tasks[0].index, why)

    def _available_to(self, requirement: Requirement) -> Availability:
        available = self._available.get(requirement)
        if available is None:
            available = Availability(self._cache.candidates(self._fleet, requirement, self._now), self._plan)
            self._available[requirement] = available
        available.catch_up()
        return available

    # -- placing ---------------------------------------------------------------------------------------------------

    def _choose(self, job: Job, available: Availability, buckets: tuple[int, ...]) -> list[str]:
        """The groups to take: as many as can run now; none if it is better to wait."""
        counts = _counts(job)
        free = sum(map(available.free, buckets))
        soon = sum(map(available.soon, buckets))
        fitting = [count for count in counts if count <= free]
        if not fitting or (soon and any(free < count <= free + soon for count in counts)):
            return []  # for a larger count it is worth to wait until an ended attempt is gone
        names: list[str] = []
        for bucket in buckets:
            wanted = min(fitting[-1] - len(names), available.free(bucket))
            names += available.best(bucket, wanted, self._fleet.held_by(job.spec.owner))
        return names

    def _buckets(self, job: Job, available: Availability) -> tuple[int, ...]:
        """Where to look for groups: in larger slices only if those of the right size are too few, used ones too."""
        candidates, bucket = available.candidates, _bucket(job, available)
        enough = candidates.sound[bucket] + candidates.away[bucket] >= _counts(job)[0]
        return (bucket,) if candidates.requirement.whole_groups or enough else (bucket, LARGER)

    def _assign(self, job: Job, gang: Gang, available: Availability, names: list[str]) -> Mapping[str, float]:
        spec, requirement = job.spec, job.requirement
        granted: dict[str, float] = {}
        groups = [available.members(name) for name in sorted(names)]
        for worker in (worker for group in groups for worker in group):
            demand = requirement.demand(worker)
            self._plan.take(worker, demand, spec.job_id)
            for resource, amount in demand.items():
                granted[resource] = granted.get(resource, 0.0) + amount
        if spec.coscheduling is None:
            ((worker,),) = groups
            self._result.assignments.append(TaskAssignedEvent(spec.job_id, gang.tasks[0].index, worker.node_id))
        else:
            node_ids = tuple(tuple(worker.node_id for worker in group) for group in groups)
            self._result.assignments.append(GangAssignedEvent(spec.job_id, tuple(sorted(names)), node_ids))
        return granted

    # -- waiting ---------------------------------------------------------------------------------------------------

    def _failed_placement(
        self, counts: tuple[int, ...], available: Availability, buckets: tuple[int, ...]
    ) -> FailedPlacement:
        sound = sum(available.candidates.sound[bucket] for bucket in buckets)
        shortage = self._shortage(available)
        if sound >= counts[0]:
            reason = PendingKind.IN_USE
        else:
            reason = PendingKind.TOO_FEW if sound or shortage.closest else PendingKind.NO_SUCH_WORKERS
        return FailedPlacement(reason, counts, sum(map(available.free, buckets)), sound, shortage)

    def _wait(self, job: Job, gang: Gang, available: Availability, failed: FailedPlacement) -> None:
        job_id, queue = job.spec.job_id, available.waiting
        if not gang.started and (why := self._never_evaluable(job.requirement)) is not None:
            self._result.unschedulable.append(TaskUnschedulableEvent(job_id, gang.tasks[0].index, why))
            return
        self._result.waiting[job_id] = PendingReason(
            job_id,
            failed.reason,
            job.requirement,
            failed.counts,
            failed.free,
            failed.sound,
            failed.shortage,
            len(queue),
            queue[0] if queue else None,
            self._keep(job, gang, available),
        )
        queue.append(job_id)

    def _never_evaluable(self, requirement: Requirement) -> str | None:
        """What is wrong with a constraint that can't be evaluated on any worker that has the attribute; else None."""
        if requirement not in self._hopeless:
            workers = self._fleet.workers.values()
            reasons = (_never_evaluable(constraint, workers) for constraint in requirement.constraints)
            self._hopeless[requirement] = next(filter(None, reasons), None)
        return self._hopeless[requirement]

    def _pause(self, job: Job, gang: Gang) -> None:
        job_id, pause = job.spec.job_id, (gang.not_before - self._now, gang.error or "unknown cause")
        # A task by itself needs no patience with others, and would be in the way of its job's other tasks.
        kept = self._keep(job, gang, self._available_to(job.requirement)) if job.spec.coscheduling else ()
        paused = PendingReason(job_id, PendingKind.PAUSED, job.requirement, _counts(job), kept=kept, pause=pause)
        self._result.waiting.setdefault(job_id, paused)

    def _keep(self, job: Job, gang: Gang, available: Availability) -> tuple[str, ...]:
        """Keep groups for a gang that has waited too long, or returns: free ones, then the nearest to being free.

        As few as can be, for one job at a time; but for each gang that returns as many as it had, if there are so many,
        also while some of them do not answer.
        """
        returns = self._returns(job)
        if not (returns or self._waited_long(gang)):
            return ()
        candidates, buckets = available.candidates, self._buckets(job, available)
        sound = sum(candidates.sound[bucket] for bucket in buckets)
        needed = _counts(job)[0]
        if returns:
            sound += sum(candidates.away[bucket] for bucket in buckets)
            needed = max([needed, *(count for count in _counts(job) if count <= min(sound, len(gang.groups)))])
        if sound < needed or not (returns or available.kept.isdisjoint(buckets)):
            return ()
        names: list[str] = []
        for bucket in buckets:
            wanted = min(needed - len(names), available.free(bucket))
            names += available.best(bucket, wanted, self._fleet.held_by(job.spec.owner))
        others = (name for name in available.nearest(buckets) if not self._is_kept(available.group(name)))
        names += islice(others, needed - len(names))
        for name in names:
            for worker in available.group(name).workers:
                self._plan.keep(worker, job.spec.job_id)
        if not returns:
            self._result.starving.append(job.spec.job_id)
        return tuple(names)

    def _is_kept(self, group: Group) -> bool:
        return not self._plan.kept.keys().isdisjoint(group.node_ids)

    def _shortage(self, available: Availability) -> Shortage:
        candidates = available.candidates
        requirement = candidates.requirement
        known = self._shortages.get(requirement)
        if known is not None and known[0] == available.version:
            return known[1]
        closest = [
            Obstacle(
                self._called(name, requirement),
                candidates.fits[name].bucket or requirement.replicas,
                f"{words} {job_id}",
                (job_id,),
            )
            for name, words, job_id in available.given_away[:OBSTACLES_NAMED]
        ]
        for short, _, name in candidates.near[: OBSTACLES_NAMED - len(closest)]:
            fit = candidates.fits[name]
            closest.append(Obstacle(self._called(name, requirement), short, fit.obstacle, fit.users))
        shortage = Shortage(
            tuple((_named(what, requirement), count) for what, count in (+candidates.removed).items()),
            tuple(closest),
            more=len(available.given_away) + len(candidates.near) - len(closest),
            slice_types={} if closest else self._fleet.slice_types(),
        )
        self._shortages[requirement] = available.version, shortage
        return shortage

    def _called(self, name: str, requirement: Requirement) -> str:
        """What people call a group; a worker that is one by itself has an id that says nothing to them."""
        worker = self._fleet.workers.get(name) if requirement.group_by is None else None
        if worker is None:
            return name
        return f"{worker.slice_name} {worker.name}" if worker.slice_name else f"host {worker.address}"


def _counts(job: Job) -> tuple[int, ...]:
    """How many groups a gang of the job can use, ascending."""
    return job.spec.coscheduling.num_groups if job.spec.coscheduling else (1,)


def _bucket(job: Job, available: Availability) -> int:
    """How many hosts the gang takes of each group. Slices of one gang are equal: of the sizes that can suffice the one
    of which most are free."""
    candidates = available.candidates
    if not candidates.requirement.whole_groups:
        return candidates.requirement.replicas
    sound, least = candidates.sound, _counts(job)[0]
    return max(
        (size for size in sound if size != LARGER),
        key=lambda size: (sound[size] >= least, available.free(size), sound[size], size),
        default=candidates.requirement.replicas,
    )


def _named(what: int | str, requirement: Requirement) -> str:
    return what if isinstance(what, str) else str(requirement.constraints[what])


def _never_evaluable(constraint: Constraint, workers: Iterable[Worker]) -> str | None:
    error: TypeError | None = None
    for worker in workers if constraint.orders else ():
        try:
            if constraint.key in worker.attributes:
                constraint.matches(worker.attributes)
                return None
        except TypeError as not_comparable:
            error = not_comparable
    return f"{constraint} can't be evaluated on any host: {error}" if error else None
