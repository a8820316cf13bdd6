"""All live workers, the resources that tasks hold on them, and the scheduler's indexes.

An event never rebuilds an index of the whole fleet. The fleet logs changed workers, and each index catches up with the
log when it is next read.
"""

import heapq
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from iris_ray.model.constraints import TAINT_PREFIX, Attributes, AttributeValue
from iris_ray.model.jobs import Allocation, Job
from iris_ray.model.lifecycle import AttemptId
from iris_ray.model.options import PriorityBand
from iris_ray.model.parts import part_attribute, shape_of_part, slice_of
from iris_ray.model.plain_values import Words, plain
from iris_ray.model.workers import TPU, TPU_NAME, TPU_TOPOLOGY, Occupant, Resources, Worker, string_attribute
from iris_ray.state.groups import Group, Grouping, part_name
from iris_ray.state.instructions import ChangeLog
from iris_ray.state.team_use import TeamUse
from iris_ray.state.user_limits import PastUsage, UserLimits

SUSPICION_S = 20.0
"""Seconds for which a host that did not answer gets no new tasks. Ray's default health checks declare a crashed host
dead after about 15 s."""


@dataclass(frozen=True, slots=True)
class Taint:
    """Excludes jobs that don't tolerate it.

    Attributes:
        reason: why it was set, for people; a value that isn't a str raises InvalidMessageError.
        until: when it expires, in seconds on the events' clock; None: never.
    """

    reason: str
    until: float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "reason", plain(Words, self.reason, "the reason of a taint"))


