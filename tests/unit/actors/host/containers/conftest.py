"""Fixtures for tests of containers."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.containers import StandIn, stand_ins


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[StandIn]:
    """A container engine on this host, called docker."""
    yield from stand_ins(tmp_path)
