"""What a task says of how far it is: heartbeats, and words for people."""

import errno
import multiprocessing
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from iris_ray import heartbeat, preemption_notice, report_status, unproductive
from iris_ray.actors.host import task_watch
from iris_ray.actors.host.task_watch import TaskProgress
from iris_ray.actors.protocol.messages import Progress, Saves
from iris_ray.actors.protocol.task_files import STATUS_CHARACTERS, TaskFiles
from iris_ray.errors import InvalidRequestError
from iris_ray.model.goodput import Marks
from iris_ray.model.plain_values import plain
from iris_ray.model.rhythm import ENOUGH_STEPS, FIRST_STEPS, Rhythm
from iris_ray.task import progress
from iris_ray.task.preemption import known_notice


def test_outside_a_task_nothing_is_written(own_host: Path) -> None:
    heartbeat(3)
    report_status("loss 2.31")
    assert list((own_host / "tasks").iterdir()) == []


def test_status_is_latest_single_bounded_line(files: TaskFiles) -> None:
    assert files.read_status() is None
    report_status("warming up")
    report_status("loss 2.31,\n\tMFU 41 % \udc80")
    assert files.read_status() == "loss 2.31, MFU 41 % \\udc80"
    report_status("ä" * 10_000_000)
    assert files.read_status() == "ä" * STATUS_CHARACTERS


def test_numbers_of_status_follow_its_text(files: TaskFiles) -> None:
    report_status(loss=2.3125)
    assert files.read_status() == "loss=2.3125"
    report_status("ETA 3 h", loss=float(np.float32(0.5)), lr=1e-5)
    assert files.read_status() == "ETA 3 h loss=0.5 lr=1e-05"
    report_status("x" * 1000, loss=2)
    assert files.read_status() == "x" * (STATUS_CHARACTERS - 7) + " loss=2"
    for no_number in ("2.31", None, [1.0, 2.0]):
        with pytest.raises(InvalidRequestError, match=r"give a number, such as loss=2\.31"):
            report_status(loss=no_number)  # type: ignore[arg-type]


def test_status_that_is_no_text_is_refused_everywhere(own_host: Path) -> None:
    with pytest.raises(InvalidRequestError, match=r"the status is 2\.31; give a str"):
        report_status(2.31)  # type: ignore[arg-type]


def test_heartbeat_records_step_and_time(files: TaskFiles) -> None:
    heartbeat()
    assert files.heartbeat.read_text() == ""
    heartbeat(7)
    assert files.heartbeat.read_text() == "7"
    os.utime(files.heartbeat, (1.0, 1.0))
    heartbeat(7)
    assert time.time() - files.heartbeat.stat().st_mtime < 60, "the same step once more is a sign of life, too"


@pytest.mark.parametrize("step", [float("nan"), float("inf"), 2**63, -(10**20), "first", [1]])
def test_step_that_is_no_64_bit_integer_is_refused(own_host: Path, step: Any) -> None:
    with pytest.raises(InvalidRequestError, match="give an int"):
        heartbeat(step)


@pytest.mark.parametrize("content", [str(10**20), str(2**63 - 1), "1e300", "nan", "no step"])
def test_odd_task_files_do_not_block_report_of_end(files: TaskFiles, content: str) -> None:
    """The Controller takes no larger numbers, and refused the whole report: the job never ended there."""
    files.started.touch()
    files.heartbeat.write_text(content)
    files.first_steps.write_text(f"{content} {time.time()}\n")
    files.marked.write_text(f'[{{"tpu_init": 1{"0" * 400}, "data_loading": NaN, "training_prep": 3}}, {{}}]')
    said = TaskProgress(files).read()
    assert plain(Progress, said, "progress") == said
    assert said.step is None
    assert said.marks == Marks((), {"training_prep": 3.0})


