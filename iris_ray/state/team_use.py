"""What the jobs of each team hold, and have held in the past hours."""

from collections.abc import Mapping

from iris_ray.model.teams import Teams
from iris_ray.state.user_limits import PastUsage


class TeamUse:
    """The tree of teams, and what each holds.

    Attributes:
        teams: the tree that operators have set.
        version: counts the changes to it.
        usage: what the jobs of each team and of its parts hold, by Ray's resource names and by the types of quotas.
        past: the same over the past hours.
    """

    def __init__(self) -> None:
        self.teams = Teams()
        self.version = 0
        self.usage: Mapping[str, Mapping[str, float]] = {}
        self.past = PastUsage(self.usage)

    def set(self, teams: Teams) -> None:
        """Replace the tree."""
        self.teams = teams
        self.version += 1
