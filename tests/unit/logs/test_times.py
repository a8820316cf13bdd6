"""When output came: what is kept of it, how much that takes, and which time a line has."""

import math
import os
import time
from pathlib import Path

import pytest

from iris_ray.logs import times as log_times
from iris_ray.logs.core import LogPosition, TaskLog
from iris_ray.logs.files import AttemptLog, LogWriter, prune
from iris_ray.logs.reader import LogQuestion, piece_in
from iris_ray.logs.times import ENTRY, TimesWriter, timed_lines, times_file

T = 1_700_000_000.0
TIMED = LogPosition(with_times=True)


@pytest.fixture
def log(tmp_path: Path) -> AttemptLog:
    return AttemptLog(tmp_path / "logs", "job-1", 3, 1)


def lines_of(log: AttemptLog, at: LogPosition = TIMED) -> list[tuple[float | None, bytes]]:
    """What a reader gets, in pieces of 10 bytes."""
    found = []
    question = LogQuestion.at(TaskLog(log.job_id, log.task_index, log.attempt), at, 10)
    while (piece := piece_in(log.root, question)) is not None and piece.data:
        found.append(TaskLog("", 0, 1, piece.offset, piece.data, piece.end, times=piece.times))
        question = question._replace(offset=piece.offset + len(piece.data), since=None)
    return list(timed_lines(part for piece in found for part in piece.timed_parts))


@pytest.mark.parametrize("file_bytes", [7, 16, 1000])
def test_lines_have_the_time_of_the_piece_they_came_in(log: AttemptLog, file_bytes: int) -> None:
    writer = LogWriter(log, file_bytes=file_bytes, files_kept=1000)
    for after, data in ((0, b"one\ntwo\n"), (5, b"three\nfo"), (9, b"ur\n"), (100, b"five")):
        writer.write(data, T + after)
    writer.close()
    assert lines_of(log) == [(T, b"one"), (T, b"two"), (T + 5, b"three"), (T + 9, b"four"), (T + 100, b"five")]


def test_output_within_a_second_has_one_time(log: AttemptLog) -> None:
    writer = LogWriter(log)
    for number in range(1000):
        writer.write(b"line\n", T + number / 100)
    writer.close()
    assert times_file(log.file(0)).stat().st_size == 10 * ENTRY.size
    assert max(T + number / 100 - (at or 0.0) for number, (at, _) in enumerate(lines_of(log))) < 1.0


def test_times_are_bounded_and_a_clock_that_was_set_back_is_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_times, "FINENESS", 300)
    writer = TimesWriter(tmp_path / "a.times")
    for second in range(40 * 300):
        writer.note(second, T + second)
    size = (tmp_path / "a.times").stat().st_size
    assert 1000 * ENTRY.size < size < 300 * (1 + math.log(40)) * ENTRY.size
    writer.note(10**9, T)
    assert (tmp_path / "a.times").stat().st_size == size + ENTRY.size


def test_times_go_with_their_log(log: AttemptLog) -> None:
    writer = LogWriter(log, file_bytes=10, files_kept=2)
    for number in range(20):
        writer.write(b"x" * 10, T + number)
    writer.close()
    assert sorted(log.directory.iterdir()) == sorted(log.all_files())
    assert len(log.all_files()) == 4
    newest = log.files()[-1][1]
    os.utime(log.files()[0][1], (T, T))
    prune(log.root, time.time(), most_bytes=30)
    assert sorted(log.directory.iterdir()) == [newest, times_file(newest)]
    os.utime(newest, (T, T))
    LogWriter(AttemptLog(log.root, "job-2", 0, 1)).begin()
    prune(log.root, time.time())
    assert [one.name for one in log.root.iterdir()] == ["job-2"]


def test_log_without_times_is_read_as_before(log: AttemptLog) -> None:
    writer = LogWriter(log)
    writer.write(b"one\ntwo\n", T)
    writer.close()
    times_file(log.file(0)).unlink()
    assert lines_of(log) == [(None, b"one"), (None, b"two")]
    assert lines_of(log, LogPosition(since=time.time() - 60)) == [(None, b"one"), (None, b"two")]
    assert lines_of(log, LogPosition(since=time.time() + 60)) == []


@pytest.mark.parametrize("file_bytes", [8, 20, 1000])
@pytest.mark.parametrize(("since", "first"), [(0, 0), (T, 0), (T + 1, 1), (T + 10, 1), (T + 15, 2), (T + 91, 10)])
def test_reading_since_a_time_begins_there(log: AttemptLog, file_bytes: int, since: float, first: int) -> None:
    writer = LogWriter(log, file_bytes=file_bytes, files_kept=1000)
    for number in range(10):
        writer.write(b"line %d\n" % number, T + 10 * number)
    writer.close()
    found = [line for _, line in lines_of(log, LogPosition(since=since))]
    assert found == [b"line %d" % number for number in range(first, 10)]


def test_tail_has_times(log: AttemptLog) -> None:
    writer = LogWriter(log, file_bytes=20, files_kept=1000)
    for number in range(10):
        writer.write(b"line %d\n" % number, T + 10 * number)
    writer.close()
    question = LogQuestion(log.job_id, log.task_index, log.attempt, 0, 1000, tail_lines=2, with_times=True)
    piece = piece_in(log.root, question)
    assert piece is not None
    tail = TaskLog("", 0, 1, piece.offset, piece.data, piece.end, times=piece.times)
    assert tail.timed_lines == [(T + 80, b"line 8"), (T + 90, b"line 9")]


def test_reading_since_a_time_leaves_nothing_out(log: AttemptLog) -> None:
    """What comes within a second of an entry has none of its own."""
    writer = LogWriter(log)
    for after, data in ((0.0, b"one\n"), (0.9, b"two\n"), (5.0, b"three\n"), (5.9, b"four\n")):
        writer.write(data, T + after)
    writer.close()
    assert [line for _, line in lines_of(log, LogPosition(since=T + 0.5))][-3:] == [b"two", b"three", b"four"]
    assert [line for _, line in lines_of(log, LogPosition(since=T + 1))] == [b"three", b"four"]
    assert [line for _, line in lines_of(log, LogPosition(since=T + 5.5))][-1:] == [b"four"]
    assert lines_of(log, LogPosition(since=T + 6)) == []


def test_line_without_end_is_not_copied_for_each_of_its_pieces() -> None:
    """A progress bar of ten hours. If each piece copied what came before, this would take hours."""
    (found,) = timed_lines([(T, b"x" * 4000)] * 40_000)
    assert found == (T, b"x" * 160_000_000)
