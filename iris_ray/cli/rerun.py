"""``iris-ray rerun``: run a job again, as it was or with other flags, with the code that it ran."""

import contextlib
import json
import os
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import click

from iris_ray.actors.calls.controller_connection import ControllerConnection
from iris_ray.actors.protocol.controller_interface import ControllerInterface
from iris_ray.cli.address import cluster, dashboard_address, node_address_option
from iris_ray.cli.completion import all_jobs
from iris_ray.cli.conventions import say_error
from iris_ray.cli.options import FROM_STORE
from iris_ray.cli.script import is_tpu_type
from iris_ray.cli.sent_code import code_of, restored_code, use_code
from iris_ray.errors import InvalidRequestError

_ENV = "--env", "-e"
_SECRET = "--secret"
_LEFT_OUT = "--address", "--json", "--follow", "-f", "-q"
"""Options that say nothing about the job; ``--address`` has a value."""


@dataclass(frozen=True, slots=True)
class TypedCommand:
    """The command line that has submitted a job, in the cluster's store.

    Attributes:
        command: ``run`` or ``submit``.
        words: the words after it, without the values of environment variables: they may be secrets.
        directory: where it was typed.
    """

    command: str
    words: tuple[str, ...]
    directory: str

    @property
    def has_directory(self) -> bool:
        """Whether it has ``--working-dir``."""
        return any(map(_names_directory, self.words))

    def again(self, flags: Sequence[str], arguments: Sequence[str] | None) -> list[str]:
        """Return the words of another job.

        Args:
            flags: other flags. Of an option that takes one value the last one counts. ``--tpu`` also replaces a type
                that was an argument.
            arguments: other arguments of the script; None: the same.
        """
        own = _script_first(self.command, list(self.words))
        end = own.index("--") if "--" in own else len(own)
        after = own[end + 1 :] if arguments is None else list(arguments)
        anew = set(filter(None, map(_variable, *_with_those_before(flags))))
        kept = [place for place in range(end) if _variable(own[place], own[place - 1] if place else "") not in anew]
        kept = [place for place in kept if not (own[place] in (*_ENV, _SECRET) and place + 1 not in kept)]
        more = list(_without_flags(self.command, own[:end]))[1:]  # after the script or function
        if self.command == "run" and more and not any(map(_is_type, own[:end])):
            if any(map(_is_type, flags)):
                kept.remove(more[0])
            more = more[1:]
        if arguments is not None:
            kept = [place for place in kept if place not in more]
        return [*(own[place] for place in kept), *flags, *(["--", *after] if after else [])]


_JOINED = re.compile(r"-f+(?:e(.*))?", re.DOTALL)
"""The short flags of these commands in one word, such as ``-fe``, perhaps with the value of the last one."""


def _apart(words: Sequence[str]) -> Iterator[str]:
    """Yield words with each short flag in a word of its own: ``-feA=1`` as ``-f`` and ``-eA=1``. After ``--``, none."""
    rest = iter(words)
    for word in rest:
        if word == "--":
            yield from (word, *rest)
        elif (joined := _JOINED.fullmatch(word)) is not None:
            yield from ("-f",) if joined[1] is None else ("-f", f"-e{joined[1]}")
        else:
            yield word


