"""What happens to hosts at random, from seeded generators."""

from collections.abc import Callable, Sequence
from random import Random

from iris_ray.simulation.agenda import Agenda


def strike_at_random(
    agenda: Agenda, targets: Sequence[str], every_s: float, strike: Callable[[str], object], chance: Random
) -> None:
    """Have something happen to one of the targets, again and again, independently of what happened before.

    Args:
        agenda: the clock.
        targets: names of what it may happen to.
        every_s: the mean time between two strikes at the same target, in seconds.
        strike: what happens; gets the target.
        chance: decides when and to which.
    """
    if not targets:
        return

    def happen() -> None:
        strike(chance.choice(targets))
        plan()

    def plan() -> None:
        agenda.after(chance.expovariate(len(targets) / every_s), happen)

    plan()
