"""Getting slices: how many are missing, and what to ask the provider for. Pure; `iris-ray provision` carries it out.

Every slice is a queued resource of one node: of several in one, the provider repairs one by restarting all. A queued
resource holds quota until it is deleted, whatever its state, so those that have FAILED or were SUSPENDED are deleted.
Only what carries our label and a name with our prefix is ours; nothing else is touched, or counts.
"""

import math
import uuid
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

from iris_ray.model.constraints import AttributeValue
from iris_ray.model.jobs import Job
from iris_ray.model.requirement import Requirement
from iris_ray.model.topology import TPUConfig, get_tpu_config
from iris_ray.model.workers import TPU_NAME, TPU_TOPOLOGY, TPU_VM_COUNT, TPU_WORKER_ID, string_attribute
from iris_ray.scheduler.pending_reason import PendingKind, PendingReason
from iris_ray.state.fleet import Fleet

LOCATION_VARIABLE = "IRIS_RAY_CLOUD_TPU"
"""Names the place of the slices, ``projects/<project>/locations/<zone>``."""
ENDPOINT_VARIABLE = "IRIS_RAY_CLOUD_TPU_ENDPOINT"
"""HOST:PORT of an emulator of the provider's API, on loopback: what goes there is not encrypted."""

OWNER_LABEL = "iris-ray-provisioner"
"""The label that says whose a queued resource is; its value is the name of the provisioner."""

ARRIVAL_S = 600.0
"""An incomplete slice counts as one that is just coming for so long; later as one that is broken."""
JOIN_S, BROKEN_S = 1800.0, 300.0
"""When a slice that is ACTIVE is given up: if it has never joined the cluster whole, and if it lacks a host again."""
FIRST_BACKOFF_S, LONGEST_BACKOFF_S = 30.0, 1800.0
HEAD_MARK = "@RAY_HEAD@"
"""Stands for HOST:PORT of the cluster's head in start-up scripts."""
STARTUP_SCRIPT = f"""\
#!/bin/bash
# From `iris-ray provision`: this TPU host joins a Ray cluster. Who may look at the TPU can read this: no secrets here.
export PATH="/usr/local/bin:$PATH"
until ray start --address='{HEAD_MARK}'; do
  sleep 10
done
"""
"""For images that have Ray and iris_ray installed."""
_NAMESPACE = uuid.uuid5(uuid.NAMESPACE_URL, "iris-ray/provisioner")


# -- how many are missing ----------------------------------------------------------------------------------------------


def missing_slices(waits: Iterable[tuple[Job, PendingReason]]) -> dict[str, int]:
    """How many more slices of each type would let all waiting jobs run, each with the least count that it can use.

    A job that waits because others use all slices would run on one more, so it counts. One that pauses after a launch
    that failed does not, and neither does one that a new slice would not do for: whose constraints ask for more than
    the type.
    """
    needs: dict[tuple[TPUConfig, Requirement], tuple[int, int]] = {}
    for job, waiting in waits:
        if waiting.kind is PendingKind.PAUSED or job.spec.device is None:
            continue
        config = get_tpu_config(job.spec.device)
        if not _new_slice_would_do(job.requirement, config):
            continue
        key = config, job.requirement
        needed = waiting.num_groups[0] if job.spec.coscheduling else len(job.pending)
        needs[key] = needs.get(key, (0, 0))[0] + needed, waiting.free
    missing: dict[str, int] = {}
    for (config, requirement), (needed, free) in needs.items():
        short = max(0, needed - free)
        slices = short if requirement.group_by == TPU_NAME else math.ceil(short / config.vm_count)
        if slices:
            missing[config.name] = missing.get(config.name, 0) + slices
    return missing


def _new_slice_would_do(requirement: Requirement, config: TPUConfig) -> bool:
    if not requirement.chips or requirement.group_by not in (TPU_NAME, None):
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
    """The type of each slice that has hosts, and whether it has all of them, once each."""
    grouping = fleet.grouping(TPU_NAME)
    groups = filter(None, map(grouping.get, grouping))
    return {g.name: (string_attribute(g.workers[0].attributes, TPU_TOPOLOGY) or "", g.defect is None) for g in groups}


