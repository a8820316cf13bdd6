"""Pending reasons: why a job waits, as data and as text."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum

from iris_ray.model.options import PriorityBand
from iris_ray.model.parts import is_on_slices, shape_of_attribute
from iris_ray.model.requirement import Requirement
from iris_ray.model.workers import GPU, TPU_NAME


class PendingKind(Enum):
    """The kind of a pending reason.

    A job that has reached its team's quota is LIMITED as well, and a job that iris_ray can't place for a while, because
    of a defect, is PAUSED as well.
    """

    PAUSED = "a launch has just failed"
    NOT_LOOKED_AT = "jobs with too many different requirements wait before it"
    HELD_BACK = "it awaits other jobs"
    LIMITED = "its user has reached a limit"
    NO_SUCH_WORKERS = "no group in the cluster suits the job"
    TOO_FEW = "too few groups suit the job"
    IN_USE = "other jobs use the groups or come first in the queue"


@dataclass(frozen=True, slots=True)
class Obstacle:
    """Why a group is not free for a job.

    Attributes:
        group: the group's name.
        hosts_missing: number of hosts needed by the job that are missing, in use or unfit.
        why: the reason, for people.
        used_by: ids of the jobs that use the group, or of the one that gets it.
    """

    group: str
    hosts_missing: int
    why: str
    used_by: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.group}: {self.why}"


@dataclass(slots=True)  # filled in after the plan is made
class Shortage:
    """Why jobs with the same requirement don't run.

    Attributes:
        excluded: number of workers that each constraint or taint excludes. Workers that could never run such a task
            don't count.
        closest: some of the groups that are not free, the closest to being free first.
        more: number of groups that are not free and not in ``closest``.
        slice_types: TPU type → number of slices in the cluster; empty if ``closest`` is not.
        groups: number of groups by the attribute by which the jobs group hosts.
    """

    excluded: tuple[tuple[str, int], ...] = ()
    closest: tuple[Obstacle, ...] = ()
    more: int = 0
    slice_types: Mapping[str, int] = field(default_factory=dict)
    groups: int = 0


LimitAccount = tuple[str, PriorityBand | str]
"""A user and a band, or a team and a quota's type."""


@dataclass(frozen=True, slots=True)
class ReachedLimit:
    """The user's limit or team's quota for which a job waits.

    Attributes:
        user, band: the user and band of the job.
        what: "chips" or "running jobs"; for a team, "v4-32 chips".
        limit: the limit or quota.
        held: the current usage, including resources granted by the plan.
        needed: the smallest additional amount that the job needs.
        before: the id of another job of the user for which the rest is reserved, or None.
        kept: whether the rest is reserved for this job.
        team: the team whose quota is used up; "" if other teams don't lend the rest; None for a user's limit.
        is_kept_back: whether the job would be within the limit without reservations for other jobs.
    """

    user: str
    band: PriorityBand
    what: str
    limit: float
    held: float
    needed: float
    before: str | None = None
    kept: bool = False
    team: str | None = None
    is_kept_back: bool = False

    def __str__(self) -> str:
        if self.team is not None:
            return f"waiting for {self._of_team}, and it needs {self.needed:,g}; iris-ray team show has all"
        rest = f"; the rest is kept for {self.before or 'it'}" if self.before or self.kept else ""
        return (
            f"waiting for the limit of {self.user} in band {self.band.name.lower()}: {self.limit:,g} {self.what}, of"
            f" which {self.held:,g} are taken, and it needs {self.needed:,g}{rest}; iris-ray cluster limits shows all"
        )

    @property
    def account(self) -> LimitAccount:
        """The account with the limit."""
        return (self.user, self.band) if self.team is None else (self.team, self.type)

    @property
    def type(self) -> str:
        """The type of a team's quota."""
        return self.what.removesuffix(" chips")

    @property
    def in_short(self) -> str:
        """The limit as text, without the job's needs."""
        if self.team is not None:
            return f"its team may have no more: {self._of_team}"
        return f"{self.user} has reached the limit of {self.limit:,g} {self.what} in band {self.band.name.lower()}"

    @property
    def summary(self) -> str:
        """The limit and the job's needs, in sentences."""
        if self.team is not None:
            return f"It waits for {self._of_team}. It needs {self.needed:,g} more."
        rest = f" The rest is kept for {self.before or 'it'}." if self.before or self.kept else ""
        return (
            f"{self.user} may have {self.limit:,g} {self.what} in band {self.band.name.lower()} and has {self.held:,g}."
            f" This job needs {self.needed:,g} more.{rest}"
        )

    @property
    def _of_team(self) -> str:
        whose = f"the limit of team {self.team}" if self.team else "chips that teams lend"
        return f"{whose}: {self.limit:,g} {self.what}, of which {self.held:,g} are taken or kept"


