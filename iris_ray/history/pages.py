"""What the history answers to the dashboard: utilisation over time, jobs of that time, and single jobs."""

import time
from collections.abc import Mapping
from typing import Any

from iris_ray.actors.calls.controller_connection import ControllerConnection
from iris_ray.client.connection import current_user
from iris_ray.errors import HistoryUnavailableError, InvalidRequestError
from iris_ray.history.calls import MOST_ROWS_EVER, HistoryCalls, HistoryRows
from iris_ray.history.questions import (
    Question,
    Wanted,
    fleet_question,
    job_questions,
    jobs_question,
    step_for,
    users_question,
)

STEPS = 120
"""A chart has about this number of steps."""
MOST_HOURS = 400 * 24
JOBS_SHOWN = 100


def history(source: ControllerConnection, names: Mapping[str, str], query: Mapping[str, str]) -> dict[str, Any]:
    """Return the utilisation of the past hours, or the latest jobs of that time.

    Args:
        source: the Controller.
        names: ``what``: "utilisation" or "jobs".
        query: ``hours``, and ``type`` and ``text``: only chips and jobs of this type; only jobs with this text in
            their names, or of this user.

    Raises:
        InvalidRequestError: the hours are not a number.
        HistoryUnavailableError: the cluster keeps no history.
    """
    given = query.get("hours", "24")
    if not given.isdecimal() or len(given) > 15:
        raise InvalidRequestError(f"hours is {given!r}; give a number of 0 or more")
    hours = min(max(1, int(given)), MOST_HOURS)
    ask = _utilisation if names["what"] == "utilisation" else _past_jobs
    return ask(source, hours, query.get("type") or None, query.get("text") or None)


def past_job(source: ControllerConnection, names: Mapping[str, str], _: Mapping[str, str]) -> dict[str, Any]:
    """Return all that the history has of a job. ``job`` is None if it has none; ``error`` says why it can't be read."""
    try:
        asked = job_questions(names["job"])
        found = {name: _ask_history(source, question).as_dicts() for name, question in asked.items()}
    except HistoryUnavailableError as error:
        return {"job": None, "curves": [], "error": str(error)}
    return {**found, "job": next(iter(found["job"]), None)}


def _ask_history(source: ControllerConnection, question: Question, most_rows: int = MOST_ROWS_EVER) -> HistoryRows:
    return source.ask(HistoryCalls.ask_history, question.sql, dict(question.parameters), most_rows, current_user())


def _utilisation(source: ControllerConnection, hours: int, tpu_type: str | None, _: str | None) -> dict[str, Any]:
    step = step_for(hours * 3600.0, STEPS)
    until = (int(time.time()) // step + 1) * step
    since = until - (hours * 3600 // step) * step
    of_time = since, until, step
    types = Question("SELECT DISTINCT type FROM fleet_samples WHERE at >= :since ORDER BY 1", {"since": since})
    found: dict[str, Any] = {"since": since, "until": until, "step_s": step}
    found["types"] = [row["type"] for row in _ask_history(source, types).as_dicts()]
    found["chips"] = _ask_history(source, fleet_question(*of_time, tpu_type)).as_dicts()
    for by in ("band", "user"):
        found[f"by_{by}"] = _ask_history(source, users_question(*of_time, by, tpu_type)).as_dicts()
    return found


def _past_jobs(source: ControllerConnection, hours: int, tpu_type: str | None, text: str | None) -> dict[str, Any]:
    now = time.time()
    wanted = Wanted(type=tpu_type, text=text, since=now - hours * 3600.0)
    found = _ask_history(source, jobs_question(wanted, now, JOBS_SHOWN), JOBS_SHOWN)
    return {"rows": found.as_dicts(), "cut": found.cut}
