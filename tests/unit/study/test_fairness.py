"""Fair shares over a virtual day, and how long a large job waits behind small ones."""

import pytest

from iris_ray.scheduler.scheduler import BACKFILL_BOUND_S
from iris_ray.study import Simulation
from iris_ray.study.report import report_on
from tests.support.simulations import DAY, HOUR, MINUTE, TIMINGS, endless, slices, tasks, waited

Sizes = dict[str, tuple[int, ...]]


def shares(simulation: Simulation) -> dict[str, float]:
    """Each user's part of what all held in a day, as a multiple of an equal share."""
    simulation.run_until(DAY)
    simulation.state.check()
    found = report_on(simulation.history, DAY).shares
    return {user: share * len(found) for user, share in found.items()}


@pytest.mark.parametrize(
    ("count", "waiting", "users"),
    [
        (2, 1, {"ann": (2,), "bob": (1,)}),
        (4, 3, {"ann": (2,), "bob": (1,)}),
        (8, 3, {"ann": (1,), "bob": (2,), "cleo": (1, 2, 3), "dan": (4,)}),
    ],
    ids=["two slices or one, of two", "two slices or one, of four", "mixed sizes"],
)
def test_users_with_endless_queues_get_equal_shares_over_a_day(count: int, waiting: int, users: Sizes) -> None:
    simulation = slices(count)
    simulation._check_every = 0  # the invariants are checked at the end
    for user, sizes in users.items():
        simulation.keep_waiting(endless(user, sizes, minutes=(20, 100)), waiting=waiting)
    assert all(0.8 <= share <= 1.2 for share in shares(simulation).values())


def test_large_task_behind_small_ones_starts_within_the_bound_and_the_longest_of_them() -> None:
    simulation = Simulation(TIMINGS)
    simulation.hosts.add_hosts(2, cpus=8.0)
    for user in ("ann", "bob"):
        stream = (tasks(f"{user}-{n}", cpus=1.0, run_s=(20 + 7 * n % 40) * MINUTE, user=user) for n in range(10_000))
        simulation.keep_waiting(stream, waiting=5)
    simulation.submit(tasks("large", cpus=8.0, user="cleo"), at=HOUR)
    simulation.run_until(4 * HOUR)
    assert BACKFILL_BOUND_S / 2 < waited(simulation, "large") <= BACKFILL_BOUND_S + HOUR + 2 * MINUTE
    simulation.state.check()