@pytest.mark.parametrize("set_by", [-3600.0, 0.0, 3600.0])
@pytest.mark.parametrize("is_seen_first", [True, False])
@pytest.mark.parametrize("knows_rhythm", [True, False])
def test_heartbeat_age_ignores_wall_clock_changes(
    files: TaskFiles, monkeypatch: pytest.MonkeyPatch, set_by: float, is_seen_first: bool, knows_rhythm: bool
) -> None:
    """Else a gang that hangs would seem to go on, or the other way round."""
    now, ahead = 1000.0, 1e9
    if knows_rhythm:
        files.rhythm.touch()
        os.utime(files.rhythm, (now + ahead,) * 2)
    clocks = SimpleNamespace(monotonic=lambda: now, time=lambda: now + ahead)
    monkeypatch.setattr(task_watch, "time", clocks)

    def beats() -> None:
        heartbeat(1)
        os.utime(files.heartbeat, (clocks.time(),) * 2)

    progress = TaskProgress(files)
    now += 5.0
    assert progress.read().age is None
    now += 3.0
    beats()
    now += 2.0
    if is_seen_first:
        assert progress.read().age == pytest.approx(2.0)
    ahead += set_by
    now += 1.0
    age = progress.read().age
    assert age is not None
    assert age == pytest.approx(3.0) if is_seen_first or not set_by else 0.0 <= age <= 6.0, "it can't be known better"
    now += 7.0
    later = progress.read().age
    assert later == pytest.approx(age + 7.0)
    now += 1.0
    beats()
    now += 1.0
    assert progress.read().age == pytest.approx(1.0)


def beat(times: int) -> None:
    for _ in range(times):
        heartbeat(1234567890)


def test_host_reads_rhythm_and_declared_pause(files: TaskFiles) -> None:
    files.started.touch()
    progress = TaskProgress(files)
    for step in range(FIRST_STEPS + 1 + ENOUGH_STEPS):
        heartbeat(step)
    rhythm = progress.read().rhythm
    assert (rhythm.steps, rhythm.pause) == (ENOUGH_STEPS, None)
    assert 0.0 < rhythm.longest_s < 60.0
    with unproductive("evaluation"), unproductive("checkpoint_save"):
        assert progress.read().rhythm.pause == "evaluation"
    rhythm = progress.read().rhythm
    assert rhythm.pause is None
    assert rhythm.pauses.keys() == {"evaluation", "checkpoint_save"}
    assert progress.read().marks.during.keys() == {"checkpoint_save"}, "an evaluation is productive"


