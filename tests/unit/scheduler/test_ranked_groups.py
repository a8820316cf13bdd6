"""Groups by rank and room, compared with lists that are searched from end to end."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from iris_ray.scheduler import ranked_groups
from iris_ray.scheduler.ranked_groups import Needs, RankedGroups, Room, fits, room_of

AMOUNTS = st.sampled_from([0.0, 0.5, 1.0, 2.0, 4.0, 8.0])
ROOMS = st.dictionaries(st.sampled_from(["CPU", "TPU", "memory"]), AMOUNTS)
NEEDS = st.dictionaries(st.sampled_from(["CPU", "TPU"]), AMOUNTS.filter(bool)).map(lambda needs: tuple(needs.items()))
CHANGES = st.lists(
    st.tuples(st.sampled_from(["add", "remove", "room", "search", "search"]), st.integers(0, 30), ROOMS, NEEDS),
    max_size=60,
)

Rank = tuple[int, str]


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranked_groups, "BLOCK", 3)


def rank_of(number: int) -> Rank:
    return number % 4, f"g{number:02}"


def check(groups: RankedGroups, rooms: dict[Rank, Room], needs: Needs) -> None:
    """Every question gets the answer of a look at all groups."""
    right = [rank for rank in sorted(rooms) if fits(rooms[rank], needs)]
    wrong = {rank for rank in rooms if rank not in right}
    assert groups.count(needs) == len(right)
    assert list(groups.fitting(needs)) == right
    assert set(groups.not_fitting(needs)) == wrong
    lacks = sorted((lack(rooms[rank], needs), rank[-1]) for rank in wrong)
    found = groups.closest(needs, 4)
    assert [amount for amount, _ in found] == [amount for amount, _ in lacks[:4]]
    assert set(found) <= set(lacks)
    assert groups.contents() == ({rank[-1]: room for rank, room in rooms.items()}, set(), sorted(rooms))


def lack(room: Room, needs: Needs) -> float:
    return max(1 - room.get(resource, 0.0) / need for resource, need in needs)


@given(st.dictionaries(st.integers(0, 30), ROOMS, max_size=20), CHANGES)
def test_searches_find_what_a_look_at_all_groups_finds(
    first: dict[int, Room], changes: Sequence[tuple[str, int, Room, Needs]]
) -> None:
    rooms = {rank_of(number): room for number, room in first.items()}
    groups = RankedGroups()
    groups.fill((rank, room, False) for rank, room in rooms.items())
    for what, number, room, needs in changes:
        rank = rank_of(number)
        if what == "search":
            check(groups, rooms, needs)
        elif what == "add" and rank not in rooms:
            groups.add(rank, room)
            rooms[rank] = room
        elif what == "remove" and rank in rooms:
            groups.remove(rank)
            del rooms[rank]
        elif what == "room" and rank in rooms:
            groups.change_room(rank, room)
            rooms[rank] = room
    check(groups, rooms, (("CPU", 1.0),))


def test_room_of_whole_group_is_least_of_members() -> None:
    assert room_of([{"CPU": 2.0, "TPU": 4.0}, {"CPU": 3.0}], 2) == ({"CPU": 2.0, "TPU": 0.0}, False)


def test_room_of_partial_group_is_that_of_some_member() -> None:
    assert room_of([{"CPU": 2.0, "TPU": 4.0}, {"CPU": 3.0}], 1) == ({"CPU": 3.0, "TPU": 4.0}, True)


def test_room_of_equal_members_is_that_of_one_of_them() -> None:
    assert room_of([{"CPU": 2.0}, {"CPU": 2.0}], 1) == ({"CPU": 2.0}, False)
