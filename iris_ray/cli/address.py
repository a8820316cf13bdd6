"""The cluster that ``--address`` or the environment chooses."""

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypedDict, TypeVar

import click

from iris_ray.cli.conventions import say_error, sigterm_interrupts
from iris_ray.client.connection import AUTO, answers, connect, require_answer
from iris_ray.errors import InvalidRequestError
from iris_ray.terminal import guarded_output, live_line

if TYPE_CHECKING:
    from iris_ray.remote.cli import DashboardHead

Command = TypeVar("Command", bound=Callable[..., Any])

_DEFAULT = "  [default: $RAY_ADDRESS, or the cluster on this machine]"
_ADDRESS_HELP = (
    "The Ray cluster: HOST:PORT of its head, from one of its nodes; from elsewhere the URL of its dashboard." + _DEFAULT
)
_ON_A_NODE = (
    "The Ray cluster: HOST:PORT of its head. This command runs on one of its nodes, and takes no URL of a dashboard."
    + _DEFAULT
)


def _remember_address(context: click.Context, _: click.Parameter, value: str | None) -> None:
    """Keep what ``--address`` says for `chosen_address`; a callback of the option."""
    if value is not None:
        context.find_root().meta[__name__] = value


def address_option(command: Command) -> Command:
    """Give a command ``--address``; `chosen_address` returns its value, wherever on the command line it was given."""
    return _address_option(_ADDRESS_HELP)(command)


def node_address_option(command: Command) -> Command:
    """Give ``--address`` to a command that works on a node of the cluster only, and refuses the URL of a dashboard."""
    return _address_option(_ON_A_NODE)(command)


def _address_option(help: str) -> Callable[[Command], Command]:
    return click.option("--address", metavar="HOST:PORT", help=help, expose_value=False, callback=_remember_address)


def address_given(context: click.Context) -> str | None:
    """Return the value of ``--address``, or None without one."""
    given: str | None = context.find_root().meta.get(__name__)
    return given


def chosen_address() -> str:
    return address_given(click.get_current_context()) or os.environ.get("RAY_ADDRESS") or AUTO


def dashboard_address() -> str | None:
    """Return the chosen address if it is the URL of a dashboard."""
    address = chosen_address()
    return address if address.startswith(("http://", "https://")) else None


# -- commands that the head runs ---------------------------------------------------------------------------------------

ON_HEAD = frozenset({
    "ls", "wait", "tasks", "why", "events", "stacks", "chips", "goodput", "notifications ls", "notifications test",
    "host ls", "host drain", "host undrain", "host give-notice", "team show", "cluster limits", "cluster settings",
    "cluster settings set", "cluster settings reset", "cluster secrets ls", "cluster controller status", "history",
    "report", "slots ls", "slots models", "slots runners", "slots why",
})  # fmt: skip
"""Commands that ask or change the cluster, and no more: with the address of a dashboard the head runs them."""


class Sent(TypedDict, total=False):
    """What is sent to the head with a command.

    Attributes:
        working_dir: the directory in which the command runs.
        excludes, env, env_file: as in `RayJobConfig`. Values of variables don't appear on the command line.
        run_id: of the job of Ray's job API; None: any new one.
    """

    working_dir: Path
    excludes: Sequence[str]
    env: Mapping[str, str]
    env_file: str | None
    run_id: str | None


def head_of_dashboard() -> "DashboardHead | None":
    """Return the head, if the chosen address is the URL of a dashboard."""
    address = dashboard_address()
    return None if address is None else _head(address)


def head_for_ray_jobs() -> "DashboardHead":
    """Return the head to which ``--ray-job`` sends a job.

    Raises:
        InvalidRequestError: no address is given.
    """
    given = (
        address_given(click.get_current_context()) or os.environ.get("RAY_API_SERVER_ADDRESS") or dashboard_address()
    )
    if given is None:
        raise InvalidRequestError(
            "to which cluster? Give the URL of its dashboard: --address http://10.0.0.2:8265, or RAY_API_SERVER_ADDRESS"
        )
    return _head(given)


def _head(address: str) -> "DashboardHead":
    from iris_ray.client.transport import module_of_remote  # imports Ray

    head: DashboardHead = module_of_remote("cli").DashboardHead(address)
    return head


_WORDS = f"{__name__}.words"
_STAYS_HERE: Final = "--address", "--working-dir", "--exclude", "--env-file", "--run-id"
"""Options with a value that only concern the way to the cluster."""


