"""Watch a JAX training run lose a TPU slice and finish anyway. No TPU needed: real Ray nodes pose as TPU hosts.

    python examples/demo.py

Three simulated v4-16 slices of two hosts: the run takes two, one is lost half-way, and the third takes its place.
"""

import os

os.environ.setdefault("RAY_DEDUP_LOGS", "0")  # show every task's lines, not "repeated 3x across cluster"

import functools
import json
import tempfile
import time
from pathlib import Path

import ray
import train_digits

from iris_ray import run_on_pod_ray
from iris_ray.testing import SimulatedCluster

TPU_TYPE, STEPS, LOSE_AT = "v4-16", 300, 120


def say(text: str) -> None:
    print(f"\n=== {text}", flush=True)


def progress(directory: str) -> list[dict]:
    path = Path(directory) / "progress.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def main() -> None:
    with SimulatedCluster({TPU_TYPE: 3}) as cluster, tempfile.TemporaryDirectory(prefix="digits-") as checkpoints:
        say(f"training on 2 of 3 {TPU_TYPE} slices; each attempt says where it runs")
        train = functools.partial(train_digits.train, checkpoints, STEPS, step_s=0.02)
        began = time.time()
        ref = run_on_pod_ray.remote(train, TPU_TYPE, num_slices=2)

        while not any(line["step"] >= LOSE_AT for line in progress(checkpoints)):
            done, _ = ray.wait([ref], timeout=0.2)
            if done:
                break
        victim = cluster.slice_names[1]
        say(f"the provider takes slice {victim} away, without notice")
        lost = time.time()
        cluster.preempt_slice(victim)

        accuracies = ray.get(ref)
        took = time.time() - began
        lines = progress(checkpoints)

    before = max(line["step"] for line in lines if line["attempt"] == 1)
    after = [line for line in lines if line["attempt"] > 1]
    say("done")
    print(f"results, one per task     {[round(accuracy, 3) for accuracy in accuracies]} (accuracy on unseen images)")
    print(f"attempts                  {max(line['attempt'] for line in lines)}")
    print(f"resumed from checkpoint   step {before} of {STEPS}")
    print(f"lost slice → new progress {after[0]['time'] - lost:.1f} s")
    print(f"the whole run             {took:.1f} s")


if __name__ == "__main__":
    main()
