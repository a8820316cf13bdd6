"""Exit codes for scripts, and one line on stderr for people."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click

from iris_ray.errors import ControllerUnavailableError, InvalidRequestError, IrisError, NoClusterError
from iris_ray.settings import DEBUG

OK, FAILED, USAGE, NO_CLUSTER, INTERRUPTED = 0, 1, 2, 3, 130
_HELP_IS_THE_ANSWER: Any = getattr(click.exceptions, "NoArgsIsHelpError", ())  # since click 8.2


def exit_code(error: IrisError) -> int:
    """Return the exit code for an error of ours."""
    if isinstance(error, InvalidRequestError):
        return USAGE
    if isinstance(error, (NoClusterError, ControllerUnavailableError)):
        return NO_CLUSTER
    return FAILED


def say_error(message: str) -> None:
    click.echo(f"iris-ray: {message}", err=True)


@contextmanager
def errors_as_lines() -> Iterator[None]:
    """Turn every error in the block into one line on stderr and an exit code. IRIS_DEBUG=1 shows tracebacks."""
    try:
        yield
    except _HELP_IS_THE_ANSWER:
        raise
    except click.UsageError as error:
        path = error.ctx.command_path if error.ctx else "iris-ray"
        say_error(f"{error.format_message()} See: {path} --help")
        raise click.exceptions.Exit(USAGE) from None
    except (click.ClickException, click.exceptions.Exit, BrokenPipeError):
        raise  # click handles them
    except (KeyboardInterrupt, click.Abort):  # the latter is Ctrl-C, or Ctrl-D, at a question
        say_error("interrupted")
        raise click.exceptions.Exit(INTERRUPTED) from None
    except Exception as error:
        if DEBUG.read():
            raise
        if isinstance(error, IrisError):
            say_error(str(error))
            raise click.exceptions.Exit(exit_code(error)) from None
        first_line = (str(error).strip().splitlines() or ["no message"])[0]
        say_error(f"{type(error).__name__}: {first_line} ({DEBUG.name}=1 shows where)")
        raise click.exceptions.Exit(FAILED) from None
