"""Python processes of this machine that end with the process that has started them."""

import contextlib
import os
import signal
import site
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path


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
        self.output = self._process.stdout

    def exit_code(self) -> int | None:
        """Return the exit code, or the negative number of the signal that killed the process; None while it runs."""
        return self._process.poll()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for the end of the process; return whether it has ended."""
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def interrupt(self) -> None:
        """Send the signal of Ctrl-C."""
        self._process.send_signal(signal.SIGINT)

    def kill(self) -> None:
        """Kill the process and what is left of its process group."""
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
