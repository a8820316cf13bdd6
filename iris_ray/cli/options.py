"""Options that several commands have, and the cluster that they choose."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import click

from iris_ray.client.connection import AUTO, connect

Command = TypeVar("Command", bound=Callable[..., Any])

_ADDRESS_HELP = "Address of the Ray cluster's head, HOST:PORT.  [default: $RAY_ADDRESS, or the cluster on this machine]"


def address_option(command: Command) -> Command:
    """Gives a command ``--address``; `chosen_address` has what was given, wherever it was."""
    return click.option(
        "--address", metavar="HOST:PORT", help=_ADDRESS_HELP, expose_value=False, callback=_remember_address
    )(command)


def json_option(command: Command) -> Command:
    return click.option("--json", "as_json", is_flag=True, help="Print JSON, for machines.")(command)


def _remember_address(context: click.Context, _: click.Parameter, value: str | None) -> None:
    if value is not None:
        context.find_root().meta[__name__] = value


def address_given(context: click.Context) -> str | None:
    """What ``--address`` says, if it is there."""
    given: str | None = context.find_root().meta.get(__name__)
    return given


def chosen_address() -> str:
    return address_given(click.get_current_context()) or os.environ.get("RAY_ADDRESS") or AUTO


@contextmanager
def cluster(show_logs: bool = False, **options: Any) -> Iterator[None]:
    """Connected to the chosen cluster within.

    Args:
        show_logs: whether what this process's tasks print appears here.
        options: more for ``ray.init``.

    Raises:
        NoClusterError: there is none, or it can't be reached from here.
        InvalidRequestError: the address makes no sense.
    """
    connect(chosen_address(), show_logs, **options)
    import ray

    try:
        yield
    finally:
        if not show_logs:  # otherwise Ray does it when the process ends, and waits for the last lines before
            ray.shutdown()
