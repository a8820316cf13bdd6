"""Fixtures for tests on real Ray clusters. They import Ray when they are used: the core is tested without it."""

import io
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from iris_ray.testing import SimulatedCluster
    from tests.support.gangs import Trace

os.environ.setdefault("RAY_DEDUP_LOGS", "0")  # read when Ray is imported; tests look at every line
os.environ.setdefault("IRIS_RAY_HOST_SILENCE_S", "10")  # machines that run tests are often busy with something else

# Whoever runs the tests in the background may ignore these, and every process that a test starts would, too.
for _number, _default in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, _default)


@pytest.fixture(scope="module")
def cluster() -> Iterator["SimulatedCluster"]:
    """Three v4-16 slices of two hosts each, for all tests of a module."""
    from iris_ray import release
    from iris_ray.testing import SimulatedCluster

    with SimulatedCluster({"v4-16": 3}, quiet=True) as running:
        yield running
        release()


@pytest.fixture
def trace(tmp_path: Path) -> "Trace":
    from tests.support.gangs import Trace

    return Trace(tmp_path)


class Terminal:
    """Keeps what this process prints, the lines that Ray brings from other processes included.

    Instead of capsys and capfd on a cluster: they close their files at the end of a test, and Ray's thread that prints
    what tasks say dies if it writes to a closed one; no later test would see a line.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch
        self._printed = io.StringIO()

    def listen(self) -> None:
        """To be called by the test: between a fixture and its test pytest sets the streams to its own."""
        self._monkeypatch.setattr(sys, "stdout", self._printed)
        self._monkeypatch.setattr(sys, "stderr", self._printed)

    @property
    def lines(self) -> list[str]:
        return self._printed.getvalue().splitlines()


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    return Terminal(monkeypatch)