class Fleet:
    """The workers of the cluster. Only `ControllerState` changes it; the scheduler reads it.

    Attributes:
        workers: the live workers by node_id.
        holders: name of a slice or part → owner that keeps actors there, whether tasks run there or not.
        totals: the total resources of all workers, by Ray's names.
        chips: the number of chips by TPU type.
        taints: target (node_id or slice name) → taint's name → taint.
        host_sizes: TPU type → the largest amount of each resource on any host of the type so far, including lost hosts.
        avoided: user → node_id of a host that the user's jobs avoid → end of that; seconds on the events' clock.
    """

    def __init__(self) -> None:
        self.workers: dict[str, Worker] = {}
        self.holders: dict[str, str] = {}
        self.totals: Counter[str] = Counter()
        self.chips: Counter[str] = Counter()
        self.taints: dict[str, dict[str, Taint]] = {}
        self.host_sizes: dict[str, dict[str, float]] = {}
        self.avoided: dict[str, dict[str, float]] = {}
        self._expiries: list[tuple[float, str, str]] = []  # a heap: when a taint may expire, its target, its name
        self._suspicions: list[tuple[float, str]] = []  # a heap: when a suspicion may end, and the node_id
        self._held_by: defaultdict[str, set[str]] = defaultdict(set)
        self._parts_held: dict[str, dict[str, set[str]]] = {}  # slice name → shape → its parts in ``holders``
        self._groupings: dict[str | None, Grouping] = {TPU_NAME: Grouping(TPU_NAME)}
        self._changes: ChangeLog[Worker] = ChangeLog()

    # -- reading ---------------------------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        """The number of changes so far."""
        return self._changes.version

    def grouping(self, key: str | None) -> Grouping:
        """Return the workers grouped by the values of an attribute."""
        grouping = self._groupings.get(key)
        if grouping is None:
            grouping = self._groupings[key] = Grouping(key, self.workers.values(), self._groupings[TPU_NAME])
        return grouping

    def keeps(self, key: str | None, grouping: Grouping) -> bool:
        """Return whether this is the grouping by that attribute that is kept up to date."""
        return self._groupings.get(key) is grouping

    def changes_since(self, version: int) -> Sequence[Worker] | None:
        """Return the workers changed since a version, oldest change first; None if the log no longer covers it."""
        return self._changes.since(version)

    def held_by(self, owner: str) -> Iterable[str]:
        """Return the names of the slices and parts on which an owner keeps actors."""
        return self._held_by.get(owner, ())

    def held_on(self, name: str) -> list[str]:
        """Return the slices and parts on which an owner keeps actors and that share hosts with a slice or part."""
        whole = slice_of(name)
        found = [whole] if whole in self.holders else []
        if shapes := self._parts_held.get(whole):
            parts = {part_name(worker, shape) for worker in self.slice_workers(name) for shape in shapes}
            found += sorted(part for part in parts if part is not None and part in self.holders)
        return found

    def holder_of(self, worker: Worker) -> str | None:
        """Return the owner that keeps actors on a worker's chips, or None."""
        name = worker.slice_name or ""
        for shape, parts in self._parts_held.get(name, {}).items():
            if (part := part_name(worker, shape)) in parts:
                return self.holders[part]
        return self.holders.get(name)

    def slice_types(self) -> Counter[str]:
        """Return the number of slices of each TPU type."""
        groups = self._groupings[TPU_NAME].groups()
        return Counter(string_attribute(g.workers[0].attributes, TPU_TOPOLOGY) or "unknown type" for g in groups)

    def slice_workers(self, name: str) -> Sequence[Worker]:
        """Return the live hosts of a slice, or of a part of one."""
        whole, shape = slice_of(name), shape_of_part(name)
        if shape is not None and (parts := self._groupings.get(part_attribute(shape))) is not None:
            return group.workers if (group := parts.get(name)) else ()
        workers = group.workers if (group := self._groupings[TPU_NAME].get(whole)) else ()
        return workers if shape is None else [worker for worker in workers if part_name(worker, shape) == name]

    def avoided_by(self, user: str, now: float) -> tuple[str, ...]:
        """Return the node ids of the hosts that a user's jobs avoid."""
        hosts = self.avoided.get(user)
        return tuple(node_id for node_id, until in hosts.items() if now < until) if hosts else ()

    # -- changing --------------------------------------------------------------------------------------------------

    def forget_grouping(self, key: str) -> None:
        """Drop the grouping by an attribute, which `grouping` rebuilds when it is next needed."""
        if key != TPU_NAME:
            self._groupings.pop(key, None)

    def register(self, worker: Worker) -> None:
        """Add a worker, or update its registration while keeping its drain, suspicion and occupants."""
        if (attributes := self._with_taints(worker)) is not worker.attributes:
            worker = replace(worker, attributes=attributes)
        if tpu_type := string_attribute(worker.attributes, TPU_TOPOLOGY):
            size = self.host_sizes.setdefault(tpu_type, {})
            size.update({r: amount for r, amount in worker.resources.items() if amount > size.get(r, 0.0)})
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
        """Set a taint on a worker or a slice. The target need not exist yet."""
        self.taints.setdefault(target, {})[name] = taint
        if taint.until is not None:
            heapq.heappush(self._expiries, (taint.until, target, name))
        self._taints_changed(target)

    def lift_taint(self, target: str, name: str) -> None:
        """Remove a taint, if it was set."""
        if self.taints.get(target, {}).pop(name, None) is None:
            return
        if not self.taints[target]:
            del self.taints[target]
        self._taints_changed(target)

    def avoid(self, user: str, node_id: str, until: float | None) -> None:
        """Make a user's jobs avoid a host until a time on the events' clock; None ends that."""
        avoided = self.avoided.setdefault(user, {})
        avoided.pop(node_id, None)
        if until is not None:
            avoided[node_id] = until
        if not avoided:
            del self.avoided[user]
        if worker := self.workers.get(node_id):
            self._record_change(worker)

    def suspect(self, node_id: str, reason: str, until: float) -> None:
        """Record that a worker may be lost: it gets no new tasks until a time on the events' clock."""
        if worker := self.workers.get(node_id):
            until = max(worker.suspected_until, until)
            self.put(replace(worker, suspected=reason, suspected_until=until))
            heapq.heappush(self._suspicions, (until, node_id))

    def time_passed(self, now: float) -> None:
        """Remove taints and avoidances that have expired, and record workers whose suspicion has ended as changed."""
        while self._suspicions and self._suspicions[0][0] <= now:
            until, node_id = heapq.heappop(self._suspicions)
            worker = self.workers.get(node_id)
            if worker is not None and worker.suspected_until == until:
                self._record_change(worker)
        ended = [(user, host) for user, hosts in self.avoided.items() for host, until in hosts.items() if until <= now]
        for user, node_id in ended:
            self.avoid(user, node_id, None)
        while self._expiries and self._expiries[0][0] <= now:
            until, target, name = heapq.heappop(self._expiries)
            taint = self.taints.get(target, {}).get(name)
            if taint is not None and taint.until == until:  # otherwise it was removed or replaced
                self.lift_taint(target, name)

    def _taints_changed(self, target: str) -> None:
        for node_id in {target, *(worker.node_id for worker in self.slice_workers(target))}:
            if worker := self.workers.get(node_id):
                self.put(replace(worker, attributes=self._with_taints(worker)))

    def _with_taints(self, worker: Worker) -> Attributes:
        taints = {**self.taints.get(worker.slice_name or "", {}), **self.taints.get(worker.node_id, {})}
        if not taints:
            return worker.reported
        return {
            **worker.reported,
            **{TAINT_PREFIX + name: AttributeValue(taint.reason) for name, taint in taints.items()},
        }

    def put(self, worker: Worker) -> None:
        """Add a worker, or replace the one with its node_id."""
        if worker.node_id in self.workers:
            self.remove(worker.node_id)
        self.workers[worker.node_id] = worker
        self.totals.update(worker.resources)
        self._count_chips(worker, 1)
        for grouping in self._groupings.values():
            grouping.add(worker)
        self._record_change(worker)
        self._mark_duplicates(worker)

    def remove(self, node_id: str) -> None:
        """Remove a worker that is no longer alive."""
        worker = self.workers.pop(node_id)
        self.totals.subtract(worker.resources)
        self._count_chips(worker, -1)
        for grouping in self._groupings.values():
            grouping.remove(worker)
        self._record_change(worker)
        self._mark_duplicates(worker)

    def _count_chips(self, worker: Worker, sign: int) -> None:
        if tpu_type := string_attribute(worker.attributes, TPU_TOPOLOGY):
            self.chips[tpu_type] += sign * int(worker.resources.get(TPU, 0.0))

    def _mark_duplicates(self, changed: Worker) -> None:
        """Mark hosts of a slice that claim the same host_index, none of which can be used."""
        slice_mates = self._groupings[TPU_NAME].members(changed.slice_name) if changed.slice_name else ()
        duplicates = [worker for worker in slice_mates if worker.host_index == changed.host_index]
        for worker in duplicates:
            if worker.duplicate != (len(duplicates) > 1):
                worker.duplicate = len(duplicates) > 1
                for grouping in self._groupings.values():
                    grouping.add(worker)  # invalidates its group
                self._record_change(worker)

    def occupy(self, node_id: str, occupants: Mapping[Occupant, Resources]) -> None:
        """Add occupants to a worker, with the resources that they take."""
        worker = self.workers[node_id]
        worker.occupy(occupants)
        self._occupants_changed(worker)

    def vacate(self, node_id: str, occupant: Occupant) -> None:
        """Remove an occupant from a worker and free its resources, if the worker is still alive."""
        if worker := self.workers.get(node_id):
            worker.vacate(occupant)
            self._occupants_changed(worker)

    def mark_ending(self, node_id: str, occupant: Occupant, now: float) -> None:
        """Record when an occupant ended. It holds its resources until its end is confirmed."""
        if worker := self.workers.get(node_id):
            worker.ending.setdefault(occupant, now)
            self._record_change(worker)

    def hold(self, slice_name: str, owner: str | None) -> None:
        """Record which owner keeps actors on a slice or part; None if no owner does."""
        if before := self.holders.pop(slice_name, None):
            self._held_by[before].discard(slice_name)
            if not self._held_by[before]:
                del self._held_by[before]
        if owner is not None:
            self.holders[slice_name] = owner
            self._held_by[owner].add(slice_name)
        if (shape := shape_of_part(slice_name)) is not None:
            self._hold_part(slice_of(slice_name), shape, slice_name, owner is not None)
        for worker in self.slice_workers(slice_name):
            self._record_change(worker)

    def _hold_part(self, slice_name: str, shape: str, part: str, is_held: bool) -> None:
        shapes = self._parts_held.setdefault(slice_name, {})
        parts = shapes.setdefault(shape, set())
        if is_held:
            parts.add(part)
        else:
            parts.discard(part)
        if not parts:
            del shapes[shape]
        if not shapes:
            del self._parts_held[slice_name]

    def _occupants_changed(self, worker: Worker) -> None:
        for grouping in self._groupings.values():
            grouping.occupants_changed(worker)
        self._record_change(worker)

    def _record_change(self, worker: Worker) -> None:
        self._changes.note(worker, 4 * len(self.workers) + 1000)  # a reader that is further behind starts over

    # -- checking --------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise AssertionError if an index disagrees with the workers. For tests."""
        assert all(self.avoided.values()), "an empty entry of what a user's jobs avoid"
        assert +self.totals == +sum((Counter(w.resources) for w in self.workers.values()), Counter())
        for owner, names in self._held_by.items():
            assert names == {name for name, holder in self.holders.items() if holder == owner}
        parts = {part for shapes in self._parts_held.values() for parts in shapes.values() for part in parts}
        assert all(parts for shapes in self._parts_held.values() for parts in shapes.values()), "an empty entry"
        assert parts == {name for name in self.holders if shape_of_part(name)}, "the index of held parts is wrong"
        for key, grouping in self._groupings.items():
            fresh = Grouping(key, self.workers.values())
            assert set(grouping) == set(fresh), f"groups by {key} differ"
            for name in fresh:
                have, want = grouping.get(name), fresh.get(name)
                assert have is not None, name
                assert want is not None, name
                assert _contents(have) == _contents(want), f"group {name} by {key} is out of date"


