"""What the Controller remembers of what tasks print, and how clients follow it. No cluster."""

import pickle
import time
import tracemalloc
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from iris_ray.logs import stream as log_stream
from iris_ray.logs.controller import LogMemory
from iris_ray.logs.core import MOST_LOGS, LastLines, LogPosition, TaskLog
from iris_ray.logs.stream import LogLine, stream_logs
from iris_ray.logs.throttle import LineThrottle
from iris_ray.model.lifecycle import TaskAttemptId

# -- what is remembered ------------------------------------------------------------------------------------------------


def last(index: int, data: bytes, end: int = 100, job_id: str = "job") -> LastLines:
    return LastLines(job_id, index, 1, f"node-{index}", end, data)


def test_line_memory_is_bounded_and_forgets_oldest() -> None:
    memory = LogMemory(most_bytes=50_000)
    for index in range(1000):
        memory.remember(last(index, b"x" * 100))
        memory.remember(last(index, b"y" * 100))
        assert memory.held_bytes <= 50_000
    kept = [index for index in range(1000) if memory.last_lines(TaskAttemptId("job", index, 1))]
    assert kept == list(range(kept[0], 1000))
    assert 100 < len(kept) < 150
    assert [index for index in range(1000) if memory.node_of(TaskAttemptId("job", index, 1))] == kept


@pytest.mark.parametrize(("jobs", "tasks"), [(1, 5000), (50, 100), (2000, 1)])
def test_line_memory_counts_its_real_size(jobs: int, tasks: int) -> None:
    """Each message comes from another process and shares nothing with others."""
    memory = LogMemory(1 << 40)
    tracemalloc.start()
    try:
        for number in range(jobs * tasks):
            where = f"train-{number // tasks:08x}", number % tasks, 1, f"{number % 100:056x}"
            memory.remember(pickle.loads(pickle.dumps(LastLines(*where, 1000 + number, b"step 1000 loss 0.1\n"))))
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert taken <= memory.held_bytes <= 2 * taken


def test_lines_of_forgotten_jobs_are_forgotten() -> None:
    memory, known = LogMemory(), {f"job-{number}" for number in range(900, 1000)}
    for number in range(1000):
        memory.remember(last(0, b"x" * 1000, job_id=f"job-{number}"))
        memory.forget_all_but(known if number >= 900 else {f"job-{n}" for n in range(max(0, number - 99), number + 1)})
    assert all(memory.last_lines(TaskAttemptId(job_id, 0, 1)) for job_id in known)
    assert memory.held_bytes < 150 * 2000
    memory.forget_all_but(set())
    assert memory.held_bytes == 0


def test_job_with_many_tasks_does_not_displace_others_lines() -> None:
    memory = LogMemory(most_bytes=50_000)
    for index in range(10):
        memory.remember(last(index, b"few", job_id="small"))
    for index in range(10_000):
        memory.remember(last(index, b"many", job_id="large"))
    assert all(memory.last_lines(TaskAttemptId("small", index, 1)) for index in range(10))
    assert memory.last_lines(TaskAttemptId("large", 9_999, 1))


def test_many_jobs_displace_the_oldest() -> None:
    memory = LogMemory(most_bytes=50_000)
    for number in range(1000):
        memory.remember(last(0, b"x", job_id=f"job-{number}"))
    kept = [number for number in range(1000) if memory.node_of(TaskAttemptId(f"job-{number}", 0, 1))]
    assert kept == list(range(kept[0], 1000))
    assert memory.held_bytes <= 50_000


def test_line_memory_knows_host_of_silent_and_past_attempts() -> None:
    memory, key = LogMemory(), TaskAttemptId("job", 0, 1)
    memory.placed(key, "there")
    assert memory.node_of(key) == "there"
    assert memory.last_lines(key) is None
    memory.remember(LastLines(*key, "there", 5, b"hello"))
    memory.placed(key, "there")  # an order is repeated
    assert memory.last_lines(key) == LastLines(*key, "there", 5, b"hello")


def test_line_memory_keeps_newer_of_two_out_of_order() -> None:
    memory = LogMemory()
    memory.remember(last(0, b"new", end=200))
    memory.remember(last(0, b"old", end=100))
    found = memory.last_lines(TaskAttemptId("job", 0, 1))
    assert found is not None
    assert found.data == b"new"


# -- following ---------------------------------------------------------------------------------------------------------


class Story:
    """A Controller on paper: what each attempt of each task prints, a piece with every question."""

    processes_per_host = 1

    def __init__(self, attempts: list[list[list[bytes]]]) -> None:
        self.attempts = attempts  # by attempt, task, piece
        self.attempt, self.told = 1, 0

    def fetch_task_logs(self, job_id: str, task_index: int, at: LogPosition, max_bytes: int) -> TaskLog:
        return self.log(task_index, at, max_bytes)

    def job_status(self, job_id: str) -> Any:
        self.told += 1
        if self.told > max(map(len, self.attempts[self.attempt - 1])) and self.attempt < len(self.attempts):
            self.attempt, self.told = self.attempt + 1, 0
        return self

    def fetch_logs(self, job_id: str, wanted: Mapping[int, LogPosition], max_bytes: int) -> dict[int, TaskLog]:
        return {index: self.log(index, at, max_bytes) for index, at in wanted.items()}

    @property
    def waiting(self) -> str | None:
        """Why it waits in the queue."""
        return None

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


