"""Runs a complete request: on the cluster, by this process's pool, or on this machine."""

import sys
from typing import Any

import ray
from ray.exceptions import RayTaskError

from iris_ray.actors.protocol.messages import RunRequest
from iris_ray.client.caller_pool import pool_of_this_process
from iris_ray.client.connection import require_cluster
from iris_ray.client.job_progress import results_of, say_if_it_runs_once
from iris_ray.client.modes.local_run import run_here, start_here
from iris_ray.client.modes.mode import Mode
from iris_ray.client.user_function import callers_error


def run_request(request: RunRequest, mode: Mode) -> list[Any]:
    """Run a request, wait for its results and return them. Raises like `run_on_pod`."""
    if mode.local:
        return run_here(request, mode)
    ref = start_request(request, mode)
    try:
        return results_of(request.spec.job_id, ref)
    except RayTaskError as error:
        raise callers_error(error) from None
    except BaseException:  # such as Ctrl-C: the gang must not go on when its caller has stopped waiting
        ray.cancel(ref)
        raise


def start_request(request: RunRequest, mode: Mode) -> "ray.ObjectRef[list[Any]]":
    """Start a request and return a reference to its results at once.

    In a local mode a Ray of this machine carries the reference, and is started if this process has none.
    """
    if mode.local:
        return start_here(request, mode)
    require_cluster()
    say_if_it_runs_once(request.spec)
    results, _ = pool_of_this_process.submit(request)
    print(f"iris_ray: job {request.spec.job_id}", file=sys.stderr)  # `RayJobs.status` reads it
    return results
