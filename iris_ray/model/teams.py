"""Teams: a tree of quotas in chips, with each team's users and its limits for lending and borrowing.

A team's name is its path in the tree: ``research/vision`` is a subteam of ``research``. A quota is for a TPU type
(``v4-32``), for a whole generation (``v4``), or for all GPUs (``GPU``). A team's quota includes those of its subteams.

Operators write the tree as TOML::

    [teams.research]
    quota.v4-32 = { chips = 128, borrow = 64 }

    [teams."research/vision"]
    users = ["ann", "bob"]
    weight = 2
    quota.v4-32 = { chips = 64, lend = 32, production = 32 }

A file may begin with ``version = "…"``, the version of the tree that it is based on; see `Teams.version`.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from iris_ray.errors import InvalidTeamsError, NotPermittedError, UnknownTPUTypeError
from iris_ray.model.checks import Number, is_job_id, is_user, require, shown, unknown
from iris_ray.model.options import PriorityBand
from iris_ray.model.topology import TPU_GENERATIONS, get_tpu_config
from iris_ray.model.workers import GPU

NO_TEAM = ""
"""The team of jobs without a team. Its quota is the rest of the fleet beyond all quotas."""
EVERYBODY = "*"
"""The entry in a team's users that stands for all users."""
MOST_TEAMS = 10_000
MOST_LEVELS = 8

_BANDS = {band.name.lower(): band for band in PriorityBand}


class _Chips(Number):
    """A number of chips."""

    __slots__ = ()
    what = "a number of chips"


