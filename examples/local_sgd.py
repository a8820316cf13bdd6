"""Slices that train by themselves and average their parameters every 20 steps: handwritten digits, local SGD.

    python examples/local_sgd.py --tpu v4-32 --num-slices 3                   # on a Ray cluster
    python examples/local_sgd.py --tpu v4-16 --num-slices 3 --mode simulate   # on simulated slices of this machine
    python examples/local_sgd.py                                              # alone, in this process

A lost slice returns alone, takes the parameters of the others, and goes on with them. The others never stop for it.
The data set (1,797 images of 8×8 pixels) ships inside scikit-learn.
"""

import argparse
import functools
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from sklearn.datasets import load_digits

import iris_ray
import iris_ray.jax
import iris_ray.outer

PRELOAD = ["jax", "sklearn.datasets", "iris_ray.jax", "iris_ray.outer"]
"""What waiting processes import ahead, so that a slice that returns starts in a second instead of five."""
INNER_STEPS = 20
OUTER_RATE, MOMENTUM = 0.7, 0.6
"""The outer optimiser: SGD with Nesterov momentum on what the slices have moved, as in DiLoCo (arXiv:2311.08105)."""
BATCH = 64
LEARNING_RATE = 0.2
HIDDEN = 64
TEST_IMAGES = 360


def train(rounds: int = 30, step_s: float = 0.0) -> list[dict]:
    """Train a two-layer network, and return what this process has seen of each round.

    Args:
        rounds: outer steps; each has `INNER_STEPS` steps on every slice.
        step_s: sleep so many seconds in each step, to have time to watch.
    """
    iris_ray.jax.initialize()  # one JAX program for each slice
    rank, world = jax.process_index(), jax.process_count()
    mesh = Mesh(np.array(jax.devices()), ("data",))
    over_batch, everywhere = NamedSharding(mesh, PartitionSpec("data")), NamedSharding(mesh, PartitionSpec())
    info = iris_ray.get_job_info()
    slice_id, attempt = (info.slice_id, info.attempt) if info else (0, 1)

    images, labels = load_digits(return_X_y=True)
    images = (images / 16.0).astype(np.float32)
    train_x, train_y = images[:-TEST_IMAGES], labels[:-TEST_IMAGES]
    test_x, test_y = images[-TEST_IMAGES:], labels[-TEST_IMAGES:]

    def inner_steps(params, number: int):
        """Train from these parameters, on batches that no other slice has in this round."""
        params = jax.tree.map(lambda p: jax.make_array_from_process_local_data(everywhere, p), params)
        for step in range(INNER_STEPS):
            chance = np.random.default_rng((number, step, slice_id))
            batch = chance.integers(len(train_x), size=BATCH * world)[rank::world]
            x = jax.make_array_from_process_local_data(over_batch, train_x[batch])
            y = jax.make_array_from_process_local_data(over_batch, train_y[batch])
            params, _ = update(params, x, y)
            time.sleep(step_s)
        return jax.tree.map(np.asarray, params)

    state = {"params": fresh_parameters(), "momentum": jax.tree.map(np.zeros_like, fresh_parameters())}
    inner_steps(state["params"], 0)  # compiles, before the others wait for this slice
    print(f"slice {slice_id} process {rank} of {world}, attempt {attempt}: ready", flush=True)

    seen = []
    with iris_ray.outer.join(state, outer_step) as group:
        while group.round < rounds and not group.is_over:
            before = group.state["params"]
            after = inner_steps(before, group.round)
            since = time.monotonic()
            params = group.advance(jax.tree.map(np.subtract, before, after))["params"]
            waited_s = time.monotonic() - since
            loss = float(loss_of(params, test_x, test_y))
            seen.append({"round": group.round, "loss": loss, "waited_s": waited_s, "members": group.members})
            if rank == 0:
                print(f"slice {slice_id}: round {group.round:3d} of {rounds} with {group.members}   loss {loss:.3f}")
    return seen


def outer_step(state, mean):
    """One step of the outer optimiser. ``mean`` is how far the slices have moved, on average."""
    momentum = jax.tree.map(lambda m, g: MOMENTUM * m + g, state["momentum"], mean)
    params = jax.tree.map(lambda p, m, g: p - OUTER_RATE * (MOMENTUM * m + g), state["params"], momentum, mean)
    return {"params": params, "momentum": momentum}


def forward(params, x):
    return jnp.maximum(x @ params["w1"] + params["b1"], 0.0) @ params["w2"] + params["b2"]


@jax.jit
def loss_of(params, x, y):
    log_probabilities = jax.nn.log_softmax(forward(params, x))
    return -jnp.mean(jnp.take_along_axis(log_probabilities, y[:, None], axis=1))


@jax.jit
def update(params, x, y):
    """One step of gradient descent, within the slice."""
    loss, gradients = jax.value_and_grad(loss_of)(params, x, y)
    return jax.tree.map(lambda p, g: p - LEARNING_RATE * g, params, gradients), loss


def fresh_parameters():
    rng = np.random.default_rng(0)
    return {
        "w1": rng.normal(0, 0.1, (64, HIDDEN)).astype(np.float32),
        "b1": np.zeros(HIDDEN, np.float32),
        "w2": rng.normal(0, 0.1, (HIDDEN, 10)).astype(np.float32),
        "b2": np.zeros(10, np.float32),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tpu", help="TPU type, such as v4-32; without it, train in this process")
    parser.add_argument("--num-slices", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--step-s", type=float, default=0.0, help="sleep in each step, to have time to watch")
    parser.add_argument("--mode", help='such as "simulate: kill slice 1 after 20s"')
    args = parser.parse_args()
    function = functools.partial(train, args.rounds, args.step_s)
    if args.tpu:
        results = iris_ray.run_on_pod(
            function,
            args.tpu,
            num_slices=args.num_slices,
            failure_domain="slice",
            preload=PRELOAD,
            mode=args.mode,
        )
        last = next(seen[-1] for seen in results if seen)
    else:
        last = function()[-1]
    print(f"loss on unseen images after {last['round']} rounds: {last['loss']:.3f}")
