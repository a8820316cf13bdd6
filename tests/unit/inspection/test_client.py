"""Stacks of a job's tasks, as people see them."""

import pytest

from iris_ray.errors import InspectionFailedError
from iris_ray.inspection import client as inspection
from iris_ray.inspection.client import SameStacks

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
    monkeypatch.setattr(inspection, "_asked", lambda *_: ((None, *one) for one in enumerate(found)))
    assert inspection.stacks([]) == [
        SameStacks((0, 2, 4), dump(100, "all_reduce")),
        SameStacks((1,), dump(101, "load_data")),
        SameStacks((3,), None, "its host is gone"),
        SameStacks((5,), dump(105, "all_reduce", line=8)),
    ]
