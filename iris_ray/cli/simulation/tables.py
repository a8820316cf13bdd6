"""Tables of what simulations show."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import click

from iris_ray.cli.printing.tables import print_table
from iris_ray.cli.printing.words import duration
from iris_ray.model.job_spec import PriorityBand
from iris_ray.simulation.report import Report, Waits

USERS_SHOWN = 10
_OVERVIEW = (
    "POLICY", "JOBS", "WAITING", "HALF WAIT", "9 OF 10", "LONGEST", "STARVED", "ATTEMPTS", "PREEMPTED",
    "EVICTED", "IN USE", "USEFUL", "LOST", "STARTING", "SPARE",
)  # fmt: skip
_WAITS = ("JOBS", "WAITING", "HALF WAIT", "9 OF 10", "99 OF 100", "LONGEST")

Reports = Mapping[str, Report]
"""By policy."""


def print_reports(reports: Reports) -> None:
    """Print the reports of several policies side by side."""
    print_table(_OVERVIEW, [_overview(policy, found) for policy, found in reports.items()], "no policies")
    bands = [band.name.lower() for band in PriorityBand]
    _print_waits("Waits by priority band", "BAND", reports, lambda found: found.waits_by_band, bands)
    sizes = sorted({size for found in reports.values() for size in found.waits_by_size})
    _print_waits(f"Waits by size, in {_unit(reports)}", "SIZE", reports, lambda found: found.waits_by_size, sizes)
    users = _largest_users(reports)
    _print_waits(f"Waits by user{_rest(reports, users)}", "USER", reports, lambda found: found.waits_by_user, users)
    click.echo("\nShares of what all users held:")
    shares = [(user, *(_percent(found.shares.get(user, 0.0)) for found in reports.values())) for user in users]
    print_table(("USER", *reports), shares, "no jobs came")


def _print_waits(
    title: str, label: str, reports: Reports, of: Callable[[Report], Mapping[Any, Waits]], keys: Iterable[Any]
) -> None:
    """Print how long the jobs of each group waited, under each policy.

    Args:
        title: of the table.
        label: of the column with the groups.
        reports: by policy.
        of: returns the waits by group.
        keys: the groups.
    """
    rows = [
        (f"{key:g}" if isinstance(key, float) else key, policy, *_waits(of(found)[key]))
        for key in keys
        for policy, found in reports.items()
        if key in of(found)
    ]
    click.echo(f"\n{title}:")
    print_table((label, "POLICY", *_WAITS), rows, "no jobs came")


def _overview(policy: str, found: Report) -> tuple[object, ...]:
    waits, use = found.waits, found.use
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
        *map(_percent, (use.utilisation, use.useful, use.lost, use.starting, use.spare)),
    )


def _waits(waits: Waits) -> tuple[str, ...]:
    times = (waits.p50_s, waits.p90_s, waits.p99_s, waits.longest_s)
    return (f"{waits.jobs:,}", f"{waits.waiting:,}", *map(duration, times))


def _percent(part: float) -> str:
    return f"{100 * part:.1f} %"


def _unit(reports: Reports) -> str:
    return "chips" if any(found.resource == "TPU" for found in reports.values()) else "CPUs"


def _largest_users(reports: Reports) -> list[str]:
    """Return the users who held most under any policy."""
    held: dict[str, float] = {}
    for found in reports.values():
        for user in found.waits_by_user:
            held[user] = max(held.get(user, 0.0), found.shares.get(user, 0.0))
    return sorted(sorted(held, key=lambda user: (-held[user], user))[:USERS_SHOWN])


def _rest(reports: Reports, shown: list[str]) -> str:
    users = {user for found in reports.values() for user in found.waits_by_user}
    return f"; the {len(shown)} who held most of {len(users)}" if len(users) > len(shown) else ""
