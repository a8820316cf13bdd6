"""Runs `with_jax.py` in a process of its own: JAX starts threads, and tests that fork processes can't have them."""

import os
import subprocess
import sys
from pathlib import Path


def test_memory_checkpointer_does_what_with_jax_says() -> None:
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        str(Path(__file__).with_name("with_jax.py")),
    ]
    environ = os.environ | {"JAX_PLATFORMS": "cpu"}
    environ.pop("PYTEST_ADDOPTS", None)
    run = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=500)
    assert run.returncode == 0, run.stdout + run.stderr
    assert " passed" in run.stdout
