"""The command ``python -m tests.proofs.windows``."""

from collections import Counter
from unittest import mock

from iris_ray.state import job_table
from tests.proofs.plays import command, play_worlds
from tests.proofs.windows.quiet import Quiet
from tests.proofs.windows.world import WindowWorld

EACH = 800
"""Steps of a world, before it comes to its end."""


def play(seed: int, steps: int, first: int = 0, each: int = EACH) -> Counter[str]:
    """Play worlds until there were so many steps; see `play_worlds`."""

    def one(name: str) -> Counter[str]:
        world = WindowWorld(name)
        world.play(each)
        Quiet(world).play()
        return world.counts + world.rules.counts + Counter(steps=world.steps)

    with mock.patch.object(job_table, "FINISHED_JOBS_KEPT", 5):
        return play_worlds("windows", one, seed, steps, first, each)


if __name__ == "__main__":
    command("windows", play, EACH)
