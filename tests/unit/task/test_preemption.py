"""What a task hears from its host, and says to it: notices and callbacks."""

import threading
import time
from pathlib import Path

import pytest

from iris_ray import on_preemption, preemption_notice
from iris_ray.actors.protocol.task_files import TaskFiles
from iris_ray.errors import InvalidRequestError
from iris_ray.model.notices import Notice, NoticeKind
from iris_ray.task.preemption import PreemptionNotice
from tests.support.processes import NOTICE, PATIENCE_S
from tests.support.waiting import wait_until


def test_outside_a_task_there_is_no_notice_and_no_callback(own_host: Path) -> None:
    threads = threading.active_count()
    assert preemption_notice() is None
    on_preemption(lambda notice: None)
    assert threading.active_count() == threads
    assert list((own_host / "tasks").iterdir()) == []


def test_callback_that_nobody_could_call_is_refused_at_once_inside_a_task_and_outside(own_host: Path) -> None:
    """Else the mistake shows when the hosts are being taken, and the state of the run is lost."""
    with pytest.raises(InvalidRequestError, match="callback is None; give a function"):
        on_preemption(None)  # type: ignore[arg-type]

    async def save(notice: PreemptionNotice) -> None:
        """Nobody would run it."""

    with pytest.raises(InvalidRequestError, match=r"callback is <function .*, and is not async"):
        on_preemption(save)


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
