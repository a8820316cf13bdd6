"""Limits that nobody can use up alone."""

import asyncio

import pytest

from iris_ray.fair_limits import Places, Turns


def test_owner_that_has_most_loses_its_oldest() -> None:
    places: Places[str] = Places(4)
    assert [places.add(thing, thing[0]) for thing in ("b1", "a1", "a2", "c1")] == [None] * 4
    assert [places.add(thing, thing[0]) for thing in ("a3", "b2", "d1")] == ["a1", "a2", "b1"]
    assert set(places) == {"a3", "b2", "c1", "d1"}
    for thing in ("a3", "a3", "nobody's"):
        places.remove(thing)
    assert places.add("e1", "e") is None
    assert [places.take_one() for _ in range(5)][4:] == [None]
    assert len(places) == 0


async def test_owner_holds_no_more_turns_than_it_leaves_free() -> None:
    turns, came, ends = Turns(8), list[str](), asyncio.Event()

    async def hold(name: str) -> None:
        async with turns.turn(name[0]):
            came.append(name)
            await ends.wait()

    names = [f"a{n}" for n in range(9)] + [f"b{n}" for n in range(9)] + ["c0"]
    requests = [asyncio.ensure_future(hold(name)) for name in names]
    await asyncio.sleep(0)
    assert came == ["a0", "a1", "a2", "a3", "b0", "b1", "c0"]
    ends.set()
    async with asyncio.timeout(5):
        await asyncio.gather(*requests)
    assert sorted(came) == sorted(names)


async def test_turn_of_one_who_leaves_goes_to_the_next() -> None:
    turns = Turns()
    async with turns.turn("a"):
        leaves = asyncio.ensure_future(turns.turn("b").__aenter__())
        waits = asyncio.ensure_future(turns.turn("c").__aenter__())
        await asyncio.sleep(0)
        leaves.cancel()
    async with asyncio.timeout(5):
        await waits
    with pytest.raises(asyncio.CancelledError):
        await leaves