@dataclass(slots=True)
class Arrivals:
    """Which slices are just coming: their hosts join one after the other, and one that is broken comes no more."""

    _first_seen: dict[str, float] = field(default_factory=dict)
    _complete: set[str] = field(default_factory=set)

    def arriving(self, slices: Mapping[str, tuple[str, bool]], now: float) -> dict[str, int]:
        """How many slices of each type are coming.

        Args:
            slices: the type of each slice that has hosts, and whether it has all of them.
            now: seconds on any clock that goes on.
        """
        self._first_seen = {name: self._first_seen.get(name, now) for name in slices}
        self._complete = {name for name, (_, whole) in slices.items() if whole or name in self._complete}
        found: dict[str, int] = {}
        for name, (tpu_type, _) in slices.items():
            if name not in self._complete and now - self._first_seen[name] < ARRIVAL_S:
                found[tpu_type] = found.get(tpu_type, 0) + 1
        return found


def net_demand(missing: Mapping[str, int], arriving: Mapping[str, int]) -> dict[str, int]:
    """What is missing when those that are coming have come."""
    return {name: count for name, n in missing.items() if (count := n - arriving.get(name, 0)) > 0}


# -- what there is -----------------------------------------------------------------------------------------------------


class QueuedState(Enum):
    """The states of a queued resource, as the API calls them."""

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


_COMING = (QueuedState.CREATING, QueuedState.ACCEPTED, QueuedState.WAITING_FOR_RESOURCES, QueuedState.PROVISIONING)
_CANCELLABLE = (QueuedState.ACCEPTED, QueuedState.WAITING_FOR_RESOURCES)


@dataclass(frozen=True, slots=True)
class QueuedSlice:
    """A queued resource of one node, which has the same name.

    Attributes:
        name: without project and zone.
        accelerator_type: as Google spells it.
        labels: of its node.
        by_service: whether its state is the provider's doing.
        error: why it has failed.
    """

    name: str
    accelerator_type: str
    state: QueuedState
    labels: Mapping[str, str]
    by_service: bool = False
    error: str = ""


@dataclass(frozen=True, slots=True)
class Joined:
    """A slice with hosts in the cluster.

    Attributes:
        whole: whether all of its hosts are there.
        in_use: whether a job runs on it, or a process keeps it warm.
        closed: a provisioner has had it take nothing new, to give it back.
    """

    whole: bool
    in_use: bool
    closed: bool = False


