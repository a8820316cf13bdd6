"""A client and a Controller of versions that can't talk to each other say so."""

import dataclasses
import inspect
from typing import Any

import pytest

from iris_ray.actors.protocol.version import PROTOCOL_VERSION, require_same_protocol
from iris_ray.errors import VersionMismatchError


@pytest.mark.parametrize(
    ("theirs", "advice"),
    [(PROTOCOL_VERSION - 1, "iris-ray cluster controller upgrade"), (PROTOCOL_VERSION + 1, "install")],
)
def test_only_other_protocol_is_refused_with_versions_and_advice(theirs: int, advice: str) -> None:
    require_same_protocol(PROTOCOL_VERSION, "7.0.0", "0.1.3")
    with pytest.raises(VersionMismatchError) as refused:
        require_same_protocol(theirs, "7.0.0", "0.1.3")
    for said in (f"7.0.0 (protocol {theirs})", f"0.1.3 (protocol {PROTOCOL_VERSION})", advice):
        assert said in str(refused.value)


def test_wire_format_changes_only_with_a_new_protocol() -> None:
    """A change of these lists raises PROTOCOL_VERSION in the same commit; new methods need no new version."""
    from iris_ray.actors.controller.controller import Controller
    from iris_ray.actors.pool.slice_pool_manager import SlicePoolManager
    from iris_ray.actors.protocol.messages import AttemptOrder, GangProgress, HostPlace, JobView, PoolProcess, PoolView
    from iris_ray.model.cluster_settings import WasSet
    from iris_ray.model.lifecycle import AttemptId
    from iris_ray.model.notices import Notice
    from iris_ray.state.events import MaintenanceCalledOffEvent, WorkerDrainedEvent

    methods = {
        name: {method: parameters(getattr(cls, method)) for method in METHODS[name]}
        for name, cls in (("Controller", Controller), ("SlicePoolManager", SlicePoolManager))
    }
    orders = AttemptId, AttemptOrder, HostPlace, JobView, PoolProcess, PoolView, Notice
    travelling = *orders, WasSet, GangProgress, WorkerDrainedEvent, MaintenanceCalledOffEvent
    fields = {cls.__name__: field_names(cls) for cls in travelling}
    modules = {cls.__name__: cls.__module__.removeprefix("iris_ray.") for cls in travelling}
    assert (PROTOCOL_VERSION, methods, fields, modules) == (10, METHODS, FIELDS, MODULES)


def field_names(cls: Any) -> list[str]:
    return list(cls._fields) if issubclass(cls, tuple) else [field.name for field in dataclasses.fields(cls)]


def parameters(method: Any) -> list[str]:
    """Without those that Ray adds to a class that it makes actors of."""
    return [name for name in inspect.signature(method).parameters if name not in ("self", "_ray_trace_ctx")]


METHODS: dict[str, dict[str, list[str]]] = {
    "Controller": {
        "versions": [],
        "ping": [],
        "submit": ["spec", "pool", "incarnation"],
        "report": ["job_id", "events", "gang", "sender"],
        "why": ["job_id"],
        "evidence": ["node_ids"],
        "is_to_grow": ["attempt"],
        "provider_words": ["node_ids"],
        "demand": [],
        "about": [],
        "list_jobs": ["after"],
        "list_workers": ["after"],
        "job_status": ["job_id"],
        "list_tasks": ["job_id", "after"],
        "task_status": ["job_id", "index"],
        "fetch_task_logs": ["job_id", "task_index", "at", "max_bytes"],
        "fetch_logs": ["job_id", "wanted", "max_bytes"],
        "locate_logs": ["job_id", "wanted"],
        "note_last_lines": ["batch", "sender"],
        "note_progress": ["progress", "sender"],
        "cancel": ["job_id", "reason", "user"],
        "taint": ["target", "taint", "reason", "user"],
        "lift_taint": ["target", "taint", "user"],
        "list_limits": [],
        "set_limits": ["whose", "bands", "limits", "reset", "user"],
        "list_settings": [],
        "set_settings": ["texts", "unless_set", "user"],
        "statistics": [],
    },
    "SlicePoolManager": {
        "watched": [],
        "reconnect": ["epoch"],
        "assign": ["order"],
        "drop_spare": ["job_id"],
        "notify_attempt": ["attempt", "notice", "epoch"],
        "stop_attempt": ["attempt", "reason", "epoch"],
        "job_ended": ["job_id"],
        "give_up_slice": ["name", "epoch"],
    },
}
FIELDS = {
    "AttemptOrder": [
        "attempt",
        "slices",
        "bundle",
        "epoch",
        "incarnation",
        "spare_for",
        "processes_per_host",
        "topologies",
    ],
    "AttemptId": ["job_id", "number", "gang"],
    "HostPlace": ["node_id", "address", "slice_name", "host_index"],
    "WasSet": ["text", "user", "at"],
    "PoolProcess": ["owner", "incarnation"],
    "PoolView": ["incarnation", "slices"],
    "Notice": ["kind", "reason", "deadline"],
    "JobView": ["state", "attempt", "failures", "preemptions", "failed_launches", "error", "job_state"],
    "WorkerDrainedEvent": ["node_id", "reason", "kind", "deadline"],
    "MaintenanceCalledOffEvent": ["node_id"],
    "GangProgress": ["attempt", "age", "step", "status", "marks", "stragglers"],
}
MODULES = {
    **dict.fromkeys(
        ("AttemptOrder", "GangProgress", "HostPlace", "JobView", "PoolProcess", "PoolView"), "actors.protocol.messages"
    ),
    **dict.fromkeys(("MaintenanceCalledOffEvent", "WorkerDrainedEvent"), "state.events"),
    "AttemptId": "model.lifecycle",
    "Notice": "model.notices",
    "WasSet": "model.cluster_settings",
}
"""By its module pickle finds a class in the other process."""
