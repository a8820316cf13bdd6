"""Rows of slices and their hosts."""

from collections.abc import Mapping, Sequence
from enum import Enum

from iris_ray.actors.wire.slices import SliceView, reason_of, slices_of
from iris_ray.actors.wire.status import WorkerStatus
from iris_ray.dashboard.tables import Row
from iris_ray.model.constraints import TAINT_PREFIX
from iris_ray.model.ids import job_of
from iris_ray.model.workers import GPU, TPU
from iris_ray.state.quarantine import QUARANTINE


class HostCondition(Enum):
    """How a host stands, the most telling first."""

    LOST = "lost"
    SUSPECTED = "suspected"
    DRAINING = "draining"
    SPARE = "spare"
    BUSY = "busy"
    QUARANTINED = "quarantined"
    CLOSED = "closed"
    ELSEWHERE = "elsewhere"
    UNUSABLE = "unusable"
    WARM = "warm"
    FREE = "free"


def condition_of(host: WorkerStatus, spares: Mapping[str, str]) -> HostCondition:
    """Return how a host stands.

    Args:
        host: which.
        spares: the jobs that only hold slices ready, each with the job that it does so for.
    """
    taints = {name.removeprefix(TAINT_PREFIX) for name in host.attributes if name.startswith(TAINT_PREFIX)}
    found = (
        (HostCondition.SUSPECTED, host.suspected),
        (HostCondition.DRAINING, host.draining),
        (HostCondition.SPARE, host.tasks and all(job_of(task) in spares for task in host.tasks)),
        (HostCondition.BUSY, host.tasks),
        (HostCondition.QUARANTINED, QUARANTINE in taints),
        (HostCondition.CLOSED, taints),
        (HostCondition.ELSEWHERE, host.foreign),
        (HostCondition.UNUSABLE, host.unavailable),
        (HostCondition.WARM, host.holder),
    )
    return next((condition for condition, holds in found if holds), HostCondition.FREE)


def slice_row(hosts: Sequence[WorkerStatus], spares: Mapping[str, str]) -> Row:
    """Return the row of a slice, or of a host that is of none.

    A host in ``hosts`` is ``[number, condition, job, why, address, node id]``; one that is missing has no address.
    """
    (view,) = slices_of(hosts)
    rows = [_host(host, spares) for host in view.hosts]
    there = {host.host_index for host in view.hosts}
    rows += [_missing(number) for number in range(view.hosts_expected) if number not in there and view.is_slice]
    return {
        "name": view.slice,
        "type": view.type or _kind(view),
        "tpu": view.is_slice,
        "state": view.state.value,
        "jobs": list(dict.fromkeys(spares.get(job, job) for job in view.jobs)),
        "why": view.reason,
        "chips": sum(host.resources.get(TPU, 0.0) + host.resources.get(GPU, 0.0) for host in view.hosts),
        "hosts": sorted(rows, key=lambda row: (row[0] is None, row[0] or 0)),
    }


def _host(host: WorkerStatus, spares: Mapping[str, str]) -> list[str | int | None]:
    jobs = dict.fromkeys(spares.get(job, job) for job in map(job_of, host.tasks))
    condition = condition_of(host, spares).value
    return [host.host_index, condition, next(iter(jobs), None), reason_of(host), host.address, host.node_id]


def _missing(number: int) -> list[str | int | None]:
    return [number, HostCondition.LOST.value, None, "it is missing: the slice is not complete", None, None]


def _kind(view: SliceView) -> str:
    gpus = sum(host.resources.get(GPU, 0.0) for host in view.hosts)
    return "GPU" if gpus else "no TPU"
