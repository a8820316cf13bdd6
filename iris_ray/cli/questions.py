"""Asking before something is ended."""

import sys

import click


def on_a_terminal() -> bool:
    """Whether there is somebody to ask."""
    return sys.stdin.isatty() and sys.stderr.isatty()


def confirm(question: str, yes: bool) -> None:
    """Ends the command unless the answer is yes; asks nobody if there is nobody."""
    if not yes and on_a_terminal():
        click.confirm(question, abort=True, err=True)
