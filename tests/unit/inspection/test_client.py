"""Stacks of a job's tasks, as people see them."""

import pytest

from iris_ray.actors.protocol.status import TaskStatus
from iris_ray.errors import InspectionFailedError
from iris_ray.inspection import client as inspection
from iris_ray.inspection.client import SameStacks
from iris_ray.inspection.host import InspectedTask
from iris_ray.model.lifecycle import TaskState

DUMP = """Process {pid}: ray::TaskProcess
Python v3.11.7 (/usr/bin/python3.11)

Thread {pid} (idle): "MainThread"
    {function} (train.py:{line})
Thread 0x7F{pid} (idle): "pump"
    wait (threading.py:320)
"""


def dump(pid: int, function: str, line: int = 7) -> str:
    return DUMP.format(pid=pid, function=function, line=line)


def test_equal_stacks_are_shown_once_most_frequent_first(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [
        dump(100, "all_reduce"),
        dump(101, "load_data"),
        dump(102, "all_reduce"),
        InspectionFailedError("its host is gone"),
        dump(104, "all_reduce"),
        dump(105, "all_reduce", line=8),
    ]
    monkeypatch.setattr(inspection, "_asked", lambda *_, **__: ((None, *one) for one in enumerate(found)))
    assert inspection.stacks([]) == [
        SameStacks((0, 2, 4), dump(100, "all_reduce")),
        SameStacks((1,), dump(101, "load_data")),
        SameStacks((3,), None, "its host is gone"),
        SameStacks((5,), dump(105, "all_reduce", line=8)),
    ]


def test_one_process_of_a_host_is_asked_by_its_own_index(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[InspectedTask] = []

    def ask_host(_: object, node_id: str, address: str, task: InspectedTask, *more: object) -> None:
        asked.append(task)

    monkeypatch.setattr(inspection, "ask_host", ask_host)
    monkeypatch.setattr(inspection, "_answer", lambda *_: "MainThread")
    second = TaskStatus(
        "train/task-1", 1, TaskState.RUNNING, 5, 1.0, None, None, 0, 0, (), "node", "10.0.0.1", "slice", "slice/1",
        None, processes=2,
    )  # fmt: skip
    assert inspection.stacks([second], process=1) == [SameStacks((3,), "MainThread")]
    assert inspection.stacks([second]) == [SameStacks((2, 3), "MainThread")]
    assert [index for index, _ in inspection.traces([second], 3.0, process=0)] == [2]
    inspection.profile(second, 3, "raw", idle=False, process=1)
    assert [task.task_index for task in asked] == [3, 2, 3, 2, 3]
    assert {(task.job_id, task.attempt) for task in asked} == {("train", 5)}
