"""The calls of the service of logs: what is refused to whom."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from iris_ray.actors.protocol.messages import PoolProcess
from iris_ray.actors.protocol.services import addressed
from iris_ray.errors import InvalidMessageError, NotPermittedError
from iris_ray.logs.calls import LogCalls
from iris_ray.logs.core import LastLines, LogPosition
from iris_ray.model.lifecycle import JobState
from tests.support.controller_in_process import ControllerInProcess


def ask(world: ControllerInProcess, question: Callable[..., Any], *args: Any) -> Any:
    name, args, _ = addressed(question, args, {})
    return getattr(world.controller(), name).remote(*args).future().result(60)


@pytest.mark.parametrize(
    ("question", "args"),
    [
        (LogCalls.note_last_lines, ([None], PoolProcess("pool", 1))),
        (LogCalls.fetch_logs, ("job", {0: 1}, 1)),
        (LogCalls.locate_logs, ("job", {0: 1})),
    ],
    ids=lambda one: getattr(one, "__name__", ""),
)
def test_senseless_question_about_logs_is_refused_and_jobs_run(
    world: ControllerInProcess, question: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    with pytest.raises(InvalidMessageError):
        ask(world, question, *args)
    world.succeed(world.start("other", user="ben"))
    assert world.state("other") is JobState.SUCCEEDED


@pytest.mark.parametrize(
    "changes",
    [{"task_index": 7}, {"task_index": -1}, {"attempt": 2}, {"attempt": 0}, {"node_id": "x" * 1000},
     {"data": b"x" * 5000}],
    ids=str,
)  # fmt: skip
def test_last_lines_that_can_not_be_are_not_kept(world: ControllerInProcess, changes: dict[str, Any]) -> None:
    """Their sender is a process of a user, and what the Controller keeps is bounded."""
    world.start("mine")
    memory = world.part_of_controller("logs")._memory
    sender, held = PoolProcess(world.spec("mine").owner, 1), memory.held_bytes
    told = LastLines("mine", 0, 1, "node", 5, b"hello")
    ask(world, LogCalls.note_last_lines, [replace(told, **changes)], sender)
    assert memory.held_bytes == held
    ask(world, LogCalls.note_last_lines, [told], sender)
    assert memory.held_bytes > held


def test_answer_with_many_logs_is_as_small_as_with_one(world: ControllerInProcess) -> None:
    world.start("mine")
    for index in range(2):
        world.prints("mine", index, "x" * 6 * 1024 * 1024)
    found = ask(world, LogCalls.fetch_logs, "mine", {0: LogPosition(), 1: LogPosition()}, 1 << 30)
    assert sum(len(log.data) for log in found.values()) == 4 << 20


def test_last_lines_of_another_pools_task_are_refused(world: ControllerInProcess) -> None:
    world.start("mine")
    world.start("theirs")
    forged = LastLines("theirs", 0, 1, "node", 5, b"forged")
    with pytest.raises(NotPermittedError, match="theirs is not a job"):
        ask(world, LogCalls.note_last_lines, [forged], PoolProcess(world.spec("mine").owner, 1))
