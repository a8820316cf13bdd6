"""The options that several commands share."""

import contextlib
import functools
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import click

from iris_ray.actors.protocol.services import module_of
from iris_ray.cli.address import Command
from iris_ray.cli.completion import tpu_types
from iris_ray.cli.times import Duration
from iris_ray.errors import InvalidFunctionError, InvalidRequestError, InvalidSliceCountError
from iris_ray.model.checks import Check, Holds, ListOf, OneOf, Seconds, Whole, is_job_id, of_text, require, shown
from iris_ray.model.constraints import Constraint
from iris_ray.model.durations import written_duration
from iris_ray.model.options import SUCCEEDED, After, Destinations, Option, PriorityBand, Secrets, options_of
from iris_ray.model.secret import SecretValue


def yes_option(command: Command) -> Command:
    return click.option("--yes", "-y", is_flag=True, help="Don't ask.")(command)


def reason_option(command: Command) -> Command:
    return click.option("--reason", help="The reason, which other users see.")(command)


TARGET_HELP = (
    "SLICE|HOST is the name of a slice that `iris-ray host ls` shows, or a host as SLICE/NUMBER, by its IP address or"
    " node id."
)
"""The epilog of commands for a slice or host."""


def tpu_option(
    what: str = "On slices of this type.", *, required: bool = False, multiple: bool = False
) -> Callable[[Command], Command]:
    """Return a decorator for ``--tpu``, the command's argument ``tpu_type``, or ``tpu_types`` if ``multiple``."""
    name = "tpu_types" if multiple else "tpu_type"
    return click.option("--tpu", name, metavar="TPU_TYPE", required=required, multiple=multiple, help=what,
                        shell_complete=tpu_types)  # fmt: skip


# -- what describes a job ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class JobFlags:
    """What ``run`` and ``submit`` are told about a job.

    Attributes:
        tpu_type: such as ``v4-32``; None if not given.
        num_slices: how many slices, or the counts that it can use; None if not given.
        env: environment variables of the tasks.
        working_dir: the directory that is sent to the hosts.
        options: the options of the table in `model/options.py` that have a flag.
    """

    tpu_type: str | None
    num_slices: int | list[int] | None
    name: str | None
    env: dict[str, str]
    working_dir: str | None
    options: dict[str, Any]

    def require_stored_secrets(self) -> None:
        """Refuse secrets whose values are here, for a job that is submitted on the head.

        Raises:
            InvalidRequestError: names the first one.
        """
        for name, secret in (self.options["secrets"] or {}).items():
            if not secret.stored:
                raise InvalidRequestError(
                    f"the value of {name} does not go through Ray's job API, which keeps and shows what it is given;"
                    f" have an operator set it in the cluster's store (iris-ray cluster secrets set {name}), and give"
                    f" --secret {name}=store:"
                )


_DIGITS = 10
"""A number of slices has fewer digits; Python refuses to read some thousands."""


def parse_num_slices(_: click.Context, __: click.Parameter, value: str | None) -> int | list[int] | None:
    """Return 2 for ``"2"`` and [2, 4] for ``"2,4"``."""
    if value is None:
        return None
    parts = [part.strip() for part in value.split(",")]
    if not all(part.isdecimal() and len(part) < _DIGITS for part in parts):
        raise InvalidSliceCountError(f"--num-slices is {value!r}; give a number, or several such as 2,4")
    return int(parts[0]) if len(parts) == 1 else [int(part) for part in parts]


def environment_variables(_: click.Context, __: click.Parameter, values: Sequence[str]) -> dict[str, str]:
    """Return the variables given as ``NAME=VALUE``, or as ``NAME`` for its value here."""
    found = {}
    for item in values:
        name, equals, value = item.partition("=")
        if not re.fullmatch(r"[A-Za-z_]\w*", name):
            raise InvalidRequestError(
                f"--env {name or '=…'}: no name of a variable; give NAME=VALUE, or NAME to pass yours on"
            )
        if not equals and name not in os.environ:
            raise InvalidRequestError(f"--env {name}: it is not set here; give {name}=VALUE")
        found[name] = value if equals else os.environ[name]
    return found


def secrets(_: click.Context, __: click.Parameter, values: Sequence[str]) -> dict[str, SecretValue]:
    """Return the secrets given as ``NAME=FILE``, ``NAME=store:`` or as ``NAME`` for the value of that variable here."""
    return {item.partition("=")[0]: _secret(*item.partition("=")) for item in values}


