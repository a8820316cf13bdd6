"""What the command line prints: tables, JSON, states in words."""

import io
import json
import time
from contextlib import redirect_stdout
from dataclasses import replace
from typing import Any

import pytest

from iris_ray.actors.protocol.overview import as_json
from iris_ray.actors.protocol.status import JobStatus
from iris_ray.cli.job_list import listed
from iris_ray.cli.printing import (
    duration,
    format_table,
    one_line,
    print_facts,
    print_labelled,
    print_table,
    state_in_words,
)
from iris_ray.model.constraints import Constraint, ConstraintOp
from iris_ray.model.lifecycle import JobState, TaskState
from iris_ray.model.options import PriorityBand
from iris_ray.model.requirement import make_requirement
from iris_ray.scheduler.pending_reason import Obstacle, PendingKind, PendingReason, Shortage

WAITING = PendingReason(
    "train-1",
    PendingKind.IN_USE,
    make_requirement(
        "tpu-name", 2, True, (Constraint("tpu-topology", ConstraintOp.EQ, "v4-16"),), (), (), {"TPU": 4.0}, True
    ),
    num_groups=(2,),
    free=1,
    shortage=Shortage((), (Obstacle("v4-16-0", 2, "in use by other-1", ("other-1",)),), 0, {}, 1),
)


def job_status(**changes: Any) -> JobStatus:
    values: dict[str, Any] = dict.fromkeys(JobStatus.__dataclass_fields__) | {
        "job_id": "train-1",
        "name": "train",
        "user": "ann",
        "priority": PriorityBand.INTERACTIVE,
        "state": JobState.PENDING,
        "submitted_at": 0.0,
        "attempt": 1,
        "tasks": {TaskState.PENDING: 2},
        "groups": (),
    }
    return JobStatus(**(values | changes))


def test_eviction_says_who_takes_hosts_from_whom(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time", lambda: 1000.0)
    reason = "PRODUCTION job prod of ann takes its hosts from BATCH"
    evicted = job_status(
        state=JobState.RUNNING, tasks={TaskState.RUNNING: 2}, evictions=1, gives_way=(reason, 1012.0), error="before"
    )
    assert reason in evicted.explanation
    assert listed(evicted)[-1] == f"{reason} within 12 s"
    taker = replace(WAITING, kept=("v4-16-0",), taken_from=("batch-1",))
    assert "gets v4-16-0; taken from batch-1" in str(taker)


HEADERS = ("JOB", "SLICES", "NOTE")
ROWS = [
    ("train-1a2b3c4d", ("v5litepod-16-0", "v5litepod-16-1"), ""),
    ("x", "-", "waiting for 2 slices, in use by train-1a2b3c4d and by others"),
]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    for variable in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "60")
    return Terminal()