def remember_words(context: click.Context, words: Sequence[str]) -> None:
    """Keep what was typed after ``iris-ray`` for `words_for_head`."""
    context.meta[_WORDS] = tuple(words)


def words_for_head() -> list[str]:
    """Return what was typed after ``iris-ray``, without the options that only concern the way to the cluster."""
    kept: list[str] = []
    rest = iter(click.get_current_context().find_root().meta[_WORDS])
    for word in rest:
        name, equals, _ = word.partition("=")
        if word == "--":
            return [*kept, word, *rest]
        if name not in _STAYS_HERE:
            kept.append(word)
        elif not equals:
            next(rest, None)
    return kept


def _command() -> str:
    """Return the words of the current command, such as "host ls"; without a leading "job"."""
    context: click.Context | None = click.get_current_context()
    names: list[str] = []
    while context is not None and context.parent is not None:
        names.insert(0, context.info_name or "")
        context = context.parent
    return " ".join(names).removeprefix("job ")


_is_within: ContextVar[bool] = ContextVar("_is_within", default=False)
"""Whether a block of `cluster` runs."""


@contextmanager
def cluster(
    show_logs: bool = False,
    name_it: bool = False,
    sends: AbstractContextManager[Mapping[str, Any]] | None = None,
    **options: Any,
) -> Iterator[None]:
    """Connect to the chosen cluster within the block. A block within a block is connected already.

    With the address of a dashboard, the head runs the commands of `ON_HEAD`, and the block does not begin.

    Args:
        show_logs: whether the output of this process's tasks appears here.
        name_it: whether a line on stderr names the cluster if no address was given.
        sends: yields further arguments of ``ray.init``, which send code along. It is entered once a cluster answers.
        options: more arguments of ``ray.init``.

    Raises:
        NoClusterError: there is none, or it can't be reached from here.
        InvalidRequestError: the address makes no sense, or none is given and several clusters run on this machine.
    """
    if _is_within.get():
        yield
        return
    if _command() in ON_HEAD and (head := head_of_dashboard()) is not None:
        head.run(words_for_head())
    with ExitStack() as sent:
        if sends is not None:
            require_answer(chosen_address())
            options |= sent.enter_context(sends)
        with live_line("iris-ray") as line:
            line.show(f"connecting to {'the cluster' if chosen_address() == AUTO else chosen_address()}")
            connect(chosen_address(), show_logs, **options)
        import ray

        address = ray.get_runtime_context().gcs_address
        if name_it and chosen_address() == AUTO:
            say_error(f"joined the Ray cluster at {address}, found on this machine (--address chooses another)")
        within = _is_within.set(True)
        try:
            with (
                sigterm_interrupts(),
                guarded_output(not show_logs),
                head_watched(address),
            ):  # own tasks may draw what they like
                yield
        finally:
            _is_within.reset(within)
            if not show_logs:  # otherwise Ray disconnects when the process ends, and waits for the last lines before
                ray.shutdown()


# -- a cluster that ends -----------------------------------------------------------------------------------------------

LOOK_AT_HEAD_S = 5.0
HEAD_AWAY_S = 10.0
"""The time after which a command says that the head does not answer. After a minute, Ray ends the process."""


@contextmanager
def head_watched(address: str) -> Iterator[None]:
    """Say within the block that the cluster's head is gone, and what to do: Ray would end the process without that."""
    over = threading.Event()
    threading.Thread(target=_watch_head, args=(address, over), name="head of the cluster", daemon=True).start()
    try:
        yield
    finally:
        over.set()


def _watch_head(address: str, over: threading.Event) -> None:
    away_since, said = None, False
    while not over.wait(LOOK_AT_HEAD_S):
        now = time.monotonic()
        if answers(address):
            if said:
                say_error(f"the head of the Ray cluster at {address} answers again")
            away_since, said = None, False
            continue
        away_since = now if away_since is None else away_since
        if not said and now - away_since >= HEAD_AWAY_S:
            say_error(
                f"the head of the Ray cluster at {address} has not answered for {now - away_since:.0f} s; if it stays"
                f" away for a minute, this command ends. {WHEN_IT_IS_GONE}"
            )
            said = True


def lost_cluster() -> str | None:
    """Return the address of the cluster that this process has joined, if its head does not answer any more, or None."""
    import ray

    if not ray.is_initialized():
        return None
    address: str = ray.get_runtime_context().gcs_address
    return None if answers(address) else address


WHEN_IT_IS_GONE: Final = (
    "If the cluster was stopped, as by `ray stop`, start it again, then give the same command; a script that writes"
    " checkpoints continues from them"
)
