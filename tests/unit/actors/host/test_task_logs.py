"""What tasks print: what is shown of it, how files keep it, what is remembered. No cluster."""

import os
import stat
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from iris_ray.actors.controller.log_memory import LogMemory
from iris_ray.actors.host.line_throttle import LONGEST_LINE, LineThrottle
from iris_ray.actors.host.log_files import AttemptLog, LogWriter, logs_directory, prune
from iris_ray.actors.host.process_ledger import output_pipe, started_mark
from iris_ray.actors.host.task_output import OutputPump
from iris_ray.actors.wire.task_log import LastLines, LogPosition, TaskLog, printable
from iris_ray.client import log_stream
from iris_ray.client.log_stream import LogLine, stream_logs
from tests.support.gangs import wait_until

# -- what is shown -----------------------------------------------------------------------------------------------------


def throttle(rate: float = 10.0, burst: float = 20.0) -> LineThrottle:
    return LineThrottle(rate, burst, "the file")


def test_lines_come_as_they_are_and_a_partial_one_when_it_ends() -> None:
    one = throttle()
    assert one.feed(b"a\nb", 0.0) == ["a"]
    assert one.feed(b"c\n\nd", 0.1) == ["bc", ""]
    assert one.holds_something
    assert one.flush(1.0) == ["d"]
    assert not one.holds_something


def test_repeats_are_folded_and_counted_when_something_else_comes() -> None:
    one = throttle()
    assert one.feed(b"x\n" * 42 + b"y\n", 0.0) == ["x", "… repeated 41 times", "y"]
    assert one.feed(b"y\nz\n", 0.1) == ["y", "z"]
    assert one.feed(b"z\nz\n", 0.2) == []
    assert one.flush(1.0) == ["… repeated 2 times"]


def test_repeats_without_an_end_are_counted_every_few_seconds() -> None:
    one = throttle()
    shown = [line for second in range(60) for line in one.feed(b"same\n", float(second))]
    assert shown[0] == "same"
    assert set(shown[1:]) == {"… repeated 5 times", "… repeated 4 times"}
    assert 10 <= len(shown) <= 13


def test_rate_is_bounded_and_what_is_left_out_is_counted() -> None:
    one = throttle(rate=10.0, burst=20.0)
    lines = b"".join(b"line %d\n" % n for n in range(1000))
    shown = one.feed(lines, 0.0)
    assert shown == [f"line {n}" for n in range(20)]
    assert one.feed(b"too soon\n", 0.5) == []
    assert one.feed(b"later\n", 3.0) == ["… 981 lines left out here; see the file", "later"]
    for second in range(100):
        shown += one.feed(lines, 3.0 + second)
    assert len(shown) < 20 + 100 * (10 + 1) + 20


def test_tasks_of_a_large_gang_share_what_a_terminal_can_take() -> None:
    much = lines(1000)
    whole = sum(len(LineThrottle.for_task_of(256, "").feed(much, 0.0)) for _ in range(256))
    assert whole <= 256 * 20
    later = [LineThrottle.for_task_of(256, "") for _ in range(256)]
    for one in later:
        one.feed(much, 0.0)
    assert sum(len(one.feed(much, 10.0 + n)) for n in range(10) for one in later) <= 256 * 2 * 21 + 256 * 20 * 2


def lines(count: int) -> bytes:
    return b"".join(b"%d\n" % n for n in range(count))


def test_line_without_an_end_is_cut_and_takes_no_memory() -> None:
    one = throttle()
    for _ in range(100):
        assert one.feed(b"x" * 100_000, 0.0) == []
        assert len(one._rest) <= LONGEST_LINE
    (shown,) = one.feed(b"x\n", 0.1)
    assert shown == "x" * LONGEST_LINE + " … (cut)"
    assert one.feed(b"short\n", 0.2) == ["short"]
    (shown,) = one.feed(b"y" * 10_000 + b"\n", 0.3)
    assert shown.endswith("(cut)")


def test_binary_is_spelled_out() -> None:
    (shown,) = throttle().feed(b"\x00\xff\xfe \x07caf\xc3\xa9 \x1b[31mred\n", 0.0)
    assert shown == "\\x00\\xff\\xfe \\x07café \x1b[31mred"
    assert all(c.isprintable() or c == "\x1b" for c in shown)
    assert "\n" not in printable(bytes(range(256)))


