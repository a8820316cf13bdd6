"""How soon tasks start: beside the least that Ray needs, and beside another version of iris_ray.

    python benchmarks/launch.py                          # everything; about twelve minutes on two cores
    python benchmarks/launch.py row fault                # some of it; see below
    python benchmarks/launch.py --before /tmp/before     # each measurement in turn with that checkout's iris_ray

- warm: a run on warm slices, beside bare actors and bare tasks; 2 slices of 4 hosts
- row: runs one after the other without a pause; 2 slices of 2 hosts
- cold: the first run on a fresh cluster, and the first of a later driver, beside as many new actors; as many hosts
- fault: from the end of a task's process to the first line of the slowest task of the next attempt, for a fault one
  second after a start and for one a minute after it; as many hosts
- jobs: how many tasks without chips start in a second on one host
- memory: the memory of a host that is held and idle, and of one with 1, 4 and 8 tasks, beyond what Ray has there
  without iris_ray: the proportional shares of all processes
- recovery: from the loss of a slice to the next attempt; 2 slices of 4 hosts

Machines are noisy, so compare figures of one run only. Each measurement has a process (`launch_figures.py`) and
simulated clusters of its own.
"""

import argparse
import json
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from figures import percentile
from launch_figures import LATER_S, MANY, MEASUREMENTS, Figures
from versions import HERE, run_with

GOALS = {
    "warm launch, ms": "≤ 4 × fan-out",
    "the next runs, back to back, ms": "≤ 250, p99 ≤ 500",
    "the first run on a fresh cluster, s": "≤ 5",
    "the first run of a later driver, s": "≤ 1.2 × actors",
    "a fault 1 s after the start, ms": f"as after {LATER_S:g} s",
    f"{MANY} jobs of one task: started per second": "≥ 300",
    "a held, idle host, MB": "≤ half of before",
    "restart on a free slice, s": "≤ 1.2 × cold",
    "restart on a warm slice, s": "≤ 1",
}
FOR_P99 = 50
"""The number of samples from which on the table has the 99th percentile."""
SCRIPT = HERE / "benchmarks" / "launch_figures.py"


def measured(what: str, samples: int, checkout: Path) -> Figures:
    """Return the figures of one measurement with a checkout's iris_ray, in a process of its own."""
    with tempfile.NamedTemporaryFile("r") as file:
        run_with(checkout, SCRIPT, what, f"--samples={samples}", f"--into={file.name}")
        figures: Figures = json.load(file)
        return figures


def number(value: float) -> str:
    """Return it with three significant digits at least."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def cell(samples: list[float]) -> str:
    low, middle, high = (number(f(samples)) for f in (min, statistics.median, max))
    if len(samples) == 1:
        return middle
    p99 = f", p99 {number(percentile(samples, 0.99))}" if len(samples) >= FOR_P99 else ""
    return f"{middle} ({low} to {high}{p99})"


def rows(versions: dict[str, Figures]) -> Iterator[str]:
    """Yield the rows of a table: each figure of one or two versions, and the ratio of the second to the first."""
    for name in dict.fromkeys(name for of_version in versions.values() for name in of_version):
        samples = [of_version.get(name, []) for of_version in versions.values()]
        middles = [statistics.median(one) for one in samples if one]
        cells = [cell(one) if one else "" for one in samples]
        if len(versions) == 2:
            cells.append(f"{middles[1] / middles[0]:.2f}" if len(middles) == 2 else "")
        yield f"| {' | '.join([name, *cells, GOALS.get(name, '')])} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", help=f"one or more of: {', '.join(MEASUREMENTS)}; default: all")
    parser.add_argument("--samples", type=int, help="samples of each figure, in each round")
    parser.add_argument("--before", type=Path, help="another checkout, whose iris_ray is measured in turn")
    parser.add_argument("--rounds", type=int, default=1, help="how often each version is measured")
    given = parser.parse_args()
    if unknown := set(given.what) - MEASUREMENTS.keys():
        parser.error(f"there is no {', '.join(sorted(unknown))}; choose from {', '.join(MEASUREMENTS)}")
    checkouts = {"before": given.before.resolve()} if given.before else {}
    checkouts["now"] = HERE
    columns = [*checkouts, *(["now / before"] if given.before else []), "goal"]
    table = [f"| | {' | '.join(columns)} |", f"|---|{'---:|' * len(columns)}"]
    for what in given.what or MEASUREMENTS:
        found: dict[str, Figures] = {name: defaultdict(list) for name in checkouts}
        for _ in range(given.rounds):
            for name, checkout in checkouts.items():
                for figure, samples in measured(what, given.samples or MEASUREMENTS[what][1], checkout).items():
                    found[name][figure] += samples
        table += rows(found)
        print("\n".join(["", *table]), flush=True)  # as far as it is known; tasks print between


if __name__ == "__main__":
    main()
