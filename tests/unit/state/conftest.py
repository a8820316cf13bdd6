"""The small cluster on paper that every test of the state works on."""

from collections.abc import Iterator

import pytest

from tests.support.worlds import World, checked


@pytest.fixture(autouse=True)
def _checked(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    yield from checked(monkeypatch)


@pytest.fixture
def slices() -> str:
    """The names of the v4-16 slices, of two hosts each, that `world` has. A module that needs others overrides it."""
    return "ab"


@pytest.fixture
def world(slices: str) -> World:
    return World(*slices)
