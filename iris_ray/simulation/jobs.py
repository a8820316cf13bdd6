"""What simulated jobs ask for, and what their tasks do."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from iris_ray.model.constraints import AttributeValue, Constraint, ConstraintOp
from iris_ray.model.job_spec import CoschedulingConfig, JobSpec
from iris_ray.model.topology import get_tpu_config
from iris_ray.model.workers import TPU, TPU_TOPOLOGY


@dataclass(frozen=True, slots=True)
class SimulatedJob:
    """A job, and what its tasks do. All times are in seconds.

    Args:
        spec: what it asks for.
        run_s: how long each gang runs on the largest number of slices that it can use. On half as many it takes twice
            as long.
        save_every_s: how often tasks save their state; a gang that loses its hosts goes on from there. Infinite: never.
        heeds_notices: whether a gang that is told to move saves its state and moves.
        save_s: how long it takes to save after a notice.
        fails_after_s: each attempt fails after so long; infinite: none does.
        crashes: whether it fails by a signal, such as a segmentation fault, instead of an exception.
        launch_fails: whether no launch of it ever succeeds.
        keep_warm_s: how long its pool keeps idle slices after the job's end.
    """

    spec: JobSpec
    run_s: float
    save_every_s: float = math.inf
    heeds_notices: bool = True
    save_s: float = 10.0
    fails_after_s: float = math.inf
    crashes: bool = False
    launch_fails: bool = False
    keep_warm_s: float = 0.0


def slice_spec(job_id: str, tpu_type: str, num_slices: int | Sequence[int] = 1, **changes: Any) -> JobSpec:
    """Return the spec of a gang on whole slices, as `run_on_pod` submits it. Its pool is its own.

    Args:
        job_id: its id.
        tpu_type: such as ``v4-32``.
        num_slices: how many slices, or the numbers of slices that it can use.
        changes: other values of the `JobSpec`.
    """
    config = get_tpu_config(tpu_type)
    values: dict[str, Any] = {
        "owner": f"pool of {job_id}",
        "device": config.name,
        "replicas": config.vm_count,
        "coscheduling": CoschedulingConfig(num_groups=num_slices),
        "whole_groups": True,
        "constraints": (Constraint(TPU_TOPOLOGY, ConstraintOp.EQ, AttributeValue(config.name)),),
        "resources": {TPU: float(config.chips_per_vm)},
        "max_retries_preemption": 10_000,
    }
    return JobSpec(job_id=job_id, **(values | changes))


def tasks_spec(job_id: str, replicas: int = 1, cpus: float = 1.0, **changes: Any) -> JobSpec:
    """Return the spec of tasks without TPU that are placed one by one. Its pool is its own.

    Args:
        job_id: its id.
        replicas: how many tasks.
        cpus: of each task.
        changes: other values of the `JobSpec`.
    """
    values: dict[str, Any] = {"owner": f"pool of {job_id}", "replicas": replicas, "resources": {"CPU": cpus}}
    return JobSpec(job_id=job_id, **(values | changes))
