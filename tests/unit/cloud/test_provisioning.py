"""How many slices are missing, and what a provisioner does about it. On paper: no provider, no clock."""

from collections.abc import Mapping
from typing import Any

import pytest

from iris_ray.cloud.demand import ARRIVAL_S, Arrivals, missing_slices, net_demand, slices_in
from iris_ray.cloud.provisioning import (
    BROKEN_S,
    JOIN_S,
    OWNER_LABEL,
    Action,
    Create,
    Delete,
    Joined,
    QueuedSlice,
    QueuedState,
    Settings,
    Wait,
    plan,
    request_id,
)
from iris_ray.cloud.provisioning_history import ProvisioningHistory
from iris_ray.model.constraints import Constraint, ConstraintOp
from iris_ray.model.options import PriorityBand
from iris_ray.model.topology import get_tpu_config
from tests.support.costs import calls
from tests.support.worlds import World

Q = QueuedState
SETTINGS = Settings("ann", get_tpu_config("v6e-16"), least=0, most=4, idle_s=600.0)
FREE, BUSY, PARTLY = Joined(True, False), Joined(True, True), Joined(False, False)


# -- how many are missing ----------------------------------------------------------------------------------------------


def missing(world: World) -> dict[str, list[int]]:
    waiting = world.plan().pending_reasons
    return missing_slices([(world.state.jobs[job_id], why) for job_id, why in waiting.items()], world.state.fleet)


def test_missing_is_demand_beyond_free_slices() -> None:
    world = World()
    world.add_slice("a")
    world.submit("two", slices=(2,))
    assert missing(world) == {"v4-16": [1]}
    world.submit("three", slices=(3,))
    assert missing(world) == {"v4-16": [1, 3]}
    world.state.check()


def test_missing_counts_job_waiting_for_busy_slices() -> None:
    world = World()
    world.add_slice("a")
    world.start("first")
    assert missing(world) == {}
    world.submit("second")
    assert missing(world) == {"v4-16": [1]}


def test_missing_is_least_count_of_waiting_flexible_job() -> None:
    world = World()
    world.submit("job", slices=(2, 4))
    assert missing(world) == {"v4-16": [2]}
    world.add_slice("a")
    world.add_slice("b")
    world.schedule()
    assert missing(world) == {}


def test_missing_for_many_equal_jobs_is_fast() -> None:
    world = World()
    world.add_slice("a")
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
    world = World()
    world.add_slice("a")
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


# -- what a provisioner does -------------------------------------------------------------------------------------------


def queued(number: int, state: QueuedState = Q.ACTIVE, **changes: Any) -> QueuedSlice:
    values: dict[str, Any] = {
        "name": name(number),
        "accelerator_type": "v6e-16",
        "state": state,
        "labels": {OWNER_LABEL: "ann"},
    }
    return QueuedSlice(**(values | changes))


def name(number: int) -> str:
    return f"iris-ann-v6e-16-{number}"


def make_plan(
    demand: int | tuple[int, ...] | None,
    *found: QueuedSlice,
    joined: Mapping[str, Joined] | None = None,
    history: ProvisioningHistory | None = None,
    now: float = 1000.0,
    **settings: object,
) -> list[Action]:
    """A plan; so many slices that gangs of one slice miss, or what each gang misses."""
    gangs = (1,) * demand if isinstance(demand, int) else demand
    chosen = Settings(**({k: getattr(SETTINGS, k) for k in SETTINGS.__slots__} | settings))
    return plan(chosen, gangs, found, joined or {}, history or ProvisioningHistory(), now, 1.7e9 + now)


def creates(actions: list[Action]) -> list[str]:
    return [action.name for action in actions if isinstance(action, Create)]


def deletes(actions: list[Action]) -> list[str]:
    return [action.name for action in actions if isinstance(action, Delete)]


def waits(actions: list[Action]) -> list[str]:
    return [action.reason for action in actions if isinstance(action, Wait)]


def test_plan_without_demand_does_nothing() -> None:
    assert make_plan(0) == []
    assert make_plan(None) == []


def test_plan_creates_missing_slices_beyond_coming_ones() -> None:
    coming = [queued(1, Q.WAITING_FOR_RESOURCES), queued(2, Q.PROVISIONING)]
    actions = make_plan(4, *coming)
    assert len(creates(actions)) == len(set(creates(actions))) == 2
    assert all(str(action).startswith("create iris-ann-v6e-16-") for action in actions)
    assert make_plan(2, *coming) == []


