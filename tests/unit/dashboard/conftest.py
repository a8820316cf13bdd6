"""A made-up cluster with the real Controller, for tests of the dashboard."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.controller_in_process import ControllerInProcess


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ControllerInProcess]:
    """Three v4-16 slices of two hosts, and no Controller yet."""
    (tmp_path / "hosts").mkdir()
    with ControllerInProcess(tmp_path / "hosts", {"v4-16": 3}).installed(monkeypatch) as world:
        yield world


@pytest.fixture
def world(bare: ControllerInProcess) -> ControllerInProcess:
    """The same, and its Controller runs."""
    bare.start_controller()
    return bare
