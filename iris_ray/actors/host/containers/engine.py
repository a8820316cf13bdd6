"""The container engine of a host, docker or podman, by its command. The engine owns a container; iris_ray does not."""

import os
import shutil
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass

from iris_ray.actors.host.containers.command import LABEL
from iris_ray.errors import ContainerEngineError
from iris_ray.settings import CONTAINER_ENGINE

KNOWN = ("docker", "podman")
"""Tried in this order where the host's environment names no engine, by its command or path."""

ANSWER_S = 30.0
"""How long an engine may take to answer."""
REMOVAL_S = 120.0
"""How long it may take until a container is gone: the kernel may have much memory to take back."""
POLL_S = 0.2


@dataclass(frozen=True, slots=True)
class ContainerState:
    """What the engine says about a container.

    Attributes:
        status: such as ``"created"``, ``"running"``, ``"exited"``.
        exit_code: of its program; 128 and the number of the signal that killed it.
        out_of_memory: whether the kernel killed it for lack of memory.
    """

    status: str
    exit_code: int
    out_of_memory: bool


class ContainerEngine:
    """One engine of this host.

    Args:
        path: its command.
    """

    def __init__(self, path: str) -> None:
        self.path = path

    @property
    def name(self) -> str:
        return os.path.basename(self.path)

    def problem(self) -> str | None:
        """Return why this engine can't run containers, as it says itself; None if it can."""
        code, said = self._ask("version")
        return None if code == 0 else said or f"its exit code is {code}"

    def run(self, arguments: list[str], environ: Mapping[str, str]) -> int:
        """Run the engine's client, which prints where this process prints; return its exit code when it has ended."""
        return subprocess.run([self.path, *arguments], env=environ, stdin=subprocess.DEVNULL, check=False).returncode

    def state(self, name: str) -> ContainerState | None:
        """Return what the engine says about a container; None if there is none, or if it says nothing."""
        form = "{{.State.Status}} {{.State.ExitCode}} {{.State.OOMKilled}}"
        code, said = self._ask("container", "inspect", f"--format={form}", name)
        try:
            status, exit_code, out_of_memory = said.split()
            return ContainerState(status, int(exit_code), out_of_memory == "true") if code == 0 else None
        except ValueError:
            return None

    def terminate(self, name: str) -> bool:
        """Send SIGTERM to a container's program; return whether it runs."""
        return self._ask("kill", "--signal=TERM", name)[0] == 0

    def remove(self, name: str, timeout_s: float = REMOVAL_S) -> str | None:
        """Kill a container if it runs, and remove it. Blocks until it is gone.

        Returns:
            Why it may still be there after ``timeout_s`` seconds; None once it is gone.
        """
        deadline = time.monotonic() + timeout_s
        while (problem := self._removed_now(name)) is not None:
            if time.monotonic() > deadline:
                return problem
            time.sleep(POLL_S)
        return None

    def _removed_now(self, name: str) -> str | None:
        code, found = self._ask("ps", "--all", "--quiet", f"--filter=label={LABEL}={name}")
        if code != 0:
            return found or f"{self.name} does not answer"
        if not found:
            return None
        self._ask("kill", name)  # else podman would wait for its program to heed a SIGTERM
        self._ask("rm", "--force", "--volumes", name)
        return f"{self.name} has not removed it"

    def _ask(self, *arguments: str) -> tuple[int, str]:
        """Run a command of the engine; return its exit code and what it says, errors if it fails.

        An engine that does not answer has the exit code -1.
        """
        try:
            done = subprocess.run(
                [self.path, *arguments], stdin=subprocess.DEVNULL, capture_output=True, timeout=ANSWER_S, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return -1, str(error)
        said = done.stderr if done.returncode else done.stdout
        return done.returncode, said.decode(errors="replace").strip()


def find_engine(environ: Mapping[str, str] = os.environ) -> ContainerEngine:
    """Return the first engine of this host that answers.

    Raises:
        ContainerEngineError: none does; the message says why, for each.
    """
    wanted = CONTAINER_ENGINE.read(environ)
    problems = []
    for command in (wanted,) if wanted else KNOWN:
        path = shutil.which(command)
        problem = "there is no such command" if path is None else ContainerEngine(path).problem()
        if path is not None and problem is None:
            return ContainerEngine(path)
        problems.append(f"{command}: {problem}")
    raise ContainerEngineError(
        f"no container engine answers on this host ({'; '.join(problems)}). Install docker or podman there and let the"
        f" user of Ray use it; {CONTAINER_ENGINE.name} names another one"
    )