def _secret(name: str, equals: str, source: str) -> SecretValue:
    if not name.isidentifier():  # the text may be the secret itself, so it is not shown
        raise InvalidRequestError(
            "--secret does not begin with the name of a variable, which has letters, digits and '_'; give NAME=FILE,"
            " NAME=store:KEY, or NAME to pass on the value of that variable here"
        )
    kind = module_of("secrets", "client").Secret
    if source.startswith(FROM_STORE):
        found: SecretValue = kind.from_store(source.removeprefix(FROM_STORE) or name)
    else:
        found = kind.from_file(source) if equals else kind.from_env(name)
    return found


FROM_STORE = "store:"
"""Begins the source of a secret that is in the cluster's store."""


def predecessors(_: click.Context, __: click.Parameter, values: Sequence[str]) -> dict[str, str]:
    """Return what other jobs must have done, given as ``JOB``, or ``JOB=ended``."""
    return dict(map(_predecessor, values))


def _predecessor(item: str) -> tuple[str, str]:
    job_id, equals, word = item.partition("=")
    if not is_job_id(job_id):
        raise InvalidRequestError(f"--after {shown(item)} does not begin with the id of a job; give {_AFTER_FORM}")
    if equals and word not in After.words:
        raise InvalidRequestError(f"--after {shown(item)}: {shown(word)} is not a condition; give {_AFTER_FORM}")
    return job_id, word if equals else SUCCEEDED


_AFTER_FORM = f"JOB (which means JOB={SUCCEEDED}), {' or '.join(f'JOB={word}' for word in After.words[1:])}"


def destinations(_: click.Context, __: click.Parameter, values: Sequence[str]) -> tuple[str, ...] | None:
    """Return destinations of notifications; None, which stands for the variable, if there are none."""
    for value in values:
        module_of("notify", "destination").parse_destination(value)
    return tuple(values) or None


