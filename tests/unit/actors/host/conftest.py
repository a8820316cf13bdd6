"""Fixtures for tests of one host."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.processes import Child, Make, Nursery


@pytest.fixture
def standby() -> Iterator[subprocess.Popen[bytes]]:
    """A process that waits for a task."""
    process = subprocess.Popen(["sleep", "60"])
    yield process
    process.kill()
    process.wait()


@pytest.fixture
def nursery() -> Iterator[Nursery]:
    nursery = Nursery()
    yield nursery
    nursery.clear()


@pytest.fixture
def make(own_host: Path) -> Iterator[Make]:
    """Starts tasks of this host."""
    children = []

    def make(*args: str) -> Child:
        children.append(Child(*args))
        return children[-1]

    yield make
    for child in children:
        if child.process.returncode is None:
            child.clear()
        for stream in (child.process.stdin, child.process.stdout, child.process.stderr):
            if stream is not None:
                stream.close()
