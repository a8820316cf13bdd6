"""Plans in which a gang takes chips back from slices of other types. On paper: no provider, no clock."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from iris_ray.capacity.demand import WaitingGang
from iris_ray.capacity.holdings import Reach
from iris_ray.capacity.provider import Market, QueuedSlice, Source
from iris_ray.capacity.provisioning import Joined, plan
from iris_ray.capacity.provisioning_actions import Action, Delete, KeepSlices, LeaveChips, TakeBack
from iris_ray.capacity.provisioning_history import NOT_LEFT_S, ProvisioningHistory
from iris_ray.capacity.reservations import GONE_S, TAKEN_AFTER_S
from iris_ray.errors import InvalidRequestError
from iris_ray.model.topology import get_tpu_config
from tests.support.costs import calls
from tests.support.provisioning import BUSY, FREE, HERE, PARTLY, SETTINGS, Q, creates, deletes, name, queued, waits

RES = Source.reserved(f"{HERE}/reservations/res:64")
TYPES = tuple(map(get_tpu_config, ("v6e-16", "v6e-32", "v6e-64")))
OF_RESERVATION = replace(SETTINGS, configs=TYPES, sources=(RES,), most=9, idle_s=1e6)
LONG = 1000.0
LARGE = WaitingGang("v6e-64", 1, "large")


def small(number: int, **changes: Any) -> QueuedSlice:
    """A slice of 16 chips of the reservation."""
    values: dict[str, Any] = {"reservation": RES.reservation, "market": Market.RESERVED}
    return queued(number, **(values | changes))


def large(number: int, **changes: Any) -> QueuedSlice:
    values: dict[str, Any] = {"name": f"iris-ann-v6e-64-{number}", "accelerator_type": "v6e-64"}
    return small(number, **(values | changes))


def take(
    gangs: Sequence[WaitingGang],
    *found: QueuedSlice,
    joined: dict[str, Joined] | None = None,
    history: ProvisioningHistory | None = None,
    idle_for: float = LONG,
    **changes: Any,
) -> list[Action]:
    """The plan for some gangs, after all slices that are idle have been so for a while."""
    history = history or ProvisioningHistory()
    chosen = replace(OF_RESERVATION, **changes)
    there = {one.name: FREE for one in found if one.state is Q.ACTIVE} if joined is None else joined
    plan(chosen, (), found, there, history, 0.0, 1.7e9)
    return plan(chosen, gangs, found, there, history, idle_for, 1.7e9 + idle_for)


def taken(actions: list[Action]) -> dict[str, str]:
    """The slices that go for a job, with the job."""
    return {one.name: one.for_job for one in actions if isinstance(one, Delete) and one.for_job}


def texts(actions: list[Action]) -> list[str]:
    return [one.text for one in actions if isinstance(one, TakeBack)]


FOUR = [small(n) for n in range(4)]


def test_idle_slices_of_another_type_go_for_a_gang_and_their_chips_count_until_they_are_gone() -> None:
    actions = take([LARGE], *FOUR)
    assert taken(actions) == {name(n): "large" for n in range(4)}
    assert creates(actions) == []
    assert all(one.if_unused for one in actions if isinstance(one, Delete))
    assert "takes 64 chips back for 1 v6e-64 for large: once iris-ann-v6e-16-0, " in texts(actions)[0]
    going = [replace(one, state=Q.DELETING) for one in FOUR]
    later = take([LARGE], *going)
    assert (creates(later), deletes(later)) == ([], [])
    assert len(texts(later)) == 1, "why says so as long as it lasts"
    assert (creates(take([LARGE], *going[1:])), len(creates(take([LARGE])))) == ([], 1)


def test_only_what_is_lacking_goes_and_the_longest_idle_first() -> None:
    history = ProvisioningHistory()
    for now in (-500.0, 0.0):
        history.lasting("unused", name(2), holds=True, now=now)
    gang = WaitingGang("v6e-32", 1, "job")
    assert list(taken(take([gang], *FOUR, history=history))) == [name(2), name(0)]
    assert list(taken(take([gang], *FOUR[:3], history=history))) == [name(2)]


def test_nothing_goes_if_it_does_not_suffice() -> None:
    actions = take([LARGE], *FOUR, joined={name(0): FREE, name(1): FREE, name(2): BUSY, name(3): BUSY})
    assert taken(actions) == {}
    assert "64 of the 64 chips of res in here are asked for or held (--reservation); 32 chips" in waits(actions)[0]
    assert "would not suffice" in waits(actions)[0]


@pytest.mark.parametrize(("idle_for", "goes"), [(TAKEN_AFTER_S - 1, False), (TAKEN_AFTER_S, True)])
def test_slice_goes_once_it_has_been_idle_for_a_minute(idle_for: float, goes: bool) -> None:
    """Its next job may be about to come, and a new slice is made in minutes."""
    assert bool(taken(take([LARGE], *FOUR, idle_for=idle_for))) == goes


def test_time_for_idle_slices_below_a_minute_holds_here_too() -> None:
    later = WaitingGang("v6e-16", 1, "later", there=3)  # so that they are not deleted as unneeded
    for idle_for, goes in ((9.0, False), (10.0, True)):
        assert bool(taken(take([LARGE, later], *FOUR, idle_for=idle_for, idle_s=10.0))) == goes


def test_slices_in_use_incomplete_or_of_other_people_stay() -> None:
    others = small(3, labels={"iris-ray-provisioner": "bob"})
    joined = {name(0): BUSY, name(1): PARTLY, name(2): FREE, name(3): FREE}
    actions = take([WaitingGang("v6e-64", 1, "job")], small(0), small(1), small(2), others, joined=joined)
    assert taken(actions) == {}


def test_limits_and_least_numbers_hold() -> None:
    assert taken(take([LARGE], *FOUR, least=1)) == {}, "one of each type stays"
    two = WaitingGang("v6e-32", 2, "job")
    assert taken(take([two], *FOUR, most=1)) == {}, "it could never have two"
    assert taken(take([WaitingGang("v6e-64", 2, "job")], *FOUR)) == {}, "the reservation has not so many"
    assert taken(take([replace(LARGE, may_take=False)], *FOUR)) == {}, "its user's limit is reached"


def test_source_that_refused_the_type_last_gets_no_chips_back_for_it() -> None:
    history = ProvisioningHistory()
    history.refused("x", RES.key, "v6e-64", 0.0, "no such topology")
    actions = take([LARGE], *FOUR, history=history)
    assert taken(actions) == {}
    assert "64 chips of idle slices of other types stay, since res in here failed last: no such" in waits(actions)[0]
    assert len(creates(take([LARGE], history=history))) == 1, "with room it is asked again"
    other = take([WaitingGang("v6e-32", 1, "job")], *FOUR, history=history)
    assert len(taken(other)) == 2, "another type may be there"


def test_idle_slices_of_a_gang_that_the_source_can_never_serve_are_deleted_as_idle() -> None:
    """It needs 128 chips of a reservation of 64."""
    actions = take([WaitingGang("v6e-16", 8, "too large")], *FOUR, idle_s=600.0)
    assert sorted(deletes(actions)) == [one.name for one in FOUR]


def test_gangs_alike_that_get_nothing_are_looked_at_once() -> None:
    def cost(count: int) -> int:
        gangs = [WaitingGang("v6e-16", 1, f"job {number}") for number in range(count)]
        joined = {one.name: BUSY for one in FOUR}
        return calls(lambda: take(gangs, *FOUR, joined=joined))

    assert cost(1000) - cost(500) < 500 * 20


def test_gangs_alike_wait_for_their_own_reasons() -> None:
    """Of gangs that are alike, one may have been refused slices of lower bands, and chips may be kept in between."""
    history, there = ProvisioningHistory(), {one.name: BUSY for one in FOUR}
    history.not_left("second", RES.key, LONG, "they are new")
    small_gangs = [WaitingGang("v6e-16", 1, job) for job in ("first", "second", "third")]
    actions = waits(plan(OF_RESERVATION, small_gangs, FOUR, there, history, LONG, 1.7e9))
    full = "64 of the 64 chips of res in here are asked for or held (--reservation)"
    assert [full in wait for wait in actions] == [True, True]
    assert ["they are new" in wait for wait in actions] == [False, True]
    idle = there | {name(0): FREE, name(1): FREE}
    kept = WaitingGang("v6e-32", 1, "medium")
    some = take([small_gangs[0], kept, small_gangs[2]], *FOUR, joined=idle)
    assert taken(some) == {name(0): "medium", name(1): "medium"}
    assert ["kept for medium" in wait for wait in waits(some)] == [False, True]


# -- groups of jobs ----------------------------------------------------------------------------------------------------


def member(tpu_type: str, job_id: str, missing: int = 1, group: str = "rl", **changes: Any) -> WaitingGang:
    return WaitingGang(tpu_type, missing, job_id, group=group, **changes)


def test_idle_slices_go_for_a_group_if_they_suffice_for_all_of_its_jobs() -> None:
    some = [member("v6e-32", "learner"), member("v6e-16", "actor", 0, there=2)]
    assert taken(take(some, *FOUR[:3])) == {name(0): "learner"}, "the actor has two of three v6e-16 already"
    some = [member("v6e-32", "learner"), member("v6e-16", "actor", 0, there=1)]
    assert taken(take(some, *FOUR)) == {name(0): "learner", name(1): "learner"}
    assert taken(take([*some, member("v6e-64", "judge")], *FOUR)) == {}, "all three never fit"


def test_no_slices_go_for_a_group_of_which_one_job_would_lack_slices() -> None:
    some = [member("v6e-32", "learner"), member("v6e-32", "second")]
    joined = {one.name: FREE for one in FOUR[:3]} | {FOUR[3].name: BUSY}
    assert taken(take(some, *FOUR, joined=joined)) == {}
    assert len(taken(take(some, *FOUR))) == 4


def test_group_keeps_its_idle_slices_from_its_own_jobs_and_takes_those_of_later_ones() -> None:
    one = [member("v6e-32", "a"), member("v6e-16", "b", 0, there=2)]
    assert taken(take(one, *FOUR)) == {name(0): "a", name(1): "a"}
    later = WaitingGang("v6e-16", 0, "later", there=2)
    assert len(taken(take([*one, later], *FOUR))) == 2
    assert taken(take([later, *one], *FOUR)) == {}, "an earlier job keeps them"


def test_nothing_is_requested_or_kept_for_a_group_that_could_never_be_whole() -> None:
    some = [member("v6e-64", "a"), member("v6e-16", "b", 0, there=1)]
    actions = take(some, FOUR[0], idle_s=600.0)
    assert (creates(actions), deletes(actions)) == ([], [FOUR[0].name])
    assert waits(actions) == ["the group rl can't start: its jobs need 80 chips at a time, of at most 64"]


# -- the order ---------------------------------------------------------------------------------------------------------


def test_gangs_are_served_in_their_order_whatever_their_types() -> None:
    """The first one gets the chips that are free, and what is lacking; the small one behind it waits."""
    gangs = [LARGE, WaitingGang("v6e-16", 1, "small")]
    there = [small(n, state=Q.DELETING) for n in range(3)]
    actions = take(gangs, *there)
    assert creates(actions) == []
    assert "for large" in texts(actions)[0]
    assert "; 64 chips are kept for large" in waits(actions)[0]
    actions = take(gangs[::-1], *there)
    assert [one.rpartition("-")[0].rpartition("-")[0] for one in creates(actions)] == ["iris-ann-v6e-16"]


def test_freed_chips_are_kept_for_gang_that_was_not_looked_at_just_now() -> None:
    """As long as it waits, whether the slices are still there or gone; but not for ever."""
    history, behind = ProvisioningHistory(), WaitingGang("v6e-16", 1, "small")
    assert len(taken(take([LARGE, behind], *FOUR, history=history))) == 4
    paused = WaitingGang("v6e-64", 0, "large", there=1, may_take=False)
    chosen = replace(SETTINGS, configs=tuple(map(get_tpu_config, ("v6e-16", "v6e-64"))), sources=(RES,))

    def later(*gangs: WaitingGang, there: Sequence[QueuedSlice] = (), after_s: float = 30.0) -> list[Action]:
        copy = replace(history, promises=dict(history.promises))
        return plan(chosen, gangs, there, {}, copy, LONG + after_s, 1.7e9)

    going = [replace(one, state=Q.DELETING) for one in FOUR]
    for there in (going[:3], going[:1], []):
        actions = later(paused, behind, there=there)
        assert creates(actions) == []
        assert "; 64 chips are kept for large" in waits(actions)[0]
    assert len(creates(later(paused, behind, after_s=GONE_S))) == 1
    assert len(creates(later(behind))) == 1, "it waits no more"
    (own,) = creates(later(LARGE, behind))
    assert own.startswith("iris-ann-v6e-64-"), "it is looked at again"


def test_idle_slices_that_an_earlier_gang_would_use_stay_and_those_of_a_later_one_go() -> None:
    """The gang of three has two slices and misses the third."""
    three = WaitingGang("v6e-16", 1, "three", there=2)
    joined = {name(0): FREE, name(1): FREE, name(2): BUSY, name(3): BUSY}
    gang = WaitingGang("v6e-32", 1, "job")
    assert taken(take([three, gang], *FOUR, joined=joined)) == {}
    assert taken(take([gang, three], *FOUR, joined=joined)) == {name(0): "job", name(1): "job"}
    impossible = WaitingGang("v6e-16", 7, "seven", there=2)
    assert len(taken(take([impossible, gang], *FOUR, joined=joined))) == 2, "they are of no use to it"


def test_gang_with_slices_that_are_not_of_its_source_keeps_the_request_that_it_misses() -> None:
    """Six of its seven slices are static ones, or of another source."""
    seven, job = WaitingGang("v6e-16", 1, "seven", there=6), WaitingGang("v6e-32", 1, "job")
    request, elsewhere = small(0, state=Q.ACCEPTED), [queued(n, location=f"{HERE}2") for n in range(1, 7)]
    sources: dict[str, Any] = {"sources": (replace(RES, chips=96),)}
    for there, most in (([], 4), (elsewhere, 9)):
        joined = {one.name: FREE for one in there} | {large(1).name: BUSY}
        found: tuple[QueuedSlice, ...] = (request, large(1), *there)
        assert taken(take([seven, job], *found, joined=joined, most=most, **sources)) == {}
        assert taken(take([job], *found, joined=joined, most=most, **sources)) == {name(0): "job"}


def test_slices_reserved_for_a_waiting_gang_stay_even_for_an_earlier_one() -> None:
    kept = WaitingGang("v6e-16", 1, "starving", kept=(name(0), name(1)))
    actions = take([WaitingGang("v6e-32", 1, "job"), kept], *FOUR)
    assert taken(actions) == {name(2): "job", name(3): "job"}


def test_idle_slices_that_a_gang_would_use_or_that_are_reserved_for_it_are_not_deleted_as_idle() -> None:
    """Otherwise a moment's pause of the job would cost it its slice."""
    pauses = WaitingGang("v6e-16", 0, "pauses", there=1)
    history = ProvisioningHistory()
    history.lasting("unused", name(2), holds=True, now=-500.0)
    joined = {name(n): FREE for n in range(3)} | {name(3): BUSY}
    assert deletes(take([pauses], *FOUR, joined=joined, idle_s=LONG, history=history)) == [name(2), name(0)]
    too_large = WaitingGang("v6e-16", 20, "starving", kept=(name(1),))
    assert deletes(take([too_large], *FOUR, joined=joined, idle_s=LONG)) == [name(2), name(0)]


