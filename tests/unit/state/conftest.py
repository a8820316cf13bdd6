"""The small cluster on paper that every test of the state works on."""

from collections.abc import Iterator

import pytest

from tests.support.worlds import World


@pytest.fixture
def slices() -> str:
    """The names of the v4-16 slices, of two hosts each, that `world` has. A module that needs others overrides it."""
    return "ab"


@pytest.fixture
def world(slices: str) -> Iterator[World]:
    """A world with some slices. Its invariants must hold when the test is over."""
    world = World()
    for name in slices:
        world.add_slice(name)
    yield world
    world.check()
