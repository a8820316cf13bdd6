"""How the quotas of teams stand: the chips that each team uses, borrows and lends, and sentences for people."""

import contextlib
from collections.abc import Callable, Iterator, Mapping

from iris_ray.errors import UnknownTPUTypeError
from iris_ray.model.jobs import Job
from iris_ray.model.options import PriorityBand
from iris_ray.model.teams import NO_TEAM, Teams, chips_of
from iris_ray.model.topology import get_tpu_config
from iris_ray.model.workers import GPU, rounded
from iris_ray.state import ControllerState
from iris_ray.state.fleet import Fleet
from iris_ray.state.team_use import in_band
from iris_ray.teams.calls import TeamChips

Usage = Mapping[str, Mapping[str, float]]
"""What each team and its parts hold, and all jobs of the cluster under `NO_TEAM`, as in `TeamUse`."""
WITHOUT_TEAM = "jobs without a team"
_NAMED = 3
"""The limit for borrowers that a sentence names."""


def fleet_chips(fleet: Fleet) -> dict[str, float]:
    """Return the fleet's chips by TPU type, and its GPUs as `GPU`."""
    found = {GPU: float(fleet.totals[GPU])} if fleet.totals[GPU] else {}
    for device, chips in fleet.chips.items():
        with contextlib.suppress(UnknownTPUTypeError):  # a label that somebody has made up
            if chips:
                found[get_tpu_config(device).name] = float(chips)
    return found


def team_chips(teams: Teams, usage: Usage, kind: str, fleet: float) -> dict[str, TeamChips]:
    """Return how the quotas of one type stand, by team; `NO_TEAM` for the jobs without one.

    What others use of quotas is divided among the teams that use less than theirs, by what each leaves unused.

    Args:
        teams, usage: the tree, and what each team holds.
        kind: a type for which there are quotas.
        fleet: how many chips of it there are.
    """
    used = {name: usage.get(name, {}).get(kind, 0.0) for name in (NO_TEAM, *teams.by_name)}
    over = {team.name: max(0.0, used[team.name] - teams.chips(team.name, kind)) for team in teams}
    lent = dict.fromkeys(used, 0.0)
    for name in used:  # a team comes before its parts
        parts = teams.parts(name)
        whole = fleet if name == NO_TEAM else teams.chips(name, kind)
        shared = max(0.0, whole - sum(teams.chips(part, kind) for part in parts))
        direct = used[name] - sum(map(used.__getitem__, parts))
        taken = direct + sum(map(over.__getitem__, parts)) + lent[name] - over.get(name, 0.0) - shared
        unused = {part: _lendable(teams, part, kind, used[part]) for part in parts}
        part_lent = min(1.0, max(0.0, taken) / (sum(unused.values()) or 1.0))
        lent |= {part: left * part_lent for part, left in unused.items()}
    found = {}
    for name in used:
        has = own(teams, name, usage.get)
        chips = teams.chips(name, kind), has.get(kind, 0.0), over.get(name, 0.0), round(lent[name], 3)
        found[name] = TeamChips(*chips, _by_band(has, kind))
    return found


def own(teams: Teams, name: str, amounts_of: Callable[[str], Mapping[str, float] | None]) -> Mapping[str, float]:
    """Return the amounts of a team with its parts. `NO_TEAM` stands for the jobs without a team.

    Args:
        teams, name: the team.
        amounts_of: returns the amounts of a team by its name, and those of the whole cluster for `NO_TEAM`.
    """
    amounts = dict(amounts_of(name) or {})
    for part in teams.parts(NO_TEAM) if name == NO_TEAM else ():
        for what, amount in (amounts_of(part) or {}).items():
            amounts[what] = rounded(amounts.get(what, 0.0) - amount)
    return {what: amount for what, amount in amounts.items() if amount > 0}


def _lendable(teams: Teams, name: str, kind: str, used: float) -> float:
    unused = max(0.0, teams.chips(name, kind) - used)
    quota = teams.by_name[name].quotas.get(kind)
    return unused if quota is None or quota.lend is None else min(unused, quota.lend)


def _by_band(usage: Mapping[str, float], kind: str) -> dict[PriorityBand, float]:
    amounts = {band: usage.get(in_band(kind, band), 0.0) for band in PriorityBand}
    return {band: amount for band, amount in amounts.items() if amount}


# -- in a sentence -----------------------------------------------------------------------------------------------------


def about_team(state: ControllerState, job: Job) -> str | None:
    """Return how the quota of a job's team stands, in a sentence; None if there are no teams, or it concerns none."""
    teams, spec = state.teams.teams, job.spec
    kind = teams.quota_type(spec.device, bool(spec.resources.get(GPU)))
    name = teams.nearest(spec.team)
    if kind is None:
        return f"its team is {name}, and no team has a quota for what it uses" if name else None
    if not name:
        return f"it belongs to no team, so {kind} chips within the quotas of teams are only lent to it"
    fleet = chips_of(kind, fleet_chips(state.fleet))
    return team_sentence(teams, state.teams.usage, name, kind, fleet, spec.priority)


def team_sentence(teams: Teams, usage: Usage, name: str, kind: str, fleet: float, band: PriorityBand) -> str:
    """Return how the quota of a team for a type stands, for a job of a band. Arguments as for `team_chips`."""
    chips = team_chips(teams, usage, kind, fleet)
    has_quota = [one for one in _upwards(name) if chips[one].quota]
    if not has_quota or has_quota[0] != name:
        words = f"its team {name} has no quota of {kind} chips and holds {in_chips(chips[name].used)} of them"
        if not has_quota:
            return words
        above, name = f"; the team above it, {has_quota[0]}, ", has_quota[0]
    else:
        words, above = "", f"its team {name} "
    one = chips[name]
    if one.borrowed:
        return (
            f"{words}{above}holds {in_chips(one.used)} {kind} chips, {in_chips(one.borrowed)} more than its quota of"
            f" {in_chips(one.quota)}: the others get those back when they need them"
        )
    words += f"{above}holds {in_chips(one.used)} of its {in_chips(one.quota)} {kind} chips"
    if one.lent:
        to = _in_words(list(_borrowers(teams, chips, name)))
        words += f", and {in_chips(one.lent)} are lent to {to} until it needs them"
    quota = teams.by_name[name].quotas.get(kind)
    if quota is not None and band in quota.by_band:
        words += f"; {band.name.lower()} jobs have a right to {in_chips(quota.by_band[band])} of them"
    return words


def _upwards(name: str) -> Iterator[str]:
    """Yield a team and those above it."""
    while name:
        yield name
        name = name.rpartition("/")[0]


def _borrowers(teams: Teams, chips: Mapping[str, TeamChips], name: str) -> Iterator[str]:
    """Yield the teams beside and above a team that use more than their quotas, and so may have its chips."""
    for one in _upwards(name):
        if not chips[one].lent:
            return
        parent = one.rpartition("/")[0]
        yield from (part for part in teams.parts(parent) if chips[part].borrowed)
        direct = chips[parent].used - (sum(chips[part].used for part in teams.parts(parent)) if parent else 0.0)
        if direct > 1e-6:
            yield parent or WITHOUT_TEAM


def _in_words(names: list[str]) -> str:
    shown = names[:_NAMED]
    if len(names) > _NAMED:
        shown.append(f"{len(names) - _NAMED} more")
    return " and ".join(filter(None, (", ".join(shown[:-1]), *shown[-1:]))) or "others"


def in_chips(amount: float) -> str:
    """Return a number of chips in words."""
    return f"{round(amount, 1):,.10g}"