def test_requests_that_no_earlier_gang_needs_are_withdrawn_first() -> None:
    there = small(0), small(1), small(2), small(3, state=Q.ACCEPTED)
    gang = WaitingGang("v6e-16", 1, "small")
    job = WaitingGang("v6e-32", 1, "job")
    assert taken(take([job], *there)) == {name(3): "job", name(0): "job"}
    assert taken(take([gang, job], *there)) == {name(0): "job", name(1): "job"}
    made = small(3, state=Q.PROVISIONING)
    assert taken(take([job], *there[:3], made)) == {name(0): "job", name(1): "job"}, "that is being made"


def test_chips_go_back_when_another_type_is_wanted_and_large_slice_is_idle() -> None:
    actions = take([WaitingGang("v6e-16", 1, "a"), WaitingGang("v6e-16", 1, "b")], large(1))
    assert taken(actions) == {"iris-ann-v6e-64-1": "a"}
    going = large(1, state=Q.DELETING)
    assert creates(take([WaitingGang("v6e-16", 1, "a")], going)) == []


def test_budget_and_quota_of_a_zone_are_shared_too() -> None:
    zone = Source.unreserved(f"{HERE}:64", Market.SPOT)
    spot = [queued(n) for n in range(4)]
    assert len(taken(take([LARGE], *spot, sources=(zone,)))) == 4
    assert len(taken(take([LARGE], *spot, sources=(Source(HERE, Market.SPOT),), budget=80))) == 3
    unknown = take([LARGE], *spot, sources=(Source(HERE, Market.SPOT),))
    assert (taken(unknown), len(creates(unknown))) == ({}, 1), "nobody has said how many there are"


