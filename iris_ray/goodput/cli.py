"""``iris-ray job goodput``: the use of jobs' time and of the cluster's chips, and the costs of failures."""

import csv
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import TypedDict

import click

from iris_ray.actors.calls.controller_connection import ControllerConnection
from iris_ray.cli.address import address_option, cluster
from iris_ray.cli.completion import all_jobs
from iris_ray.cli.output import json_option
from iris_ray.cli.printing import duration, print_facts, print_json, print_table
from iris_ray.cli.times import Time
from iris_ray.goodput.calls import GoodputCalls, JobGoodput, UserDay
from iris_ray.goodput.core import summed_up
from iris_ray.model.goodput import TimeKind, Totals, productive_share
from iris_ray.model.time_lost import Failure, FailureCause, TimeLost, all_together

_NOT_MEASURED = "its tasks call no iris_ray.heartbeat(step), so it is not known what they did"


class GoodputOfAll(TypedDict):
    """The time of several jobs, without JOB.

    Attributes:
        jobs: each job.
        forgotten: sums of jobs that the Controller has forgotten.
        chip_seconds_by_day: the chip-seconds of the cluster, by day and state of the chips; empty with ``--user``.
        time_lost: what failures have cost, by cause.
    """

    jobs: list[JobGoodput]
    forgotten: list[UserDay]
    chip_seconds_by_day: Mapping[str, Mapping[str, float]]
    time_lost: Mapping[FailureCause, TimeLost]


@click.command()
@click.argument("job", required=False, shell_complete=all_jobs)
@click.option("--user", metavar="NAME", help="The jobs of this user, one by one.")
@click.option("--by", type=click.Choice(("user", "team")), default="user", show_default=True, help="Sum up by this.")
@click.option("--since", type=Time(), help="Jobs that had not ended before then, with all their time.")
@click.option("--csv", "as_csv", is_flag=True, help="One line of comma-separated values for each job and kind of time.")
@click.option("--failures", is_flag=True, help="With --csv: one line for each job and cause of failures instead.")
@json_option(JobGoodput | GoodputOfAll)
@address_option
def goodput(
    job: str | None, user: str | None, by: str, since: float | None, as_csv: bool, failures: bool, as_json: bool
) -> None:
    """How the time of jobs was spent: productive steps, queueing, recovery from preemptions and more.

    \b
      iris-ray job goodput                     by user, and how the chips of the cluster were used
      iris-ray job goodput --by team           by team instead
      iris-ray job goodput --user ann          the jobs of ann
      iris-ray job goodput train-1a2b3c4d      one job, by kind of time
      iris-ray job goodput --since 7d --csv    the remembered jobs of a week, for a spreadsheet

    A second table has the cost of failures: the time of the steps that were repeated, and all the time until the next
    new step.

    Goodput is the productive share of the time since user code began, as Google's ml-goodput-measurement defines it.
    Only jobs that are one gang are measured, and those whose tasks call iris_ray.heartbeat(step) have a goodput. The
    latest 1000 finished jobs are remembered, or fewer if they have many tasks; of earlier ones, only sums by user and
    team are known.
    """
    if as_csv and as_json:
        raise click.UsageError("give --csv or --json, not both.")
    if by != "user" and (job or user or as_csv):
        raise click.UsageError("--by team is for the table of all jobs; leave out JOB, --user and --csv.")
    if failures and not as_csv:
        raise click.UsageError("--failures goes with --csv; without it, the table of failures is printed anyway.")
    with cluster():
        controller = ControllerConnection()
        one = [controller.ask(GoodputCalls.job_goodput, job)] if job else None
        found = one or controller.ask_all(GoodputCalls.list_goodput)
        begin = max(0.0, since or 0.0)
        fleet = {} if job or user else controller.ask(GoodputCalls.fleet_times, _day(begin))
        days = [] if job else controller.ask(GoodputCalls.user_times, begin)
        forgotten = [day for day in days if user in (None, day.user)]
    shown = [one for one in found if _is_wanted(one, user, since)]
    if as_json:
        lost = summed_up(one.time_lost for one in shown)
        all_of_them = GoodputOfAll(jobs=shown, forgotten=forgotten, chip_seconds_by_day=fleet, time_lost=lost)
        print_json(shown[0] if job and shown else all_of_them)
    elif failures:
        _print_failures_csv(shown)
    elif as_csv:
        _print_csv(shown)
    elif job:
        _print_job(shown)
    elif user:
        _print_jobs_of(user, shown, forgotten)
        _print_time_lost(shown)
    else:
        _print_sums(by, shown, forgotten)
        _print_time_lost(shown)
        _print_fleet(fleet)


