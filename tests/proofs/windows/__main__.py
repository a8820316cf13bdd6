"""The command ``python -m tests.proofs.windows``."""

from collections import Counter
from collections.abc import Callable
from unittest import mock

from iris_ray.state import job_table
from tests.proofs.plays import command, play_worlds
from tests.proofs.windows.quiet import Quiet
from tests.proofs.windows.rules import Rules
from tests.proofs.windows.world import WindowWorld

EACH = 800
"""Steps of a world, before it comes to its end."""


Play = Callable[[int, int, int, int], Counter[str]]


def play_by(rules: type[Rules], name: str = "windows", end: type[Quiet] = Quiet) -> Play:
    """Return what plays worlds by these rules, each to such an end, one after the other; see `play_worlds`."""

    def play(seed: int, steps: int, first: int = 0, each: int = EACH) -> Counter[str]:
        def one(seed_of_world: str) -> Counter[str]:
            world = WindowWorld(seed_of_world, rules)
            world.play(each)
            end(world).play()
            return world.counts + world.rules.counts + Counter(steps=world.steps)

        with mock.patch.object(job_table, "FINISHED_JOBS_KEPT", 5):
            return play_worlds(name, one, seed, steps, first, each)

    return play


def play(seed: int, steps: int, first: int = 0, each: int = EACH) -> Counter[str]:
    """Play worlds until there were so many steps; see `play_worlds`."""
    return play_by(Rules)(seed, steps, first, each)


if __name__ == "__main__":
    command("windows", play, EACH)
