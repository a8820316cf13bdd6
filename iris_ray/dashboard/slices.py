"""Slices and hosts as people see them: complete or not, free or busy, and why they take no jobs. Pure."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from iris_ray.actors.protocol.status import WorkerStatus
from iris_ray.errors import InvalidRequestError
from iris_ray.model.checks import unknown
from iris_ray.model.constraints import TAINT_PREFIX
from iris_ray.model.lifecycle import job_of
from iris_ray.model.workers import TPU_VM_COUNT
from iris_ray.state.groups import slice_defect, slice_size

_SHORTEST_ID = 6
_NODE_ID = re.compile(rf"[0-9a-f]{{{_SHORTEST_ID},}}")


class SliceState(Enum):
    """Whether a slice can take the next job."""

    FREE = "free"
    WARM = "warm"
    BUSY = "busy"
    CLOSED = "closed"
    INCOMPLETE = "incomplete"


@dataclass(frozen=True, slots=True)
class SliceView:
    """One slice, or one host outside a slice.

    Attributes:
        slice: its name; for a host outside a slice, its address.
        type: its TPU type.
        state: whether it can take the next job; INCOMPLETE and BUSY take precedence over CLOSED.
        hosts_expected: how many hosts it has when complete; 0 if its hosts disagree.
        jobs: the jobs with tasks on it.
        defect: why it is not complete, or None.
        reason: its defect, and why it takes no new jobs, if any.
        hosts: its live hosts, by host index.
    """

    slice: str
    type: str | None
    state: SliceState
    hosts_expected: int
    jobs: tuple[str, ...]
    defect: str | None
    reason: str | None
    hosts: tuple[WorkerStatus, ...]

    @property
    def is_slice(self) -> bool:
        return self.hosts[0].slice_name is not None


def slices_of(workers: Sequence[WorkerStatus]) -> list[SliceView]:
    """Return the slices that hosts form, sorted by name; then the hosts without TPU, sorted by address."""
    by_name: dict[str, list[WorkerStatus]] = {}
    for worker in workers:
        by_name.setdefault(worker.slice_name or worker.address, []).append(worker)
    views = [_view(name, hosts) for name, hosts in by_name.items()]
    return sorted(views, key=lambda view: (not view.is_slice, natural(view.slice)))


def natural(name: str) -> list[tuple[int, str]]:
    """Return a key that sorts ``slice-10`` after ``slice-9``."""
    return [(int(part), "") if part.isdecimal() else (0, part) for part in re.split(r"(\d+)", name)]


def _view(name: str, hosts: Sequence[WorkerStatus]) -> SliceView:
    is_slice = hosts[0].slice_name is not None
    counts = [host.attributes[TPU_VM_COUNT] for host in hosts if TPU_VM_COUNT in host.attributes]
    size = slice_size(counts, len(hosts)) if is_slice else len(hosts)
    defect = slice_defect([host.host_index for host in hosts], size) if is_slice else None
    jobs = tuple(dict.fromkeys(job_of(task_id) for host in hosts for task_id in host.tasks))
    closed = _reason(hosts)
    if defect:
        state = SliceState.INCOMPLETE
    elif jobs:
        state = SliceState.BUSY
    elif closed:
        state = SliceState.CLOSED
    elif any(host.holder for host in hosts):
        state = SliceState.WARM
    else:
        state = SliceState.FREE
    reason = "; ".join(filter(None, [defect, closed])) or None
    device = next(filter(None, (host.device for host in hosts)), None)
    return SliceView(name, device, state, size, jobs, defect, reason, tuple(hosts))


def _reason(hosts: Sequence[WorkerStatus]) -> str | None:
    """Return why hosts take no new jobs: one reason if all have the same one, else a reason per host."""
    why = {host_name(host): reason_of(host) for host in hosts}
    if len(set(why.values())) == 1:
        return next(iter(why.values()))
    return "; ".join(reason if name in reason else f"{name}: {reason}" for name, reason in why.items() if reason)


def reason_of(host: WorkerStatus) -> str | None:
    """Return why a host takes no new jobs, or None."""
    return host.unavailable and host.unavailable.replace(TAINT_PREFIX, "")


def host_name(host: WorkerStatus) -> str:
    return f"host {host.node_id[:12] if host.host_index is None else host.host_index}"


def find_target(target: str, workers: Sequence[WorkerStatus]) -> str:
    """Return the Controller's name for a slice or host: the slice's name, or the host's node id.

    People may name a host ``SLICE/NUMBER``, by its IP address, or by the beginning of its node id. Any other unknown
    name is returned unchanged, so that the Controller suggests the nearest names.

    Raises:
        InvalidRequestError: the name fits several hosts.
        UnknownNameError: the slice has no host with that number; the message names its hosts.
    """
    if any(target in (w.slice_name, w.node_id) for w in workers):
        return target
    names: Mapping[str, list[str]] = {
        worker.node_id: [f"{worker.slice_name}/{worker.host_index}", worker.address] for worker in workers
    }
    found = [node_id for node_id, called in names.items() if target in called]
    if not found and _NODE_ID.fullmatch(target):
        found = [node_id for node_id in names if node_id.startswith(target)]
    if len(found) > 1:
        which = ", ".join(names[node_id][0] for node_id in found)
        raise InvalidRequestError(f"{target} could be any of {which}; say which")
    slice_name, slash, _ = target.rpartition("/")
    if not found and slash and (hosts := [worker for worker in workers if worker.slice_name == slice_name]):
        raise unknown("host", target, [f"{slice_name}/{host.host_index}" for host in hosts])
    return found[0] if found else target
