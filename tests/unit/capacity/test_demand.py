"""How many slices are missing, and which are just arriving. On paper: no provider, no clock."""

from math import inf
from typing import Any

import pytest

from iris_ray.capacity.demand import (
    ARRIVAL_S,
    Arrivals,
    WaitingGang,
    demand_of,
    missing_slices,
    net_demand,
    slices_in,
    waiting_gangs,
    within_limits,
)
from iris_ray.model.constraints import Constraint, ConstraintOp
from iris_ray.model.job_spec import CoschedulingConfig
from iris_ray.model.limits import Limits
from iris_ray.model.options import PriorityBand
from iris_ray.model.parts import part_attribute
from iris_ray.scheduler.limits import Allowances
from iris_ray.scheduler.team_quotas import TeamQuotas
from iris_ray.state.events import LimitsSetEvent
from tests.support.costs import calls
from tests.support.worlds import LONG, World, add_slices


def missing(world: World) -> dict[str, list[int]]:
    waiting = world.plan().pending_reasons
    return missing_slices([(world.state.jobs[job_id], why) for job_id, why in waiting.items()], world.state.fleet)


def waiting(world: World) -> list[WaitingGang]:
    """The gangs as a provisioner sees them."""
    state, reasons = world.state, world.plan().pending_reasons
    gangs = waiting_gangs([(state.jobs[job_id], why) for job_id, why in reasons.items()], state.fleet)
    return within_limits(gangs, state.jobs, Allowances(state.limits, inf, TeamQuotas(state.teams, state.fleet, 0.0)))


def may_take(world: World) -> list[str]:
    return [gang.job_id for gang in waiting(world) if gang.may_take]


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


def test_job_that_has_started_since_it_was_considered_misses_nothing() -> None:
    world = World("a")
    job = world.submit("two", slices=(2,))
    reasons = world.plan().pending_reasons
    add_slices(world, "b")
    world.schedule()
    assert not job.pending
    assert waiting_gangs([(job, reasons["two"])], world.state.fleet) == []


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


def test_demand_up_to_a_job_looks_at_no_limits_behind_it() -> None:
    world = World("a")
    for number in range(100):
        world.submit(f"job-{number}")
    state, reasons = world.state, world.plan().pending_reasons
    waits = [(state.jobs[job_id], why) for job_id, why in reasons.items()]

    def demand(last: str = "") -> list[WaitingGang]:
        return demand_of(state, waits, 0.0, last=last)

    assert demand("job-50")[:51] == demand()[:51]
    assert calls(lambda: demand("job-1")) < calls(demand) / 2


def test_promised_jobs_are_not_counted_if_they_are_too_few_for_the_limit() -> None:
    world = World("a")
    jobs = [world.submit(f"job-{number}") for number in range(100)]
    state = world.state
    allowances = Allowances(state.limits, inf, TeamQuotas(state.teams, state.fleet, 0.0))
    for job in jobs[1:]:
        allowances.promised(job, 4.0)
    assert calls(lambda: allowances.limit_once_left(jobs[0], 0.0)) < 50
    world.state.check()


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


# -- for provisioners --------------------------------------------------------------------------------------------------


def test_gangs_of_all_types_come_in_one_order_with_the_free_slices_that_they_would_use() -> None:
    world = World("a")
    world.submit("later", tpu_type="v6e-16", priority=PriorityBand.BATCH)
    world.submit("two", slices=(2,))
    world.submit_tasks("tasks", 5, device="v6e-8")
    assert waiting(world) == [
        WaitingGang("v4-16", 1, "two", there=1, may_reserve=True),
        WaitingGang("v6e-8", 1, "tasks", times=5),
        WaitingGang("v6e-16", 1, "later", may_reserve=True),
    ]


def test_gang_that_pauses_keeps_free_slices_and_misses_none() -> None:
    world = World("a")
    job = world.submit("job")
    world.schedule()
    world.dispatch_fails(job)
    world.confirm(job)
    assert waiting(world) == [WaitingGang("v4-16", 0, "job", there=1, may_take=False)]


def test_gang_that_could_use_only_certain_slices_keeps_free_ones_and_misses_none() -> None:
    world = World()
    for name in ("a", "b"):
        world.add_slice(name, pool="large-jobs")
    world.start("first")
    world.submit("picky", slices=(2,), constraints=(Constraint("pool", ConstraintOp.EQ, "large-jobs"),))
    assert waiting(world) == [WaitingGang("v4-16", 0, "picky", there=1, may_take=False)]


def test_nothing_is_taken_for_gang_that_would_reach_its_limit() -> None:
    """Each of them is within the limit alone; the second is not once the first runs. The cluster is smaller now."""
    world = World("a")
    world.start("running", user="bob")
    world.do(LimitsSetEvent("ann", PriorityBand.INTERACTIVE, Limits(chips=16)))
    world.submit("first", slices=(2,), user="ann")
    world.submit("second", user="ann")
    world.submit("large", slices=(3,), user="ann")
    world.submit("other", user="bob")
    assert may_take(world) == ["first", "other"]
    assert missing(world) == {"v4-16": [2, 1, 3, 1]}, "with free chips they are requested all the same"


def test_nothing_is_taken_for_more_running_jobs_than_allowed() -> None:
    world = World()
    world.do(LimitsSetEvent("ann", PriorityBand.INTERACTIVE, Limits(running_jobs=1)))
    world.submit("first", user="ann")
    world.submit("second", user="ann")
    assert may_take(world) == ["first"]


def test_nothing_is_taken_for_gang_to_which_a_lower_band_leaves_its_slice() -> None:
    world = World("a")
    world.start("low", priority=PriorityBand.BATCH)
    world.now += LONG
    world.submit("high", priority=PriorityBand.PRODUCTION)
    world.schedule()
    (gang,) = waiting(world)
    assert (gang.job_id, gang.may_take) == ("high", False)
