"""The cluster that ``--address`` or the environment chooses."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import IO, Any, Final, NoReturn, Protocol, TypedDict, TypeVar, Unpack

import click

from iris_ray.client.connection import AUTO, connect
from iris_ray.errors import InvalidRequestError
from iris_ray.terminal import guarded_output, live_line

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
    """Return the chosen address if it is the URL of a dashboard."""
    address = chosen_address()
    return address if address.startswith(("http://", "https://")) else None


# -- commands that the head runs ---------------------------------------------------------------------------------------

ON_HEAD = frozenset({
    "ls", "tasks", "why", "events", "stacks", "chips", "goodput", "host ls", "host drain", "host undrain",
    "host give-notice", "team show", "cluster limits", "cluster settings", "cluster settings set",
    "cluster settings reset", "cluster secrets ls", "cluster controller status", "history", "report", "slots ls",
    "slots models", "slots runners", "slots why",
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


class Head(Protocol):
    """The head of a cluster of which only the dashboard's port is reachable.

    ``words`` are those of a command of ``iris-ray``, which runs there as this user. ``NoReturn`` methods end this
    command with that one's exit code.
    """

    def run(
        self, words: Sequence[str], *, takes_input: bool = False, on_terminal: bool = False, **sent: Unpack[Sent]
    ) -> NoReturn:
        """Run a command with this command's stdout and stderr.

        Args:
            words: the command.
            takes_input: whether it also gets this command's stdin.
            on_terminal: whether it runs on this terminal.
            sent: what is sent with it.
        """

    def run_in_directory(self, target: str, named: str | None, **sent: Unpack[Sent]) -> NoReturn:
        """Send a directory, and run this command in it as it was typed.

        Args:
            target: the word of this command that may be a script of the directory.
            named: the directory that the user has named; None: the current one, without secrets and data.
            sent: what else is sent.
        """

    def read(self, words: Sequence[str], to: IO[bytes]) -> int:
        """Run a command, write its stdout to a file, and return its exit code."""

    def run_into(self, words: Sequence[str], path: Path) -> NoReturn:
        """Run a command, and write its stdout to a new file here, unless the command fails."""

    def forward(self, words: Sequence[str], local: int, remote: int) -> NoReturn:
        """Forward a port of this machine to one of the head, which a command there forwards to a task.

        Args:
            words: that command.
            local: the port of this machine; 0: any free one.
            remote: the port beside the task, for messages.
        """

    def logs(self, job: str, follow: bool) -> None:
        """Print the output of a job of Ray's job API. If there is none of that id, run this command as it was typed."""

    def status(self, job: str, as_json: bool) -> None:
        """Print the status of a job of Ray's job API. If there is none of that id, run this command as it was typed."""

    def cancel(self, job: str, yes: bool, as_json: bool) -> None:
        """Stop a job of Ray's job API. If there is none of that id, run this command as it was typed."""

    def submit_script(
        self,
        target: str,
        arguments: Sequence[str],
        named: str | None,
        follow: bool,
        as_json: bool,
        **sent: Unpack[Sent],
    ) -> None:
        """Send a directory, and run a script or program in it as a job of Ray's job API; print its id."""


def head_of_dashboard() -> Head | None:
    """Return the head, if the chosen address is the URL of a dashboard."""
    address = dashboard_address()
    return None if address is None else _head(address)


def head_for_ray_jobs() -> Head:
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


def _head(address: str) -> Head:
    from iris_ray.client.transport import module_of_remote  # imports Ray

    head: Head = module_of_remote("cli").DashboardHead(address)
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
    if _command() in ON_HEAD and (head := head_of_dashboard()) is not None:
        head.run(words_for_head())
    with live_line("iris-ray") as line:
        line.show(f"connecting to {'the cluster' if chosen_address() == AUTO else chosen_address()}")
        connect(chosen_address(), show_logs, **options)
    import ray

    within = _is_within.set(True)
    try:
        with guarded_output(not show_logs):  # own tasks may draw what they like
            yield
    finally:
        _is_within.reset(within)
        if not show_logs:  # otherwise Ray disconnects when the process ends, and waits for the last lines before
            ray.shutdown()