def test_preferred_source_is_freed_before_the_next_one_is_asked() -> None:
    spot = Source("projects/p/locations/there", Market.SPOT)
    assert len(taken(take([LARGE], *FOUR, sources=(RES, spot)))) == 4
    busy = take([LARGE], *FOUR, sources=(RES, spot), joined={name(n): BUSY for n in range(4)})
    assert (taken(busy), len(creates(busy))) == ({}, 1)


def test_deletion_that_the_listing_does_not_show_yet_is_not_done_twice() -> None:
    """The provider has accepted it, and lists the slices unchanged; then their hosts leave."""
    history, gang = ProvisioningHistory(), WaitingGang("v6e-32", 1, "job")
    first = taken(take([gang], *FOUR, history=history))
    history.leaving = dict.fromkeys(first, True)
    for joined in ({name(n): FREE for n in range(4)}, {name(2): FREE, name(3): FREE}):
        actions = take([gang], *FOUR, history=history, joined=joined)
        assert (taken(actions), creates(actions)) == ({}, [])
    assert history.leaving.keys() == first.keys()


def test_unanswered_deletion_is_asked_for_again_unless_the_hosts_are_gone() -> None:
    history, gang = ProvisioningHistory(), WaitingGang("v6e-32", 1, "job")
    first = taken(take([gang], *FOUR, history=history))
    history.leaving = dict.fromkeys(first, False)
    assert taken(take([gang], *FOUR, history=history)) == first
    history.leaving = dict.fromkeys(first, False)
    gone = take([gang], *FOUR, history=history, joined={name(n): FREE for n in (2, 3)})
    assert taken(gone) == {}


