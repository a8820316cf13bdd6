"""Worlds by chance that are played one after the other, and the commands that play more of them than a test can."""

import argparse
import time
from collections import Counter
from collections.abc import Callable


def play_worlds(
    proof: str, world: Callable[[str], Counter[str]], seed: int, steps: int, first: int, each: int
) -> Counter[str]:
    """Play worlds, one after the other, until there were so many steps; return what has happened.

    Raises:
        AssertionError: something is wrong; the note says how to see it again.
    """
    counts: Counter[str] = Counter()
    number = first
    while counts["steps"] < steps:
        try:
            counts.update(world(f"{seed} {number}"), worlds=1)
        except BaseException as error:
            again = f"--seed {seed} --first {number} --each {each} --steps 1"
            error.add_note(f"again: python -m tests.proofs.{proof} {again}")
            raise
        number += 1
    return counts


def command(proof: str, play: Callable[[int, int, int, int], Counter[str]], each: int) -> None:
    """Play worlds, and say how many steps went by."""
    parser = argparse.ArgumentParser(prog=f"python -m tests.proofs.{proof}")
    parser.add_argument("--steps", type=int, default=300_000, help="events that the states handle")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="the number of the first world")
    parser.add_argument("--each", type=int, default=each, help="steps of a world, before it comes to its end")
    asked = parser.parse_args()
    began = time.monotonic()
    counts = play(asked.seed, asked.steps, asked.first, asked.each)
    took_s = time.monotonic() - began
    print(f"{counts['steps']} steps in {took_s:.0f} s ({counts['steps'] / took_s:.0f}/s) without a finding")
    print(", ".join(f"{name}: {count}" for name, count in sorted(counts.items())))
