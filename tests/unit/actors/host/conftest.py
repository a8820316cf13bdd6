"""Fixtures for tests of one host."""

from collections.abc import Iterator

import pytest

from tests.support.processes import Nursery


@pytest.fixture
def nursery() -> Iterator[Nursery]:
    nursery = Nursery()
    yield nursery
    nursery.clear()
