"""What is available to one requirement while a plan is made: its candidates minus what the plan has given away."""

import heapq
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from iris_ray.model.workers import TPU_NAME, Worker
from iris_ray.scheduler.candidates import Candidates
from iris_ray.scheduler.evaluation import Evaluation, Rank, Status
from iris_ray.scheduler.pending_reason import PendingKind, Shortage
from iris_ray.scheduler.plan import Plan
from iris_ray.state.groups import Group


@dataclass(frozen=True, slots=True)
class FailedPlacement:
    """Why a gang got no groups. Holds for every gang with the same requirement and the same ``num_groups``.

    Attributes:
        kind: the kind of pending reason.
        num_groups: the numbers of groups that the gang can use, ascending.
        free: how many groups are free.
        suitable: how many groups would be free if no task used them.
        shortage: what is in the way.
    """

    kind: PendingKind
    num_groups: tuple[int, ...]
    free: int
    suitable: int
    shortage: Shortage


class GivenAway(NamedTuple):
    """A group that was free before the plan gave it away.

    Attributes:
        group: its name.
        job_id: the job that gets it.
        is_kept: whether the group is only kept for that job.
    """

    group: str
    job_id: str
    is_kept: bool


class Availability:
    """The candidates of one requirement as the plan leaves them. The candidates themselves don't change.

    Attributes:
        candidates: the groups without the plan.
        version: counts the changes that the plan has made to them.
        kept: buckets of which some group is kept for a job.
        unplaced: ids of the jobs that found too little here, in the order of the queue.
        failed_placements: ``num_groups`` → why such a gang got nothing. It holds for all later gangs until the plan
            gives something away, so a long queue of identical jobs is cheap.
        given_away: groups that were free before the plan.
    """

    def __init__(self, candidates: Candidates, plan: Plan) -> None:
        self.candidates = candidates
        self.version = 0
        self.kept: set[int] = set()
        self.unplaced: list[str] = []
        self.failed_placements: dict[tuple[int, ...], FailedPlacement] = {}
        self.given_away: list[GivenAway] = []
        self._plan = plan
        self._seen = 0  # how many of the plan's touched workers are accounted for
        self._changed: dict[str, Rank | None] = {}  # groups that the plan has changed: their rank now; None if not free
        self._reranked: defaultdict[int, list[Rank]] = defaultdict(
            list
        )  # heaps of groups that are free with a new rank
        self._gained: Counter[int] = Counter()  # bucket → change of the number of free groups; at most 0
        self._free_soon: dict[str, bool] = {}  # touched groups: whether they are about to be free
        self._gained_soon: Counter[int] = Counter()  # bucket → change of the number of groups that are about to be free
        self._passed: Counter[int] = Counter()  # bucket → how many ranks at the front are known to have changed

    def catch_up(self) -> None:
        """Account for what the plan has given away since the last call."""
        touched = self._plan.touched
        if self._seen == len(touched):
            return
        self.failed_placements.clear()
        name_of = self.candidates.grouping.name_of
        names = dict.fromkeys(name_of(worker) for worker in islice(touched, self._seen, None))
        self._seen = len(touched)
        for name in names:
            found = self.candidates.evaluations.get(name) if name is not None else None
            if found is None or name is None or found.status is Status.UNSUITABLE:
                continue
            if any(node_id in self._plan.kept for node_id in self.group(name).node_ids):
                self.kept.add(found.bucket)
            if found.rank is not None:
                self._change(name, found, found.rank)
            soon = self._changed.get(name, found.rank) is None and self._will_have_room(name, found)
            self._gained_soon[found.bucket] += soon - self._free_soon.get(name, found.free_soon)
            self._free_soon[name] = soon

    def free(self, bucket: int) -> int:
        """Return how many groups are free."""
        return len(self.candidates.free.get(bucket, ())) + self._gained[bucket]

    def free_soon(self, bucket: int) -> int:
        """Return how many groups are about to be free."""
        return self.candidates.free_soon[bucket] + self._gained_soon[bucket]

    def closest_to_free(self, buckets: Collection[int]) -> Iterator[str]:
        """Iterate over the names of groups that are in use or given away, the closest to being free first."""
        evaluations, plan, shortfall = self.candidates.evaluations, self._plan, self.candidates.requirement.shortfall
        touched = []
        for name in self._free_soon:
            found = evaluations[name]
            if found.bucket in buckets and self._changed.get(name, found.rank) is None:
                missing = [lack for w in found.eligible if (lack := shortfall(w, plan.taken.get(w.node_id))) > 0]
                touched.append((self._tasks(found) - len(found.eligible) + len(missing), sum(missing), name))
        untouched = (
            entry
            for entry in self.candidates.closest
            if entry[2] not in self._free_soon
            and evaluations[entry[2]].status is Status.IN_USE
            and evaluations[entry[2]].bucket in buckets
        )
        return (name for _, _, name in heapq.merge(sorted(touched), untouched))

    def best(self, bucket: int, count: int, own: Iterable[str]) -> list[str]:
        """Return the names of the best free groups.

        Args:
            bucket: where to look.
            count: how many names to return at most.
            own: slices where the job's owner keeps actors; they are preferred.
        """
        if not count:
            return []
        names: dict[str, None] = {}
        for rank in heapq.merge(self._ranks_of(own, bucket), self._unchanged(bucket), self._still_free(bucket, count)):
            names[rank[-1]] = None
            if len(names) == count:
                break
        return list(names)

    def members(self, name: str) -> tuple[Worker, ...]:
        """Return the workers of a free group that the gang would take."""
        found = self.candidates.evaluations[name]
        usable, tasks = self._usable(name, found), self._tasks(found)
        if len(usable) == tasks:
            return usable
        return tuple(islice(filter(self._has_room, usable), tasks))

    def group(self, name: str) -> Group:
        """Return a candidate's group by its name."""
        group = self.candidates.grouping.get(name)
        assert group is not None, f"{name} is a candidate, but not a group"
        return group

    def _tasks(self, found: Evaluation) -> int:
        return found.bucket or self.candidates.requirement.replicas

    def _usable(self, name: str, found: Evaluation) -> tuple[Worker, ...]:
        return self.group(name).workers if found.usable is None else found.usable

    def _will_have_room(self, name: str, found: Evaluation) -> bool:
        plan, has_room = self._plan, self.candidates.requirement.has_room
        if not any(worker.ending for worker in found.eligible):
            return False
        not_kept = (w for w in found.eligible if w.node_id not in plan.kept)
        return sum(has_room(w, plan.taken.get(w.node_id), soon=True) for w in not_kept) >= self._tasks(found)

    def _change(self, name: str, found: Evaluation, original: Rank) -> None:
        before = self._changed.get(name, original)
        if before is None:
            return  # the plan takes nothing back, so the group does not become free again
        after = self._rank_now(name, found, before)
        if name not in self._changed or after != before:
            self._changed[name] = after
            self.version += 1
            if after is None:
                self._gained[found.bucket] -= 1
                takers, kept = self._plan.takers, self._plan.kept
                node_id = next(w for w in self.group(name).node_ids if w in takers)
                self.given_away.append(GivenAway(name, takers[node_id], node_id in kept))
            else:
                heapq.heappush(self._reranked[found.bucket], after)

    def _rank_now(self, name: str, found: Evaluation, rank: Rank) -> Rank | None:
        usable = self._usable(name, found)
        hosts_left = len(usable) - self._tasks(found)
        for worker in usable:
            hosts_left -= not self._has_room(worker)
            if hosts_left < 0:
                return None
        return (*rank[:3], hosts_left, name) if self.candidates.requirement.group_by else rank

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
            found = self.candidates.evaluations.get(name)
            if found is not None and found.bucket == bucket and (rank := self._changed.get(name, found.rank)):
                ranks.append((*rank[:2], -1, *rank[3:]))  # sorts before groups that no owner keeps
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
