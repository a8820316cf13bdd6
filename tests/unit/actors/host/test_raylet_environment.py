"""What a process reads of the environment that its raylet has."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

START = "import os, subprocess, sys; del os.environ['OF_THE_HOST']; sys.exit(subprocess.call(sys.argv[1:]))"
"""Starts a program without a variable of its own."""
READ = (
    "from iris_ray.actors.host.task_environment import raylet_environment;"
    "print(raylet_environment().get('OF_THE_HOST'))"
)


@pytest.mark.parametrize("between", [[], [sys.executable, "-c", START.replace("del os.environ['OF_THE_HOST']; ", "")]])
def test_worker_finds_raylet_behind_wrapper_program(tmp_path: Path, between: list[str]) -> None:
    """A runtime environment may have Ray start its workers by ``uv run``."""
    raylet = tmp_path / "raylet"
    raylet.symlink_to(os.path.realpath(sys.executable))
    command = [str(raylet), "-c", START, *between, sys.executable, "-c", READ]
    environ = {**os.environ, "OF_THE_HOST": "chips"}
    assert subprocess.run(command, env=environ, capture_output=True, text=True, check=True).stdout == "chips\n"
