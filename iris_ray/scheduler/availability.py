"""The groups that are free for a requirement during a plan (`Availability`), and the choice of groups for a gang.

A gang gets all the groups that it needs, or none: `choose` selects the groups, and `assign` takes them from the plan.
"""

import heapq
from collections.abc import Collection, Iterable, Iterator, Mapping, Set
from itertools import chain, islice, takewhile
from types import MappingProxyType

from iris_ray.model.jobs import Gang, Job
from iris_ray.model.lifecycle import AttemptId
from iris_ray.model.parts import is_on_slices
from iris_ray.model.requirement import Requirement
from iris_ray.model.workers import TPU, Worker, rounded
from iris_ray.scheduler.candidates import Candidates, Distance
from iris_ray.scheduler.evaluation import LARGER, Evaluation, Rank, Status, evaluate
from iris_ray.scheduler.ranked_groups import RankedGroups, fits
from iris_ray.scheduler.remaining_capacity import Plan, RemainingCapacity
from iris_ray.state.events import GangAssignedEvent, JobAssignedEvent, TasksAssignedEvent
from iris_ray.state.fleet import Fleet
from iris_ray.state.groups import Group

OF_LAST_ATTEMPT = -2
"""The highest rank of a slice of a gang's last attempt; see `preferred`."""


