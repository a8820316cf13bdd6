"""The memory of a provisioner: failures and backoff, unconfirmed requests, how long conditions have held. Pure."""

from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass, field

from iris_ray.capacity.reservations import GONE_S, TAKEN_AFTER_S

FIRST_BACKOFF_S, LONGEST_BACKOFF_S = 30.0, 1800.0
_OF_CLUSTER = frozenset({"absent", "idle", "unneeded", "unused"})
"""The conditions that may change and change back between two looks."""
NOT_LEFT_S = 86_400.0
"""How long no job is asked to leave a slice whose deletion the provider has refused."""


@dataclass(slots=True)
class SourceHistory:
    """The failures in a row of one thing, such as one type at one source.

    Attributes:
        failures: how many.
        pause_s: how long the last pause is.
        not_before: when it may be tried again; times are of the clock of `plan`.
        last_failure: a sentence.
    """

    failures: int = 0
    pause_s: float = 0.0
    not_before: float = 0.0
    last_failure: str = ""

    def failed(self, now: float, why: str, at_least_s: float = 0.0) -> None:
        """Record a failure, and pause: 30 s after the first one, then 60, 120, … up to half an hour.

        The slices of a gang fail together: what was requested before the pause, and fails in it, does not count again.
        """
        self.last_failure = why
        if now < self.not_before:
            self.not_before = max(self.not_before, now + at_least_s)
            return
        pause_s = min(LONGEST_BACKOFF_S, FIRST_BACKOFF_S * 2 ** min(self.failures, 20))
        self.failures += 1
        self.pause_s = max(pause_s, at_least_s)
        self.not_before = now + self.pause_s


@dataclass(frozen=True, slots=True)
class Unconfirmed:
    """A slice that was requested and is not listed yet: the key of its source, and when it was first requested."""

    source: str
    asked_at: float

    @property
    def location(self) -> str:
        """The zone of its source."""
        return self.source.partition("/reservations/")[0]


@dataclass(frozen=True, slots=True)
class Promise:
    """Slices for which chips were being freed: the key of their source, how many, and when that was last planned."""

    source: str
    slices: int
    planned_at: float