def test_progress_bar_shows_its_last_state() -> None:
    one = throttle()
    assert one.feed(b"\r10%\r20%", 0.0) == []
    assert one.feed(b"\r30%", 0.1) == []
    assert one.flush(1.0) == ["30%"]
    assert one.feed(b"\r40%\r100%\r\ndone\r\n", 1.1) == ["100%", "done"]


# -- files -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def log(tmp_path: Path) -> AttemptLog:
    return AttemptLog(tmp_path / "logs", "job-1", 3, 1)


def read_all(log: AttemptLog, offset: int = 0, limit: int = 7) -> tuple[int, bytes]:
    piece = log.read(offset, limit)
    assert piece is not None
    begin, data = piece.offset, b""
    while piece.data:
        data += piece.data
        piece = log.read(begin + len(data), limit)
        assert piece is not None
    return begin, data


def test_files_are_bounded_and_offsets_go_on_counting(log: AttemptLog) -> None:
    writer = LogWriter(log, file_bytes=10, files_kept=3)
    whole = b""
    for number in range(40):
        piece = b"<%d>" % number
        writer.write(piece)
        whole += piece
    writer.write(b"a piece that is longer than a file")
    whole += b"a piece that is longer than a file"
    writer.close()
    sizes = [path.stat().st_size for _, path in log.files()]
    assert len(sizes) == 3
    assert max(sizes) <= 10
    assert writer.end == len(whole)
    begin, data = read_all(log)
    assert begin > 0
    assert data == whole[begin:]
    assert log.read(begin + 2, 5).data == whole[begin + 2 : begin + 7]  # type: ignore[union-attr]
    piece = log.read(10**9, 5)
    assert piece is not None
    assert (piece.offset, piece.data, piece.end) == (len(whole), b"", len(whole))


def test_reader_goes_on_where_it_was_while_it_is_written(log: AttemptLog) -> None:
    writer = LogWriter(log, file_bytes=64, files_kept=100)
    seen, written = b"", b""
    for number in range(100):
        writer.write(b"line %d\n" % number)
        written += b"line %d\n" % number
        piece = log.read(len(seen), 1000)
        assert piece is not None
        seen += piece.data
    writer.close()
    assert seen == written


@pytest.mark.parametrize(("count", "last"), [(0, b""), (1, b"99\n"), (3, b"97\n98\n99\n"), (1000, None)])
@pytest.mark.parametrize("file_bytes", [7, 1000])
def test_tail_gives_the_last_lines_across_files(
    log: AttemptLog, count: int, last: bytes | None, file_bytes: int
) -> None:
    writer = LogWriter(log, file_bytes=file_bytes, files_kept=1000)
    writer.write(lines(100))
    writer.close()
    piece = log.tail(count, 1 << 20)
    assert piece is not None
    assert piece.data == (lines(100) if last is None else last)
    assert piece.offset + len(piece.data) == piece.end


def test_tail_of_one_huge_line_is_bounded(log: AttemptLog) -> None:
    writer = LogWriter(log)
    writer.write(b"x" * 100_000)
    writer.close()
    piece = log.tail(5, 1000)
    assert piece is not None
    assert len(piece.data) == 1000


def test_log_that_does_not_exist_is_none_and_an_empty_one_is_empty(log: AttemptLog) -> None:
    assert log.read(0, 10) is None
    assert log.tail(1, 10) is None
    writer = LogWriter(log)
    writer.begin()
    writer.close()
    piece = log.read(0, 10)
    assert piece is not None
    assert (piece.data, piece.end) == (b"", 0)


def test_files_are_private_whatever_the_jobs_name(tmp_path: Path) -> None:
    for job_id in ("../../etc", "a/b", "..", "x" * 1000):
        log = AttemptLog(tmp_path / "logs", job_id, 0, 1)
        writer = LogWriter(log)
        writer.write(b"secret")
        writer.close()
        (path,) = (path for _, path in log.files())
        assert path.parent.parent == tmp_path / "logs"
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_disk_that_takes_nothing_harms_nobody_and_what_comes_later_is_kept(log: AttemptLog) -> None:
    log.root.mkdir()
    log.directory.touch()  # in the place of the directory
    writer = LogWriter(log, file_bytes=1 << 22)
    writer.write(b"lost")
    assert writer.problem
    log.directory.unlink()
    writer.write(b"x" * (1 << 20))
    writer.write(b"kept")
    writer.close()
    piece = log.read(0, 1 << 22)
    assert piece is not None
    assert piece.offset > 0
    assert piece.data.endswith(b"xkept")
    assert piece.end == 4 + (1 << 20) + 4