class Availability:
    """The groups that remain for a requirement during a plan.

    A plan never takes hosts back, so a gang that finds too few groups would not find more later in the plan.

    Attributes:
        requirement: the requirement.
        failed_placements: group counts and `fixed_size` → number of free groups when a gang that can use these found
            too few. Later ones fail as well, which makes a long queue of identical jobs cheap.
        unplaced: number of jobs with this requirement that found too few groups.
        first_unplaced: id of the first of these jobs in the queue, or None.
    """

    def __init__(self, requirement: Requirement, remaining: RemainingCapacity, now: float) -> None:
        self.requirement = requirement
        self.failed_placements: dict[tuple[tuple[int, ...], int | None], int] = {}
        self.unplaced = 0
        self.first_unplaced: str | None = None
        self._needs = requirement.resources
        self._remaining = remaining
        self._now = now
        self._suitable: dict[tuple[int, bool], int] = {}  # (bucket, later) → count, which plans don't change
        self._whole: Availability | None = None  # the availability from which this one excludes workers
        self._avoided: Collection[str] = ()  # node ids
        self._impaired: Set[str] = frozenset()  # names of the groups of avoided workers
        self._best_host: tuple[str, int] | None = None  # the latest one, and the plan's lifts then

    def without(self, avoided: Iterable[Worker]) -> "Availability":
        """Return the availability for a job that avoids some workers."""
        others = Availability(self.requirement, self._remaining, self._now)
        others._whole = self
        others._suitable = self._suitable
        others._avoided = {worker.node_id for worker in avoided}
        others._impaired = {name for worker in avoided if (name := self.candidates.grouping.name_of(worker))}
        return others

    @property
    def to_all(self) -> "Availability":
        """The availability for jobs that avoid no workers."""
        return self._whole or self

    @property
    def impaired(self) -> tuple[str, ...]:
        """Names of the groups with avoided workers, sorted."""
        return tuple(sorted(self._impaired)) if self._impaired else ()

    @property
    def candidates(self) -> Candidates:
        """All groups, evaluated independently of task sizes."""
        return self._remaining.candidates

    def count_unplaced(self, job: Job, count: int = 1) -> None:
        """Count jobs that found too few groups; ``job`` is the first of them."""
        self.unplaced += count
        if self.first_unplaced is None:
            self.first_unplaced = job.spec.job_id

    # -- counts ----------------------------------------------------------------------------------------------------

    def suitable(self, bucket: int, later: bool = False) -> int:
        """Return the number of groups in a bucket that would be free without tasks on them.

        ``later`` includes groups that are unfit only for temporary reasons.
        """
        count = self._suitable.get((bucket, later))
        if count is None:
            count = self._suitable[bucket, later] = self.candidates.suitable.count(bucket, self._needs, later)
        evaluations, suits = self.candidates.evaluations, self.candidates.suitable.suits
        here = [name for name in self._impaired if evaluations[name].bucket == bucket]
        return count - sum(suits(name, self._needs, later) and not self.suits(name, later) for name in here)

    def free(self, bucket: int) -> int:
        """Return the number of free groups in a bucket."""
        self.candidates.complete()
        groups = self._groups(bucket)
        unequal = [name for name in self._unequal(groups) if fits(groups.rooms[name], self._needs)]
        return groups.count(self._needs) - sum(self._rank(name) is None for name in unequal)

    def free_in_all(self) -> int:
        """Return the number of free groups in all buckets."""
        return sum(map(self.free, self._remaining.all_groups()))

    def free_soon(self, bucket: int) -> int:
        """Return the number of groups in a bucket that are about to be free."""
        return sum(map(self.is_free_soon, self.candidates.ending.get(bucket, ())))

    def is_any_kept(self, buckets: Iterable[int]) -> bool:
        """Return whether any group that suits, at the latest once suspicions have ended, is reserved for a job."""
        return any(self.suits_soon(name) for bucket in buckets for name in self._remaining.kept(bucket))

    # -- choices ---------------------------------------------------------------------------------------------------

    def best(self, bucket: int, count: int, own: Mapping[str, int]) -> list[str]:
        """Return the names of the best free groups in a bucket, at most ``count``. ``own``: see `preferred`."""
        if count != 1 or self.requirement.group_by is not None:
            return [rank[-1] for rank in self._ranks(bucket, count, own)]
        if self._best_host is not None and self._is_still_best(*self._best_host):
            return [self._best_host[0]]
        names = [rank[-1] for rank in self._ranks(bucket, 1, own)]
        self._best_host = (names[0], self._remaining.plan.lifts) if names else None
        return names

    def _is_still_best(self, name: str, lifts: int) -> bool:
        """Return whether a host that was the best still is.

        What a plan takes changes the room of hosts but not their ranks. So the host stays the best while it has room,
        unless a better one has ceased to be reserved.
        """
        plan, (host,) = self._remaining.plan, self.group(name).workers
        if lifts != plan.lifts or name in plan.kept:
            return False
        return self.requirement.has_room(host, plan.taken.get(name))

    def best_alike(self, bucket: int, count: int) -> list[str]:
        """Return the names of the best free groups, at most ``count``, that are equally good except for their names."""
        ranks = self._ranks(bucket, count, {})
        return [rank[-1] for rank in takewhile(lambda rank: rank[:-1] == ranks[0][:-1], ranks)]

    def _ranks(self, bucket: int, count: int, own: Mapping[str, int]) -> list[Rank]:
        """Return the ranks of the best free groups."""
        if not count:
            return []
        found = self._best(bucket, count, own)
        evaluate_better = self.candidates.evaluate_better
        while evaluate_better(count - len(found), found[-1] if len(found) == count else None):
            found = self._best(bucket, count, own)
        return found

    def _best(self, bucket: int, count: int, own: Mapping[str, int]) -> list[Rank]:
        """Return the ranks of the best free groups among those evaluated so far."""
        preferred, ranks = self._best_of(own, bucket, count), islice(self._free(bucket), count)
        if not preferred:
            return list(ranks)
        found: dict[str, Rank] = {}
        for rank in heapq.merge(preferred, ranks):
            found.setdefault(rank[-1], rank)
        return list(found.values())[:count]

    def members(self, name: str) -> tuple[Worker, ...]:
        """Return the workers that a gang would take of a free group."""
        tasks, usable = self.tasks(name), self._remaining.usable(name)
        return usable if len(usable) == tasks else tuple(islice(self.with_room(name), tasks))

    def with_room(self, name: str) -> Iterator[Worker]:
        """Iterate over the workers of a group that have room for a task."""
        there = (worker for worker, room in self._remaining.idle(name) if fits(room, self._needs))
        return there if name not in self._impaired else (w for w in there if w.node_id not in self._avoided)

    def avoids(self, worker: Worker) -> bool:
        """Return whether a worker is avoided."""
        return worker.node_id in self._avoided

    def group(self, name: str) -> Group:
        """Return a candidate's group by its name."""
        return self._remaining.group(name)

    def closest_to_free(self, buckets: Collection[int]) -> Iterator[str]:
        """Iterate over the names of suitable groups that are in use or taken, the closest to being free first."""
        evaluations = self.candidates.evaluations
        unfit = [rank[-1] for bucket in buckets for rank in self._not_free(bucket)]
        distances = [self._distance(name) for name in unfit if self.suits(name)]
        heapq.heapify(distances)
        for bound in self._remaining.closest():  # a lower bound for the distance
            while distances and distances[0] <= bound:
                yield heapq.heappop(distances)[-1]
            found = evaluations[name := bound[-1]]
            if found.bucket in buckets and found.status is not Status.UNSUITABLE and self.suits(name):
                heapq.heappush(distances, self._distance(name))
        while distances:
            yield heapq.heappop(distances)[-1]

    # -- one group -------------------------------------------------------------------------------------------------

    def tasks(self, name: str) -> int:
        """Return the number of workers that a gang takes of a group."""
        return self.candidates.tasks(self.candidates.evaluation(name))

    def is_free(self, name: str) -> bool:
        """Return whether a group is free."""
        return self._rank(name) is not None

    def is_free_soon(self, name: str) -> bool:
        """Return whether a group is about to be free."""
        if self.is_free(name):
            return False
        plan, found, has_room = self._remaining.plan, self.candidates.evaluations[name], self.requirement.has_room
        no_use = plan.kept.keys() | self._avoided if self._avoided else plan.kept
        not_kept = (worker for worker in found.eligible if worker.node_id not in no_use)
        soon = sum(has_room(worker, plan.taken.get(worker.node_id), soon=self._now) for worker in not_kept)
        return soon >= self.tasks(name)

    def knows(self, name: str) -> bool:
        """Return whether there is a group of this name."""
        return name in self.candidates.grouping

    def suits(self, name: str, later: bool = False) -> bool:
        """Return whether a group would be free without tasks on it; ``later`` disregards temporary problems."""
        if not self.candidates.suitable.suits(name, self._needs, later):
            return False
        if name not in self._impaired:
            return True
        found = self.candidates.evaluations[name]
        others = (w for w in (found.later if later else found.eligible) if w.node_id not in self._avoided)
        return sum(fits(worker.resources, self._needs) for worker in others) >= self.tasks(name)

    def suits_soon(self, name: str) -> bool:
        """Return whether a group would be free without tasks on it once suspicions of its hosts have ended."""
        return sum(fits(worker.resources, self._needs) for worker in self.hosts_soon(name)) >= self.tasks(name)

    def hosts_soon(self, name: str) -> list[Worker]:
        """Return the hosts of a group that suit the job once suspicions of them have ended, whether in use or not."""
        hosts, needs_chips = self.candidates.evaluations[name].later, self.requirement.chips
        return [host for host in hosts if not (needs_chips and host.foreign) and host.node_id not in self._avoided]

    def may_become_free(self, name: str) -> bool:
        """Return whether a group becomes free once its tasks end: no end of an attempt is unconfirmed for long."""
        if not any(worker.ending for worker in self.candidates.evaluations[name].later):
            return True
        has_room = self.requirement.fits_beside
        return sum(has_room(host, host.stuck(self._now)) for host in self.hosts_soon(name)) >= self.tasks(name)

    def is_free_after(self, name: str, leaving: Collection[AttemptId]) -> bool:
        """Return whether a group is free once these attempts and those that have just ended have left."""
        fit = 0
        for worker in self.hosts_soon(name):
            free = dict(worker.free_soon(self._now))
            for occupant, held in worker.occupants.items():
                if occupant[1] in leaving and occupant not in worker.ending:
                    for resource, amount in held.items():
                        free[resource] = rounded(free.get(resource, 0.0) + amount)
            chips_idle = free.get(TPU, 0.0) == worker.resources.get(TPU, 0.0)
            fit += self.requirement.fits_into(free) and (chips_idle or not self.requirement.chips)
        return fit >= self.tasks(name)

    def stuck(self, bucket: int) -> int:
        """Return the number of suitable groups that can't become free for now; see `may_become_free`."""
        ending = self.candidates.ending.get(bucket, ())
        return sum(self.suits(name) and not self.may_become_free(name) for name in ending)

    def evaluation(self, name: str) -> Evaluation:
        """Return the evaluation of a group before the plan, with the obstacle as text."""
        in_words = self.candidates.in_words
        needs, found = in_words.get(name, (None, None))
        if found is None or needs != self._needs:
            found = evaluate(self.group(name), self.requirement, False, self._now)
            in_words[name] = self._needs, found
        return found

    # -- for explanations ------------------------------------------------------------------------------------------

    def given_away(self, look_at: int) -> Iterator[str]:
        """Iterate over groups that the plan has used up, among the first ``look_at`` groups that it changed."""
        for name, rank in islice(self._remaining.changed.items(), look_at):
            if fits(self.candidates.room(name)[0], self._needs) and (
                rank is None or not fits(self._groups(self._bucket(name)).rooms[name], self._needs)
            ):
                yield name

    def closest(self, count: int) -> list[str]:
        """Return the names of the groups in all buckets that are closest to being free, at most ``count``."""
        short = [
            found for groups in self._remaining.all_groups().values() for found in groups.closest(self._needs, count)
        ]
        lacking = sorted((1, lack, name) for lack, name in short)
        return [name for _, _, name in islice(heapq.merge(lacking, self._remaining.closest()), count)]

    @property
    def not_free(self) -> int:
        """The number of groups that are not free but may become free."""
        ranked = sum(len(groups) - self.free(bucket) for bucket, groups in self._remaining.all_groups().items())
        return self._remaining.not_free + ranked

    # -- helpers -----------------------------------------------------------------------------------------------------

    def _groups(self, bucket: int) -> RankedGroups:
        return self._remaining.groups(bucket)

    def _bucket(self, name: str) -> int:
        return self.candidates.evaluation(name).bucket

    def _unequal(self, groups: RankedGroups) -> Set[str]:
        """Return the names of the groups whose usable members must be counted individually."""
        return groups.mixed | (self._impaired & groups.rooms.keys()) if self._impaired else groups.mixed

    def _free(self, bucket: int) -> Iterator[Rank]:
        groups = self._groups(bucket)
        unequal = self._unequal(groups)
        if not unequal:
            return groups.fitting(self._needs)
        equal = (rank for rank in groups.fitting(self._needs) if rank[-1] not in unequal)
        return heapq.merge(equal, sorted(filter(None, map(self._rank, unequal))))

    def _not_free(self, bucket: int) -> Iterator[Rank]:
        groups = self._groups(bucket)
        yield from groups.not_fitting(self._needs)
        for name in self._unequal(groups):
            rank = self._remaining.rank(name)
            if rank is not None and fits(groups.rooms[name], self._needs) and self._rank(name) is None:
                yield rank

    def _rank(self, name: str) -> Rank | None:
        """Return the rank of a group if it is free: enough of its hosts have room for a task."""
        rank = self._remaining.rank(name)
        if rank is None:
            return None
        groups = self._groups(self._bucket(name))
        if name not in groups.mixed and name not in self._impaired:
            return rank if fits(groups.rooms[name], self._needs) else None
        left = sum(1 for _ in self.with_room(name)) - self.tasks(name)
        if left < 0:
            return None
        counts_left = self.requirement.group_by and self.candidates.grouping.shape is None
        return (*rank[:3], left, name) if counts_left else rank

    def _best_of(self, own: Mapping[str, int], bucket: int, count: int) -> list[Rank]:
        """Return the ranks of the best free preferred slices, which precede those of all other slices."""
        if not own or not is_on_slices(self.requirement.group_by):
            return []
        self.candidates.evaluate([name for name in own if name not in self.candidates.known])
        rooms = self._groups(bucket).rooms
        ranks = filter(None, map(self._rank, rooms.keys() & own.keys()))
        return heapq.nsmallest(count, ((*rank[:2], own[rank[-1]], *rank[3:]) for rank in ranks))

    def _distance(self, name: str) -> Distance:
        found, taken = self.candidates.evaluations[name], self._remaining.plan.taken
        large = [w for w in found.eligible if fits(w.resources, self._needs) and w.node_id not in self._avoided]
        lacks = [self.requirement.shortfall(worker, taken.get(worker.node_id)) for worker in large]
        full = [lack for lack in lacks if lack > 0]
        missing = self.tasks(name) - len(large) + len(full)
        return missing, sum(heapq.nsmallest(missing, full)), name


