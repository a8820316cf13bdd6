"""The options of a job, which ``run`` and ``submit`` share."""

import os
import re
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import click

from iris_ray.cli.completion import tpu_types
from iris_ray.errors import InvalidRequestError, InvalidSliceCountError
from iris_ray.model.jobs import MAX_RETRIES_FAILURE, MAX_RETRIES_PREEMPTION, PriorityBand

Command = TypeVar("Command", bound=Callable[..., Any])


def slice_counts_option(_: click.Context, __: click.Parameter, value: str | None) -> int | list[int] | None:
    """``"2"`` is 2, ``"2,4"`` is [2, 4]."""
    if value is None:
        return None
    parts = [part.strip() for part in value.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise InvalidSliceCountError(f"--num-slices is {value!r}; give a number, or several such as 2,4")
    return int(parts[0]) if len(parts) == 1 else [int(part) for part in parts]


def environment_option(_: click.Context, __: click.Parameter, values: Sequence[str]) -> dict[str, str]:
    """``NAME=VALUE``, or ``NAME`` for what it is here."""
    found = {}
    for item in values:
        name, equals, value = item.partition("=")
        if not re.fullmatch(r"[A-Za-z_]\w*", name):
            raise InvalidRequestError(f"--env {name}: no name of a variable; give NAME=VALUE, or NAME to pass yours on")
        if not equals and name not in os.environ:
            raise InvalidRequestError(f"--env {name}: it is not set here; give {name}=VALUE")
        found[name] = value if equals else os.environ[name]
    return found


def priority_option(_: click.Context, __: click.Parameter, value: str) -> PriorityBand:
    return PriorityBand[value.upper()]


_OPTIONS = (
    click.option("--tpu", "tpu_type", metavar="TPU_TYPE", shell_complete=tpu_types,
                 help="On slices of this type."),
    click.option("--num-slices", metavar="N[,N...]", callback=slice_counts_option,
                 help="How many slices; 2,4 means 4 if they are free now, else 2.  [default: 1]"),
    click.option("--name", metavar="NAME", help="What to call the job.  [default: the script's or function's name]"),
    click.option("--priority", type=click.Choice([band.name.lower() for band in PriorityBand]),
                 default=PriorityBand.INTERACTIVE.name.lower(), show_default=True, callback=priority_option,
                 help="Which jobs it goes before."),
    click.option("--max-retries-failure", type=int, default=MAX_RETRIES_FAILURE, show_default=True, metavar="N",
                 help="Further attempts after errors and crashes; 0 while you develop."),
    click.option("--max-retries-preemption", type=int, default=MAX_RETRIES_PREEMPTION, show_default=True, metavar="N",
                 help="Further attempts after lost hosts."),
    click.option("--spares", type=click.IntRange(0), default=0, show_default=True, metavar="N",
                 help="Slices to hold ready, each to take the place of a lost one."),
    click.option("--stall-timeout", type=click.FloatRange(0, min_open=True), metavar="SECONDS",
                 help="Start again if no task calls iris_ray.heartbeat() for so long."),
    click.option("--env", "-e", multiple=True, callback=environment_option, metavar="NAME[=VALUE]",
                 help="An environment variable of the tasks; may be repeated."),
    click.option("--working-dir", type=click.Path(exists=True, file_okay=False), metavar="DIR",
                 help="Send this directory to the hosts, and run there."),
)  # fmt: skip


def job_options(command: Command) -> Command:
    """Gives a command ``tpu_type``, ``num_slices``, ``name``, ``priority``, two budgets, ``spares``, …"""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def runtime_environment(working_dir: str | None) -> dict[str, Any]:
    """What ``ray.init`` has to know so that the directory travels."""
    return {"runtime_env": {"working_dir": working_dir}} if working_dir else {}


class ScriptCommand(click.Command):
    """Says where the script's own options go."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.meta[__name__] = "--" in args
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            hint = f"{error.message} If it is the script's own, write it after --: ... -- {error.option_name} ..."
            raise click.NoSuchOption(error.option_name, hint, error.possibilities, ctx) from None


def marked_arguments() -> bool:
    """Whether the script's arguments came after ``--``, so that they can't be meant for us."""
    return bool(click.get_current_context().meta[__name__])