@dataclass(frozen=True, slots=True)
class Quota:
    """A team's quota for one type, in chips.

    Attributes:
        chips: the guaranteed number of chips.
        lend: how many of these other teams may borrow while they are unused; None: all.
        borrow: how many chips the team may borrow beyond its quota; None: no limit.
        by_band: how many of the chips are guaranteed to jobs of a band; all for bands that are left out.

    Raises:
        InvalidTeamsError: an amount is negative or not a number, or a part exceeds the whole.
    """

    chips: float
    lend: float | None = None
    borrow: float | None = None
    by_band: Mapping[PriorityBand, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        parts = {"lend": self.lend, **{band.name.lower(): chips for band, chips in self.by_band.items()}}
        for name, amount in {"chips": self.chips, "borrow": self.borrow, **parts}.items():
            require(name, amount, _Chips(or_none=name in ("lend", "borrow")), InvalidTeamsError)
        for name, amount in parts.items():
            if amount is not None and amount > self.chips:
                raise InvalidTeamsError(f"{name} is {amount:g}, more than the quota of {self.chips:g} chips")


@dataclass(frozen=True, slots=True)
class Team:
    """A team with its quotas and users.

    Attributes:
        name: its path, such as ``research/vision``.
        quotas: quotas by type: ``v4-32``, ``v4`` or ``GPU``. A team without a quota has the sum of its subteams'.
        weight: its share of unused capacity, relative to the other teams of the same parent.
        users: the users who may submit jobs to it; `EVERYBODY` for all users.

    Raises:
        InvalidTeamsError: a field is invalid; the message names the team.
    """

    name: str
    quotas: Mapping[str, Quota] = field(default_factory=dict)
    weight: float = 1.0
    users: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not is_job_id(self.name) or self.name.count("/") >= MOST_LEVELS:
            raise InvalidTeamsError(
                f"a team is called {shown(self.name)}; give a path of at most {MOST_LEVELS} names, each of letters,"
                " digits, '.', '_' and '-', such as research/vision"
            )
        require(f"team {self.name}: weight", self.weight, Number(above=True), InvalidTeamsError)
        for user in self.users:
            if user != EVERYBODY and not is_user(user):
                raise InvalidTeamsError(f"team {self.name}: users has {shown(user)}, which is not a user's name")
        for kind in self.quotas:
            if kind != GPU and kind not in TPU_GENERATIONS and _slice_type(kind) != kind:
                raise InvalidTeamsError(
                    f"team {self.name}: a quota is for {shown(kind)}; give a TPU type such as v4-32, a generation such"
                    f" as v4, or {GPU}"
                )

    @property
    def parent(self) -> str:
        """The name of the parent team; `NO_TEAM` at the top level."""
        return self.name.rpartition("/")[0]


class Teams:
    """All teams of a cluster. Immutable.

    Args:
        teams: the teams, in any order.

    Raises:
        InvalidTeamsError: the teams are inconsistent: a name occurs twice, a parent is missing, the subteams of a team
            have a larger quota than the team, or a generation has quotas both as a whole and by type.
    """

    def __init__(self, teams: Iterable[Team] = ()) -> None:
        listed = list(teams)
        self.by_name: Mapping[str, Team] = {team.name: team for team in sorted(listed, key=lambda team: team.name)}
        if len(self.by_name) < len(listed):
            raise InvalidTeamsError("two teams have the same name; give each its own")
        if len(listed) > MOST_TEAMS:
            raise InvalidTeamsError(f"{len(listed):,} teams, and the limit is {MOST_TEAMS:,}")
        self._require_parents()
        self._require_plain_types()
        self._require_parts_fit()

    def __iter__(self) -> Iterator[Team]:
        return iter(self.by_name.values())

    def __len__(self) -> int:
        return len(self.by_name)

    def __contains__(self, name: object) -> bool:
        return name in self.by_name

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Teams) and self.by_name == other.by_name

    def __hash__(self) -> int:
        return hash(tuple(self.by_name))

    def __reduce__(self) -> tuple[type["Teams"], tuple[list[Team]]]:
        return Teams, (list(self),)

    # -- reading -------------------------------------------------------------------------------------------------------

    @cached_property
    def types(self) -> frozenset[str]:
        """The types for which any team has a quota."""
        return frozenset(kind for team in self for kind in team.quotas)

    def quota_type(self, device: str | None, has_gpus: bool) -> str | None:
        """Return the type whose quota a job needs, or None if no team has a quota for its chips.

        Args:
            device: the job's TPU type, or None.
            has_gpus: whether its tasks take GPUs.
        """
        if device is None:
            return GPU if has_gpus and GPU in self.types else None
        if device in self.types:
            return device
        generation = get_tpu_config(device).generation
        return generation if generation in self.types else None

    def chips(self, name: str, kind: str) -> float:
        """Return a team's quota for a type: its own, or else the sum of its subteams'."""
        return self._chips.get((name, kind), 0.0)

    def parts(self, name: str) -> tuple[str, ...]:
        """Return the names of a team's direct subteams; for `NO_TEAM`, those of the top-level teams."""
        return self._parts.get(name, ())

    def keepers(self, kind: str) -> tuple[Team, ...]:
        """Return the teams that don't lend all of a type, and their ancestors; subteams come before their parents."""
        return self._keepers.get(kind, ())

    def nearest(self, name: str) -> str:
        """Return the team if it exists, or else its closest existing ancestor, or `NO_TEAM`."""
        while name and name not in self.by_name:
            name = name.rpartition("/")[0]
        return name

    def teams_of(self, user: str) -> tuple[str, ...]:
        """Return the names of the teams whose users list this entry, a user or `EVERYBODY`."""
        return self._teams_of.get(user, ())

    def team_for(self, user: str, wanted: str | None) -> str:
        """Return the team of a new job.

        Args:
            user: the user who submits it.
            wanted: the team that the job names; None for the user's own team.

        Raises:
            UnknownNameError: the team does not exist; the message has the nearest names.
            NotPermittedError: the user does not belong to the team.
            InvalidTeamsError: the user belongs to several teams and the job names none, or names one without any teams
                in the cluster.
        """
        if wanted is not None and not self.by_name:
            raise InvalidTeamsError(
                f"the job names the team {shown(wanted)}, and this cluster has no teams; leave --team and IRIS_TEAM"
                " out, or have an operator set up teams: iris-ray team apply"
            )
        if wanted is not None and wanted not in self.by_name:
            raise unknown("team", wanted, self.by_name)
        own = self.teams_of(user)
        if wanted is None:
            if len(own) > 1:
                raise InvalidTeamsError(
                    f"{user} belongs to the teams {_some(own)}; say which, as in --team {own[0]} or IRIS_TEAM={own[0]}"
                )
            open_to_all = self.teams_of(EVERYBODY)
            return own[0] if own else open_to_all[0] if len(open_to_all) == 1 else NO_TEAM
        if wanted not in own and EVERYBODY not in self.by_name[wanted].users:
            raise NotPermittedError(
                f"{user} does not belong to team {wanted}, but to {_some(own) or 'none'}; an operator can add {user}"
                " to its users: iris-ray team apply"
            )
        return wanted

    # -- reading and writing -------------------------------------------------------------------------------------------

    @cached_property
    def version(self) -> str:
        """A hash of the tree, in eight characters."""
        return hashlib.sha256(json.dumps(self.to_tables()).encode()).hexdigest()[:8]

    @staticmethod
    def from_tables(tables: object) -> "Teams":
        """Return the teams from the output of `to_tables`.

        Raises:
            InvalidTeamsError: a team is invalid; the message names it.
        """
        if not isinstance(tables, dict):
            raise InvalidTeamsError(f"teams is {shown(tables)}; give a table for each team: [teams.NAME]")
        return Teams(_team(name, table) for name, table in tables.items())

    def to_tables(self) -> dict[str, dict[str, Any]]:
        """Return each team as a table for TOML or JSON, by name."""
        return {team.name: _table(team) for team in self}

    # -- checks --------------------------------------------------------------------------------------------------------

    @cached_property
    def _parts(self) -> dict[str, tuple[str, ...]]:
        parts: dict[str, list[str]] = {}
        for team in self:
            parts.setdefault(team.parent, []).append(team.name)
        return {name: tuple(names) for name, names in parts.items()}

    @cached_property
    def _chips(self) -> dict[tuple[str, str], float]:
        chips: dict[tuple[str, str], float] = {}
        for team in sorted(self, key=lambda team: team.name.count("/"), reverse=True):
            for kind in self.types:
                quota = team.quotas.get(kind)
                of_parts = sum(chips.get((part, kind), 0.0) for part in self.parts(team.name))
                if total := quota.chips if quota is not None else of_parts:
                    chips[team.name, kind] = total
        return chips

    @cached_property
    def _keepers(self) -> dict[str, tuple[Team, ...]]:
        names: dict[str, set[str]] = {}
        for team in self:
            for kind, quota in team.quotas.items():
                if quota.lend is not None and quota.lend < quota.chips:
                    parts = team.name.split("/")
                    names.setdefault(kind, set()).update("/".join(parts[:end]) for end in range(1, len(parts) + 1))
        return {
            kind: tuple(self.by_name[name] for name in sorted(found, key=lambda name: (-name.count("/"), name)))
            for kind, found in names.items()
        }

    @cached_property
    def _teams_of(self) -> dict[str, tuple[str, ...]]:
        teams: dict[str, list[str]] = {}
        for team in self:
            for user in dict.fromkeys(team.users):
                teams.setdefault(user, []).append(team.name)
        return {user: tuple(names) for user, names in teams.items()}

    def _require_parents(self) -> None:
        for team in self:
            if team.parent and team.parent not in self.by_name:
                raise InvalidTeamsError(
                    f"team {team.name} is a part of {team.parent}, which does not exist; add [teams.{team.parent!r}]"
                )

    def _require_plain_types(self) -> None:
        for kind in self.types - {GPU, *TPU_GENERATIONS}:
            generation = get_tpu_config(kind).generation
            if generation in self.types:
                raise InvalidTeamsError(
                    f"there are quotas for {generation} and for {kind}, which is a part of it; give all quotas of"
                    f" {generation} by type, or none"
                )

    def _require_parts_fit(self) -> None:
        for team in self:
            for kind, quota in team.quotas.items():
                of_parts = sum(self.chips(part, kind) for part in self.parts(team.name))
                if of_parts > quota.chips:
                    raise InvalidTeamsError(
                        f"team {team.name} has a quota of {quota.chips:g} {kind} chips, and its parts have"
                        f" {of_parts:g} together; a team's quota includes those of its parts"
                    )