def test_hole_that_a_full_disk_left_is_passed_over(log: AttemptLog) -> None:
    for offset, data in ((0, b"before"), (100, b"behind")):
        writer = LogWriter(log)
        writer.end = writer._next_file = offset
        writer.write(data)
        writer.close()
    first = log.read(0, 1000)
    assert first is not None
    assert (first.data, first.end) == (b"before", 106)
    then = log.read(6, 1000)
    assert then is not None
    assert (then.offset, then.data) == (100, b"behind")


def test_prune_deletes_the_old_and_then_the_oldest_and_never_the_newest(tmp_path: Path) -> None:
    now = 1_000_000.0
    for number, age in enumerate((900.0, 50.0, 40.0, 30.0, 0.0)):
        log = AttemptLog(tmp_path, f"job-{number}", 0, 1)
        writer = LogWriter(log)
        writer.write(b"x" * 100)
        writer.close()
        os.utime(log.file(0), (now - age, now - age))
    prune(tmp_path, now, most_bytes=250, kept_s=500.0)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["job-3", "job-4"]
    LogWriter(AttemptLog(tmp_path, "job-5", 0, 1)).begin()
    prune(tmp_path, time.time(), most_files=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["job-5"], "the others are of 1970"
    LogWriter(AttemptLog(tmp_path, "job-6", 0, 1)).begin()
    LogWriter(AttemptLog(tmp_path, "job-7", 0, 1)).begin()
    prune(tmp_path, time.time(), most_files=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["job-6", "job-7"]


def test_prune_keeps_the_newest_however_large(tmp_path: Path) -> None:
    now = 1_000_000.0
    for number in (3, 4):
        log = AttemptLog(tmp_path, f"job-{number}", 0, 1)
        writer = LogWriter(log)
        writer.write(b"x" * 100)
        writer.close()
        os.utime(log.file(0), (now + number, now + number))
    prune(tmp_path, now, most_bytes=1, kept_s=500.0)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["job-4"]


# -- the pump ----------------------------------------------------------------------------------------------------------

MARK = '{"job_id": "job-1", "task_index": 3, "attempt": 1, "num_tasks": 1, "label": "label"}'


class Pumped:
    """A process that prints into a pump's FIFO."""

    def __init__(self, directory: Path) -> None:
        (directory / "tasks").mkdir()
        self.reports: list[LastLines] = []
        self.pump = OutputPump(directory, 7, "node", self.reports.append)
        started_mark(directory, 7).write_text(MARK)
        self.pipe = output_pipe(directory, 7)
        self.log = AttemptLog(logs_directory(directory), "job-1", 3, 1)

    def run(self, script: str) -> subprocess.CompletedProcess[bytes]:
        with self.pipe.open("wb") as output:
            return subprocess.run([sys.executable, "-c", script], stdout=output, stderr=output, check=False)


@pytest.fixture
def pumped(tmp_path: Path) -> Iterator[Pumped]:
    one = Pumped(tmp_path)
    yield one
    one.pump.close()


def test_pump_keeps_all_that_a_killed_process_wrote_and_closing_waits_for_it(pumped: Pumped) -> None:
    script = "import os, signal\nos.write(1, b'x' * 3_000_000 + b'end')\nos.kill(os.getpid(), signal.SIGKILL)"
    assert pumped.run(script).returncode == -9
    pumped.pump.close()
    piece = pumped.log.read(0, 10_000_000)
    assert piece is not None
    assert piece.data == b"x" * 3_000_000 + b"end"
    assert not pumped.pipe.exists()


def test_pump_reports_the_last_lines_while_it_goes_on_and_at_the_end(pumped: Pumped) -> None:
    with pumped.pipe.open("wb", buffering=0) as output:
        output.write(b"first\n")
        wait_until(lambda: pumped.reports)
        output.write(b"y" * 10_000 + b"\nlast words\n")
    pumped.pump.close()
    assert pumped.reports[0].data == b"first\n"
    assert pumped.reports[-1].data.endswith(b"y\nlast words\n")
    assert len(pumped.reports[-1].data) == 4096
    assert pumped.reports[-1].end == 6 + 10_000 + 12


def test_pump_holds_no_more_in_memory_than_the_last_lines(pumped: Pumped) -> None:
    pumped.run("import os\nfor n in range(2000): os.write(1, b'x' * 1000 + b'\\n')")
    pumped.pump.close()
    assert sum(map(len, pumped.pump._last)) < 2 * 4096


def test_pump_of_a_task_that_prints_nothing_reports_nothing_and_leaves_an_empty_log(pumped: Pumped) -> None:
    pumped.pump.close()
    piece = pumped.log.read(0, 10)
    assert piece is not None
    assert piece.data == b""
    assert pumped.reports == []


def test_pump_of_a_process_that_never_started_leaves_nothing(tmp_path: Path) -> None:
    one = Pumped(tmp_path)
    started_mark(tmp_path, 7).unlink()
    one.pump.close()
    one.pump.close()  # again does no harm
    assert one.log.read(0, 10) is None


def test_pump_shows_little_of_much(pumped: Pumped, capsys: pytest.CaptureFixture[str]) -> None:
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


# -- what is remembered ------------------------------------------------------------------------------------------------


def last(index: int, data: bytes, end: int = 100) -> LastLines:
    return LastLines("job", index, 1, f"node-{index}", end, data)


def test_memory_is_bounded_and_forgets_the_oldest() -> None:
    memory = LogMemory(most_places=5, most_bytes=1000)
    for index in range(100):
        memory.remember(last(index, b"x" * 100))
        memory.remember(last(index, b"y" * 100))
    kept = [index for index in range(100) if memory.last_lines(("job", index, 1))]
    assert kept == list(range(90, 100))
    assert [index for index in range(100) if memory.node_of(("job", index, 1))] == list(range(95, 100))


def test_memory_keeps_the_newer_of_two_that_overtook_each_other() -> None:
    memory = LogMemory()
    memory.remember(last(0, b"new", end=200))
    memory.remember(last(0, b"old", end=100))
    found = memory.last_lines(("job", 0, 1))
    assert found is not None
    assert found.data == b"new"


# -- following ---------------------------------------------------------------------------------------------------------


class Story:
    """A Controller on paper: what each attempt of each task prints, a piece with every question."""

    waiting: str | None = None

    def __init__(self, attempts: list[list[list[bytes]]]) -> None:
        self.attempts = attempts  # by attempt, task, piece
        self.attempt, self.told = 1, 0

    def fetch_task_logs(self, job_id: str, task_index: int, attempt: int | None = None, **_: object) -> TaskLog:
        return self.log(task_index, LogPosition(attempt), 1)

    def job_status(self, job_id: str) -> Any:
        self.told += 1
        if self.told > max(map(len, self.attempts[self.attempt - 1])) and self.attempt < len(self.attempts):
            self.attempt, self.told = self.attempt + 1, 0
        return self

    def fetch_logs(self, job_id: str, wanted: Mapping[int, LogPosition], max_bytes: int) -> dict[int, TaskLog]:
        return {index: self.log(index, at, max_bytes) for index, at in wanted.items()}

    @property
    def tasks(self) -> dict[str, int]:
        return {"RUNNING": len(self.attempts[0])}

    @property
    def state(self) -> "Story":
        return self

    @property
    def finished(self) -> bool:
        return self.attempt == len(self.attempts) and self.told > max(map(len, self.attempts[-1]))

    def log(self, index: int, at: LogPosition, limit: int) -> TaskLog:
        attempt = at.attempt or self.attempt
        pieces = self.attempts[attempt - 1][index]
        there = b"".join(pieces if attempt < self.attempt else pieces[: self.told])
        return TaskLog(
            "job", index, attempt, at.offset, there[at.offset : at.offset + limit], len(there),
            attempt < self.attempt or self.finished, self.attempt, self.finished, True,
        )  # fmt: skip


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    pause = time.sleep
    monkeypatch.setattr(time, "sleep", lambda seconds: pause(min(seconds, 0.05)))


def test_following_goes_through_all_attempts_and_says_so() -> None:
    story = Story([[[b"one\ntw", b"o\n", b"no end"]], [[b"again\n"]]])
    found = list(stream_logs(story, "job", 0))
    assert [(line.attempt, line.data) for line in found if not line.note] == [
        (1, b"one"), (1, b"two"), (1, b"no end"), (2, b"again"),
    ]  # fmt: skip
    assert [line for line in found if line.note] == [LogLine(0, 2, b"attempt 2 of task 0", True)]


def test_following_all_tasks_marks_every_line() -> None:
    story = Story([[[b"a\n", b"", b"b\n"], [b"", b"c\n"], []]])
    found = list(stream_logs(story, "job"))
    assert sorted((line.task_index, line.data) for line in found) == [(0, b"a"), (0, b"b"), (1, b"c")]


def test_one_attempt_alone_ends_with_it() -> None:
    story = Story([[[b"one\n"]], [[b"two\n"]]])
    assert [line.data for line in stream_logs(story, "job", 0, attempt=1)] == [b"one"]


def test_without_following_what_is_there_is_given_and_no_more() -> None:
    story = Story([[[b"one\n" * 10, b"two\n"]]])
    assert [line.data for line in stream_logs(story, "job", 0, follow=False)] == [b"one"] * 10


def test_task_that_prints_too_much_is_taken_up_near_its_end_beside_others() -> None:
    much = b"".join(b"%070d\n" % n for n in range(300_000))
    story = Story([[[much], [b"other\n"]]])
    found = list(stream_logs(story, "job"))
    assert any(line.note and b"bytes left out here" in line.data for line in found)
    assert LogLine(1, 1, b"other") in found
    assert len(found) < 2000


@pytest.mark.parametrize("tasks", [16, 256])
def test_tasks_of_a_large_job_share_what_a_terminal_can_take_while_they_are_followed(tasks: int) -> None:
    """All print at once: what each may show at first, and then 500 lines a second in all."""
    story = Story([[[lines(5000)] * 2 for _ in range(tasks)]])
    began = time.monotonic()
    found = list(stream_logs(story, "job"))
    share = LineThrottle.for_task_of(tasks, "")
    most = tasks * (share.burst + share.rate * (time.monotonic() - began) + 2)  # 2: what was left out
    assert tasks <= len(found) <= most
    assert all(any(b"left out here" in line.data for line in found if line.task_index == n) for n in range(tasks))


class Queued(Story):
    """It waits in the queue first; so long, in seconds of a clock that the reader's pauses move."""

    def __init__(self, attempts: list[list[list[bytes]]], waits_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(attempts)
        self.now, self.until = 0.0, waits_s
        monkeypatch.setattr(log_stream, "time", SimpleNamespace(monotonic=lambda: self.now, sleep=self.sleep))

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    @property
    def waiting(self) -> str | None:
        return "waiting for 1 slice; 0 free" if self.now < self.until else None

    def job_status(self, job_id: str) -> Any:
        return super().job_status(job_id) if self.waiting is None else self

    def fetch_logs(self, job_id: str, wanted: Mapping[int, LogPosition], max_bytes: int) -> dict[int, TaskLog]:
        if self.waiting is None:
            return super().fetch_logs(job_id, wanted, max_bytes)
        return {index: TaskLog("job", index, 0, note="it has not run yet") for index in wanted}


@pytest.mark.parametrize("task_index", [None, 1])
@pytest.mark.parametrize(("waits_s", "words"), [(1.5, 0), (20.0, 1), (75.0, 3)])
def test_following_says_after_two_seconds_and_then_every_half_minute_why_the_job_waits(
    monkeypatch: pytest.MonkeyPatch, waits_s: float, words: int, task_index: int | None
) -> None:
    story = Queued([[[b"zero\n"], [b"one\n"]]], waits_s, monkeypatch)
    found = [line for line in stream_logs(story, "job", task_index) if line.task_index is None]
    assert found == [LogLine(None, 1, b"waiting for 1 slice; 0 free", True)] * words
    story = Queued([[[b"zero\n"], [b"one\n"]]], waits_s, monkeypatch)
    at_once = list(stream_logs(story, "job", task_index, follow=False))
    assert all(line.task_index is not None for line in at_once), "whoever does not follow gets what is there"
