"""Lines are found in the log files of an attempt, over the ends of files, with what is around them."""

import os
import re
from pathlib import Path

import pytest

from iris_ray.actors.host.directories import host_directory
from iris_ray.logs import reader as log_reader
from iris_ray.logs.files import AttemptLog, LogWriter, logs_directory
from iris_ray.logs.reader import LogReader
from iris_ray.logs.search import LINE_BYTES, FoundLines, LogSearch, search
from iris_ray.model.lifecycle import TaskAttemptId

TEXT = b"".join(b"step %d: loss %d\n" % (n, n % 7) for n in range(40)) + b"Traceback\n  boom\nthe end"


def written(tmp_path: Path, text: bytes, file_bytes: int = 1 << 20) -> AttemptLog:
    log = AttemptLog(tmp_path, "train", 0, 1)
    writer = LogWriter(log, file_bytes, files_kept=1000)
    writer.begin()
    writer.write(text)
    writer.close()
    return log


def found(log: AttemptLog, pattern: str, context: int = 0, most_bytes: int = 1 << 20) -> FoundLines:
    answer = search(log, LogSearch(pattern, context), most_bytes)
    assert answer is not None
    return answer


def by_lines(text: bytes, pattern: str, context: int) -> list[list[bytes]]:
    """The same, slow and obvious."""
    lines, groups, shown = text.rstrip(b"\n").split(b"\n"), list[list[bytes]](), -1
    for number, line in enumerate(lines):
        if not re.search(pattern.encode(), line):
            continue
        first, last = max(0, number - context), min(len(lines) - 1, number + context)
        if first > shown + 1 or not groups:
            groups.append([])
        groups[-1] += lines[max(first, shown + 1) : last + 1]
        shown = last
    return groups


@pytest.mark.parametrize("pattern", ["loss 3", "^step 1", "end$", "nothing", "", r"boom\s*the", "step 3?9", "[ab]oo.*"])
@pytest.mark.parametrize("context", [0, 1, 3, 100])
def test_lines_are_those_that_match_one_by_one(tmp_path: Path, pattern: str, context: int) -> None:
    assert found(written(tmp_path, TEXT), pattern, context).groups == by_lines(TEXT, pattern, context)


@pytest.mark.parametrize("file_bytes", [5, 16, 17, 100])
def test_line_over_the_end_of_a_file_is_found_whole(tmp_path: Path, file_bytes: int) -> None:
    lines = [line for group in found(written(tmp_path, TEXT, file_bytes), "loss 3|end").groups for line in group]
    assert lines == [line for group in by_lines(TEXT, "loss 3|end", 0) for line in group]


@pytest.mark.parametrize("file_bytes", [20, 64, 1000])
def test_search_since_a_time_begins_there(tmp_path: Path, file_bytes: int) -> None:
    log = AttemptLog(tmp_path, "train", 0, 1)
    writer = LogWriter(log, file_bytes, files_kept=1000)
    for number in range(10):
        writer.write(b"step %d\n" % number, 1000.0 + 10 * number)
    writer.close()
    answer = search(log, LogSearch("step", since=1061.0), 1 << 20)
    assert answer is not None
    assert [line for group in answer.groups for line in group] == [b"step 7", b"step 8", b"step 9"]


def test_answer_is_bounded_and_says_so(tmp_path: Path) -> None:
    answer = found(written(tmp_path, b"x" * 3 * LINE_BYTES + b"\n" + TEXT), "x|loss", most_bytes=LINE_BYTES + 30)
    assert answer.groups[0][0] == b"x" * LINE_BYTES
    assert (answer.matches, answer.cut) == (4, True)


def test_files_that_are_too_old_are_left_out(tmp_path: Path) -> None:
    log = written(tmp_path, TEXT, 100)
    oldest = log.files()[0][1]
    os.utime(oldest, (1000.0, 1000.0))
    answer = search(log, LogSearch("step 0", since=2000.0), 1 << 20)
    assert answer is not None
    assert answer.matches == 0
    assert search(AttemptLog(tmp_path, "train", 0, 2), LogSearch("x"), 1) is None


def test_empty_log_has_nothing(tmp_path: Path) -> None:
    assert found(written(tmp_path, b""), "").groups == []


def test_only_search_itself_yields_to_all_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    priorities: list[int] = []

    def watched(log: AttemptLog, wanted: LogSearch, most_bytes: int) -> FoundLines | None:
        priorities.append(os.nice(0))
        return search(log, wanted, most_bytes)

    monkeypatch.setattr(log_reader, "search", watched)
    monkeypatch.setenv("IRIS_RAY_HOST_DIR", str(tmp_path))
    written(logs_directory(host_directory()), TEXT)
    before = os.nice(0)
    (lines,) = LogReader().search([TaskAttemptId("train", 0, 1)], LogSearch("boom"))
    assert lines is not None
    assert lines.groups == [[b"  boom"]]
    assert (priorities, os.nice(0)) == ([min(19, before + 10)], before)
