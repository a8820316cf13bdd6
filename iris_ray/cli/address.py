"""The cluster that ``--address`` or the environment chooses."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

import click

from iris_ray.client.connection import AUTO, connect
from iris_ray.errors import InvalidRequestError
from iris_ray.terminal import live_line

Command = TypeVar("Command", bound=Callable[..., Any])

_ADDRESS_HELP = "Address of the Ray cluster's head, HOST:PORT.  [default: $RAY_ADDRESS, or the cluster on this machine]"


def _remember_address(context: click.Context, _: click.Parameter, value: str | None) -> None:
    """Keep what ``--address`` says for `chosen_address`; a callback of the option."""
    if value is not None:
        context.find_root().meta[__name__] = value


def address_option(command: Command) -> Command:
    """Give a command ``--address``; `chosen_address` returns its value, wherever on the command line it was given."""
    return click.option(
        "--address", metavar="HOST:PORT", help=_ADDRESS_HELP, expose_value=False, callback=_remember_address
    )(command)


def address_given(context: click.Context) -> str | None:
    """Return the value of ``--address``, or None without one."""
    given: str | None = context.find_root().meta.get(__name__)
    return given


def chosen_address() -> str:
    return address_given(click.get_current_context()) or os.environ.get("RAY_ADDRESS") or AUTO


def dashboard_address() -> str | None:
    """Return the chosen address if it is that of a dashboard: jobs of Ray's job API are meant then."""
    address = chosen_address()
    return address if address.startswith(("http://", "https://")) else None


def address_for_ray_jobs() -> str:
    """Return the address of the dashboard to which ``--ray-job`` sends a job.

    Raises:
        InvalidRequestError: none is given.
    """
    given = (
        address_given(click.get_current_context()) or os.environ.get("RAY_API_SERVER_ADDRESS") or dashboard_address()
    )
    if given is None:
        raise InvalidRequestError(
            "to which cluster? Give the URL of its dashboard: --address http://10.0.0.2:8265, or RAY_API_SERVER_ADDRESS"
        )
    return given


# -- commands that the head runs ---------------------------------------------------------------------------------------

ON_HEAD = frozenset({
    "ls", "tasks", "why", "events", "stacks", "chips", "goodput", "host ls", "host drain", "host undrain",
    "host give-notice", "team show", "cluster limits", "cluster settings", "cluster settings set",
    "cluster settings reset", "cluster secrets ls", "cluster controller status", "history", "report", "slots ls",
    "slots models", "slots runners", "slots why",
})  # fmt: skip
"""Commands that ask or change the cluster, and no more: with the address of a dashboard the head runs them."""
_WORDS = f"{__name__}.words"


def remember_words(context: click.Context, words: Sequence[str]) -> None:
    """Keep what was typed after ``iris-ray`` for `words_for_head`."""
    context.meta[_WORDS] = tuple(words)


def words_for_head() -> list[str]:
    """Return what was typed after ``iris-ray``, without the address."""
    kept: list[str] = []
    rest = iter(click.get_current_context().find_root().meta[_WORDS])
    for word in rest:
        if word == "--":
            return [*kept, word, *rest]
        if word == "--address":
            next(rest, None)
        elif not word.startswith("--address="):
            kept.append(word)
    return kept


def _command() -> str:
    """Return the current command, such as "host ls"; those of ``job`` without that."""
    context: click.Context | None = click.get_current_context()
    names: list[str] = []
    while context is not None and context.parent is not None:
        names.insert(0, context.info_name or "")
        context = context.parent
    return " ".join(names).removeprefix("job ")


_is_within: ContextVar[bool] = ContextVar("_is_within", default=False)
"""Whether a block of `cluster` runs."""


@contextmanager
def cluster(show_logs: bool = False, **options: Any) -> Iterator[None]:
    """Connect to the chosen cluster within the block. A block within a block is connected already.

    With the address of a dashboard, the head runs the commands of `ON_HEAD`, and the block does not begin.

    Args:
        show_logs: whether the output of this process's tasks appears here.
        options: more arguments of ``ray.init``.

    Raises:
        NoClusterError: there is none, or it can't be reached from here.
        InvalidRequestError: the address makes no sense.
    """
    if _is_within.get():
        yield
        return
    if (dashboard := dashboard_address()) is not None and _command() in ON_HEAD:
        from iris_ray.remote.on_head import run_on_head

        run_on_head(dashboard, words_for_head())
    with live_line("iris-ray") as line:
        line.show(f"connecting to {'the cluster' if chosen_address() == AUTO else chosen_address()}")
        connect(chosen_address(), show_logs, **options)
    import ray

    within = _is_within.set(True)
    try:
        yield
    finally:
        _is_within.reset(within)
        if not show_logs:  # otherwise Ray disconnects when the process ends, and waits for the last lines before
            ray.shutdown()
