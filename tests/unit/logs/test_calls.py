"""The calls of the service of logs: their wire format, and what is refused to whom."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest

from iris_ray.actors.protocol.messages import PoolProcess
from iris_ray.actors.protocol.services import addressed
from iris_ray.actors.protocol.version import PROTOCOL_VERSION
from iris_ray.errors import InvalidMessageError, NotPermittedError
from iris_ray.logs.calls import LogCalls, LogCallsOfPool
from iris_ray.logs.core import LastLines
from iris_ray.model.lifecycle import JobState
from tests.support.controller_in_process import ControllerInProcess


def ask(world: ControllerInProcess, question: Callable[..., Any], *args: Any) -> Any:
    name, args, _ = addressed(question, args, {})
    return getattr(world.controller(), name).remote(*args).future().result(60)


def test_calls_of_logs_change_only_with_a_new_protocol() -> None:
    """A change of this list raises PROTOCOL_VERSION in the same commit; new methods need no new version."""
    found = {
        protocol.__name__: {name: list(inspect.signature(getattr(protocol, name)).parameters) for name in names}
        for protocol, names in ((LogCalls, CALLS["LogCalls"]), (LogCallsOfPool, CALLS["LogCallsOfPool"]))
    }
    assert (PROTOCOL_VERSION, found) == (18, CALLS)


CALLS = {
    "LogCalls": {
        "fetch_task_logs": ["self", "job_id", "task_index", "at", "max_bytes"],
        "fetch_logs": ["self", "job_id", "wanted", "max_bytes"],
        "locate_logs": ["self", "job_id", "wanted"],
        "note_last_lines": ["self", "batch", "sender"],
    },
    "LogCallsOfPool": {"take_last_lines": ["self", "last"]},
}


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


def test_last_lines_of_another_pools_task_are_refused(world: ControllerInProcess) -> None:
    world.start("mine")
    world.start("theirs")
    forged = LastLines("theirs", 0, 1, "node", 5, b"forged")
    with pytest.raises(NotPermittedError, match="theirs is not a job"):
        ask(world, LogCalls.note_last_lines, [forged], PoolProcess(world.spec("mine").owner, 1))
