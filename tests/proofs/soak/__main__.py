"""A soak as a command."""

import os

os.environ.setdefault("RAY_worker_niceness", "0")  # else Ray's workers get next to nothing beside a busy process
os.environ.setdefault("RAY_DEDUP_LOGS", "0")

import argparse
import random
import sys
import tempfile
import time
from pathlib import Path

import tests.proofs.soak
from tests.proofs.soak.run import HEAD, Soak


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.proofs.soak", description=(tests.proofs.soak.__doc__ or "").split("\n\n")[0]
    )
    parser.add_argument("--minutes", type=float, default=60.0, help="how long it goes on")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6), help="which faults")
    parser.add_argument("--gap", type=float, default=45.0, help="seconds between two faults, on average; 0: no faults")
    given = parser.parse_args(arguments)
    began = time.monotonic()

    def say(text: str) -> None:
        print(f"[soak {time.monotonic() - began:6.1f} s] {text}", flush=True)

    with tempfile.TemporaryDirectory(prefix="soak-") as directory:
        soak = Soak(given.minutes * 60, Path(directory), given.seed, say)
        soak.run(given.gap)
    print(f"seed {given.seed}: {sum(soak.done.values())} jobs, and chaos's: {soak.chaos.jobs_done}")
    print(f"{soak.chaos.faults.total()} faults: {dict(soak.chaos.faults)}")
    print(HEAD)
    for row in soak.rows:
        print(row)
    growing = [row for row in soak.rows if row.fails]
    for row in growing:
        print(f"GROWS: {row}")
    wrong = [*soak.chaos.findings, *soak.troubles]
    for finding in wrong:
        print(f"  {finding}")
    return 1 if growing or wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
