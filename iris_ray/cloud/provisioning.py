"""Plans which slices to request from the provider, and which to delete. `iris-ray cluster provision` carries it out.

Every slice is a queued resource of one node: to repair one node of several, the provider would restart all of them. A
queued resource holds quota until it is deleted, whatever its state, so FAILED and SUSPENDED ones are deleted. A
provisioner owns the resources with its label and its prefix in the name; it neither touches nor counts others.
"""

import uuid
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from iris_ray.cloud.demand import ARRIVAL_S
from iris_ray.cloud.provisioning_history import ProvisioningHistory
from iris_ray.model.topology import TPUConfig

OWNER_LABEL = "iris-ray-provisioner"
"""The label with the name of the provisioner that made a queued resource."""
_NAMESPACE = uuid.uuid5(uuid.NAMESPACE_URL, "iris-ray/provisioner")


class QueuedState(Enum):
    """The states of a queued resource, with the API's names."""

    UNKNOWN = "unknown"
    CREATING = "creating"
    ACCEPTED = "accepted"
    WAITING_FOR_RESOURCES = "waiting for resources"
    PROVISIONING = "provisioning"
    ACTIVE = "active"
    SUSPENDING = "suspending"
    SUSPENDED = "suspended"
    FAILED = "failed"
    DELETING = "deleting"


COMING = (QueuedState.CREATING, QueuedState.ACCEPTED, QueuedState.WAITING_FOR_RESOURCES, QueuedState.PROVISIONING)
CANCELLABLE = (QueuedState.ACCEPTED, QueuedState.WAITING_FOR_RESOURCES)
"""The states in which a request can be withdrawn before it becomes a slice."""


@dataclass(frozen=True, slots=True)
class QueuedSlice:
    """A queued resource of one node, which has the same name.

    Attributes:
        name: its name without project and zone.
        accelerator_type: the type as Google spells it.
        by_service: whether the provider, not a user, caused its state.
        error: why it failed.
    """

    name: str
    accelerator_type: str
    state: QueuedState
    labels: Mapping[str, str]
    by_service: bool = False
    error: str = ""


@dataclass(frozen=True, slots=True)
class NewSlice:
    """A request for a slice."""

    name: str
    accelerator_type: str
    runtime_version: str
    labels: Mapping[str, str]
    startup_script: str
    spot: bool
    external_ips: bool

    def named(self, name: str) -> "NewSlice":
        return replace(self, name=name)

    @property
    def request_id(self) -> str:
        return request_id("create", self.name)


def request_id(verb: str, name: str) -> str:
    """Return a UUID that makes repetitions of a request harmless: names are never used twice."""
    return str(uuid.uuid5(_NAMESPACE, f"{verb}/{name}"))


# -- provisioning ------------------------------------------------------------------------------------------------------

JOIN_S, BROKEN_S = 1800.0, 300.0
"""How long an ACTIVE slice may take to join the cluster whole, and how long it may lack hosts that it had."""


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of one provisioner.

    Attributes:
        owner: its name, in the label and in the names of its slices.
        config: the type of its slices.
        least, most: how many slices it keeps at least, and holds at most, including those that only hold quota.
        idle_s: seconds after which an unneeded slice is deleted.
    """

    owner: str
    config: TPUConfig
    least: int
    most: int
    idle_s: float

    @property
    def prefix(self) -> str:
        return f"iris-{self.owner}-{self.config.name}-"

    def owns(self, found: QueuedSlice) -> bool:
        """Return whether this provisioner has made a slice."""
        return found.name.startswith(self.prefix) and found.labels.get(OWNER_LABEL) == self.owner


@dataclass(frozen=True, slots=True)
class Joined:
    """A slice with hosts in the cluster.

    Attributes:
        whole: whether all of its hosts are in the cluster.
        in_use: whether a job runs on it, a process keeps it warm, or other Ray work uses its chips.
        closed: whether a provisioner has closed it to new jobs, to delete it.
    """

    whole: bool
    in_use: bool
    closed: bool = False


@dataclass(frozen=True, slots=True)
class Create:
    """Request a slice of this name; an earlier plan may have requested it already."""

    name: str
    reason: str

    def __str__(self) -> str:
        return f"create {self.name}: {self.reason}"


@dataclass(frozen=True, slots=True)
class Delete:
    """Delete a slice; with ``if_unused`` only if no job has started on it meanwhile."""

    name: str
    reason: str
    if_unused: bool = False

    def __str__(self) -> str:
        return f"delete {self.name}: {self.reason}"


@dataclass(frozen=True, slots=True)
class Wait:
    """Slices are wanted, but can't be requested now."""

    reason: str

    def __str__(self) -> str:
        return f"wait: {self.reason}"