def num_groups(job: Job) -> tuple[int, ...]:
    """Return the group counts that a gang of the job can use, ascending."""
    return job.spec.groups_per_gang


def buckets_for(job: Job, available: Availability) -> tuple[int, ...]:
    """Return the buckets in which to search for groups, the preferred one first.

    A gang gets parts of larger slices only if too few slices of the right size exist, including those in use.
    """
    requirement, bucket = available.requirement, _equal_bucket(job, available)
    if requirement.whole_groups or requirement.group_by is None:
        return (bucket,)
    exist = available.suitable(bucket, later=True)
    return (bucket,) if exist >= num_groups(job)[0] else (bucket, LARGER)


def preferred(job: Job, fleet: Fleet, gang: Gang | None = None) -> dict[str, int]:
    """Return a negative rank for each slice that a gang prefers, by name: those on which its owner keeps actors.

    Slices of the gang's last attempt come first, in order, with ranks up to `OF_LAST_ATTEMPT`: their hosts keep files
    for their tasks, and a gang that shrinks then moves as few tasks as possible. ``gang``: None for any of the job.
    """
    if not (held := fleet.held_by(job.spec.owner)):
        return {}
    gang = job.gang if gang is None and job.spec.is_one_gang else gang
    before = [name for name, _ in gang.last_ran] if gang is not None and job.spec.coscheduling else []
    numbers = {name: OF_LAST_ATTEMPT + number - len(before) + 1 for number, name in enumerate(before)}
    return {name: numbers.get(name, -1) for name in held}