# -- what is wanted ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Settings:
    """What one provisioner is to do.

    Attributes:
        owner: its name, in the label and in the names of what it makes.
        config: the type of its slices.
        least, most: how many slices it keeps at least, and has at most, those that still hold quota included.
        idle_s: seconds after which a slice that nobody needs is given back.
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
        """Whether this provisioner has made it."""
        return found.name.startswith(self.prefix) and found.labels.get(OWNER_LABEL) == self.owner


@dataclass(frozen=True, slots=True)
class NewSlice:
    """Everything that a request for a slice says."""

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
    """The UUID that makes repeating a request harmless: names are never used twice."""
    return str(uuid.uuid5(_NAMESPACE, f"{verb}/{name}"))


@dataclass(frozen=True, slots=True)
class Create:
    """Ask for a slice of this name, which may have been asked for already."""

    name: str
    reason: str

    def __str__(self) -> str:
        return f"create {self.name}: {self.reason}"


@dataclass(frozen=True, slots=True)
class Delete:
    """Give a slice back.

    Attributes:
        if_unused: only if no job has come to it meanwhile.
    """

    name: str
    reason: str
    if_unused: bool = False

    def __str__(self) -> str:
        return f"delete {self.name}: {self.reason}"


@dataclass(frozen=True, slots=True)
class Wait:
    """Something is wanted that is not done now."""

    reason: str

    def __str__(self) -> str:
        return f"wait: {self.reason}"


Action = Create | Delete | Wait


@dataclass(slots=True)
class History:
    """What a provisioner remembers from one plan to the next. It may be lost: then timers begin anew.

    Attributes:
        failures: in a row; a slice that joins the cluster ends the row.
        not_before: no new slice is asked for earlier.
        last_failure: in words.
        unconfirmed: names that were asked for and are not listed yet, and when they were asked for first.
    """

    failures: int = 0
    not_before: float = 0.0
    last_failure: str = ""
    unconfirmed: dict[str, float] = field(default_factory=dict)
    _since: dict[tuple[str, str], float] = field(default_factory=dict)
    _counted: set[str] = field(default_factory=set)
    _joined: set[str] = field(default_factory=set)

    def failed(self, now: float, why: str) -> None:
        """Wait before the next try."""
        self.failures += 1
        self.last_failure = why
        self.not_before = now + self.pause_s

    @property
    def pause_s(self) -> float:
        """30 s after the first failure, then 1 min, 2 min, … half an hour."""
        return float(min(LONGEST_BACKOFF_S, FIRST_BACKOFF_S * 2 ** min(max(0, self.failures - 1), 20)))

    def refused(self, name: str, now: float, why: str) -> None:
        """The provider does not give the slice of that name; it is not asked for again."""
        self.unconfirmed.pop(name, None)
        self.failed(now, why)

    def failed_once(self, name: str, now: float, why: str) -> None:
        if name not in self._counted:
            self._counted.add(name)
            self.failed(now, why)

    def has_joined(self, name: str) -> None:
        """All of its hosts are in the cluster. The first time, that ends a row of failures."""
        if name not in self._joined:
            self._joined.add(name)
            self.failures, self.not_before = 0, 0.0

    def once_joined(self, name: str) -> bool:
        return name in self._joined

    def lasting(self, what: str, name: str, holds: bool, now: float) -> float:
        """For how many seconds something has held, as far as it was looked at."""
        if not holds:
            self._since.pop((what, name), None)
            return 0.0
        return now - self._since.setdefault((what, name), now)

    def forget_all_but(self, names: Collection[str]) -> None:
        self._since = {key: since for key, since in self._since.items() if key[1] in names}
        self._counted &= set(names)
        self._joined &= set(names)


def plan(
    settings: Settings,
    demand: int | None,
    found: Sequence[QueuedSlice],
    joined: Mapping[str, Joined],
    history: History,
    now: float,
) -> list[Action]:
    """What to do now, each with its reason.

    Args:
        settings: what is wanted.
        demand: how many slices of the type waiting jobs miss; None: the cluster could not be asked.
        found: all queued resources of the zone.
        joined: the slices that have hosts in the cluster; means nothing without a demand.
        history: what earlier plans left; changed.
        now: seconds since the epoch; makes new names.
    """
    ours = {one.name: one for one in found if settings.owns(one)}
    for name, asked_at in list(history.unconfirmed.items()):
        if name in ours or now - asked_at > ARRIVAL_S:
            del history.unconfirmed[name]
    history.forget_all_but([*ours, *history.unconfirmed])
    actions, coming, present = _look_through(settings, demand, ours, joined, history, now)
    actions += _release(settings, demand, coming, present, joined, history, now)
    return actions + _obtain(settings, demand or 0, len(ours), len(coming), len(present), history, now)


def _look_through(
    settings: Settings,
    demand: int | None,
    ours: Mapping[str, QueuedSlice],
    joined: Mapping[str, Joined],
    history: History,
    now: float,
) -> tuple[list[Action], list[QueuedSlice], list[QueuedSlice]]:
    """Delete what is no good any more; what is coming, and what is there."""
    actions: list[Action] = []
    coming: list[QueuedSlice] = []
    present: list[QueuedSlice] = []
    for name, one in ours.items():
        in_cluster = demand is not None and name in joined and joined[name].whole
        is_absent = demand is not None and not in_cluster and one.state is QueuedState.ACTIVE
        absent_s = history.lasting("absent", name, is_absent, now)
        if in_cluster:
            history.has_joined(name)
        was_there = history.once_joined(name)
        if one.state is QueuedState.FAILED:
            why = f"it has failed{f' ({one.error})' if one.error else ''} and holds quota"
            history.failed_once(name, now, f"{name}: {one.error or 'it has failed'}")
            actions.append(Delete(name, why))
        elif one.state is QueuedState.SUSPENDED:
            who = "the provider" if one.by_service else "a user"
            actions.append(Delete(name, f"it was suspended by {who} and holds quota"))
        elif is_absent and was_there:
            if absent_s > BROKEN_S:
                why = f"it has lacked hosts that it had for {absent_s / 60:.0f} minutes"
                actions.append(Delete(name, why, if_unused=True))
        elif absent_s > JOIN_S:
            why = f"it is active, but not all of its hosts have joined the cluster after {absent_s / 60:.0f} minutes"
            history.failed_once(name, now, f"{name}: {why}; look at its start-up script's log")
            actions.append(Delete(name, why, if_unused=True))
        elif one.state in _COMING or is_absent:
            coming.append(one)
        elif one.state is QueuedState.ACTIVE:
            present.append(one)
    return actions, coming, present


def _release(
    settings: Settings,
    demand: int | None,
    coming: Sequence[QueuedSlice],
    present: Sequence[QueuedSlice],
    joined: Mapping[str, Joined],
    history: History,
    now: float,
) -> list[Action]:
    """Give back what nobody needs, down to the least number: requests first, then the slices idle the longest."""
    spare = len(coming) + len(present) + len(history.unconfirmed) - settings.least
    actions: list[Action] = []
    surplus = len(coming) + len(history.unconfirmed) - (demand or 0)
    for number, one in enumerate(c for c in coming if c.state in _CANCELLABLE):
        unneeded = demand is not None and number < min(surplus, spare)
        if history.lasting("unneeded", one.name, unneeded, now) >= settings.idle_s and unneeded:
            actions.append(Delete(one.name, f"no job has waited for it for {settings.idle_s:g} s"))
    spare -= len(actions)
    idle: list[tuple[float, str]] = []
    for one in present:
        unused = demand == 0 and not joined[one.name].in_use
        idle_s = history.lasting("idle", one.name, unused, now)
        if unused and idle_s >= settings.idle_s:
            idle.append((idle_s, one.name))
    for idle_s, name in sorted(idle, reverse=True)[: max(0, spare)]:
        actions.append(Delete(name, f"it has been idle for {idle_s:.0f} s and no job waits for one", if_unused=True))
    return actions


def _obtain(
    settings: Settings, demand: int, held: int, coming: int, present: int, history: History, now: float
) -> list[Action]:
    """Ask for what is missing, within the cap, and not soon after a failure."""
    unconfirmed = list(history.unconfirmed)
    actions: list[Action] = [Create(name, "it was asked for, and is not listed yet") for name in unconfirmed]
    coming, held = coming + len(unconfirmed), held + len(unconfirmed)
    for_jobs, for_least = demand - coming, settings.least - coming - present
    wanted = max(0, for_jobs, for_least)
    if not wanted:
        return actions
    why = f"waiting jobs miss {demand}, {coming} coming" if for_jobs >= for_least else f"at least {settings.least}"
    if now < history.not_before:
        pause = f"{history.pause_s:g} s after {history.failures} failures, the last: {history.last_failure}"
        return [*actions, Wait(f"{wanted} more wanted ({why}), but pausing {pause}")]
    room = max(0, settings.most - held)
    if room < wanted:
        actions.append(Wait(f"{wanted} wanted ({why}), but {held} of at most {settings.most} are held"))
    for number in range(min(room, wanted)):
        name = f"{settings.prefix}{int(now * 1000):x}-{number}"
        actions.append(Create(name, why))
    return actions
