"""A small training run with Levanter that survives the loss of its TPUs: a network learns to multiply two numbers.

    python examples/train_levanter.py --checkpoints gs://bucket/runs --tpu v4-32 --num-slices 2     # on a Ray cluster
    python examples/train_levanter.py --checkpoints /tmp/runs         # on simulated slices; one goes away meanwhile

It needs ``pip install '.[levanter]'``, here and on the hosts. Where it is from: docs/coming-from-levanter.md.
"""

import argparse
import functools
import inspect
import time
from pathlib import Path

import haliax
import jax
import numpy as np
from levanter.checkpoint import CheckpointerConfig
from levanter.data.dataset import ListAsyncDataset
from levanter.optim.config import AdamConfig
from levanter.tracker import NoopConfig
from levanter.trainer import Trainer, TrainerConfig, initialize

import iris_ray.levanter
from iris_ray import run_on_pod_ray
from iris_ray.testing import SimulatedCluster

In, Out = haliax.Axis("in", 2), haliax.Axis("out", 1)


def train(checkpoints: str, steps: int = 100, on_step=lambda info: None, **of_the_trainer) -> float | None:
    """What each task of the gang calls. It goes on where an earlier attempt has saved.

    Args:
        checkpoints: a directory that all hosts share; the run's is in it, under the run's id.
        steps: how many in all.
        on_step: called after each step with Levanter's ``StepInfo``.
        of_the_trainer: other fields of the ``TrainerConfig``, such as ``id``.

    Returns:
        The loss of the last step; None if it had been saved before.
    """
    config = TrainerConfig(
        num_train_steps=steps,
        train_batch_size=16,
        checkpointer=CheckpointerConfig(base_path=checkpoints, keep=[{"every": 20}]),
        tracker=NoopConfig(),
        **of_the_trainer,
    )
    return iris_ray.levanter.run(functools.partial(main, on_step=on_step), config)


def main(config: TrainerConfig, on_step) -> float:
    """Levanter's part, which knows nothing of gangs, as `levanter.main.train_lm.main` does not."""
    initialize(config)
    numbers = multiplications(config.num_train_steps * config.train_batch_size)
    with Trainer(config, AdamConfig(learning_rate=1e-2).build(config.num_train_steps), loss_of) as trainer:
        model_key, training_key = jax.random.split(jax.random.PRNGKey(config.seed))
        network = functools.partial(haliax.nn.MLP.init, In, Out, 16, 2, key=model_key)
        state = trainer.initial_state(training_key, model_init=network)
        print(f"process {jax.process_index()} of {jax.process_count()} starts at step {int(state.step)}", flush=True)
        trainer.add_hook(on_step, every=1)
        return float(trainer.train(state, trainer.data_loader(numbers).iter_from_step(int(state.step))).loss)


def multiplications(count: int) -> ListAsyncDataset:
    """Return at least so many examples: pairs of numbers, again and again."""
    pairs = np.random.default_rng(0).uniform(-1, 1, (4096, 2)).astype(np.float32)
    examples = [(haliax.NamedArray(pair, (In,)), haliax.NamedArray(pair.prod(keepdims=True), (Out,))) for pair in pairs]
    of_levanter_1 = {"is_complete": True} if "is_complete" in inspect.signature(ListAsyncDataset).parameters else {}
    return ListAsyncDataset(examples * (count // len(examples) + 1), **of_levanter_1)


def loss_of(network, example, *, key=None):
    factors, product = example
    return haliax.mean((network(factors) - product) ** 2)


def watch(info) -> None:
    """Print where it is, and take some time, so that a slice can go away meanwhile."""
    time.sleep(0.1)
    if jax.process_index() == 0 and info.next_step % 20 == 0:
        print(f"step {info.next_step}: loss {info.loss:.4f}", flush=True)


def on_simulated_slices(checkpoints: str) -> None:
    import ray

    with SimulatedCluster({"v4-8": 3}) as cluster:
        function = functools.partial(train, checkpoints, on_step=watch)
        run = run_on_pod_ray.remote(function, "v4-8", num_slices=2, spares=1, preload=iris_ray.levanter.PRELOAD)
        while not list(Path(checkpoints).glob("*/step-*/metadata.json")) and not ray.wait([run], timeout=0.2)[0]:
            pass
        print("=== the provider announces that slice v4-8-0 goes in 20 seconds", flush=True)
        cluster.preempt_slice("v4-8-0", notice_s=20)
        print("last losses, one for each task:", *ray.get(run))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoints", required=True, help="directory that every host can reach")
    parser.add_argument("--tpu", help="TPU type, such as v4-32; without it, on simulated slices")
    parser.add_argument("--num-slices", type=int, nargs="+", default=[1], help="slice counts to use, such as 2 4")
    args = parser.parse_args()
    if args.tpu:
        function, preload = functools.partial(train, args.checkpoints), iris_ray.levanter.PRELOAD
        iris_ray.levanter.run_on_pod_multislice_resumable(function, args.tpu, args.num_slices, preload=preload)
    else:
        on_simulated_slices(args.checkpoints)
