"""The messages of sessions between a person's process and a task's host: commands, terminals, ports."""

from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from iris_ray.actors.protocol.marks import within
from iris_ray.model.lifecycle import TaskAttemptId

POLL_S = 5.0
"""The time after which `read` answers without bytes; seconds."""
ANSWER_S = POLL_S + 10.0
"""The time after which a silent host counts as lost; seconds."""
CHUNK_BYTES = 64 << 10
"""The limit for the bytes of a piece; Ray sends up to 100 KB with the call itself."""


class Size(NamedTuple):
    """The size of a terminal, in characters."""

    rows: int
    columns: int


@dataclass(frozen=True, slots=True)
class CommandLine:
    """A command to run on a task's host.

    Args:
        words: the program and its arguments; no shell reads them. None: the task's shell.
        size: the size of its terminal; None: it has none, and stdout and stderr come apart.
        takes_input: whether stdin is sent; else it is empty. A terminal always takes input.
        term: the kind of the person's terminal, such as "xterm-256color".
    """

    words: tuple[str, ...] | None = field(repr=False)
    size: Size | None = None
    takes_input: bool = False
    term: str = "dumb"


class Piece(NamedTuple):
    """Some output of a command, or some bytes of a connection.

    Attributes:
        number: of the piece, from 1.
        out, err: the bytes; a terminal and a connection have no ``err``.
        over: whether this is the last piece, and no process of the command is left.
        exit_code: of the command then; 128 plus the signal's number if a signal killed it. None if it is not known.
        task_ended: whether it is over because the attempt of the task is.
        was_reset: whether it is over because the connection was reset: bytes may be missing.
    """

    number: int
    out: bytes = b""
    err: bytes = b""
    over: bool = False
    exit_code: int | None = None
    task_ended: bool = False
    was_reset: bool = False


class SessionInterface(Protocol):
    """One person's session on a host. Channels, which are commands and connections, have numbers.

    A call may be repeated if its answer was lost: `read` and `write` name the piece that they mean.
    """

    async def enter(self, task: TaskAttemptId) -> None:
        """Choose the attempt of a task for which the session works. The session ends with it.

        Raises:
            TaskNotRunningError: it does not run here any more.
            TooManySessionsError: all places on this host are taken, or the user has a share of them.
        """

    async def start(self, command: CommandLine) -> int:
        """Start a command with the task's variables in the task's working directory. Return its channel.

        Raises:
            CommandNotFoundError: there is no such program, or it can't be started.
            SessionError: the session has as many channels as it may have, or the host can't start a process.
        """

    async def connect(self, port: int) -> int:
        """Connect to a port that a process on this host listens on. Return the channel.

        Raises:
            SessionError: nothing listens there, or the session has as many channels as it may have.
        """

    @within(ANSWER_S)
    async def read(self, channel: int, after: int) -> Piece:
        """Wait for bytes, for `POLL_S` at most, and return the piece that follows the one of this number."""

    @within(None)
    async def write(self, channel: int, number: int, data: bytes) -> None:
        """Hand bytes over, and wait until the other side has taken them; no bytes: there will be none any more.

        Args:
            channel: which one.
            number: of this write, from 1; a number that has come before is ignored.
            data: the bytes.
        """

    async def resize(self, channel: int, size: Size) -> None:
        """Change the size of a command's terminal."""

    async def signal(self, channel: int, number: int) -> None:
        """Send a signal to the process group of a command."""

    async def close(self, channel: int) -> None:
        """End a command with all that it has started, or a connection, which is then read no more. Return at once."""

    @within(ANSWER_S)
    async def task_ended(self) -> bool:
        """Wait for the end of the task's attempt, for `POLL_S` at most. Return whether it has ended."""