def _day(at: float) -> str:
    return time.strftime("%Y-%m-%d", time.gmtime(at))


def _is_wanted(job: JobGoodput, user: str | None, since: float | None) -> bool:
    recent = since is None or job.ended_at is None or job.ended_at >= since
    return recent and user in (None, job.user)


_HEADERS = ("JOBS", "CHIP-HOURS", "GOODPUT", "QUEUED", "MOST OF THE REST")


def _print_sums(by: str, jobs: Sequence[JobGoodput], forgotten: Sequence[UserDay]) -> None:
    """Print the sums of each user or team; ``by`` is "user" or "team"."""
    its_jobs: defaultdict[str, list[JobGoodput]] = defaultdict(list)
    its_days: defaultdict[str, list[UserDay]] = defaultdict(list)
    for job in jobs:
        its_jobs[getattr(job, by)].append(job)
    for day in forgotten:
        its_days[getattr(day, by)].append(day)
    names = sorted({*its_jobs, *its_days})
    of_names = [(name or "(no team)", its_jobs[name], its_days[name]) for name in names]
    if len(names) > 1:
        of_names.append(("all", list(jobs), list(forgotten)))
    rows = [_row(name, some, days, _shared_goodput(some, days)) for name, some, days in of_names]
    print_table((by.upper(), *_HEADERS), rows, "no jobs yet")


def _print_jobs_of(user: str, jobs: Sequence[JobGoodput], forgotten: Sequence[UserDay]) -> None:
    rows = [_row(job.job_id, [job], [], job.goodput) for job in jobs]
    rows += [_row("forgotten", [], forgotten, _shared_goodput([], forgotten))] if forgotten else []
    print_table(("JOB", *_HEADERS), rows, f"no jobs of {user}")


def _print_fleet(fleet: Mapping[str, Mapping[str, float]]) -> None:
    totals: dict[str, float] = {}
    for states in fleet.values():
        for state, amount in states.items():
            totals[state] = totals.get(state, 0.0) + amount
    if totals:
        everything = sum(totals.values()) or 1.0
        shares = sorted(totals.items(), key=lambda one: -one[1])
        rest = ", ".join(f"{_percent(amount / everything)} {state}" for state, amount in shares)
        click.echo(f"\nThe chips of the cluster, {_hours(everything)} chip-hours since {min(fleet)}: {rest}")


def _totals(jobs: Sequence[JobGoodput], forgotten: Sequence[UserDay]) -> Totals:
    totals = Totals()
    for job in jobs:
        totals.add(job.seconds, job.chip_seconds)
    for day in forgotten:
        totals.add(day.seconds, day.chip_seconds)
    return totals


def _shared_goodput(jobs: Sequence[JobGoodput], forgotten: Sequence[UserDay]) -> float | None:
    """Return the productive share of the chip-seconds of several jobs; None if none of them was measured."""
    return productive_share(_totals(jobs, forgotten).chip_seconds)


def _row(
    name: str, jobs: Sequence[JobGoodput], forgotten: Sequence[UserDay], goodput: float | None
) -> tuple[object, ...]:
    totals = _totals(jobs, forgotten)
    count = len(jobs) + sum(day.jobs for day in forgotten)
    lost = [
        (amount, kind)
        for kind, amount in totals.chip_seconds.items()
        if kind != TimeKind.PRODUCTIVE.value and amount > 0
    ]
    rest = ", ".join(f"{_words(kind)} {_hours(amount)} h" for amount, kind in sorted(lost, reverse=True)[:3])
    queued = totals.seconds.get(TimeKind.QUEUEING.value, 0.0)
    return name, count, _hours(sum(totals.chip_seconds.values())), _percent(goodput), duration(queued), rest


def _print_job(jobs: Sequence[JobGoodput]) -> None:
    if not jobs:
        click.echo("the job did not run within that time", err=True)
        return
    (job,) = jobs
    unmeasured = None if job.measured is None or job.measured > 0.99 else _NOT_MEASURED
    print_facts({
        "job": job.job_id, "user": job.user, "team": job.team, "state": job.state.value, "attempts": job.attempts,
        "goodput": _percent(job.goodput), "but": unmeasured, "last failure": _last_failure(job.last_failure),
    })  # fmt: skip
    total = sum(job.seconds.values()) or 1.0
    ordered = sorted(job.seconds.items(), key=lambda one: -one[1])
    rows = [
        (_words(kind), duration(seconds), _percent(seconds / total), _hours(job.chip_seconds.get(kind, 0.0)))
        for kind, seconds in ordered
    ]
    click.echo()
    print_table(("TIME", "HOW LONG", "SHARE", "CHIP-HOURS"), rows, "it has not begun")
    _print_time_lost(jobs)


