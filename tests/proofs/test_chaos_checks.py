"""The checks of `tests.proofs.chaos` find what they look for: they run on made-up lines with one mistake each."""

import re
import time
from pathlib import Path
from typing import Any

import pytest

from tests.proofs.chaos.checks import (
    Disturbances,
    KnownAttempt,
    check_steps,
    in_memory,
    overlaps,
    wrong_numbers,
    wrong_restores,
)
from tests.proofs.chaos.jobs import Line, Running, checksum, numbers_at

STEPS = 6


def attempt(number: int, start: int, end: int, index: int = 0) -> list[Line]:
    """One task's lines: from a checkpoint to a step, exclusively."""
    who = {"attempt": number, "index": index, "at": 0.0}
    return [{**who, "start": start}, *({**who, "step": step} for step in range(start, end))]


def check(path: Path, lines: list[Line], took_part_in_the_end: bool = True) -> int:
    return check_steps(Running(0, "job-0", path, STEPS, None, 1), lines, took_part_in_the_end)


@pytest.mark.parametrize(
    ("lines", "redone"),
    [
        (attempt(1, 0, 6), 0),
        (attempt(1, 0, 4) + attempt(2, 4, 6), 0),
        (attempt(1, 0, 4) + attempt(2, 2, 6), 2),
        (attempt(1, 0, 0) + attempt(2, 0, 6), 0),
        (attempt(1, 0, 5) + attempt(2, 2, 3) + attempt(3, 0, 6), 6),
        ([*attempt(1, 0, 3), {"attempt": 1, "index": 0, "saved": 3}, *attempt(2, 3, 6)], 0),
        (attempt(1, 0, 2, index=1) + attempt(2, 4, 6, index=1), 0),  # the checkpoint is that of task 0
        (attempt(1, 0, 4, index=1) + attempt(2, 6, 6, index=1), 0),
    ],
    ids=["in one go", "goes on", "goes back", "before its first step", "twice back", "saved", "was behind", "was late"],
)
def test_ordered_lines_pass_and_repeated_steps_are_counted(tmp_path: Path, lines: list[Line], redone: int) -> None:
    assert check(tmp_path, lines) == redone


def without(lines: list[Line], step: int) -> list[Line]:
    return [line for line in lines if line.get("step") != step]


def twice(lines: list[Line], step: int) -> list[Line]:
    return [line for line in lines for _ in range(1 + (line.get("step") == step))]


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (without(attempt(1, 0, 6), 3), "step 4 after 2"),
        (without(attempt(1, 0, 6), 0), "step 1 after -1"),
        (attempt(1, 0, 3) + without(attempt(2, 2, 6), 2), "step 3 after 1"),
        (twice(attempt(1, 0, 6), 3), "step 3 after 3"),
        (twice(attempt(1, 0, 6), 5), "step 5 after 5"),
        (attempt(1, 0, 3) + attempt(2, 4, 6), "starts at 4 after 2"),
        (attempt(1, 1, 6), "starts at 1 after -1"),
        (attempt(1, 0, 5), "last step is 4 of 6"),
        (attempt(1, 0, 6) + attempt(2, 3, 5), "last step is 4 of 6"),
        (attempt(1, 0, 7), "last step is 6 of 6"),
        ([], "last step is -1 of 6"),
        (attempt(1, 0, 4) + attempt(2, 2, 4) + attempt(1, 0, 5)[-1:] + attempt(2, 4, 6)[1:], "step 4 after 4"),
        (without(attempt(1, 0, 6, index=1), 3), "step 4 after 2"),
        (twice(attempt(1, 0, 6, index=1), 3), "step 3 after 3"),
    ],
    ids=[
        "a gap",
        "a gap at the start",
        "a gap after a restart",
        "a step twice",
        "the last step twice",
        "starts beyond the checkpoint",
        "starts beyond the first step",
        "no end",
        "an attempt after the end that has none",
        "too far",
        "nothing",
        "two attempts at once",
        "a gap of another task",
        "a step twice of another task",
    ],
)
def test_lines_that_are_not_in_order_fail_with_the_place(tmp_path: Path, lines: list[Line], said: str) -> None:
    with pytest.raises(AssertionError, match=said):
        check(tmp_path, lines)


