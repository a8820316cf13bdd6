"""What a task hears from its host, and says to it: notices, callbacks, heartbeats."""

import multiprocessing
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from iris_ray import heartbeat, on_preemption, preemption_notice
from iris_ray.actors.wire.task_files import TaskFiles
from iris_ray.model.notices import Notice, NoticeKind
from iris_ray.task.preemption import PreemptionNotice
from tests.support.task_children import NOTICE, PATIENCE_S
from tests.support.waiting import wait_until


@pytest.fixture
def files(own_host: Path, monkeypatch: pytest.MonkeyPatch) -> TaskFiles:
    """This process is a task."""
    files = TaskFiles.of_process(own_host, os.getpid())
    monkeypatch.setenv(TaskFiles.VARIABLE, files.prefix)
    return files


def test_outside_a_task_there_is_no_notice_no_callback_and_no_heartbeat(own_host: Path) -> None:
    threads = threading.active_count()
    assert preemption_notice() is None
    on_preemption(lambda notice: None)
    heartbeat(3)
    assert threading.active_count() == threads
    assert list((own_host / "tasks").iterdir()) == []


def test_notice_says_what_it_was_told_and_a_more_urgent_one_replaces_it(files: TaskFiles) -> None:
    assert preemption_notice() is None
    files.write_notice(NOTICE)
    notice = preemption_notice()
    assert notice == PreemptionNotice(NOTICE.kind, NOTICE.reason, NOTICE.deadline)
    assert 0 < notice.seconds_left <= NOTICE.deadline - time.time() + 1
    files.write_notice(Notice(NoticeKind.PREEMPTION, "now", 1.0))
    urgent = preemption_notice()
    assert urgent == PreemptionNotice(NoticeKind.PREEMPTION, "now", 1.0)
    assert urgent.seconds_left < 0


def test_callback_is_called_once_in_a_thread_of_its_own(files: TaskFiles) -> None:
    calls: list[tuple[PreemptionNotice, str]] = []
    on_preemption(lambda notice: calls.append((notice, threading.current_thread().name)))
    (thread,) = [thread for thread in threading.enumerate() if thread.name == "iris_ray.on_preemption"]
    assert thread.daemon, "it must not keep a process alive that is over"
    time.sleep(0.3)
    assert calls == []
    files.write_notice(NOTICE)
    thread.join(PATIENCE_S)
    assert calls == [(preemption_notice(), "iris_ray.on_preemption")]
    files.write_notice(Notice(NoticeKind.PREEMPTION, "now", 1.0))
    time.sleep(0.3)
    assert len(calls) == 1


def test_saved_says_so_and_never_returns(files: TaskFiles) -> None:
    files.write_notice(NOTICE)
    notice = preemption_notice()
    assert notice is not None
    thread = threading.Thread(target=notice.saved, daemon=True)
    assert not files.saved.exists()
    thread.start()
    wait_until(files.saved.exists)
    thread.join(0.3)
    assert thread.is_alive()


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
    assert [path.name for path in files.heartbeat.parent.iterdir()] == [files.heartbeat.name], "nothing is left over"
