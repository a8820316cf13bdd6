"""The small cluster on paper that most tests of the scheduler work on."""

from collections.abc import Iterator

import pytest

from tests.support.worlds import World


@pytest.fixture
def world() -> Iterator[World]:
    """An empty cluster, unless a module has its own. Its invariants must hold when the test is over."""
    world = World()
    yield world
    world.check()