def test_task_absent_at_the_end_may_lack_last_step(tmp_path: Path) -> None:
    """The gang went on on fewer slices."""
    check(tmp_path, attempt(1, 0, 3, index=3), took_part_in_the_end=False)
    with pytest.raises(AssertionError, match="step 2 after 0"):
        check(tmp_path, without(attempt(1, 0, 3, index=3), 1), took_part_in_the_end=False)


def timed(lines: list[Line], begins: float, slice_name: str = "s") -> list[Line]:
    """The lines at one second each from a time on, the first of them with the slice."""
    (first, *more) = ({**line, "at": begins + second} for second, line in enumerate(lines))
    return [{**first, "slice": slice_name}, *more]


def test_task_beside_next_attempt_is_named_unless_slice_was_disturbed() -> None:
    begins = time.monotonic()
    lines = timed(attempt(1, 0, 6), begins) + timed(attempt(2, 2, 6), begins + 3.0)
    (found,) = overlaps(lines, Disturbances())
    assert found == "task 0 of attempt 1 on s went on for 3.0 s beside the next"
    assert not list(overlaps(timed(attempt(1, 0, 2), begins) + timed(attempt(2, 2, 6), begins + 3.0), Disturbances()))
    disturbed = Disturbances()
    disturbed.add("another", 1.0)
    assert list(overlaps(lines, disturbed))
    disturbed.add("s", 1.0)
    assert not list(overlaps(lines, disturbed))


def test_disturbed_slice_explains_attempt_though_no_task_begins() -> None:
    disturbances = Disturbances()
    disturbances.add("a", 60.0)
    began = [{"attempt": number, "index": 2, "at": time.monotonic(), "start": 0, "slice": "b"} for number in (1, 2, 3)]
    long_ago = time.monotonic() - 3600.0
    assert disturbances.attempts(began, []) == 0
    assert disturbances.attempts(began, [KnownAttempt(1, "ab", long_ago), KnownAttempt(2, "b", long_ago)]) == 1
    assert disturbances.attempts([{**line, "slice": "a"} for line in began], []) == 3
    assert disturbances.attempts([], [KnownAttempt(1, "ab", time.monotonic()), KnownAttempt(2, "a", long_ago)]) == 1


def kept(number: int, by: list[int], end: int, slices: str = "ab", memory: bool = True, **first: Any) -> list[Line]:
    """The lines of an attempt of a task per slice, which keeps every other step in memory.

    Args:
        by: who has done the steps before its first.
        end: its last step, exclusively.
        first: more for the lines that say where the tasks begin, in place of what is right.
    """
    lines: list[Line] = []
    for index, name in enumerate(slices):
        who, box = {"attempt": number, "index": index, "at": 0.0}, [100 * index, 100 * index + 100]
        sums = [checksum(numbers_at(step)[slice(*box)]) for step in range(end + 1)]
        start = {"start": len(by), "by": by, "memory": memory, "bucket": [], "box": box, "sum": sums[len(by)]}
        lines += [{**who, "slice": name}, {**who, **start, **first}]
        for step in range(len(by), end):
            lines.append({**who, "step": step, "sum": sums[step + 1]})
            lines += [{**who, "kept": step + 1}] if step % 2 else []
    return lines


FIRST = kept(1, [], 7, memory=False)  # 4 is whole; 6 need not be
WARNING: Line = {"attempt": 1, "index": 0, "at": 0.0, "warned": "Step 4 is not whole in memory, the step before stays"}


