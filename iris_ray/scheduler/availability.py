"""What is left for one requirement while a plan is being made: candidates minus what the plan has given away."""

import heapq
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice

from iris_ray.model.workers import TPU_NAME, Resources, Worker
from iris_ray.scheduler.candidates import Candidates, Fit, Rank, Status
from iris_ray.scheduler.pending_reason import PendingKind, Shortage
from iris_ray.state.groups import Group


@dataclass(slots=True)
class Plan:
    """What a plan has given away so far.

    Attributes:
        taken: worker id → what is taken of it.
        kept: worker id → job that has waited so long that nobody else gets it.
        takers: worker id → the job that takes something of it, or that it is kept for.
        touched: the workers of all of these, in the order in which it happened.
    """

    taken: dict[str, Resources] = field(default_factory=dict)
    kept: dict[str, str] = field(default_factory=dict)
    takers: dict[str, str] = field(default_factory=dict)
    touched: list[Worker] = field(default_factory=list)

    def take(self, worker: Worker, demand: Resources, job_id: str) -> None:
        before = self.taken.get(worker.node_id)
        if before is not None:
            demand = {r: before.get(r, 0.0) + demand.get(r, 0.0) for r in {**before, **demand}}
        self.taken[worker.node_id] = demand
        self.takers[worker.node_id] = job_id
        self.touched.append(worker)

    def keep(self, worker: Worker, job_id: str) -> None:
        self.kept[worker.node_id] = self.takers[worker.node_id] = job_id
        self.touched.append(worker)


@dataclass(frozen=True, slots=True)
class FailedPlacement:
    """What gangs find that can use the same numbers of groups, and get none.

    Attributes:
        reason: the kind of answer to why they wait.
        counts: the numbers of groups.
        free: how many there are now.
        sound: how many there would be if nobody used them.
        shortage: what is in the way.
    """

    reason: PendingKind
    counts: tuple[int, ...]
    free: int
    sound: int
    shortage: Shortage


