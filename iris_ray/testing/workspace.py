"""The directory of a simulated cluster and the machines that run in it, which end together."""

import contextlib
import os
import secrets
import subprocess
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from iris_ray.testing.machine import Machine, script_command

_JANITOR_TIMEOUT_S = 10.0


class Workspace:
    """A directory, machines started in it, and a janitor that removes it when all of them and this process are gone.

    The janitor reads one end of a pipe, the *lifeline*. This process and every process supervisor hold the other
    end, so the pipe's end of file can't be missed, however they end. See ``process_supervisor.py`` and ``janitor.py``.
    """

    def __init__(self) -> None:
        # In /tmp, not in TMPDIR: the kernel allows 107 bytes for the path of a Unix socket.
        self.root = Path(f"/tmp/iris-{os.getpid()}-{secrets.token_hex(4)}")
        self._lock = threading.Lock()
        self._machines: list[Machine] = []
        reading, self._lifeline = os.pipe()
        try:
            # Before there is a directory: this process may be killed between any two lines.
            self._janitor = subprocess.Popen(
                [*script_command("janitor.py"), str(self.root)],
                stdin=reading,
                stdout=subprocess.DEVNULL,
                cwd="/",
                start_new_session=True,
            )
            self.root.mkdir(mode=0o700)
        except BaseException:
            os.close(self._lifeline)
            raise
        finally:
            os.close(reading)

    def launch(
        self, name: str, command: Sequence[str], *, env: Mapping[str, str], cwd: Path, prefix: Sequence[str] = ()
    ) -> Machine:
        """Start a machine; see `Machine`. Its output goes to ``name.log`` until its command opens logs of its own."""
        with self._lock:
            log = self.root / f"{name}.log"
            machine = Machine(command, env=env, cwd=cwd, log=log, lifeline=self._lifeline, prefix=prefix)
            self._machines.append(machine)
        return machine

    def close(self) -> None:
        """End all machines and have the directory removed.

        Raises:
            TimeoutError: some process did not end.
        """
        with self._lock:
            # Ask all of them first: they end side by side, and an interruption from here on changes nothing.
            for machine in self._machines:
                machine.begin_kill()
            if self._lifeline >= 0:
                os.close(self._lifeline)
                self._lifeline = -1
            errors: list[TimeoutError] = []
            for machine in self._machines:
                try:
                    machine.kill()
                except TimeoutError as error:
                    errors.append(error)
            self._machines.clear()
        try:
            self._janitor.wait(_JANITOR_TIMEOUT_S)
        except subprocess.TimeoutExpired:  # it goes on by itself, but has to be reaped
            threading.Thread(target=self._janitor.wait, name="reap the janitor", daemon=True).start()
        if errors:
            raise errors[0]

    def leave_to_parent(self) -> None:
        """Close the lifeline in a forked child of this process: the child must not keep it open."""
        with contextlib.suppress(OSError):
            os.close(self._lifeline)

    def tail(self, *logs: Path, lines: int = 20) -> str:
        """Return the last lines of some log files, as the end of an error message; empty if there are none."""
        text = [line for log in logs if log.is_file() for line in log.read_text(errors="replace").splitlines()]
        return "".join(f"\n  {line}" for line in text[-lines:])
