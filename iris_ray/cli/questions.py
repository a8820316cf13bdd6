"""Questions before a command ends something."""

import sys

import click

from iris_ray.cli.exits import FAILED, say_error


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