Action = Create | Delete | Wait


def plan(
    settings: Settings,
    demand: Sequence[int] | None,
    found: Sequence[QueuedSlice],
    joined: Mapping[str, Joined],
    history: ProvisioningHistory,
    now: float,
    date: float,
) -> list[Action]:
    """Return the actions to take now, each with its reason.

    Args:
        settings: the provisioner's settings.
        demand: how many slices of the type each waiting gang misses, the first to be served first; None if the cluster
            could not be asked.
        found: all queued resources of the zone.
        joined: the slices that have hosts in the cluster; ignored if ``demand`` is None.
        history: the memory of earlier plans; this call changes it.
        now: seconds on a monotonic clock.
        date: seconds since the epoch, for new names.
    """
    ours = {one.name: one for one in found if settings.owns(one)}
    for name, asked_at in list(history.unconfirmed.items()):
        if name in ours or now - asked_at > ARRIVAL_S:
            del history.unconfirmed[name]
    history.forget_all_but([*ours, *history.unconfirmed])
    actions, coming, present = _sort_out(demand, ours, joined, history, now)
    actions += _release(settings, demand, coming, present, joined, history, now)
    return actions + _obtain(settings, demand or (), len(ours), len(coming), len(present), history, now, date)


def _sort_out(
    demand: Sequence[int] | None,
    ours: Mapping[str, QueuedSlice],
    joined: Mapping[str, Joined],
    history: ProvisioningHistory,
    now: float,
) -> tuple[list[Action], list[QueuedSlice], list[QueuedSlice]]:
    """Return deletions of failed, suspended and broken slices; the coming slices; and the present ones."""
    deletions: list[Action] = []
    coming: list[QueuedSlice] = []
    present: list[QueuedSlice] = []
    for name, one in ours.items():
        in_cluster = demand is not None and name in joined and joined[name].whole
        is_absent = demand is not None and not in_cluster and one.state is QueuedState.ACTIVE
        absent_s = history.lasting("absent", name, is_absent, now)
        if in_cluster:
            history.has_joined(name)
        has_lost_hosts = is_absent and history.once_joined(name)
        if deletion := _deletion(one, has_lost_hosts, absent_s, history, now):
            deletions.append(deletion)
        elif has_lost_hosts:
            continue  # neither coming nor there
        elif one.state in COMING or is_absent:
            coming.append(one)
        elif one.state is QueuedState.ACTIVE:
            present.append(one)
    return deletions, coming, present


def _deletion(
    one: QueuedSlice, has_lost_hosts: bool, absent_s: float, history: ProvisioningHistory, now: float
) -> Delete | None:
    """Return the deletion of a slice that has failed, was suspended, is broken or never joined; otherwise None."""
    if one.state is QueuedState.FAILED:
        history.failed_once(one.name, now, f"{one.name}: {one.error or 'it has failed'}")
        return Delete(one.name, f"it has failed{f' ({one.error})' if one.error else ''} and holds quota")
    if one.state is QueuedState.SUSPENDED:
        who = "the provider" if one.by_service else "a user"
        return Delete(one.name, f"it was suspended by {who} and holds quota")
    if has_lost_hosts and absent_s > BROKEN_S:
        why = f"it has lacked hosts that it had for {absent_s / 60:.0f} minutes"
        return Delete(one.name, why, if_unused=True)
    if not has_lost_hosts and absent_s > JOIN_S:
        why = f"it is active, but not all of its hosts have joined the cluster after {absent_s / 60:.0f} minutes"
        history.failed_once(one.name, now, f"{one.name}: {why}; look at its start-up script's log")
        return Delete(one.name, why, if_unused=True)
    return None