@pytest.mark.parametrize(
    "lines",
    [
        FIRST + kept(2, [1] * 6, 9),
        FIRST + kept(2, [1] * 4, 9, "bc"),
        FIRST + kept(2, [], 9, "cd", memory=False),
        FIRST + kept(2, [1] * 2, 9, "cd", memory=False, bucket=[1] * 2),
        [*FIRST, WARNING, *kept(2, [1] * 2, 9)],
        [*FIRST, {**WARNING, "warned": "host 1 of the gang shows no saved steps"}, *kept(2, [], 9, memory=False)],
        FIRST + kept(2, [1] * 4, 5) + kept(3, [1] * 4, 9),
        FIRST + kept(2, [1] * 4, 9) + kept(3, [1] * 4 + [2] * 2, 9),
        FIRST + kept(2, [1] * 4, 9, "cd") + kept(3, [1] * 6, 9),
        [*FIRST, {"attempt": 1, "index": 0, "at": 0.0, "saved": 7}, *kept(2, [1] * 7, 9)],
    ],
    ids=[
        "the newest",
        "the newest whole one",
        "all slices lost",
        "all slices lost, from the bucket",
        "a step that was not whole",
        "a host that did not answer",
        "an attempt that kept nothing",
        "two losses",
        "an attempt of which nothing is left",
        "a notice",
    ],
)
def test_states_that_go_on_from_the_newest_whole_step_pass(lines: list[Line]) -> None:
    assert not [*wrong_numbers(lines), *wrong_restores(in_memory(lines))]


def with_start(number: int, index: int, lines: list[Line], **changed: Any) -> list[Line]:
    """The lines, with something else where a task begins."""
    who = (number, index)
    mine = [("start" in line and (line["attempt"], line["index"]) == who) for line in lines]
    return [{**line, **changed} if own else line for line, own in zip(lines, mine, strict=True)]


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (kept(1, [], 7, sum=0), "task 0 of attempt 1 restores wrong numbers at step 0"),
        ([{**line, "sum": 0} if line.get("step") == 3 else line for line in FIRST], "comes to wrong numbers at step 4"),
        (with_start(1, 1, FIRST, start=2), "begin at different steps"),
        (with_start(1, 1, FIRST, memory=True), "begin at different steps"),
        (kept(2, [1] * 4, 9), "of an attempt that nobody knows"),
        (FIRST + kept(2, [1] * 4, 9) + kept(3, [2] * 6, 9), r"begins with steps of \[2\] that attempt 2 never had so"),
        (FIRST + kept(2, [1] * 4, 9) + kept(3, [1] * 6, 9), "goes on from attempt 1, and attempt 2 had a whole step"),
        (FIRST + kept(2, [1] * 2, 9, "bc"), "begins at step 2; b had step 4 of attempt 1"),
        (FIRST + kept(2, [], 9, memory=False), "begins at step 0; .* had step 4 of attempt 1"),
        (FIRST + kept(2, [], 9, "cd") + kept(3, [1] * 6, 9, bucket=[2] * 4), "the bucket has step 4 of attempt 2"),
    ],
    ids=[
        "a wrong state",
        "a wrong step",
        "two steps",
        "one of two from memory",
        "of nobody",
        "a mixture",
        "an abandoned attempt",
        "an older step",
        "nothing",
        "older than the bucket",
    ],
)
def test_states_that_are_wrong_old_or_lost_are_named(lines: list[Line], said: str) -> None:
    found = [*wrong_numbers(lines), *wrong_restores(in_memory(lines))]
    assert any(re.search(said, text) for text in found), found


def test_steps_may_be_lost_where_another_job_has_run_meanwhile() -> None:
    later = [{**line, "at": 9.0} for line in kept(2, [], 9, memory=False)]
    attempts = in_memory(FIRST + later)
    assert list(wrong_restores(attempts, [("a", 5.0)]))
    assert list(wrong_restores(attempts, [("a", 5.0), ("b", 10.0)]))
    assert not list(wrong_restores(attempts, [("a", 5.0), ("b", 5.0)]))
