"""Calls about teams and limits."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from iris_ray.actors.protocol.services import calls_of
from iris_ray.actors.protocol.status import LimitStatus
from iris_ray.model.limits import Limits
from iris_ray.model.options import PriorityBand
from iris_ray.model.teams import Quota, Team, Teams


@dataclass(frozen=True, slots=True)
class TeamChips:
    """How a team's quota of one type stands, in chips.

    Attributes:
        quota: its own, or, if it has none, the sum of its parts'.
        used: the chips that jobs of the team and its subteams hold.
        borrowed: the part of ``used`` that exceeds the quota.
        lent: the part of the quota that other teams use.
        by_band: ``used`` by band; bands with nothing are left out.
    """

    quota: float
    used: float
    borrowed: float
    lent: float
    by_band: Mapping[PriorityBand, float]


@dataclass(frozen=True, slots=True)
class TeamStatus:
    """A team, its use and its jobs.

    Attributes:
        name, quotas, weight, users: as operators have set them. The name is empty for all jobs without a team.
        chips: by type, for each type with any quota.
        running, waiting: unfinished jobs of this team itself, not of its parts: with hosts, and all others.
        share: the largest share of any resource of the cluster that the team and its parts hold, from 0 to 1.
        counted: like ``share``, with past usage.
    """

    name: str
    quotas: Mapping[str, Quota]
    weight: float
    users: tuple[str, ...]
    chips: Mapping[str, TeamChips]
    running: int
    waiting: int
    share: float
    counted: float


@dataclass(frozen=True, slots=True)
class TeamsStatus:
    """All teams of a cluster.

    Attributes:
        version: see `Teams.version`.
        teams: in the order of their names, after the jobs without a team; empty without teams.
        fleet: the cluster's chips by TPU type, and its GPUs as ``GPU``.
    """

    version: str
    teams: tuple[TeamStatus, ...]
    fleet: Mapping[str, float]

    def tree(self) -> Teams:
        """Return the teams as operators have set them."""
        return Teams(Team(one.name, one.quotas, one.weight, one.users) for one in self.teams if one.name)


@calls_of("teams")
class TeamCalls(Protocol):
    """Calls of people."""

    async def list_limits(self) -> list[LimitStatus]:
        """Return the limits and usage of each user with limits or jobs, after the limits of `EVERYBODY`."""

    async def set_limits(
        self, whose: str, bands: list[PriorityBand], limits: Limits, reset: bool, user: str
    ) -> list[LimitStatus]:
        """Set some limits of a user, or of everybody. Return all limits as `list_limits` does.

        Args:
            whose: the user, or `EVERYBODY`.
            bands: the bands in which to set them.
            limits: the new limits; None leaves a limit unchanged.
            reset: whether to remove the limits that were set before.
            user: the user who sets them.

        Raises:
            NotPermittedError: the user is not an operator.
        """

    async def list_teams(self) -> TeamsStatus:
        """Return all teams with their quotas and their use."""

    async def set_teams(self, teams: list[Team], instead_of: str, user: str) -> TeamsStatus:
        """Replace the whole tree of teams. Return it as `list_teams` does.

        Args:
            teams: all teams; empty removes all teams.
            instead_of: the version of the tree that they replace, see `Teams.version`.
            user: the user who sets them.

        Raises:
            InvalidTeamsError: they are inconsistent, or the present tree has another version.
            NotPermittedError: the user is not an operator.
        """
