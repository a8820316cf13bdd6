"""Fixtures for tests on real Ray clusters."""

import os

os.environ.setdefault("RAY_DEDUP_LOGS", "0")  # read when Ray is imported; tests look at every line

from collections.abc import Iterator
from pathlib import Path

import pytest

from iris_ray import release
from iris_ray.testing import SimulatedCluster
from tests.gangs import Trace


@pytest.fixture(scope="module")
def cluster() -> Iterator[SimulatedCluster]:
    """Three v4-16 slices of two hosts each, for all tests of a module."""
    with SimulatedCluster({"v4-16": 3}, quiet=True) as running:
        yield running
        release()


@pytest.fixture
def trace(tmp_path: Path) -> Trace:
    return Trace(tmp_path)
