"""Watch a JAX training run lose two TPU slices and finish anyway. No TPU needed: real Ray nodes pose as TPU hosts.

    python examples/demo.py

Four simulated v4-16 slices of two hosts. The run takes two, and a third is its spare. One is taken away with a notice:
all processes save the same step and go on elsewhere without losing any. Then one is taken without: the run goes on from
its latest checkpoint.
"""

import os

os.environ.setdefault("RAY_DEDUP_LOGS", "0")  # show every task's lines, not "repeated 3x across cluster"

import functools
import json
import sys
import tempfile
import time
from pathlib import Path

import ray
import train_digits

from iris_ray import run_on_pod_ray
from iris_ray.testing import SimulatedCluster

TPU_TYPE, STEPS, ANNOUNCE_AT, LOSE_AT = "v4-16", 300, 80, 200


def say(text: str) -> None:
    print(f"\n=== {text}", flush=True)


def progress(directory: str) -> list[dict]:
    path = Path(directory) / "progress.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def main() -> None:
    with SimulatedCluster({TPU_TYPE: 4}) as cluster, tempfile.TemporaryDirectory(prefix="digits-") as checkpoints:
        say(f"training on 2 of 4 {TPU_TYPE} slices; each attempt says where it runs")
        train = functools.partial(train_digits.train, checkpoints, STEPS, step_s=0.02)
        began = time.time()
        ref = run_on_pod_ray.remote(
            train, TPU_TYPE, num_slices=2, spares=1, preload=train_digits.PRELOAD, mode="cluster"
        )

        def wait_for(step: int) -> None:
            while (
                not any(line["step"] >= step for line in progress(checkpoints)) and not ray.wait([ref], timeout=0.2)[0]
            ):
                pass

        wait_for(ANNOUNCE_AT)
        victim = progress(checkpoints)[-1]["slice"]
        say(f"the provider announces that slice {victim} goes in 20 seconds")
        announced = time.time()
        cluster.preempt_slice(victim, notice_s=20)

        wait_for(LOSE_AT)
        victim = progress(checkpoints)[-1]["slice"]
        say(f"the provider takes slice {victim} away, without notice")
        lost = time.time()
        cluster.preempt_slice(victim)

        accuracies = ray.get(ref)
        took = time.time() - began
        lines = progress(checkpoints)

    say("done")
    print(f"results, one per task   {[round(accuracy, 3) for accuracy in accuracies]} (accuracy on unseen images)")
    for attempt, since in ((2, announced), (3, lost)):
        before = max(line["step"] for line in lines if line["attempt"] == attempt - 1)
        first = next(line for line in lines if line["attempt"] == attempt)
        print(
            f"attempt {attempt}               from step {before} on, new progress {first['time'] - since:.1f} s later"
        )
    print(f"the whole run           {took:.1f} s")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("\ninterrupted; everything that the demo started has ended")
