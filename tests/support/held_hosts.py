"""Held hosts without a cluster: their processes are real, and wait on this machine."""

import contextlib
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

from iris_ray.dev.code_directory import CodeDirectory
from iris_ray.dev.held_job import Held, HeldHost, warm_process
from iris_ray.dev.held_run import HeldRun, HostPiece, Sent
from iris_ray.dev.warm_process import HeldDirectory


class HeldHosts:
    """Hosts that wait for runs, and the directory of the person who holds them.

    Attributes:
        here: the person's directory, empty at first.
        held: the way to the hosts.
        there: the directories of the hosts.
        warm: their processes.
    """

    def __init__(self, here: Path, held: Held, there: Sequence[HeldDirectory], warm: Sequence[object]) -> None:
        self.here = here
        self.held = held
        self.there = there
        self.warm: list[subprocess.Popen[str]] = list(warm)  # type: ignore[arg-type]

    @staticmethod
    @contextlib.contextmanager
    def of(path: Path, count: int, preload: Sequence[str] = ()) -> Iterator["HeldHosts"]:
        here = path / "here"
        here.mkdir()
        there = [HeldDirectory(path / f"host{index}") for index in range(count)]
        with contextlib.ExitStack() as running:
            hosts, warm = [], []
            for index, directory in enumerate(there):
                directory.path.mkdir()
                process, facts = running.enter_context(warm_process(directory, "127.0.0.1", preload))
                hosts.append(HeldHost(index, f"v4-16-0/{index}", **facts))
                warm.append(process)
            yield HeldHosts(here, Held("mine", "", "dev-mine-1a2b3c4d", tuple(hosts)), there, warm)

    def write(self, **files: str) -> None:
        """Write Python files of the person's directory."""
        for name, text in files.items():
            (self.here / f"{name}.py").write_text(text)

    def begin(self, *words: str, sent: list[Sent] | None = None, **env: str) -> HeldRun:
        run = HeldRun(self.held)
        try:
            run.start(CodeDirectory.look(self.here), words, env, (lambda _: None) if sent is None else sent.append)
        except BaseException:
            run.__exit__(None, None, None)
            raise
        return run

    def run(self, *words: str, sent: list[Sent] | None = None, **env: str) -> tuple[int, list[str], list[str]]:
        """Run a program to its end. Return its exit code, and what each host has printed to stdout and to stderr."""
        with self.begin(*words, sent=sent, **env) as run:
            pieces = list(run.pieces())
        return run.exit_code, self._printed(pieces, False), self._printed(pieces, True)

    def _printed(self, pieces: Sequence[HostPiece], is_err: bool) -> list[str]:
        return [
            b"".join(piece.data for piece in pieces if piece.host == host and piece.is_err == is_err).decode()
            for host in self.held.hosts
        ]
