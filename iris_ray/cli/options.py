"""The options that several commands share."""

import functools
import math
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import click

from iris_ray.cli.address import Command
from iris_ray.cli.completion import tpu_types
from iris_ray.errors import InvalidRequestError, InvalidSliceCountError
from iris_ray.model.constraints import Constraint
from iris_ray.model.job_spec import EXIT_GRACE_S, MAX_RETRIES_FAILURE, MAX_RETRIES_PREEMPTION, PriorityBand


def json_option(command: Command) -> Command:
    return click.option("--json", "as_json", is_flag=True, help="Print JSON, for machines.")(command)


def yes_option(command: Command) -> Command:
    return click.option("--yes", "-y", is_flag=True, help="Don't ask.")(command)


def reason_option(command: Command) -> Command:
    return click.option("--reason", help="Why, for those who ask.")(command)


class FiniteRange(click.FloatRange):
    """A range of numbers without infinity, and without NaN, which click finds in every range."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{value} is not finite.", param, ctx)
        return number


# -- what describes a job ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class JobFlags:
    """The options of a job, which ``run`` and ``submit`` share.

    Attributes:
        tpu_type: such as ``v4-32``; None if not given.
        num_slices: how many slices, or the counts that it can use; None if not given.
        stall_timeout, exit_grace: in seconds.
        env: environment variables of the tasks.
        working_dir: the directory that is sent to the hosts.
    """

    tpu_type: str | None
    num_slices: int | list[int] | None
    name: str | None
    priority: PriorityBand
    max_retries_failure: int
    max_retries_preemption: int
    spares: int
    stall_timeout: float | None
    exit_grace: float
    constraints: tuple[Constraint, ...]
    preferences: tuple[Constraint, ...]
    tolerations: tuple[str, ...]
    scheduling_timeout: float | None
    env: dict[str, str]
    working_dir: str | None

    def for_job(self) -> dict[str, Any]:
        """Return the keyword arguments that every way to submit a job takes."""
        return {
            "name": self.name,
            "priority": self.priority,
            "max_retries_failure": self.max_retries_failure,
            "max_retries_preemption": self.max_retries_preemption,
            "spares": self.spares,
            "stall_timeout": self.stall_timeout,
            "exit_grace": self.exit_grace,
            "constraints": self.constraints,
            "preferences": self.preferences,
            "tolerations": self.tolerations,
            "scheduling_timeout": self.scheduling_timeout,
        }

    def for_ray(self) -> dict[str, Any]:
        """Return the arguments of ``ray.init`` that send the working directory to the hosts."""
        return {"runtime_env": {"working_dir": self.working_dir}} if self.working_dir else {}


def parse_num_slices(_: click.Context, __: click.Parameter, value: str | None) -> int | list[int] | None:
    """Return 2 for ``"2"`` and [2, 4] for ``"2,4"``."""
    if value is None:
        return None
    parts = [part.strip() for part in value.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise InvalidSliceCountError(f"--num-slices is {value!r}; give a number, or several such as 2,4")
    return int(parts[0]) if len(parts) == 1 else [int(part) for part in parts]


def environment_variables(_: click.Context, __: click.Parameter, values: Sequence[str]) -> dict[str, str]:
    """Return the variables given as ``NAME=VALUE``, or as ``NAME`` for its value here."""
    found = {}
    for item in values:
        name, equals, value = item.partition("=")
        if not re.fullmatch(r"[A-Za-z_]\w*", name):
            raise InvalidRequestError(f"--env {name}: no name of a variable; give NAME=VALUE, or NAME to pass yours on")
        if not equals and name not in os.environ:
            raise InvalidRequestError(f"--env {name}: it is not set here; give {name}=VALUE")
        found[name] = value if equals else os.environ[name]
    return found


def conditions(_: click.Context, __: click.Parameter, values: Sequence[str]) -> tuple[Constraint, ...]:
    return tuple(map(Constraint.parse, values))


def priority_band(_: click.Context, __: click.Parameter, value: str) -> PriorityBand:
    return PriorityBand[value.upper()]


_JOB_OPTIONS = (
    click.option("--tpu", "tpu_type", metavar="TPU_TYPE", shell_complete=tpu_types,
                 help="On slices of this type."),
    click.option("--num-slices", metavar="N[,N...]", callback=parse_num_slices,
                 help="How many slices; 2,4 means 4 if they are free now, else 2.  [default: 1]"),
    click.option("--name", metavar="NAME", help="What to call the job.  [default: the script's or function's name]"),
    click.option("--priority", type=click.Choice([band.name.lower() for band in PriorityBand]),
                 default=PriorityBand.INTERACTIVE.name.lower(), show_default=True, callback=priority_band,
                 help="Jobs of a higher band go first."),
    click.option("--max-retries-failure", type=int, default=MAX_RETRIES_FAILURE, show_default=True, metavar="N",
                 help="Further attempts after errors and crashes; 0 while you develop."),
    click.option("--max-retries-preemption", type=int, default=MAX_RETRIES_PREEMPTION, show_default=True, metavar="N",
                 help="Further attempts after lost hosts."),
    click.option("--spares", type=click.IntRange(0), default=0, show_default=True, metavar="N",
                 help="Slices to hold ready, each to replace a lost one."),
    click.option("--stall-timeout", type=click.FloatRange(0, min_open=True), metavar="SECONDS",
                 help="Start again if no task calls iris_ray.heartbeat() for so long."),
    click.option("--exit-grace", type=click.FloatRange(0), default=EXIT_GRACE_S, show_default=True, metavar="SECONDS",
                 help="For threads and exit handlers of a task after its end, such as an upload."),
    click.option("--constraint", "constraints", multiple=True, callback=conditions, metavar="CONDITION",
                 help="What every host must satisfy: zone=us-a, 'gen>=4', 'zone in (a, b)', key, '!key'; repeatable."),
    click.option("--prefer", "preferences", multiple=True, callback=conditions, metavar="CONDITION",
                 help="What is better satisfied; may be repeated."),
    click.option("--tolerate", "tolerations", multiple=True, metavar="NAME",
                 help="Also where this taint keeps others away; may be repeated."),
    click.option("--scheduling-timeout", type=float, metavar="SECONDS",
                 help="Give the job up if no task of it has run by then.  [default: never, and so are 0 and less]"),
    click.option("--env", "-e", multiple=True, callback=environment_variables, metavar="NAME[=VALUE]",
                 help="An environment variable of the tasks; may be repeated."),
    click.option("--working-dir", type=click.Path(exists=True, file_okay=False), metavar="DIR",
                 help="Send this directory to the hosts, and run there."),
)  # fmt: skip


def job_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options of a job, as its argument ``options``."""

    @functools.wraps(command)
    def with_options(**given: Any) -> None:
        options = JobFlags(**{field.name: given.pop(field.name) for field in fields(JobFlags)})
        command(options=options, **given)

    for option in reversed(_JOB_OPTIONS):
        with_options = option(with_options)
    return with_options


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
    """Return whether the script's arguments came after ``--``, so that they can't be meant for us."""
    return bool(click.get_current_context().meta[__name__])