def test_slice_that_is_not_gone_after_half_an_hour_counts_no_longer_as_going() -> None:
    history, gang = ProvisioningHistory(), WaitingGang("v6e-32", 1, "job")
    there = small(0, state=Q.DELETING), small(1, state=Q.DELETING), small(2), small(3)
    assert taken(take([gang], *there, history=history, idle_for=GONE_S - 1)) == {}
    actions = take([gang], *there, history=history, idle_for=GONE_S)
    assert taken(actions) == {name(2): "job", name(3): "job"}
    assert creates(actions) == [], "its chips count as long as it is there"


def test_slice_whose_deletion_is_refused_is_chosen_again_after_a_pause_that_grows() -> None:
    history, gang = ProvisioningHistory(), WaitingGang("v6e-32", 1, "job")
    now = LONG
    for pause_s in (30.0, 60.0, 120.0):
        history.not_deleted(name(0), now, "refused")
        others = take([gang], *FOUR, history=history, idle_for=now + pause_s - 1.0)
        assert taken(others) == {name(1): "job", name(2): "job"}
        now += pause_s
        assert taken(take([gang], *FOUR, history=history, idle_for=now)) == {name(0): "job", name(1): "job"}


def test_why_names_the_slices_that_the_provider_refuses_to_delete() -> None:
    history = ProvisioningHistory()
    history.not_deleted(name(0), LONG, "refused")
    (why,) = waits(take([LARGE], *FOUR, history=history))
    assert why.endswith(
        f"48 chips of idle slices of other types would not suffice; the provider has refused to delete {name(0)}"
    )


