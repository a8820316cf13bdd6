"""A process of a gang on CPU that checks itself for silent corruption, and prints what it found.

python replayed.py INDEX PROCESSES COORDINATOR
"""

import json
import sys
from dataclasses import asdict
from typing import Any

import jax

index, processes, coordinator = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.config.update("jax_num_cpu_devices", 2)
jax.distributed.initialize(coordinator_address=coordinator, num_processes=processes, process_id=index)

import numpy as np  # noqa: E402

import iris_ray.jax  # noqa: E402

ODD = processes - 2
"""The process that is at fault."""
flips = 0


def step(state: dict[str, jax.Array], batch: jax.Array, key: jax.Array) -> tuple[dict[str, jax.Array], jax.Array]:
    batch = batch + jax.random.normal(key, batch.shape)
    loss, gradient = jax.value_and_grad(lambda now: ((batch @ now["weights"]) ** 2).mean() + now["bias"].sum())(state)
    return jax.tree.map(lambda a, b: a - 0.01 * b, state, gradient), loss


def flipped(array: Any) -> Any:
    """One bit of the array is flipped."""
    words = np.array(array)
    words.view(np.uint32).reshape(-1)[7] ^= 1 << 3
    return words


def with_flip(state: dict[str, jax.Array], batch: jax.Array, key: jax.Array) -> Any:
    after, loss = step(state, batch, key)
    weights = jax.pure_callback(flipped, jax.ShapeDtypeStruct((64, 64), "float32"), after["weights"])
    return after | {"weights": weights}, loss


def flipped_once(array: Any) -> Any:
    global flips
    flips += 1
    return flipped(array) if flips == 1 else np.array(array)


def with_one_flip(state: dict[str, jax.Array], batch: jax.Array, key: jax.Array) -> Any:
    after, loss = step(state, batch, key)
    weights = jax.pure_callback(flipped_once, jax.ShapeDtypeStruct((64, 64), "float32"), after["weights"])
    return after | {"weights": weights}, loss


state = {"weights": np.random.default_rng(1).normal(size=(64, 64)).astype("f"), "bias": np.ones(4, "f")}
batch, key = np.full((8, 64), 1.0 + index, "f"), jax.random.key(index)  # those of process 0 count
is_odd = index == ODD
spread = jax.make_array_from_callback(
    (processes * 2,),
    jax.NamedSharding(jax.make_mesh((processes * 2,), ("all",)), jax.P("all")),
    lambda at: np.zeros(processes * 2)[at],
)
try:
    iris_ray.jax.replay_check(step, spread, batch, key)
    refused = ""
except ValueError as error:
    refused = str(error)
reports = {
    "sound": iris_ray.jax.replay_check(step, state, batch, key),
    "flip": iris_ray.jax.replay_check(with_flip if is_odd else step, state, batch, key),
    "once": iris_ray.jax.replay_check(with_one_flip if is_odd else step, state, batch, key),
    "state": iris_ray.jax.replay_check(
        step, state | {"weights": flipped(state["weights"])} if is_odd else state, batch, key
    ),
}
told = {name: asdict(report) | {"words": str(report)} for name, report in reports.items()}
print("found", json.dumps({"refused": refused, **told}), flush=True)
