"""What all commands share: exit codes and error lines, questions to the user, suggestions for misspelt names."""

import difflib
import os
import re
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, NoReturn

import click

from iris_ray.errors import (
    ControllerUnavailableError,
    InvalidRequestError,
    IrisError,
    NoClusterError,
    TokenRefusedError,
)
from iris_ray.settings import DEBUG
from iris_ray.terminal import OutputLostError, WatchedOutput, printable

OK, FAILED, USAGE, NO_CLUSTER, TIMED_OUT, INTERRUPTED, UNREAD, TERMINATED = 0, 1, 2, 3, 124, 130, 141, 143
_HELP_IS_THE_ANSWER: Any = getattr(click.exceptions, "NoArgsIsHelpError", ())  # since click 8.2


def exit_code(error: IrisError) -> int:
    """Return the exit code for an error of ours."""
    if isinstance(error, InvalidRequestError):
        return USAGE
    if isinstance(error, (NoClusterError, TokenRefusedError, ControllerUnavailableError)):
        return NO_CLUSTER
    return FAILED


MOST_SHOWN = 4000
"""The number of characters that are shown of a message. Some quote an argument whole."""


def say_error(message: str) -> None:
    """Print a message to stderr. It may quote strangers."""
    short = message if len(message) <= MOST_SHOWN else f"{message[: MOST_SHOWN // 2]} … {message[-MOST_SHOWN // 2 :]}"
    click.echo("iris-ray: " + printable(short, "\n\t"), err=True)


_terminated = threading.Event()


@contextmanager
def sigterm_interrupts() -> Iterator[None]:
    """Have SIGTERM raise KeyboardInterrupt within the block; `was_terminated` tells it from Ctrl-C.

    Ray's own handler would print a stack of native code. Ray raises a KeyboardInterrupt of its own in place of ours.
    """

    def terminated(_number: int, _frame: object) -> NoReturn:
        _terminated.set()
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():  # only that one may set handlers
        yield
        return
    _terminated.clear()
    before = signal.signal(signal.SIGTERM, terminated)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def note_termination() -> None:
    """Note that SIGTERM has come, where a handler of the command's own takes it."""
    _terminated.set()


def was_terminated() -> bool:
    """Return whether a KeyboardInterrupt came from SIGTERM, so that no person can answer a question."""
    return _terminated.is_set()


def interrupted() -> click.exceptions.Exit:
    """Return what ends a command after a KeyboardInterrupt, with its exit code."""
    return click.exceptions.Exit(TERMINATED if was_terminated() else INTERRUPTED)


_unread = threading.Event()


@contextmanager
def output_watched() -> Iterator[None]:
    """Run a command within, to its end. End it with `UNREAD` if nobody reads its output any more.

    If stdout can't be written, such as on a full disk, a line says so. The exit code is then 1, unless another thread
    prints the output of a job: the command goes on waiting for the job, and ends with its exit code.
    """
    _unread.clear()
    output, code = WatchedOutput(_end_unread, say_error), OK
    try:
        yield
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else OK
        raise
    finally:
        try:
            output.finish()
        except OutputLostError as error:
            if code == OK:
                say_error(str(error))
                raise SystemExit(FAILED) from None
        if output.unread:
            raise SystemExit(UNREAD)


def _end_unread() -> None:
    """End the command from another thread than its main one: as SIGTERM does, or Ctrl-C before that has a handler."""
    _unread.set()
    number = signal.SIGTERM if callable(signal.getsignal(signal.SIGTERM)) else signal.SIGINT
    main = threading.main_thread().ident
    assert main is not None
    signal.pthread_kill(main, number)


