"""What the service of logs answers to the dashboard: a piece of a task's output."""

from collections.abc import Mapping
from typing import Any

from iris_ray.actors.calls.controller_connection import ControllerConnection
from iris_ray.errors import InvalidRequestError
from iris_ray.logs.calls import LogCalls
from iris_ray.logs.core import LogPosition
from iris_ray.terminal import printable

PIECE_BYTES = 256 << 10
TAIL_LINES = 500


def piece(source: ControllerConnection, names: Mapping[str, str], query: Mapping[str, str]) -> dict[str, Any]:
    """Return a piece of a task's output, and where the next piece begins.

    Args:
        source: the Controller.
        names: ``job``.
        query: ``task``, ``attempt`` (the latest if left out), and ``offset``, or else ``tail``.

    Raises:
        UnknownNameError: there is no such job, task or attempt.
        InvalidRequestError: a value is not a number.
    """
    numbers = {name: _number(name, query[name]) for name in ("task", "attempt", "offset", "tail") if name in query}
    tail = None if "offset" in numbers else numbers.get("tail", TAIL_LINES)
    at = LogPosition(numbers.get("attempt"), numbers.get("offset", 0), tail)
    task = numbers.get("task", 0)
    log = source.ask(LogCalls.fetch_task_logs, names["job"], task, at, PIECE_BYTES).without_half_character
    shown = "attempt", "latest_attempt", "finished", "job_finished", "from_host", "note", "offset", "next_offset", "end"
    lines = (printable(line) for line in log.data.split(b"\n"))
    return {name: getattr(log, name) for name in shown} | {"text": "\n".join(lines)}


def _number(name: str, value: str) -> int:
    if not value.isdecimal() or len(value) > 15:
        raise InvalidRequestError(f"{name} is {value!r}; give a number of 0 or more")
    return int(value)