def test_piped_table_has_one_line_per_row(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(("JOB", "NOTE"), [("a", "x y" * 500), ("long-name", "")], "nothing")
    assert capsys.readouterr().out.splitlines() == ["JOB        NOTE", "a          " + "x y" * 500, "long-name"]
    print_table(HEADERS, ROWS, "nothing")
    assert capsys.readouterr().out.splitlines() == [
        "JOB             SLICES                         NOTE",
        "train-1a2b3c4d  v5litepod-16-0,v5litepod-16-1",
        "x               -                              waiting for 2 slices, in use by train-1a2b3c4d and by others",
    ]


def test_table_is_printed_to_nobody_if_stdout_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout", None)
    print_table(["A"], [["a"]], "none")


def test_empty_table_says_so_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(HEADERS, [], "no jobs")
    assert capsys.readouterr() == ("", "no jobs\n")


def test_table_wraps_notes_at_terminal_edge(terminal: Terminal) -> None:
    with redirect_stdout(terminal):
        print_table(HEADERS, ROWS, "nothing")
    assert terminal.getvalue().splitlines() == [
        "JOB             SLICES                NOTE",
        "train-1a2b3c4d  v5litepod-16-0,",
        "                v5litepod-16-1",
        "x               -                     waiting for 2 slices,",
        "                                      in use by",
        "                                      train-1a2b3c4d and by",
        "                                      others",
    ]


def test_narrow_table_puts_notes_on_own_lines() -> None:
    assert format_table(HEADERS, ROWS, 40).splitlines() == [
        "JOB             SLICES",
        "  NOTE",
        "train-1a2b3c4d  v5litepod-16-0,",
        "                v5litepod-16-1",
        "x               -",
        "  waiting for 2 slices, in use by",
        "  train-1a2b3c4d and by others",
    ]


@pytest.mark.parametrize("width", [None, *range(16, 120, 4)])
def test_table_breaks_no_id_at_any_width(width: int | None) -> None:
    words = format_table(HEADERS, ROWS, width).replace(",", " ").split()
    assert sorted(word for word in words if "-" in word[1:]) == [
        *["train-1a2b3c4d"] * 2,
        "v5litepod-16-0",
        "v5litepod-16-1",
    ]


def test_table_prints_cells_literally() -> None:
    assert format_table(("A", "B"), [("日本", ":smile:"), ("x", "[bold]y\x1b[0m")]).splitlines() == [
        "A     B",
        "日本  :smile:",
        "x     [bold]y?[0m",
    ]


def test_facts_are_aligned_and_empty_ones_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    print_facts({"job": "a", "last error": "x y" * 100, "name": None, "type": "", "failures": 0})
    assert capsys.readouterr().out.splitlines() == ["job:        a", f"last error: {'x y' * 100}", "failures:   0"]


def test_label_is_coloured_on_terminal_without_no_color(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    with redirect_stdout(terminal):
        print_labelled("ERROR", "red", "  [x] :smile: " + "long " * 30 + "end")
        monkeypatch.setenv("NO_COLOR", "1")
        print_labelled("ERROR", "red", "  plain")
    coloured, plain_line = terminal.getvalue().splitlines()
    assert coloured == "\x1b[31mERROR\x1b[0m  [x] :smile: " + "long " * 30 + "end"
    assert plain_line == "ERROR  plain"


def test_piped_label_has_no_colour(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    print_labelled("ERROR", "red", "  " + "long " * 30 + "end")
    assert capsys.readouterr().out == "ERROR  " + "long " * 30 + "end\n"


def test_cell_contains_no_newlines_or_control_characters() -> None:
    assert one_line("a\n  b\x1b[31m\tc") == "a b?[31m c"


@pytest.mark.parametrize(
    ("seconds", "text"), [(-1, "0s"), (59.9, "59s"), (60, "1m00s"), (3 * 3600 + 240, "3h04m"), (190_000, "2d04h")]
)
def test_duration_has_at_most_two_units(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_json_has_state_names_constraint_text_and_reason() -> None:
    found = json.loads(json.dumps(as_json(job_status(waiting=WAITING))))
    assert (found["state"], found["priority"], found["tasks"]) == ("PENDING", "INTERACTIVE", {"PENDING": 2})
    assert found["waiting"]["sentence"].startswith("waiting for 2 slices")
    assert found["waiting"]["requirement"]["constraints"] == ["tpu-topology == v4-16"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"waiting": WAITING}, "waiting for 2 slices"),
        ({}, "it will be looked at in a moment"),
        ({"state": JobState.SUCCEEDED, "error": "an earlier one"}, "it does not wait, it has ended: succeeded"),
        ({"state": JobState.FAILED, "error": "boom"}, "it does not wait, it has ended: failed: boom"),
        ({"state": JobState.RUNNING, "tasks": {TaskState.ASSIGNED: 2}, "groups": ("s",)}, "is being started on s"),
        ({"state": JobState.RUNNING, "tasks": {TaskState.RUNNING: 2}, "groups": ("s",)}, "attempt 1 is running on s"),
    ],
)
def test_why_answers_for_every_state(changes: dict[str, Any], said: str) -> None:
    assert said in job_status(**changes).explanation


def test_placed_job_not_yet_running_is_starting() -> None:
    assert state_in_words(job_status(state=JobState.RUNNING, tasks={TaskState.ASSIGNED: 2})) == "starting"
    assert state_in_words(job_status(state=JobState.RUNNING, tasks={TaskState.RUNNING: 2})) == "running"
