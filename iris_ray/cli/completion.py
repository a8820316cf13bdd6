"""What shells complete besides commands and options: TPU types, and what is in the cluster if it answers at once."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import click

from iris_ray.cli.options import address_given
from iris_ray.cli.script import is_tpu_type
from iris_ray.model.topology import TPU_GENERATIONS

Completion = Callable[[click.Context, click.Parameter, str], list[str]]

PATIENCE_S = 2.0
"""Of somebody who has pressed the tab key; a second of it passes before a new process has met a cluster."""


def tpu_types(_: click.Context, __: click.Parameter, begun: str) -> list[str]:
    """Those of our rules, in powers of two."""
    names = (f"{generation}-{2**power}" for generation in TPU_GENERATIONS for power in range(14))
    return [name for name in names if name.startswith(begun) and is_tpu_type(name)]


def _of_cluster(field: str, *command: str) -> Completion:
    """One field of what a listing command finds; nothing if that fails or takes long."""

    def complete(context: click.Context, _: click.Parameter, begun: str) -> list[str]:
        names = [str(found[field]) for found in _listed(context, command)]
        return sorted({name for name in names if name.startswith(begun)})

    return complete


def _listed(context: click.Context, command: tuple[str, ...]) -> list[dict[str, Any]]:
    """In a process of its own, so that a cluster that does not answer can be left."""
    asking = {name: value for name, value in os.environ.items() if name != "_IRIS_RAY_COMPLETE"}
    address = address_given(context)
    if address is not None:
        asking["RAY_ADDRESS"] = address
    try:
        done = subprocess.run(
            [sys.executable, "-m", "iris_ray", *command, "--json"],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            env=asking, timeout=PATIENCE_S, check=True,
        )  # fmt: skip
        listed: list[dict[str, Any]] = json.loads(done.stdout)
    except (OSError, ValueError, subprocess.SubprocessError):
        return []
    return listed


all_jobs = _of_cluster("job_id", "ls", "--all")
unfinished_jobs = _of_cluster("job_id", "ls")
slices = _of_cluster("slice", "workers")
