"""Spares are given back, and limits hold, in virtual time."""

from iris_ray.model.limits import Limits
from iris_ray.model.options import PriorityBand
from iris_ray.state.events import LimitsSetEvent
from tests.support.simulations import HOUR, MINUTE, gang, slices, waited


def test_slice_held_by_spare_goes_to_new_job() -> None:
    simulation = slices(2)
    simulation.submit(gang("first", spares=1, run_s=2 * HOUR))
    simulation.submit(gang("other", user="other"), at=1000.0)
    simulation.run_until(HOUR)
    assert waited(simulation, "other") == 0.0


def test_spares_slice_is_not_given_to_avoiding_job() -> None:
    simulation = slices(3)
    simulation.submit(gang("first", spares=2, run_s=2 * HOUR))
    simulation.submit(gang("other", user="other", launch_fails=True), at=1000.0)
    simulation.run_until(1000.0 + 4 * MINUTE)
    assert simulation.history.plans < 100


def test_job_over_users_limit_lets_others_pass() -> None:
    simulation = slices(2)
    simulation.apply([LimitsSetEvent("ann", PriorityBand.INTERACTIVE, Limits(chips=8))])
    for name in ("first", "second"):
        simulation.submit(gang(name, user="ann"))
    simulation.submit(gang("other", user="bob"))
    simulation.run_until(0.5 * HOUR)
    assert "limit" in simulation.why("second")
    assert waited(simulation, "other") == 0.0
    simulation.run_until(1.5 * HOUR)
    assert HOUR <= waited(simulation, "second") <= HOUR + MINUTE
