"""Rows of slices and their hosts."""

from collections.abc import Mapping, Sequence

from iris_ray.actors.wire.host_condition import HostCondition, condition_of
from iris_ray.actors.wire.slices import SliceView, reason_of, slices_of
from iris_ray.actors.wire.status import WorkerStatus
from iris_ray.dashboard.tables import Row
from iris_ray.model.ids import job_of
from iris_ray.model.workers import GPU, TPU


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
    condition = condition_of(host, spares.__contains__).value
    return [host.host_index, condition, next(iter(jobs), None), reason_of(host), host.address, host.node_id]


def _missing(number: int) -> list[str | int | None]:
    return [number, HostCondition.LOST.value, None, "it is missing: the slice is not complete", None, None]


def _kind(view: SliceView) -> str:
    gpus = sum(host.resources.get(GPU, 0.0) for host in view.hosts)
    return "GPU" if gpus else "no TPU"
