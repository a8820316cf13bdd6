"""A process tree that is started, listed, frozen and killed as one."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from iris_ray.processes.bare import bare_command
from iris_ray.processes.identity import ProcessStat, stat_of
from iris_ray.processes.subtree import descendants, read_of_process

_SCRIPTS = Path(__file__).parent
_SIGNAL_ROUNDS = 50
_LEFTOVERS = 3  # the supervisor's exit code when some process did not end
_END_TIMEOUT_S = 15.0  # longer than the supervisor's own


def script_command(name: str) -> list[str]:
    """Return the command that runs a stand-alone script of this package, without site-packages."""
    return [sys.executable, "-I", "-S", str(_SCRIPTS / name)]


class Machine:
    """One command and all processes that descend from it, under a supervisor (see ``process_supervisor.py``).

    Args:
        command: the program and its arguments.
        env: its whole environment.
        cwd: its working directory.
        log: a file for the output of the supervisor, and of the command until it opens its own log.
        lifeline: the writing end of the janitor's pipe.
        prefix: the beginning of the whole command line, such as a program that enters a namespace.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str],
        cwd: Path,
        log: Path,
        lifeline: int,
        prefix: Sequence[str] = (),
    ) -> None:
        with log.open("ab") as output:
            self._supervisor = subprocess.Popen(
                [*prefix, *bare_command(_SCRIPTS / "process_supervisor.py"), str(lifeline), str(os.getpid()), *command],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                env=dict(env),
                cwd=cwd,
                pass_fds=(lifeline,),
                start_new_session=True,  # out of reach of the terminal's Ctrl-C and hang-up
            )
        self._kill_asked = False

    @property
    def process(self) -> subprocess.Popen[bytes]:
        """The supervisor's process; the machine ends when it ends."""
        return self._supervisor

    @property
    def running(self) -> bool:
        """Whether the machine runs; a frozen machine counts as running."""
        return self._supervisor.poll() is None

    @property
    def killed(self) -> bool:
        """Whether this process has asked for the machine's end."""
        return self._kill_asked

    def pids(self, command: str = "") -> list[int]:
        """Return the pids of all processes on the machine, parents before children; empty once it is gone.

        Args:
            command: only those whose command line holds this text.
        """
        return [stat.pid for stat in self._processes() if not command or command in _command_line(stat.pid)]

    def begin_kill(self) -> None:
        """Ask the supervisor to SIGKILL everything, and return at once."""
        self._kill_asked = True
        stdin = self._supervisor.stdin
        if stdin is not None and not stdin.closed:
            with contextlib.suppress(OSError, ValueError):  # the supervisor is gone, or another thread was first
                # Closing alone is not enough: a forked child of this process may hold the pipe open too.
                stdin.write(b"x")
                stdin.close()

    def kill(self) -> None:
        """SIGKILL everything on the machine and wait until it is gone and reaped.

        Raises:
            TimeoutError: some process did not end within 15 s.
        """
        self.begin_kill()
        try:
            code = self._supervisor.wait(_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._supervisor.kill()
            self._supervisor.wait()
            code = _LEFTOVERS
        if code == _LEFTOVERS:
            raise TimeoutError(f"processes of {self._supervisor.args!r} did not end after SIGKILL")

    def kill_command(self) -> None:
        """SIGKILL the command alone. The machine's other processes live on for 30 s at most."""
        for stat in self._processes()[:1]:
            stat.identity.signal(signal.SIGKILL)

    def terminate_command(self) -> None:
        """SIGTERM the command alone. When it ends, the machine does."""
        for stat in self._processes()[:1]:
            stat.identity.signal(signal.SIGTERM)

    def freeze(self) -> None:
        """SIGSTOP everything on the machine, including processes that start meanwhile."""
        # A stopped process cannot fork: as soon as one pass finds no running process, there is none.
        for _ in range(_SIGNAL_ROUNDS):
            running = [stat.identity for stat in self._processes() if not stat.is_stopped]
            if not running:
                return
            for process in running:
                process.signal(signal.SIGSTOP)
            time.sleep(0.002)

    def thaw(self) -> None:
        """SIGCONT everything on the machine."""
        for stat in self._processes():
            stat.identity.signal(signal.SIGCONT)

    def _processes(self) -> list[ProcessStat]:
        """Return the processes that the supervisor owns and that have not ended, parents before children."""
        found = map(stat_of, descendants(self._supervisor.pid)) if self.running else ()
        return [stat for stat in found if stat is not None and not stat.is_zombie]


def _command_line(pid: int) -> str:
    return read_of_process(pid, "cmdline").replace(b"\0", b" ").decode(errors="replace")
