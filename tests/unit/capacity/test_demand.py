"""How many slices are missing, and which are just arriving. On paper: no provider, no clock."""

from typing import Any

import pytest

from iris_ray.capacity.demand import ARRIVAL_S, Arrivals, missing_slices, net_demand, slices_in
from iris_ray.model.constraints import Constraint, ConstraintOp
from iris_ray.model.job_spec import CoschedulingConfig
from iris_ray.model.options import PriorityBand
from iris_ray.model.parts import part_attribute
from tests.support.costs import calls
from tests.support.worlds import World, add_slices


def missing(world: World) -> dict[str, list[int]]:
    waiting = world.plan().pending_reasons
    return missing_slices([(world.state.jobs[job_id], why) for job_id, why in waiting.items()], world.state.fleet)


def test_missing_is_demand_beyond_free_slices() -> None:
    world = World("a")
    world.submit("two", slices=(2,))
    assert missing(world) == {"v4-16": [1]}
    world.submit("three", slices=(3,))
    assert missing(world) == {"v4-16": [1, 3]}
    world.state.check()


def test_missing_counts_job_waiting_for_busy_slices() -> None:
    world = World("a")
    world.start("first")
    assert missing(world) == {}
    world.submit("second")
    assert missing(world) == {"v4-16": [1]}


def test_missing_is_least_count_of_waiting_flexible_job() -> None:
    world = World()
    world.submit("job", slices=(2, 4))
    assert missing(world) == {"v4-16": [2]}
    add_slices(world, "a", "b")
    world.schedule()
    assert missing(world) == {}


def test_missing_for_many_equal_jobs_is_fast() -> None:
    world = World("a")
    for number in range(100):
        world.submit(f"job-{number}")
    reasons = world.plan().pending_reasons
    waits = [(world.state.jobs[job_id], why) for job_id, why in reasons.items()]
    assert calls(lambda: missing_slices(waits, world.state.fleet)) < 10 * len(waits)


def test_missing_separates_types_and_counts_single_tasks_by_hosts() -> None:
    world = World()
    world.submit("gang", tpu_type="v6e-16")
    world.submit_tasks("tasks", 5, device="v4-16")  # two hosts a slice
    assert missing(world) == {"v6e-16": [1], "v4-16": [1, 1, 1]}


@pytest.mark.parametrize(
    "constraint",
    [
        Constraint("tpu-pool", ConstraintOp.EQ, "large-jobs"),
        Constraint("tpu-name", ConstraintOp.EQ, "a"),
        Constraint("tpu-topology", ConstraintOp.GT, 3),
    ],
)
def test_missing_omits_job_that_new_slice_would_not_help(constraint: Constraint) -> None:
    world = World()
    world.submit("picky", constraints=(constraint,))
    world.submit_tasks("no-chips", 1, resources={"CPU": 1000.0})
    assert missing(world) == {}


def test_missing_omits_pausing_job() -> None:
    world = World("a")
    job = world.submit("job")
    world.schedule()
    world.dispatch_fails(job)
    world.confirm(job)
    assert missing(world) == {}


def test_missing_omits_job_too_large_for_hosts_of_type() -> None:
    """That is known as soon as the cluster has had a host of the type. Before that, what the type says of chips is."""
    world = World()
    world.submit("greedy", resources={"TPU": 4.0, "CPU": 500.0})
    world.submit("odd", resources={"TPU": 8.0})
    assert missing(world) == {"v4-16": [1]}
    world.add_slice("a")
    assert missing(world) == {}
    world.lose("a-0")
    world.lose("a-1")
    assert missing(world) == {}
    world.submit("modest", resources={"TPU": 4.0, "CPU": 8.0})
    assert missing(world) == {"v4-16": [1]}
    world.check()


def test_missing_gives_free_slices_to_gangs_by_band_and_age() -> None:
    world = World()
    world.submit("last", slices=(5,), priority=PriorityBand.BATCH)
    world.submit("third", slices=(4,))
    world.submit("first", slices=(3,), priority=PriorityBand.PRODUCTION)
    world.add_slice("a")
    world.submit("fourth", slices=(2,))
    assert missing(world) == {"v4-16": [2, 4, 2, 5]}


def test_arriving_slices_are_not_missing_until_late() -> None:
    arrivals = Arrivals()
    coming = {"a": ("v4-16", False), "b": ("v4-16", True)}
    assert arrivals.arriving(coming, 0.0) == {"v4-16": 1}
    assert net_demand({"v4-16": 2, "v6e-16": 1}, {"v4-16": 1}) == {"v4-16": 1, "v6e-16": 1}
    assert net_demand({"v4-16": 1}, {"v4-16": 3}) == {}
    assert arrivals.arriving(coming, ARRIVAL_S) == {}


def test_slice_that_lost_host_is_not_arriving() -> None:
    world, arrivals = World(), Arrivals()
    world.add_slice("a")
    assert slices_in(world.state.fleet) == {"a": ("v4-16", True)}
    arrivals.arriving(slices_in(world.state.fleet), 0.0)
    world.lose("a-1")
    assert slices_in(world.state.fleet) == {"a": ("v4-16", False)}
    assert arrivals.arriving(slices_in(world.state.fleet), 1.0) == {}


def test_missing_counts_gangs_on_parts_by_slices() -> None:
    """Three gangs on halves need two slices, and a fourth none more; a free half counts."""
    world = World()
    half: dict[str, Any] = {"tpu_type": "v6e-16", "replicas": 2}
    half["coscheduling"] = CoschedulingConfig(part_attribute("2x4"))
    counts = []
    for number in range(4):
        world.submit(f"job-{number}", **half)
        counts.append(missing(world))
    assert counts == [{"v6e-16": [1] * slices} for slices in (1, 1, 2, 2)]
    several = half | {"coscheduling": CoschedulingConfig(part_attribute("2x4"), 3), "failure_domain": "slice"}
    world.submit("several", **several)
    assert missing(world) == {"v6e-16": [1] * 4}
    add_slices(world, "a", tpu_type="v6e-16")
    assert missing(world) == {"v6e-16": [1] * 3}
