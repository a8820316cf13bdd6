"""How many more slices the waiting jobs need. Pure."""

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache

from iris_ray.model.constraints import AttributeValue
from iris_ray.model.jobs import Job
from iris_ray.model.parts import is_on_slices
from iris_ray.model.requirement import Requirement
from iris_ray.model.topology import TPUConfig, get_tpu_config
from iris_ray.model.workers import (
    TPU,
    TPU_NAME,
    TPU_TOPOLOGY,
    TPU_VM_COUNT,
    TPU_WORKER_ID,
    Resources,
    string_attribute,
)
from iris_ray.scheduler.availability import num_groups
from iris_ray.scheduler.fair_queue import comes_last
from iris_ray.scheduler.limits import Allowances, chips_per_group
from iris_ray.scheduler.pending_reason import PendingKind, PendingReason
from iris_ray.scheduler.team_quotas import TeamQuotas
from iris_ray.state import ControllerState
from iris_ray.state.fleet import Fleet

ARRIVAL_S = 600.0
"""Seconds for which an incomplete slice counts as arriving; later it counts as broken."""


@dataclass(frozen=True, slots=True)
class WaitingGang:
    """A gang that waits for slices of a type, or tasks that share a slice.

    Attributes:
        tpu_type: the type.
        missing: how many more slices it needs to run on its least number of slices.
        job_id: its job.
        there: how many slices it would use that are free now, as far as earlier gangs leave them.
        kept: the names of the slices that are reserved for it, and that it would use.
        may_take: whether slices of other types may be deleted for it; see `waiting_gangs` and `within_limits`.
        times: how many such gangs the job has.
        may_reserve: whether slices of other types may be reserved for it: idle ones, and those that jobs of lower bands
            leave for it.
        removes: the names of the slices that are reserved for it and that it can't use yet: those of other types until
            they are deleted, those of its own type until jobs have left them.
        holds: the names of the slices of either kind that are held for it until enough of them are idle.
        group: the id of the group of jobs with which it starts, all or none; empty if it starts alone.
    """

    tpu_type: str
    missing: int
    job_id: str = ""
    there: int = 0
    kept: tuple[str, ...] = ()
    may_take: bool = True
    times: int = 1
    may_reserve: bool = False
    removes: tuple[str, ...] = ()
    holds: tuple[str, ...] = ()
    group: str = ""


_UNKNOWN = PendingKind.PAUSED, PendingKind.NOT_LOOKED_AT
"""The kinds of reasons of gangs that may soon run on what is free now, and miss nothing as far as is known."""


def missing_slices(waits: Iterable[tuple[Job, PendingReason]], fleet: Fleet) -> dict[str, list[int]]:
    """Return how many more slices of its type each waiting gang needs; see `waiting_gangs`."""
    missing: defaultdict[str, list[int]] = defaultdict(list)
    for gang in waiting_gangs(waits, fleet):
        if gang.missing:
            missing[gang.tpu_type] += [gang.missing] * gang.times
    return dict(missing)


