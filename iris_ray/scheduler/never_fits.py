"""Checks whether a group of jobs could ever start on a fleet, by its minimum needs and the fleet's total resources.

The check assumes that every host is idle, healthy and without taints. A group that it refuses is impossible; one that
it accepts may still wait for ever.
"""

from collections import Counter
from collections.abc import Collection, Sequence

from iris_ray.model.job_spec import JobSpec
from iris_ray.model.workers import TPU, TPU_NAME, Worker, rounded
from iris_ray.state.groups import Grouping

_Hosts = frozenset[str]


def never_fits(specs: Sequence[JobSpec], workers: Collection[Worker]) -> str | None:
    """Return why jobs can't run at the same time even on an idle fleet; None if they might."""
    known = {worker.node_id: worker for worker in workers}
    suit = {spec.job_id: frozenset(i for i, worker in known.items() if _suits(spec, worker)) for spec in specs}
    for spec in specs:
        if (why := _too_little([spec], suit[spec.job_id], known)) is not None:
            return why
    for hosts in dict.fromkeys([*suit.values(), frozenset[str]().union(*suit.values())]):
        within = [spec for spec in specs if suit[spec.job_id] <= hosts]
        if len(within) > 1 and (why := _too_little(within, hosts, known)) is not None:
            return why
    return None


def _suits(spec: JobSpec, worker: Worker) -> bool:
    """Return whether a task of a job could run on an idle host."""
    need = spec.requirement
    if need.group_by is not None and Grouping(need.group_by).name_of(worker) is None:
        return False
    try:
        if not all(one.matches(worker.reported or worker.attributes) for one in need.constraints):
            return False
    except TypeError:
        return False
    return all(worker.resources.get(resource, 0.0) >= amount for resource, amount in need.resources)


def _too_little(specs: Sequence[JobSpec], hosts: _Hosts, known: dict[str, Worker]) -> str | None:
    who = f"{' and '.join(_name(spec) for spec in specs)} need{'s' * (len(specs) == 1)}"
    suit = "suits it" if len(specs) == 1 else "suit them together"
    whole = [spec for spec in specs if spec.whole_groups]
    slices = {known[i].slice_name for i in hosts} - {None}
    if (wanted := sum(_slices(spec) for spec in whole)) > len(slices):
        return f"{who} {wanted} slices at once, and the cluster has {len(slices)} that {suit}"
    apart = [spec for spec in specs if not spec.whole_groups]
    on_chips = sum(_tasks(spec) for spec in apart if spec.requirement.chips) + (wanted if whole else 0)
    with_chips = sum(1 for i in hosts if known[i].resources.get(TPU))
    if on_chips > with_chips:
        return f"{who} {on_chips} hosts with chips at once, and the cluster has {with_chips} that {suit}"
    amounts, there = Counter[str](), Counter[str]()
    for spec in apart:
        for resource, amount in spec.requirement.resources:
            amounts[resource] += amount * _tasks(spec)  # type: ignore[assignment]
    for i in hosts:
        there.update(known[i].resources)
    for resource, amount in amounts.items():
        if rounded(amount) > rounded(there[resource]):
            return f"{who} {amount:g} {resource} at once, and the cluster has {there[resource]:g} that {suit}"
    return None


def _name(spec: JobSpec) -> str:
    return spec.group.name_of(spec.job_id) if spec.group else spec.name or spec.job_id


def _slices(spec: JobSpec) -> int:
    return min(spec.groups_per_gang) * spec.num_gangs if spec.requirement.group_by == TPU_NAME else 0


def _tasks(spec: JobSpec) -> int:
    """Return the smallest number of tasks that a job can have."""
    return spec.num_gangs * (spec.replicas * min(spec.groups_per_gang) if spec.coscheduling else 1)
