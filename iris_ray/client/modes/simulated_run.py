"""A run on a simulated cluster of its own, in a process of its own: this one may be in another cluster."""

import os
import pickle
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ray import cloudpickle

from iris_ray.actors.wire.messages import RunRequest
from iris_ray.client.modes.fault_schedule import PlannedFault, require_possible
from iris_ray.client.modes.local_gang import ON_CPU
from iris_ray.client.modes.local_process import LocalProcess
from iris_ray.errors import InvalidJobError, TaskCrashedError
from iris_ray.settings import MODE

MOST_HOSTS = 32
"""Of a simulated cluster here: each is a Ray node with processes of its own."""
SHUTDOWN_S = 30.0
"""How long the cluster may take to end after Ctrl-C."""


def run_simulated(request: RunRequest, faults: Sequence[PlannedFault]) -> list[Any]:
    """Run a request on a simulated cluster that has the slices it needs, and to which the faults happen.

    Raises:
        InvalidModeError: a fault of a slice or host that there won't be.
        InvalidJobError: it needs too many hosts for one machine.
        Exception: as of `run_on_pod`.
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
        process = LocalProcess("iris_ray.client.modes.simulated_driver", job, _environment())
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
            f"the process of the simulated cluster ended with code {code}; what it printed above says why"
        )
    outcome = cloudpickle.loads(path.read_bytes())
    if isinstance(outcome, Exception):
        raise outcome
    results: list[Any] = outcome
    return results


def _environment() -> dict[str, str]:
    """Return an environment that knows no other cluster."""
    ours = {name: value for name, value in os.environ.items() if name not in (MODE.name, "RAY_ADDRESS")}
    return ON_CPU | ours