def test_plan_counts_active_slice_as_coming_until_joined() -> None:
    assert make_plan(1, queued(1)) == []
    assert make_plan(1, queued(1), joined={name(1): PARTLY}) == []
    assert len(creates(make_plan(1, queued(1), joined={name(1): BUSY}))) == 1


@pytest.mark.parametrize("state", [Q.DELETING, Q.SUSPENDING, Q.SUSPENDED, Q.FAILED])
def test_plan_never_exceeds_cap_including_held_quota(state: QueuedState) -> None:
    actions = make_plan(9, queued(1, state), queued(2, Q.ACCEPTED), history=ProvisioningHistory(_counted={name(1)}))
    assert len(creates(actions)) == 2
    assert "2 of at most 4 are held" in waits(actions)[0]


def test_plan_keeps_minimum_without_demand() -> None:
    assert len(creates(make_plan(0, least=2))) == 2
    assert len(creates(make_plan(None, queued(1), least=2))) == 1
    assert len(creates(make_plan(2, least=2))) == 2


@pytest.mark.parametrize("state", [Q.SUSPENDED, Q.FAILED])
def test_plan_deletes_dead_slices_holding_quota(state: QueuedState) -> None:
    assert deletes(make_plan(0, queued(1, state, error="stockout"))) == [name(1)]


def test_plan_leaves_foreign_slices_alone() -> None:
    strangers = (
        queued(1, Q.FAILED, labels={}),
        queued(2, Q.FAILED, labels={OWNER_LABEL: "bob"}),
        queued(3, Q.SUSPENDED, name="my-own-tpu"),
        queued(4, Q.FAILED, name="iris-ann-v6e-8-1"),
    )
    assert make_plan(0, *strangers) == []
    assert len(creates(make_plan(4, *strangers))) == 4


def test_plan_backs_off_after_each_failure() -> None:
    history, now, pauses = ProvisioningHistory(), 0.0, []
    for number in range(1, 9):
        make_plan(1, queued(number, Q.FAILED, error="stockout"), history=history, now=now)
        again = make_plan(1, queued(number, Q.FAILED, error="stockout"), history=history, now=now)
        assert not creates(again)
        assert "pausing" in waits(again)[0]
        pauses.append(history.not_before - now)
        now = history.not_before
        assert len(creates(make_plan(1, history=history, now=now))) == 1
    assert pauses == [30, 60, 120, 240, 480, 960, 1800, 1800]


def test_only_joining_slice_ends_row_of_failures() -> None:
    history = ProvisioningHistory()
    make_plan(0, queued(1), joined={name(1): BUSY}, history=history)
    for number in (2, 3):
        make_plan(1, queued(1), queued(number, Q.FAILED), joined={name(1): BUSY}, history=history)
    assert history.failures == 2
    make_plan(0, queued(1), queued(4), joined={name(1): BUSY, name(4): FREE}, history=history)
    assert history.failures == 0


def test_refused_request_is_a_failure_and_loses_its_name() -> None:
    history = ProvisioningHistory(unconfirmed={name(1): 1000.0})
    history.refused(name(1), 1000.0, "no quota")
    assert not creates(make_plan(1, history=history))
    assert "no quota" in waits(make_plan(1, history=history))[0]


def test_unanswered_request_is_repeated_under_same_name() -> None:
    history = ProvisioningHistory(unconfirmed={name(1): 1000.0})
    assert creates(make_plan(1, history=history)) == [name(1)]
    assert request_id("create", name(1)) == request_id("create", name(1)) != request_id("delete", name(1))
    assert make_plan(1, queued(1, Q.ACCEPTED), history=history) == []
    assert history.unconfirmed == {}


def test_plan_returns_longest_idle_slices_down_to_minimum() -> None:
    history = ProvisioningHistory()
    joined = {name(n): FREE for n in (1, 2)} | {name(3): BUSY}
    make_plan(0, queued(1), queued(3), joined=joined, history=history, now=0.0)
    make_plan(0, queued(1), queued(2), queued(3), joined=joined, history=history, now=100.0)
    everything = (queued(1), queued(2), queued(3))
    assert deletes(make_plan(0, *everything, joined=joined, history=history, now=599.0)) == []
    assert deletes(make_plan(0, *everything, joined=joined, history=history, now=600.0)) == [name(1)]
    assert deletes(make_plan(0, *everything, joined=joined, history=history, now=700.0)) == [name(1), name(2)]
    last = make_plan(0, *everything, joined=joined, history=history, now=700.0, least=2)
    assert deletes(last) == [name(1)]
    assert all(action.if_unused for action in last if isinstance(action, Delete))