def _slice_type(name: str) -> str | None:
    try:
        return get_tpu_config(name).name
    except UnknownTPUTypeError:
        return None


# -- tables of TOML ----------------------------------------------------------------------------------------------------


def _team(name: str, table: object) -> Team:
    if not isinstance(table, dict):
        raise InvalidTeamsError(f"team {name} is {shown(table)}; give a table: [teams.{name!r}]")
    inner = next((key for key, value in table.items() if key != "quota" and isinstance(value, dict)), None)
    if inner is not None:
        raise InvalidTeamsError(f'team {name} has a table {shown(inner)}; a part of it is [teams."{name}/{inner}"]')
    _require_known(f"team {name}", table, ("quota", "weight", "users"))
    users, quotas = table.get("users", []), table.get("quota", {})
    if not isinstance(users, list) or not isinstance(quotas, dict):
        raise InvalidTeamsError(f"team {name}: give users as a list of names, and quota.v4-32 as a number of chips")
    return Team(
        name,
        {kind: _quota(f"team {name}: the quota for {kind}", given) for kind, given in quotas.items()},
        table.get("weight", 1.0),
        tuple(users),
    )


def _quota(what: str, given: Any) -> Quota:
    table = given if isinstance(given, dict) else {"chips": given}
    _require_known(what, table, ("chips", "lend", "borrow", *_BANDS))
    by_band = {band: table[name] for name, band in _BANDS.items() if name in table}
    try:
        return Quota(table.get("chips", 0.0), table.get("lend"), table.get("borrow"), by_band)
    except InvalidTeamsError as error:
        raise InvalidTeamsError(f"{what}: {error}") from None


