"""What a runner's agent sees of processes."""

import asyncio
import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest

from iris_ray.slots.actors.runner_agent import RunnerAgent
from iris_ray.slots.actors.slot_actor import ProcessIdentity

MB = 2**20
TAKES_MEMORY = f"""
import os
if os.fork() == 0:
    held = b"c" * (40 * {MB})
else:
    held = b"p" * (60 * {MB})
print("holds it", flush=True)
input()
"""


@pytest.fixture
def process() -> Iterator[ProcessIdentity]:
    """One that holds 60 MB, and its child 40 MB."""
    with subprocess.Popen([sys.executable, "-c", TAKES_MEMORY], stdin=-1, stdout=-1, text=True) as made:
        assert made.stdout is not None
        for _ in range(2):
            assert made.stdout.readline() == "holds it\n"
        yield ProcessIdentity(made.pid, psutil.Process(made.pid).create_time())
        made.communicate("\n\n")


def test_memory_of_processes_includes_children(process: ProcessIdentity, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("iris_ray.slots.actors.runner_agent.join_task", lambda: None)
    agent = RunnerAgent({})
    used = asyncio.run(agent.memory([process]))
    assert 100 * MB < used < 150 * MB
    gone = ProcessIdentity(process.pid, process.began - 100.0)
    assert asyncio.run(agent.memory([process, gone])) < 150 * MB, "another process has its pid"
