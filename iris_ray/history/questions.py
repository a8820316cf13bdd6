"""What the command line, the dashboard and reports ask the history: statements and their parameters. Pure."""

from collections.abc import Mapping
from typing import NamedTuple

from iris_ray.history.calls import Value

GROUPS = ("user", "team", "type", "band", "name")
"""The columns of ``jobs`` by which reports and utilisation are summed up; ``name`` in reports only."""
SEEN_FOR_S = 3600
"""How long an unfinished job counts after it was last seen, at most until now."""


class Question(NamedTuple):
    """One statement and its parameters."""

    sql: str
    parameters: Mapping[str, Value] = {}


class Wanted(NamedTuple):
    """The filters of a list of jobs; None: all.

    Attributes:
        user, state, type: of the job.
        cause: why one of its attempts ended.
        name: a part of its name or id.
        text: a part of its name or id, or the whole name of its user.
        since, until: it was in the cluster in that time; seconds since the epoch.
    """

    user: str | None = None
    state: str | None = None
    cause: str | None = None
    type: str | None = None
    name: str | None = None
    since: float | None = None
    until: float | None = None
    text: str | None = None


_CONDITIONS = {
    "user": "user = :user",
    "state": "state = :state",
    "type": "type = :type",
    "name": "(instr(name, :name) OR instr(job_id, :name))",
    "text": "(instr(name, :text) OR instr(job_id, :text) OR user = :text)",
    "since": f"coalesce(ended_at, min(:now, seen_at + {SEEN_FOR_S})) >= :since",
    "until": "submitted_at < :until",
    "cause": "EXISTS (SELECT 1 FROM attempts WHERE job = jobs.id AND cause = :cause)",
}
_BEGAN = "coalesce(assigned_at, attempts.started_at)"
_ENDED = f"coalesce(attempts.ended_at, min(:now, seen_at + {SEEN_FOR_S}))"


def jobs_question(wanted: Wanted, now: float, limit: int) -> Question:
    """Ask for jobs, one more than the limit: first the running ones, then the latest that ended."""
    given = {name: value for name, value in wanted._asdict().items() if value is not None}
    conditions = " AND ".join(_CONDITIONS[name] for name in given) or "1"
    chip_hours = f"SELECT sum(chips * ({_ENDED} - {_BEGAN})) / 3600 FROM attempts WHERE job = jobs.id"
    return Question(
        f"SELECT *, ({chip_hours}) AS chip_hours FROM (SELECT * FROM jobs WHERE {conditions}"
        " ORDER BY ended_at IS NULL DESC, ended_at DESC, submitted_at DESC LIMIT :limit + 1) AS jobs",
        given | {"now": now, "limit": limit},
    )


def job_questions(job_id: str) -> dict[str, Question]:
    """Ask for all rows of one job; of several jobs with this id, the latest."""
    job = "(SELECT id FROM jobs WHERE job_id = :job_id ORDER BY submitted_at DESC LIMIT 1)"
    of_it = {"job_id": job_id}
    return {
        "job": Question(f"SELECT * FROM jobs WHERE id = {job}", of_it),
        "attempts": Question(f"SELECT * FROM attempts WHERE job = {job} ORDER BY gang, number", of_it),
        "time": Question(
            "SELECT kind, sum(seconds) AS seconds, sum(chip_seconds) AS chip_seconds"
            f" FROM time WHERE job = {job} GROUP BY kind ORDER BY seconds DESC",
            of_it,
        ),
        "losses": Question(
            "SELECT cause, sum(count) AS failures, sum(seconds) AS seconds, sum(chip_seconds) AS chip_seconds"
            f" FROM losses WHERE job = {job} GROUP BY cause ORDER BY seconds DESC",
            of_it,
        ),
        "curves": Question(f"SELECT name, at, step, value FROM curves WHERE job = {job} ORDER BY name, at", of_it),
        "events": Question("SELECT * FROM events WHERE job_id = :job_id ORDER BY at", of_it),
    }


LATEST_IDS = Question("SELECT DISTINCT job_id FROM jobs ORDER BY id DESC")


def events_question(since: float | None, until: float | None) -> Question:
    """Ask for events, the newest first."""
    return Question(
        "SELECT * FROM events WHERE at >= coalesce(:since, 0) AND at < coalesce(:until, 1e12) ORDER BY at DESC",
        {"since": since, "until": until},
    )


