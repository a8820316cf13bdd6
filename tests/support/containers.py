"""Container engines for tests: a stand-in that runs programs as plain processes, and podman where it can run."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import tests.support.stand_in_engine as stand_in


class StandIn:
    """The stand-in in a directory of its own, whose command has a name of choice.

    Attributes:
        path: its command.
    """

    def __init__(self, directory: Path, name: str = "docker") -> None:
        self._directory = directory / f"engine-{name}"
        self._directory.mkdir()
        self.path = self._directory / name
        self.path.write_text(f"#!{sys.executable} -SE\n{Path(stand_in.__file__).read_text()}")
        self.path.chmod(0o755)

    def calls(self, command: str) -> list[list[str]]:
        """The arguments of the calls of that command."""
        try:
            lines = (self._directory / "calls").read_text().splitlines()
        except FileNotFoundError:
            return []
        return [arguments for called, *arguments in map(json.loads, lines) if called == command]

    def break_down(self) -> None:
        """Have its daemon answer no more. What runs goes on."""
        (self._directory / "broken").touch()

    def repair(self) -> None:
        (self._directory / "broken").unlink()

    def kill_for_memory(self) -> None:
        """Have it say of what ends that the kernel has killed it."""
        (self._directory / "out-of-memory").touch()

    def containers(self) -> list[str]:
        """The names of the containers that are not removed."""
        return sorted(path.name for path in self._directory.iterdir() if path.is_dir())

    def pid(self, name: str) -> int | None:
        """The process of a container's program; None before it runs."""
        found = stand_in.read(self._directory / name / "pid")
        return None if found is None else int(found)

    def clear(self) -> None:
        for name in self.containers():
            if (pid := self.pid(name)) is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)


def stand_ins(directory: Path) -> Iterator[StandIn]:
    """Yield a stand-in, and end afterwards what still runs of it."""
    engine = StandIn(directory)
    yield engine
    engine.clear()


PODMAN_IMAGE = "localhost/iris-ray-test:1"


def podman_problem(directory: Path) -> str | None:
    """Have podman make a small image of busybox; return why it can't run that here, or None."""
    podman, busybox = shutil.which("podman"), shutil.which("busybox")
    if podman is None or busybox is None:
        return "needs podman, and busybox (Debian's busybox-static)"
    (directory / "bin").mkdir(parents=True)
    shutil.copy(busybox, directory / "bin" / "busybox")
    (directory / "bin" / "sh").symlink_to("busybox")
    for folder in ("tmp", "proc", "sys", "dev", "etc"):
        (directory / folder).mkdir()
    archive = shutil.make_archive(str(directory) + "-rootfs", "tar", directory)
    tries = (
        [podman, "import", "--quiet", archive, PODMAN_IMAGE],
        [podman, "run", "--rm", "--privileged", "--net=host", "--ipc=host", PODMAN_IMAGE, "sh", "-c", "true"],
    )
    for command in tries:
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        if done.returncode != 0:
            return f"podman can't run containers here: {done.stderr.strip()}"
    return None


def podman_settings(directory: Path) -> dict[str, str]:
    """Return variables with which podman runs in containers and small machines, too.

    They may not raise limits of processes, and crun does not know every arrangement of control groups.
    """
    settings = directory / "containers.conf"
    runtime = 'runtime = "runc"\n' if shutil.which("runc") else ""
    settings.write_text(
        '[containers]\ndefault_ulimits = ["nofile=1024:1024", "nproc=1024:1024"]\n'
        f'[engine]\ncgroup_manager = "cgroupfs"\n{runtime}'
    )
    return {"CONTAINERS_CONF": str(settings)}
