"""``iris-ray history`` and ``iris-ray report``: what was, from the history that outlives the Controller."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, TypedDict

import click

from iris_ray.actors.calls.controller_connection import ControllerConnection
from iris_ray.cli.address import Command, address_option, cluster
from iris_ray.cli.options import tpu_option
from iris_ray.cli.output import ListForm, json_option, list_options
from iris_ray.cli.printing import counted, duration, print_facts, print_json, print_table
from iris_ray.cli.times import Time
from iris_ray.history.calls import MOST_ROWS_EVER, HistoryCalls, HistoryRows
from iris_ray.history.questions import (
    GROUPS,
    LATEST_IDS,
    Question,
    Wanted,
    events_question,
    fleet_question,
    job_questions,
    jobs_question,
    report_questions,
    step_for,
    users_question,
)
from iris_ray.history.reading import read_history
from iris_ray.model.checks import unknown
from iris_ray.model.goodput import productive_share
from iris_ray.model.lifecycle import JobState
from iris_ray.model.time_lost import FailureCause
from iris_ray.model.topology import get_tpu_config

Row = Mapping[str, Any]
Ask = Callable[[Question, int], HistoryRows]
"""Returns the answer to a question, with at most this number of rows."""

_STEPS = 48
"""The approximate number of lines that ``--utilisation`` prints."""
_BAR = 20


Columns = Mapping[str, Any]
"""A row of the history: values by column. docs/history.md has the tables and their columns."""


class WholeJob(TypedDict):
    """One job of the history, if JOB is given; of several jobs with this id, the latest.

    Attributes:
        job: its row.
        attempts, curves, events: the rows of these tables that are about it.
        time, losses: its rows of these tables, summed up by kind of time and by cause.
    """

    job: Columns
    attempts: list[Columns]
    time: list[Columns]
    losses: list[Columns]
    curves: list[Columns]
    events: list[Columns]


class UsedChips(TypedDict):
    """The use of chips over time, with ``--utilisation``.

    Attributes:
        step_s: the seconds between two lines.
        chips: the fleet's chips over time.
        by_band, by_type, by_user: the chips in use, and what waited, over time, by band, type or user.
    """

    step_s: float
    chips: list[Columns]
    by_band: list[Columns]
    by_type: list[Columns]
    by_user: list[Columns]


class ReportLine(TypedDict):
    """The part of a user in a report, or of whatever it sums up by.

    Attributes:
        who: the user, or the value of what the report sums up by.
        jobs, chip_hours: how many jobs held chips, and their chip-hours.
        goodput: the productive share of the chip-hours since user code began, from 0 to 1; None if it is not known.
        lost_to_others: chip-hours lost by preemptions, lost hosts and evictions.
        lost_to_itself: chip-hours lost by crashes and hangs.
        chip_hours_by_kind: by the kind of time.
    """

    who: str | None
    jobs: int
    chip_hours: float
    goodput: float | None
    lost_to_others: float
    lost_to_itself: float
    chip_hours_by_kind: Mapping[str, float]


class LostBy(TypedDict):
    """The cost of one cause of failures.

    Attributes:
        cause: its name.
        failures: how many.
        hours, chip_hours: the time that they cost, in hours and in chip-hours.
    """

    cause: str
    failures: int
    hours: float
    chip_hours: float


class MonthReport(TypedDict):
    """The report of a month.

    Attributes:
        month: such as 2026-11.
        by: the key of the lines, such as ``user``.
        lines: the largest first.
        by_cause: the cost of failures.
    """

    month: str
    by: str
    lines: list[ReportLine]
    by_cause: list[LostBy]


def _month(_: click.Context, __: click.Parameter, value: str | None) -> datetime:
    """Return the beginning of a month in UTC."""
    try:
        month = datetime.strptime(value, "%Y-%m").replace(tzinfo=UTC) if value else _first(datetime.now(UTC))
        _end(month)
        return month
    except (ValueError, OverflowError):  # the last month of all has no end
        raise click.BadParameter(f"{value!r} is not a month; give one such as 2026-11.") from None


def _first(day: datetime) -> datetime:
    return day.replace(day=1, hour=0, minute=0, second=0, microsecond=0)


def _end(month: datetime) -> datetime:
    return _first(month + timedelta(days=32))


def file_option(command: Command) -> Command:
    return click.option(
        "--file", "path", type=click.Path(path_type=Path), metavar="PATH",
        help="Read this history.sqlite, without a cluster.",
    )(command)  # fmt: skip


@contextmanager
def _opened(path: Path | None) -> Iterator[Ask]:
    """Yield the function that answers questions, by the Controller or from a file."""
    if path is not None:
        yield lambda question, most: read_history(path, question.sql, question.parameters, most)
        return
    from iris_ray.client.connection import current_user

    with cluster():
        controller = ControllerConnection()
        yield lambda question, most: controller.ask(
            HistoryCalls.ask_history, question.sql, dict(question.parameters), most, current_user()
        )


def _rows(ask: Ask, question: Question, most: int = MOST_ROWS_EVER) -> list[dict[str, Any]]:
    return ask(question, most).as_dicts()


# -- history -----------------------------------------------------------------------------------------------------------


_FILTERS = {"JOB": (), "--sql": (), "--events": ("since", "until"), "--utilisation": ("since", "until", "tpu")}
"""The other outputs than the list of jobs, and the filters that each takes."""


@click.command()
@click.argument("job", required=False)
@click.option("--user", metavar="NAME", help="Only jobs of this user.")
@click.option(
    "--since", type=Time(), help="Only jobs that had not ended before this time; events and chips since then."
)
@click.option(
    "--until", type=Time(), help="Only jobs that were submitted before this time; events and chips until then."
)
@click.option(
    "--state", type=click.Choice([*(state.value for state in JobState), "lost"]), help="Only jobs in this state."
)
@click.option(
    "--cause",
    type=click.Choice([cause.value for cause in FailureCause]),
    help="Only jobs with an attempt that ended for this cause.",
)
@tpu_option("Only jobs on slices of this type; with --utilisation, only chips of it.")
@click.option("--name", metavar="TEXT", help="Only jobs with this text in their name or id.")
@click.option(
    "--limit",
    type=click.IntRange(1, MOST_ROWS_EVER),
    metavar="N",
    default=50,
    show_default=True,
    help="The largest number of rows; JOB and --utilisation ignore it.",
)
@click.option("--sql", metavar="STATEMENT", help="The rows of a SELECT; docs/history.md lists the tables.")
@click.option(
    "--events",
    is_flag=True,
    help="Hosts that joined or were lost, silent or blamed; notices, taints, settings, limits, and starts of"
    " the Controller.",
)
@click.option("--utilisation", is_flag=True, help="Chips in use, and what waited, over time; the last day by default.")
@file_option
@list_options(list[Columns] | WholeJob | UsedChips, "jobs' ids")
@address_option
def history(
    job: str | None, sql: str | None, events: bool, utilisation: bool, path: Path | None, limit: int, form: ListForm,
    tpu_type: str | None, **filters: Any,
) -> None:  # fmt: skip
    """Jobs that ran or have ended, even if the Controller has forgotten them: who, when, how, and why.

    \b
      iris-ray history --user ann --since 7d
      iris-ray history --cause preempted --tpu v4-32
      iris-ray history train-1a2b3c4d                   one job, whole
      iris-ray history --utilisation --since 24h
      iris-ray history --sql "SELECT user, count(*) FROM jobs GROUP BY user"
      iris-ray history --file /mnt/backup/history.sqlite

    The Controller keeps them in a file on the head, unless the cluster setting history is off. The file outlives the
    cluster if the head's disk does.
    """
    chosen = [name for name, given in zip(_FILTERS, (job, sql, events, utilisation), strict=True) if given]
    if len(chosen) > 1:
        raise click.UsageError(f"give one of {', '.join(_FILTERS)}.")
    for name, value in [*filters.items(), ("tpu", tpu_type)] if chosen else ():
        if value is not None and name not in _FILTERS[chosen[0]]:
            raise click.UsageError(f"--{name} is for the list of jobs; it says nothing of {chosen[0]}.")
    if chosen and form.only_ids:
        raise click.UsageError(f"--quiet is for the list of jobs; it says nothing of {chosen[0]}.")
    as_json = form.as_json
    wanted = Wanted(**filters, type=tpu_type and get_tpu_config(tpu_type).name)
    with _opened(path) as ask:
        if job is not None:
            _show_job(ask, job, as_json)
        elif sql is not None:
            _show_rows(ask(Question(sql), limit), as_json)
        elif events:
            _show_events(_rows(ask, events_question(wanted.since, wanted.until), limit), as_json)
        elif utilisation:
            _show_utilisation(ask, wanted, as_json)
        else:
            _show_jobs(ask(jobs_question(wanted, time.time(), limit), limit), form)


_JOB_HEADERS = ("JOB", "USER", "STATE", "TYPE", "ENDED", "RAN", "ATTEMPTS", "CHIP-HOURS", "NOTE")


def _show_jobs(found: HistoryRows, form: ListForm) -> None:
    form.show(found.as_dicts(), lambda job: str(job["job_id"]), _JOB_HEADERS, _job_row, "no such jobs in the history")
    if not form.as_json:
        _say_cut(found)


def _job_row(job: Row) -> tuple[object, ...]:
    ran = None if job["started_at"] is None else (job["ended_at"] or time.time()) - job["started_at"]
    lost = ", ".join(counted(job[f"{one}s"], one) for one in ("preemption", "failure", "eviction") if job[f"{one}s"])
    note = "; ".join(filter(None, (lost, job["error"])))
    when = "-" if job["ended_at"] is None else _stamp(job["ended_at"])
    ran_for = "-" if ran is None else duration(ran)
    return (job["job_id"], job["user"], job["state"], job["type"] or "-", when, ran_for, job["attempts"],
            _hours(job["chip_hours"]), note)  # fmt: skip


def _say_cut(found: HistoryRows) -> None:
    if found.cut:
        click.echo(f"\nthe first {len(found.rows)}; there are more (--limit)", err=True)


def _show_rows(found: HistoryRows, as_json: bool) -> None:
    if as_json:
        print_json(found.as_dicts())
        return
    rows = [["" if value is None else value for value in row] for row in found.rows]
    print_table([name.upper() for name in found.columns], rows, "no rows")
    _say_cut(found)


def _show_events(rows: Sequence[Row], as_json: bool) -> None:
    if as_json:
        print_json(rows)
        return
    shown = [(_stamp(row["at"]), row["kind"], row["subject"], row["job_id"] or "-", row["what"]) for row in rows]
    print_table(("WHEN", "WHAT", "WHERE", "JOB", "WHY"), shown, "no events in the history")


# -- one job -----------------------------------------------------------------------------------------------------------

_ATTEMPT_HEADERS = ("ATTEMPT", "STATE", "CAUSE", "RAN", "CHIPS", "SLICES", "BLAMED", "EXIT", "COST", "ERROR")


def _show_job(ask: Ask, job_id: str, as_json: bool) -> None:
    found = {name: _rows(ask, question) for name, question in job_questions(job_id).items()}
    if not found["job"]:
        raise unknown("job in the history", job_id, [row["job_id"] for row in _rows(ask, LATEST_IDS, 2000)])
    (job,) = found.pop("job")
    if as_json:
        print_json({"job": job, **found})
        return
    times = {row["kind"]: row["chip_seconds"] for row in found["time"]}
    print_facts({
        "job": job["job_id"], "name": job["name"] if job["name"] != job["job_id"] else None, "user": job["user"],
        "team": job["team"], "state": job["state"], "priority": job["band"], "type": job["type"],
        "submitted": _stamp(job["submitted_at"]), "started": _stamp(job["started_at"]),
        "ended": _stamp(job["ended_at"]), "attempts": job["attempts"], "failures": job["failures"],
        "preemptions": job["preemptions"], "evictions": job["evictions"] or None, "last step": job["step"],
        "said": job["says"], "goodput": _percent(productive_share(times)) if times else None, "error": job["error"],
    })  # fmt: skip
    if found["attempts"]:
        click.echo()
        print_table(_ATTEMPT_HEADERS, [_attempt_row(attempt) for attempt in found["attempts"]], "")
    for title, key, name in (("TIME", "time", "kind"), ("TIME LOST BY", "losses", "cause")):
        if found[key]:
            click.echo()
            rows = [(one[name].replace("_", " "), duration(one["seconds"]), _hours(one["chip_seconds"] / 3600))
                    for one in found[key]]  # fmt: skip
            print_table((title, "HOW LONG", "CHIP-HOURS"), rows, "")
    if found["events"]:
        click.echo()
        _show_events(found["events"], False)


def _attempt_row(attempt: Row) -> tuple[object, ...]:
    number = f"{attempt['gang']}/{attempt['number']}" if attempt["gang"] else attempt["number"]
    began, ended = attempt["started_at"], attempt["ended_at"]
    ran = "-" if began is None else duration((ended or time.time()) - began)
    blamed = attempt["host"] or ("-" if attempt["task"] is None else f"task {attempt['task']}")
    cost = "-" if attempt["lost_chip_s"] is None else f"{_hours(attempt['lost_chip_s'] / 3600)} chip-hours"
    code = "-" if attempt["exit_code"] is None else attempt["exit_code"]
    return (number, attempt["state"], attempt["cause"] or "-", ran, f"{attempt['chips']:g}", attempt["slices"] or "-",
            blamed, code, cost, attempt["error"] or "")  # fmt: skip


# -- utilisation -------------------------------------------------------------------------------------------------------


def _show_utilisation(ask: Ask, wanted: Wanted, as_json: bool) -> None:
    now = time.time()
    until = now if wanted.until is None else wanted.until
    since = until - 86400 if wanted.since is None else wanted.since
    step = step_for(max(until - since, 60.0), _STEPS)
    fleet = _rows(ask, fleet_question(since, until, step, wanted.type))
    used = {by: _rows(ask, users_question(since, until, step, by, wanted.type)) for by in ("band", "type", "user")}
    if as_json:
        print_json({"step_s": step, "chips": fleet, **{f"by_{by}": rows for by, rows in used.items()}})
        return
    print_table(("TIME", "IN USE", "CHIPS", "SHARE", "", "WAITING JOBS", "WAITING CHIPS", "BY BAND"),
                [_moment(one, used["band"]) for one in fleet], "no samples in that time")  # fmt: skip


def _moment(fleet: Row, used: Sequence[Row]) -> tuple[object, ...]:
    here = [row for row in used if row["at"] == fleet["at"]]
    busy, jobs, chips = (sum(row[name] for row in here) for name in ("busy_chips", "waiting_jobs", "waiting_chips"))
    share = busy / fleet["chips"] if fleet["chips"] else 0.0
    bands = ", ".join(f"{row['who']} {row['busy_chips']:.0f}" for row in here if row["busy_chips"] >= 0.5)
    bar = "█" * round(_BAR * min(share, 1.0)) or "·"
    return (_stamp(fleet["at"]), f"{busy:.0f}", f"{fleet['chips']:.0f}", _percent(share), bar, f"{jobs:.1f}",
            f"{chips:.0f}", bands)  # fmt: skip


# -- report ------------------------------------------------------------------------------------------------------------

_BY_OTHERS = FailureCause.PREEMPTED, FailureCause.LOST, FailureCause.EVICTED
_BY_ITSELF = FailureCause.CRASHED, FailureCause.HUNG


@click.command()
@click.option("--month", callback=_month, metavar="MONTH", help="Such as 2026-11, in UTC.  [default: this month]")
@click.option("--by", type=click.Choice(GROUPS), default="user", show_default=True, help="Sum up by this.")
@file_option
@json_option(MonthReport)
@address_option
def report(month: datetime, by: str, path: Path | None, as_json: bool) -> None:
    """Chip-hours and goodput of a month by user, and what preemptions and failures cost.

    \b
      iris-ray report
      iris-ray report --month 2026-11 --by team
      iris-ray report --month 2026-11 --json

    It is made from the history, so it includes jobs that the Controller has forgotten. Of each job, only its time in
    the month counts.
    """
    end = _end(month)
    days = f"{month:%Y-%m-%d}", f"{end:%Y-%m-%d}"
    questions = report_questions(month.timestamp(), end.timestamp(), *days, by, time.time())
    with _opened(path) as ask:
        held, kinds, losses = (_rows(ask, question) for question in questions)
    lines = [_line(row, kinds, losses) for row in sorted(held, key=lambda row: -row["chip_hours"])]
    causes = _by_cause(losses)
    if as_json:
        print_json(MonthReport(month=f"{month:%Y-%m}", by=by, lines=lines, by_cause=causes))
        return
    headers = (by.upper(), "JOBS", "CHIP-HOURS", "GOODPUT", "LOST TO OTHERS", "LOST TO ITSELF")
    if len(lines) > 1:
        everybody = [{**row, "who": "all"} for row in (*kinds, *losses)]
        total = {"who": "all", "jobs": sum(one["jobs"] for one in lines),
                 "chip_hours": sum(one["chip_hours"] for one in lines)}  # fmt: skip
        lines.append(_line(total, [one for one in everybody if "kind" in one], [o for o in everybody if "cause" in o]))
    rows = [(one["who"] or "-", one["jobs"], _hours(one["chip_hours"]), _percent(one["goodput"]),
             _hours(one["lost_to_others"]), _hours(one["lost_to_itself"])) for one in lines]  # fmt: skip
    print_table(headers, rows, f"no job had chips in {month:%Y-%m}")
    if causes:
        click.echo()
        print_table(("TIME LOST BY", "FAILURES", "HOURS", "CHIP-HOURS"),
                    [(one["cause"], one["failures"], _hours(one["hours"]), _hours(one["chip_hours"]))
                     for one in causes], "")  # fmt: skip
        click.echo("\nchip-hours of lost, done-again and start-up time; others: preempted, lost, evicted; itself: "
                   "crashed, hung")  # fmt: skip


def _line(held: Row, kinds: Sequence[Row], losses: Sequence[Row]) -> ReportLine:
    """Return the line of a user, or of whatever jobs are summed up by."""
    who = held["who"]
    amounts: dict[str, float] = {}
    for row in kinds:
        if row["who"] == who:
            amounts[row["kind"]] = amounts.get(row["kind"], 0.0) + row["chip_hours"]

    def lost(causes: Sequence[FailureCause]) -> float:
        return float(sum(row["chip_hours"] for row in losses if row["who"] == who and row["cause"] in causes))

    return {
        "who": who,
        "jobs": held["jobs"],
        "chip_hours": held["chip_hours"],
        "goodput": productive_share(amounts),
        "lost_to_others": lost(_BY_OTHERS),
        "lost_to_itself": lost(_BY_ITSELF),
        "chip_hours_by_kind": amounts,
    }


def _by_cause(losses: Sequence[Row]) -> list[LostBy]:
    found: dict[str, LostBy] = {}
    for row in losses:
        nothing = LostBy(cause=row["cause"], failures=0, hours=0.0, chip_hours=0.0)
        of_it = found.setdefault(row["cause"], nothing)
        of_it["failures"] += row["failures"]
        of_it["hours"] += row["hours"]
        of_it["chip_hours"] += row["chip_hours"]
    return sorted(found.values(), key=lambda one: -one["chip_hours"])


# -- words -------------------------------------------------------------------------------------------------------------


def _stamp(at: float | None) -> str | None:
    return None if at is None else time.strftime("%Y-%m-%d %H:%M", time.localtime(at))


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f} %"


def _hours(hours: float | None) -> str:
    return "-" if hours is None else f"{hours:,.2f}"