def checked(check: Check, _: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    """Return the text of an option, or raise InvalidRequestError, which names the flag."""
    if value is not None:
        require(parameter.opts[0], value, check)
    return value


def whole_number(_: click.Context, __: click.Parameter, value: str | None) -> int | None:
    return None if value is None else int(value)


def conditions(_: click.Context, __: click.Parameter, values: Sequence[str]) -> tuple[Constraint, ...]:
    return tuple(map(Constraint.parse, values))


def priority_band(_: click.Context, __: click.Parameter, value: str | None) -> PriorityBand | None:
    return None if value is None else PriorityBand[value.upper()]


ENV = click.option("--env", "-e", multiple=True, callback=environment_variables, metavar="NAME[=VALUE]",
                   help="An environment variable of the tasks; may be repeated.")  # fmt: skip
_BEFORE = {
    "tpu_type": tpu_option(),
    "num_slices": click.option("--num-slices", metavar="N[,N...]", callback=parse_num_slices,
                               help="How many slices; 2,4 means 4 if they are free now, else 2.  [default: 1]"),
    "name": click.option("--name", metavar="NAME",
                         help="What to call the job.  [default: the script's or function's name]"),
}  # fmt: skip
_AFTER = {
    "env": ENV,
    "working_dir": click.option("--working-dir", type=click.Path(exists=True, file_okay=False), metavar="DIR",
                                help="Send this directory to the hosts, and run there."),
}  # fmt: skip


def job_options(group: type, but: Collection[str] = ()) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that gives a command the flags of a job, as its argument ``flags``, a `JobFlags`.

    Args:
        group: the `TypedDict` of the options that the command takes; those that have a flag get it.
        but: options and other flags that it does not take.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        options = {name: option for name, option in options_of(group).items() if option.flag and name not in but}

        @functools.wraps(command)
        def with_flags(**given: Any) -> None:
            own = {field.name: given.pop(field.name, None) for field in fields(JobFlags) if field.name != "options"}
            chosen = JobFlags(**own, options={name: given.pop(name) for name in options})
            with _flags_named(click.get_current_context().command):
                command(flags=chosen, **given)

        table = {name: _flag(name, option, f"iris-ray {command.__name__}") for name, option in options.items()}
        for name, flag in reversed((_BEFORE | table | _AFTER).items()):
            with_flags = with_flags if name in but else flag(with_flags)
        return with_flags

    return decorate


@contextlib.contextmanager
def _flags_named(command: click.Command) -> Iterator[None]:
    """Have refusals of a request, which speak of options as in Python, name the flags of a command."""
    flags = {one.name: max(one.opts, key=len) for one in command.params if isinstance(one, click.Option) and one.name}
    try:
        yield
    except InvalidFunctionError:  # speaks of the function's own parameters
        raise
    except InvalidRequestError as error:
        error.args = (in_flags(str(error), flags), *error.args[1:])
        raise


def in_flags(message: str, flags: Mapping[str, str]) -> str:
    """Return a message with the flags of options in place of their names in Python.

    A name of several words is one wherever it stands. One of a single word, such as ``name``, is one before "=", or at
    the beginning of the message.
    """
    several, each = "|".join(name for name in flags if "_" in name) or "(?!)", "|".join(flags)
    begins = rf"^(?:{each})(?= (?:is|has|holds|names|must|can't|needs)\b)"
    pattern = rf"(?<![\w.$/'\"-])(?:(?:{several})\b(?![\w(/]|\.\w)|(?:{each})(?==)|{begins})"
    return re.sub(pattern, lambda found: flags[found[0]], message)


def _flag(name: str, option: Option, command: str) -> Callable[[Command], Command]:
    """Return the flag of an option. Its type follows from the option's check."""
    default = option.default_of(command)
    how: dict[str, Any] = {"metavar": name.upper()}
    match option.check:
        case Whole(least, most):
            how = {"type": click.IntRange(least, most), "metavar": "N"}
        case Seconds(least, above, endless):
            how = {"type": Duration(least or 0.0, above=above, endless=endless)}
            default = default if default is None else written_duration(default)
        case OneOf((PriorityBand(), *_)):
            bands = click.Choice([band.name.lower() for band in PriorityBand])
            how = {"type": bands, "callback": priority_band}
        case OneOf((str(), *_) as choices):
            how = {"type": click.Choice(choices)}
        case OneOf(choices):
            how = {"type": click.Choice(list(map(str, choices))), "callback": whole_number}
            default = default if default is None else str(default)
        case Holds() as check:
            how["callback"] = functools.partial(checked, of_text(check))
        case Secrets():
            how = {"multiple": True, "callback": secrets, "metavar": "NAME[=FILE|=store:[KEY]]"}
        case Destinations():
            how = {"multiple": True, "callback": destinations, "metavar": "CHANNEL:NAME[,OPTION=VALUE...]"}
        case After():
            how = {"multiple": True, "callback": predecessors, "metavar": "JOB[=ended|started]"}
        case ListOf(kind) if kind is Constraint:
            how = {"multiple": True, "callback": conditions, "metavar": "CONDITION"}
        case ListOf():
            how = {"multiple": True, "metavar": "NAME"}
    more = _CONDITIONS if how.get("callback") is conditions else " Repeatable." if how.get("multiple") else ""
    is_shown = default not in (None, ())
    return click.option(option.flag, name, default=default, show_default=is_shown, help=f"{option.help}{more}", **how)


_CONDITIONS = " Such as zone=us-a, 'gen>=4', 'zone in (a, b)', key, '!key'; repeatable."


_OWNERS = {"arguments": "script", "command": "command"}
"""What runs elsewhere, by the name of the argument that takes its words."""


class ScriptCommand(click.Command):
    """Says where the options of the script or command go that it runs elsewhere."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.meta[__name__] = tuple(args)
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            whose = next((whose for whose in _OWNERS if whose in {one.name for one in self.params}), None)
            if whose is None:
                raise
            word = next((word for word in typed(ctx) if word.startswith(error.option_name)), error.option_name)
            hint = f"{error.message} If it is the {_OWNERS[whose]}'s own, write it after --: ... -- {word} ..."
            raise click.NoSuchOption(error.option_name, hint, error.possibilities, ctx) from None


def marked_arguments() -> bool:
    """Return whether the script's arguments came after ``--``, so that they can't be meant for us."""
    return "--" in typed()


def typed(context: click.Context | None = None) -> tuple[str, ...]:
    """Return the words of this `ScriptCommand` as they were typed, after its name."""
    words: tuple[str, ...] = (context or click.get_current_context()).meta[__name__]
    return words
