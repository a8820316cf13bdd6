"""A sink that fails loses no output of a task, and leaves nothing open."""

import os
from pathlib import Path
from typing import Any, ClassVar

import pytest

from iris_ray.actors.host import output
from iris_ray.actors.host.output import CHUNK_BYTES, OutputPump, PlainOutput
from iris_ray.actors.host.redirect import StartedTask
from iris_ray.actors.protocol.services import Service
from iris_ray.actors.protocol.task_files import TaskFiles
from tests.support.waiting import wait_until

MARK = '{"job_id": "job-1", "task_index": 3, "attempt": 1, "num_tasks": 1, "label": "label"}'


class Sink:
    """Takes nothing, and ends the process that asks it to."""

    patience_s = None
    error: ClassVar[type[BaseException]] = ValueError
    closed: ClassVar[int] = 0

    def __init__(self, *_: Any) -> None: ...

    def take(self, data: bytes, is_stopped: bool) -> None:
        raise Sink.error("on purpose")

    def close(self) -> None:
        Sink.closed += 1
        raise Sink.error("on purpose")


@pytest.mark.parametrize("error", [ValueError, SystemExit])
def test_output_that_a_failing_sink_was_given_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    shown: list[str] = []
    monkeypatch.setattr(output.terminal, "show", lambda _, lines: shown.extend(lines))
    monkeypatch.setattr(output, "installed_services", lambda: [Service("sink", output=f"{__name__}:Sink")])
    monkeypatch.setattr(Sink, "error", error)
    monkeypatch.setattr(Sink, "closed", 0)
    (tmp_path / "tasks").mkdir()
    pump = OutputPump(tmp_path, 7, "node", lambda *_: None)
    files = TaskFiles.of_process(tmp_path, 7)
    files.started.write_text(MARK)
    pipe = os.open(files.output, os.O_WRONLY)
    os.write(pipe, b"first\n")
    wait_until(lambda: Sink.closed)
    os.write(pipe, b"second\n")
    pump.close()
    os.close(pipe)
    assert (shown, Sink.closed) == (["first", "second"], 1)


def test_plain_output_holds_little_of_a_task_without_newlines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []
    monkeypatch.setattr(output.terminal, "show", lambda _, lines: shown.extend(lines))
    files = TaskFiles.of_process(tmp_path, 7)
    files.started.parent.mkdir(exist_ok=True)
    files.started.write_text(MARK)
    task = StartedTask.read(files)
    assert task is not None
    plain = PlainOutput(task)
    for _ in range(8):
        plain.take(b"x" * CHUNK_BYTES, is_stopped=False)
    assert sum(map(len, shown)) >= 6 * CHUNK_BYTES
    plain.end()
    assert sum(map(len, shown)) == 8 * CHUNK_BYTES
