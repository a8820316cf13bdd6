"""A small training run that survives the loss of its TPUs: handwritten digits, data-parallel over all processes.

    python examples/train_digits.py --checkpoints /shared/digits --tpu v4-32 --num-slices 2     # on a Ray cluster
    python examples/train_digits.py --checkpoints /tmp/digits                                   # alone, in this process

It keeps every tenth step in the memory of the hosts, and every hundredth in the checkpoint directory, which must be
visible to every host. The data set (1,797 images of 8×8 pixels) ships inside scikit-learn. `examples/demo.py` runs this
on simulated slices and takes one away.
"""

import argparse
import json
import os
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from sklearn.datasets import load_digits

import iris_ray
import iris_ray.jax
from iris_ray.checkpoint import MemoryCheckpointer

PRELOAD = ["jax", "sklearn.datasets", "iris_ray.jax", "iris_ray.checkpoint"]
"""What waiting processes import ahead, so that a new attempt starts in a second instead of five."""
HIDDEN = 64
LEARNING_RATE = 0.5
TEST_IMAGES = 360


def train(checkpoints: str, steps: int = 300, batch_size: int = 128, step_s: float = 0.0) -> float:
    """Train a two-layer network and return its accuracy on images that it has not seen, between 0 and 1.

    Starts from the newest checkpoint in the hosts' memory, or else in the directory: that is all it takes to survive a
    preemption. With a notice it saves one more and loses not even a step.

    Args:
        checkpoints: directory that all processes can read and process 0 can write.
        steps: optimiser steps in all.
        batch_size: images per step over all processes; a multiple of the number of processes.
        step_s: sleep so many seconds in each step, to have time to watch.
    """
    iris_ray.jax.initialize()
    rank, world = jax.process_index(), jax.process_count()
    mesh = Mesh(np.array(jax.devices()), ("data",))
    over_batch, everywhere = NamedSharding(mesh, PartitionSpec("data")), NamedSharding(mesh, PartitionSpec())

    images, labels = load_digits(return_X_y=True)
    images = (images / 16.0).astype(np.float32)
    train_x, train_y = images[:-TEST_IMAGES], labels[:-TEST_IMAGES]

    def on_devices(params):
        return jax.tree.map(lambda p: jax.make_array_from_process_local_data(everywhere, p), params)

    memory = MemoryCheckpointer(every=10)
    start, params = restore(checkpoints)
    params = on_devices(params)
    start, params = memory.restore(params, at_least=start) or (start, params)
    me = iris_ray.get_job_info()
    where = f"{me.slice_name} worker {me.worker_id}, attempt {me.attempt}" if me else "this machine"
    print(f"process {rank} of {world} on {where}: starts at step {start}", flush=True)

    for step in range(start, steps):
        batch = np.random.default_rng(step).integers(len(train_x), size=batch_size)[rank::world]  # this process's share
        x = jax.make_array_from_process_local_data(over_batch, train_x[batch])
        y = jax.make_array_from_process_local_data(over_batch, train_y[batch])
        params, loss = update(params, x, y)
        notice = iris_ray.jax.agreed_notice(step)
        if memory.save(step + 1, params, now=notice is not None) and rank == 0:
            print(f"step {step + 1:4d} of {steps}   loss {float(loss):.3f}", flush=True)
            note_progress(checkpoints, step + 1, float(loss))
        last = step + 1 == steps or (notice is not None and not memory.outlives(notice))
        if rank == 0 and (last or (step + 1) % 100 == 0):
            save(checkpoints, step + 1, jax.tree.map(np.asarray, params))
        if notice:
            print(f"process {rank} stops after step {step + 1}: {notice.reason}", flush=True)
            notice.saved()
        time.sleep(step_s)
    logits = forward(jax.tree.map(np.asarray, params), images[-TEST_IMAGES:])
    return float((np.argmax(logits, axis=1) == labels[-TEST_IMAGES:]).mean())


def forward(params, x):
    return jnp.maximum(x @ params["w1"] + params["b1"], 0.0) @ params["w2"] + params["b2"]


@jax.jit
def update(params, x, y):
    """One step of gradient descent. The batch is spread over all processes; JAX averages the gradients."""

    def loss_of(params):
        log_probabilities = jax.nn.log_softmax(forward(params, x))
        return -jnp.mean(jnp.take_along_axis(log_probabilities, y[:, None], axis=1))

    loss, gradients = jax.value_and_grad(loss_of)(params)
    return jax.tree.map(lambda p, g: p - LEARNING_RATE * g, params, gradients), loss


def fresh_parameters():
    rng = np.random.default_rng(0)
    return {
        "w1": rng.normal(0, 0.1, (64, HIDDEN)).astype(np.float32),
        "b1": np.zeros(HIDDEN, np.float32),
        "w2": rng.normal(0, 0.1, (HIDDEN, 10)).astype(np.float32),
        "b2": np.zeros(10, np.float32),
    }


def save(checkpoints: str, step: int, params) -> None:
    """Write a checkpoint so that a reader finds the whole of it or the one before."""
    directory = Path(checkpoints)
    unfinished = directory / "unfinished.npz"
    np.savez(unfinished, step=step, **params)
    os.replace(unfinished, directory / "checkpoint.npz")


def note_progress(checkpoints: str, step: int, loss: float) -> None:
    """Write a line that `examples/demo.py` reads."""
    info = iris_ray.get_job_info()
    attempt, slice_name = (info.attempt, info.slice_name) if info else (1, None)
    with (Path(checkpoints) / "progress.jsonl").open("a") as progress:
        line = {"step": step, "loss": loss, "attempt": attempt, "slice": slice_name, "time": time.time()}
        progress.write(json.dumps(line) + "\n")


def restore(checkpoints: str):
    """The newest checkpoint's step and parameters, or step 0 and fresh ones."""
    path = Path(checkpoints) / "checkpoint.npz"
    if not path.exists():
        return 0, fresh_parameters()
    with np.load(path) as saved:
        return int(saved["step"]), {name: saved[name] for name in saved.files if name != "step"}


if __name__ == "__main__":
    import functools

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoints", required=True, help="directory that every host can reach")
    parser.add_argument("--tpu", help="TPU type, such as v4-32; without it, train in this process")
    parser.add_argument("--num-slices", type=int, nargs="+", default=[1], help="slice counts to use, such as 2 4")
    parser.add_argument("--steps", type=int, default=300)
    args = parser.parse_args()
    Path(args.checkpoints).mkdir(parents=True, exist_ok=True)
    function = functools.partial(train, str(Path(args.checkpoints).resolve()), args.steps)
    if args.tpu:
        accuracies = iris_ray.run_on_pod_resumable(function, args.tpu, num_slices=args.num_slices, preload=PRELOAD)
        print(f"accuracy on unseen images: {accuracies[0]:.1%}")
    else:
        print(f"accuracy on unseen images: {function():.1%}")