def waiting_gangs(waits: Iterable[tuple[Job, PendingReason]], fleet: Fleet) -> list[WaitingGang]:
    """Return the gangs that wait for slices or would use free ones, in the order of band and age.

    The jobs of a group that starts as a whole come one after the other, at the place of the first one.

    Single tasks need one slice for as many tasks as it has hosts, and gangs on parts one for as many parts.

    A job that waits because other jobs use all slices misses slices. A job misses none if it pauses after a failed
    launch, or was not considered by the latest plan; nor if a new slice would not suit it, because it has other
    constraints than the type, or needs more than the known hosts of this type have. A job that waits for a limit of its
    user is left out, as is one that has got hosts since the latest plan that considered it.

    No slices of other types may be deleted for a job that comes after all others, or to which other jobs leave slices
    at this moment; nor for the jobs of a group if one of them waits for something else than slices.

    Slices of other types may be reserved for a job that starts alone and is one gang on whole slices, if it comes first
    among jobs with its requirement, and if it neither gets all its slices of its own type nor may take them from lower
    bands later. If slices are held for it already, it need no longer come first: the fair order changes
    with each small job, and slices would be held for one job after the other, and enough of them would be idle for
    none.
    """

    @cache
    def is_suited_by(device: str, requirement: Requirement) -> bool:
        """Return whether a new slice of a type would suit; cached, for thousands of jobs are alike."""
        config = get_tpu_config(device)
        return _new_slice_would_do(requirement, config, fleet.host_sizes.get(config.name))

    config_of = cache(get_tpu_config)
    gangs: list[WaitingGang] = []
    free: dict[Requirement, int] = {}
    parts_left: dict[Requirement, int] = {}  # of the slices that are missing so far
    in_order, hindered = sorted(waits, key=lambda wait: (wait[0].spec.priority, wait[0].number)), set[str]()
    for job, waiting, group in _groups_together(in_order):
        spec, requirement = job.spec, job.requirement
        if waiting.kind is PendingKind.LIMITED or not job.pending:
            continue
        is_whole, part = spec.is_one_gang, spec.part
        needed = waiting.num_groups[0] if is_whole else len(job.pending)
        if spec.device is None:
            if waiting.kind not in _UNKNOWN and waiting.free < needed:
                hindered.add(group)
            continue
        config = config_of(spec.device)
        if waiting.kind in _UNKNOWN:
            there, short = needed, 0
        else:
            left = free.get(requirement, waiting.free)
            free[requirement] = left - (there := min(needed, left))
            short = needed - there if is_suited_by(spec.device, requirement) else 0
            if there + short < needed:
                hindered.add(group)
        in_slice = 1 if spec.coscheduling is not None else config.vm_count  # groups
        if part is not None:
            in_slice = config.vm_count // spec.replicas
            short -= (taken := min(short, parts_left.get(requirement, 0)))
            parts_left[requirement] = parts_left.get(requirement, 0) - taken + -short % in_slice
        slices, times = -(-short // in_slice), 1
        if part is not None or not is_whole:
            slices, times = min(slices, 1), max(slices, 1)
        if slices or there:
            is_known = bool(group) or not job.members
            may_take = slices > 0 and is_known and not waiting.taken_from and not comes_last(job)
            removes = awaited_slices(job, fleet) if job.promise is not None else ()
            is_held = bool(removes) and job.promise is not None and not job.promise.is_firm
            is_promised = job.promise is not None and not is_held
            is_behind = waiting.ahead > 0 and not is_held
            has_own = is_promised or waiting.protected is not None or is_behind
            may_reserve = may_take and not group and is_whole and part is None and not has_own
            kept = waiting.kept
            if removes and not is_held:
                kept = tuple(name for name in reserved_slices(job, fleet) if name not in removes)
            about = config.name, slices, spec.job_id, -(-there // in_slice), kept, may_take, times, may_reserve
            removes, holds = ((), removes) if is_held else (removes, ())
            gangs.append(WaitingGang(*about, removes, holds, group))
    return _taking_nothing(gangs, hindered)


def _groups_together(waits: Iterable[tuple[Job, PendingReason]]) -> list[tuple[Job, PendingReason, str]]:
    """Return the jobs with the id of the group with which each starts, which is empty if it starts alone.

    The jobs of a group are at the place of its first one.
    """
    found: dict[str, list[tuple[Job, PendingReason, str]]] = {}
    for job, waiting in waits:
        group = job.spec.group.group_id if job.spec.group is not None and waiting.together is not None else ""
        found.setdefault((group and f"group {group}") or job.spec.job_id, []).append((job, waiting, group))
    return [one for some in found.values() for one in some]


def _taking_nothing(gangs: Iterable[WaitingGang], groups: Collection[str]) -> list[WaitingGang]:
    """Return the gangs, of which those of some groups may not take others' slices."""
    return [replace(one, may_take=False) if one.group and one.group in groups else one for one in gangs]


def demand_of(
    state: ControllerState, waits: Iterable[tuple[Job, PendingReason]], now: float, last: str = ""
) -> list[WaitingGang]:
    """Return the gangs that wait for slices, in their order; see `waiting_gangs` and `within_limits`."""
    quotas = TeamQuotas(state.teams, state.fleet, now)
    allowances = Allowances(state.limits, math.inf, quotas)  # the cluster may become larger than a limit
    return within_limits(waiting_gangs(waits, state.fleet), state.jobs, allowances, last)


LOOKED_AT = 1000
"""The number of gangs whose limits `within_limits` looks at."""


def within_limits(
    gangs: Sequence[WaitingGang], jobs: Mapping[str, Job], allowances: Allowances, last: str = ""
) -> list[WaitingGang]:
    """Return the gangs. A gang that would exceed a limit, once the gangs before it run, may not take others' slices.

    Nor may the other gangs of its group.

    Args:
        gangs: in their order.
        jobs: all jobs, by id.
        allowances: what each user and team may still get; this call changes it.
        last: the id of a job that starts alone, if only its gang is of interest: the limits of gangs that don't affect
            it are not looked at.
    """

    found = [replace(gang, may_take=False) if n >= LOOKED_AT else gang for n, gang in enumerate(gangs)]
    beyond = {gang.group for gang in found[LOOKED_AT:]}
    promised_first = sorted(range(len(found[:LOOKED_AT])), key=lambda n: jobs[gangs[n].job_id].promise is None)
    for number in promised_first:
        gang = gangs[number]
        job, config = jobs[gang.job_id], get_tpu_config(gang.tpu_type)
        if job.spec.is_one_gang:
            groups = num_groups(job)[0]
        else:
            groups = min(len(job.pending), config.vm_count // (job.spec.replicas if job.spec.coscheduling else 1))
        chips = groups * chips_per_group(job)
        count = allowances.most_once_left(job, chips, gang.times)
        if count:
            allowances.granted(job, {TPU: count * chips})
        if count < gang.times:
            found[number] = replace(gang, may_take=False)
            beyond.add(gang.group)
        if gang.job_id == last:
            break
    return _taking_nothing(found, beyond)


def _new_slice_would_do(requirement: Requirement, config: TPUConfig, host: Resources | None) -> bool:
    """Return whether a new slice of a type would suit a requirement.

    ``host`` is the resources of its hosts; None if the cluster has had none yet.
    """
    if not requirement.chips or not (requirement.group_by is None or is_on_slices(requirement.group_by)):
        return False
    if not requirement.fits_into(host or {**dict(requirement.resources), TPU: float(config.chips_per_vm)}):
        return False
    attributes = {
        TPU_NAME: AttributeValue("a new slice"),
        TPU_WORKER_ID: AttributeValue(0),
        TPU_TOPOLOGY: AttributeValue(config.name),
        TPU_VM_COUNT: AttributeValue(config.vm_count),
    }
    try:
        return all(constraint.matches(attributes) for constraint in requirement.constraints)
    except TypeError:
        return False


def slices_in(fleet: Fleet) -> dict[str, tuple[str, bool]]:
    """Return the type of each slice with hosts in the cluster, and whether it is whole.

    It is if every host is there exactly once, and none of them is about to go.
    """
    grouping = fleet.grouping(TPU_NAME)
    groups = filter(None, map(grouping.get, grouping))
    return {
        g.name: (
            string_attribute(g.workers[0].attributes, TPU_TOPOLOGY) or "",
            g.defect is None and not any(worker.draining for worker in g.workers),
        )
        for g in groups
    }


@dataclass(slots=True)
class Arrivals:
    """Tells arriving slices, whose hosts join one after the other, from broken ones."""

    _first_seen: dict[str, float] = field(default_factory=dict)
    _complete: set[str] = field(default_factory=set)

    def arriving(self, slices: Mapping[str, tuple[str, bool]], now: float) -> dict[str, int]:
        """Return how many slices of each type are arriving.

        Args:
            slices: the result of `slices_in`.
            now: seconds on any monotonic clock.
        """
        self._first_seen = {name: self._first_seen.get(name, now) for name in slices}
        self._complete = {name for name, (_, whole) in slices.items() if whole or name in self._complete}
        found: dict[str, int] = {}
        for name, (tpu_type, _) in slices.items():
            if name not in self._complete and now - self._first_seen[name] < ARRIVAL_S:
                found[tpu_type] = found.get(tpu_type, 0) + 1
        return found


def net_demand(missing: Mapping[str, int], arriving: Mapping[str, int]) -> dict[str, int]:
    """Return how many slices are still missing when the arriving ones have arrived."""
    return {name: count for name, n in missing.items() if (count := n - arriving.get(name, 0)) > 0}


def reserved_slices(job: Job, fleet: Fleet) -> tuple[str, ...]:
    """Return the names of the slices that are reserved for a job until some of them are deleted."""
    if job.promise is None or not job.promise.removed_by:
        return ()
    names = (fleet.workers[node_id].slice_name for node_id in job.promise.node_ids if node_id in fleet.workers)
    return tuple(dict.fromkeys(name for name in names if name is not None))


def awaited_slices(job: Job, fleet: Fleet) -> tuple[str, ...]:
    """Return the names of those of the reserved slices that are to be deleted, or on which a job has no room yet."""
    return tuple(name for name in reserved_slices(job, fleet) if not has_room(name, job, fleet))


def has_room(name: str, job: Job, fleet: Fleet) -> bool:
    """Return whether a slice is of the type that a job needs, with room for its tasks."""
    return is_of_type(name, job, fleet) and all(map(job.requirement.has_room, fleet.slice_workers(name)))


def slices_to_remove(job: Job, fleet: Fleet) -> tuple[str, ...]:
    """Return the names of the slices that are reserved for a job until they are deleted."""
    return tuple(name for name in reserved_slices(job, fleet) if not is_of_type(name, job, fleet))


def is_of_type(name: str, job: Job, fleet: Fleet) -> bool:
    """Return whether a slice has the type of which a job needs slices."""
    types = {string_attribute(host.attributes, TPU_TOPOLOGY) for host in fleet.slice_workers(name)}
    return job.spec.device is not None and types == {get_tpu_config(job.spec.device).name}
