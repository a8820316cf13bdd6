"""A sweep: many small jobs in one queue, the most promising ones with priority, and a table of their results.

    python examples/sweep.py --tpu v4-8            # on a Ray cluster, each job on a slice of its own
    python examples/sweep.py                       # on two simulated slices

It needs ``pip install '.[examples]'``, here and on the hosts. Each job trains a classifier of handwritten digits with
other settings. The grid runs in the band BATCH, which takes the slices that nobody else needs. When half of the grid is
done, the best settings so far are repeated with other seeds in the band INTERACTIVE: they pass the rest of the grid.
"""

import argparse
import concurrent.futures
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
from sklearn.datasets import load_digits

from iris_ray import IrisClient, JobHandle, PriorityBand, ResourceSpec, report_status, tpu_device

PRELOAD = ["jax", "sklearn.datasets"]
"""Each host imports them once, not in each job."""
GRID: dict[str, list[float]] = {"rate": [0.03, 0.3, 3.0], "hidden": [8, 64]}
SEEDS = (1, 2)


def train(rate: float, hidden: int, seed: int = 0) -> float:
    """Return the accuracy of a two-layer network on images that it has not seen, between 0 and 1."""
    images, labels = load_digits(return_X_y=True)
    x, y = images[:-360] / 16.0, labels[:-360]
    chance = np.random.default_rng(seed)
    params = [chance.normal(0, 0.1, (64, hidden)), chance.normal(0, 0.1, (hidden, 10))]

    @jax.jit
    def forward(params, x):
        return jax.nn.relu(x @ params[0]) @ params[1]

    @jax.jit
    def step(params):
        def loss_of(params):
            return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(forward(params, x)), y[:, None], axis=1))

        loss, gradients = jax.value_and_grad(loss_of)(params)
        return jax.tree.map(lambda p, g: p - rate * g, params, gradients), loss

    for number in range(100):
        params, loss = step(params)
        if number % 10 == 0:
            report_status(loss=loss)
    return float(np.mean(np.argmax(forward(params, images[-360:] / 16.0), axis=1) == labels[-360:]))


def sweep(client: IrisClient, tpu: str) -> list[str]:
    """Run all jobs, and return a row of the table for each, the best first."""
    jobs: dict[JobHandle, tuple[PriorityBand, dict[str, float]]] = {}
    results: dict[JobHandle, float | str] = {}

    def submit(priority, **settings):
        job = client.submit(
            functools.partial(train, **settings),
            "-".join(f"{name}-{value:g}" for name, value in settings.items()),
            resources=ResourceSpec(device=tpu_device(tpu)),
            priority=priority,
            preload=PRELOAD,
            max_retries_failure=1,
        )
        jobs[job] = priority, settings

    for values in itertools.product(*GRID.values()):
        submit(PriorityBand.BATCH, **dict(zip(GRID, values, strict=True)))
    size = len(jobs)
    while left := [job for job in jobs if job not in results]:
        concurrent.futures.wait(left, return_when="FIRST_COMPLETED")
        for job in left:
            if job.done():
                error = job.exception()
                results[job] = str(error).splitlines()[-1] if error else job.results()[0]
                print(f"{len(results)} of {len(jobs)} jobs are done: {job.job_id}", flush=True)
        good = {job: result for job, result in results.items() if isinstance(result, float)}
        if len(jobs) == size and len(good) >= size // 2:
            _, best = jobs[max(good, key=good.__getitem__)]
            for seed in SEEDS:
                submit(PriorityBand.INTERACTIVE, **best, seed=seed)

    table = []
    for job in sorted(jobs, key=lambda job: str(results[job]), reverse=True):
        priority, settings = jobs[job]
        numbers = f"{settings['rate']:>6g}{settings['hidden']:>8g}{settings.get('seed', 0):>6g}"
        result = results[job]
        accuracy = result if isinstance(result, str) else f"{result:.1%}"
        table.append(f"{job.job_id:<36}{priority.name:<13}{numbers}  {accuracy}")
    return [f"{'job':<36}{'band':<13}{'rate':>6}{'hidden':>8}{'seed':>6}  accuracy", *table]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tpu", help="TPU type, such as v4-8; without it, on simulated slices")
    args = parser.parse_args()
    with IrisClient() if args.tpu else IrisClient.local({"v4-8": 2}) as client:
        print(*sweep(client, args.tpu or "v4-8"), sep="\n")


if __name__ == "__main__":
    main()
