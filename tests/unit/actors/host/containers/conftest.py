"""Fixtures for tests of containers."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.containers import StandIn, a_stand_in


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[StandIn]:
    """A container engine on this host, called docker."""
    with a_stand_in(tmp_path) as engine:
        yield engine
