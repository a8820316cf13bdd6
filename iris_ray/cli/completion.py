"""Shell completion, of TPU types, and of jobs and slices if the cluster answers at once. Click does the rest."""

import os
import shlex
import subprocess
import sys
from collections.abc import Callable

import click
from click.shell_completion import get_completion_class

from iris_ray.cli.address import address_given
from iris_ray.cli.script import is_tpu_type
from iris_ray.model.topology import TPU_GENERATIONS

Completion = Callable[[click.Context, click.Parameter, str], list[str]]

VARIABLE = "_IRIS_RAY_COMPLETE"
"""The variable by which the shell asks for completions."""
PATIENCE_S = 2.0
"""The time limit of a completion. A new process needs about a second to connect to a cluster."""


def tpu_types(_: click.Context, __: click.Parameter, begun: str) -> list[str]:
    """Return the TPU types that begin so, with powers of two as sizes."""
    names = (f"{generation}-{2**power}" for generation in TPU_GENERATIONS for power in range(14))
    return [name for name in names if name.startswith(begun) and is_tpu_type(name)]


def _of_cluster(*command: str) -> Completion:
    """Return a completion by the ids that a listing command prints; it is empty if the command fails or is slow.

    Strangers choose these names. One that a shell would read as anything but a word is not offered.
    """

    def complete(context: click.Context, _: click.Parameter, begun: str) -> list[str]:
        names = _listed(context, command)
        return sorted({name for name in names if name.startswith(begun) and shlex.quote(name) == name})

    return complete


def _listed(context: click.Context, command: tuple[str, ...]) -> list[str]:
    """Run a listing command in a process of its own, so that it can be ended if the cluster does not answer."""
    asking = {name: value for name, value in os.environ.items() if name != VARIABLE}
    address = address_given(context)
    if address is not None:
        asking["RAY_ADDRESS"] = address
    try:
        done = subprocess.run(
            [sys.executable, "-m", "iris_ray", *command, "-q"],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            env=asking, timeout=PATIENCE_S, check=True, text=True,
        )  # fmt: skip
    except (OSError, ValueError, subprocess.SubprocessError):
        return []
    return done.stdout.split()


all_jobs = _of_cluster("ls", "--all")
unfinished_jobs = _of_cluster("ls")
slices = _of_cluster("host", "ls")


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the script with which a shell completes commands, options, TPU types, jobs and slices.

    \b
      eval "$(iris-ray completion bash)"      in ~/.bashrc; zsh likewise in ~/.zshrc
      iris-ray completion fish | source       in ~/.config/fish/config.fish

    Jobs and slices are those of the cluster that --address or RAY_ADDRESS names, or of the one on this machine. They
    are completed if it answers within two seconds.
    """
    from iris_ray.cli.main import main

    kind = get_completion_class(shell)
    assert kind is not None
    click.echo(kind(main, {}, "iris-ray", VARIABLE).source())
