"""Python processes of this machine that end with the process that has started them."""

import contextlib
import os
import signal
import site
import subprocess
import sys
import sysconfig
import time
from collections.abc import Mapping
from pathlib import Path

from iris_ray.processes.identity import stat_of

POLL_S = 0.02


class LocalProcess:
    """``python -m MODULE PATH PARENT``, the leader of a process group of its own, which Ctrl-C does not reach.

    Args:
        module: the module to run, which calls `end_with_parent` first.
        path: its first argument.
        environ: its environment.
        piped: whether `output` gives what the process prints; otherwise it prints where this process does.
    """

    def __init__(self, module: str, path: Path, environ: Mapping[str, str], piped: bool = False) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, str(path), str(os.getpid())],
            env=with_module_path(environ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE if piped else None,
            stderr=subprocess.STDOUT if piped else None,
            start_new_session=True,
        )
        self.pid = self._process.pid
        self.stat = stat_of(self.pid)
        self.output = self._process.stdout

    def exit_code(self) -> int | None:
        """Return the exit code, or the negative number of the signal that killed the process; None while it runs.

        Kill what is left of the process group of a process that has ended.
        """
        if self._process.returncode is None and self._has_ended(os.WNOHANG):
            self.kill()
        return self._process.returncode

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for the end of the process; return whether it has ended."""
        if timeout_s is None and self._process.returncode is None:
            self._has_ended()
        deadline = time.monotonic() + (timeout_s or 0.0)
        while self.exit_code() is None and time.monotonic() < deadline:
            time.sleep(POLL_S)
        return self.exit_code() is not None

    def _has_ended(self, options: int = 0) -> bool:
        """Return whether the process has ended and is not reaped. No other process has its number, or its group's."""
        try:
            return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT | options) is not None
        except ChildProcessError:  # the script has reaped it, or ignores SIGCHLD
            self._process.poll()
            return False

    def interrupt(self) -> None:
        """Send the signal of Ctrl-C."""
        self._process.send_signal(signal.SIGINT)

    def kill(self) -> None:
        """Kill the process and what is left of its process group."""
        if self._process.returncode is not None:
            return  # the numbers may be those of other processes by now
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()


def with_module_path(environ: Mapping[str, str]) -> dict[str, str]:
    """Return an environment in which a process finds the modules that this one finds."""
    pythons = {
        *(os.path.dirname(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib")),
        *site.getsitepackages(),
    }
    given = (path or os.getcwd() for path in sys.path if isinstance(path, str))  # Python ignores other entries, too
    ours = [path for path in given if not any(Path(path).is_relative_to(theirs) for theirs in pythons)]
    return {**environ, "PYTHONPATH": os.pathsep.join(ours)}
