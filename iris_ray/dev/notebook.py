"""``%%slice NAME`` in a notebook: the cell runs on every host of held slices, and its output comes by host."""

import argparse
import contextlib
import json
import os
import secrets
import shlex
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from iris_ray.client.connection import AUTO, connect
from iris_ray.dev.cells import end_of
from iris_ray.dev.code_directory import CodeDirectory
from iris_ray.dev.held_job import HeldHost
from iris_ray.dev.held_run import HeldRun, begin, begin_through, try_remembered
from iris_ray.errors import IrisError, SessionError, TaskMovedError
from iris_ray.terminal import live_line

if TYPE_CHECKING:
    from iris_ray.dev.held_run import Sent
    from iris_ray.remote.laptop_end import TunnelInThread

WORDS = ("python", "-m", "iris_ray.dev.cells")


class SliceMagic:
    """The magic ``slice`` of one notebook.

    Args:
        shell: IPython's.
    """

    def __init__(self, shell: Any) -> None:
        self._shell = shell
        self._cells: dict[str, _Cells] = {}

    def __call__(self, line: str, cell: str | None = None) -> None:
        """Run a cell on every host of slices that you hold.

        ``%%slice mine`` runs the cell; variables stay for the next one. ``%slice mine --end`` ends the processes, so
        that `iris-ray dev run` can use the hosts; the next cell begins with fresh ones, and with the directory as it is
        then.
        """
        from IPython.core.error import UsageError

        parser = argparse.ArgumentParser("%%slice", add_help=False, exit_on_error=False)
        parser.add_argument("name")
        parser.add_argument("--end", action="store_true")
        try:
            asked = parser.parse_args(shlex.split(line))
            if asked.end:
                self.end(asked.name)
            elif cell is None:
                raise UsageError("%slice NAME --end, or %%slice NAME with a cell below it")
            else:
                self._run(asked.name, cell)
        except (IrisError, argparse.ArgumentError, SystemExit) as error:
            raise UsageError(str(error)) from None

    def end(self, name: str | None = None) -> None:
        """End the processes on the hosts of a name, or all."""
        for one in [name] if name is not None else list(self._cells):
            if (cells := self._cells.pop(one, None)) is not None:
                cells.end()

    def _run(self, name: str, cell: str) -> None:
        if name not in self._cells:
            self._cells[name] = _Cells(name)
        cells = self._cells[name]
        try:
            cells.run(cell, len(self._shell.user_ns["In"]) - 1)
        except SessionError as error:
            if cells.is_over:
                self.end(name)
                again = ", ".join(f"In [{number}]" for number in cells.numbers)
                raise SessionError(
                    f"{error}. The next %%slice {name} begins with fresh processes, on other hosts if need be. The"
                    f" variables of earlier cells are gone: if you need them, run these cells again: {again}"
                ) from None
            raise


class _Cells:
    """The processes of one notebook on the hosts of a held job."""

    def __init__(self, name: str) -> None:
        code = CodeDirectory.look(Path.cwd())  # it may be too large
        cluster = os.environ.get("RAY_ADDRESS") or AUTO
        self._tunnel: TunnelInThread | None = None
        if cluster.startswith(("http://", "https://")):
            self._held_run = self._through_dashboard(name, cluster)
        else:
            self._held_run = try_remembered(name, cluster) or _asked_for(name, cluster)
        self.numbers: list[int] = []
        self.is_over = False

        def say(sent: "Sent") -> None:
            if sent.files or code.left_out:
                print(f"sent {code.in_words(sent.files, sent.size)}", file=sys.stderr)

        try:
            self._held_run.start(code, WORDS, {}, say)
        except BaseException:
            self.end()
            raise

    def _through_dashboard(self, name: str, address: str) -> HeldRun:
        from iris_ray.remote.laptop_end import TunnelInThread
        from iris_ray.remote.ray_jobs import RayJobs  # these import Ray

        self._tunnel = TunnelInThread(RayJobs(address))
        try:
            return begin_through(self._tunnel, name, address)
        except BaseException:
            self._tunnel.close()
            raise

    def run(self, cell: str, number: int) -> None:
        """Run a cell, and show its output.

        Raises:
            SessionError: it failed on some host, or the processes are gone.
        """
        self.numbers.append(number)
        token = secrets.token_hex(8)
        asked = {"cell": cell, "number": number, "token": token}
        self._held_run.write(json.dumps(asked).encode() + b"\n")
        ends = {True: end_of(token, True), False: end_of(token, False)}
        outputs = {(host, is_err): _Output(host, is_err) for host in self._held_run.hosts for is_err in (False, True)}
        interrupts = 0
        while not all(one.is_well is not None for one in outputs.values()):
            try:
                self._show(outputs, ends)
            except KeyboardInterrupt:
                interrupts += 1
                if interrupts > 1:
                    self.is_over = True
                    raise SessionError("the processes on the hosts were killed at the second interrupt") from None
                self._held_run.signal(signal.SIGINT)
            except TaskMovedError:
                self.is_over = True
                raise SessionError(self._held_run.lost) from None
            except SessionError:
                self.is_over = True
                raise
        if failed := [host.label for (host, is_err), one in outputs.items() if not is_err and not one.is_well]:
            raise SessionError(f"the cell failed on {', '.join(failed)}")

    def _show(self, outputs: "dict[tuple[HeldHost, bool], _Output]", ends: dict[bool, bytes]) -> None:
        for piece in self._held_run.pieces():
            if piece.note:
                print(f"{piece.host.label} {piece.note}", file=sys.stderr)
                continue
            outputs[piece.host, piece.is_err].add(piece.data, ends)
            if all(one.is_well is not None for one in outputs.values()):
                return
        raise SessionError("the processes on the hosts have ended, by themselves or as no cell came for half an hour")

    def end(self) -> None:
        with self._held_run, contextlib.suppress(SessionError):
            self._held_run.end()
            for _ in self._held_run.pieces():
                pass
        if self._tunnel is not None:
            self._tunnel.close()


def _asked_for(name: str, cluster: str) -> HeldRun:
    """Begin a run on hosts for which the cluster is asked."""
    import ray

    was_connected = ray.is_initialized()
    connect(cluster)
    try:
        with live_line(name) as line:
            return begin(name, cluster, line)
    finally:
        if not was_connected:
            ray.shutdown()


class _Output:
    """One stream of one host during a cell, shown line by line.

    Attributes:
        is_well: whether the cell went well, once it has ended there.
    """

    def __init__(self, host: HeldHost, is_err: bool) -> None:
        self._label = f"{host.label}| "
        self._is_err = is_err
        self._rest = b""
        self.is_well: bool | None = None

    def add(self, data: bytes, ends: dict[bool, bytes]) -> None:
        self._rest += data
        for is_well, end in ends.items():
            if end in self._rest:
                self._rest, self.is_well = self._rest.partition(end)[0], is_well
        *lines, self._rest = self._rest.split(b"\n")
        if self.is_well is not None and self._rest:
            lines.append(self._rest)
        if lines:
            text = "".join(f"{self._label}{line.decode(errors='replace')}\n" for line in lines)
            print(text, end="", file=sys.stderr if self._is_err else sys.stdout, flush=True)


def load_ipython_extension(shell: Any) -> None:
    """Give a notebook ``%%slice NAME``; ``%load_ext iris_ray`` calls this.

    Args:
        shell: IPython's.
    """
    shell.register_magic_function(SliceMagic(shell), "line_cell", "slice")
