"""The rows of events that people may want to find later, such as the loss of a host. Events of jobs are in attempts."""

import logging
import math
from collections.abc import Iterable
from dataclasses import replace

from iris_ray.history.rows import EventRow, cut
from iris_ray.model.workers import Worker
from iris_ray.state import ControllerState
from iris_ray.state.events import (
    LimitsSetEvent,
    MaintenanceCalledOffEvent,
    SettingSetEvent,
    TaintedEvent,
    TaintLiftedEvent,
    WorkerBlamedEvent,
    WorkerDrainedEvent,
    WorkerFailedEvent,
    WorkerRegisteredEvent,
    WorkerSuspectedEvent,
)
from iris_ray.state.fleet import SUSPICION_S, Taint

logger = logging.getLogger(__name__)

NOTABLE = frozenset({
    WorkerRegisteredEvent, WorkerFailedEvent, WorkerDrainedEvent, WorkerSuspectedEvent, WorkerBlamedEvent,
    MaintenanceCalledOffEvent, TaintedEvent, TaintLiftedEvent, LimitsSetEvent, SettingSetEvent,
})  # fmt: skip
"""The classes of events that may have a row."""


class EventRows:
    """Makes the rows of events that the state has applied. It remembers hosts and taints as they were before.

    Args:
        state: is read after events were applied.
    """

    def __init__(self, state: ControllerState) -> None:
        self._state = state
        self._hosts: dict[str, Worker] = dict(state.workers)
        self._taints: dict[str, dict[str, Taint]] = {}
        self._version = state.fleet.version
        self._catch_up()

    def of(self, events: Iterable[object], at: float, now: float) -> list[EventRow]:
        """Return the rows of events that the state has just applied. Events that change nothing have no row.

        Args:
            events: all of them since the last call, in their order.
            at: the wall time.
            now: seconds on the clock of the state.
        """
        if not (notable := [event for event in events if type(event) in NOTABLE]):
            return []
        rows = []
        for event in notable:
            try:
                rows.append(self._row(event, at, now))
            except Exception:  # the state has refused an event that makes no sense, and other rows are not affected
                logger.debug("no row for %s", event, exc_info=True)
        self._catch_up()
        return [row for row in rows if row is not None]

    def _row(self, event: object, at: float, now: float) -> EventRow | None:
        """Return the row of an event, if it has one, and apply the event to what is remembered."""
        worker = self._hosts.get(getattr(event, "node_id", getattr(event, "target", "")))
        match event:
            case WorkerRegisteredEvent(node_id) if worker is None:
                worker = Worker(node_id, event.address, event.attributes, {}, draining=event.draining)
                self._hosts[node_id] = worker
                return _of_host(at, "host joined", worker, "it has joined")
            case WorkerFailedEvent(node_id, reason) if worker is not None:
                del self._hosts[node_id]
                return _of_host(at, "host lost", worker, reason)
            case WorkerDrainedEvent(node_id, reason) if worker is not None:
                self._hosts[node_id] = replace(worker, draining=reason)
                return _of_host(at, "notice", worker, reason) if worker.draining is None else None
            case WorkerSuspectedEvent(node_id, reason) if worker is not None:
                self._hosts[node_id] = replace(worker, suspected_until=event.now + SUSPICION_S)
                return _of_host(at, "host silent", worker, reason) if worker.suspected_until <= now else None
            case WorkerBlamedEvent(_, job_id, reason, fault) if worker is not None:
                return _of_host(at, "host blamed", worker, f"{fault.value}: {reason}", job_id)
            case MaintenanceCalledOffEvent() if worker is not None:
                return _of_host(at, "notice called off", worker, "the maintenance is called off")
            case TaintedEvent(target, taint, reason, until):
                names = self._taints.setdefault(target, {})
                known, names[taint] = names.get(taint), Taint(reason, until)
                if known is not None and (math.inf if known.until is None else known.until) > now:
                    return None
                return EventRow(
                    at, "tainted", _name(worker) if worker else target, None, cut(f"{taint}: {reason}") or ""
                )
            case TaintLiftedEvent(target, taint):
                self._taints.get(target, {}).pop(taint, None)
                return EventRow(at, "taint lifted", _name(worker) if worker else target, None, taint)
            case LimitsSetEvent(user, band, limits):
                values = ", ".join(f"{name}={value}" for name, value in limits.items() if value is not None)
                return EventRow(at, "limits set", user, None, f"{band.name.lower()}: {values or 'none'}")
            case SettingSetEvent(name, to):
                return EventRow(at, "setting", name, None, f"{to.text} (by {to.user})" if to else "its default again")
        return None

    def _catch_up(self) -> None:
        """Remember the hosts and taints as the state has them now."""
        fleet = self._state.fleet
        changed = fleet.changes_since(self._version)
        self._version = fleet.version
        if changed is None:
            self._hosts = dict(self._state.workers)
        for node_id in {worker.node_id for worker in changed or ()}:
            if (worker := self._state.workers.get(node_id)) is not None:
                self._hosts[node_id] = worker
            else:
                self._hosts.pop(node_id, None)
        self._taints = {target: dict(taints) for target, taints in fleet.taints.items()}


def _of_host(at: float, kind: str, worker: Worker, what: str, job_id: str | None = None) -> EventRow:
    return EventRow(at, kind, _name(worker), job_id, cut(what) or "")


def _name(worker: Worker) -> str:
    if worker.slice_name is None:
        return worker.address
    return worker.slice_name if worker.host_index is None else f"{worker.slice_name}/{worker.host_index}"