def test_slices_in_zone_that_cannot_be_asked_stay() -> None:
    history, there = ProvisioningHistory(), {one.name: FREE for one in FOUR}
    types = tuple(map(get_tpu_config, ("v6e-16", "v6e-64")))
    chosen = replace(SETTINGS, configs=types, sources=(RES,), most=9, idle_s=1e6)
    for now in (0.0, LONG):
        actions = plan(chosen, [LARGE], FOUR, there, history, now, 1.7e9 + now, {HERE})
    assert taken(actions) == {}


@pytest.mark.parametrize("text", ["here", f"{HERE}:0", f"{HERE}:x", f"{HERE}/reservations/res"])
def test_malformed_location_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequestError, match=r"--location is .* give projects/PROJECT"):
        Source.unreserved(text, Market.SPOT)


# -- slices in use -----------------------------------------------------------------------------------------------------

EVICTS = replace(LARGE, may_reserve=True)
ALL_BUSY = {one.name: BUSY for one in FOUR}


def asks(*turns: float, **changes: Any) -> list[LeaveChips]:
    """The questions to jobs of lower bands in the last of some turns, whose times are given."""
    return [one for one in turn(*turns, **changes) if isinstance(one, LeaveChips)]


def turn(
    *turns: float,
    gangs: Sequence[WaitingGang] = (EVICTS,),
    joined: dict[str, Joined] | None = None,
    history: ProvisioningHistory | None = None,
    **changes: Any,
) -> list[Action]:
    """The plan in the last of some turns, with four slices that are in use unless told."""
    history, found = history or ProvisioningHistory(), list[Action]()
    types = tuple(map(get_tpu_config, ("v6e-16", "v6e-32", "v6e-64")))
    values: dict[str, Any] = {"configs": types, "sources": (RES,), "most": 9, "idle_s": 1e6}
    for now in turns:
        found = plan(
            replace(SETTINGS, **(values | changes)), gangs, FOUR, joined or ALL_BUSY, history, now, 1.7e9 + now
        )
    return found