# -- failures ----------------------------------------------------------------------------------------------------------


def _print_time_lost(jobs: Sequence[JobGoodput]) -> None:
    """Print the costs of some jobs' failures by cause; nothing without failures."""
    lost = summed_up(job.time_lost for job in jobs)
    if not lost:
        return
    has_price = any(job.chip_hour for job in jobs if job.time_lost)
    rows = [_lost_row(cause.value, found, jobs, [cause], has_price) for cause, found in _worst_first(lost)]
    if len(lost) > 1:
        rows.append(_lost_row("all", all_together(lost.values()), jobs, list(lost), has_price))
    click.echo()
    headers = ("TIME LOST BY", "FAILURES", "MEDIAN", "WORST", "IN ALL", "CHIP-HOURS")
    print_table((*headers, "COST") if has_price else headers, rows, "")


def _worst_first(lost: Mapping[FailureCause, TimeLost]) -> list[tuple[FailureCause, TimeLost]]:
    return sorted(lost.items(), key=lambda one: -one[1].seconds)


def _lost_row(
    name: str, lost: TimeLost, jobs: Sequence[JobGoodput], causes: Sequence[FailureCause], has_price: bool
) -> tuple[object, ...]:
    times = _short(lost.median_s), _short(lost.worst_s), _short(lost.seconds)
    cells = name, lost.count, *times, _hours(lost.chip_seconds)
    return (*cells, ", ".join(_costs(jobs, causes)) or "-") if has_price else cells


def _costs(jobs: Sequence[JobGoodput], causes: Sequence[FailureCause]) -> list[str]:
    """Return the costs of failures of some causes in money, in each currency."""
    found: dict[str, float] = {}
    for job in jobs:
        held = sum(job.time_lost[cause].chip_seconds for cause in causes if cause in job.time_lost)
        if job.chip_hour is not None and held:
            price, currency = job.chip_hour
            found[currency] = found.get(currency, 0.0) + held / 3600 * price
    return [f"{amount:,.2f} {currency}" for currency, amount in sorted(found.items())]


def _short(seconds: float) -> str:
    """Return a duration; below a minute with tenths of seconds, because seconds count here."""
    return f"{seconds:.1f}s" if seconds < 60 else duration(seconds)


def _last_failure(last: Failure | None) -> str | None:
    if last is None:
        return None
    so_far = "" if last.is_over else " so far"
    parts = (
        ("steps done again", last.again_s),
        ("away, the wait for slices included", last.away_s),
        ("until the first step", last.start_s),
    )
    of_it = ", ".join(f"{_short(seconds)} {what}" for what, seconds in parts if seconds > 0)
    cost = f"{_short(last.lost_s)} and {_hours(last.chip_seconds)} chip-hours{so_far}"
    return f"the end of attempt {last.attempt} ({last.cause.value}) cost {cost}" + (f": {of_it}" if of_it else "")


def _print_csv(jobs: Iterable[JobGoodput]) -> None:
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(("job_id", "user", "state", "submitted_at", "ended_at", "kind", "seconds", "chip_seconds"))
    for job in jobs:
        facts = job.job_id, job.user, job.state.value, f"{job.submitted_at:.3f}"
        ended = "" if job.ended_at is None else f"{job.ended_at:.3f}"
        for kind, seconds in job.seconds.items():
            writer.writerow((*facts, ended, kind, f"{seconds:.3f}", f"{job.chip_seconds.get(kind, 0.0):.3f}"))


def _print_failures_csv(jobs: Iterable[JobGoodput]) -> None:
    writer = csv.writer(sys.stdout, lineterminator="\n")
    counts = "failures", "median_s", "worst_s", "seconds", "chip_seconds", "cost", "currency"
    writer.writerow(("job_id", "user", "state", "cause", *counts))
    for job in jobs:
        price, currency = job.chip_hour or (None, "")
        for cause, lost in _worst_first(job.time_lost):
            amounts = (lost.median_s, lost.worst_s, lost.seconds, lost.chip_seconds)
            cost = "" if price is None else f"{lost.chip_seconds / 3600 * price:.4f}"
            shown = (f"{amount:.3f}" for amount in amounts)
            writer.writerow((job.job_id, job.user, job.state.value, cause.value, lost.count, *shown, cost, currency))


def _words(kind: str) -> str:
    return kind.replace("_", " ")


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f} %"


def _hours(chip_seconds: float) -> str:
    return f"{chip_seconds / 3600:.2f}"
