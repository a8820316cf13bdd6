"""Real processes print into a pump's FIFO."""

import contextlib
import errno
import itertools
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from iris_ray.actors.host import output as pump
from iris_ray.actors.host.output import OutputPump
from iris_ray.actors.host.redirect import StartedTask
from iris_ray.actors.protocol.task_files import TaskFiles
from iris_ray.logs.core import LastLines
from iris_ray.logs.files import AttemptLog, logs_directory
from iris_ray.logs.host import TaskOutput
from iris_ray.logs.times import timed_lines, timed_parts
from tests.support.waiting import wait_until

MARK = '{"job_id": "job-1", "task_index": 3, "attempt": 1, "num_tasks": 1, "label": "label"}'


class Pumped:
    """A process that prints into a pump's FIFO."""

    def __init__(self, directory: Path) -> None:
        (directory / "tasks").mkdir()
        self.reports: list[LastLines] = []
        self.pump = OutputPump(directory, 7, "node", lambda _, last: self.reports.append(last))
        TaskFiles.of_process(directory, 7).started.write_text(MARK)
        self.pipe = TaskFiles.of_process(directory, 7).output
        self.log = AttemptLog(logs_directory(directory), "job-1", 3, 1)

    def run(self, script: str) -> subprocess.CompletedProcess[bytes]:
        with self.pipe.open("wb") as output:
            return subprocess.run([sys.executable, "-c", script], stdout=output, stderr=output, check=False)


@pytest.fixture
def pumped(tmp_path: Path) -> Iterator[Pumped]:
    one = Pumped(tmp_path)
    yield one
    one.pump.close()


def test_pump_keeps_all_output_of_killed_process(pumped: Pumped) -> None:
    script = "import os, signal\nos.write(1, b'x' * 3_000_000 + b'end')\nos.kill(os.getpid(), signal.SIGKILL)"
    assert pumped.run(script).returncode == -9
    pumped.pump.close()
    piece = pumped.log.read(0, 10_000_000)
    assert piece is not None
    assert piece.data == b"x" * 3_000_000 + b"end"
    assert not pumped.pipe.exists()


def test_lines_of_real_process_have_the_times_at_which_it_printed_them(pumped: Pumped) -> None:
    script = "import time\nfor _ in range(3):\n    print(time.time(), flush=True)\n    time.sleep(1.2)"
    pumped.run(script)
    pumped.pump.close()
    piece = pumped.log.read(0, 10_000)
    assert piece is not None
    timed = list(timed_lines(timed_parts(piece.offset, piece.data, pumped.log.times(piece))))
    assert len({at for at, _ in timed}) == 3
    for at, line in timed:
        assert at is not None
        assert -0.1 < at - float(line) < 60


def test_output_before_closing_is_kept_on_slow_host(pumped: Pumped, monkeypatch: pytest.MonkeyPatch) -> None:
    hours, has_printed = itertools.count(step=3600.0), threading.Event()
    closer = threading.Thread(target=pumped.pump.close)
    take = TaskOutput.take

    def take_when_closing(output: TaskOutput, *arguments: Any) -> None:
        has_printed.wait()
        closer.join(0.2)
        take(output, *arguments)

    monkeypatch.setattr(TaskOutput, "take", take_when_closing)
    monkeypatch.setattr(pump, "CHUNK_BYTES", 5000)
    monkeypatch.setattr(time, "monotonic", lambda: next(hours))
    assert pumped.run("print('x' * 29_999)").returncode == 0
    closer.start()
    has_printed.set()
    closer.join()
    piece = pumped.log.read(0, 10_000_000)
    assert piece is not None
    assert piece.end == 30_000


def test_pump_reports_last_lines_during_run_and_at_end(pumped: Pumped) -> None:
    with pumped.pipe.open("wb", buffering=0) as output:
        output.write(b"first\n")
        wait_until(lambda: pumped.reports)
        output.write(b"y" * 10_000 + b"\nlast words\n")
    pumped.pump.close()
    assert pumped.reports[0].data == b"first\n"
    assert pumped.reports[-1].data.endswith(b"y\nlast words\n")
    assert len(pumped.reports[-1].data) == 4096
    assert pumped.reports[-1].end == 6 + 10_000 + 12


