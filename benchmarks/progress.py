"""From fault to progress: how long the demo's training run makes no new step after a slice is taken, by phase.

    python benchmarks/progress.py [--faults 3] [--spares 1] [--preload jax sklearn.datasets iris_ray.jax]

The run of `examples/train_digits.py` takes two of three simulated v4-16 slices: four processes of JAX on CPU. The third
slice is its spare. One slice of the run is taken without notice; a new one comes once the run goes on. The phases of
the slowest process of the next attempt, in seconds:

- restart: from the fault until its function is called; it is noticed, the others are stopped, the next are started.
- imports: of JAX, scikit-learn and the training script.
- joining: `iris_ray.jax.initialize()`, and what JAX does when it first looks for its devices.
- restoring: reading the data set and the checkpoint, and placing the parameters on the devices.
- compiling: the first call of the training step, until its result is there.

*In all* is from the fault to that result, which is the first new step.
"""

import argparse
import functools
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import ray

from iris_ray import run_on_pod_ray
from iris_ray.testing import SimulatedCluster

EXAMPLES = Path(__file__).parents[1] / "examples"
TPU_TYPE = "v4-16"
PRELOAD = ["jax", "sklearn.datasets", "iris_ray.jax"]
"""As in the example, which is not imported here: it would import JAX."""
PHASES = ("restart", "imports", "joining", "restoring", "compiling")
SETTLE_S = 30.0
"""From the first step to the fault: by then the spare and the standbys for the next attempt are there on two cores."""


def timed_training(directory: str) -> None:
    """Train as the demo does, and note when each phase of this process was over."""
    times = [time.time()]

    def mark() -> None:
        times.append(time.time())

    import sys

    sys.path.insert(0, str(EXAMPLES))
    import jax
    import train_digits

    import iris_ray

    me = iris_ray.get_job_info()
    assert me is not None
    mark()
    initialize, update = iris_ray.jax.initialize, train_digits.update

    def timed_initialize() -> None:
        initialize()
        jax.devices()
        mark()

    def timed_first_update(*args: Any) -> Any:
        mark()
        done = jax.block_until_ready(update(*args))  # type: ignore[no-untyped-call]
        mark()
        note = Path(directory) / f"phases-{me.attempt}-{me.task_index}"
        note.with_suffix(".new").write_text(json.dumps({"times": times, "slice": me.slice_name}))
        note.with_suffix(".new").rename(note)
        training.update = update
        return done

    training: Any = train_digits
    iris_ray.jax.initialize, training.update = timed_initialize, timed_first_update  # type: ignore[assignment]
    train_digits.train(directory, 1_000_000, step_s=0.02)


def phases_of(directory: Path, attempt: int, ref: ray.ObjectRef) -> list[dict[str, Any]]:
    """Wait for the first step of an attempt; return what its processes have noted."""
    while len(notes := list(directory.glob(f"phases-{attempt}-[0-9]"))) < 4:
        assert not ray.wait([ref], timeout=0.1)[0], ray.get(ref)
    return [json.loads(note.read_text()) for note in notes]


def measure(cluster: SimulatedCluster, faults: int, spares: int, preload: Sequence[str]) -> list[list[float]]:
    """Return for each fault the seconds of each phase, and in all."""
    samples = []
    with tempfile.TemporaryDirectory(prefix="progress-") as directory:
        train = functools.partial(timed_training, directory)
        ref = run_on_pod_ray.remote(train, TPU_TYPE, num_slices=2, spares=spares, preload=list(preload))
        for attempt in range(1, faults + 1):
            victim = phases_of(Path(directory), attempt, ref)[0]["slice"]
            time.sleep(SETTLE_S)
            at = time.time()
            cluster.preempt_slice(victim)
            after = phases_of(Path(directory), attempt + 1, ref)
            times = [at, *max((note["times"] for note in after), key=lambda times: times[-1])]
            samples.append([then - before for before, then in pairwise(times)] + [times[-1] - at])
            cluster.add_slice(TPU_TYPE)
        ray.cancel(ref)
    return samples


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=3)
    parser.add_argument("--spares", type=int, default=1)
    parser.add_argument("--preload", nargs="*", default=PRELOAD, metavar="MODULE")
    args = parser.parse_args()
    with SimulatedCluster({TPU_TYPE: 3}, quiet=True) as cluster:
        samples = measure(cluster, args.faults, args.spares, args.preload)
    print("".join(f"{name:>11}" for name in (*PHASES, "in all")))
    for sample in samples:
        print("".join(f"{seconds:11.2f}" for seconds in sample))
    print("".join(f"{statistics.median(column):11.2f}" for column in zip(*samples, strict=True)), "  medians")


if __name__ == "__main__":
    main()
