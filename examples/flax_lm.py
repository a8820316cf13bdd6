"""A language model in Flax that survives preemptions: steps in the hosts' memory, and in a bucket with Orbax.

    python examples/flax_lm.py --folder gs://bucket/lm --tpu v4-32 --num-slices 2           # on a Ray cluster
    python examples/flax_lm.py --folder /tmp/lm --tpu v4-8 --num-slices 2 \\
        --mode "simulate: preempt slice 0 after 30s with 10s notice"                        # on simulated slices
    python examples/flax_lm.py --folder /tmp/lm                                             # alone, in this process

It needs ``pip install '.[frameworks]'``, here and on the hosts. A transformer of 3 million parameters learns to predict
the next byte of Python's help pages. `MemoryCheckpointer` keeps every tenth step, and Orbax every hundredth. A new
attempt continues at the newest step that it finds in either place; with a notice, no step is lost.
"""

import argparse
import functools
import pydoc_data.topics
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from etils import epath
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import iris_ray
import iris_ray.jax
from iris_ray.checkpoint import MemoryCheckpointer

PRELOAD = ["flax.nnx", "optax", "orbax.checkpoint", "iris_ray.jax", "iris_ray.checkpoint"]
"""Modules that waiting processes import ahead, so that a new attempt starts in a second instead of ten."""
CONTEXT, BATCH, HEADS = 64, 16, 4


class Block(nnx.Module):
    def __init__(self, width: int, rngs: nnx.Rngs):
        self.norm1, self.norm2 = nnx.LayerNorm(width, rngs=rngs), nnx.LayerNorm(width, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(HEADS, width, decode=False, rngs=rngs)
        self.up, self.down = nnx.Linear(width, 4 * width, rngs=rngs), nnx.Linear(4 * width, width, rngs=rngs)

    def __call__(self, x):
        x = x + self.attention(self.norm1(x), mask=nnx.make_causal_mask(x[..., 0]))
        return x + self.down(nnx.gelu(self.up(self.norm2(x))))


class LanguageModel(nnx.Module):
    def __init__(self, width: int, layers: int, rngs: nnx.Rngs):
        self.bytes, self.places = nnx.Embed(256, width, rngs=rngs), nnx.Embed(CONTEXT, width, rngs=rngs)
        self.blocks = nnx.List([Block(width, rngs) for _ in range(layers)])
        self.norm, self.head = nnx.LayerNorm(width, rngs=rngs), nnx.Linear(width, 256, rngs=rngs)

    def __call__(self, text):
        x = self.bytes(text) + self.places(jnp.arange(text.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


@functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
def train_step(graph, state, text):
    """One step of AdamW. The batch is spread over all processes; JAX averages the gradients."""

    def loss_of(model):
        return optax.softmax_cross_entropy_with_integer_labels(model(text[:, :-1]), text[:, 1:]).mean()

    model, optimizer = nnx.merge(graph, state)
    loss, gradients = nnx.value_and_grad(loss_of)(model)
    optimizer.update(model, gradients)
    return nnx.state((model, optimizer)), loss


def train(folder: str, steps: int, width: int, layers: int, step_s: float) -> float | None:
    """Train from the newest checkpoint on, and return the loss of the last step; None if there was none to do."""
    iris_ray.jax.initialize()
    rank, world = jax.process_index(), jax.process_count()
    mesh = Mesh(np.array(jax.devices()), ("data",))
    over_batch, everywhere = NamedSharding(mesh, PartitionSpec("data")), NamedSharding(mesh, PartitionSpec())
    text = np.frombuffer("\n".join(pydoc_data.topics.topics.values()).encode(), np.uint8)

    @functools.partial(jax.jit, out_shardings=everywhere)
    def fresh():
        model = LanguageModel(width, layers, nnx.Rngs(0))
        return nnx.split((model, nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)))

    graph, state = fresh()
    bucket, memory = ocp.CheckpointManager(epath.Path(folder)), MemoryCheckpointer(every=10)
    start = bucket.latest_step() or 0
    if found := memory.restore(state, at_least=start):
        start, state = found
    elif start:
        state = bucket.restore(start, args=ocp.args.StandardRestore(state))
    me, loss = iris_ray.get_job_info(), None
    where = f"{me.slice_name}, attempt {me.attempt}" if me else "this machine"
    print(f"process {rank} of {world} on {where}: starts at step {start}{' from memory' if found else ''}", flush=True)

    for step in range(start, steps):
        iris_ray.heartbeat(step)
        places = np.random.default_rng(step).integers(len(text) - CONTEXT - 1, size=BATCH * world)[rank::world]
        batch = np.stack([text[place : place + CONTEXT + 1] for place in places]).astype(np.int32)
        state, loss = train_step(graph, state, jax.make_array_from_process_local_data(over_batch, batch))
        notice = iris_ray.jax.agreed_notice(step)
        if memory.save(step + 1, state, now=notice is not None) and rank == 0:
            print(f"step {step + 1} of {steps}: loss {float(loss):.3f}", flush=True)
        if (step + 1) % 100 == 0 or step + 1 == steps or (notice and not memory.outlives(notice)):
            with iris_ray.unproductive("checkpoint_save"):
                bucket.save(step + 1, args=ocp.args.StandardSave(state), force=True)
        if notice:
            bucket.wait_until_finished()
            notice.saved()  # does not return; the gang continues elsewhere
        time.sleep(step_s)
    bucket.close()
    return None if loss is None else float(loss)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", required=True, help="directory for checkpoints that every host can reach")
    parser.add_argument("--tpu", help="TPU type, such as v4-32; without it, train in this process")
    parser.add_argument("--num-slices", type=int, default=1)
    parser.add_argument("--mode", help='such as "simulate: kill slice 0 after 30s"')
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--step-s", type=float, default=0.0, help="sleep in each step, to have time to watch")
    args = parser.parse_args()
    function = functools.partial(train, args.folder, args.steps, args.width, args.layers, args.step_s)
    if args.tpu:
        options = {"num_slices": args.num_slices, "preload": PRELOAD, "mode": args.mode}
        print("last loss:", iris_ray.run_on_pod(function, args.tpu, **options)[0])
    else:
        print("last loss:", function())
