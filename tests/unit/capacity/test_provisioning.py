"""What a provisioner asks for and deletes. On paper: no provider, no clock."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from iris_ray.capacity.holdings import Settings
from iris_ray.capacity.provider import OWNER_LABEL, QueuedSlice, QueuedState, Source
from iris_ray.capacity.provisioning import BROKEN_S, STUCK_S, plan
from iris_ray.capacity.provisioning_actions import Action, Create, Delete
from iris_ray.capacity.provisioning_history import ProvisioningHistory, Unconfirmed
from iris_ray.errors import InvalidRequestError
from iris_ray.model.topology import get_tpu_config
from tests.support.costs import calls
from tests.support.provisioning import (
    BOTH,
    BUSY,
    FIRST,
    FREE,
    HERE,
    PARTLY,
    RESERVED,
    SECOND,
    SETTINGS,
    TYPE,
    Q,
    asked,
    creates,
    deletes,
    gangs,
    make_plan,
    name,
    queued,
    waits,
)


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
    assert "4 of at most 4 are asked for or held (--max)" in waits(actions)[0]


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


def test_plan_without_cluster_state_returns_nothing() -> None:
    history = ProvisioningHistory()
    for now in (0.0, 10_000.0):
        assert make_plan(None, queued(1), queued(2, Q.ACCEPTED), history=history, now=now) == []


def test_plan_cancels_requests_no_longer_awaited() -> None:
    history, requests = ProvisioningHistory(), (queued(1, Q.ACCEPTED), queued(2, Q.PROVISIONING), queued(3, Q.ACCEPTED))
    make_plan(3, *requests, history=history, now=0.0)
    assert make_plan(1, *requests, history=history, now=10.0) == []
    assert deletes(make_plan(1, *requests, history=history, now=610.0)) == [name(1), name(3)]


def test_plan_replaces_slice_that_lost_a_host() -> None:
    history = ProvisioningHistory()
    make_plan(0, queued(1), joined={name(1): BUSY}, history=history, now=0.0)
    first = make_plan(1, queued(1), joined={name(1): PARTLY}, history=history, now=1.0)
    assert len(creates(first)) == 1
    assert not deletes(first)
    history.unconfirmed.clear()
    later = make_plan(0, queued(1), joined={name(1): PARTLY}, history=history, now=2.0 + BROKEN_S)
    assert deletes(later) == [name(1)]
    assert history.at(HERE, TYPE).failures == 0


def test_plan_deletes_slice_that_is_made_for_ever() -> None:
    """As a group of VMs of which some never come."""
    history, stuck = ProvisioningHistory(), queued(1, Q.PROVISIONING)
    make_plan(1, stuck, history=history, now=0.0)
    assert make_plan(1, stuck, history=history, now=STUCK_S) == []
    actions = make_plan(1, stuck, history=history, now=STUCK_S + 1)
    assert deletes(actions) == [name(1)]
    assert "without becoming active" in waits(actions)[0]


# -- whole gangs -------------------------------------------------------------------------------------------------------


def test_plan_buys_only_complete_gangs_within_cap() -> None:
    """The cap is four."""
    assert creates(make_plan((5,))) == []
    assert len(creates(make_plan((5, 3)))) == 3
    assert len(creates(make_plan((3, 2)))) == 3
    assert len(creates(make_plan((3, 2, 1)))) == 4
    assert (
        "gangs miss 5 more slices of v6e-16, but 0 of at most 4 are asked for or held (--max)"
        in waits(make_plan((5, 1)))[0]
    )


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


def test_cost_of_a_plan_is_linear_in_slices_and_gangs() -> None:
    def cost(count: int) -> int:
        there = [queued(number) for number in range(count)]
        joined = {one.name: FREE if number % 2 else BUSY for number, one in enumerate(there)}
        history, demand = ProvisioningHistory(), (1,) * count
        make_plan((), *there, joined=joined, history=history, most=9 * count)
        return calls(lambda: make_plan(demand, *there, joined=joined, history=history, now=1100.0, most=9 * count))

    assert cost(400) < 2.5 * cost(200)


# -- several sources ---------------------------------------------------------------------------------------------------


def test_waiting_request_moves_on_only_if_another_source_is_open() -> None:
    history, waiting = ProvisioningHistory(), queued(1, Q.WAITING_FOR_RESOURCES)
    assert make_plan(1, waiting, history=history, now=0.0, **BOTH) == []
    assert make_plan(1, waiting, history=history, now=899.0, **BOTH) == []
    history.refused("x", SECOND.key, TYPE, 895.0, "quota")
    assert make_plan(1, waiting, history=history, now=901.0, **BOTH) == [], "it would only lose its place"
    actions = make_plan(1, waiting, history=history, now=930.0, **BOTH)
    assert deletes(actions) == [name(1)]
    assert asked(actions) == ["there"]
    there = queued(2, Q.WAITING_FOR_RESOURCES, location=SECOND.location)
    assert make_plan(1, there, history=history, now=931.0, **BOTH) == []
    back = make_plan(1, there, history=history, now=1831.0, **BOTH)
    assert (deletes(back), asked(back)) == ([name(2)], ["here"]), "the first one's pause is as long as the wait was"


def test_request_alone_in_its_source_never_moves() -> None:
    history, waiting = ProvisioningHistory(), queued(1, Q.WAITING_FOR_RESOURCES)
    assert make_plan(1, waiting, history=history, now=0.0) == []
    assert make_plan(1, waiting, history=history, now=1e6) == []


def test_waiting_gang_moves_only_to_room_for_all_of_it() -> None:
    history, waiting = ProvisioningHistory(), [queued(n, Q.ACCEPTED) for n in (1, 2)]
    for chips, moved in ((16, []), (32, [name(1), name(2)])):
        sources: dict[str, Any] = {"sources": (FIRST, replace(RESERVED, chips=chips))}
        make_plan((2,), *waiting, history=history, now=0.0, **sources)
        assert deletes(make_plan((2,), *waiting, history=history, now=1000.0, **sources)) == moved


def test_failed_slice_is_replaced_from_next_source() -> None:
    actions = make_plan(1, queued(1, Q.FAILED, error="stockout"), **BOTH)
    assert (deletes(actions), asked(actions)) == ([name(1)], ["there"])


def test_gang_comes_whole_from_one_source() -> None:
    reserved_for_two = replace(RESERVED, chips=32)
    sources: dict[str, Any] = {"sources": (reserved_for_two, SECOND)}
    assert asked(make_plan((3,), **sources)) == ["there"] * 3
    assert asked(make_plan((2,), **sources)) == ["res in here"] * 2
    assert asked(make_plan((3, 2), most=9, **sources)) == ["there"] * 3 + ["res in here"] * 2


def test_reservations_chips_count_once_for_all_types() -> None:
    types = get_tpu_config("v6e-16"), get_tpu_config("v6e-32")
    settings = replace(SETTINGS, configs=types, sources=(RESERVED,))
    there = queued(1, location=HERE, reservation=RESERVED.key), queued(2)  # the second one is not the reservation's

    def make(demand: Mapping[str, list[int]]) -> list[Action]:
        return plan(settings, gangs(demand), there, {name(1): BUSY, name(2): BUSY}, ProvisioningHistory(), 0.0, 1.7e9)

    both = make({"v6e-16": [1, 1], "v6e-32": [1]})
    assert [action.config.name for action in both if isinstance(action, Create)] == ["v6e-16", "v6e-16"]
    assert "48 of the 64 chips of res in here are asked for or held (--reservation)" in waits(both)[0]
    alone = make({"v6e-32": [1, 1]})
    assert [action.config.name for action in alone if isinstance(action, Create)] == ["v6e-32"]


def test_budget_counts_all_types_sources_and_requests() -> None:
    other_type = queued(9, name="iris-ann-v6e-8-1", accelerator_type="v6e-8")
    history = ProvisioningHistory(unconfirmed={name(3): Unconfirmed(SECOND.key, 0.0)})
    actions = make_plan(9, other_type, queued(1, Q.FAILED), history=history, now=0.0, most=None, budget=72, **BOTH)
    assert asked(actions) == ["there"] * 3, "one of them again"
    assert "72 of the budget of 72 chips are asked for or held (--budget), and a slice has 16" in waits(actions)[0]


def test_paused_gang_keeps_its_chips_from_smaller_ones() -> None:
    """It is first; its chips are not given away while its only source pauses."""
    history = ProvisioningHistory()
    history.refused("x", SECOND.key, TYPE, 0.0, "no capacity")
    sources: dict[str, Any] = {"sources": (replace(RESERVED, chips=16), SECOND), "budget": 48, "most": None}
    assert asked(make_plan((3, 1), history=history, now=1.0, **sources)) == []


@pytest.mark.parametrize(
    "text", ["res", f"{HERE}/reservations/", f"{HERE}/reservations/r:x", "projects/p/reservations/r"]
)
def test_malformed_reservation_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequestError, match=r"--reservation is .* give projects/PROJECT"):
        Source.reserved(text)


class Provider:
    """A provider on paper: zones run out of stock, refuse, fail and preempt as an odd sequence says."""

    def __init__(self, settings: Settings) -> None:
        self.settings, self.now, self.history = settings, 0.0, ProvisioningHistory()
        self.slices: dict[str, QueuedSlice] = {}
        self.demand: dict[str, list[int]] = {}
        self.mood: dict[str, str] = {}  # of each source: gives, waits, refuses or fails

    def turn(self) -> None:
        found, joined = list(self.slices.values()), {n: FREE for n, s in self.slices.items() if s.state is Q.ACTIVE}
        for action in plan(self.settings, gangs(self.demand), found, joined, self.history, self.now, 1.7e9 + self.now):
            if isinstance(action, Delete):
                self.slices[action.name] = replace(self.slices[action.name], state=Q.DELETING)
            elif isinstance(action, Create):
                self.create(action)
        self.check()

    def create(self, action: Create) -> None:
        self.history.unconfirmed.setdefault(action.name, Unconfirmed(action.source.key, self.now))
        if self.mood.get(action.source.key) == "refuses":
            self.history.refused(action.name, action.source.key, action.config.name, self.now, "refused")
        else:
            kind, where = action.config.accelerator_type, action.source
            self.slices[action.name] = queued(
                0, Q.ACCEPTED, name=action.name, accelerator_type=kind, location=where.location,
                reservation=where.reservation,
            )  # fmt: skip

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        for one in list(self.slices.values()):
            mood = self.mood.get(one.source, "gives")
            if one.state is Q.DELETING:
                del self.slices[one.name]
            elif one.state in (Q.ACCEPTED, Q.WAITING_FOR_RESOURCES):
                becomes = {"gives": Q.ACTIVE, "fails": Q.FAILED}.get(mood, Q.WAITING_FOR_RESOURCES)
                self.slices[one.name] = replace(one, state=becomes)

    def check(self) -> None:
        """No limit is exceeded, whatever has happened."""
        held = list(self.slices.values())
        assert sum(one.chips for one in held) <= (self.settings.budget or 0)
        of_reservation = sum(one.chips for one in held if one.reservation)
        assert of_reservation <= (RESERVED.chips or 0)
        for config in self.settings.configs:
            assert sum(one.accelerator_type == config.name for one in held) <= (self.settings.most or 0)


MOODS = st.sampled_from(["gives", "waits", "refuses", "fails"])


KEYS = [RESERVED.key, FIRST.key, SECOND.key]


EVENTS = st.one_of(
    st.tuples(st.just("mood"), st.sampled_from(KEYS), MOODS),
    st.tuples(st.just("demand"), st.sampled_from(["v6e-16", "v6e-32"]), st.lists(st.integers(1, 4), max_size=4)),
    st.tuples(st.just("time"), st.sampled_from([1.0, 30.0, 600.0, 1000.0]), st.just(None)),
    st.tuples(st.just("taken"), st.integers(0, 9), st.sampled_from([Q.SUSPENDED, Q.FAILED])),
)


@given(st.lists(EVENTS, max_size=30))
@settings(max_examples=150, deadline=None)
def test_odd_sequence_exceeds_no_limit_and_ends_served(events: list[tuple[str, Any, Any]]) -> None:
    configs = get_tpu_config("v6e-16"), get_tpu_config("v6e-32")
    provider = Provider(
        replace(SETTINGS, configs=configs, sources=(RESERVED, FIRST, SECOND), most=5, budget=144, idle_s=300.0)
    )
    for what, which, value in events:
        match what:
            case "mood":
                provider.mood[which] = value
            case "demand":
                provider.demand[which] = value
            case "time":
                provider.pass_time(which)
            case "taken" if provider.slices:
                victim = list(provider.slices)[which % len(provider.slices)]
                provider.slices[victim] = replace(provider.slices[victim], state=value, by_service=True)
        provider.turn()
    provider.mood, active = {SECOND.key: "refuses"}, 0
    for _ in range(40):  # stock is there again: pauses of half an hour end, what nobody needs goes
        active = [one.accelerator_type for one in provider.slices.values() if one.state is Q.ACTIVE].count("v6e-16")
        if active >= 2:
            break
        provider.demand = {"v6e-16": [2 - active]}
        provider.pass_time(300.0)
        provider.turn()
    assert active >= 2
