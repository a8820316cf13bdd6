"""The pending reasons of all jobs, recorded individually or at once for many jobs that wait for the same reason."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

from iris_ray.model.jobs import Job, Kind
from iris_ray.scheduler.pending_reason import PendingReason


@dataclass(slots=True)
class _SharedReason:
    """Plain jobs of a kind that wait for the same reason as an earlier job.

    Attributes:
        like: the reason of the earlier job.
        jobs: the jobs, oldest first.
        ahead: number of jobs with the same requirement before the first of ``jobs``; None if these are not counted.
        first_ahead: id of the first of these, or None.
        places: the index of each job in ``jobs``, filled when a reason is first read.
        read: the reasons made so far.
    """

    like: PendingReason
    jobs: Sequence[Job]
    ahead: int | None
    first_ahead: str | None
    places: dict[str, int] = field(default_factory=dict)
    read: dict[str, PendingReason] = field(default_factory=dict)

    def reason(self, job_id: str) -> PendingReason:
        """Return the reason of one of the jobs."""
        found = self.read.get(job_id)
        if found is None:
            found = self.read[job_id] = self._make(job_id)
        return found

    def _make(self, job_id: str) -> PendingReason:
        if self.ahead is None:
            return replace(self.like, job_id=job_id)
        if not self.places:
            self.places = {job.spec.job_id: place for place, job in enumerate(self.jobs)}
        ahead = self.ahead + self.places[job_id]
        return replace(self.like, job_id=job_id, ahead=ahead, first_ahead=self.first_ahead)


class Reasons(Mapping[str, PendingReason]):
    """Pending reasons by job id. Reasons that many jobs share are made only when they are read.

    Args:
        reasons: the initial reasons.
        beside: a fallback for jobs without a reason here.
    """

    def __init__(
        self, reasons: Mapping[str, PendingReason] | None = None, beside: Mapping[str, PendingReason] | None = None
    ) -> None:
        self._made: dict[str, PendingReason | _SharedReason] = {}  # these take precedence over `_alike`
        self._of_kind: dict[Kind, list[str]] = {}  # ids of the plain jobs in `_made`
        self._alike: dict[Kind, list[_SharedReason]] = {}
        self._index: dict[str, _SharedReason] | None = None  # of `_alike` by job id, made when first read
        self._beside = {} if beside is None else beside
        if reasons is not None:
            self.replace(reasons)

    def __getitem__(self, job_id: str) -> PendingReason:
        found = self._found(job_id)
        if found is None:
            return self._beside[job_id]
        return found.reason(job_id) if isinstance(found, _SharedReason) else found

    def __contains__(self, job_id: object) -> bool:
        return job_id in self._made or job_id in self._indexed() or job_id in self._beside

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys(chain(self._made, self._indexed(), self._beside)))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __bool__(self) -> bool:
        return bool(self._made or self._alike or self._beside)

    def note(self, job: Job, reason: PendingReason) -> None:
        """Add the reason of one job."""
        job_id = job.spec.job_id
        self._made[job_id] = reason
        if job.is_plain:
            self._of_kind.setdefault(job.kind, []).append(job_id)

    def note_shared(
        self, jobs: Sequence[Job], like: PendingReason, ahead: int | None = None, first_ahead: str | None = None
    ) -> None:
        """Add plain jobs of a kind that wait for the same reason as an earlier one; see `_SharedReason`."""
        self._alike.setdefault(jobs[0].kind, []).append(_SharedReason(like, jobs, ahead, first_ahead))
        self._index = None

    def replace(self, reasons: Mapping[str, PendingReason]) -> None:
        """Add reasons, replacing existing ones of the same jobs."""
        if isinstance(reasons, Reasons) and not (self._made or self._alike):
            self._made = {**reasons._made}
            self._of_kind = {kind: [*job_ids] for kind, job_ids in reasons._of_kind.items()}
            self._alike = {kind: [*alike] for kind, alike in reasons._alike.items()}
            self._index = reasons._index
        elif isinstance(reasons, Reasons):
            self._made.update(reasons._indexed())
            self._made.update(reasons._made)
        else:
            self._made.update(reasons)

    def keep(self, reasons: "Reasons", job_ids: Iterable[str]) -> None:
        """Add the reasons of these jobs from other reasons."""
        self._made.update((job_id, found) for job_id in job_ids if (found := reasons._found(job_id)) is not None)

    def take(self, reasons: "Reasons", kind: Kind) -> None:
        """Move the reasons of a kind's plain jobs here from other reasons."""
        noted = [job_id for job_id in dict.fromkeys(reasons._of_kind.pop(kind, ())) if job_id in reasons._made]
        self._made.update((job_id, reasons._made.pop(job_id)) for job_id in noted)
        self._of_kind.setdefault(kind, []).extend(noted)
        if (alike := reasons._alike.pop(kind, None)) is not None:
            self._alike.setdefault(kind, []).extend(alike)
            self._index = reasons._index = None

    def apart(self) -> Iterator[PendingReason]:
        """Iterate over the individually recorded reasons."""
        return (reason for reason in self._made.values() if isinstance(reason, PendingReason))

    def is_shared(self, job_id: str) -> bool:
        """Return whether a job shares the reason of an earlier job of its kind."""
        return isinstance(self._found(job_id), _SharedReason)

    def _found(self, job_id: str) -> PendingReason | _SharedReason | None:
        return self._made.get(job_id) or self._indexed().get(job_id)

    def _indexed(self) -> Mapping[str, _SharedReason]:
        if self._index is None:
            self._index = {}
            for alike in chain.from_iterable(self._alike.values()):
                self._index.update(dict.fromkeys((job.spec.job_id for job in alike.jobs), alike))
        return self._index
