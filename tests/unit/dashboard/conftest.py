"""A made-up cluster with the real Controller, and what a dashboard knows of it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.controller_in_process import ControllerInProcess


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ControllerInProcess]:
    """Three v4-16 slices of two hosts, and a Controller."""
    with ControllerInProcess(tmp_path, {"v4-16": 3}).installed(monkeypatch) as world:
        world.start_controller()
        yield world
