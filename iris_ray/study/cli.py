"""``iris-ray study``: a fleet and its jobs in virtual time, under several policies."""

import gc
import importlib.util
import logging
import sys
import time
import tomllib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import click

from iris_ray.cli.conventions import INTERRUPTED
from iris_ray.cli.output import json_option
from iris_ray.cli.printing import duration, print_json, print_table
from iris_ray.cli.times import Duration
from iris_ray.errors import InvalidStudyError
from iris_ray.model.checks import unknown
from iris_ray.model.options import PriorityBand
from iris_ray.study.description import read_study
from iris_ray.study.history import History
from iris_ray.study.report import Report, Use, Waits, report_on
from iris_ray.study.study import Study, StudyPolicy
from iris_ray.study.traces import Trace

# -- tables ------------------------------------------------------------------------------------------------------------

USERS_SHOWN = 10
_USE = ("IN USE", "USEFUL", "LOST", "STARTING", "SPARE")
_OVERVIEW = (
    "POLICY", "JOBS", "WAITING", "HALF WAIT", "9 OF 10", "LONGEST", "STARVED", "ATTEMPTS", "PREEMPTED",
    "EVICTED", *_USE,
)  # fmt: skip
_WAITS = ("JOBS", "WAITING", "HALF WAIT", "9 OF 10", "99 OF 100", "LONGEST")
_TURNAROUNDS = ("JOBS", "NOT ENDED", "HALF", "9 OF 10", "99 OF 100", "LONGEST")

Reports = Mapping[str, Report]
"""By policy."""


def print_reports(reports: Reports) -> None:
    """Print the reports of several policies side by side."""
    print_table(_OVERVIEW, [_overview(policy, found) for policy, found in reports.items()], "no policies")
    bands = [band.name.lower() for band in PriorityBand]
    _print_waits("Waits by priority band", "BAND", reports, lambda found: found.waits_by_band, bands)
    of_bands = "From submission to end, by priority band"
    _print_waits(of_bands, "BAND", reports, lambda found: found.turnarounds_by_band, bands, _TURNAROUNDS)
    by_size: dict[str, Callable[[Report], Mapping[float, Waits]]] = {
        "chips": lambda found: found.waits_by_size,
        "CPUs, of jobs without chips": lambda found: found.waits_by_cpus,
    }
    for unit, of in by_size.items():
        if sizes := sorted({size for found in reports.values() for size in of(found)}):
            _print_waits(f"Waits by size, in {unit}", "SIZE", reports, of, sizes)
    users = _largest_users(reports)
    _print_waits(f"Waits by user{_rest(reports, users)}", "USER", reports, lambda found: found.waits_by_user, users)
    teams = sorted({team for found in reports.values() for team in found.waits_by_team})
    if teams:
        _print_waits("Waits by team", "TEAM", reports, lambda found: found.waits_by_team, teams)
    if any(found.cpu_hosts for found in reports.values()):
        click.echo("\nUse of the CPUs of hosts without chips; above it is that of the chips:")
        rows = [(policy, *_use(found.cpu_hosts)) for policy, found in reports.items() if found.cpu_hosts]
        print_table(("POLICY", *_USE), rows, "no policies")
    click.echo("\nShares of what all users held:")
    shares = [(user, *(_percent(found.shares.get(user, 0.0)) for found in reports.values())) for user in users]
    print_table(("USER", *reports), shares, "no jobs came")
    if teams:
        click.echo("\nShares of teams, and how often jobs gave their hosts to another team:")
        parts = {team: [_percent(found.shares_by_team.get(team, 0.0)) for found in reports.values()] for team in teams}
        gave = ("given back", *(f"{found.reclaimed:,}" for found in reports.values()))
        print_table(("TEAM", *reports), [*((team, *of_team) for team, of_team in parts.items()), gave], "no jobs came")


