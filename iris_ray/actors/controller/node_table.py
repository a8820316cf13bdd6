"""Turns readings of Ray's node table into events: hosts that come, change and go, and their use outside iris_ray."""

import logging
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from math import prod
from typing import Any

import ray

from iris_ray.actors.calls.ray_internals import available_resources_by_node, draining_nodes
from iris_ray.actors.controller.clock import Clock
from iris_ray.actors.controller.own_slices import OwnSlices, own_name
from iris_ray.errors import InvalidRequestError
from iris_ray.model.constraints import TAINT_PREFIX, AttributeValue
from iris_ray.model.lifecycle import TaskState
from iris_ray.model.outcomes import HostEvidence
from iris_ray.model.topology import TPUConfig, get_tpu_config
from iris_ray.model.workers import (
    TOPOLOGY_LABEL,
    TPU,
    TPU_NAME,
    TPU_PER_CHIP,
    TPU_TOPOLOGY,
    TPU_VM_COUNT,
    TPU_WORKER_ID,
    Resources,
    Worker,
    rounded,
)
from iris_ray.state import ControllerState
from iris_ray.state.events import Event, WorkerDrainedEvent, WorkerFailedEvent, WorkerRegisteredEvent

SLICE_NAME_LABEL = "ray.io/tpu-slice-name"
WORKER_ID_LABEL = "ray.io/tpu-worker-id"
POD_TYPE_LABEL = "ray.io/tpu-pod-type"
OPERATOR_PREFIX = "iris/"
TAINT_LABEL = "taint."
NODE_POLL_S = 0.5
"""The interval between two readings of the table."""


@dataclass(frozen=True, slots=True)
class NodeTable:
    """One reading of Ray's tables: nodes, the deadlines of draining nodes, and the unclaimed resources of each node."""

    nodes: tuple[Mapping[str, Any], ...]
    draining: Mapping[str, int]
    available: Mapping[str, Mapping[str, float]]

    @staticmethod
    def read() -> "NodeTable":
        """Ask Ray for its node table, drains and free resources. Blocks until the GCS has answered."""
        return NodeTable(tuple(ray.nodes()), draining_nodes(), available_resources_by_node())


def registration(node: Mapping[str, Any], table: NodeTable, ours: float) -> WorkerRegisteredEvent | str:
    """Return the event that registers a live node as a worker, or why no job can use the node.

    Args:
        node: an entry of ``ray.nodes()``.
        table: the reading of the entry.
        ours: how many of its chips iris_ray has reserved, as Ray counts them.
    """
    try:
        attributes = attributes_of(node)
    except InvalidRequestError as error:
        return str(error)
    node_id, address, resources = node["NodeID"], node["NodeManagerAddress"], node.get("Resources", {})
    draining, deadline = None, None
    if node_id in table.draining:
        draining = "Ray is draining it"
        deadline = table.draining[node_id] / 1000 or None  # 0: none
    unclaimed = table.available.get(node_id)  # Ray leaves out a resource that is fully claimed
    taken = 0.0 if unclaimed is None else resources.get(TPU, 0.0) - unclaimed.get(TPU, 0.0) - ours
    if (per_chip := attributes.get(TPU_PER_CHIP)) is not None:
        times = float(per_chip.value)
        taken, resources = taken / times, {**resources, TPU: resources[TPU] / times}
    foreign = None
    if taken > 0:
        foreign = f"{taken:g} chips of host {attributes[TPU_WORKER_ID].value} are in use outside iris_ray"
    return WorkerRegisteredEvent(
        node_id, address, attributes, dict(resources), draining=draining, foreign=foreign, deadline=deadline
    )


