"""Asking before something is ended."""

import sys

import click

from iris_ray.cli.exits import FAILED, say_error


def on_a_terminal() -> bool:
    """Whether there is somebody to ask."""
    return sys.stdin.isatty() and sys.stderr.isatty()


def confirm(question: str, yes: bool) -> None:
    """Ends the command unless the answer is yes; asks nobody if there is nobody."""
    if not yes and on_a_terminal() and not click.confirm(question, err=True):
        say_error("nothing is done")
        raise click.exceptions.Exit(FAILED)


def really_cancel(otherwise: str, default: bool) -> bool:
    """Asks once, after Ctrl-C; another Ctrl-C, Enter and Ctrl-D mean the default.

    Args:
        otherwise: what becomes of the job if the answer is no.
        default: what is meant by no answer.
    """
    try:
        return click.confirm(f"\nCancel the job? No: {otherwise}.", default=default, err=True)
    except click.Abort:
        return default
