"""Why a job waits, as data and as a sentence."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from iris_ray.model.requirement import Requirement
from iris_ray.model.workers import TPU_NAME


class PendingKind(Enum):
    """The kinds of answers to "why is it pending?"."""

    PAUSED = "a launch has just failed"
    NO_SUCH_WORKERS = "nothing in the cluster is like that"
    TOO_FEW = "there are fewer than that in good order"
    IN_USE = "others use them, or come first"


@dataclass(frozen=True, slots=True)
class Obstacle:
    """What keeps one group from being free for the job.

    Attributes:
        group: its name.
        short: how many of its hosts are missing, busy or unfit.
        why: in words.
        users: jobs that use it.
    """

    group: str
    short: int
    why: str
    users: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.group}: {self.why}"


@dataclass(frozen=True, slots=True)
class Shortage:
    """What jobs of one requirement find in the fleet.

    Attributes:
        removed: how many workers each constraint or taint leaves out.
        closest: the groups that come closest, the nearest first; some of them.
        more: how many are not named.
        slice_types: how many slices of which type there are; only if nothing comes close.
    """

    removed: tuple[tuple[str, int], ...]
    closest: tuple[Obstacle, ...]
    more: int
    slice_types: Mapping[str, int]


@dataclass(slots=True)  # frozen, it would take three times as long to make, for each waiting job in each cycle
class PendingReason:
    """Why a job waits.

    Attributes:
        job_id: which.
        reason: the kind of answer.
        requirement: what it asks of workers.
        counts: the numbers of groups that it can use.
        free: groups that it could have now.
        sound: groups that it could have if nobody used them.
        shortage: what it finds; None while it is paused.
        ahead: how many jobs that ask the same are before it in the queue.
        first_ahead: the first of them, or None.
        kept: groups that nobody else gets any more, because the job has waited long enough.
        pause: for how many seconds it is not tried, and why; None if it is.
    """

    job_id: str
    reason: PendingKind
    requirement: Requirement
    counts: tuple[int, ...]
    free: int = 0
    sound: int = 0
    shortage: Shortage | None = None
    ahead: int = 0
    first_ahead: str | None = None
    kept: tuple[str, ...] = ()
    pause: tuple[float, str] | None = None

    def __str__(self) -> str:
        if self.pause is not None:
            return f"pausing {self.pause[0]:.0f} s before it is tried again: {self.pause[1]}"
        assert self.shortage is not None
        found = self.shortage
        parts = [f"waiting for {self._wish}; {self.free} free"]
        if self.ahead:
            jobs = "1 job" if self.ahead == 1 else f"{self.ahead} jobs"
            parts.append(f"behind {jobs} that ask the same, first {self.first_ahead}")
        if self.kept:
            parts.append(f"{', '.join(self.kept[:4])}{', …' if len(self.kept) > 4 else ''} kept for it")
        parts += map(str, found.closest)
        if found.more:
            parts.append("…")
        if self.reason is PendingKind.NO_SUCH_WORKERS and not found.closest:
            parts.append(f"none like that in the cluster, which has {self._there_are}")
        if self.reason is not PendingKind.IN_USE:
            parts += [f"{what!r} leaves out {count} hosts" for what, count in found.removed]
        return "; ".join(parts)

    @property
    def _wish(self) -> str:
        need = self.requirement
        what = {None: "host", TPU_NAME: "slice"}.get(need.group_by, f"group by {need.group_by}")
        conditions = " and ".join(map(str, need.constraints)) or "any"
        plural = "" if self.counts == (1,) else "s"
        return f"{' or '.join(map(str, self.counts))} {what}{plural} ({conditions})"

    @property
    def _there_are(self) -> str:
        assert self.shortage is not None
        types = sorted(self.shortage.slice_types.items())
        named = ", ".join(f"{count} × {name}" for name, count in types)
        return named or "no TPU hosts at all (to try without: SimulatedCluster)"
