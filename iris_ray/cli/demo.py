"""``iris-ray demo``: a gang on a simulated cluster loses a slice and finishes anyway. Needs neither TPU nor JAX."""

import functools
import os
import time
from pathlib import Path

import click

TPU_TYPE, STEPS, STEP_S, LOSE_AT = "v4-16", 40, 0.2, 15


def count(directory: str) -> int:
    """Counts to `STEPS` as if it trained; task 0 writes checkpoints, and every attempt goes on from the last one."""
    from iris_ray import get_job_info

    me = get_job_info()
    assert me is not None
    checkpoint = Path(directory) / "step"
    began = int(checkpoint.read_text()) if checkpoint.exists() else 0
    place = f"task {me.task_index} of {me.num_tasks} on {me.slice_name} worker {me.worker_id}"
    print(f"attempt {me.attempt}, {place}: starts at step {began}", flush=True)
    for step in range(began, STEPS):
        time.sleep(STEP_S)
        if me.task_index == 0:
            fresh = checkpoint.with_suffix(".new")
            fresh.write_text(str(step + 1))
            fresh.replace(checkpoint)
    return int(me.attempt)


@click.command()
def demo() -> None:
    """See a job lose a TPU slice and finish anyway, without any TPU.

    Starts real Ray nodes on this machine that pose as TPU hosts: three v4-16 slices of two hosts. A job of four tasks
    takes two slices, loses one half-way, and goes on from its checkpoint on the third. Takes half a minute.
    """
    os.environ.setdefault("RAY_DEDUP_LOGS", "0")  # every task's lines, not "repeated 3x across cluster"
    import tempfile

    import ray

    from iris_ray.launcher import run_on_pod_ray
    from iris_ray.testing import SimulatedCluster

    with SimulatedCluster({TPU_TYPE: 3}) as cluster, tempfile.TemporaryDirectory(prefix="iris-demo-") as directory:
        _say(f"a job of four tasks on 2 of 3 {TPU_TYPE} slices counts to {STEPS}")
        began = time.monotonic()
        ref = run_on_pod_ray.remote(functools.partial(count, directory), TPU_TYPE, num_slices=2)
        checkpoint = Path(directory) / "step"
        while not (checkpoint.exists() and int(checkpoint.read_text()) >= LOSE_AT):
            if ray.wait([ref], timeout=STEP_S)[0]:
                break
        _say(f"the provider takes slice {TPU_TYPE}-1 away, without notice")
        cluster.preempt_slice(f"{TPU_TYPE}-1")
        attempts = ray.get(ref)
        _say(f"done in {time.monotonic() - began:.0f} s, in {max(attempts)} attempts")
    click.echo("Your own: iris-ray run train.py v4-16, or run_on_pod(train, 'v4-16') in Python.")


def _say(text: str) -> None:
    click.echo(f"\n=== {text}")