def attributes_of(node: Mapping[str, Any]) -> dict[str, AttributeValue]:
    """Return the attributes of a live node, for constraints: its labels, and a TPU host's slice, number and type.

    A label can't override the slice, number and type. A host of a single-host type is host 0 of a slice of its own.

    Raises:
        InvalidRequestError: it has chips or labels of a TPU host, but lacks some, or they contradict each other. The
            message says which.
    """
    labels, chips = node.get("Labels", {}), node.get("Resources", {}).get(TPU, 0.0)
    attributes = operator_attributes(labels)
    attributes.pop(TPU_PER_CHIP, None)
    if not chips and SLICE_NAME_LABEL not in labels:
        return attributes
    labels = {**labels, **_own_slice(node["NodeID"], labels, chips)}
    if SLICE_NAME_LABEL not in labels:
        raise InvalidRequestError(
            f"host {node['NodeManagerAddress']} has TPU chips but lacks the label {SLICE_NAME_LABEL}"
        )
    slice_name = labels[SLICE_NAME_LABEL]
    host = f"host {node['NodeManagerAddress']} of {slice_name}"
    if not chips:
        raise InvalidRequestError(f"{host} has no TPU chips that Ray knows of")
    host_index = labels.get(WORKER_ID_LABEL, "")
    if not host_index.isdecimal():  # nothing is guessed: a host without a number is not host 0
        raise InvalidRequestError(f"{host} has no usable {WORKER_ID_LABEL} ({host_index!r})")
    try:
        config = live_config(labels.get(POD_TYPE_LABEL, ""), chips)
        _require_whole(config, labels.get(TOPOLOGY_LABEL, ""))
    except InvalidRequestError as error:
        raise InvalidRequestError(f"host {host_index} of {slice_name}: {error}") from error
    per_chip = int(chips) // config.chips_per_vm
    return {
        **attributes,
        TPU_NAME: AttributeValue(slice_name),
        TPU_WORKER_ID: AttributeValue(int(host_index)),
        TPU_TOPOLOGY: AttributeValue(config.name),
        TPU_VM_COUNT: AttributeValue(config.vm_count),
        **({TPU_PER_CHIP: AttributeValue(per_chip)} if per_chip > 1 else {}),
    }


def _require_whole(config: TPUConfig, shape: str) -> None:
    """Refuse a host whose shape has fewer chips than its type: a sub-slice must not be taken for its whole slice."""
    sides = shape.split("x")
    if all(map(str.isdecimal, sides)) and (chips := prod(map(int, sides))) < config.chip_count:
        raise InvalidRequestError(
            f"{TOPOLOGY_LABEL} is {shape}, which are {chips} chips, and {config.name} has {config.chip_count}. If this"
            f" is a sub-slice, give its nodes its own TPU_NAME, TPU_ACCELERATOR_TYPE, TPU_TOPOLOGY and TPU_WORKER_ID"
        )


def _own_slice(node_id: str, labels: Mapping[str, str], chips: float) -> dict[str, str]:
    """Return labels that make a host of a single-host type host 0 of its own slice; for other hosts an empty dict.

    GKE's webhook numbers single hosts as if they were one slice's (1.3.1, `mutatePod`): once ``v6e-8-0`` is lost, its
    successor may become host 1 of ``v6e-8-2``. Such a host's slice has a part of its node's id in its name.
    """
    try:
        config = live_config(labels.get(POD_TYPE_LABEL, ""), chips)
    except InvalidRequestError:
        return {}
    if config.vm_count > 1:
        return {}
    name = labels.get(SLICE_NAME_LABEL)
    if not name or labels.get(WORKER_ID_LABEL, "0") != "0":
        name = own_name(name or config.name, node_id)
    return {SLICE_NAME_LABEL: name, WORKER_ID_LABEL: "0"}


@cache
def live_config(pod_type: str, chips: float) -> TPUConfig:
    """Return the config of a TPU type with this number of chips on a host. Cached: thousands of hosts share it."""
    return get_tpu_config(pod_type).with_live_hosts(chips)


def operator_attributes(labels: Mapping[str, str]) -> dict[str, AttributeValue]:
    """Return a node's labels as attributes: each as a string, and the operator's also under their short names.

    An operator sets ``iris/<key>``, whose value is typed: ``iris/tpu-pool=large-jobs``, ``iris/disk-gb=500``. A label
    can't hold a colon, so ``iris/taint.<name>`` is the taint ``<name>``.
    """
    attributes = {name: _text(value) for name, value in labels.items()}
    for name, value in labels.items():
        if name.startswith(OPERATOR_PREFIX):
            key = name.removeprefix(OPERATOR_PREFIX)
            if key.startswith(TAINT_LABEL):
                key = TAINT_PREFIX + key.removeprefix(TAINT_LABEL)
            attributes[key] = AttributeValue.parse(value)
    return attributes


@lru_cache(maxsize=100_000)
def _text(value: str) -> AttributeValue:
    """Return a label's value. Cached, since thousands of hosts share it."""
    return AttributeValue(value)


def failure(node: Mapping[str, Any]) -> WorkerFailedEvent:
    """Return the event for a node that Ray declared dead."""
    reason = node.get("DeathReasonMessage") or "Ray declared the node dead"
    return WorkerFailedEvent(node["NodeID"], f"the host died: {str(reason).strip()[:200]}")


# -- use outside iris_ray ----------------------------------------------------------------------------------------------

READINGS = 6
"""The number of readings of which the least use of a host counts."""