def choose(
    job: Job,
    available: Availability,
    own: Mapping[str, int],
    wanted: tuple[int, ...],
    waits_for_more: bool,
    waits_for_own_slices: bool,
) -> tuple[list[str], int]:
    """Choose groups for a gang: as many as it can use now, or none if it should wait.

    A gang waits if it can use more groups and enough of them are about to be free. It also waits for slices of its last
    attempt that are about to be free, rather than take others, because their hosts have its checkpoints in memory.

    Args:
        job: the gang's job.
        available: the groups available to the job.
        own: preferred slices; see `preferred`.
        wanted: the group counts that the gang can use, ascending.
        waits_for_more: whether the gang waits for groups that are about to be free.
        waits_for_own_slices: whether the gang waits for slices of its last attempt that are about to be free.

    Returns:
        The names, best first, and the number of free groups, capped at the number that the gang can use.
    """
    buckets: tuple[int, ...] = (_equal_bucket(job, available),)
    names = best_free(wanted[-1], available, buckets, own)
    if len(names) < wanted[0]:
        buckets = buckets_for(job, available)
        names += best_free(wanted[-1] - len(names), available, buckets[1:], own)
    free = len(names)
    fitting = [count for count in wanted if count <= free]
    if not fitting:
        return [], free
    soon = sum(map(available.free_soon, buckets)) if waits_for_more and free < wanted[-1] else 0
    if soon and any(free < count <= free + soon for count in wanted):
        return [], free
    names = names[: fitting[-1]]
    last = {name for name, number in own.items() if number <= OF_LAST_ATTEMPT} if own and waits_for_own_slices else ()
    if last and not last.issuperset(names):
        soon_free = (name for bucket in buckets for name in available.candidates.ending.get(bucket, ()))
        if any(map(available.is_free_soon, last.intersection(soon_free))):
            return [], free
    return names, free


