"""The keeper of a command: the parent of its process tree, which ends the whole tree with the session.

It is a program of its own, runs outside of Ray and is started by `bare_command`, so that it starts within milliseconds.
The kernel gives it every process of the tree that loses its parent, so a daemon can't escape, whatever its variables
and its process group are. The session's process holds the other end of a socket: when that closes, because the session
is over or its process was killed, the keeper kills the tree.

On the socket the keeper reads a JSON line with ``command``, ``environ``, ``directory`` and ``terminal``, and then
numbers of signals. It answers with ``{"pid": …}`` or ``{"error": …}``, then ``{"exit_code": …}``, and
closes the socket when no process of the tree is left. Its stdin, stdout and stderr are those of the command.
"""

import contextlib
import fcntl
import json
import os
import select
import signal
import socket
import sys
import termios
from typing import Any

from iris_ray.processes.subtree import as_shells_say, end_descendants, reap, start_child, take_orphans

DEFAULTS = signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT
LOOK_S = 1.0
"""The interval between two checks for adopted processes that have ended; seconds."""


def main() -> None:
    control = socket.socket(fileno=int(sys.argv[1]))
    control.set_inheritable(False)
    if os.fork():
        os._exit(0)  # Ray ends the children of its workers, so the keeper must not be a child
    os.setsid()
    for number in DEFAULTS:
        signal.signal(number, signal.SIG_IGN)  # it ends after its tree, not before
    lines = Lines(control)
    if (wanted := lines.wait()) is None:
        return
    take_orphans()
    try:
        root = start(json.loads(wanted))
    except OSError as error:
        say(control, error=error.strerror or str(error))
        return
    say(control, pid=root)
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nothing, stream)  # only the command's own tree holds its output open
    os.chdir("/")
    code = keep(root, control, lines)
    end_descendants()
    if code is not None:
        say(control, exit_code=code)


def start(wanted: dict[str, Any]) -> int:
    """Start the command, and return its pid.

    Raises:
        OSError: there is no such program or directory, or it can't be run.
    """

    def prepare() -> None:
        settle(wanted["terminal"])
        os.chdir(wanted["directory"])

    return start_child(wanted["command"], prepare, wanted["environ"])


def settle(terminal: bool = False) -> None:
    """Make this process, a new child of its keeper, the root of a command's tree: a session with default signals."""
    os.setsid()
    if terminal:
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    for number in (*DEFAULTS, signal.SIGPIPE):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # Ray's worker blocks some, and children inherit that
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
        file.write("1000")  # if the host's memory is used up, this goes before the task


def keep(root: int, control: socket.socket, lines: "Lines") -> int | None:
    """Wait until the command or the session ends, and pass signals on. Return the exit code; None: the session ended.

    For a command that a signal killed the code is 128 plus the signal's number, as shells say.
    """
    pidfd = os.pidfd_open(root)
    poll = select.poll()
    for descriptor in (control.fileno(), pidfd):
        poll.register(descriptor, select.POLLIN)
    while True:
        ready = [descriptor for descriptor, _ in poll.poll(LOOK_S * 1000)]
        if control.fileno() in ready:
            if (numbers := lines.read()) is None:
                return None
            for number in numbers:
                with contextlib.suppress(OSError, OverflowError):  # it has ended, or there is no such signal
                    os.killpg(root, int(number))
        if root in (codes := reap()):
            return as_shells_say(codes[root])


def say(control: socket.socket, **facts: object) -> None:
    with contextlib.suppress(OSError):  # nobody is left to hear it
        control.sendall(json.dumps(facts).encode() + b"\n")


class Lines:
    """The lines that come over a socket."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._begun = b""
        self._closed = False

    def read(self) -> list[bytes] | None:
        """Return the lines that are complete now; None if the other side has closed, and there are none."""
        self._receive()
        *lines, self._begun = self._begun.split(b"\n")
        return lines if lines or not self._closed else None

    def wait(self) -> bytes | None:
        """Wait for one line; None if the other side closes before."""
        while b"\n" not in self._begun and not self._closed:
            self._receive()
        line, end, self._begun = self._begun.partition(b"\n")
        return line if end else None

    def _receive(self) -> None:
        try:
            data = self._control.recv(65536)
            self._begun += data
            self._closed = not data
        except BlockingIOError:
            pass
        except OSError:
            self._closed = True


if __name__ == "__main__":
    main()