def _print_waits(
    title: str,
    label: str,
    reports: Reports,
    of: Callable[[Report], Mapping[Any, Waits]],
    keys: Iterable[Any],
    headers: Sequence[str] = _WAITS,
) -> None:
    """Print how long the jobs of each group waited, or took, under each policy.

    Args:
        title: of the table.
        label: of the column with the groups.
        reports: by policy.
        of: returns the waits by group.
        keys: the groups.
        headers: of the columns with the times.
    """
    rows = [
        (f"{key:g}" if isinstance(key, float) else key, policy, *_waits(of(found)[key]))
        for key in keys
        for policy, found in reports.items()
        if key in of(found)
    ]
    click.echo(f"\n{title}:")
    print_table((label, "POLICY", *headers), rows, "no jobs came")


def _overview(policy: str, found: Report) -> tuple[object, ...]:
    waits = found.waits
    return (
        policy,
        f"{waits.jobs:,}",
        f"{waits.waiting:,}",
        duration(waits.p50_s),
        duration(waits.p90_s),
        duration(waits.longest_s),
        f"{found.starved:,}",
        f"{found.attempts:,}",
        f"{found.preempted:,}",
        f"{found.evicted:,}",
        *_use(found.use),
    )


def _waits(waits: Waits) -> tuple[str, ...]:
    times = (waits.p50_s, waits.p90_s, waits.p99_s, waits.longest_s)
    return (f"{waits.jobs:,}", f"{waits.waiting:,}", *map(duration, times))


def _use(use: Use) -> tuple[str, ...]:
    return tuple(map(_percent, (use.utilisation, use.useful, use.lost, use.starting, use.spare)))


def _percent(part: float) -> str:
    return f"{100 * part:.1f} %"


def _largest_users(reports: Reports) -> list[str]:
    """Return the users with the largest shares under any policy."""
    held: dict[str, float] = {}
    for found in reports.values():
        for user in found.waits_by_user:
            held[user] = max(held.get(user, 0.0), found.shares.get(user, 0.0))
    return sorted(sorted(held, key=lambda user: (-held[user], user))[:USERS_SHOWN])


def _rest(reports: Reports, shown: list[str]) -> str:
    users = {user for found in reports.values() for user in found.waits_by_user}
    return f"; the {len(shown)} who held most of {len(users)}" if len(users) > len(shown) else ""


# -- study -------------------------------------------------------------------------------------------------------------