@contextmanager
def errors_as_lines() -> Iterator[None]:
    """Turn every error in the block into one line on stderr and an exit code. IRIS_DEBUG=1 shows tracebacks."""
    try:
        yield
    except _HELP_IS_THE_ANSWER:
        raise
    except click.UsageError as error:
        path = error.ctx.command_path if error.ctx else "iris-ray"
        say_error(f"{_in_plain_words(error.format_message())} See: {path} --help")
        raise click.exceptions.Exit(USAGE) from None
    except (click.ClickException, click.exceptions.Exit, BrokenPipeError):
        raise  # click handles them
    except OutputLostError as error:
        say_error(str(error))
        raise click.exceptions.Exit(FAILED) from None
    except (KeyboardInterrupt, click.Abort):  # the latter is Ctrl-C, or Ctrl-D, at a question
        if not _unread.is_set():
            say_error("ended by SIGTERM" if was_terminated() else "interrupted")
        raise interrupted() from None
    except Exception as error:
        if DEBUG.read():
            raise
        if isinstance(error, IrisError):
            say_error(str(error))
            raise click.exceptions.Exit(exit_code(error)) from None
        first_line = (str(error).strip().splitlines() or ["no message"])[0]
        say_error(f"{type(error).__name__}: {first_line} ({DEBUG.name}=1 shows where)")
        raise click.exceptions.Exit(FAILED) from None


def _in_plain_words(message: str) -> str:
    """Return a message of click's as a sentence, without the names of its types."""
    message = re.sub(r"is not a valid integer( range)?\.", "is not a whole number.", message)
    message = re.sub(r"is not a valid float( range)?\.", "is not a number.", message)
    message = re.sub(r"\((Did you mean one of: .*\?)\)$", r"\1", message)
    message = re.sub(r"^(Invalid value for) '[\[{]([^'\[\]{}]+)[\]}]'", r"\1 \2", message)
    return message if message.endswith((".", "?", "!")) else f"{message}."


# -- questions ---------------------------------------------------------------------------------------------------------


def on_a_terminal() -> bool:
    """Return whether a person can answer a question."""
    return all(stream is not None and stream.isatty() for stream in (sys.stdin, sys.stderr))  # None: it is closed


def confirm(question: str, yes: bool) -> None:
    """Ask, and end the command unless the answer is yes. Without a terminal nothing is asked."""
    if not yes and on_a_terminal() and not click.confirm(question, err=True):
        say_error("nothing is done")
        raise click.exceptions.Exit(FAILED)


def really_cancel(otherwise: str, default: bool) -> bool:
    """Ask once, after Ctrl-C, whether to cancel the job.

    Args:
        otherwise: what happens if the answer is no.
        default: the answer that another Ctrl-C, Enter and Ctrl-D mean.
    """
    try:
        return click.confirm(f"\nCancel the job? No: {otherwise}.", default=default, err=True)
    except click.Abort:
        return default


def require_place(path: Path, what: str = "--output") -> None:
    """Refuse a new file that can't be written, before anybody waits for it; ``what`` names the option."""
    try:
        if path.is_dir():
            raise InvalidRequestError(f"{what} {path} is a directory; give a file")
        if not path.parent.is_dir():
            raise InvalidRequestError(f"{what} {path}: {path.parent} is not a directory")
    except OSError as error:  # a name that is too long
        raise InvalidRequestError(f"{what} can't be written: {error.strerror}") from None
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise InvalidRequestError(f"{what} {path}: {path.parent} can't be written to")


@contextmanager
def private_file(path: Path, mode: str = "w") -> Iterator[IO[Any]]:
    """Open a new file that only its owner may read. It appears when it is complete, in place of an earlier one.

    Something that is not a file, such as ``/dev/null``, is written to as it is.
    """
    if path.exists() and not path.is_file():
        with path.open(mode) as file:
            yield file
        return
    number, partial = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with open(number, mode, encoding=None if "b" in mode else "utf-8") as file:
            yield file
            file.flush()
            os.fsync(number)
        os.rename(partial, path)
    except BaseException:
        with suppress(FileNotFoundError):  # its renaming is said to have failed, and was done
            os.unlink(partial)
        raise


# -- groups ------------------------------------------------------------------------------------------------------------