def _with_those_before(flags: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the words of some flags, and the word before each; "" before the first."""
    words = list(_apart(flags))
    return words, ["", *words[:-1]]


def _variable(word: str, before: str) -> str | None:
    """Return the name of the variable or secret that a word sets, given the word before it; None for other words."""
    if before in (*_ENV, _SECRET):
        return word.partition("=")[0]
    if word.startswith(("--env=", f"{_SECRET}=")):
        return word.split("=", 2)[1]
    if word.startswith("-e") and word != "-e":
        return word.removeprefix("-e").partition("=")[0]
    return None


def _with_absolute_secrets(words: Sequence[str]) -> list[str]:
    """Return words with the absolute paths of the files that ``--secret`` names, for use in another directory."""
    found, before = list(words), ""
    for place, word in enumerate(found):
        if word == "--":
            break
        flag = f"{_SECRET}=" if word.startswith(f"{_SECRET}=") else ""
        name, equals, source = word.removeprefix(flag).partition("=")
        if (flag or before == _SECRET) and equals and not source.startswith(FROM_STORE):
            found[place] = f"{flag}{name}={Path(source).expanduser().absolute()}"
        before = word
    return found


def _is_type(word: str) -> bool:
    return word.partition("=")[0] == "--tpu"


def _without_flags(name: str, words: Sequence[str]) -> Iterator[int]:
    """Yield the places of the words of a command that are neither options nor their values."""
    command = _command(name)
    takers = {
        word
        for one in command.params
        if isinstance(one, click.Option) and not (one.is_flag or one.count)
        for word in one.opts
    }
    is_value = False
    for place, word in enumerate(words):
        if not is_value and not word.startswith("-"):
            yield place
        is_value = not is_value and word in takers


def _script_first(command: str, words: list[str]) -> list[str]:
    """Return words with the script, and a type that is an argument, before ``--``, even if they were typed after it."""
    if "--" not in words:
        return words
    end = words.index("--")
    needed = 2 if command == "run" and not any(map(_is_type, words[:end])) else 1
    begin = end + 1 + max(0, needed - len([*_without_flags(command, words[:end])]))
    moved = words[end + 1 : begin]
    if any(word.startswith("-") for word in moved):  # they would be flags there
        return words
    return [*words[:end], *moved, "--", *words[begin:]]


def remember_command(job_id: str, command: str, words: Sequence[str]) -> None:
    """Keep the command line of a job as long as the Controller knows the job. This process is in the cluster."""
    from iris_ray.actors.calls.names import command_key
    from iris_ray.actors.calls.ray_internals import ClusterStore

    kept = TypedCommand(command, tuple(_about_job(words)), str(Path.cwd()))
    ClusterStore().put(command_key(job_id), json.dumps(asdict(kept)).encode())


def _about_job(words: Sequence[str]) -> Iterator[str]:
    rest = without_values(words)
    for word in rest:
        name, equals, _ = word.partition("=")
        if word == "--":
            yield from (word, *rest)
        elif name not in _LEFT_OUT:
            yield word
        elif name == "--address" and not equals:
            next(rest, None)


def without_values(words: Sequence[str]) -> Iterator[str]:
    """Yield the words of a command with the names of the variables that it sets, and without their values."""
    rest = _apart(words)
    for word in rest:
        if word == "--":
            yield from (word, *rest)
        elif word in _ENV:
            yield from (word, next(rest, "").partition("=")[0])
        elif word.startswith("--env=") or (word.startswith("-e") and not word.startswith("--")):
            yield from ("--env", word.removeprefix("--env=").removeprefix("-e").partition("=")[0])
        else:
            yield word


def _command_of(job_id: str) -> TypedCommand:
    from iris_ray.actors.calls.names import command_key
    from iris_ray.actors.calls.ray_internals import ClusterStore

    ControllerConnection().ask(ControllerInterface.job_status, job_id)  # raises if there is no such job
    stored = ClusterStore().get(command_key(job_id))
    if stored is None:
        raise InvalidRequestError(
            f"{job_id} was not submitted by `iris-ray submit` or `iris-ray run`, so the cluster does not know how to"
            " run it again; run the program that has submitted it"
        )
    found = json.loads(stored)
    return TypedCommand(str(found["command"]), tuple(map(str, found["words"])), str(found["directory"]))


class _Rerun(click.Command):
    """Takes any options: they are those of ``submit`` or ``run``."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.meta[__name__] = args[args.index("--") + 1 :] if "--" in args else None
        return super().parse_args(ctx, args)


@click.command(cls=_Rerun, context_settings={"ignore_unknown_options": True})
@click.argument("job", shell_complete=all_jobs)
@click.argument("flags", nargs=-1, type=click.UNPROCESSED, metavar="[FLAGS] [-- ARGUMENTS]")
@click.option("--current-code", is_flag=True, help="Send the code as it is here now, not that of the job.")
@click.option("--dry-run", is_flag=True, help="Only print the command that would run.")
@node_address_option
@click.pass_context
def rerun(context: click.Context, job: str, flags: tuple[str, ...], current_code: bool, dry_run: bool) -> None:
    """Run a job again: repeat the command that submitted it, with other flags if you give some.

    \b
      iris-ray rerun train-1a2b3c4d
      iris-ray rerun train-1a2b3c4d --tpu v4-64 --max-runtime 12h
      iris-ray rerun train-1a2b3c4d -- --steps 2000       other arguments of the script
      iris-ray rerun train-1a2b3c4d --dry-run             shows the command

    FLAGS are those of `iris-ray submit`, or of `iris-ray run` for a job that it ran; for an option that takes one
    value, yours replaces the job's. Type this where the job was submitted, or in that directory of another clone: its
    commit and difference, as `iris-ray job status` shows them, are restored in a temporary directory and sent, unless
    you give --working-dir or the job was submitted with it on a node of the cluster: then that directory is sent as it
    is now. The values of --env are not kept; they are taken from your environment, or from --env here. Secrets are read
    again, from the same files and variables. At the address of a dashboard, this command does not work.
    """
    if dashboard_address() is not None:
        raise InvalidRequestError(
            "rerun does not work at the address of a dashboard; run it on one of the cluster's nodes, or submit anew"
        )
    if job.startswith("-"):
        raise click.UsageError(f"give JOB first, then its flags: rerun JOB {shlex.join([job, *flags])}")
    arguments: list[str] | None = context.meta[__name__]
    own = flags if arguments is None else flags[: len(flags) - len(arguments)]
    current_code |= any(map(_names_directory, own))
    with cluster():
        typed = _command_of(job)
        record = None if current_code else code_of(job)
    _require_flags(job, typed.command, own)
    shown = shlex.join(["iris-ray", typed.command, *typed.again(own, arguments)])
    if dry_run:
        click.echo(shown)
        return
    say_error(f"running {shown}")
    words = typed.again(_with_absolute_secrets(own), arguments)
    if record is not None and not typed.has_directory:
        words = _with_absolute_secrets(_with_restored_script(typed, words))
    with _code(typed, record, current_code):
        _run(context, typed.command, words)


def _require_flags(job: str, command: str, words: Sequence[str]) -> None:
    """Refuse a word that is neither a flag nor its value: it would become one more argument of the script."""
    words = list(_apart(words))
    known = {name for one in _command(command).params for name in one.opts}
    names = (word.partition("=")[0] if word.startswith("--") else word[:2] for word in words if word.startswith("-"))
    if not known.issuperset(names):
        return  # the command itself refuses the flag, and suggests another one
    for word in (words[place] for place in _without_flags(command, words)):
        anew = shlex.join(["rerun", job, *(("--tpu", word) if is_tpu_type(word) else ("--", word))])
        raise click.UsageError(f"{word} is not a flag; did you mean {anew}?")


def _names_directory(word: str) -> bool:
    return word.partition("=")[0] == "--working-dir"


def _with_restored_script(typed: TypedCommand, words: Sequence[str]) -> list[str]:
    """Return the words of a command with the path of its script within the restored directory.

    A script outside of the directory where the job was submitted was not recorded. It is sent as it is now.
    """
    there, *_ = _without_flags(typed.command, words)
    script, home = Path(typed.directory, words[there]), Path(typed.directory).resolve()
    if re.fullmatch(r"[\w.]+:[\w.]+", words[there]):  # a function, in a module of the directory
        return list(words)
    folder = script.parent.resolve()
    if folder.is_relative_to(home):
        path = folder.relative_to(home) / script.name
    else:
        path = Path(words[there]).absolute()
        say_error(f"{words[there]} is not restored, since it lies outside of {home}; this sends it as it is now")
    return [*words[:there], str(path), *words[there + 1 :]]


@contextlib.contextmanager
def _code(typed: TypedCommand, record: object, current: bool) -> Iterator[None]:
    """Be in the directory of the job's code within the block."""
    if record is not None and not typed.has_directory:
        with restored_code(record) as code, contextlib.chdir(code.path), use_code(code):
            yield
        return
    if not current:
        why = "the job was sent with --working-dir" if typed.has_directory else "it was not recorded (see job status)"
        say_error(f"its code is not restored, since {why}; this sends the code as it is now")
    where = typed.directory if os.path.isdir(typed.directory) and not current else "."
    with contextlib.chdir(where):
        yield


def _command(name: str) -> click.Command:
    from iris_ray.cli.main import main

    command = main.get_command(click.Context(main), name)
    if command is None:
        raise InvalidRequestError(f"this iris_ray has no command {name}")
    return command


def _run(context: click.Context, name: str, words: Sequence[str]) -> None:
    command = _command(name)
    with command.make_context(name, list(words), parent=context.parent) as inner:
        command.invoke(inner)
