"""Which slices go so that a gang of another type gets their chips. On paper, from values."""

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from iris_ray.capacity.reservations import Holder, Lack, SharedChips, TypeUse, cover

RES = "res"


def holders(*chips: int, tpu_type: str = "small", source: str = RES, is_request: bool = False) -> list[Holder]:
    return [Holder(f"{tpu_type}-{n}-{size}", tpu_type, source, size, is_request) for n, size in enumerate(chips)]


def use(
    idle: list[Holder] | None = None, requests: list[Holder] | None = None, kept: int = 0, idle_now: int | None = None
) -> TypeUse:
    """What a type leaves that keeps some slices as its least number."""
    idle, requests = idle or [], requests or []
    there = len(idle) if idle_now is None else idle_now
    return TypeUse(requests, len(requests), idle, there, there + len(requests) - kept)


def lack(chips: float, in_all: float = 0.0) -> Lack:
    return Lack(RES, chips, in_all)


def names(found: object) -> list[str]:
    return [one.name for one in found]  # type: ignore[attr-defined]


# -- the fewest chips --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("chips", "lacking", "chosen"),
    [
        ((16, 16, 16), 32, [16, 16]),
        ((64, 16, 16), 32, [16, 16]),
        ((64, 16), 32, [64]),
        ((64, 32, 16, 8), 8, [8]),
        ((64, 64), 8, [64]),
        ((16, 16), 33, [16, 16]),
        ((16, 16), 0, []),
        ((), 16, []),
    ],
)
def test_cover_frees_no_more_chips_than_necessary(chips: tuple[int, ...], lacking: int, chosen: list[int]) -> None:
    assert sorted(one.chips for one in cover(holders(*chips), lacking)) == sorted(chosen)


def test_cover_takes_requests_before_slices_and_the_first_of_a_size() -> None:
    found = cover([*holders(16, 16), *holders(16, is_request=True, tpu_type="asked")], 32)
    assert sorted(names(found)) == ["asked-0-16", "small-0-16"]


@given(st.lists(st.sampled_from([8, 16, 32, 64]), max_size=8), st.integers(0, 200))
def test_cover_is_enough_minimal_and_without_superfluous_slices(sizes: list[int], lacking: int) -> None:
    chosen = [one.chips for one in cover(holders(*sizes), lacking)]
    sums = {sum(some) for n in range(len(sizes) + 1) for some in combinations(sizes, n)}
    enough = [total for total in sums if total >= lacking]
    if not enough:
        assert sorted(chosen) == sorted(sizes), "all, which are too few"
        return
    assert sum(chosen) == min(enough)


@given(st.lists(st.integers(1, 100), max_size=8), st.integers(1, 300))
def test_cover_of_odd_sizes_has_nothing_superfluous(sizes: list[int], lacking: int) -> None:
    chosen = [one.chips for one in cover(holders(*sizes), lacking)]
    if sum(sizes) >= lacking:
        assert sum(chosen) >= lacking
        assert all(sum(chosen) - one < lacking for one in chosen)


# -- taking ------------------------------------------------------------------------------------------------------------


def test_gang_takes_nothing_if_that_does_not_suffice() -> None:
    shared = SharedChips([], {"small": use(holders(16, 16))})
    assert shared.take("large", lack(48)) is None
    taken = shared.take("large", lack(32))
    assert taken is not None
    assert names(taken.to_go) == ["small-0-16", "small-1-16"]
    assert shared.take("large", lack(16)) is None, "they go once"


def test_gang_takes_nothing_of_its_own_type() -> None:
    shared = SharedChips([], {"small": use(holders(16)), "large": use(holders(64, tpu_type="large"))})
    assert shared.take("large", lack(64)) is None


def test_chips_that_are_being_freed_come_first_and_serve_one_gang() -> None:
    going = holders(16, tpu_type="going")
    shared = SharedChips(going, {"small": use(holders(16, 16))})
    taken = shared.take("large", lack(32))
    assert taken is not None
    assert (names(taken.going), names(taken.to_go)) == (["going-0-16"], ["small-0-16"])
    again = shared.take("large", lack(16))
    assert again is not None
    assert (names(again.going), names(again.to_go)) == ([], ["small-1-16"])


def test_earlier_gang_keeps_idle_slices_and_requests_of_its_type() -> None:
    idle, requests = holders(16, 16), holders(16, 16, is_request=True, tpu_type="small")
    shared = SharedChips([], {"small": use(idle, requests)})
    shared.claim("small", idle=1, coming=1)
    assert shared.take("large", lack(48)) is None
    taken = shared.take("large", lack(32))
    assert taken is not None
    assert [one.is_request for one in taken.to_go] == [True, False]


def test_slices_reserved_for_a_gang_stay() -> None:
    shared = SharedChips([], {"small": use(holders(16, 16))}, frozenset({"small-0-16"}))
    taken = shared.take("large", lack(16))
    assert taken is not None
    assert names(taken.to_go) == ["small-1-16"]
    assert shared.take("large", lack(16)) is None


def test_no_slices_in_use_are_offered_while_idle_ones_or_chips_of_an_earlier_gang_will_suffice() -> None:
    in_use = TypeUse([], 0, [], 0, 2, in_use=holders(16, 16))
    assert SharedChips([], {"small": in_use}).offer("large", lack(16)) is not None
    assert SharedChips([], {"small": in_use}).offer("large", lack(48)) is None, "too few"
    soon = TypeUse([], 0, [], 1, 3, soon=holders(16, tpu_type="soon"), in_use=holders(16, 16))
    assert SharedChips([], {"small": soon}).offer("large", lack(16)) is None, "an idle one suffices soon"
    offer = SharedChips([], {"small": soon}).offer("large", lack(32))
    assert offer is not None
    assert names(offer.slices)[0] == "soon-0-16"
    wide = holders(64, tpu_type="wide")
    shared = SharedChips([], {"small": in_use, "wide": use(wide)})
    assert shared.take("first", lack(8)) is not None
    assert shared.offer("large", lack(16)) is None, "56 of its chips are left over"


def test_least_number_of_a_type_stays() -> None:
    shared = SharedChips([], {"small": use(holders(16, 16, 16), kept=2)})
    assert shared.take("large", lack(32)) is None
    assert shared.take("large", lack(16)) is not None
    assert shared.take("large", lack(16)) is None


def test_slice_idle_for_a_moment_satisfies_claim_of_its_type() -> None:
    """Two are idle, one of them for long enough: the job that waits gets the other."""
    shared = SharedChips([], {"small": use(holders(16), idle_now=2)})
    shared.claim("small", idle=1, coming=0)
    assert shared.take("large", lack(16)) is not None


def test_chips_of_another_source_do_not_count_towards_a_reservation() -> None:
    elsewhere = use(holders(64, source="zone"))
    assert SharedChips([], {"small": elsewhere}).take("large", lack(16)) is None
    taken = SharedChips([], {"small": elsewhere}).take("large", lack(0, in_all=16))
    assert taken is not None, "they do towards the budget"
    assert (taken.chips(), taken.chips(RES)) == (64, 0)


def test_budget_and_reservation_are_both_satisfied() -> None:
    mixed = [*holders(16, 16), *holders(32, source="zone", tpu_type="small")]
    shared = SharedChips([], {"small": use(mixed)})
    taken = shared.take("large", lack(16, in_all=48))
    assert taken is not None
    assert taken.chips(RES) >= 16
    assert taken.chips() >= 48
