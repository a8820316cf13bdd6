"""Runs a request on this machine, in one of the local modes. A simulated cluster runs in a process of its own."""

import os
import pickle
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray
from ray import cloudpickle
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from iris_ray.actors.protocol.messages import RunRequest
from iris_ray.errors import InvalidJobError, InvalidModeError, TaskCrashedError
from iris_ray.local.gang import ON_CPU, run_gang
from iris_ray.local.mode import Mode, ModeKind, PlannedFault, plan_in_words, require_possible, require_runnable
from iris_ray.local.process import LocalProcess
from iris_ray.settings import MODE


def run_here(request: RunRequest, mode: Mode) -> list[Any]:
    """Run a request, and return one result per task, by index. Raises like `run_on_pod`."""
    if request.spec.after:
        raise InvalidModeError(
            f"after names jobs of a cluster's queue ({', '.join(request.spec.after)}), and mode {mode.kind} has none;"
            " leave it out, or the mode"
        )
    if request.spec.stored_secrets:
        raise InvalidModeError(
            f"secrets has some of a cluster's store ({', '.join(request.spec.stored_secrets)}), and mode {mode.kind}"
            ' has none; give Secret.from_env("NAME") or Secret.from_file(PATH) here'
        )
    if mode.kind is ModeKind.SIMULATE:
        return run_simulated(request, mode.faults)
    if mode.kind is ModeKind.VALIDATE:
        require_runnable(request)
        print(plan_in_words(request), file=sys.stderr)
    return run_gang(request)


def start_here(request: RunRequest, mode: Mode) -> "ray.ObjectRef[list[Any]]":
    """Start a request in a Ray task on this machine, and return a reference to its results."""
    if not ray.is_initialized():
        ray.init(address="local", num_cpus=1, include_dashboard=False, logging_level="ERROR")
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    run = ray.remote(run_here).options(
        num_cpus=0, max_retries=0, name=f"run_on_pod({request.spec.name})", scheduling_strategy=here
    )
    results: ray.ObjectRef[list[Any]] = run.remote(request, mode)
    return results


# -- simulated run -----------------------------------------------------------------------------------------------------

MOST_HOSTS = 32
"""Limit for a simulated cluster on this machine: each host is a Ray node with its own processes."""
SHUTDOWN_S = 30.0
"""Seconds that the cluster may take to end after Ctrl-C."""


def run_simulated(request: RunRequest, faults: Sequence[PlannedFault]) -> list[Any]:
    """Run a request on a simulated cluster with the slices that it needs, and inject the faults.

    Raises:
        InvalidModeError: a fault names a slice or host that the cluster will not have.
        InvalidJobError: the request needs too many hosts for one machine.
        Exception: as for `run_on_pod`.
    """
    spec = request.spec
    assert spec.coscheduling is not None, "a gang on slices"
    slices = max(spec.coscheduling.num_groups) + spec.spares
    if slices * spec.replicas > MOST_HOSTS:
        raise InvalidJobError(
            f"{slices} slices of {spec.device} have {slices * spec.replicas} hosts, and a simulated run has"
            f" {MOST_HOSTS} at most; try a smaller type, or fewer slices or spares"
        )
    require_possible(faults, slices, spec.replicas)
    with tempfile.TemporaryDirectory(prefix="iris-ray-") as folder:
        job = Path(folder) / "job"
        job.write_bytes(pickle.dumps((request, slices, tuple(faults))))
        where = f"{slices} simulated {spec.device} slice{'s' * (slices > 1)}"
        print(f"iris_ray: {spec.job_id} runs on {where}", file=sys.stderr)
        process = LocalProcess("iris_ray.local.simulated_driver", job, _environment())
        try:
            process.wait()
        except BaseException:  # Ctrl-C above all: the cluster ends in good order
            process.interrupt()
            process.wait(SHUTDOWN_S)
            raise
        finally:
            process.kill()
        return _outcome(outcome_file(job), process.exit_code())


def outcome_file(job: Path) -> Path:
    """Return the file into which the driver writes its results, or its error."""
    return job.with_suffix(".outcome")


def _outcome(path: Path, code: int | None) -> list[Any]:
    if not path.exists():
        raise TaskCrashedError(
            f"the process of the simulated cluster ended with code {code}; its output above says why"
        )
    outcome = cloudpickle.loads(path.read_bytes())
    if isinstance(outcome, Exception):
        raise outcome
    results: list[Any] = outcome
    return results


def _environment() -> dict[str, str]:
    """Return this process's environment, without a mode and the address of another cluster."""
    ours = {name: value for name, value in os.environ.items() if name not in (MODE.name, "RAY_ADDRESS")}
    return ON_CPU | ours