STEPS = 50
"""How often progress is shown on a terminal."""
TELL_S = 15.0
MOST_S = 1_000_000 * 86_400.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of one policy.

    Attributes:
        policy: its name.
        report: what happened.
        history: the full record of the simulation.
        cpu_s: seconds of CPU that the simulation took.
        interrupted: whether Ctrl-C has ended it; then the report is about the time until then.
    """

    policy: str
    report: Report
    history: History
    cpu_s: float
    interrupted: bool = False


@dataclass(frozen=True)
class PolicyReport(Report):
    """The report of one policy.

    Attributes:
        policy: its name.
        cpu_s: seconds of CPU that the simulation took.
        decisions_per_s, events_per_s: its speed.
    """

    policy: str
    cpu_s: float
    decisions_per_s: float
    events_per_s: float


@click.command()
@click.argument("fleet", metavar="FLEET.toml", type=click.Path(dir_okay=False, path_type=Path))
@click.option(
    "--duration",
    "length",
    type=Duration(0, MOST_S, above=True),
    help="The simulated time.  [default: the days of FLEET.toml]",
)
@click.option(
    "--seed", type=click.IntRange(0), metavar="N", help="Another seed: other jobs and losses of the same kind."
)
@click.option("--policy", "chosen", multiple=True, metavar="NAME", help="Only this policy; may be repeated.")
@click.option(
    "--picture",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Draw waits, use and shares: a .png or .svg file. This needs matplotlib.",
)
@json_option(list[PolicyReport])
def study(
    fleet: Path, length: float | None, seed: int | None, chosen: tuple[str, ...], picture: Path | None, as_json: bool
) -> None:
    """See in virtual time how long jobs would wait, what the hosts would do, and what a policy would change.

    \b
      iris-ray study examples/fleet.toml
      iris-ray study examples/fleet.toml --duration 2d --policy "one spare" --json

    The Controller's own code decides who runs where. FLEET.toml describes hosts, losses, jobs and policies:
    docs/studies.md explains it. No cluster is needed.
    """
    described = _read(fleet)
    wanted = replace(
        described,
        seconds=described.seconds if length is None else length,
        seed=described.seed if seed is None else seed,
        policies=_chosen(described.policies, chosen),
    )
    if picture is not None:
        require_matplotlib()
    for trace in wanted.traces:
        _print_left_out(trace)
    outcomes = list[Outcome]()
    for policy in wanted.policies:
        outcomes.append(_outcome(wanted, policy))
        if outcomes[-1].interrupted:
            break
    if as_json:
        print_json([_as_json(outcome) for outcome in outcomes])
    else:
        print_reports({outcome.policy: outcome.report for outcome in outcomes})
        for outcome in outcomes:
            click.echo(_speed(outcome), err=True)
    if outcomes[-1].interrupted:
        click.echo(f"{outcomes[-1].policy} was interrupted: these are the results until then", err=True)
        raise click.exceptions.Exit(INTERRUPTED)
    if picture is not None:
        draw(picture, {outcome.policy: (outcome.history, outcome.report) for outcome in outcomes})


def _read(path: Path) -> Study:
    try:
        description = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidStudyError(f"{path} can't be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidStudyError(f"{path} is not valid TOML: {error}") from None

    def read_lines(name: str) -> list[str]:
        trace = path.parent / name
        try:
            return trace.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidStudyError(f"the trace {trace} can't be read: {error}") from None

    try:
        return read_study(description, read_lines)
    except InvalidStudyError as error:
        raise InvalidStudyError(f"{path}: {error}") from None


def _chosen(policies: Sequence[StudyPolicy], names: Sequence[str]) -> tuple[StudyPolicy, ...]:
    by_name = {policy.name: policy for policy in policies}
    for name in names:
        if name not in by_name:
            raise unknown("policy", name, by_name)
    return tuple(by_name[name] for name in names) or tuple(policies)


def _outcome(study: Study, policy: StudyPolicy) -> Outcome:
    with _quiet(), _progress(policy.name) as show:
        simulation = study.simulation(policy)
        gc.collect()
        gc.freeze()  # the fleet outlives every collection
        began, until, interrupted = time.process_time(), study.seconds, False
        try:
            for step in range(1, STEPS + 1):
                simulation.run_until(study.seconds * step / STEPS)
                show(study.seconds * step / STEPS / 86_400.0)
        except KeyboardInterrupt:
            until, interrupted = simulation.now, True
        spent = time.process_time() - began
        gc.unfreeze()
    return Outcome(policy.name, report_on(simulation.history, until), simulation.history, spent, interrupted)


def _print_left_out(trace: Trace) -> None:
    """Say how many rows of a trace make no job, and why."""
    rows = len(trace.arrivals) + len(trace.left_out)
    click.echo(f"{trace.source}: {len(trace.arrivals):,} of {rows:,} rows make jobs", err=True)
    lines: defaultdict[str, list[int]] = defaultdict(list)
    for row in trace.left_out:
        lines[row.why].append(row.line)
    for why, where in sorted(lines.items(), key=lambda item: -len(item[1])):
        click.echo(f"  left out {len(where):,}: {why} (line {where[0]}{', …' if len(where) > 1 else ''})", err=True)


@contextmanager
def _quiet() -> Iterator[None]:
    """Hide log lines of the Controller: on a crowded fleet there is one for every job that waits long."""
    logger = logging.getLogger("iris_ray")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


@contextmanager
def _progress(policy: str) -> Iterator[Any]:
    """Show how far a simulation is: at each step on a terminal, else in a line after every `TELL_S`."""
    terminal, told = sys.stderr.isatty(), time.monotonic()

    def show(days: float) -> None:
        nonlocal told
        if terminal:
            click.echo(f"\r{policy}: day {days:.1f} ", nl=False, err=True)
        elif time.monotonic() >= told + TELL_S:
            told = time.monotonic()
            click.echo(f"{policy}: day {days:.1f}", err=True)

    try:
        yield show
    finally:
        if terminal:
            click.echo("\r\x1b[2K", nl=False, err=True)


def _speed(outcome: Outcome) -> str:
    found, cpu_s = outcome.report, max(outcome.cpu_s, 1e-9)
    return (
        f"{outcome.policy}: {found.seconds / 86_400:g} days in {cpu_s:.1f} s of CPU;"
        f" {found.decisions / cpu_s:,.0f} decisions and {found.events / cpu_s:,.0f} events a second"
    )


def _as_json(outcome: Outcome) -> PolicyReport:
    found, cpu_s = outcome.report, max(outcome.cpu_s, 1e-9)
    return PolicyReport(
        **{one.name: getattr(found, one.name) for one in fields(found)},
        policy=outcome.policy,
        cpu_s=round(outcome.cpu_s, 3),
        decisions_per_s=round(found.decisions / cpu_s, 1),
        events_per_s=round(found.events / cpu_s, 1),
    )


# -- pictures ----------------------------------------------------------------------------------------------------------

Outcomes = Mapping[str, tuple[History, Report]]
HOUR = 3600.0


def require_matplotlib() -> None:
    """Raise InvalidStudyError if pictures can't be drawn."""
    if importlib.util.find_spec("matplotlib") is None:
        raise InvalidStudyError(
            "pictures need matplotlib, which is not installed: pip install matplotlib, or leave out --picture"
        )