def test_silent_task_reports_nothing_and_leaves_empty_log(pumped: Pumped) -> None:
    pumped.pump.close()
    piece = pumped.log.read(0, 10)
    assert piece is not None
    assert piece.data == b""
    assert pumped.reports == []


def test_pump_of_unstarted_process_leaves_nothing(tmp_path: Path) -> None:
    one = Pumped(tmp_path)
    TaskFiles.of_process(tmp_path, 7).started.unlink()
    one.pump.close()
    one.pump.close()  # again does no harm
    assert one.log.read(0, 10) is None


def test_pump_on_read_only_disk_closes_descriptors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, missing_ok: bool = False) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    before = len(os.listdir("/proc/self/fd"))
    one = Pumped(tmp_path)
    one.run("print('hello')")
    with monkeypatch.context() as read_only:
        read_only.setattr(Path, "unlink", refuse)
        one.pump.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_pump_shows_small_part_of_much_output(pumped: Pumped, capsys: pytest.CaptureFixture[str]) -> None:
    pumped.run("import sys\nsys.stdout.write(''.join(f'line {n}\\n' for n in range(300_000)))")
    pumped.pump.close()
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == ":actor_name:label"
    assert printed[1] == "line 0"
    assert len(printed) < 100_000
    assert any("left out here; see iris-ray logs job-1 3" in line for line in printed)
    piece = pumped.log.tail(1, 100)
    assert piece is not None
    assert piece.data == b"line 299999\n"


def test_tasks_sharing_host_are_shown_under_own_labels(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tasks = (StartedTask("job-1", index, 1, 2, f"train task={index}") for index in range(2))
    one, other = (TaskOutput(task, tmp_path, "node", lambda *_: None) for task in tasks)
    one.take(b"from 0\n", is_stopped=False)
    one.take(b"from 0 again\n", is_stopped=False)
    other.take(b"from 1\n", is_stopped=False)
    one.close()
    other.close()
    label, shown = "", []
    for line in capsys.readouterr().out.splitlines():
        if line.startswith(":actor_name:"):
            label = line
        else:
            shown.append((label.removeprefix(":actor_name:"), line))
    expected = [("train task=0", "from 0"), ("train task=0", "from 0 again"), ("train task=1", "from 1")]
    assert shown == expected


def test_task_goes_on_printing_if_output_cannot_be_kept(
    pumped: Pumped, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise ValueError("a defect")

    monkeypatch.setattr(TaskOutput, "take", fail)
    assert pumped.run("print('x' * 5_000_000)").returncode == 0
    assert "the output of process 7 can no longer be kept" in caplog.text


def test_output_is_kept_although_rays_log_disk_is_full(pumped: Pumped, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host's directory may be on another disk, and what the driver's terminal shows goes through Ray's logs."""
    with contextlib.suppress(OSError), open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        pumped.run("print('step 1')")
        pumped.pump.close()
    piece = pumped.log.read(0, 100)
    assert piece is not None
    assert piece.data == b"step 1\n"
    assert [report.data for report in pumped.reports] == [b"step 1\n"]


def test_pump_of_stopped_task_shows_one_more_line(pumped: Pumped, capsys: pytest.CaptureFixture[str]) -> None:
    """Peers of a lost slice print native stacks of a hundred lines each, which would hide the cause."""
    pumped.run("print('step 7')")
    wait_until(lambda: (piece := pumped.log.read(0, 10)) is not None and piece.data == b"step 7\n")
    pumped.pump.stop_showing()
    pumped.run("for frame in range(100): print('frame', frame)")
    pumped.pump.close()
    shown = capsys.readouterr().out.splitlines()
    assert shown[-2:] == ["step 7", "… 100 lines left out here; see iris-ray logs job-1 3"]
    piece = pumped.log.read(0, 10_000)
    assert piece is not None
    assert piece.data.endswith(b"frame 99\n")