@dataclass(frozen=True, slots=True)
class Protected:
    """The hosts that a job may take later, after the victims' minimum runtime and within eviction budgets.

    Attributes:
        job_ids: ids of the jobs that hold the hosts.
        seconds: the seconds until the job may take the hosts.
        at_budget: those of these jobs, or of their users and teams, that have used up their eviction budget.
    """

    job_ids: tuple[str, ...]
    seconds: float
    at_budget: tuple[str, ...] = ()

    def __str__(self) -> str:
        when = f"{self.seconds:.0f} s" if self.seconds < 90 else f"{math.ceil(self.seconds / 60)} min"
        lately = f", since {_some(self.at_budget)} had enough evictions in the past hour" if self.at_budget else ""
        return f"may take the hosts of {_some(self.job_ids)} in {when}{lately}"


@dataclass(slots=True)  # not frozen, which would slow down its construction for each waiting job in each cycle
class PendingReason:
    """Why a job waits.

    Attributes:
        job_id: the job's id.
        kind: the kind of reason.
        requirement: the job's requirement.
        num_groups: the group counts that the job can use, ascending.
        free: number of groups that are free for the job.
        suitable: number of groups that would be free for the job without tasks on them.
        shortage: why groups are not free; None if the job pauses, waits for a limit or for other jobs, or was not
            considered.
        ahead: number of jobs with the same requirement before it in the queue.
        first_ahead: id of the first of these jobs, or None.
        kept: names of the groups reserved for the job, because it starves, has just lost its hosts, or has victims.
        avoided: names of groups that the job avoids for a while, after failures of its launches or its user's tasks.
        failed: why the job's latest attempt ended, if it avoids groups itself; else None.
        taken_from: ids of the jobs that leave it hosts.
        protected: the hosts that it may take from lower bands later, or None.
        pause: the remaining seconds of its pause, and the cause; None if it does not pause.
        limit: the limit that it has reached, or None.
        waits_for: the events for which the reserved groups wait, for people.
        asked: the status of requests for slices of its type, for people.
        awaits: its unmet conditions for entering the queue, for people.
        together: the name of its group, which starts as a whole, and of the group's job that can't start; or None.
    """

    job_id: str
    kind: PendingKind
    requirement: Requirement
    num_groups: tuple[int, ...]
    free: int = 0
    suitable: int = 0
    shortage: Shortage | None = None
    ahead: int = 0
    first_ahead: str | None = None
    kept: tuple[str, ...] = ()
    avoided: tuple[str, ...] = ()
    failed: str | None = None
    taken_from: tuple[str, ...] = ()
    protected: Protected | None = None
    pause: tuple[float, str] | None = None
    limit: ReachedLimit | None = None
    waits_for: tuple[str, ...] = ()
    asked: tuple[str, ...] = ()
    awaits: tuple[str, ...] = ()
    together: tuple[str, str] | None = None

    def __str__(self) -> str:
        if self.awaits:
            return f"waits until {_some(self.awaits, ' and ')}"
        if self.pause is not None:
            return f"pausing {self.pause[0]:.0f} s before it is tried again: {self.pause[1]}"
        if self.kind is PendingKind.NOT_LOOKED_AT:
            return f"{self.kind.value}: its turn comes in one of the next plans"
        if self.limit is not None:
            return f"{self._whole}; {self.limit}" if self.together else str(self.limit)
        assert self.shortage is not None
        return "; ".join(self._parts(self.shortage))

    def _parts(self, shortage: Shortage) -> Iterator[str]:
        """Yield the parts of the text: needs, jobs ahead, reserved groups, and why other groups are not free."""
        if self.together:
            yield self._whole
        yield f"waiting for {self._wish}; {self.free} free"
        yield from self.asked
        if self.ahead:
            jobs = "1 job" if self.ahead == 1 else f"{self.ahead} jobs"
            yield f"behind {jobs} with the same requirement, the first is {self.first_ahead}"
        if self.kept:
            yield f"gets {_some(self.kept)}{self._waits}"
        if self.taken_from:
            yield f"taken from {_some(self.taken_from)}"
        if self.protected is not None:
            yield str(self.protected)
        if self.avoided:
            last = f", the last one: {self.failed}" if self.failed else ""
            yield f"it avoids {_some(self.avoided)} for a while: launches or tasks have failed there{last}"
        yield from map(str, shortage.closest)
        if shortage.more:
            yield "…"
        if self.kind is PendingKind.NO_SUCH_WORKERS and not shortage.closest:
            yield self._there_are
        if self.kind is not PendingKind.IN_USE:
            yield from (f"{what!r} excludes {count} host{'s' * (count != 1)}" for what, count in shortage.excluded)

    @property
    def keeps(self) -> bool:
        """Whether groups, or the rest of a limit, are reserved for the job."""
        return bool(self.kept) or (self.limit is not None and self.limit.kept)

    @property
    def summary(self) -> str:
        """Why the job waits, in sentences without constraints and taints. `str()` has the details."""
        whole = f" Its {self._whole}." if self.together else ""
        gets = f"{whole} It gets {_some(self.kept)}{self._waits}." if self.kept and self.limit is None else whole
        return f"{self._cause}{gets} {'; '.join(self.asked)}." if self.asked else f"{self._cause}{gets}"

    @property
    def _whole(self) -> str:
        assert self.together is not None
        return "group {} starts as a whole, and {} can't start".format(*self.together)

    @property
    def _waits(self) -> str:
        return f"; waits for {_some(self.waits_for, ' and for ')}" if self.waits_for else ""

    @property
    def _cause(self) -> str:
        if self.awaits:
            return f"It waits until {_some(self.awaits, ' and ')}."
        if self.pause is not None:
            return f"It pauses for {self.pause[0]:.0f} s before it is tried again: {self.pause[1]}."
        if self.limit is not None:
            return self.limit.summary
        if self.kind is PendingKind.NOT_LOOKED_AT:
            return "Jobs with too many different requirements wait before it. Its turn comes within some plans."
        wanted, one = " or ".join(map(str, self.num_groups)), self._group_noun
        needs = f"It needs {wanted} {one}." if self.num_groups == (1,) else f"It needs {wanted} {one}s at once."
        if self.kind is PendingKind.NO_SUCH_WORKERS:
            return f"{needs} No {one} in the cluster suits it."
        suits = f"1 {one} suits it" if self.suitable == 1 else f"{self.suitable} {one}s suit it"
        free = "1 is free" if self.free == 1 else f"{self.free} are free" if self.free else "none is free"
        if self.kind is PendingKind.TOO_FEW:
            return f"{needs} Only {suits}, and {free} now."
        before = f" The job {self.first_ahead} comes first." if self.ahead else ""
        return f"{needs} {suits[0].upper()}{suits[1:]}, and {free} now.{before}"

    @property
    def _group_noun(self) -> str:
        group_by = self.requirement.group_by
        if (shape := shape_of_attribute(group_by)) is not None:
            return f"{shape} part"
        return {None: "host", TPU_NAME: "slice"}.get(group_by, f"group by {group_by}")

    @property
    def _wish(self) -> str:
        need = self.requirement
        what = self._group_noun
        conditions = " and ".join(map(str, need.constraints)) or "any"
        plural = "" if self.num_groups == (1,) else "s"
        gpus = next((f" with {amount:g} {GPU} a task" for resource, amount in need.resources if resource == GPU), "")
        return f"{' or '.join(map(str, self.num_groups))} {what}{plural}{gpus} ({conditions})"

    @property
    def _there_are(self) -> str:
        assert self.shortage is not None
        need, none = self.requirement, "none like that in the cluster"
        if need.group_by is not None and not is_on_slices(need.group_by) and not self.shortage.groups:
            return f"no host has the attribute {need.group_by}"
        if not need.chips:
            return none
        types = sorted(self.shortage.slice_types.items())
        named = ", ".join(f"{count} × {name}" for name, count in types)
        return f"{none}, which has {named or 'no TPU hosts at all (to try without: SimulatedCluster)'}"


def _some(names: tuple[str, ...], separator: str = ", ") -> str:
    return separator.join((*names[:4], "…") if len(names) > 4 else names)