@dataclass(slots=True)
class ProvisioningHistory:
    """The memory of a provisioner from one plan to the next. If it is lost, timers begin anew.

    Attributes:
        unconfirmed: the requested slices that are not listed yet, by name.
        leaving: the slices whose deletion the provider has accepted, or may have accepted (false). It may list them
            unchanged for a while.
        promises: the slices that gangs get from freed chips, by job id.
        undeletable: the slices whose deletion it has refused, by name.
        evictions: by job id, when jobs of lower bands were asked to leave slices for it; and the pause after that.
        lacking: by job id and source, since when chips in use would complete it, or when and why they were refused.
        ask_again_s: the time after which a refusal is asked about again: so long that each job has its turn.
    """

    unconfirmed: dict[str, Unconfirmed] = field(default_factory=dict)
    leaving: dict[str, bool] = field(default_factory=dict)
    promises: dict[str, Promise] = field(default_factory=dict)
    undeletable: dict[str, SourceHistory] = field(default_factory=dict)
    evictions: dict[str, SourceHistory] = field(default_factory=dict)
    lacking: dict[tuple[str, str], tuple[float, str]] = field(default_factory=dict)
    ask_again_s: float = TAKEN_AFTER_S
    _sources: defaultdict[tuple[str, str], SourceHistory] = field(default_factory=lambda: defaultdict(SourceHistory))
    _since: dict[tuple[str, str], float] = field(default_factory=dict)
    _counted: set[str] = field(default_factory=set)
    _joined: set[str] = field(default_factory=set)

    def interrupted(self) -> None:
        """Forget for how long conditions of the cluster have held, since nobody has looked for a while.

        A slice that was idle before, and is idle now, may have run jobs in between.
        """
        self._since = {key: since for key, since in self._since.items() if key[0] not in _OF_CLUSTER}
        self.lacking.clear()

    def at(self, source: str, tpu_type: str) -> SourceHistory:
        """Return the failures of a type at a source: one that is out of v6e-256 may well have v4-8."""
        return self._sources[source, tpu_type]

    def refused(self, name: str, source: str, tpu_type: str, now: float, why: str) -> None:
        """Record that the provider refuses the slice of that name; it is not requested again."""
        self.unconfirmed.pop(name, None)
        self.at(source, tpu_type).failed(now, why)

    def failed_once(self, name: str, source: str, tpu_type: str, now: float, why: str, at_least_s: float = 0.0) -> None:
        """Record the failure of a slice, unless it is recorded already."""
        if name not in self._counted:
            self._counted.add(name)
            self.at(source, tpu_type).failed(now, why, at_least_s)

    def has_joined(self, name: str, source: str, tpu_type: str) -> None:
        """Record that all hosts of a slice are in the cluster. The first such record ends its type's failures there."""
        if name not in self._joined:
            self._joined.add(name)
            self._sources.pop((source, tpu_type), None)

    def is_leaving(self, name: str, is_whole: bool, now: float) -> bool:
        """Return whether a slice is being deleted. If nobody knows, it is as soon as it is not whole."""
        is_known = self.leaving.get(name, False) or not is_whole
        if self.lasting("leaving", name, name in self.leaving, now) >= GONE_S or not is_known:
            self.leaving.pop(name, None)
        return name in self.leaving

    def promise(self, job_id: str, source: str, slices: int, now: float) -> None:
        """Record that a job gets the chips of some slices, in addition to those that this plan has promised it."""
        before = self.promises.get(job_id)
        self.promises[job_id] = Promise(source, slices + (before.slices if before else 0), now)

    def forget_promises_but(self, jobs: Collection[str], now: float) -> None:
        """Forget the promises of jobs that no longer wait, and those that were last planned long ago.

        Forget also since when jobs that no longer wait have lacked slices in use.
        """
        self.evictions = {
            job_id: one for job_id, one in self.evictions.items() if job_id in jobs or now < one.not_before + GONE_S
        }
        self.lacking = {key: one for key, one in self.lacking.items() if key[0] in jobs}
        self.promises = {
            job_id: one for job_id, one in self.promises.items() if job_id in jobs and now - one.planned_at < GONE_S
        }

    def evicted(self, job_id: str, now: float) -> None:
        """Record that jobs were asked to leave slices for a job: again not before a pause, in case it was in vain."""
        self.evictions.setdefault(job_id, SourceHistory()).failed(now, "jobs were asked to leave slices for it")

    def evicts(self, job_id: str, now: float) -> None:
        """Record that slices which jobs leave are reserved for a job. The pause begins when they no longer are."""
        if (known := self.evictions.get(job_id)) is None:
            self.evicted(job_id, now)  # by a provisioner before this one
        else:
            known.not_before = now + known.pause_s

    def not_left(self, job_id: str, source: str, now: float, why: str) -> None:
        """Record why no job has left slices of a source for a job."""
        self.lacking[job_id, source] = now, why

    def may_evict(self, job_id: str, source: str, now: float) -> bool:
        """Return whether jobs may be asked to leave slices of a source for a job.

        It must have lacked them for a while, which begins anew when no job has left any.
        """
        pauses = job_id in self.evictions and now < self.evictions[job_id].not_before
        since, refusal = self.lacking.setdefault((job_id, source), (now, ""))
        return now - since >= (self.ask_again_s if refusal else TAKEN_AFTER_S) and not pauses

    def not_deleted(self, name: str, now: float, why: str) -> None:
        """Record that the provider has refused to delete a slice."""
        self.undeletable.setdefault(name, SourceHistory()).failed(now, why)

    def may_delete(self, name: str, now: float) -> bool:
        """Return whether the provider may be asked to delete a slice."""
        return name not in self.undeletable or now >= self.undeletable[name].not_before

    def may_be_left(self, name: str, now: float) -> bool:
        """Return whether jobs may be asked to leave a slice, so that it can be deleted."""
        past = self.undeletable.get(name)
        return past is None or now >= past.not_before - past.pause_s + NOT_LEFT_S

    def once_joined(self, name: str) -> bool:
        """Return whether all hosts of a slice were in the cluster at some time."""
        return name in self._joined

    def lasting(self, what: str, name: str, holds: bool, now: float) -> float:
        """Return for how many seconds a condition has held at every look; 0 if it does not hold now."""
        if not holds:
            self._since.pop((what, name), None)
            return 0.0
        return now - self._since.setdefault((what, name), now)

    def forget_all_but(self, names: Collection[str]) -> None:
        """Forget the slices that are gone."""
        kept = {*names}
        self._since = {key: since for key, since in self._since.items() if key[1] in kept}
        self._counted &= kept
        self._joined &= kept
        self.leaving = {name: accepted for name, accepted in self.leaving.items() if name in kept}
        self.undeletable = {name: one for name, one in self.undeletable.items() if name in kept}