def best_free(
    count: int, available: Availability, buckets: Iterable[int], own: Mapping[str, int] = MappingProxyType({})
) -> list[str]:
    """Return the names of the best free groups, at most ``count``, those in ``own`` first."""
    names: list[str] = []
    for bucket in buckets:
        names += available.best(bucket, count - len(names), own)
    return names


def assign(
    job: Job,
    gang: Gang,
    available: Availability,
    names: list[str],
    plan: Plan,
    lent: Mapping[str, str] = MappingProxyType({}),
) -> tuple[JobAssignedEvent, Mapping[str, float]]:
    """Take groups from the plan. Return the event that assigns them to the gang, and the resources that it takes.

    ``lent`` has the hosts that are lent to the job: node id → id of the job for which the host is reserved.
    """
    spec, requirement = job.spec, job.requirement
    if spec.coscheduling is None:
        (worker,) = available.members(names[0])
        demand = requirement.demand(worker)
        plan.take((worker,), demand, spec.job_id)
        lent_by = _lenders((worker,), lent)
        return TasksAssignedEvent(spec.job_id, (gang.tasks[0].index,), worker.node_id, lent_by), demand
    granted: dict[str, float] = {}
    names = sorted(names)
    groups = [available.members(name) for name in names]
    workers = list(chain.from_iterable(groups))
    chips = [worker.resources.get(TPU, 0.0) for worker in workers]
    for each in dict.fromkeys(chips):
        alike = workers
        if chips.count(each) < len(chips):
            alike = [worker for worker, has in zip(workers, chips, strict=True) if has == each]
        demand = requirement.demand(alike[0])
        plan.take(alike, demand, spec.job_id)
        for resource, amount in demand.items():
            granted[resource] = granted.get(resource, 0.0) + amount * len(alike)
    node_ids = tuple([tuple([worker.node_id for worker in group]) for group in groups])
    return GangAssignedEvent(spec.job_id, tuple(names), node_ids, gang.position, _lenders(workers, lent)), granted