class Availability:
    """The candidates of one requirement, as the plan leaves them. The candidates themselves stay as they are.

    Attributes:
        candidates: as they are without the plan.
        version: counts the changes that the plan has made to it.
        kept: buckets of which some group is kept for a job.
        waiting: jobs that found too little here, in order.
        failed_placements: what they found, by the numbers of groups that they can use. It holds for all that come after
            them, until the plan gives something away; so a long queue costs little.
        given_away: groups that were free before the plan, what becomes of them in words, and the job that gets them.
    """

    def __init__(self, candidates: Candidates, plan: Plan) -> None:
        self.candidates = candidates
        self.version = 0
        self.kept: set[int] = set()
        self.waiting: list[str] = []
        self.failed_placements: dict[tuple[int, ...], FailedPlacement] = {}
        self.given_away: list[tuple[str, str, str]] = []
        self._plan = plan
        self._seen = 0
        self._changed: dict[str, Rank | None] = {}  # groups that are no longer as the candidates have them
        self._reranked: defaultdict[int, list[Rank]] = defaultdict(list)  # heaps
        self._gained: Counter[int] = Counter()
        self._soon: dict[str, bool] = {}  # whether a group that has been touched is about to be free
        self._gained_soon: Counter[int] = Counter()
        self._passed: Counter[int] = Counter()  # how many ranks at the front of a bucket are known to have changed

    def catch_up(self) -> None:
        """Take note of what the plan has given away since the last time."""
        touched = self._plan.touched
        if self._seen == len(touched):
            return
        self.failed_placements.clear()
        name_of = self.candidates.grouping.name_of
        names = dict.fromkeys(name_of(worker) for worker in islice(touched, self._seen, None))
        self._seen = len(touched)
        for name in names:
            fit = self.candidates.fits.get(name) if name is not None else None
            if fit is None or name is None or fit.status is Status.UNFIT:
                continue
            if any(node_id in self._plan.kept for node_id in self.group(name).node_ids):
                self.kept.add(fit.bucket)
            if fit.rank is not None:
                self._change(name, fit, fit.rank)
            soon = self._changed.get(name, fit.rank) is None and self._will_have_room(name, fit)
            self._gained_soon[fit.bucket] += soon - self._soon.get(name, fit.ending)
            self._soon[name] = soon

    def free(self, bucket: int) -> int:
        """How many groups are left."""
        return len(self.candidates.free.get(bucket, ())) + self._gained[bucket]

    def soon(self, bucket: int) -> int:
        """How many groups are about to be free."""
        return self.candidates.soon[bucket] + self._gained_soon[bucket]

    def nearest(self, buckets: Collection[int]) -> Iterator[str]:
        """Groups that are in use or given away, the nearest to being free first."""
        fits, plan, lack = self.candidates.fits, self._plan, self.candidates.requirement.lack
        touched = []
        for name in self._soon:
            fit = fits[name]
            if fit.bucket in buckets and self._changed.get(name, fit.rank) is None:
                missing = [short for w in fit.good if (short := lack(w, plan.taken.get(w.node_id))) > 0]
                touched.append((self._tasks(fit) - len(fit.good) + len(missing), sum(missing), name))
        as_they_are = (
            near
            for near in self.candidates.near
            if near[2] not in self._soon and fits[near[2]].status is Status.BUSY and fits[near[2]].bucket in buckets
        )
        return (name for _, _, name in heapq.merge(sorted(touched), as_they_are))

    def best(self, bucket: int, count: int, own: Iterable[str]) -> list[str]:
        """The names of the best groups; those that the job's owner keeps already are better than others."""
        if not count:
            return []
        found: dict[str, None] = {}
        for rank in heapq.merge(self._ranks_of(own, bucket), self._unchanged(bucket), self._still_free(bucket, count)):
            found[rank[-1]] = None
            if len(found) == count:
                break
        return list(found)

    def members(self, name: str) -> tuple[Worker, ...]:
        """The workers of a group that the gang would take."""
        fit, tasks = self.candidates.fits[name], self._tasks(self.candidates.fits[name])
        usable = self._usable(name, fit)
        if len(usable) == tasks:
            return usable
        return tuple(islice(filter(self._has_room, usable), tasks))

    def group(self, name: str) -> Group:
        group = self.candidates.grouping.get(name)
        assert group is not None, f"{name} was a candidate a moment ago"
        return group

    def _tasks(self, fit: Fit) -> int:
        return fit.bucket or self.candidates.requirement.replicas

    def _usable(self, name: str, fit: Fit) -> tuple[Worker, ...]:
        return self.group(name).workers if fit.usable is None else fit.usable

    def _will_have_room(self, name: str, fit: Fit) -> bool:
        plan, has_room = self._plan, self.candidates.requirement.has_room
        if not any(worker.ending for worker in fit.good):
            return False
        there = (w for w in fit.good if w.node_id not in plan.kept)
        return sum(has_room(w, plan.taken.get(w.node_id), soon=True) for w in there) >= self._tasks(fit)

    def _change(self, name: str, fit: Fit, original: Rank) -> None:
        before = self._changed.get(name, original)
        if before is None:
            return  # what is gone does not come back
        after = self._rank_now(name, fit, before)
        if name not in self._changed or after != before:
            self._changed[name] = after
            self.version += 1
            if after is None:
                self._gained[fit.bucket] -= 1
                takers, kept = self._plan.takers, self._plan.kept
                node_id = next(w for w in self.group(name).node_ids if w in takers)
                words = "is kept for" if node_id in kept else "goes to"
                self.given_away.append((name, words, takers[node_id]))
            else:
                heapq.heappush(self._reranked[fit.bucket], after)

    def _rank_now(self, name: str, fit: Fit, rank: Rank) -> Rank | None:
        usable = self._usable(name, fit)
        spare = len(usable) - self._tasks(fit)
        for worker in usable:
            spare -= not self._has_room(worker)
            if spare < 0:
                return None
        return (*rank[:3], spare, name) if self.candidates.requirement.group_by else rank

    def _has_room(self, worker: Worker) -> bool:
        plan, node_id = self._plan, worker.node_id
        if node_id in plan.kept:
            return False
        taken = plan.taken.get(node_id)
        return taken is None or self.candidates.requirement.has_room(worker, taken)

    def _ranks_of(self, own: Iterable[str], bucket: int) -> list[Rank]:
        if self.candidates.requirement.group_by != TPU_NAME:
            return []
        ranks = []
        for name in own:
            fit = self.candidates.fits.get(name)
            if fit is not None and fit.bucket == bucket and (rank := self._changed.get(name, fit.rank)):
                ranks.append((*rank[:2], -1, *rank[3:]))
        return sorted(ranks)

    def _unchanged(self, bucket: int) -> Iterator[Rank]:
        ranks, start = self.candidates.free.get(bucket, []), self._passed[bucket]
        while start < len(ranks) and ranks[start][-1] in self._changed:
            start += 1
        self._passed[bucket] = start
        return (rank for rank in islice(ranks, start, None) if rank[-1] not in self._changed)

    def _still_free(self, bucket: int, count: int) -> list[Rank]:
        heap = self._reranked[bucket]
        while heap and self._changed[heap[0][-1]] != heap[0]:
            heapq.heappop(heap)
        if count == 1:
            return heap[:1]
        return heapq.nsmallest(count, (rank for rank in heap if self._changed[rank[-1]] == rank))
