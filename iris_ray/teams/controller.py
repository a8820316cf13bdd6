"""Teams and limits in the Controller: their status for people and for the dashboard, and the calls that set them."""

import asyncio
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import islice

from iris_ray.actors.calls.service_parts import RunningPart
from iris_ray.actors.controller.services import Controller, ControllerPart, Happening, PlainValue, Published
from iris_ray.actors.controller.views import largest_share, limit_statuses
from iris_ray.actors.protocol.status import LimitStatus
from iris_ray.errors import InvalidRequestError, InvalidTeamsError
from iris_ray.model.checks import is_user, shown
from iris_ray.model.jobs import Job
from iris_ray.model.limits import EVERYBODY, Limits
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
AT_ONCE = 500
"""The number of changed jobs that are looked at before others get the event loop."""
SHOWN = 300
"""The dashboard shows this number of teams, the first ones."""


class JobsByTeam:
    """Counts unfinished jobs by the team that they name. It looks only at the jobs that have changed.

    Args:
        state: read only.
    """

    def __init__(self, state: ControllerState) -> None:
        self._state = state
        self._version = -1
        self._due: dict[str, None] = {}  # the jobs that have changed since they were looked at
        self._kinds: dict[str, tuple[str, bool]] = {}  # by job: its team, and whether it has hosts
        self._counts: Counter[tuple[str, bool]] = Counter()

    async def counts(self) -> dict[tuple[str, bool], int]:
        """Return the number of jobs by team and by whether they have hosts."""
        while True:
            self._note_changes()
            for job_id in list(islice(self._due, AT_ONCE)):
                del self._due[job_id]
                before, kind = self._kinds.pop(job_id, None), self._kind(job_id)
                if before is not None:
                    self._counts[before] -= 1
                if kind is not None:
                    self._kinds[job_id] = kind
                    self._counts[kind] += 1
            if not self._due:
                return dict(+self._counts)
            await asyncio.sleep(0)

    def _note_changes(self) -> None:
        changes = self._state.job_changes
        if (changed := changes.since(self._version)) is None:
            self._kinds.clear()
            self._counts.clear()
            self._due = dict.fromkeys(self._state.jobs)
        else:
            self._due.update(dict.fromkeys(changed))
        self._version = changes.version

    def _kind(self, job_id: str) -> tuple[str, bool] | None:
        job = self._state.jobs.get(job_id)
        if job is None or job.over is not None or job.spec.spare_for is not None:
            return None
        return job.spec.team, any(True for _ in self._state.placed_gangs(job))


@dataclass(frozen=True, slots=True)
class TeamsUse:
    """A copy of the data from which the status of the teams is made, for another thread.

    Attributes:
        teams: the tree.
        usage, past: what each team holds, and its past use, as in `TeamUse`.
        fleet: the chips of the cluster, by type.
        totals: all resources of the cluster, by Ray's names.
        jobs: see `JobsByTeam.counts`.
    """

    teams: Teams
    usage: Mapping[str, Mapping[str, float]]
    past: Mapping[str, Mapping[str, float]]
    fleet: Mapping[str, float]
    totals: Mapping[str, float]
    jobs: Mapping[tuple[str, bool], int]

    @staticmethod
    def of(state: ControllerState, now: float, jobs: Mapping[tuple[str, bool], int]) -> "TeamsUse":
        """Copy the data from a state."""
        of_teams, fleet = state.teams, state.fleet
        usage = {name: dict(amounts) for name, amounts in of_teams.usage.items()}
        past = {name: of_teams.past.hours(name, now) for name in (NO_TEAM, *of_teams.teams.by_name)}
        return TeamsUse(of_teams.teams, usage, past, fleet_chips(fleet), dict(fleet.totals), jobs)


class TeamsInController(ControllerPart):
    """See `TeamCalls`."""

    calls = (TeamCalls,)

    def __init__(self, controller: Controller, running: RunningPart[Happening]) -> None:
        super().__init__(controller, running)
        self._state = controller.state
        self._jobs = JobsByTeam(controller.state)
        self._shown: dict[str, dict[str, PlainValue]] = {}
        self._looked_at: tuple[object, ...] = ()  # the versions of what was shown

    async def run(self) -> None:
        while True:
            state = self._state
            now = state.teams.version, state.job_changes.version, state.fleet.version
            if now != self._looked_at:
                self._looked_at = now
                await self.in_thread(self._publish, await self._use())
            await asyncio.sleep(LOOK_S)

    def _publish(self, use: TeamsUse) -> None:
        """Publish the rows of the dashboard, if they have changed. In a thread, as there may be thousands."""
        shown = team_rows(teams_status(use).teams[: SHOWN + 1])
        if shown != self._shown:
            self.publish(Published(tables={"teams": shown}))
            self._shown = shown

    def about_job(self, job: Job) -> str | None:
        return about_team(self._state, job)

    async def _use(self) -> TeamsUse:
        jobs = await self._jobs.counts()
        return TeamsUse.of(self._state, self.controller.clock.now(), jobs)

    async def list_limits(self) -> list[LimitStatus]:
        return limit_statuses(self._state)

    async def set_limits(
        self, whose: str, bands: list[PriorityBand], limits: Limits, reset: bool, user: str
    ) -> list[LimitStatus]:
        self.controller.permissions.require_operator(user, "set limits")
        if whose != EVERYBODY and not is_user(whose):
            raise InvalidRequestError(f"{shown(whose)} is not a valid user name, so no job could have these limits")
        table, bands = self._state.limits.table, list(dict.fromkeys(bands))
        before = [Limits() if reset else table.get((whose, band), Limits()) for band in bands]
        events = [LimitsSetEvent(whose, band, limits.over(old)) for band, old in zip(bands, before, strict=True)]
        await self.controller.recorded(events)
        return limit_statuses(self._state)

    async def list_teams(self) -> TeamsStatus:
        return await self.in_thread(teams_status, await self._use())

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
            await asyncio.shield(recorded)
        return await self.list_teams()


def teams_status(use: TeamsUse) -> TeamsStatus:
    """Return the status of all teams."""
    teams, usage = use.teams, use.usage
    if not teams:
        return TeamsStatus(teams.version, (), use.fleet)
    chips = {kind: team_chips(teams, usage, kind, chips_of(kind, use.fleet)) for kind in sorted(teams.types)}
    jobs: Counter[tuple[str, bool]] = Counter()
    for (name, has_hosts), count in use.jobs.items():
        jobs[teams.nearest(name), has_hosts] += count
    found = []
    for name in (NO_TEAM, *teams.by_name):
        team, held, before = teams.by_name.get(name, _ROOT), own(teams, name, usage.get), own(teams, name, use.past.get)
        both = {resource: held.get(resource, 0.0) + before.get(resource, 0.0) for resource in {*held, *before}}
        found.append(
            TeamStatus(
                name=name,
                quotas=team.quotas,
                weight=team.weight,
                users=team.users,
                chips={kind: of_type[name] for kind, of_type in chips.items()},
                running=jobs[name, True],
                waiting=jobs[name, False],
                share=largest_share(held, use.totals),
                counted=largest_share(both, use.totals),
            )
        )
    return TeamsStatus(teams.version, tuple(found), use.fleet)


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
