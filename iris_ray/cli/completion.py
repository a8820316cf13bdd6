"""Shell completion of TPU types, and of jobs and slices if the cluster answers at once."""

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import click

from iris_ray.cli.address import address_given
from iris_ray.cli.script import is_tpu_type
from iris_ray.model.topology import TPU_GENERATIONS

Completion = Callable[[click.Context, click.Parameter, str], list[str]]

PATIENCE_S = 2.0
"""The time limit of a completion. A new process needs about a second to connect to a cluster."""


def tpu_types(_: click.Context, __: click.Parameter, begun: str) -> list[str]:
    """Return the TPU types that begin so, with powers of two as sizes."""
    names = (f"{generation}-{2**power}" for generation in TPU_GENERATIONS for power in range(14))
    return [name for name in names if name.startswith(begun) and is_tpu_type(name)]


def _of_cluster(field: str, *command: str) -> Completion:
    """Return a completion by one field of a listing command's result; it is empty if the command fails or is slow.

    Strangers choose these names. One that a shell would read as anything but a word is not offered.
    """

    def complete(context: click.Context, _: click.Parameter, begun: str) -> list[str]:
        names = [str(found[field]) for found in _listed(context, command)]
        return sorted({name for name in names if name.startswith(begun) and shlex.quote(name) == name})

    return complete


def _listed(context: click.Context, command: tuple[str, ...]) -> list[dict[str, Any]]:
    """Run a listing command in a process of its own, so that it can be ended if the cluster does not answer."""
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
slices = _of_cluster("slice", "host", "ls")
