"""What the command line prints: tables, JSON, states in words."""

import json
from typing import Any

import pytest

from iris_ray.actors.wire.status import JobStatus
from iris_ray.cli.jobs import state_in_words
from iris_ray.cli.tables import duration, format_table, one_line, plain
from iris_ray.model.constraints import Constraint, ConstraintOp
from iris_ray.model.jobs import PriorityBand
from iris_ray.model.lifecycle import JobState, TaskState
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
    shortage=Shortage((), (Obstacle("v4-16-0", 2, "in use by other-1", ("other-1",)),), 0, {}),
)


def job_status(**changes: Any) -> JobStatus:
    values = dict.fromkeys(JobStatus.__dataclass_fields__) | {
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


def test_table_is_aligned_and_cut_at_the_terminals_edge_in_its_last_column_only() -> None:
    table = format_table(("JOB", "NOTE"), [("a", "x" * 50), ("long-name", "")], width=31)
    assert table.splitlines() == ["JOB        NOTE", "a          " + "x" * 19 + "…", "long-name"]


def test_cell_holds_no_line_ends_and_no_control_characters() -> None:
    assert one_line("a\n  b\x1b[31m\tc") == "a b?[31m c"


@pytest.mark.parametrize(
    ("seconds", "text"), [(-1, "0s"), (59.9, "59s"), (60, "1m00s"), (3 * 3600 + 240, "3h04m"), (190_000, "2d04h")]
)
def test_duration_has_two_units_at_most(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_json_has_states_by_name_constraints_as_text_and_the_sentence() -> None:
    found = json.loads(json.dumps(plain(job_status(waiting=WAITING))))
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
def test_why_has_an_answer_for_every_state(changes: dict[str, Any], said: str) -> None:
    assert said in job_status(**changes).explanation


def test_job_that_has_its_slices_and_runs_nowhere_yet_is_starting() -> None:
    assert state_in_words(job_status(state=JobState.RUNNING, tasks={TaskState.ASSIGNED: 2})) == "starting"
    assert state_in_words(job_status(state=JobState.RUNNING, tasks={TaskState.RUNNING: 2})) == "running"
