"""``iris-ray team``: the teams and their quotas."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypedDict

import click

from iris_ray.actors.calls.controller_connection import ControllerConnection
from iris_ray.cli.address import address_option, cluster, node_address_option
from iris_ray.cli.conventions import confirm
from iris_ray.cli.main import Commands, section_of
from iris_ray.cli.options import yes_option
from iris_ray.cli.output import ListForm, json_option, list_options, print_ids
from iris_ray.cli.printing import counted, one_line, print_facts, print_json, print_table
from iris_ray.errors import InvalidRequestError, InvalidTeamsError
from iris_ray.model.checks import unknown
from iris_ray.model.teams import EVERYBODY, NO_TEAM, Quota, Team, Teams, chips_of
from iris_ray.teams.calls import TeamCalls, TeamChips, TeamsStatus, TeamStatus
from iris_ray.teams.core import read_teams, to_toml

NO_TEAMS = "there are no teams; set some up: iris-ray team apply FILE"
_HEADERS = ("TEAM", "TYPE", "QUOTA", "USED", "BORROWED", "LENT", "RUNNING", "WAITING", "SHARE", "USERS")
_FREE = "(no team)"


# -- show --------------------------------------------------------------------------------------------------------------


@click.group(cls=Commands, sections=section_of("team"))
def team() -> None:
    """Teams and their quotas: the chips that each team may use, and how many of them it lends to others.

    \b
      iris-ray team show
      iris-ray team show --toml | tee teams.toml
      iris-ray team apply teams.toml
    """


class TeamsNow(TypedDict):
    """The teams.

    Attributes:
        version: of the tree of teams.
        teams: all, or TEAM and its parts.
        fleet: the cluster's chips by TPU type, and its GPUs as ``GPU``.
    """

    version: str
    teams: Sequence[TeamStatus]
    fleet: Mapping[str, float]


@click.command()
@click.argument("team", required=False)
@click.option("--toml", "as_toml", is_flag=True, help="Print the file of all teams, to change it and apply it again.")
@list_options(TeamsNow, "teams' names")
@address_option
def show(team: str | None, as_toml: bool, form: ListForm) -> None:
    """Teams: their quotas, and what each uses, borrows and lends; in chips.

    \b
      iris-ray team show
      iris-ray team show research                 research and its parts
      iris-ray team show --toml | tee teams.toml

    QUOTA and USED of a team include its parts'. BORROWED is its use beyond the quota, which is not counted for jobs
    without a team; LENT is the part of the quota that others use. RUNNING and WAITING count its own jobs only, without
    its parts'. SHARE is about the resource of which the team has the largest share: the share that it holds now, plus
    its past use, in which an hour of the whole cluster is 1 and older hours count less.
    """
    if as_toml and (not form.is_table or team is not None):
        raise click.UsageError("--toml prints the file of all teams; leave out TEAM, --json and --quiet.")
    with cluster():
        found = ControllerConnection().ask(TeamCalls.list_teams)
    shown = found.teams if team is None else _with_parts(found, team)
    if as_toml:
        click.echo(to_toml(found.tree()), nl=False)
    elif form.as_json:
        print_json(TeamsNow(version=found.version, teams=shown, fleet=found.fleet))
    elif form.only_ids:
        print_ids(one.name for one in shown if one.name)
    elif team is not None and len(shown) == 1:
        _print_one(shown[0])
    else:
        print_table(_HEADERS, [row for one in shown for row in _rows(one)], NO_TEAMS)


def _with_parts(found: TeamsStatus, name: str) -> Sequence[TeamStatus]:
    shown = [one for one in found.teams if one.name == name or one.name.startswith(f"{name}/")]
    if not shown:
        raise unknown("team", name, [one.name for one in found.teams if one.name])
    return shown


def _rows(one: TeamStatus) -> Iterator[tuple[object, ...]]:
    """Yield a row for each type whose chips a team has or uses; the first has what is not about a type."""
    name = one.name or _FREE
    facts = one.running or "-", one.waiting or "-", f"{one.counted:.2f}", one.users
    kinds = {kind: chips for kind, chips in one.chips.items() if chips.quota or chips.used}
    for number, (kind, chips) in enumerate(kinds.items()):
        amounts = _amount(chips.quota), _amount(chips.used), _amount(chips.borrowed), _amount(chips.lent)
        yield (name, kind, *amounts, *facts) if number == 0 else ("", kind, *amounts, "", "", "", "")
    if not kinds and (one.name or one.running or one.waiting):
        yield (name, *["-"] * 5, *facts)


def _print_one(one: TeamStatus) -> None:
    print_facts({
        "team": one.name, "users": ", ".join(one.users), "weight": f"{one.weight:.10g}",
        "jobs": f"{one.running} running, {one.waiting} waiting", "share": f"{one.counted:.2f}",
        **{kind: _in_words(chips, one.quotas.get(kind)) for kind, chips in one.chips.items()},
    })  # fmt: skip


def _in_words(chips: TeamChips, quota: Quota | None) -> str:
    words = f"uses {_amount(chips.used, '0')} of {_amount(chips.quota, '0')} chips"
    by_band = (f"{_amount(amount)} {band.name.lower()}" for band, amount in chips.by_band.items())
    words += f" ({', '.join(by_band)})" if chips.by_band else ""
    words += f"; borrows {_amount(chips.borrowed)}" if chips.borrowed else ""
    words += f"; {_amount(chips.lent)} are lent" if chips.lent else ""
    limits = _limits(quota)
    return f"{words}; set: {limits}" if limits else words


def _limits(quota: Quota | None) -> str:
    if quota is None:
        return ""
    amounts = {"lend": quota.lend, "borrow": quota.borrow}
    amounts |= {band.name.lower(): amount for band, amount in quota.by_band.items()}
    return ", ".join(f"{name} {amount:.10g}" for name, amount in amounts.items() if amount is not None)


def _amount(chips: float, nothing: str = "-") -> str:
    return f"{round(chips, 1):.10g}" if chips else nothing


# -- apply -------------------------------------------------------------------------------------------------------------


class TeamsApplied(TypedDict):
    """A tree of teams that was applied, or compared with ``--dry-run``.

    Attributes:
        version: of the tree that holds now.
        applied: whether anything was changed.
        changes: the difference, a sentence for each team.
        notes: values that may be mistakes.
    """

    version: str
    applied: bool
    changes: list[str]
    notes: list[str]


@click.command()
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--dry-run", is_flag=True, help="Only show the difference.")
@yes_option
@json_option(TeamsApplied)
@node_address_option
def apply(file: Path, dry_run: bool, yes: bool, as_json: bool) -> None:
    """Replace the whole tree of teams by the tree in a file. An empty file removes all teams.

    \b
      iris-ray team show --toml | tee teams.toml  what is set now
      iris-ray team apply teams.toml --dry-run    what would change
      iris-ray team apply teams.toml

    The difference is shown first, and on a terminal the command asks. Running jobs continue, even beyond a new quota.
    If the file has the version that `show --toml` writes, and the teams have changed since, it is refused. A file of
    `show --toml` that you have not edited is not: it restores the teams of its version. Only operators may do this;
    --dry-run is for everybody.
    """
    from iris_ray.client.connection import current_user

    teams, version = _read(file)
    with cluster():
        controller = ControllerConnection()
        found = controller.ask(TeamCalls.list_teams)
        if version not in (None, found.version, teams.version):
            raise InvalidTeamsError(
                f"{file} is made from version {version} of the teams, and they have changed since: it is"
                f" {found.version} now. See what changed with `iris-ray team show --toml`, make your change there, and"
                " apply that; or leave the line `version` out, to replace what is set now"
            )
        changes = list(differences(found, teams))
        notes = list(warnings(found, teams))
        for line in changes or ["nothing changes"]:
            click.echo(one_line(line), err=as_json)
        for line in notes:
            click.echo(f"note: {one_line(line)}", err=True)
        applies = bool(changes) and not dry_run
        if applies:
            confirm(f"Apply {counted(len(changes), 'change')}?", yes)
            controller.ask(TeamCalls.set_teams, list(teams), found.version, current_user())
    if as_json:
        version = teams.version if applies else found.version
        print_json(TeamsApplied(version=version, applied=applies, changes=changes, notes=notes))
    elif applies:
        click.echo(f"{counted(len(teams), 'team')} set, version {teams.version}")


def _read(file: Path) -> tuple[Teams, str | None]:
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not text in UTF-8"
        raise InvalidRequestError(f"the file {file} can't be read: {why}") from None
    try:
        return read_teams(text)
    except InvalidTeamsError as error:
        raise InvalidTeamsError(f"{file}: {error}") from None


def differences(found: TeamsStatus, teams: Teams) -> Iterator[str]:
    """Yield the changes that these teams would make, a line for each team."""
    before, have = found.tree(), {one.name: one for one in found.teams}
    for name in sorted({*before.by_name, *teams.by_name}):
        old, new = before.by_name.get(name), teams.by_name.get(name)
        if new is None:
            yield f"- {name}: removed{_their_jobs(have[name], teams.nearest(name))}"
        elif old is None:
            yield f"+ {name}: {'; '.join(_parts(Team(name), new, None)) or 'no quota, no users'}"
        elif parts := list(_parts(old, new, have[name])):
            yield f"{name}: {'; '.join(parts)}"


def _their_jobs(one: TeamStatus, now: str) -> str:
    jobs = one.running + one.waiting
    return f", its {counted(jobs, 'job')} {'counts' if jobs == 1 else 'count'} for {now or 'no team'}" if jobs else ""


def _parts(old: Team, new: Team, have: TeamStatus | None) -> Iterator[str]:
    for kind in sorted({*old.quotas, *new.quotas}):
        if old.quotas.get(kind) != new.quotas.get(kind):
            yield _quota_change(kind, old.quotas.get(kind), new.quotas.get(kind), have)
    if old.weight != new.weight:
        yield f"weight {old.weight:.10g} → {new.weight:.10g}"
    for user in new.users:
        if user not in old.users:
            yield f"+ user {user}"
    for user in old.users:
        if user not in new.users:
            yield f"- user {user}"


def _quota_change(kind: str, old: Quota | None, new: Quota | None, have: TeamStatus | None) -> str:
    chips = None if have is None else have.chips.get(kind)
    words = f"quota {kind} {_quota(old)} → {_quota(new)}" if old else f"quota {kind} {_quota(new)}"
    if chips is not None and new is not None and chips.used > new.chips:
        words += f", and {_amount(chips.used)} are in use; running jobs continue"
    return words


def _quota(quota: Quota | None) -> str:
    if quota is None:
        return "none"
    limits = _limits(quota)
    return f"{quota.chips:.10g}" + (f" ({limits})" if limits else "")


def warnings(found: TeamsStatus, teams: Teams) -> Iterator[str]:
    """Yield warnings about values that are allowed, and may be mistakes."""
    for kind in sorted(teams.types):
        quotas = sum(teams.chips(name, kind) for name in teams.parts(NO_TEAM))
        if quotas > (there := chips_of(kind, found.fleet)):
            have = _amount(there, "none")
            yield (
                f"the quotas of {kind} are {_amount(quotas)} chips together, and the cluster has {have}: not every team"
                " can have its own at once"
            )
    members: dict[str, int] = {}
    for team in teams:
        for user in {*team.users} - {EVERYBODY}:
            members[user] = members.get(user, 0) + 1
    several = [user for user, count in members.items() if count > 1]
    if several:
        some = ", ".join(several[:3]) + (f" and {len(several) - 3} more" if several[3:] else "")
        yield f"in several teams, so that their jobs must name one (--team, or IRIS_TEAM): {some}"