def draw(path: Path, outcomes: Outcomes) -> None:
    """Draw waits, what the hosts were used for, and shares, each by policy.

    Raises:
        InvalidStudyError: the file can't be written, or its suffix names no format.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (waits, use, shares) = pyplot.subplots(1, 3, figsize=(15, 4.5), layout="constrained")
    _draw_waits(waits, outcomes)
    _draw_use(use, outcomes)
    _draw_shares(shares, outcomes)
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise InvalidStudyError(f"the picture {path} can't be written: {error}") from None
    finally:
        pyplot.close(figure)


def _draw_waits(axes: Any, outcomes: Outcomes) -> None:
    for policy, (history, found) in outcomes.items():
        waited = sorted(job.waited_s(found.seconds) for job in history.jobs.values())
        parts = [(number + 1) / len(waited) for number in range(len(waited))]
        axes.plot([max(seconds, 1.0) / HOUR for seconds in waited], parts, label=policy)
    axes.set(xscale="log", xlabel="hours from submission to the first hosts", ylabel="part of the jobs", title="Waits")
    axes.legend()


def _draw_use(axes: Any, outcomes: Outcomes) -> None:
    below = [0.0] * len(outcomes)
    for part in ("useful", "lost", "starting", "spare", "idle"):
        amounts = [100 * getattr(found.use, part) for _, found in outcomes.values()]
        axes.bar(list(outcomes), amounts, bottom=below, label=part)
        below = [bottom + amount for bottom, amount in zip(below, amounts, strict=True)]
    axes.set(ylabel="percent of all hosts' time", title="What the hosts did")
    axes.legend()


def _draw_shares(axes: Any, outcomes: Outcomes) -> None:
    users = sorted({user for _, found in outcomes.values() for user in found.shares})
    width = 0.8 / len(outcomes)
    for number, (policy, (_, found)) in enumerate(outcomes.items()):
        places = [index + number * width for index in range(len(users))]
        axes.bar(places, [100 * found.shares.get(user, 0.0) for user in users], width, label=policy)
    axes.set_xticks([index + (len(outcomes) - 1) * width / 2 for index in range(len(users))], users, rotation=90)
    axes.set(ylabel="percent of what all users held", title="Shares")
    axes.legend()
