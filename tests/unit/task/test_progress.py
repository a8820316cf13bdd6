"""What a task says of how far it is: heartbeats, and words for people."""

import multiprocessing
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from iris_ray import heartbeat, report_status
from iris_ray.actors.wire.task_files import STATUS_CHARACTERS, TaskFiles
from iris_ray.errors import InvalidRequestError


def test_outside_a_task_nothing_is_written(own_host: Path) -> None:
    heartbeat(3)
    report_status("loss 2.31")
    assert list((own_host / "tasks").iterdir()) == []


def test_status_is_the_latest_and_one_line_of_bounded_length(files: TaskFiles) -> None:
    assert files.read_status() is None
    report_status("warming up")
    report_status("loss 2.31,\n\tMFU 41 % \udc80")
    assert files.read_status() == "loss 2.31, MFU 41 % \\udc80"
    report_status("ä" * 10_000_000)
    assert files.read_status() == "ä" * STATUS_CHARACTERS


def test_status_that_is_no_text_is_refused_inside_a_task_and_outside(own_host: Path) -> None:
    with pytest.raises(InvalidRequestError, match=r"the status is 2\.31; give a str"):
        report_status(2.31)  # type: ignore[arg-type]


def test_heartbeat_says_the_step_and_when(files: TaskFiles) -> None:
    heartbeat()
    assert files.heartbeat.read_text() == ""
    heartbeat(7)
    assert files.heartbeat.read_text() == "7"
    os.utime(files.heartbeat, (1.0, 1.0))
    heartbeat(7)
    assert time.time() - files.heartbeat.stat().st_mtime < 60, "the same step once more is a sign of life, too"


def beat(times: int) -> None:
    for _ in range(times):
        heartbeat(1234567890)


def test_heartbeat_of_several_threads_and_processes_at_once_is_always_whole(files: TaskFiles) -> None:
    """The unfinished file of one was renamed by another of the same process."""
    heartbeat(1234567890)
    errors: list[threading.ExceptHookArgs] = []
    before, threading.excepthook = threading.excepthook, errors.append
    try:
        context = multiprocessing.get_context("fork")
        children = [context.Process(target=beat, args=(100,)) for _ in range(2)]
        threads = [threading.Thread(target=beat, args=(100,)) for _ in range(4)]
        all_of_them: list[Any] = [*children, *threads]
        for one in all_of_them:
            one.start()
        while any(one.is_alive() for one in all_of_them):
            assert files.heartbeat.read_text() == "1234567890"
        for one in all_of_them:
            one.join()
    finally:
        threading.excepthook = before
    assert errors == []
    assert [child.exitcode for child in children] == [0, 0]
    left = {path.name for path in files.heartbeat.parent.iterdir()}
    assert left == {files.heartbeat.name, files.first_steps.name}, "nothing is left over"