def _contents(group: Group) -> Mapping[str, object]:
    names = (*(name for name in Group.__slots__ if not name.startswith("_")), "room", "chips_idle")
    return {name: getattr(group, name) for name in names}


class Allocations:
    """The resources that each attempt holds until its end is confirmed.

    Attributes:
        usage: the amounts that each user's gangs hold, by Ray's resource names.
        past: the users' past usage.
        by_band: the attempts of each band, ordered by when they got hosts or last reported a save.
        heeding: the attempts in ``by_band`` that save their state when they receive a notice.
    """

    def __init__(self, fleet: Fleet, limits: UserLimits, teams: TeamUse) -> None:
        self.usage: dict[str, Counter[str]] = {}
        self.past = PastUsage(self.usage)
        self._fleet = fleet
        self.by_band: dict[PriorityBand, dict[AttemptId, None]] = {band: {} for band in PriorityBand}
        self.heeding: dict[PriorityBand, dict[AttemptId, None]] = {band: {} for band in PriorityBand}
        self._limits = limits
        self._teams = teams
        self._of: dict[str, dict[AttemptId, Allocation]] = {}  # by job id

    def of(self, job_id: str) -> Mapping[AttemptId, Allocation]:
        """Return the resources that a job's attempts hold."""
        return self._of.get(job_id, {})

    def __iter__(self) -> Iterator[AttemptId]:
        return (attempt for allocations in self._of.values() for attempt in allocations)

    def of_owner(self, jobs: Mapping[str, Job], owner: str) -> list[AttemptId]:
        """Return the attempts of one owner's jobs."""
        return [attempt for attempt in self if jobs[attempt.job_id].spec.owner == owner]

    def add(self, job: Job, allocations: Mapping[AttemptId, Allocation]) -> None:
        """Record resources that attempts of a job hold from now on."""
        self._of.setdefault(job.spec.job_id, {}).update(allocations)
        self.past.settle(job.spec.user)
        self.by_band[job.spec.priority].update(dict.fromkeys(allocations))
        heeding = (attempt for attempt in allocations if job.gangs[attempt.gang].heeds_notices)
        self.heeding[job.spec.priority].update(dict.fromkeys(heeding))
        usage = self.usage.setdefault(job.spec.user, Counter())
        by_host: dict[str, dict[Occupant, Resources]] = {}
        for attempt, allocation in allocations.items():
            for node_id, task_id, demand in allocation:
                by_host.setdefault(node_id, {})[task_id, attempt] = demand
                for resource, amount in demand.items():
                    usage[resource] += amount  # type: ignore[assignment]  # Counter's amounts may be fractions
        for node_id, occupants in by_host.items():
            self._fleet.occupy(node_id, occupants)
        demands = [demand for held in allocations.values() for _, _, demand in held]
        self._limits.took(job.spec, demands)
        self._teams.took(job.spec, demands)

    def end(self, job: Job, attempt: AttemptId) -> bool:
        """Free all resources of an attempt. Return whether it held any."""
        allocations = self._of.get(job.spec.job_id, {})
        allocation = allocations.pop(attempt, None)
        if allocation is None:
            return False
        del self.by_band[job.spec.priority][attempt]
        self.heeding[job.spec.priority].pop(attempt, None)
        if not allocations:
            del self._of[job.spec.job_id]
        for node_id, task_id, demand in allocation:
            self._fleet.vacate(node_id, (task_id, attempt))
            self._give_back(job.spec.user, demand)
        demands = [demand for _, _, demand in allocation]
        self._limits.gave_back(job.spec, demands, holds_more=bool(allocations))
        self._teams.gave_back(job.spec, demands)
        return True

    def has_saved(self, job: Job, attempt: AttemptId, heeds_notices: bool) -> None:
        """Record that an attempt has saved its state, or would do so on a notice."""
        attempts, heeding = self.by_band[job.spec.priority], self.heeding[job.spec.priority]
        if attempt in attempts:
            del attempts[attempt]
            attempts[attempt] = None
            if heeds_notices:
                heeding[attempt] = None

    def let_go(self, job: Job, node_id: str, attempt: AttemptId) -> None:
        """Remove the resources that an attempt held on a lost worker."""
        allocations = self._of[job.spec.job_id]
        lost = next(demand for place, _, demand in allocations[attempt] if place == node_id)
        self._give_back(job.spec.user, lost)
        self._limits.gave_back(job.spec, [lost], holds_more=True)  # until the attempt's end is confirmed
        self._teams.gave_back(job.spec, [lost])
        allocations[attempt] = tuple(held for held in allocations[attempt] if held[0] != node_id)

    def mark_ending(self, attempt: AttemptId, now: float) -> None:
        """Mark an attempt's resources as about to be free: it has ended, but its end is not confirmed yet."""
        for node_id, task_id, _ in self.of(attempt.job_id).get(attempt, ()):
            self._fleet.mark_ending(node_id, (task_id, attempt), now)

    def _give_back(self, user: str, demand: Mapping[str, float]) -> None:
        self.past.settle(user)
        usage = self.usage.get(user, Counter())  # no entry if the user's tasks ask for nothing
        usage.subtract(demand)
        if not any(amount > 1e-9 for amount in usage.values()):
            self.usage.pop(user, None)  # also drops rounding errors of fractions

    def all_of(self) -> Mapping[str, Mapping[AttemptId, Allocation]]:
        """Return the resources that attempts hold, by job id."""
        return self._of


