"""The resources that each team's jobs hold, now and in the past hours, for the scheduler.

Resources count for the job's team and for all teams above it. GPUs count as chips.
"""

from collections import Counter
from collections.abc import Iterable, Mapping

from iris_ray.model.job_spec import JobSpec
from iris_ray.model.jobs import Allocation, Job
from iris_ray.model.lifecycle import AttemptId
from iris_ray.model.options import PriorityBand
from iris_ray.model.teams import NO_TEAM, Teams
from iris_ray.model.workers import GPU, accelerators
from iris_ray.state.user_limits import PastUsage

Demands = Iterable[Mapping[str, float]]


def own_part(team: str) -> str:
    """Return the key for the usage of a team's own jobs, without its subteams."""
    return f"{team}/"


def in_band(kind: str, band: PriorityBand) -> str:
    """Return the key for the chips of a type that jobs of a band hold."""
    return f"{kind}/{band.name}"


class TeamUse:
    """The teams of the cluster, and the resources that their jobs hold.

    Attributes:
        teams: the tree that operators have set.
        version: the number of changes to the tree.
        usage: by team, `own_part` of a team with subteams, or `NO_TEAM` for the cluster: amounts by Ray's resource
            names, chips by type, and chips by type and band (`in_band`). Empty if there are no teams.
        past: past usage by the keys of ``usage``.
    """

    def __init__(self) -> None:
        self.teams = Teams()
        self.version = 0
        self.usage: dict[str, Counter[str]] = {}
        self.past = PastUsage(self.usage)
        self._paths: dict[str, tuple[str, ...]] = {}
        self._types: dict[tuple[str | None, bool], str | None] = {}

    def set(
        self, teams: Teams, jobs: Mapping[str, Job], allocations: Mapping[str, Mapping[AttemptId, Allocation]]
    ) -> None:
        """Replace the tree, and count the resources of all jobs by the new one."""
        for name in self.usage:
            self.past.settle(name)
        self.teams = teams
        self.version += 1
        self.usage.clear()
        self._paths.clear()
        self._types.clear()
        for job_id, held in allocations.items() if teams else ():
            for allocation in held.values():
                self._count(jobs[job_id].spec, (demand for _, _, demand in allocation), 1)

    def path(self, team: str) -> tuple[str, ...]:
        """Return the keys of ``usage`` for which a job of a team counts, from the team itself up to `NO_TEAM`.

        A team that no longer exists is replaced by its closest ancestor. The first key is `own_part` of a team with
        subteams.
        """
        path = self._paths.get(team)
        if path is None:
            name = self.teams.nearest(team)
            names = [own_part(name)] if self.teams.parts(name) else []
            while name:
                names.append(name)
                name = name.rpartition("/")[0]
            path = self._paths[team] = (*names, NO_TEAM)
        return path

    def kind(self, spec: JobSpec) -> str | None:
        """Return the type whose quota a job needs, or None."""
        key = spec.device, bool(spec.resources.get(GPU))
        if key not in self._types:
            self._types[key] = self.teams.quota_type(*key)
        return self._types[key]

    def share_quotas(self, one: JobSpec, other: JobSpec) -> bool:
        """Return whether two jobs compete by quota: they belong to different teams and need quotas of the same type."""
        kind = self.kind(one) if self.teams.types else None
        return kind is not None and kind == self.kind(other) and self.path(one.team)[0] != self.path(other.team)[0]

    def took(self, spec: JobSpec, demands: Demands) -> None:
        """Count resources that an attempt gets."""
        if self.teams:
            self._count(spec, demands, 1)

    def gave_back(self, spec: JobSpec, demands: Demands) -> None:
        """Stop counting resources that an attempt has freed."""
        if self.teams:
            self._count(spec, demands, -1)

    def _count(self, spec: JobSpec, demands: Demands, sign: int) -> None:
        total: Counter[str] = Counter()
        for demand in demands:
            for resource, amount in demand.items():
                total[resource] += amount  # type: ignore[assignment]  # Counter's amounts may be fractions
        if (kind := self.kind(spec)) is not None:
            total[kind] = total[in_band(kind, spec.priority)] = accelerators(total)  # type: ignore[assignment]
        if not total:
            return
        for name in self.path(spec.team):
            self.past.settle(name)
            usage = self.usage.setdefault(name, Counter())
            for key, amount in total.items():
                usage[key] += sign * amount
            if not any(amount > 1e-9 for amount in usage.values()):
                del self.usage[name]  # also drops rounding errors of fractions

    def check(self, jobs: Mapping[str, Job], allocations: Mapping[str, Mapping[AttemptId, Allocation]]) -> None:
        """Raise AssertionError if the counts disagree with the jobs. For tests."""
        fresh = TeamUse()
        if self.teams:
            fresh.set(self.teams, jobs, allocations)
        names = self.usage.keys() | fresh.usage.keys()
        for name in names:
            have, want = self.usage.get(name, Counter[str]()), fresh.usage.get(name, Counter[str]())
            for key in have.keys() | want.keys():
                same = abs(have[key] - want[key]) < 1e-6
                assert same, f"team {name} holds {have[key]} {key}, by the jobs it is {want[key]}"
