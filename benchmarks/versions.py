"""Runs a benchmark in turn with this checkout of iris_ray and with another one.

    git worktree add --detach /tmp/before COMMIT
    python benchmarks/versions.py /tmp/before large_gang.py --slices 1
    python benchmarks/versions.py /tmp/before faults.py --only "task process killed" --rounds 2

Each checkout runs its own script, because such a script may use internals. `launch.py` uses public names only, so it
runs one script with both versions and prints them in one table: ``launch.py --before /tmp/before``.
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parents[1]


def run_with(checkout: Path, *command: str | Path) -> None:
    """Run a Python script in a checkout, with its iris_ray, on simulated hosts as well.

    Ray's workers look for modules in the working directory of their driver first.
    """
    path = [str(checkout), str(HERE / "benchmarks")]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
    subprocess.run([sys.executable, *command], env=environ, cwd=checkout, check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path, help="the other checkout")
    parser.add_argument("script", help="a file in benchmarks/")
    parser.add_argument("--rounds", type=int, default=1, help="how often each version runs")
    given, arguments = parser.parse_known_args()
    for number in range(given.rounds):
        for name, checkout in (("before", given.before.resolve()), ("now", HERE)):
            print(f"\n== {name}, round {number + 1} of {given.rounds}: {checkout}", flush=True)
            run_with(checkout, checkout / "benchmarks" / given.script, *arguments)


if __name__ == "__main__":
    main()
