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
from iris_ray.docker.core import CONTAINER_LABEL as LABEL


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

    def inspect(self, name: str) -> str:
        """All that the engine keeps of a container."""
        return "\n".join(path.read_text() for path in (self._directory / name).iterdir())

    def pid(self, name: str) -> int | None:
        """The process of a container's program; None before it runs."""
        found = stand_in.read(self._directory / name / "pid")
        return None if found is None else int(found)

    def clear(self) -> None:
        for name in self.containers():
            if (pid := self.pid(name)) is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)


@contextlib.contextmanager
def a_stand_in(directory: Path) -> Iterator[StandIn]:
    """Give a stand-in, and end afterwards what still runs of it."""
    engine = StandIn(directory)
    yield engine
    engine.clear()


class Podman:
    """Real containers, with the surface of `StandIn` that tests of gangs need.

    Args:
        directory: for its image and its settings.

    Attributes:
        path: its command.
    """

    IMAGE = "localhost/iris-ray-test:1"
    APPLETS = ("sh", "true", "sleep", "touch", "env", "cat")

    def __init__(self, directory: Path) -> None:
        self._directory = directory / "engine-podman"
        self._directory.mkdir()
        self.path = self._directory / "podman"
        settings = self._directory / "containers.conf"
        settings.write_text(self._settings())
        self.path.write_text(f'#!/bin/sh\nCONTAINERS_CONF={settings} exec {shutil.which("podman")} "$@"\n')
        self.path.chmod(0o755)

    def problem(self) -> str | None:
        """Make a small image; return why containers can't run here, or None."""
        busybox = shutil.which("busybox")
        if busybox is None or shutil.which("podman") is None:
            return "needs podman, and busybox (Debian's busybox-static)"
        root = self._directory / "root"
        for folder in ("bin", "tmp", "proc", "sys", "dev", "etc"):
            (root / folder).mkdir(parents=True)
        shutil.copy(busybox, root / "bin" / "busybox")
        for applet in self.APPLETS:
            (root / "bin" / applet).symlink_to("busybox")
        archive = shutil.make_archive(str(self._directory / "rootfs"), "tar", root)
        for arguments in (["import", "--quiet", archive, self.IMAGE], ["run", "--rm", *OPTIONS, self.IMAGE, "true"]):
            done = self._call(*arguments)
            if done.returncode != 0:
                return f"podman can't run containers here: {done.stderr.strip()}"
        return None

    def containers(self) -> list[str]:
        """The names of the containers of iris_ray that are not removed."""
        return sorted(self._call("ps", "--all", "--format={{.Names}}", f"--filter=label={LABEL}").stdout.split())

    def inspect(self, name: str) -> str:
        """All that the engine keeps of a container."""
        return self._call("inspect", name).stdout

    def pid(self, name: str) -> int | None:
        """The process of a container's program; None if it does not run."""
        return int(self._call("inspect", "--format={{.State.Pid}}", name).stdout or 0) or None

    def clear(self) -> None:
        for name in self.containers():
            self._call("kill", name)
            self._call("rm", "--force", name)

    def _call(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        command = [str(self.path), *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)

    @staticmethod
    def _settings() -> str:
        """Settings with which podman runs inside of a container or a small machine, too.

        It may not raise limits of processes there, and crun does not know every arrangement of control groups.
        """
        runtime = 'runtime = "runc"\n' if shutil.which("runc") else ""
        limits = '[containers]\ndefault_ulimits = ["nofile=1024:1024", "nproc=4096:4096"]\n'
        return f'{limits}[engine]\ncgroup_manager = "cgroupfs"\n{runtime}'


OPTIONS = ("--privileged", "--net=host", "--ipc=host")