# -- host identity -----------------------------------------------------------------------------------------------------


def why_replaced(known: Worker, now: Worker, jobs: Mapping[str, Job]) -> str | None:
    """Return why a host counts as lost when it registers again, or None if it keeps its tasks.

    A gang can't continue on two slices, nor a task on chips that no longer exist. ``known`` is the host as it
    registered before, with its occupants, and ``now`` as it registers now; ``jobs`` has the jobs of all occupants by
    id.
    """
    for resource, held in known.held.items():  # in whole units, since a sum of fractions may exceed the total
        if held > (has := now.resources.get(resource, 0.0)):
            return f"the host came back with {has:g} {resource}, and its tasks hold {held:g}"
    for group_by in {_group_by(jobs[attempt.job_id]) for _, attempt in known.occupants} - {None}:
        grouping = Grouping(group_by)
        was, is_now = grouping.name_of(known), grouping.name_of(now)
        if was != is_now:
            return f"the host came back in {group_by} {is_now}; it was in {was}"
    return None


def with_drain_of(now: Worker, known: Worker) -> Worker:
    """Return the new host with the drain and suspicion of the old one, which concern the machine and not its slice."""
    return replace(
        now,
        draining=known.draining,
        notice=known.notice,
        final=known.final,
        suspected=known.suspected,
        suspected_until=known.suspected_until,
    )


def _group_by(job: Job) -> str | None:
    return job.spec.coscheduling.group_by if job.spec.coscheduling else None
