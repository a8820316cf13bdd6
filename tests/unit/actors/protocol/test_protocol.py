"""A client and a Controller of versions that can't talk to each other say so."""

import contextlib
import dataclasses
import inspect
from collections.abc import Sequence
from typing import Any

import pytest

import iris_ray
from iris_ray.actors.protocol.version import (
    NO_VERSIONS,
    PROTOCOL_VERSION,
    package_directory,
    require_fit,
    require_fitting_controller,
    versions_here,
)
from iris_ray.errors import VersionMismatchError
from iris_ray.model.job_spec import FIELDS_OF_A_JOB


@pytest.mark.parametrize(
    ("theirs", "advice"),
    [
        (PROTOCOL_VERSION - 1, "iris-ray cluster controller upgrade"),
        (PROTOCOL_VERSION + 1, "install iris_ray 7.0.0 here"),
    ],
)
def test_only_other_protocol_is_refused_with_versions_and_advice(theirs: int, advice: str) -> None:
    patch = versions_here() | {"version": "7.0.0", "package": "/image/iris_ray", "address": "10.0.0.9"}
    require_fitting_controller(patch)
    with pytest.raises(VersionMismatchError) as refused:
        require_fitting_controller(patch | {"protocol": theirs})
    ours = f"iris_ray {iris_ray.__version__} (protocol {PROTOCOL_VERSION}) from {package_directory()} on "
    for said in (f"iris_ray 7.0.0 (protocol {theirs}) from /image/iris_ray on 10.0.0.9", ours, advice):
        assert said in str(refused.value)


@pytest.mark.parametrize(
    ("theirs", "advice"),
    [
        ([*FIELDS_OF_A_JOB, "colour"], "knows colour of a job: install iris_ray 7.0.0 here"),
        (FIELDS_OF_A_JOB[:-1], "knows may_evict of a job: replace the Controller"),
    ],
)
def test_other_options_of_a_job_are_refused_by_name(theirs: Sequence[str], advice: str) -> None:
    with pytest.raises(VersionMismatchError, match=advice):
        require_fitting_controller(versions_here() | {"version": "7.0.0", "job": theirs})


@pytest.mark.parametrize(
    ("versions", "refused"),
    [
        ({"python": "3.11.2"}, False),
        ({"python": "3.9.1"}, True),
        ({"ray": "2.49.7"}, False),
        ({"ray": "2.55.1"}, True),
        ({"ray": None}, False),
    ],
)
def test_pickles_cross_between_patch_versions_only(versions: dict[str, str], refused: bool) -> None:
    ours = versions_here() | {"python": "3.11.9", "ray": "2.49.2"}
    expectation = pytest.raises(VersionMismatchError, match="use the same") if refused else contextlib.nullcontext()
    with expectation:
        require_fit(ours | versions, ours, "v4-16-0 host 1", "install it there")


def test_versions_of_an_older_process_can_be_read() -> None:
    with pytest.raises(
        VersionMismatchError, match=r"is iris_ray an older version \(protocol 0\), and this is iris_ray"
    ):
        require_fitting_controller(NO_VERSIONS)


def test_wire_format_changes_only_with_a_new_protocol() -> None:
    """A change of these lists raises PROTOCOL_VERSION in the same commit; new methods need no new version."""
    from iris_ray.actors.controller.controller import Controller
    from iris_ray.actors.pool.slice_pool_manager import SlicePoolManager
    from iris_ray.actors.protocol.messages import (
        AttemptOrder,
        GangProgress,
        HostPlace,
        JobView,
        PoolProcess,
        PoolView,
        Saves,
    )
    from iris_ray.model.cluster_settings import WasSet
    from iris_ray.model.lifecycle import AttemptId
    from iris_ray.model.notices import Notice
    from iris_ray.state.events import MaintenanceCalledOffEvent, TaskStateChangedEvent, WorkerDrainedEvent

    methods = {
        name: {method: parameters(getattr(cls, method)) for method in METHODS[name]}
        for name, cls in (("Controller", Controller), ("SlicePoolManager", SlicePoolManager))
    }
    orders = AttemptId, AttemptOrder, HostPlace, JobView, PoolProcess, PoolView, Notice
    events = WorkerDrainedEvent, MaintenanceCalledOffEvent, TaskStateChangedEvent
    travelling = *orders, WasSet, GangProgress, Saves, *events
    fields = {cls.__name__: field_names(cls) for cls in travelling}
    modules = {cls.__name__: cls.__module__.removeprefix("iris_ray.") for cls in travelling}
    assert (PROTOCOL_VERSION, methods, fields, modules) == (25, METHODS, FIELDS, MODULES)


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
        "report": ["job_id", "events", "gang", "sender", "sent_at"],
        "why": ["job_id"],
        "evidence": ["node_ids"],
        "is_to_grow": ["attempt"],
        "provider_words": ["node_ids"],
        "about": [],
        "list_jobs": ["after"],
        "list_workers": ["after"],
        "job_status": ["job_id"],
        "list_tasks": ["job_id", "after"],
        "task_status": ["job_id", "index"],
        "note_progress": ["progress", "sender"],
        "cancel": ["job_id", "reason", "user"],
        "taint": ["target", "taint", "reason", "user", "seconds"],
        "lift_taint": ["target", "taint", "user"],
        "list_settings": [],
        "set_settings": ["texts", "unless_set", "user"],
        "statistics": [],
    },
    "SlicePoolManager": {
        "watched": [],
        "reconnect": ["epoch"],
        "assign": ["order"],
        "drop_spare": ["job_id"],
        "notify_attempt": ["attempt", "notice", "epoch", "sent_at"],
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
        "previous_indices",
    ],
    "AttemptId": ["job_id", "number", "gang"],
    "HostPlace": ["node_id", "address", "slice_name", "host_index"],
    "WasSet": ["text", "user", "at"],
    "PoolProcess": ["owner", "incarnation"],
    "PoolView": ["incarnation", "slices"],
    "Notice": ["kind", "reason", "deadline"],
    "JobView": ["state", "attempt", "failures", "preemptions", "failed_launches", "error", "job_state"],
    "WorkerDrainedEvent": ["node_id", "reason", "kind", "deadline", "told_by"],
    "MaintenanceCalledOffEvent": ["node_id"],
    "TaskStateChangedEvent": [
        "attempt",
        "task_index",
        "new_state",
        "error",
        "exit_code",
        "is_hopeless",
        "is_hang",
    ],
    "GangProgress": ["attempt", "age", "step", "status", "marks", "stragglers", "stall_limit", "saves"],
    "Saves": ["ago_s", "every_s", "heeds_notices"],
}
MODULES = {
    **dict.fromkeys(
        ("AttemptOrder", "GangProgress", "HostPlace", "JobView", "PoolProcess", "PoolView", "Saves"),
        "actors.protocol.messages",
    ),
    **dict.fromkeys(("MaintenanceCalledOffEvent", "TaskStateChangedEvent", "WorkerDrainedEvent"), "state.events"),
    "AttemptId": "model.lifecycle",
    "Notice": "model.notices",
    "WasSet": "model.cluster_settings",
}
"""By its module pickle finds a class in the other process."""