def test_following_announces_and_reads_every_attempt() -> None:
    story = Story([[[b"one\ntw", b"o\n", b"no end"]], [[b"again\n"]]])
    found = list(stream_logs(story, "job", 0))
    assert [(line.attempt, line.data) for line in found if not line.note] == [
        (1, b"one"), (1, b"two"), (1, b"no end"), (2, b"again"),
    ]  # fmt: skip
    assert [line for line in found if line.note] == [LogLine(0, 2, b"attempt 2 of task 0", True)]


def test_follower_from_the_submission_reads_attempts_that_ended_before_its_first_look() -> None:
    story = Story([[[b"one\n"]], [[b"two\n"]], [[b"three\n"]]])
    story.attempt = 2
    found = [line.data for line in stream_logs(story, "job", every_attempt=True) if not line.note]
    assert found == [b"one", b"two", b"three"]
    story = Story([[[b"one\n"]], [[b"two\n"]], [[b"three\n"]]])
    story.attempt = 2
    assert [line.data for line in stream_logs(story, "job") if not line.note] == [b"two", b"three"]


def test_following_all_tasks_marks_every_line() -> None:
    story = Story([[[b"a\n", b"", b"b\n"], [b"", b"c\n"], []]])
    found = list(stream_logs(story, "job"))
    assert sorted((line.task_index, line.data) for line in found) == [(0, b"a"), (0, b"b"), (1, b"c")]


def test_following_one_attempt_ends_with_it() -> None:
    story = Story([[[b"one\n"]], [[b"two\n"]]])
    assert [line.data for line in stream_logs(story, "job", 0, LogPosition(1))] == [b"one"]


def test_logs_of_many_tasks_are_read_in_batches() -> None:
    count = 3 * MOST_LOGS + 1
    story = Story([[[b"one\n", b"two\n"]] * count])
    asked: list[int] = []
    answer = story.fetch_logs

    def fetch_logs(job_id: str, wanted: Mapping[int, LogPosition], max_bytes: int) -> dict[int, TaskLog]:
        asked.append(len(wanted))
        return answer(job_id, wanted, max_bytes)

    story.fetch_logs = fetch_logs  # type: ignore[method-assign]
    found = list(stream_logs(story, "job"))
    assert max(asked) == MOST_LOGS
    assert {line.task_index for line in found if not line.note} == set(range(count))


def test_logs_without_following_end_with_existing_output() -> None:
    story = Story([[[b"one\n" * 10, b"two\n"]]])
    assert [line.data for line in stream_logs(story, "job", 0, follow=False)] == [b"one"] * 10


def test_verbose_task_is_resumed_near_its_end_beside_others() -> None:
    much = b"".join(b"%070d\n" % n for n in range(300_000))
    story = Story([[[much], [b"other\n"]]])
    found = list(stream_logs(story, "job"))
    assert any(line.note and b"bytes left out here" in line.data for line in found)
    assert LogLine(1, 1, b"other") in found
    assert len(found) < 2000


@pytest.mark.parametrize("tasks", [16, 256])
def test_followed_tasks_of_large_job_share_terminal_rate(tasks: int) -> None:
    """All print at once: what each may show at first, and then 500 lines a second in all."""
    story = Story([[[b"".join(b"%d\n" % n for n in range(5000))] * 2 for _ in range(tasks)]])
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


def test_attempt_that_begins_and_fails_between_two_looks_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    story = Queued([[[b"one\n"]], [[b"two\n"]]], 5.0, monkeypatch)
    story.attempt = 2  # once the job does not wait any more
    assert [line.data for line in stream_logs(story, "job") if not line.note] == [b"one", b"two"]


@pytest.mark.parametrize("task_index", [None, 1])
@pytest.mark.parametrize(("waits_s", "words"), [(1.5, 0), (20.0, 1), (75.0, 3)])
def test_following_waiting_job_says_why_at_intervals(
    monkeypatch: pytest.MonkeyPatch, waits_s: float, words: int, task_index: int | None
) -> None:
    story = Queued([[[b"zero\n"], [b"one\n"]]], waits_s, monkeypatch)
    found = [line for line in stream_logs(story, "job", task_index) if line.task_index is None]
    assert found == [LogLine(None, 1, b"waiting for 1 slice; 0 free", True)] * words
    story = Queued([[[b"zero\n"], [b"one\n"]]], waits_s, monkeypatch)
    at_once = list(stream_logs(story, "job", task_index, follow=False))
    assert all(line.task_index is not None for line in at_once), "whoever does not follow gets what is there"