def test_jobs_are_asked_to_leave_slices_once_the_gang_has_lacked_them_for_a_while() -> None:
    assert not asks(LONG)
    assert not asks(LONG, LONG + TAKEN_AFTER_S - 1)
    (question,) = asks(LONG, LONG + TAKEN_AFTER_S)
    assert question.wanted.chips == 64
    assert {one.name for one in question.wanted.slices} == {*ALL_BUSY}
    assert question.wanted.most_of_type == (("v6e-16", 4), ("v6e-32", 0))
    assert (question.goal, question.tpu_type) == ("1 v6e-64 for large", "v6e-64")


LATER = LONG, LONG + TAKEN_AFTER_S


def test_jobs_are_not_asked_for_a_gang_that_may_not_evict_or_be_given_slices() -> None:
    assert not asks(*LATER, gangs=[LARGE])
    assert not asks(*LATER, gangs=[replace(EVICTS, may_take=False)])
    assert not asks(*LATER, gangs=[replace(EVICTS, times=2)])


def test_jobs_are_not_asked_if_the_slices_would_not_suffice_or_idle_ones_soon_do() -> None:
    assert not asks(*LATER, least=1)
    assert not asks(*LATER, gangs=[replace(EVICTS, tpu_type="v6e-32", missing=3)])
    medium, joined = replace(EVICTS, tpu_type="v6e-32"), {**ALL_BUSY, name(0): FREE, name(1): FREE}
    found = turn(LONG, LONG + 30.0, gangs=[medium], joined=joined)
    assert not [one for one in found if isinstance(one, LeaveChips | Delete)]


def test_jobs_are_not_asked_while_the_source_has_failed_for_the_type() -> None:
    history = ProvisioningHistory()
    history.at(RES.key, "v6e-64").failed(0.0, "out of stock")
    assert not asks(*LATER, history=history)


def test_idle_slices_go_with_those_that_jobs_leave_and_for_no_other_gang() -> None:
    joined = {**ALL_BUSY, name(3): FREE}
    small_gang = WaitingGang("v6e-32", 1, "behind")
    found = turn(*LATER, gangs=[EVICTS, small_gang], joined=joined)
    (question,) = [one for one in found if isinstance(one, LeaveChips)]
    assert question.wanted.slices[0].name == name(3)
    assert not taken(found)


def test_question_is_repeated_after_a_while_if_no_job_leaves_and_why_says_so() -> None:
    history = ProvisioningHistory()
    assert asks(*LATER, history=history)
    history.not_left("large", RES.key, LATER[-1], "it is too early")
    found = turn(LATER[-1] + 30.0, history=history)
    assert [one for one in waits(found) if one.endswith("; jobs of lower bands leave none: it is too early")]
    assert asks(LATER[-1] + TAKEN_AFTER_S, history=history)


def test_slices_reserved_for_another_gang_count_towards_those_that_go_above_the_least_number() -> None:
    """That gang was not looked at just now, and gets the chips later."""
    paused = WaitingGang("v6e-32", 0, "paused", removes=(name(0), name(1)))
    second = replace(EVICTS, tpu_type="v6e-32")
    assert asks(*LATER, gangs=[second], least=2)
    assert not asks(*LATER, gangs=[paused, second], least=2)
    assert asks(*LATER, gangs=[paused, second])


