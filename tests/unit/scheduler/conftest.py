"""The small cluster on paper that most tests of the scheduler work on."""

from collections.abc import Iterator

import pytest

from tests.support.worlds import World, checked


@pytest.fixture(autouse=True)
def _checked(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    yield from checked(monkeypatch)


@pytest.fixture
def world() -> World:
    """An empty cluster, unless a module has its own."""
    return World()