ALIASES: Mapping[str, str] = {
    "list": "ls",
    "ps": "ls",
    "top": "ls --watch",
    "describe": "status",
    "status": "job status",
    "ssh": "shell",
}
"""Other names of commands, which work wherever the command does: people know them from other tools."""
OTHER_NAMES: Mapping[str, str] = {
    **dict.fromkeys(("jobs", "queue"), "ls"),
    **dict.fromkeys(("get", "info", "show"), "status"),
    **dict.fromkeys(("explain", "reason"), "why"),
    **dict.fromkeys(("output", "tail"), "logs"),
    **dict.fromkeys(("delete", "end", "kill", "rm", "stop"), "cancel"),
    **dict.fromkeys(("hosts", "nodes", "slices", "workers"), "host ls"),
    **dict.fromkeys(("attach", "bash"), "shell"),
    "forward": "port-forward",
    "start": "run",
    **dict.fromkeys(("cordon", "taint"), "drain"),
    **dict.fromkeys(("uncordon", "untaint"), "undrain"),
    **dict.fromkeys(("limit", "quota"), "limits"),
    **dict.fromkeys(("quotas", "teams"), "team show"),
    "check": "doctor",
    "simulate": "study",
}
"""The names that people may expect, and our commands, which are suggested."""


def explained(command: click.Command) -> click.Command:
    """Have the help of a command explain, once each, the forms of its values, such as ``DURATION``."""
    notes = dict.fromkeys(note for one in command.params if (note := getattr(one.type, "note", None)))
    options = {name for one in command.params for name in one.opts}
    also = [
        name if words == command.name else f"{name} ({words})"
        for name, words in ALIASES.items()
        if words.split()[0] == command.name and options.issuperset(words.split()[1:])
    ]
    if also:
        notes |= {f"Also: {', '.join(also)}.": None}
    said = command.epilog or ""
    command.epilog = "\n\n".join([*([said] if said else []), *(note for note in notes if note not in said)]) or None
    return command


class SuggestingGroup(click.Group):
    """Suggests the nearest commands for an unknown one."""

    def _meant(self, ctx: click.Context, args: list[str]) -> list[str] | None:
        """Return the words with a command of this group in place of an alias; None if there is no such command."""
        names, words = self.list_commands(ctx), list(args)
        while words and words[0] not in names and words[0] in ALIASES:
            words = [*ALIASES[words[0]].split(), *words[1:]]
        command = self.get_command(ctx, words[0]) if words and words[0] in names else None
        if command is None:
            return None
        added = words[1 : len(words) - len(args) + 1] if words != args else []
        known = {name for one in command.params for name in one.opts}
        is_group = isinstance(command, click.Group)
        return words if all(word in known for word in added) or is_group else None

    def paths(self, ctx: click.Context) -> list[str]:
        """Return the commands that may be suggested, as they are typed after the group's own name."""
        return self.list_commands(ctx)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        command = super().get_command(ctx, cmd_name)
        return None if command is None else explained(command)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        meant = self._meant(ctx, args)
        if meant is not None:
            return super().resolve_command(ctx, meant)
        if args and not ctx.resilient_parsing:
            ctx.fail(f"there is no command {args[0]!r}{_hint(args[0].lower(), self.paths(ctx))}")
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except click.UsageError as error:
            name = ctx.invoked_subcommand
            if error.ctx is None and name and (command := self.get_command(ctx, name)):  # click's parser leaves it out
                error.ctx = click.Context(command, ctx, name)
            raise


def _hint(name: str, paths: Sequence[str]) -> str:
    by_last_word = {path.split()[-1]: path for path in reversed(paths)}
    meant = OTHER_NAMES.get(name, name)
    if meant in paths or meant in by_last_word:
        near = [meant if meant in paths else by_last_word[meant]]
    else:
        near = [by_last_word[word] for word in difflib.get_close_matches(name, by_last_word, n=3, cutoff=0.5)]
    return f"; did you mean {' or '.join(near)}?" if near else "."
