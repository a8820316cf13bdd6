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
    LIMITED = "its user has reached a limit"
    NO_SUCH_WORKERS = "no group in the cluster suits the job"
    TOO_FEW = "too few groups suit the job"
    IN_USE = "other jobs use the groups or come first in the queue"


@dataclass(frozen=True, slots=True)
class Obstacle:
    """What keeps one group from being free for the job.

    Attributes:
        group: its name.
        hosts_missing: how many more hosts it needs: those that are missing, in use or unfit.
        why: the reason in words.
        used_by: ids of the jobs that use it.
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
        more: how many such groups are not named.
        slice_types: TPU type → how many slices the cluster has; empty if any group comes close.
        groups: how many groups there are of the kind that the jobs ask for, whatever else they are like.
    """

    excluded: tuple[tuple[str, int], ...] = ()
    closest: tuple[Obstacle, ...] = ()
    more: int = 0
    slice_types: Mapping[str, int] = field(default_factory=dict)
    groups: int = 0


@dataclass(frozen=True, slots=True)
class ReachedLimit:
    """The limit of its user that keeps a job waiting.

    Attributes:
        user, band: whose limit.
        what: "chips" or "running jobs".
        limit: how many the user may have.
        held: how many the user has, with what the plan has handed out.
        needed: how many more the job needs at least.
        before: the job of the same user that has waited too long, and for which the rest is kept; or None.
        kept: whether it is this job for which the rest is kept.
    """

    user: str
    band: PriorityBand
    what: str
    limit: float
    held: float
    needed: float
    before: str | None = None
    kept: bool = False

    def __str__(self) -> str:
        rest = f"; the rest is kept for {self.before or 'it'}" if self.before or self.kept else ""
        return (
            f"waiting for the limit of {self.user} in band {self.band.name.lower()}: {self.limit:,g} {self.what}, of"
            f" which {self.held:,g} are taken, and it needs {self.needed:,g}{rest}; iris-ray limit shows all"
        )

    @property
    def summary(self) -> str:
        """The same, in sentences."""
        rest = f" The rest is kept for {self.before or 'it'}." if self.before or self.kept else ""
        return (
            f"{self.user} may have {self.limit:,g} {self.what} in band {self.band.name.lower()} and has {self.held:,g}."
            f" This job needs {self.needed:,g} more.{rest}"
        )


@dataclass(frozen=True, slots=True)
class Protected:
    """What a job may take from lower bands once that has run for the minimum time of its band.

    Attributes:
        job_ids: whose hosts.
        seconds: until then.
    """

    job_ids: tuple[str, ...]
    seconds: float

    def __str__(self) -> str:
        when = f"{self.seconds:.0f} s" if self.seconds < 90 else f"{math.ceil(self.seconds / 60)} min"
        return f"may take the hosts of {_some(self.job_ids)} in {when}"


@dataclass(slots=True)  # frozen, it would take longer to make, for each waiting job in each cycle
class PendingReason:
    """Why a job waits.

    Attributes:
        job_id: the job.
        kind: the kind of answer.
        requirement: what it asks of workers.
        num_groups: the numbers of groups that it can use, ascending.
        free: how many groups are free for it.
        suitable: how many groups would be free for it if no task used them.
        shortage: what is in the way; None while it is paused, waits for a limit, or was not looked at.
        ahead: how many jobs with the same requirement are before it in the queue.
        first_ahead: the id of the first of them, or None.
        kept: names of the groups that are kept for it, because it has waited long, has just lost its hosts, or takes
            them from lower bands.
        avoided: names of groups that it avoids for a while: launches of it, or tasks of its user, have failed there.
        taken_from: ids of the jobs of lower bands that give it hosts.
        protected: what it may take from lower bands later; None if nothing, or if it need not.
        pause: for how many seconds it is not tried, and why; None if it is tried.
        limit: the limit that its user has reached; None if it waits for something else.
        asked_for: how many slices of its type Ray's autoscaler is asked for.
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
    asked_for: int = 0

    def __str__(self) -> str:
        if self.pause is not None:
            return f"pausing {self.pause[0]:.0f} s before it is tried again: {self.pause[1]}"
        if self.kind is PendingKind.NOT_LOOKED_AT:
            return f"{self.kind.value}: its turn comes when fewer of them wait"
        if self.limit is not None:
            return str(self.limit)
        assert self.shortage is not None
        return "; ".join(self._parts(self.shortage))

    def _parts(self, shortage: Shortage) -> Iterator[str]:
        """Yield what the job waits for, who goes before it, what is done for it, and why others will not do."""
        yield f"waiting for {self._wish}; {self.free} free"
        if self.asked_for:
            yield f"Ray's autoscaler is asked for {self.asked_for} more"
        if self.ahead:
            jobs = "1 job" if self.ahead == 1 else f"{self.ahead} jobs"
            yield f"behind {jobs} with the same requirement, the first is {self.first_ahead}"
        if self.kept:
            yield f"{_some(self.kept)} kept for it"
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
        """Whether anything is kept for the job, groups or what its user may have."""
        return bool(self.kept) or (self.limit is not None and self.limit.kept)

    @property
    def summary(self) -> str:
        """Why it waits, in sentences for people who know no constraints and no taints. `str()` has the details."""
        if self.pause is not None:
            return f"It pauses for {self.pause[0]:.0f} s before it is tried again: {self.pause[1]}."
        if self.limit is not None:
            return self.limit.summary
        if self.kind is PendingKind.NOT_LOOKED_AT:
            return "Jobs with too many different requirements wait before it. It has its turn when fewer of them wait."
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


def _some(names: tuple[str, ...]) -> str:
    return f"{', '.join(names[:4])}{', …' if len(names) > 4 else ''}"
