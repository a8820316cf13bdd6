"""Why a job waits, as data and as a sentence."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum

from iris_ray.model.options import PriorityBand
from iris_ray.model.requirement import Requirement
from iris_ray.model.workers import GPU, TPU_NAME


class PendingKind(Enum):
    """The kinds of answers to "why is it pending?"."""

    PAUSED = "a launch has just failed"
    NOT_LOOKED_AT = "jobs with too many different requirements wait before it"
    HELD_BACK = "it awaits other jobs"
    LIMITED = "its user has reached a limit"
    NO_SUCH_WORKERS = "no group in the cluster suits the job"
    TOO_FEW = "too few groups suit the job"
    IN_USE = "other jobs use the groups or come first in the queue"


@dataclass(frozen=True, slots=True)
class Obstacle:
    """What keeps one group from being free for a job.

    Attributes:
        group: the group's name.
        hosts_missing: how many of its hosts are missing, in use or unfit, of those that the job needs.
        why: the reason in words.
        used_by: ids of the jobs that use the group.
    """

    group: str
    hosts_missing: int
    why: str
    used_by: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.group}: {self.why}"


@dataclass(slots=True)  # filled in once the plan is made
class Shortage:
    """What keeps jobs with the same requirement from running.

    Attributes:
        excluded: how many workers each constraint or taint excludes.
        closest: some of the groups that are not free, the closest to being free first.
        more: how many groups that are not free ``closest`` leaves out.
        slice_types: TPU type → how many slices the cluster has; empty if any group comes close.
        groups: how many groups share a value of the attribute by which the jobs group hosts.
    """

    excluded: tuple[tuple[str, int], ...] = ()
    closest: tuple[Obstacle, ...] = ()
    more: int = 0
    slice_types: Mapping[str, int] = field(default_factory=dict)
    groups: int = 0


LimitAccount = tuple[str, PriorityBand | str]
"""A user and a band, or a team and the type whose quota it uses."""


@dataclass(frozen=True, slots=True)
class ReachedLimit:
    """The limit of its user, or the quota of its team, that keeps a job waiting.

    Attributes:
        user: the user who has the limit.
        band: the band that the limit is for.
        what: "chips" or "running jobs"; of a team "v4-32 chips".
        limit: how many of these the user, or the team, may have.
        held: how many the user or the team has, with those that the plan has handed out.
        needed: how many more the job needs at least.
        before: the user's job that has waited too long and that the rest is kept for, if it is another one; or None.
        kept: whether the rest is kept for this job.
        team: the team that may have no more; `NO_TEAM` if other teams keep what is left; None: it is the user's limit.
        is_kept_back: whether the job would be within the limit if nothing were kept for other jobs that wait for it.
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
        """Whose limit it is."""
        return (self.user, self.band) if self.team is None else (self.team, self.type)

    @property
    def type(self) -> str:
        """The type whose quota is used up, if it is a team's."""
        return self.what.removesuffix(" chips")

    @property
    def in_short(self) -> str:
        """Which limit it is, without what the job needs."""
        if self.team is not None:
            return f"there is no more for its team: {self._of_team}"
        return f"{self.user} has reached the limit of {self.limit:,g} {self.what} in band {self.band.name.lower()}"

    @property
    def summary(self) -> str:
        """The same, in sentences."""
        if self.team is not None:
            return f"It waits for {self._of_team}. It needs {self.needed:,g} more."
        rest = f" The rest is kept for {self.before or 'it'}." if self.before or self.kept else ""
        return (
            f"{self.user} may have {self.limit:,g} {self.what} in band {self.band.name.lower()} and has {self.held:,g}."
            f" This job needs {self.needed:,g} more.{rest}"
        )

    @property
    def _of_team(self) -> str:
        whose = f"what team {self.team} may have" if self.team else "what the teams lend"
        return f"{whose}: {self.limit:,g} {self.what}, of which {self.held:,g} are taken or kept"


@dataclass(frozen=True, slots=True)
class Protected:
    """The hosts that a job may take from lower bands once their jobs have run for long enough, and not left too often.

    Attributes:
        job_ids: ids of the jobs that hold the hosts.
        seconds: how long until the job may take them.
        at_budget: those among them, or their users and teams, that have been evicted as often as is allowed in an hour.
    """

    job_ids: tuple[str, ...]
    seconds: float
    at_budget: tuple[str, ...] = ()

    def __str__(self) -> str:
        when = f"{self.seconds:.0f} s" if self.seconds < 90 else f"{math.ceil(self.seconds / 60)} min"
        lately = f", since {_some(self.at_budget)} had enough evictions in the past hour" if self.at_budget else ""
        return f"may take the hosts of {_some(self.job_ids)} in {when}{lately}"


@dataclass(slots=True)  # frozen, it would take longer to make, for each waiting job in each cycle
class PendingReason:
    """Why a job waits.

    Attributes:
        job_id: the job's id.
        kind: the kind of answer.
        requirement: what the job asks of workers.
        num_groups: the numbers of groups that the job can use, ascending.
        free: how many groups are free for the job.
        suitable: how many groups would be free for the job if no task used them.
        shortage: what keeps groups from being free; None while the job pauses, waits for a limit, or was not looked at.
        ahead: how many jobs with the same requirement are before it in the queue.
        first_ahead: the id of the first of these jobs, or None.
        kept: names of the groups that the job gets, because it has waited long, has just lost its hosts, or others
            leave them to it.
        avoided: names of groups that the job avoids for a while: its launches, or tasks of its user, have failed there.
        taken_from: ids of the jobs that leave it hosts.
        protected: the hosts that it may take from lower bands later, or None.
        pause: for how many seconds the job is not tried, and why; None if it is tried.
        limit: the limit that its user has reached; None if the job waits for something else.
        waits_for: what the groups that it gets wait for, in words.
        asked: what is known of the slices of its type that are asked for: how many, for how long, why they don't come.
        awaits: what it waits until, before it enters the queue, in words.
        together: the name of its group, which starts as a whole, and of the group's job that finds too few; or None.
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
        """Yield what the job waits for, which job is before it, what is kept for it, and why other groups don't do."""
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
            yield f"it avoids {_some(self.avoided)} for a while: launches or tasks have failed there"
        yield from map(str, shortage.closest)
        if shortage.more:
            yield "…"
        if self.kind is PendingKind.NO_SUCH_WORKERS and not shortage.closest:
            yield self._there_are
        if self.kind is not PendingKind.IN_USE:
            yield from (f"{what!r} excludes {count} hosts" for what, count in shortage.excluded)

    @property
    def keeps(self) -> bool:
        """Whether groups are kept for the job, or the rest of its user's chips."""
        return bool(self.kept) or (self.limit is not None and self.limit.kept)

    @property
    def summary(self) -> str:
        """Why the job waits, in sentences for people who know no constraints and no taints. `str()` has the details."""
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
        if need.group_by not in (None, TPU_NAME) and not self.shortage.groups:
            return f"no host has the attribute {need.group_by}"
        if not need.chips:
            return none
        types = sorted(self.shortage.slice_types.items())
        named = ", ".join(f"{count} × {name}" for name, count in types)
        return f"{none}, which has {named or 'no TPU hosts at all (to try without: SimulatedCluster)'}"


def _some(names: tuple[str, ...], separator: str = ", ") -> str:
    return separator.join((*names[:4], "…") if len(names) > 4 else names)
