"""A pipeline as Marin has them, in Fray's terms: tokenise on CPUs, train on TPU slices, evaluate with actors.

    python examples/marin_pipeline.py --folder /shared/run --tpu v4-32 --num-slices 2     # on a Ray cluster
    python examples/marin_pipeline.py --folder /tmp/run              # on simulated slices; one goes away meanwhile

It needs ``pip install '.[fray,examples]'``, here and on the hosts. The folder must be visible to every host. The data
is the text of Python's own help pages; a small network learns to predict the next letter.
"""

import argparse
import os
import threading
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import ray
from fray.actor import current_actor
from fray.current_client import current_client, set_current_client
from fray.types import Entrypoint, JobRequest, ResourceConfig, create_environment
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import iris_ray
import iris_ray.jax
from iris_ray.fray import Client
from iris_ray.testing import SimulatedCluster

SHARDS = 3
LETTERS = "abcdefghijklmnopqrstuvwxyz "
VOCABULARY, CONTEXT, HIDDEN = len(LETTERS), 3, 64
STEPS, BATCH, SAVED_EVERY, LEARNING_RATE = 400, 512, 20, 1.0


def pipeline(folder: Path, tpu: str, num_slices: int, env_vars: dict[str, str]) -> float:
    """Run all steps with Fray's current client, and return the bits that the network needs for a letter."""
    small = ResourceConfig.with_cpu(cpu=1, ram="500m")
    slices = ResourceConfig.with_tpu(tpu, slice_count=num_slices, cpu=1, ram="500m")
    run("tokenise", tokenise, folder, small, replicas=SHARDS)
    run("train", train, folder, slices, environment=create_environment(env_vars=env_vars))
    client = current_client()
    evaluators = client.create_actor_group(Evaluator, folder, name="evaluate", count=2, resources=small)
    answers = [evaluator.bits.remote() for evaluator in evaluators.wait_ready()]
    bits = float(np.mean([answer.result() for answer in answers]))
    evaluators.shutdown()
    return bits


def run(name: str, step, folder: Path, resources: ResourceConfig, **options) -> None:
    entrypoint = Entrypoint.from_callable(step, [folder])
    job = current_client().submit(JobRequest(name, entrypoint, resources, **options))
    print(f"=== {name}: {job.job_id}", flush=True)
    job.wait()


def tokenise(folder: Path) -> None:
    """Turn this task's share of the pages into numbers of letters, and write them."""
    import pydoc_data.topics

    me = iris_ray.get_job_info()
    assert me is not None, "for a task"
    text = " ".join(sorted(pydoc_data.topics.topics.values())).lower()
    length = len(text) // me.num_tasks
    share = " ".join(text[me.task_index * length :][:length].split())
    numbers = np.array([LETTERS.index(c) for c in share if c in LETTERS], np.int8)
    np.save(folder / f"shard-{me.task_index}.npy", numbers)
    print(f"shard {me.task_index} of {me.num_tasks}: {len(numbers):,} letters", flush=True)


def load(folder: Path, shards) -> tuple[np.ndarray, np.ndarray]:
    """Contexts, and the letters that follow them."""
    numbers = np.concatenate([np.load(folder / f"shard-{shard}.npy") for shard in shards]).astype(np.int32)
    contexts = np.stack([numbers[i : len(numbers) - CONTEXT + i] for i in range(CONTEXT)], axis=1)
    return contexts, numbers[CONTEXT:]


