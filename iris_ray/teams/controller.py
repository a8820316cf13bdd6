"""Teams and limits in the Controller: their status for people and for the dashboard, and the calls that set them."""

import asyncio
from collections import Counter
from collections.abc import Iterable

from iris_ray.actors.calls.service_parts import RunningPart
from iris_ray.actors.controller.services import Controller, ControllerPart, Happening, PlainValue, Published
from iris_ray.actors.controller.views import largest_share, limit_statuses
from iris_ray.actors.protocol.status import LimitStatus
from iris_ray.errors import InvalidTeamsError
from iris_ray.model.jobs import Job
from iris_ray.model.limits import Limits
from iris_ray.model.options import PriorityBand
from iris_ray.model.teams import NO_TEAM, Team, Teams, chips_of
from iris_ray.state import ControllerState
from iris_ray.state.events import LimitsSetEvent, TeamsSetEvent
from iris_ray.teams.calls import TeamCalls, TeamChips, TeamsStatus, TeamStatus
from iris_ray.teams.quotas import about_team, fleet_chips, own, team_chips

_ROOT = Team("all")
"""Stands for `NO_TEAM` where a team's settings are shown: it has none."""
LOOK_S = 2.0
"""The interval between two looks at all teams and jobs for the dashboard."""
SHOWN = 300
"""The dashboard shows this number of teams, the first ones."""


class TeamsInController(ControllerPart):
    """See `TeamCalls`."""

    calls = (TeamCalls,)

    def __init__(self, controller: Controller, running: RunningPart[Happening]) -> None:
        super().__init__(controller, running)
        self._state = controller.state
        self._shown: dict[str, dict[str, PlainValue]] = {}
        self._looked_at: tuple[object, ...] = ()  # the versions of what was shown

    async def run(self) -> None:
        while True:
            state = self._state
            now = state.teams.version, state.job_changes.version, state.fleet.version
            if now != self._looked_at:
                self._looked_at = now
                self._show()
            await asyncio.sleep(LOOK_S)

    def _show(self) -> None:
        shown = team_rows(teams_status(self._state, self.controller.clock.now()).teams[: SHOWN + 1])
        if shown != self._shown:
            self.publish(Published(tables={"teams": shown}))
            self._shown = shown

    def about_job(self, job: Job) -> str | None:
        return about_team(self._state, job)

    async def list_limits(self) -> list[LimitStatus]:
        return limit_statuses(self._state)

    async def set_limits(
        self, whose: str, bands: list[PriorityBand], limits: Limits, reset: bool, user: str
    ) -> list[LimitStatus]:
        self.controller.permissions.require_operator(user, "set limits")
        table = self._state.limits.table
        before = [Limits() if reset else table.get((whose, band), Limits()) for band in bands]
        events = [LimitsSetEvent(whose, band, limits.over(old)) for band, old in zip(bands, before, strict=True)]
        await self.controller.recorded(events)
        return limit_statuses(self._state)

    async def list_teams(self) -> TeamsStatus:
        return teams_status(self._state, self.controller.clock.now())

    async def set_teams(self, teams: list[Team], instead_of: str, user: str) -> TeamsStatus:
        self.controller.permissions.require_operator(user, "set teams")
        tree, known = Teams(teams), self._state.teams.teams
        if known.version != instead_of:
            raise InvalidTeamsError(
                f"the teams have changed meanwhile: their version is {known.version}, and these are made from"
                f" {instead_of}. Look at what is set now, and make your change there: iris-ray team show --toml"
            )
        if tree != known:
            recorded = self.controller.apply([TeamsSetEvent(tuple(tree))])
            for job_id, job in self._state.jobs.items():
                if known.nearest(job.spec.team) != tree.nearest(job.spec.team):
                    self._state.show_anew(job_id)
            self._show()
            await asyncio.shield(recorded)
        return teams_status(self._state, self.controller.clock.now())


def teams_status(state: ControllerState, now: float) -> TeamsStatus:
    """Return the status of all teams."""
    teams, usage, past = state.teams.teams, state.teams.usage, state.teams.past
    fleet, totals = fleet_chips(state.fleet), state.fleet.totals
    if not teams:
        return TeamsStatus(teams.version, (), fleet)
    chips = {kind: team_chips(teams, usage, kind, chips_of(kind, fleet)) for kind in sorted(teams.types)}
    running, waiting = _jobs(state, teams)
    found = []
    for name in (NO_TEAM, *teams.by_name):
        team, held = teams.by_name.get(name, _ROOT), own(teams, name, usage.get)
        before = own(teams, name, lambda name: past.hours(name, now))
        both = {resource: held.get(resource, 0.0) + before.get(resource, 0.0) for resource in {*held, *before}}
        found.append(
            TeamStatus(
                name=name,
                quotas=team.quotas,
                weight=team.weight,
                users=team.users,
                chips={kind: of_type[name] for kind, of_type in chips.items()},
                running=running[name],
                waiting=waiting[name],
                share=largest_share(held, totals),
                counted=largest_share(both, totals),
            )
        )
    return TeamsStatus(teams.version, tuple(found), fleet)


def _jobs(state: ControllerState, teams: Teams) -> tuple[Counter[str], Counter[str]]:
    """Return how many unfinished jobs of each team have hosts, and how many have none."""
    running: Counter[str] = Counter()
    waiting: Counter[str] = Counter()
    for job in state.jobs.values():
        if job.over is None and job.spec.spare_for is None:
            has_hosts = any(True for _ in state.placed_gangs(job))
            (running if has_hosts else waiting)[teams.nearest(job.spec.team)] += 1
    return running, waiting


def team_rows(teams: Iterable[TeamStatus]) -> dict[str, dict[str, PlainValue]]:
    """Return a row for each team and each type whose chips it has or uses.

    The row of a team without any has no type.
    """
    rows: dict[str, dict[str, PlainValue]] = {}
    for number, team in enumerate(teams):
        kinds = [kind for kind, chips in team.chips.items() if chips.quota or chips.used]
        for kind in kinds or [""]:
            chips = team.chips[kind] if kind else TeamChips(0, 0, 0, 0, {})
            if team.name or chips.used:
                rows[f"{team.name}:{kind}"] = {
                    "order": number,
                    "team": team.name,
                    "type": kind or None,
                    "quota": chips.quota,
                    "used": chips.used,
                    "borrowed": chips.borrowed,
                    "lent": chips.lent,
                    "share": team.share,
                    "counted": team.counted,
                    "running": team.running,
                    "waiting": team.waiting,
                }
    return rows
