"""A process tree that is started, listed, frozen and killed as one."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

_SCRIPTS = Path(__file__).parent
_NOT_RUNNING = (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE, None)
_SIGNAL_ROUNDS = 50
_LEFTOVERS = 3  # the keeper's exit code when some process would not go
_END_TIMEOUT_S = 15.0  # longer than the keeper's own


def script_command(name: str) -> list[str]:
    """How to run one of this package's stand-alone scripts: without site-packages, which they do not need."""
    return [sys.executable, "-I", "-S", str(_SCRIPTS / name)]


class Machine:
    """One command and all processes that descend from it, under a keeper (see ``keeper.py``).

    Args:
        command: the program and its arguments.
        env: its whole environment.
        cwd: its working directory.
        log: a file for what the keeper, or the command before it opens its own log, has to say.
        lifeline: writing end of the janitor's pipe.
    """

    def __init__(self, command: Sequence[str], *, env: Mapping[str, str], cwd: Path, log: Path, lifeline: int) -> None:
        with log.open("ab") as output:
            self._keeper = subprocess.Popen(
                [*script_command("keeper.py"), str(lifeline), str(os.getpid()), *command],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                env=dict(env),
                cwd=cwd,
                pass_fds=(lifeline,),
                start_new_session=True,  # out of reach of the terminal's Ctrl-C and hang-up
            )
        self._tree = psutil.Process(self._keeper.pid)
        self._kill_asked = False

    @property
    def process(self) -> subprocess.Popen[bytes]:
        """The keeper's process, whose end is that of the machine."""
        return self._keeper

    @property
    def running(self) -> bool:
        """Whether the machine is there; a frozen one is."""
        return self._keeper.poll() is None

    @property
    def killed(self) -> bool:
        """Whether this process has asked for its end."""
        return self._kill_asked

    def pids(self) -> list[int]:
        """Pids of all processes that live on the machine, parents before children; empty once it is gone."""
        return [process.pid for process in self._processes() if _status(process) not in (None, psutil.STATUS_ZOMBIE)]

    def begin_kill(self) -> None:
        """Asks the keeper to SIGKILL everything, and returns at once."""
        self._kill_asked = True
        stdin = self._keeper.stdin
        if stdin is not None and not stdin.closed:
            with contextlib.suppress(OSError, ValueError):  # the keeper may be gone, or another thread be first
                # Closing alone would not do: a forked child of this process may hold the pipe open too.
                stdin.write(b"x")
                stdin.close()

    def kill(self) -> None:
        """SIGKILLs everything on the machine and waits until it is gone and reaped.

        Raises:
            TimeoutError: some process would not go within 15 s.
        """
        self.begin_kill()
        try:
            code = self._keeper.wait(_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._keeper.kill()
            self._keeper.wait()
            code = _LEFTOVERS
        if code == _LEFTOVERS:
            raise TimeoutError(f"processes of {self._keeper.args!r} did not end after SIGKILL")

    def freeze(self) -> None:
        """SIGSTOPs everything on the machine, also what starts meanwhile."""
        # One that is stopped cannot fork any more: as soon as a look finds nobody running, nobody is.
        for _ in range(_SIGNAL_ROUNDS):
            running = [process for process in self._processes() if _status(process) not in _NOT_RUNNING]
            if not running:
                return
            for process in running:
                _send(process, signal.SIGSTOP)
            time.sleep(0.002)

    def thaw(self) -> None:
        """SIGCONTs everything on the machine."""
        for process in self._processes():
            _send(process, signal.SIGCONT)

    def _processes(self) -> list[psutil.Process]:
        try:
            return self._tree.children(recursive=True)
        except psutil.NoSuchProcess:
            return []


def _status(process: psutil.Process) -> str | None:
    """As psutil names it; None if the process is gone."""
    try:
        return str(process.status())
    except psutil.NoSuchProcess:
        return None


def _send(process: psutil.Process, number: signal.Signals) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        process.send_signal(number)
