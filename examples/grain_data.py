"""A Grain pipeline that continues where it stopped: through preemptions, each record is read once in every epoch.

    python examples/grain_data.py --tpu v4-32 --num-slices 2                                # on a Ray cluster
    python examples/grain_data.py --tpu v4-8 --num-slices 2 \\
        --mode "simulate: preempt slice 0 after 20s with 10s notice"                        # on simulated slices
    python examples/grain_data.py                                                           # alone, in this process

It needs ``pip install '.[frameworks]'``, here and on the hosts. The pipeline's position is part of the state that
`MemoryCheckpointer` keeps. The position counts batches and is the same in all processes, so it stays valid when the
gang gets more or fewer slices. To keep steps in a bucket as well, save this state with Orbax, as flax_lm.py does.
"""

import argparse
import functools
import time

import grain
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import iris_ray
import iris_ray.jax
from iris_ray.checkpoint import MemoryCheckpointer

PRELOAD = ["grain", "jax", "iris_ray.jax", "iris_ray.checkpoint"]
RECORDS, BATCH = 2048, 32
"""Records in the data set, and records in each batch over all processes."""


class Records:
    """A data set with random access, as ArrayRecord files have it: `grain.sources.ArrayRecordDataSource(paths)`."""

    def __len__(self) -> int:
        return RECORDS

    def __getitem__(self, number: int) -> dict[str, np.ndarray | np.generic]:
        x = np.random.default_rng(number).normal(size=8).astype(np.float32)
        return {"number": np.int32(number), "x": x, "y": np.float32(x.sum())}


def pipeline(rank: int, world: int) -> grain.DatasetIterator:
    """This process's share of every batch, epoch after epoch, each in an order of its own."""
    records = grain.MapDataset.source(Records()).seed(0).shuffle().repeat()
    share = records[rank::world].batch(BATCH // world, drop_remainder=True)
    return iter(share.to_iter_dataset(grain.ReadOptions(num_threads=2)))


@jax.jit
def train_step(weights, reads, batch):
    """One step of gradient descent, which also counts how often each record was read."""

    def loss_of(weights):
        return jnp.mean((batch["x"] @ weights - batch["y"]) ** 2)

    loss, gradient = jax.value_and_grad(loss_of)(weights)
    return weights - 0.1 * gradient, reads.at[batch["number"]].add(1), loss


def train(epochs: int, step_s: float) -> tuple[int, int]:
    """Train, and return how often the least and the most read records were read."""
    iris_ray.jax.initialize()
    rank, world = jax.process_index(), jax.process_count()
    mesh = Mesh(np.array(jax.devices()), ("data",))
    over_batch, everywhere = NamedSharding(mesh, PartitionSpec("data")), NamedSharding(mesh, PartitionSpec())
    weights, reads = jax.device_put((np.zeros(8, np.float32), np.zeros(RECORDS, np.int32)), everywhere)

    data, memory = pipeline(rank, world), MemoryCheckpointer(every=10)
    state = {"weights": weights, "reads": reads, "data": data.get_state()}
    start, state = memory.restore(state) or (0, state)
    weights, reads = state["weights"], state["reads"]
    data.set_state(state["data"])
    me = iris_ray.get_job_info()
    where = f"{me.slice_name}, attempt {me.attempt}" if me else "this machine"
    print(f"process {rank} of {world} on {where}: starts at step {start}, {data.get_state()}", flush=True)

    steps = epochs * RECORDS // BATCH
    for step in range(start, steps):
        iris_ray.heartbeat(step)
        batch = jax.tree.map(lambda part: jax.make_array_from_process_local_data(over_batch, part), next(data))
        weights, reads, loss = train_step(weights, reads, batch)
        state = {"weights": weights, "reads": reads, "data": data.get_state()}
        notice = iris_ray.jax.agreed_notice(step)
        if memory.save(step + 1, state, now=notice is not None) and rank == 0:
            print(f"step {step + 1} of {steps}: loss {float(loss):.4f}", flush=True)
        if notice:
            notice.saved()  # does not return; the gang continues elsewhere
        time.sleep(step_s)
    return int(reads.min()), int(reads.max())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tpu", help="TPU type, such as v4-32; without it, train in this process")
    parser.add_argument("--num-slices", type=int, default=1)
    parser.add_argument("--mode", help='such as "simulate: kill slice 0 after 30s"')
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--step-s", type=float, default=0.0, help="sleep in each step, to have time to watch")
    args = parser.parse_args()
    function = functools.partial(train, args.epochs, args.step_s)
    if args.tpu:
        options = {"num_slices": args.num_slices, "preload": PRELOAD, "mode": args.mode}
        least, most = iris_ray.run_on_pod(function, args.tpu, **options)[0]
    else:
        least, most = function()
    print(f"in {args.epochs} epochs, each of {RECORDS} records was read {least} to {most} times")
