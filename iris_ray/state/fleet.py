"""All live workers, who holds what of them, and the indexes that the scheduler reads.

Nothing is rebuilt from the whole fleet when something happens: a change is noted, and each index catches up with what
was noted when it is next read.
"""

import heapq
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from iris_ray.model.constraints import TAINT_PREFIX, Attributes, AttributeValue
from iris_ray.model.workers import TPU_NAME, TPU_TOPOLOGY, Occupant, Resources, Worker, string_attribute
from iris_ray.state.groups import Grouping

SUSPICION_S = 20.0
"""A host that did not answer is left alone so long, unless Ray declares it dead before: with its default health checks
that takes about 15 s after a crash."""


@dataclass(frozen=True, slots=True)
class Taint:
    """What keeps jobs away that don't tolerate it.

    Attributes:
        reason: why, for people.
        until: when it ends by itself, or None; seconds.
    """

    reason: str
    until: float | None = None


class Fleet:
    """The workers of the cluster. Changed by `ControllerState` alone; the scheduler only reads.

    Attributes:
        workers: by worker id; only those that are alive.
        holders: slice name → owner that keeps actors on it, busy or warm.
        totals: what all workers have together, by Ray's resource names.
        taints: what was set on workers and slices: target → name → taint.
    """

    def __init__(self) -> None:
        self.workers: dict[str, Worker] = {}
        self.holders: dict[str, str] = {}
        self.totals: Counter[str] = Counter()
        self.taints: dict[str, dict[str, Taint]] = {}
        self._expiries: list[tuple[float, str, str]] = []  # a heap: when a taint may be over, its target and its name
        self._suspicions: list[tuple[float, str]] = []  # a heap: when a suspicion may be over, and whose
        self._held_by: defaultdict[str, set[str]] = defaultdict(set)
        self._groupings: dict[str | None, Grouping] = {TPU_NAME: Grouping(TPU_NAME)}
        self._changed: list[Worker] = []  # oldest first
        self._forgotten = 0  # changes before these, which nobody can catch up with any more

    # -- reading ---------------------------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        """Counts changes."""
        return self._forgotten + len(self._changed)

    def grouping(self, key: str | None) -> Grouping:
        """The workers by the values of an attribute."""
        grouping = self._groupings.get(key)
        if grouping is None:
            grouping = self._groupings[key] = Grouping(key)
            for worker in self.workers.values():
                grouping.add(worker)
        return grouping

    def changes_since(self, version: int) -> Sequence[Worker] | None:
        """Return the workers that have changed since that version, oldest first; None if it is too long ago to tell."""
        return None if version < self._forgotten else self._changed[version - self._forgotten :]

    def held_by(self, owner: str) -> Iterable[str]:
        """Names of the slices that an owner keeps."""
        return self._held_by.get(owner, ())

    def slice_types(self) -> Counter[str]:
        """How many slices there are of each type."""
        grouping = self._groupings[TPU_NAME]
        groups = filter(None, map(grouping.get, grouping))
        return Counter(string_attribute(g.workers[0].attributes, TPU_TOPOLOGY) or "unknown type" for g in groups)

    def slice_workers(self, name: str) -> Sequence[Worker]:
        """The live hosts of a slice."""
        group = self._groupings[TPU_NAME].get(name)
        return group.workers if group else ()

    # -- changing --------------------------------------------------------------------------------------------------

    def register(self, worker: Worker) -> None:
        """A worker appeared, or what it reports changed. What is known of it besides is kept, a drain included."""
        worker.attributes = self._with_taints(worker)
        if known := self.workers.get(worker.node_id):
            worker = replace(
                worker,
                draining=worker.draining or known.draining,
                notice=worker.notice or known.notice,
                final=worker.final or known.final,
                suspected=known.suspected,
                suspected_until=known.suspected_until,
                occupants=known.occupants,
                ending=known.ending,
            )
        self.put(worker)

    def taint(self, target: str, name: str, taint: Taint) -> None:
        """Set a taint on a worker or a slice, also on one that is not there yet."""
        self.taints.setdefault(target, {})[name] = taint
        if taint.until is not None:
            heapq.heappush(self._expiries, (taint.until, target, name))
        self._taints_changed(target)

    def lift_taint(self, target: str, name: str) -> None:
        """Take a taint back, if it was set."""
        if self.taints.get(target, {}).pop(name, None) is None:
            return
        if not self.taints[target]:
            del self.taints[target]
        self._taints_changed(target)

    def suspect(self, node_id: str, reason: str, until: float) -> None:
        """A worker may be lost; for so long it gets nothing new."""
        if worker := self.workers.get(node_id):
            until = max(worker.suspected_until, until)
            self.put(replace(worker, suspected=reason, suspected_until=until))
            heapq.heappush(self._suspicions, (until, node_id))

    def time_passed(self, now: float) -> None:
        """Take back the taints whose time is over, and take note of workers that are not suspected any more."""
        while self._suspicions and self._suspicions[0][0] <= now:
            until, node_id = heapq.heappop(self._suspicions)
            worker = self.workers.get(node_id)
            if worker is not None and worker.suspected_until == until:
                self._note(worker)
        while self._expiries and self._expiries[0][0] <= now:
            until, target, name = heapq.heappop(self._expiries)
            taint = self.taints.get(target, {}).get(name)
            if taint is not None and taint.until == until:  # else it was lifted, or set anew
                self.lift_taint(target, name)

    def _taints_changed(self, target: str) -> None:
        for node_id in {target, *(worker.node_id for worker in self.slice_workers(target))}:
            if worker := self.workers.get(node_id):
                self.put(replace(worker, attributes=self._with_taints(worker)))

    def _with_taints(self, worker: Worker) -> Attributes:
        """What a worker reports, and the taints that were set on it or on its slice."""
        taints = {**self.taints.get(worker.slice_name or "", {}), **self.taints.get(worker.node_id, {})}
        if not taints:
            return worker.reported
        return {
            **worker.reported,
            **{TAINT_PREFIX + name: AttributeValue(taint.reason) for name, taint in taints.items()},
        }

    def put(self, worker: Worker) -> None:
        """A worker that is new, or that replaces what was known of it."""
        if worker.node_id in self.workers:
            self.remove(worker.node_id)
        self.workers[worker.node_id] = worker
        self.totals.update(worker.resources)
        for grouping in self._groupings.values():
            grouping.add(worker)
        self._note(worker)
        self._mark_twins(worker)

    def remove(self, node_id: str) -> None:
        worker = self.workers.pop(node_id)
        self.totals.subtract(worker.resources)
        for grouping in self._groupings.values():
            grouping.remove(worker)
        self._note(worker)
        self._mark_twins(worker)

    def _mark_twins(self, changed: Worker) -> None:
        """Two hosts with one number are both of no use: nobody can tell which is which."""
        slice_mates = self._groupings[TPU_NAME].members(changed.slice_name) if changed.slice_name else ()
        twins = [worker for worker in slice_mates if worker.host_index == changed.host_index]
        for worker in twins:
            if worker.duplicate != (len(twins) > 1):
                worker.duplicate = len(twins) > 1
                for grouping in self._groupings.values():
                    grouping.add(worker)  # once more, so that its groups are made anew
                self._note(worker)

    def occupy(self, node_id: str, occupant: Occupant, resources: Resources) -> None:
        worker = self.workers[node_id]
        worker.occupy(occupant, resources)
        self._occupants_changed(worker)

    def vacate(self, node_id: str, occupant: Occupant) -> None:
        """Free what an occupant held, if the worker still lives."""
        if worker := self.workers.get(node_id):
            worker.vacate(occupant)
            self._occupants_changed(worker)

    def mark_ending(self, node_id: str, occupant: Occupant) -> None:
        """The occupant is over; its end will be confirmed in a moment."""
        if worker := self.workers.get(node_id):
            worker.ending.add(occupant)
            self._note(worker)

    def hold(self, slice_name: str, owner: str | None) -> None:
        """An owner keeps actors on a slice from now on, or nobody does."""
        if before := self.holders.pop(slice_name, None):
            self._held_by[before].discard(slice_name)
            if not self._held_by[before]:
                del self._held_by[before]
        if owner is not None:
            self.holders[slice_name] = owner
            self._held_by[owner].add(slice_name)
        for worker in self.slice_workers(slice_name):
            self._note(worker)

    def _occupants_changed(self, worker: Worker) -> None:
        for grouping in self._groupings.values():
            grouping.occupants_changed(worker)
        self._note(worker)

    def _note(self, worker: Worker) -> None:
        self._changed.append(worker)
        if len(self._changed) > 4 * len(self.workers) + 1000:  # to look at everything is no more work
            self._forgotten += len(self._changed)
            self._changed.clear()

    # -- checking --------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise AssertionError if an index differs from what the workers say. For tests."""
        assert +self.totals == +sum((Counter(w.resources) for w in self.workers.values()), Counter())
        for owner, names in self._held_by.items():
            assert names == {name for name, holder in self.holders.items() if holder == owner}
        for key, grouping in self._groupings.items():
            fresh = Grouping(key)
            for worker in self.workers.values():
                fresh.add(worker)
            assert set(grouping) == set(fresh), f"groups by {key} are off"
            for name in fresh:
                have, want = grouping.get(name), fresh.get(name)
                assert have is not None, name
                assert want is not None, name
                assert _contents(have) == _contents(want), f"group {name} by {key} is out of date"


def _contents(group: object) -> Mapping[str, object]:
    slots = ("name", "workers", "size", "flaw", "taints", "ailing", "suspects", "room")
    return {name: getattr(group, name) for name in slots}
