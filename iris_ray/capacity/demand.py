"""How many more slices the waiting jobs need. Pure."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
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
from iris_ray.scheduler.pending_reason import PendingKind, PendingReason
from iris_ray.state.fleet import Fleet

ARRIVAL_S = 600.0
"""Seconds for which an incomplete slice counts as arriving; later it counts as broken."""


def missing_slices(waits: Iterable[tuple[Job, PendingReason]], fleet: Fleet) -> dict[str, list[int]]:
    """Return how many more slices of its type each waiting gang needs to run on its least number of slices.

    The gangs of a type are in the order of band and age. Single tasks need one slice for as many tasks as it has hosts,
    and gangs on parts one for as many parts.

    A job that waits because other jobs use all slices counts. A job does not count if it pauses after a failed launch,
    waits for a limit of its user, or was not considered by the latest plan; nor if a new slice would not suit it,
    because it has other constraints than the type, or needs more than the known hosts of this type have.
    """

    @cache
    def new_slice_for(device: str, requirement: Requirement) -> TPUConfig | None:
        """Return the type of a new slice that would suit, or None; cached, for thousands of jobs are alike."""
        config = get_tpu_config(device)
        return config if _new_slice_would_do(requirement, config, fleet.host_sizes.get(config.name)) else None

    missing: defaultdict[str, list[int]] = defaultdict(list)
    free: dict[Requirement, int] = {}
    parts_left: dict[Requirement, int] = {}  # of the slices that are missing so far
    for job, waiting in sorted(waits, key=lambda wait: (wait[0].spec.priority, wait[0].number)):
        unknown = PendingKind.PAUSED, PendingKind.LIMITED, PendingKind.NOT_LOOKED_AT
        if waiting.kind in unknown or job.spec.device is None:
            continue
        requirement = job.requirement
        if (config := new_slice_for(job.spec.device, requirement)) is None:
            continue
        needed = waiting.num_groups[0] if job.spec.is_one_gang else len(job.pending)
        there = min(needed, free.setdefault(requirement, waiting.free))
        free[requirement] -= there
        short = needed - there
        if job.spec.part is not None:
            parts = config.vm_count // job.spec.replicas
            short -= (taken := min(short, parts_left.get(requirement, 0)))
            slices = -(-short // parts)
            parts_left[requirement] = parts_left.get(requirement, 0) - taken + slices * parts - short
            missing[config.name] += [1] * slices
        elif short:
            slices = -(-short // config.vm_count) if job.spec.coscheduling is None else short
            missing[config.name] += [slices] if job.spec.is_one_gang else [1] * slices
    return {name: slices for name, slices in missing.items() if slices}


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