def test_slices_are_deleted_together_once_all_jobs_have_left() -> None:
    gang = replace(EVICTS, may_reserve=False, removes=tuple(ALL_BUSY))
    one_stays = take([gang], *FOUR, joined={**dict.fromkeys(ALL_BUSY, FREE), name(2): BUSY})
    assert not taken(one_stays)
    (text,) = texts(one_stays)
    assert text.startswith(f"takes 64 chips back for 1 v6e-64 for large: once jobs have left {name(2)} and iris-")
    assert text.endswith(" are deleted, res in here is asked")
    all_left = take([gang], *FOUR, joined=dict.fromkeys(ALL_BUSY, FREE), idle_for=0.0)
    assert taken(all_left) == dict.fromkeys(ALL_BUSY, "large"), "at once: they are reserved for it"


def test_slice_that_jobs_have_left_is_waited_for_while_the_provider_refuses_to_delete_it() -> None:
    """Its jobs would have left in vain if it were given up at the first refusal."""
    history, gang = ProvisioningHistory(), replace(EVICTS, may_reserve=False, removes=tuple(ALL_BUSY))
    history.not_deleted(name(0), LONG - 1.0, "refused")
    waiting = take([gang], *FOUR, history=history)
    assert not taken(waiting)
    assert KeepSlices("large") not in waiting
    assert f"(the provider has refused to delete {name(0)})" in texts(waiting)[0]
    assert taken(take([gang], *FOUR, history=history, idle_for=LONG + 30.0)) == dict.fromkeys(ALL_BUSY, "large")


def test_no_job_is_asked_for_a_day_to_leave_a_slice_that_the_provider_has_refused_to_delete() -> None:
    history = ProvisioningHistory()
    history.not_deleted(name(0), LONG, "refused")
    assert not asks(LONG + NOT_LEFT_S - TAKEN_AFTER_S, LONG + NOT_LEFT_S - 1.0, history=history)
    assert asks(LONG + NOT_LEFT_S, LONG + NOT_LEFT_S + TAKEN_AFTER_S, history=history)


def test_slices_that_jobs_leave_go_for_no_other_gang_and_are_not_deleted_as_idle() -> None:
    gang = replace(EVICTS, removes=(name(0), name(1)))
    first = WaitingGang("v6e-32", 1, "first")
    joined = {name(0): FREE, name(1): FREE, name(2): BUSY, name(3): BUSY}
    found = take([first, replace(gang, missing=0)], *FOUR, joined=joined, idle_s=100.0)
    assert deletes(found) == []


def test_jobs_keep_slices_that_a_gang_needs_no_more() -> None:
    gang = replace(EVICTS, removes=tuple(one.name for one in FOUR[1:]))
    found = take([gang], *FOUR[1:], joined={one.name: BUSY for one in FOUR[1:]}, sources=(replace(RES, chips=128),))
    assert len(creates(found)) == 1
    assert KeepSlices("large") in found


def test_no_job_is_asked_again_for_a_gang_before_a_pause_that_grows() -> None:
    history = ProvisioningHistory()
    history.evicted("large", LONG)
    history.evicts("large", LONG + 300.0)
    assert not asks(LONG + 300.0, LONG + 329.0, history=history)
    assert asks(LONG + 300.0 + TAKEN_AFTER_S, history=history)
    history.evicted("large", LONG + 400.0)
    history.evicts("large", LONG + 700.0)
    assert not asks(LONG + 759.0, history=history)
    assert asks(LONG + 760.0, history=history)


@pytest.mark.parametrize("reach", Reach)
def test_slices_of_others_are_reserved_as_far_as_the_provisioner_may_take_chips_back(reach: Reach) -> None:
    questions = asks(*LATER, take_back=reach)
    assert [one.wanted.may_hold for one in questions] == {
        Reach.IDLE: [],
        Reach.LOWER_BANDS: [False],
        Reach.HELD: [True],
    }[reach]
    assert [str(one).endswith(", or hold idle ones") for one in questions] == [one.wanted.may_hold for one in questions]
    assert taken(take([EVICTS], *FOUR, take_back=reach)) == dict.fromkeys(ALL_BUSY, "large"), "idle ones always go"


def test_gang_that_no_job_is_asked_for_says_by_which_option_if_jobs_could_leave_slices() -> None:
    said = "; no jobs are asked to leave slices, and none are held (--take-back idle)"
    (why,) = waits(turn(LONG, take_back=Reach.IDLE))
    assert why.endswith(said)
    (why,) = waits(turn(LONG, take_back=Reach.IDLE, joined={**ALL_BUSY, name(0): FREE}))
    assert said in why
    for gang, least in ((LARGE, 0), (EVICTS, 1)):
        (why,) = waits(turn(LONG, gangs=[gang], take_back=Reach.IDLE, least=least))
        assert "--take-back" not in why


