"""Tables of what simulations show."""

from collections.abc import Mapping

import click

from iris_ray.cli.tables import print_table
from iris_ray.cli.words import duration
from iris_ray.simulation.report import Report, Waits

USERS_SHOWN = 10


def print_reports(reports: Mapping[str, Report]) -> None:
    """Print the reports of several policies side by side."""
    print_table(
        ("POLICY", "JOBS", "WAITING", "HALF WAIT", "9 OF 10", "LONGEST", "ATTEMPTS", "PREEMPTED", "IN USE", "USEFUL",
         "LOST", "STARTING", "SPARE"),
        [_overview(policy, found) for policy, found in reports.items()],
        "no policies",
    )  # fmt: skip
    click.echo(f"\nWaits by size, in {_unit(reports)}:")
    print_table(
        ("SIZE", "POLICY", *_WAITS),
        [
            (f"{size:g}", policy, *_waits(found.waits_by_size[size]))
            for size in sorted({size for found in reports.values() for size in found.waits_by_size})
            for policy, found in reports.items()
            if size in found.waits_by_size
        ],
        "no jobs came",
    )
    users = _largest_users(reports)
    click.echo(f"\nWaits and shares by user{_rest(reports, users)}:")
    print_table(
        ("USER", "POLICY", "SHARE", *_WAITS),
        [
            (user, policy, _percent(found.shares.get(user, 0.0)), *_waits(found.waits_by_user[user]))
            for user in users
            for policy, found in reports.items()
            if user in found.waits_by_user
        ],
        "no jobs came",
    )


_WAITS = ("JOBS", "WAITING", "HALF WAIT", "9 OF 10", "99 OF 100", "LONGEST")


def _overview(policy: str, found: Report) -> tuple[object, ...]:
    waits, use = found.waits, found.use
    return (
        policy,
        f"{waits.jobs:,}",
        f"{waits.waiting:,}",
        duration(waits.p50_s),
        duration(waits.p90_s),
        duration(waits.longest_s),
        f"{found.attempts:,}",
        f"{found.preempted:,}",
        *map(_percent, (use.utilisation, use.useful, use.lost, use.starting, use.spare)),
    )


def _waits(waits: Waits) -> tuple[str, ...]:
    times = (waits.p50_s, waits.p90_s, waits.p99_s, waits.longest_s)
    return (f"{waits.jobs:,}", f"{waits.waiting:,}", *map(duration, times))


def _percent(part: float) -> str:
    return f"{100 * part:.1f} %"


def _unit(reports: Mapping[str, Report]) -> str:
    return "chips" if any(found.resource == "TPU" for found in reports.values()) else "CPUs"


def _largest_users(reports: Mapping[str, Report]) -> list[str]:
    """Return the users who held most under any policy."""
    held: dict[str, float] = {}
    for found in reports.values():
        for user in found.waits_by_user:
            held[user] = max(held.get(user, 0.0), found.shares.get(user, 0.0))
    return sorted(sorted(held, key=lambda user: (-held[user], user))[:USERS_SHOWN])


def _rest(reports: Mapping[str, Report], shown: list[str]) -> str:
    users = {user for found in reports.values() for user in found.waits_by_user}
    return f"; the {len(shown)} who held most of {len(users)}" if len(users) > len(shown) else ""