def train(folder: Path) -> None:
    """Train on all shards but the last, data-parallel over all processes. Goes on at the newest checkpoint."""
    iris_ray.jax.initialize()
    rank, world = jax.process_index(), jax.process_count()
    mesh = Mesh(np.array(jax.devices()), ("data",))
    over_batch, everywhere = NamedSharding(mesh, PartitionSpec("data")), NamedSharding(mesh, PartitionSpec())
    contexts, letters = load(folder, range(SHARDS - 1))

    start, network = restore(folder)
    network = jax.tree.map(lambda part: jax.make_array_from_process_local_data(everywhere, part), network)
    me = iris_ray.get_job_info()
    assert me is not None, "for a task"
    print(f"process {rank} of {world} on {me.slice_name}, attempt {me.attempt}: starts at step {start}", flush=True)
    for step in range(start, STEPS):
        batch = np.random.default_rng(step).integers(len(letters), size=BATCH)[rank::world]  # this process's share
        x = jax.make_array_from_process_local_data(over_batch, contexts[batch])
        y = jax.make_array_from_process_local_data(over_batch, letters[batch])
        network, loss = update(network, x, y)
        if (step + 1) % SAVED_EVERY == 0 and rank == 0:
            print(f"step {step + 1:4d} of {STEPS}   loss {float(loss):.3f}", flush=True)
            save(folder, step + 1, jax.tree.map(np.asarray, network))
            time.sleep(0.2)  # to have time to watch


def predict(network, contexts):
    """Logarithms of the probabilities of each letter."""
    letters = network["embed"][contexts].reshape(len(contexts), -1)
    return jax.nn.log_softmax(jnp.tanh(letters @ network["w1"]) @ network["w2"])


def loss_of(network, contexts, letters):
    return -jnp.mean(jnp.take_along_axis(predict(network, contexts), letters[:, None], axis=1))


@jax.jit
def update(network, contexts, letters):
    loss, gradients = jax.value_and_grad(loss_of)(network, contexts, letters)
    return jax.tree.map(lambda part, gradient: part - LEARNING_RATE * gradient, network, gradients), loss


def save(folder: Path, step: int, network) -> None:
    """Write a checkpoint so that a reader finds the whole of it or the one before."""
    np.savez(folder / "unfinished.npz", step=step, **network)
    os.replace(folder / "unfinished.npz", folder / "checkpoint.npz")


def restore(folder: Path):
    """The newest checkpoint's step and network, or step 0 and a fresh one."""
    if (path := folder / "checkpoint.npz").exists():
        with np.load(path) as saved:
            return int(saved["step"]), {name: saved[name] for name in saved.files if name != "step"}
    shapes = {"embed": (VOCABULARY, 16), "w1": (CONTEXT * 16, HIDDEN), "w2": (HIDDEN, VOCABULARY)}
    rng = np.random.default_rng(0)
    return 0, {name: rng.normal(0, shape[0] ** -0.5, shape).astype(np.float32) for name, shape in shapes.items()}


class Evaluator:
    """Judges the network on its half of the last shard, which it has not seen."""

    def __init__(self, folder: Path) -> None:
        contexts, letters = load(folder, [SHARDS - 1])
        half = slice(current_actor().index, None, 2)
        self.contexts, self.letters = contexts[half], letters[half]
        _, self.network = restore(folder)

    def bits(self) -> float:
        return float(loss_of(self.network, self.contexts, self.letters)) / np.log(2)


def take_a_slice(cluster: SimulatedCluster, folder: Path) -> None:
    """Once there is a checkpoint, preempt the slice of the first task."""
    while not (folder / "checkpoint.npz").exists():
        time.sleep(0.1)
    print("=== slice v4-8-0 is preempted", flush=True)
    cluster.preempt_slice("v4-8-0")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", required=True, type=Path, help="directory that every host can reach")
    parser.add_argument("--tpu", help="TPU type, such as v4-32; without it, on simulated slices")
    parser.add_argument("--num-slices", type=int, default=2)
    args = parser.parse_args()
    folder = args.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    if args.tpu:
        ray.init()
        with set_current_client(Client()):
            bits = pipeline(folder, args.tpu, args.num_slices, {})
    else:
        with SimulatedCluster({"v4-8": 3}) as cluster, set_current_client(Client()):
            threading.Thread(target=take_a_slice, args=(cluster, folder), daemon=True).start()
            bits = pipeline(folder, "v4-8", 2, {"JAX_PLATFORMS": "cpu"})
    print(f"bits for a letter: {bits:.2f}, of {np.log2(VOCABULARY):.2f}")


if __name__ == "__main__":
    main()
