"""The command ``python -m tests.proofs.windows``."""

import argparse
import time
from collections import Counter
from unittest import mock

from iris_ray.state import job_table
from tests.proofs.windows.quiet import Quiet
from tests.proofs.windows.world import WindowWorld

EACH = 800
"""Steps of a world, before it comes to its end."""


def play(seed: int, steps: int, first: int = 0, each: int = EACH) -> Counter[str]:
    """Play worlds, one after the other, until there were so many steps; return what has happened.

    Raises:
        AssertionError: something is wrong; the note says how to see it again.
    """
    counts: Counter[str] = Counter()
    number = first
    with mock.patch.object(job_table, "FINISHED_JOBS_KEPT", 5):
        while counts["steps"] < steps:
            try:
                world = WindowWorld(f"{seed} {number}")
                world.play(each)
                Quiet(world).play()
            except BaseException as error:
                again = f"--seed {seed} --first {number} --each {each} --steps 1"
                error.add_note(f"again: python -m tests.proofs.windows {again}")
                raise
            counts.update(world.counts + world.rules.counts, steps=world.steps, worlds=1)
            number += 1
    return counts


def main() -> None:
    """Play worlds, and say how many steps went by."""
    parser = argparse.ArgumentParser(prog="python -m tests.proofs.windows", description=__doc__)
    parser.add_argument("--steps", type=int, default=300_000, help="events that the states handle")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="the number of the first world")
    parser.add_argument("--each", type=int, default=EACH, help="steps of a world, before it comes to its end")
    asked = parser.parse_args()
    began = time.monotonic()
    counts = play(asked.seed, asked.steps, asked.first, asked.each)
    took_s = time.monotonic() - began
    print(f"{counts['steps']} steps in {took_s:.0f} s ({counts['steps'] / took_s:.0f}/s) without a finding")
    print(", ".join(f"{name}: {count}" for name, count in sorted(counts.items())))


if __name__ == "__main__":
    main()
