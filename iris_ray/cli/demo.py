"""``iris-ray demo``: a gang on a simulated cluster loses two slices and finishes anyway. Needs neither TPU nor JAX."""

import contextlib
import functools
import os
import signal
import time
from pathlib import Path
from typing import Any

import click

from iris_ray.cli.options import tpu_option
from iris_ray.model.topology import get_tpu_config

TPU_TYPE, STEPS, STEP_S, CHECKPOINT_EVERY = "v4-16", 60, 0.2, 10
NOTICE_AT, NOTICE_S, LOSE_AT = 15, 10.0, 37
MOST_SLICES = 999


def count(directory: str) -> int:
    """Count to `STEPS` as if training; task 0 writes checkpoints, and every attempt goes on from the last one."""
    from iris_ray import get_job_info, preemption_notice

    me = get_job_info()
    assert me is not None
    checkpoint = Path(directory) / "checkpoint"

    def write(name: str, step: int) -> None:
        if me.task_index == 0:
            fresh = checkpoint.with_name("unfinished")
            fresh.write_text(str(step))
            fresh.replace(checkpoint.with_name(name))

    began = int(checkpoint.read_text()) if checkpoint.exists() else 0
    place = f"task {me.task_index} of {me.num_tasks} on {me.slice_name} worker {me.worker_id}"
    print(f"attempt {me.attempt}, {place}: starts at step {began}", flush=True)
    for step in range(began, STEPS):
        time.sleep(STEP_S)
        write("step", step + 1)
        notice = preemption_notice()
        if notice or (step + 1) % CHECKPOINT_EVERY == 0:
            write("checkpoint", step + 1)
        if notice:
            print(f"attempt {me.attempt}, {place}: has saved after step {step + 1}", flush=True)
            notice.saved()
    return int(me.attempt)


@click.command()
@tpu_option("Only start a cluster with slices of this type, to work on, and keep it until Ctrl-C.")
@click.option("--num-slices", type=click.IntRange(1, MOST_SLICES), metavar="N",
              help="With --tpu: how many slices.  [default: 1]")  # fmt: skip
def demo(tpu_type: str | None, num_slices: int | None) -> None:
    """See a job lose two TPU slices and finish anyway, without any TPU.

    This starts real Ray nodes on this machine that pose as TPU hosts: four v4-16 slices of two hosts. A job of four
    tasks takes two slices. One is taken away with notice: the job saves and loses no step. One is taken away without
    notice: the job goes on from its last checkpoint. The demo takes half a minute.

    \b
      iris-ray demo
      iris-ray demo --tpu v4-16 --num-slices 3      a cluster for another terminal
    """
    if tpu_type is not None:
        get_tpu_config(tpu_type)  # refuses what is not a type
        _keep({tpu_type: num_slices or 1})
        return
    if num_slices is not None:
        raise click.UsageError("--num-slices is for --tpu: which type shall the slices have?")
    os.environ.setdefault("RAY_DEDUP_LOGS", "0")  # every task's lines, not "repeated 3x across cluster"
    import tempfile

    import ray

    from iris_ray.client.run_on_pod import run_on_pod_ray
    from iris_ray.testing import SimulatedCluster

    with SimulatedCluster({TPU_TYPE: 4}) as cluster, tempfile.TemporaryDirectory(prefix="iris-demo-") as directory:
        _say(f"a job of four tasks on 2 of 4 {TPU_TYPE} slices counts to {STEPS}, with a checkpoint at every tenth")
        began = time.monotonic()
        ref = run_on_pod_ray.remote(functools.partial(count, directory), TPU_TYPE, num_slices=2, mode="cluster")
        _wait_for_step(Path(directory), NOTICE_AT, ref)
        _say(f"the provider announces that it takes slice {TPU_TYPE}-1 away in {NOTICE_S:g} s")
        cluster.preempt_slice(f"{TPU_TYPE}-1", notice_s=NOTICE_S)
        _wait_for_step(Path(directory), LOSE_AT, ref)
        _say(f"the provider takes slice {TPU_TYPE}-0 away, without notice")
        cluster.preempt_slice(f"{TPU_TYPE}-0")
        attempts = ray.get(ref)
        _say(f"done in {time.monotonic() - began:.0f} s, in {max(attempts)} attempts")
    click.echo("Your own: iris-ray run train.py v4-16, or run_on_pod(train, 'v4-16') in Python.")


def _keep(slices: dict[str, int]) -> None:
    """Run a simulated cluster until Ctrl-C or SIGTERM."""
    from iris_ray.testing import SimulatedCluster

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with SimulatedCluster(slices, connect=False) as cluster, contextlib.suppress(KeyboardInterrupt):
        click.echo("It is there until Ctrl-C. In another terminal:\n")
        click.echo(f"  export RAY_ADDRESS={cluster.address}")
        signal.pause()


def _wait_for_step(directory: Path, step: int, ref: Any) -> None:
    import ray

    reached = directory / "step"
    while not (reached.exists() and int(reached.read_text()) >= step):
        if ray.wait([ref], timeout=STEP_S)[0]:
            return


def _say(text: str) -> None:
    click.echo(f"\n=== {text}")