def test_heartbeat_on_a_full_disk_is_a_sign_of_life(files: TaskFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in range(FIRST_STEPS + 2):
        heartbeat(step)
    progress = TaskProgress(files)
    for path in (files.heartbeat, files.rhythm):
        os.utime(path, (0.0, time.time() - 1000.0))
    age = progress.read().age
    assert age is not None

    def fails(*_: object, **__: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_text", fails)
    time.sleep(0.5)
    heartbeat(FIRST_STEPS + 2)
    found = progress.read()
    assert found.age is not None
    assert found.age < 0.5
    assert found.step == FIRST_STEPS + 1, "the disk did not take the last one"


def test_first_heartbeat_on_a_full_disk_is_a_sign_of_life(files: TaskFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_text", fails)
    heartbeat(0)
    found = TaskProgress(files).read()
    assert found.age is not None
    assert found.step is None
    os.utime(files.heartbeat, (1.0, 1.0))
    heartbeat(1)  # before its rhythm is known
    age = TaskProgress(files).read().age
    assert age is not None
    assert age < 60.0


def test_end_of_declared_pause_is_a_sign_of_life(files: TaskFiles) -> None:
    progress = TaskProgress(files)
    with unproductive("checkpoint_restore"):
        pass
    assert progress.read().age is None, "it has not called heartbeat"
    heartbeat(1)
    os.utime(files.heartbeat, (time.time() - 1000.0,) * 2)
    with unproductive("evaluation"):
        pass
    age = TaskProgress(files).read().age
    assert age is not None
    assert age < 900.0


@pytest.mark.parametrize(
    "content", ["", "[]", '{"steps": "x"}', '{"steps": 1, "longest_s": [], "pause": {}, "pauses": 3}']
)
def test_senseless_rhythm_is_ignored(files: TaskFiles, content: str) -> None:
    heartbeat(1)
    files.rhythm.write_text(content)
    assert TaskProgress(files).read().rhythm == Rhythm()


def test_concurrent_heartbeats_are_always_whole(files: TaskFiles) -> None:
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
    assert left == {files.heartbeat.name, files.rhythm.name, files.first_steps.name}, "nothing is left over"


def test_host_reads_first_and_latest_steps_and_marks(files: TaskFiles) -> None:
    files.started.touch()
    with unproductive("data_loading"), unproductive("tpu_init"):
        time.sleep(0.02)
    for step in (5, 5, 6, 7, 8):
        heartbeat(step)
        time.sleep(0.02)
    with pytest.raises(ZeroDivisionError), unproductive("checkpoint_save"):
        raise ZeroDivisionError
    marks = TaskProgress(files).read().marks
    assert [step for step, _ in marks.steps] == [5, 6, 8]
    times = [began for _, began in marks.steps]
    assert 0.02 <= times[0] < times[1] - 0.03
    assert times[1] + 0.03 < times[2] < 60.0
    assert {name: seconds > 0.01 for name, seconds in marks.before.items()} == {"data_loading": True, "tpu_init": True}
    assert marks.during.keys() == {"checkpoint_save"}
    assert marks.makes_sense


def test_senseless_task_file_content_is_ignored(files: TaskFiles) -> None:
    files.started.touch()
    heartbeat(1)
    files.first_steps.write_text("1 nan\nx y\n3\n2 1e9999\n")
    files.marked.write_text('[{"tea": 3.0}, {"checkpoint_save": null}]')
    files.heartbeat.write_text("many")
    progress = TaskProgress(files).read()
    assert (progress.step, progress.marks.steps, progress.marks.before) == (None, (), {})


def test_only_known_kinds_can_be_marked(own_host: Path) -> None:
    with pytest.raises(InvalidRequestError, match="'tea' can't be marked; give one of tpu_init"), unproductive("tea"):
        pass
    with unproductive("checkpoint_save"):
        pass
    assert list((own_host / "tasks").iterdir()) == []


# -- saves -------------------------------------------------------------------------------------------------------------


def saves(seconds: float = 0.02, **more: Any) -> None:
    with unproductive("checkpoint_save", **more):
        time.sleep(seconds)


def test_host_reads_when_task_has_saved_and_how_often_it_does(files: TaskFiles) -> None:
    progress = TaskProgress(files)
    assert progress.read().saves == Saves()
    saves()
    first = progress.read().saves
    assert first.ago_s is not None
    assert 0.0 <= first.ago_s < 60.0
    assert (first.every_s, first.heeds_notices) == (None, False)
    os.utime(files.last_save, (time.time() - 300.0,) * 2)
    assert progress.read().saves.ago_s == pytest.approx(300.0, abs=60.0)
    saves()
    assert progress.read().saves.every_s == pytest.approx(300.0, abs=60.0)


@pytest.mark.parametrize("what", ["in memory", "failed", "nothing to save", "restore"])
def test_what_no_other_host_could_go_on_from_is_no_save(
    files: TaskFiles, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    with suppress(ZeroDivisionError):
        match what:
            case "in memory":
                saves(outlives_hosts=False)
            case "nothing to save":
                monkeypatch.setattr(progress, "SHORTEST_SAVE_S", 60.0)  # a busy machine may take any time
                saves()
            case "restore":
                with unproductive("checkpoint_restore"):
                    time.sleep(0.02)
            case _:
                with unproductive("checkpoint_save"):
                    time.sleep(0.02)
                    raise ZeroDivisionError
    assert TaskProgress(files).read().saves == Saves()


@pytest.mark.parametrize("content", ["", "soon", "nan", "-3", "1e400", "0"])
def test_odd_word_of_last_save_does_not_hide_its_time(files: TaskFiles, content: str) -> None:
    files.last_save.write_text(content)
    read = TaskProgress(files).read().saves
    assert read.ago_s is not None
    assert read.every_s is None


@pytest.mark.parametrize("asks", [preemption_notice, known_notice])
def test_task_that_asks_for_notices_tells_so(files: TaskFiles, asks: Callable[[], object]) -> None:
    for _ in range(2):
        asks()
    assert TaskProgress(files).read().saves.heeds_notices is (asks is preemption_notice)