def _require_known(what: str, table: Mapping[str, object], known: tuple[str, ...]) -> None:
    for name in table:
        if name not in known:
            raise InvalidTeamsError(f"{what} has {shown(name)}; there are only {', '.join(known)}")


def _table(team: Team) -> dict[str, Any]:
    """Return a team as a table, without default values."""
    found: dict[str, Any] = {}
    if team.users:
        found["users"] = list(team.users)
    if team.weight != 1:
        found["weight"] = _number(team.weight)
    if team.quotas:
        found["quota"] = {kind: _quota_table(team.quotas[kind]) for kind in sorted(team.quotas)}
    return found


def _quota_table(quota: Quota) -> Any:
    amounts = {"chips": quota.chips, "lend": quota.lend, "borrow": quota.borrow}
    amounts |= {name: quota.by_band.get(band) for name, band in _BANDS.items()}
    table = {name: _number(amount) for name, amount in amounts.items() if amount is not None}
    return table if len(table) > 1 else table["chips"]


def _number(amount: float) -> float:
    return int(amount) if amount == int(amount) else amount


def _some(names: tuple[str, ...]) -> str:
    """Return the first few names, joined for a message."""
    return " and ".join(names[:5]) + (f" and {len(names) - 5} more" if names[5:] else "")


def chips_of(kind: str, fleet: Mapping[str, float]) -> float:
    """Return a fleet's number of chips of a quota's type.

    Args:
        kind: the quota's type: a TPU type, a generation, or `GPU`.
        fleet: chips by TPU type, and GPUs as `GPU`.
    """
    if kind not in TPU_GENERATIONS:
        return fleet.get(kind, 0.0)
    return sum(chips for name, chips in fleet.items() if name != GPU and get_tpu_config(name).generation == kind)
