"""Metrics of a run with several attempts, which process 0 writes to TensorBoard and to Weights & Biases.

    python examples/metrics.py --folder /shared/metrics --tpu v4-32 --num-slices 2          # on a Ray cluster
    python examples/metrics.py --folder /tmp/metrics --tpu v4-8 --num-slices 2 \\
        --mode "simulate: preempt slice 0 after 20s with 10s notice"                        # on simulated slices
    python examples/metrics.py --folder /tmp/metrics                                        # alone, in this process
    tensorboard --logdir /tmp/metrics

It needs ``pip install '.[frameworks]'``, here and on the hosts. All attempts of a job write to one run, and a step that
is repeated after a loss appears once in TensorBoard. W&B works offline, and ``wandb sync`` sends its files later. With
``--wandb``, it works online and takes the key WANDB_API_KEY from the cluster's store (docs/secrets.md). ``iris-ray ls``
and the dashboard show the loss as well, without either of them.
"""

import argparse
import contextlib
import functools
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import tensorboardX
import wandb
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import iris_ray
import iris_ray.jax
from iris_ray.checkpoint import MemoryCheckpointer

PRELOAD = ["jax", "tensorboardX", "wandb", "iris_ray.jax", "iris_ray.checkpoint"]


@contextlib.contextmanager
def metrics(folder: str, start: int) -> Iterator[Callable[..., None]]:
    """A function that writes metrics of a step, in process 0; in all other processes it does nothing.

    Args:
        folder: a directory that every host can reach; TensorBoard's files are in a folder with the job's id.
        start: the step at which this attempt starts. TensorBoard drops what earlier attempts wrote from it on.
    """
    if jax.process_index() > 0:
        yield lambda step, **values: None
        return
    me = iris_ray.get_job_info()
    run_id, attempt = (me.job_id.replace("/", "-"), me.attempt) if me else ("alone", 1)
    mode = "online" if "WANDB_API_KEY" in os.environ else "offline"
    run = wandb.init(project="iris-ray", id=run_id, resume="allow", mode=mode, dir=folder)
    writer = tensorboardX.SummaryWriter(f"{folder}/{run_id}", purge_step=start, filename_suffix=f".{attempt}")

    def write(step: int, **values: float) -> None:
        run.log(values, step=step)
        for name, value in values.items():
            writer.add_scalar(name, value, step)
        iris_ray.report_status(**values)

    try:
        yield write
    finally:
        writer.close()
        run.finish()


@jax.jit
def train_step(weights, x):
    loss, gradient = jax.value_and_grad(lambda weights: jnp.mean((x @ weights - x.sum(axis=1)) ** 2))(weights)
    return weights - 0.02 * gradient, loss


def train(folder: str, steps: int, step_s: float) -> None:
    """Train on random numbers; each attempt continues in the hosts' memory where the one before has stopped."""
    iris_ray.jax.initialize()
    rank, world = jax.process_index(), jax.process_count()
    mesh = Mesh(np.array(jax.devices()), ("data",))
    over_batch, everywhere = NamedSharding(mesh, PartitionSpec("data")), NamedSharding(mesh, PartitionSpec())
    weights, memory = jax.device_put(np.zeros(8, np.float32), everywhere), MemoryCheckpointer(every=10)
    start, weights = memory.restore(weights) or (0, weights)
    notice = None
    with metrics(folder, start) as write:
        for step in range(start, steps):
            iris_ray.heartbeat(step)
            x = np.random.default_rng((step, rank)).normal(size=(64 // world, 8)).astype(np.float32)
            weights, loss = train_step(weights, jax.make_array_from_process_local_data(over_batch, x))
            write(step, loss=float(loss))
            notice = iris_ray.jax.agreed_notice(step)
            memory.save(step + 1, weights, now=notice is not None)
            if notice:
                break  # the metrics are complete before the gang moves
            time.sleep(step_s)
    if notice:
        notice.saved()  # does not return; the gang continues elsewhere


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", required=True, help="directory that every host can reach")
    parser.add_argument("--tpu", help="TPU type, such as v4-32; without it, train in this process")
    parser.add_argument("--num-slices", type=int, default=1)
    parser.add_argument("--mode", help='such as "simulate: kill slice 0 after 30s"')
    parser.add_argument("--wandb", action="store_true", help="send to W&B, with the key in the cluster's store")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--step-s", type=float, default=0.0, help="sleep in each step, to have time to watch")
    args = parser.parse_args()
    function = functools.partial(train, str(Path(args.folder).resolve()), args.steps, args.step_s)
    if args.tpu:
        secrets = {"WANDB_API_KEY": iris_ray.Secret.from_store("WANDB_API_KEY")} if args.wandb else None
        iris_ray.run_on_pod(
            function, args.tpu, num_slices=args.num_slices, preload=PRELOAD, secrets=secrets, mode=args.mode
        )
    else:
        function()