class UseElsewhere:
    """Works out how much of each host's resources other work than iris_ray's uses. For chips see `registration`.

    Ray's tables and the state are never of the same moment: a reservation appears some time after the gang was
    assigned, and goes some time after its end. So a host on which a gang is just starting or ending is not judged. Of
    other hosts the least of `READINGS` readings counts, so that work of some seconds counts for little. The first
    reading of a new host counts until the next one.

    Args:
        state: read only; it knows which resources iris_ray itself holds.
    """

    def __init__(self, state: ControllerState) -> None:
        self._state = state
        self._readings: dict[str, tuple[int, Resources | None]] = {}  # node id → number of readings, and the least

    def is_judged(self, node_id: str) -> bool:
        """Return whether a host needs no further readings as long as they stay the same."""
        return node_id not in self._readings

    def of(self, node: Mapping[str, Any], table: NodeTable, is_held: bool) -> dict[str, float]:
        """Take a reading. Return the use that counts from now on.

        Args:
            node: an entry of ``ray.nodes()``.
            table: the reading of the entry.
            is_held: whether a pool holds the host's slice. The state does not know how much a warm slice reserves.
        """
        node_id = node["NodeID"]
        worker, unclaimed = self._state.workers.get(node_id), table.available.get(node_id)
        known = dict(worker.elsewhere) if worker is not None else {}
        if unclaimed is None or (is_held and worker is not None and worker.chips_idle):
            self.forget(node_id)
            return known
        if worker is None:
            first = _used(node["Resources"], unclaimed, {})
            if first:
                self._readings[node_id] = READINGS - 1, first
            return first
        if self._is_changing(worker):
            self._readings[node_id] = 0, None
            return known
        return self._counted(node_id, known, _used(node["Resources"], unclaimed, worker.held))

    def forget(self, node_id: str) -> None:
        self._readings.pop(node_id, None)

    def _counted(self, node_id: str, known: dict[str, float], now: dict[str, float]) -> dict[str, float]:
        count, least = self._readings.get(node_id, (0, None))
        least = now if least is None else {r: min(n, now[r]) for r, n in least.items() if r in now}
        if count + 1 < READINGS and (now != known or least != known):
            self._readings[node_id] = count + 1, least
            return known
        self.forget(node_id)
        if least != now:
            self._readings[node_id] = 1, now
        return dict(least)

    def _is_changing(self, worker: Worker) -> bool:
        """Return whether a gang on a host is just starting or ending."""
        jobs = self._state.jobs
        gangs = (jobs[attempt.job_id].gangs[attempt.gang] for _, attempt in worker.occupants)
        return bool(worker.ending) or any(gang.tasks[0].state is TaskState.ASSIGNED for gang in gangs)


def _used(resources: Resources, unclaimed: Resources, ours: Resources) -> dict[str, float]:
    """Return the claimed resources of a host that are not ours. Ray leaves out a resource that is fully claimed."""
    amounts = {
        name: rounded(has - unclaimed.get(name, 0.0) - ours.get(name, 0.0))
        for name, has in resources.items()
        if name not in (TPU, "object_store_memory") and not name.startswith("node:")
    }
    return {name: amount for name, amount in amounts.items() if amount > 0}


# -- node diff ---------------------------------------------------------------------------------------------------------

logger = logging.getLogger(__name__)

GONE_HOSTS_KEPT = 10_000
MISSING = "the host is missing in Ray's node table, which lists a node that died only until very many others have died"


@dataclass(frozen=True, slots=True)
class UnusableHost:
    """A live host that no job gets, because of its labels or its chips.

    Attributes:
        slice_name: the slice that its label names, or None.
        resources: by Ray's resource names.
        why: what is wrong with it, in words.
    """

    node_id: str
    address: str
    slice_name: str | None
    resources: Mapping[str, float]
    why: str

    @staticmethod
    def of(node: Mapping[str, Any], why: str) -> "UnusableHost":
        labels, resources = node.get("Labels", {}), node.get("Resources", {})
        return UnusableHost(
            node["NodeID"], node["NodeManagerAddress"], labels.get(SLICE_NAME_LABEL), dict(resources), why
        )


