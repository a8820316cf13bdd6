"""The surroundings of a task: its variables, working directory and Python, for a command that runs on its host.

A task sets most variables in its running process, where no other process sees them. So it keeps a copy in memory that
only its own account can open, and that goes with the process; the values are on no disk and in no message.
"""

import contextlib
import json
import os
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from iris_ray.actors.host.task_environment import ON_CPU
from iris_ray.actors.protocol.task_files import TaskFiles
from iris_ray.errors import SessionError
from iris_ray.model.job_info import COORDINATOR_VARIABLE
from iris_ray.model.multislice import MEGASCALE_PREFIX

NAME = "iris-ray-surroundings"
SHELLS = ("bash", "sh")


def keep_surroundings(_: object = None) -> None:
    """Keep a copy of this process's surroundings as long as it lives, unless the kernel has no such memory."""
    with contextlib.suppress(OSError), open(os.memfd_create(NAME), "w", encoding="utf-8", closefd=False) as copy:
        json.dump({"environ": dict(os.environ), "python": sys.executable}, copy)


@dataclass(frozen=True, slots=True)
class Surroundings:
    """The variables and the Python that a task's process has kept, and its working directory now.

    Attributes:
        environ: the variables with which user code began.
        python: the path of its interpreter.
        directory: its working directory.
    """

    environ: Mapping[str, str] = field(repr=False)
    python: str
    directory: str

    @staticmethod
    def of_process(pid: int) -> "Surroundings":
        """Return the surroundings of a task's process.

        Raises:
            SessionError: it has none, or this process may not look.
        """
        try:
            for link in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(FileNotFoundError):  # it has just been closed
                    if os.readlink(link).startswith(f"/memfd:{NAME}"):
                        found = json.loads(link.read_text(encoding="utf-8"))
                        return Surroundings(dict(found["environ"]), found["python"], os.readlink(f"/proc/{pid}/cwd"))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise SessionError(f"the variables of the task can't be read on its host: {error}") from None
        raise SessionError(
            "the variables of the task can't be read on its host: its process keeps no copy of them, since it has"
            " closed all its files, or an older iris_ray has started it"
        )

    def for_commands(self, term: str) -> dict[str, str]:
        """Return the variables of a command: the task's, except those by which it would take the task's chips or place.

        The task's token stays, so that the command ends with the attempt whatever else happens.

        Args:
            term: the kind of terminal.
        """
        left_out = {TaskFiles.VARIABLE}  # heartbeats and status are the task's own
        environ = {n: v for n, v in self.environ.items() if not n.startswith(MEGASCALE_PREFIX) and n not in left_out}
        environ |= ON_CPU | {COORDINATOR_VARIABLE: "", "TERM": term}
        path = environ.get("PATH", os.defpath)
        if os.path.dirname(shutil.which("python", path=path) or "") != os.path.dirname(self.python):
            environ["PATH"] = os.pathsep.join((os.path.dirname(self.python), path))
        return environ

    def shell(self) -> str:
        """Return the user's shell, or the first of `SHELLS` that the host has."""
        wanted = (self.environ.get("SHELL", ""), *SHELLS)
        path = self.environ.get("PATH", os.defpath)
        return next((found for shell in wanted if shell and (found := shutil.which(shell, path=path))), "/bin/sh")
