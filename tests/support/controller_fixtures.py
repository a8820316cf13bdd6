"""Fixtures: a cluster in this process, with the real Controller. A conftest.py that imports them offers them."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.controller_in_process import ControllerInProcess


@pytest.fixture
def bare_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ControllerInProcess]:
    """Three v4-16 slices of two hosts each, and no Controller yet."""
    (tmp_path / "hosts").mkdir()
    with ControllerInProcess(tmp_path / "hosts", {"v4-16": 3}).installed(monkeypatch) as world:
        yield world


@pytest.fixture
def world(bare_cluster: ControllerInProcess) -> ControllerInProcess:
    """The same, and its Controller runs."""
    bare_cluster.start_controller()
    return bare_cluster