class NodeDiff:
    """Compares readings of the node table, and remembers how hosts were lost.

    Args:
        state: read only; it knows the hosts that are alive.
        clock: the Controller's.
        own_slices: the names of single hosts' slices.

    Attributes:
        unusable: the live hosts that no job gets, by node id.
    """

    def __init__(self, state: ControllerState, clock: Clock, own_slices: OwnSlices | None = None) -> None:
        self.unusable: dict[str, UnusableHost] = {}
        self._state = state
        self._clock = clock
        self._readings: dict[str, object] = {}  # node id → its last reading
        self._elsewhere = UseElsewhere(state)
        self._own_slices = OwnSlices() if own_slices is None else own_slices
        self._missing: set[str] = set()  # live hosts that were not in the last reading
        self._gone: dict[str, str] = {}  # node id → how it was lost
        self._notices: dict[str, str] = {}  # node id → the notice that it had when it was lost
        self._slices: dict[str, str] = {}  # node id → its present or last slice

    def events_of(self, table: NodeTable) -> list[Event]:
        """Return the changes since the last reading.

        A host is lost if Ray says so, or if it is missing in two readings in a row. A reading without any live node
        does not count as one in which hosts are missing.
        """
        events: list[Event] = []
        for node in table.nodes:
            node_id = node["NodeID"]
            if node_id not in self._slices and (name := node.get("Labels", {}).get(SLICE_NAME_LABEL)):
                self._slices[node_id] = name
            events += self._alive(node, table) if node["Alive"] else self._lost(failure(node))
        if any(node["Alive"] for node in table.nodes):
            events += self._vanished({node["NodeID"] for node in table.nodes})
        return events

    def note_drains(self, events: Iterable[Event]) -> None:
        """Remember the notices of hosts that are gone already: a loss with a notice is a preemption."""
        for event in events:
            if isinstance(event, WorkerDrainedEvent) and event.node_id not in self._state.workers:
                self._notices[event.node_id] = event.reason
        while len(self._notices) > GONE_HOSTS_KEPT:
            del self._notices[next(iter(self._notices))]

    def evidence(self, node_ids: Iterable[str]) -> dict[str, HostEvidence]:
        """Return the evidence about these hosts: how they were lost, and their notices."""
        return {node_id: self._evidence(node_id) for node_id in node_ids}

    def slices_of(self, node_ids: Iterable[str]) -> dict[str, str]:
        """Return the names of the present or last slices of these hosts."""
        return {node_id: self._slices[node_id] for node_id in node_ids if node_id in self._slices}

    def _evidence(self, node_id: str) -> HostEvidence:
        worker = self._state.workers.get(node_id)
        draining = worker.draining if worker else self._notices.get(node_id)
        return HostEvidence(self._gone.get(node_id), draining)

    def _vanished(self, listed: Set[str]) -> list[Event]:
        """Return the losses of hosts that are missing in this reading and in the one before."""
        for node_id in self.unusable.keys() - listed:
            del self.unusable[node_id]
        before, self._missing = self._missing, self._state.workers.keys() - listed
        self._own_slices.forget_missing(listed)
        vanished = [WorkerFailedEvent(node_id, MISSING) for node_id in before & self._missing]
        return [event for died in vanished for event in self._lost(died)]

    def _lost(self, died: WorkerFailedEvent) -> list[Event]:
        node_id = died.node_id
        worker = self._state.workers.get(node_id)
        if node_id not in self._gone:
            if worker is not None and worker.draining:
                self._notices[node_id] = worker.draining
            self._remember(node_id, died.reason)
        self._readings.pop(node_id, None)
        self.unusable.pop(node_id, None)
        self._elsewhere.forget(node_id)
        self._own_slices.forget(node_id)
        if worker is None:
            return []
        notice = self._notices.get(node_id)
        return [replace(died, reason=f"{died.reason}; {notice}") if notice else died]

    def _alive(self, node: Mapping[str, Any], table: NodeTable) -> list[Event]:
        node_id = node["NodeID"]
        before = self._state.workers.get(node_id)
        if before is not None:
            held = self._state.fleet.holder_of(before) is not None
        else:
            held = node.get("Labels", {}).get(SLICE_NAME_LABEL) in self._state.holders
        reading = node, table.draining.get(node_id), table.available.get(node_id), held
        if self._readings.get(node_id) == reading and self._elsewhere.is_judged(node_id):
            return []
        self._readings[node_id] = reading
        self._gone.pop(node_id, None)
        chips = node.get("Resources", {}).get("TPU", 0.0)
        worker = registration(node, table, ours=chips if held else 0.0)
        known = self.unusable.pop(node_id, None)
        if isinstance(worker, str):
            if known is None or known.why != worker:
                logger.warning("of no use: %s", worker)
            self.unusable[node_id] = UnusableHost.of(node, worker)
            return []
        worker = self._own_slices.named(worker)
        if (slice_name := worker.attributes.get(TPU_NAME)) is not None:
            self._slices[node_id] = str(slice_name.value)
        worker = self._clock.heard(replace(worker, elsewhere=self._elsewhere.of(node, table, held)))
        return [] if self._state.knows(worker) else [worker]

    def _remember(self, node_id: str, reason: str) -> None:
        self._gone[node_id] = reason
        while len(self._gone) > GONE_HOSTS_KEPT:
            oldest = next(iter(self._gone))
            del self._gone[oldest]
            self._notices.pop(oldest, None)
            self._slices.pop(oldest, None)
