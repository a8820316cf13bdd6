"""The command ``python -m tests.proofs.random_worlds``."""

from collections import Counter

from tests.proofs.plays import command, play_worlds
from tests.proofs.random_worlds.world import RandomWorld, stage

EACH = 3000
"""Steps of a world, before it comes to its end."""


def play(seed: int, steps: int, first: int = 0, each: int = EACH) -> Counter[str]:
    """Play worlds until there were so many steps; see `play_worlds`."""
    with stage() as runner:

        def one(name: str) -> Counter[str]:
            world = RandomWorld(name, runner)
            world.play(each)
            return world.counts + Counter(steps=world.steps)

        return play_worlds("random_worlds", one, seed, steps, first, each)


if __name__ == "__main__":
    command("random_worlds", play, EACH)