def _lenders(workers: Iterable[Worker], lent: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(lent[worker.node_id] for worker in workers if worker.node_id in lent))


def hosts_of(assignment: JobAssignedEvent) -> tuple[str, ...]:
    """Return the node ids of the hosts that an event assigns."""
    if isinstance(assignment, TasksAssignedEvent):
        return (assignment.node_id,)
    return tuple(node_id for group in assignment.groups for node_id in group)


def fixed_size(job: Job) -> int | None:
    """Return the number of hosts of the groups that a job must use; None if any number will do.

    All gangs of a job get whole groups of one size, which the first gang determines; 0 before it has groups.
    """
    if not job.requirement.whole_groups or len(job.gangs) == 1:
        return None
    return len(job.gangs[0].tasks) if job.attempt else 0


def _equal_bucket(job: Job, available: Availability) -> int:
    """Return the bucket of equal groups to use: among the sizes with enough groups, the one with the most free groups.

    The gangs of a job with several get groups of the size of which most exist. If none of these is free, the size of
    the group that is promised to the job is as good.
    """
    requirement, least = available.requirement, num_groups(job)[0]
    if not requirement.whole_groups:
        return requirement.replicas
    if its_size := fixed_size(job):
        return its_size
    sizes = (+available.candidates.suitable.buckets).keys() - {LARGER}
    if len(sizes) < 2:
        return next(iter(sizes), requirement.replicas)
    suitable = {size: available.suitable(size) for size in sizes}
    if len(job.gangs) > 1:
        most = max(sizes, key=lambda size: (suitable[size], size))
        if job.promise is None or job.members or available.free(most):
            return most
        return len(job.promise.node_ids)
    return max(sizes, key=lambda size: (suitable[size] >= least, available.free(size), suitable[size], size))
