"""What has changed in Ray's node table since the last reading, and what became of the hosts that are gone."""

import logging
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, replace
from typing import Any

from iris_ray.actors.controller.clock import Clock
from iris_ray.actors.controller.node_table import SLICE_NAME_LABEL, NodeTable, failure, registration
from iris_ray.actors.controller.use_elsewhere import UseElsewhere
from iris_ray.model.outcomes import HostEvidence
from iris_ray.state import ControllerState
from iris_ray.state.events import Event, WorkerDrainedEvent, WorkerFailedEvent

logger = logging.getLogger(__name__)

GONE_HOSTS_KEPT = 10_000
MISSING = "the host is missing in Ray's node table, which lists a node that died only until very many others have died"


@dataclass(frozen=True, slots=True)
class UnusableHost:
    """A live host that no job gets, because of its labels or its chips.

    Attributes:
        node_id, address: Ray's node id and the IP address.
        slice_name: the slice that it says it is of, or None.
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

    Attributes:
        unusable: the live hosts that no job gets, by node id.
    """

    def __init__(self, state: ControllerState, clock: Clock) -> None:
        self.unusable: dict[str, UnusableHost] = {}
        self._state = state
        self._clock = clock
        self._readings: dict[str, object] = {}  # node id → what was last read of it
        self._elsewhere = UseElsewhere(state)
        self._missing: set[str] = set()  # live hosts that the last reading did not have
        self._gone: dict[str, str] = {}  # node id → how it was lost
        self._notices: dict[str, str] = {}  # node id → the notice that it had when it was lost
        self._slices: dict[str, str] = {}  # node id → the slice that it is, or was, of

    def events_of(self, table: NodeTable) -> list[Event]:
        """Return what has changed since the last reading.

        A host is lost if Ray says so, or if two readings in a row don't have it. A reading without any live node says
        nothing of hosts that it does not have.
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
        """Remember the notices of hosts that are gone already: they make a loss a preemption."""
        for event in events:
            if isinstance(event, WorkerDrainedEvent) and event.node_id not in self._state.workers:
                self._notices[event.node_id] = event.reason
        while len(self._notices) > GONE_HOSTS_KEPT:
            del self._notices[next(iter(self._notices))]

    def evidence(self, node_ids: Iterable[str]) -> dict[str, HostEvidence]:
        """Return what is known about these hosts."""
        return {node_id: self._evidence(node_id) for node_id in node_ids}

    def slices_of(self, node_ids: Iterable[str]) -> dict[str, str]:
        """Return the names of the slices that these hosts are, or were, of."""
        return {node_id: self._slices[node_id] for node_id in node_ids if node_id in self._slices}

    def _evidence(self, node_id: str) -> HostEvidence:
        worker = self._state.workers.get(node_id)
        draining = worker.draining if worker else self._notices.get(node_id)
        return HostEvidence(self._gone.get(node_id), draining)

    def _vanished(self, listed: Set[str]) -> list[Event]:
        """Return the loss of the hosts that are neither in this reading nor were in the one before."""
        for node_id in self.unusable.keys() - listed:
            del self.unusable[node_id]
        before, self._missing = self._missing, self._state.workers.keys() - listed
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
        if worker is None:
            return []
        notice = self._notices.get(node_id)
        return [replace(died, reason=f"{died.reason}; {notice}") if notice else died]

    def _alive(self, node: Mapping[str, Any], table: NodeTable) -> list[Event]:
        node_id = node["NodeID"]
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
        worker = self._clock.heard(replace(worker, elsewhere=self._elsewhere.of(node, table, held)))
        return [] if self._state.knows(worker) else [worker]

    def _remember(self, node_id: str, reason: str) -> None:
        self._gone[node_id] = reason
        while len(self._gone) > GONE_HOSTS_KEPT:
            oldest = next(iter(self._gone))
            del self._gone[oldest]
            self._notices.pop(oldest, None)
            self._slices.pop(oldest, None)