def test_used_or_wanted_slice_restarts_its_idle_time() -> None:
    history = ProvisioningHistory()
    make_plan(0, queued(1), joined={name(1): FREE}, history=history, now=0.0)
    make_plan(0, queued(1), joined={name(1): BUSY}, history=history, now=500.0)
    make_plan(0, queued(1), joined={name(1): FREE}, history=history, now=501.0)
    assert not deletes(make_plan(1, queued(1), joined={name(1): FREE}, history=history, now=1100.0))
    make_plan(0, queued(1), joined={name(1): FREE}, history=history, now=1101.0)
    assert not deletes(make_plan(0, queued(1), joined={name(1): FREE}, history=history, now=1700.0))
    assert deletes(make_plan(0, queued(1), joined={name(1): FREE}, history=history, now=1701.0))


def test_plan_without_cluster_state_returns_nothing() -> None:
    history = ProvisioningHistory()
    for now in (0.0, 10_000.0):
        assert make_plan(None, queued(1), queued(2, Q.ACCEPTED), history=history, now=now) == []


def test_plan_cancels_requests_no_longer_awaited() -> None:
    history, requests = ProvisioningHistory(), (queued(1, Q.ACCEPTED), queued(2, Q.PROVISIONING), queued(3, Q.ACCEPTED))
    make_plan(3, *requests, history=history, now=0.0)
    assert make_plan(1, *requests, history=history, now=10.0) == []
    assert deletes(make_plan(1, *requests, history=history, now=610.0)) == [name(1), name(3)]


def test_plan_abandons_slice_that_never_joins_as_failure() -> None:
    history = ProvisioningHistory()
    make_plan(1, queued(1), history=history, now=0.0)
    assert make_plan(1, queued(1), history=history, now=JOIN_S) == []
    actions = make_plan(1, queued(1), history=history, now=JOIN_S + 1)
    assert deletes(actions) == [name(1)]
    assert "start-up script" in waits(actions)[0]


def test_plan_replaces_slice_that_lost_a_host() -> None:
    history = ProvisioningHistory()
    make_plan(0, queued(1), joined={name(1): BUSY}, history=history, now=0.0)
    first = make_plan(1, queued(1), joined={name(1): PARTLY}, history=history, now=1.0)
    assert len(creates(first)) == 1
    assert not deletes(first)
    history.unconfirmed.clear()
    later = make_plan(0, queued(1), joined={name(1): PARTLY}, history=history, now=2.0 + BROKEN_S)
    assert deletes(later) == [name(1)]
    assert history.failures == 0


# -- whole gangs -------------------------------------------------------------------------------------------------------


def test_plan_buys_only_complete_gangs_within_cap() -> None:
    """The cap is four."""
    assert creates(make_plan((5,))) == []
    assert len(creates(make_plan((5, 3)))) == 3
    assert len(creates(make_plan((3, 2)))) == 3
    assert len(creates(make_plan((3, 2, 1)))) == 4
    assert "gangs miss 5 more slices, but 0 of at most 4 are held" in waits(make_plan((5, 1)))[0]


def test_plan_counts_coming_slices_for_first_gang() -> None:
    coming = queued(1, Q.ACCEPTED), queued(2, Q.ACCEPTED)
    assert len(creates(make_plan((3,), *coming))) == 1
    assert creates(make_plan((2, 3), *coming)) == []
    assert len(creates(make_plan((2, 2), *coming))) == 2


def test_plan_completes_gang_once_others_leave_slices() -> None:
    joined = {name(1): BUSY, name(2): FREE}
    there = queued(1), queued(2)
    history = ProvisioningHistory()
    assert make_plan((3,), *there, joined=joined, history=history, now=0.0) != []
    assert creates(make_plan((3,), *there, joined=joined, history=history, now=10_000.0)) == []
    assert deletes(make_plan((3,), *there, joined=joined, history=history, now=10_000.0)) == [], "it will be of use"
    assert len(creates(make_plan((2,), *there, joined=joined | {name(1): FREE}, history=history, now=10_001.0))) == 2


def test_plan_returns_slices_of_gang_that_cannot_be_whole() -> None:
    history, joined = ProvisioningHistory(), {name(1): FREE, name(2): BUSY}
    there = queued(1), queued(2), queued(3, Q.ACCEPTED)
    assert deletes(make_plan((4,), *there, joined=joined, history=history, now=0.0)) == []
    assert deletes(make_plan((4,), *there, joined=joined, history=history, now=600.0)) == [name(3), name(1)]
