"""A history of a small cluster on paper."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from iris_ray.history.history_file import NAME, Bounds
from tests.support.controller_in_process import bare_cluster
from tests.support.histories import History
from tests.support.worlds import World

__all__ = ["bare_cluster"]


@pytest.fixture
def history(tmp_path: Path) -> History:
    return History(tmp_path / "iris" / NAME, Bounds(days=400, megabytes=100))


@pytest.fixture
def world() -> Iterator[World]:
    """Two v4-16 slices, ``a`` and ``b``. The invariants of its state must hold when the test is over."""
    world = World(*"ab")
    yield world
    world.check()
