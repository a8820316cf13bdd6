"""iris_ray: run a function on every host of TPU slices, all or none, through preemptions, on Ray.

The names below are imported when they are first used, so that the pure core (`iris_ray.scheduler`, `iris_ray.state`,
…) needs no Ray, and a task process imports no more than it must.
"""

import importlib
from typing import Any

_HOME = {
    "AttributeValue": "constraints",
    "Constraint": "constraints",
    "ConstraintOp": "constraints",
    "CoschedulingConfig": "jobs",
    "IrisClient": "client",
    "IrisError": "errors",
    "JobHandle": "client",
    "JobInfo": "job_info",
    "JobState": "lifecycle",
    "JobStatus": "status",
    "MultisliceInfo": "multislice",
    "PriorityBand": "jobs",
    "NoticeKind": "notices",
    "PreemptionNotice": "preemption",
    "ResourceSpec": "resources",
    "TPUConfig": "topology",
    "TaskState": "lifecycle",
    "TaskStatus": "status",
    "TpuCancelled": "outcomes",
    "TpuFailed": "outcomes",
    "TpuPreempted": "outcomes",
    "TpuRunError": "outcomes",
    "TpuSuccess": "outcomes",
    "get_job_info": "job_info",
    "heartbeat": "preemption",
    "on_preemption": "preemption",
    "preemption_notice": "preemption",
    "get_tpu_config": "topology",
    "lookup_endpoint": "endpoints",
    "register_endpoint": "endpoints",
    "release": "launcher",
    "run_on_pod": "launcher",
    "run_on_pod_multislice": "launcher",
    "run_on_pod_multislice_resumable": "launcher",
    "run_on_pod_ray": "launcher",
    "run_on_pod_resumable": "launcher",
    "tpu_device": "resources",
}

__version__ = "0.1.0"
__all__ = list(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'iris_ray' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"iris_ray.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