# -- reports -----------------------------------------------------------------------------------------------------------


def report_questions(since: float, until: float, first_day: str, end_day: str, by: str, now: float) -> list[Question]:
    """Ask for chips, kinds of time and losses of jobs in some days, each summed up by a column of jobs.

    Args:
        since, until: the time; seconds since the epoch.
        first_day, end_day: that time as days in UTC, such as 2026-11-01, without the second one.
        by: one of `GROUPS`.
        now: seconds since the epoch.
    """
    assert by in GROUPS
    who, days = f"coalesce(jobs.{by}, '') AS who", "day >= :first_day AND day < :end_day"
    part = f"max(0, min({_ENDED}, :until) - max({_BEGAN}, :since))"
    times = {"since": since, "until": until, "now": now}
    in_days = {"first_day": first_day, "end_day": end_day}
    return [
        Question(
            f"SELECT {who}, count(DISTINCT jobs.id) AS jobs, sum(attempts.chips * {part}) / 3600 AS chip_hours"
            f" FROM attempts JOIN jobs ON jobs.id = job WHERE {_BEGAN} < :until AND {_ENDED} > :since GROUP BY who",
            times,
        ),
        Question(
            f"SELECT {who}, kind, sum(chip_seconds) / 3600 AS chip_hours"
            f" FROM time JOIN jobs ON jobs.id = job WHERE {days} GROUP BY who, kind",
            in_days,
        ),
        Question(
            f"SELECT {who}, cause, sum(count) AS failures, sum(seconds) / 3600 AS hours,"
            " sum(chip_seconds) / 3600 AS chip_hours"
            f" FROM losses JOIN jobs ON jobs.id = job WHERE {days} GROUP BY who, cause",
            in_days,
        ),
    ]


# -- utilisation -------------------------------------------------------------------------------------------------------

_IN_TIME = "at >= :since AND at < :until AND (:type IS NULL OR type = :type)"


_SPANS = """
    WITH spans AS (
        SELECT at / :step AS step, sum(span_s) AS span
        FROM (SELECT DISTINCT at, span_s FROM fleet_samples WHERE at >= :since AND at < :until) GROUP BY step
    )
"""
"""The seconds of each step in which there were samples: a type that was there for half of them counts half."""


def fleet_question(since: float, until: float, step_s: int, tpu_type: str | None = None) -> Question:
    """Ask how many chips there were, on average in each step of a time.

    Args:
        since, until: the time; seconds since the epoch.
        step_s: how long a step is.
        tpu_type: only chips of this type; None: of all.
    """
    return Question(
        f"""{_SPANS}, sums AS (
                SELECT at / :step AS step, sum(chips * span_s) AS chips FROM fleet_samples WHERE {_IN_TIME} GROUP BY 1
            )
            SELECT step * :step AS at, chips / span AS chips FROM sums JOIN spans USING (step) ORDER BY step""",
        {"since": since, "until": until, "step": step_s, "type": tpu_type},
    )


def users_question(since: float, until: float, step_s: int, by: str, tpu_type: str | None = None) -> Question:
    """Ask for the mean use and the mean queue in each step of a time, by user, team, type or band.

    Args: as of `fleet_question`; ``by`` is one of `GROUPS`, without the name.
    """
    assert by in GROUPS
    return Question(
        f"""{_SPANS}, sums AS (
                SELECT at / :step AS step, {by} AS who, sum(busy_chips * span_s) AS busy,
                       sum(waiting_jobs * span_s) AS jobs, sum(waiting_chips * span_s) AS chips
                FROM user_samples WHERE {_IN_TIME} GROUP BY 1, 2
            )
            SELECT step * :step AS at, who, busy / span AS busy_chips, jobs / span AS waiting_jobs,
                   chips / span AS waiting_chips
            FROM sums JOIN spans USING (step) ORDER BY step, who""",
        {"since": since, "until": until, "step": step_s, "type": tpu_type},
    )


def step_for(seconds: float, steps: int) -> int:
    """Return the length of each of about this number of steps of a time: whole minutes, or whole hours."""
    wanted = seconds / steps
    choices = (60, 300, 600, 1800, 3600, 2 * 3600, 3 * 3600, 6 * 3600, 12 * 3600, 86400)
    return next((choice for choice in choices if choice >= wanted), -(-int(wanted) // 86400) * 86400)