def _release(
    settings: Settings,
    demand: Sequence[int] | None,
    coming: Sequence[QueuedSlice],
    present: Sequence[QueuedSlice],
    joined: Mapping[str, Joined],
    history: ProvisioningHistory,
    now: float,
) -> list[Action]:
    """Delete what no job can use, down to the least number: requests first, then the slices that are idle longest.

    A gang that needs more slices than ``settings.most`` can't use any. A gang that has to wait for other jobs' slices
    can use new ones.
    """
    present_here = {one.name: joined[one.name] for one in present} if demand is not None else {}
    useful = _useful(demand or (), present_here.values(), settings.most)
    requested = len(coming) + len(history.unconfirmed)
    spare = requested + len(present) - settings.least
    surplus = min(requested - useful, spare) if demand is not None else 0
    requests = _unneeded_requests(coming, surplus, settings.idle_s, history, now)
    unused = {name for name, one in present_here.items() if not useful and not one.in_use}
    idle = _idle_slices([one.name for one in present], unused, settings.idle_s, history, now)
    return [*requests, *idle[: max(0, spare - len(requests))]]


def _useful(demand: Iterable[int], present: Iterable[Joined], most: int) -> int:
    """Return how many slices the gangs miss that could get all their slices within ``most``."""
    idle_now = sum(not one.in_use and not one.closed for one in present)
    return sum(missing for missing in demand if missing + idle_now <= most)


def _unneeded_requests(
    coming: Sequence[QueuedSlice], most: int, idle_s: float, history: ProvisioningHistory, now: float
) -> list[Action]:
    """Return deletions of requests, at most ``most``, for which no job has waited for ``idle_s``."""
    deletions: list[Action] = []
    for number, one in enumerate(one for one in coming if one.state in CANCELLABLE):
        unneeded = number < most
        if history.lasting("unneeded", one.name, unneeded, now) >= idle_s and unneeded:
            deletions.append(Delete(one.name, f"no job has waited for it for {idle_s:g} s"))
    return deletions


def _idle_slices(
    names: Sequence[str], unused: Collection[str], idle_s: float, history: ProvisioningHistory, now: float
) -> list[Action]:
    """Return deletions of the slices that have been unused for ``idle_s``, the longest first."""
    unused_s = {name: history.lasting("idle", name, name in unused, now) for name in names}
    idle = sorted(((unused_s[name], name) for name in unused if unused_s[name] >= idle_s), reverse=True)
    return [
        Delete(name, f"it has been idle for {seconds:.0f} s and no job that waits could use it", if_unused=True)
        for seconds, name in idle
    ]


def _obtain(
    settings: Settings,
    demand: Sequence[int],
    held: int,
    coming: int,
    present: int,
    history: ProvisioningHistory,
    now: float,
    date: float,
) -> list[Action]:
    """Request slices that complete gangs, within ``settings.most`` and after the pause of a failure."""
    unconfirmed = list(history.unconfirmed)
    actions: list[Action] = [Create(name, "it was asked for, and is not listed yet") for name in unconfirmed]
    coming, held = coming + len(unconfirmed), held + len(unconfirmed)
    room = max(0, settings.most - held)
    complete, left_out = _completed(demand, coming + room)
    if left_out:
        missed = ", ".join(map(str, left_out[:8])) + (", …" if len(left_out) > 8 else "")
        actions.append(Wait(f"gangs miss {missed} more slices, but {held} of at most {settings.most} are held"))
    for_jobs, for_least = complete - coming, settings.least - coming - present
    wanted = min(room, max(0, for_jobs, for_least))
    if not wanted:
        return actions
    why = f"waiting jobs miss {sum(demand)}, {coming} coming" if for_jobs >= for_least else f"at least {settings.least}"
    if now < history.not_before:
        pause = f"{history.pause_s:g} s after {history.failures} failures, the last: {history.last_failure}"
        return [*actions, Wait(f"{wanted} more wanted ({why}), but pausing {pause}")]
    for number in range(wanted):
        name = f"{settings.prefix}{int(date * 1000):x}-{number}"
        actions.append(Create(name, why))
    return actions


def _completed(demand: Sequence[int], slices: int) -> tuple[int, list[int]]:
    """Return how many of the slices complete gangs, one after the other, and what the other gangs miss."""
    used, left_out = 0, []
    for missing in demand:
        if used + missing <= slices:
            used += missing
        else:
            left_out.append(missing)
    return used, left_out


HEAD_MARK = "@RAY_HEAD@"
"""The placeholder for HOST:PORT of the cluster's head in start-up scripts."""
STARTUP_SCRIPT = f"""\
#!/bin/bash
# From `iris-ray cluster provision`: this TPU host joins a Ray cluster. All who see the TPU can read this: no secrets!
export PATH="/usr/local/bin:$PATH"
until ray start --address='{HEAD_MARK}'; do
  sleep 10
done
"""
"""The default script by which a new TPU host joins the Ray cluster, for images with Ray and iris_ray installed."""
