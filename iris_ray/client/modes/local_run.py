"""Runs a request on this machine, in one of the local modes."""

import sys
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from iris_ray.actors.wire.messages import RunRequest
from iris_ray.client.modes.local_gang import run_gang
from iris_ray.client.modes.mode import Mode, ModeKind
from iris_ray.client.modes.plan import plan_in_words, require_runnable
from iris_ray.client.modes.simulated_run import run_simulated


def run_here(request: RunRequest, mode: Mode) -> list[Any]:
    """Run a request, and return one result per task, by index. Errors as of `run_on_pod`."""
    if mode.kind is ModeKind.SIMULATE:
        return run_simulated(request, mode.faults)
    if mode.kind is ModeKind.VALIDATE:
        require_runnable(request)
        print(plan_in_words(request), file=sys.stderr)
    return run_gang(request)


def start_here(request: RunRequest, mode: Mode) -> "ray.ObjectRef[list[Any]]":
    """Start a request, and return a reference to its results. Ray's task is this machine's, and takes nothing of it."""
    if not ray.is_initialized():
        ray.init(address="local", num_cpus=1, include_dashboard=False, logging_level="ERROR")
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    run = ray.remote(run_here).options(
        num_cpus=0, max_retries=0, name=f"run_on_pod({request.spec.name})", scheduling_strategy=here
    )
    results: ray.ObjectRef[list[Any]] = run.remote(request, mode)
    return results
