"""Local modes that need Ray nodes: simulated runs with faults, and references of `run_on_pod_ray` without a cluster."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import time, ray
from iris_ray import get_job_info, run_on_pod, run_on_pod_ray

def train():
    me = get_job_info()
    print("attempt", me.attempt)
    time.sleep(120 if me.attempt == 1 else 0)
    if me.attempt == 2 and me.worker_id == 1 and me.num_slices == 1:
        raise KeyError("after the loss")
    return me.attempt, me.slice_name, me.worker_id

def place():
    return get_job_info().worker_id

if __name__ == "__main__":
"""


def run(tmp_path: Path, body: str, mode: str = "") -> str:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT + "".join(f"    {line}\n" for line in body.splitlines()))
    done = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        timeout=400,
        env={**os.environ, "IRIS_RAY_MODE": mode},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.proof
@pytest.mark.way_in
@pytest.mark.usefixtures("no_shared_cluster")
def test_simulated_run_replaces_slice_lost_by_schedule(tmp_path: Path) -> None:
    output = run(tmp_path, "print(run_on_pod(train, 'v4-8', num_slices=2))", "simulate: kill slice 1 after 1s")
    assert "iris_ray: kill slice 1 after 1s" in output
    (results,) = [line for line in output.splitlines() if line.startswith("[(")]
    assert sorted(results.strip("[]()").split("), (")) == ["2, 'v4-8-0', 0", "2, 'v4-8-2', 0"]


@pytest.mark.long
@pytest.mark.usefixtures("no_shared_cluster")
def test_error_of_simulated_run_is_users_own(tmp_path: Path) -> None:
    body = """
try:
    run_on_pod(train, 'v4-16', simulate='kill host 0 of slice 0 after 1s, add slice after 1h', max_retries_failure=0)
except KeyError as error:
    print("caught", isinstance(error, ray.exceptions.RayTaskError), not ray.is_initialized())
"""
    output = run(tmp_path, body)
    assert "caught True True" in output
    assert "iris_ray: the run was over before 'add slice after 1h'" in output


@pytest.mark.long
@pytest.mark.usefixtures("no_shared_cluster")
def test_local_runs_reference_has_results_and_is_cancellable(tmp_path: Path) -> None:
    body = """
print("results", ray.get(run_on_pod_ray.remote(place, "v4-16", 2)))
forever = run_on_pod_ray.remote(train, "v4-8")
time.sleep(5)
ray.cancel(forever)
try:
    ray.get(forever)
except ray.exceptions.TaskCancelledError:
    print("cancelled")
try:
    ray.get(run_on_pod_ray.remote(lambda: 1 / 0, "v4-8"))
except ZeroDivisionError:
    print("caught")
"""
    output = run(tmp_path, body, "simple")
    assert "results [0, 1, 0, 1]" in output
    assert "cancelled" in output
    assert "caught" in output