# -- held slices -------------------------------------------------------------------------------------------------------

HELD = replace(EVICTS, holds=(name(0), name(1), name(2), name(3)))


def test_controller_is_asked_in_each_turn_while_slices_are_held() -> None:
    history = ProvisioningHistory()
    for now in (LONG, LONG + 1.0):
        (question,) = asks(now, gangs=[HELD], joined={**ALL_BUSY, name(0): FREE}, history=history)
        assert (question.wanted.chips, question.wanted.may_hold) == (64, True)
        assert {one.name for one in question.wanted.slices} == {*ALL_BUSY}


@pytest.mark.parametrize("reach", [Reach.IDLE, Reach.LOWER_BANDS])
def test_slices_that_another_setting_has_held_are_held_no_longer(reach: Reach) -> None:
    found = turn(LONG, gangs=[HELD], joined={**ALL_BUSY, name(0): FREE}, take_back=reach)
    assert KeepSlices("large") in found
    assert not [one for one in found if isinstance(one, LeaveChips)]


def test_held_slices_are_deleted_together_as_soon_as_all_are_idle() -> None:
    found = take([HELD], *FOUR, joined=dict.fromkeys(ALL_BUSY, FREE), idle_for=0.0)
    assert taken(found) == dict.fromkeys(ALL_BUSY, "large")


def test_held_idle_slices_go_for_an_earlier_gang_and_for_no_later_one() -> None:
    other, joined = WaitingGang("v6e-32", 1, "other"), {**ALL_BUSY, name(0): FREE, name(1): FREE}
    later = turn(LONG, LONG + TAKEN_AFTER_S, gangs=[HELD, other], joined=joined)
    assert not taken(later)
    assert [one for one in waits(later) if "chips are kept for large" in one]
    earlier = turn(LONG, LONG + TAKEN_AFTER_S, gangs=[other, HELD], joined=joined)
    assert taken(earlier) == {name(0): "other", name(1): "other"}


def test_slices_are_held_for_one_gang_of_a_source_at_a_time() -> None:
    first = replace(EVICTS, job_id="first", tpu_type="v6e-32", holds=(name(0), name(1)))
    second = replace(EVICTS, tpu_type="v6e-32")
    found = turn(*LATER, gangs=[first, second])
    questions = {one.wanted.job_id: one.wanted for one in found if isinstance(one, LeaveChips)}
    assert [*questions] == ["first"]
    busy = {name(2): BUSY, name(3): BUSY}
    found = turn(*LATER, gangs=[replace(first, missing=0), second], joined={**busy, name(0): BUSY, name(1): BUSY})
    (question,) = [one.wanted for one in found if isinstance(one, LeaveChips)]
    assert (question.job_id, question.may_hold, {one.name for one in question.slices}) == ("large", False, {*busy})
    found = turn(*LATER, gangs=[first, replace(second, holds=(name(2), name(3)))])
    assert [one.wanted.job_id for one in found if isinstance(one, LeaveChips)] == ["first"]
    assert KeepSlices("large") in found


def test_held_slices_are_kept_while_the_controller_is_asked_for_an_earlier_gang() -> None:
    first, held = replace(EVICTS, job_id="first"), replace(EVICTS, tpu_type="v6e-32", holds=(name(0), name(1)))
    found = turn(*LATER, gangs=[first, held])
    assert [one.wanted.job_id for one in found if isinstance(one, LeaveChips)] == ["first"]
    assert KeepSlices("large") not in found
    (text,) = texts(found)
    assert f"32 chips back for 1 v6e-32 for large: holds {name(0)}, {name(1)} until enough of them are idle" in text


@pytest.mark.parametrize("why", ["refused", "limited"])
def test_slices_are_no_longer_held_for_a_gang_that_could_not_start(why: str) -> None:
    history = ProvisioningHistory()
    if why == "refused":
        history.at(RES.key, "v6e-64").failed(0.0, "out of stock")
    gang = replace(HELD, may_take=why != "limited")
    found = turn(*LATER, gangs=[gang], history=history)
    assert KeepSlices("large") in found
    assert not [one for one in found if isinstance(one, LeaveChips)]


def test_held_slices_are_not_deleted_as_idle() -> None:
    joined = {**ALL_BUSY, name(0): FREE}
    assert deletes(turn(0.0, LONG, gangs=[replace(HELD, missing=0)], joined=joined, idle_s=100.0)) == []
