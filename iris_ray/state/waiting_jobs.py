"""The jobs that wait for hosts, by kind: in a long queue, most jobs have the same outcome as others of their kind."""

from collections import deque
from collections.abc import Collection, Container, Iterable, Iterator, Mapping
from operator import attrgetter

from iris_ray.model.jobs import Job, Kind

Run = deque[Job]
"""The plain jobs of one kind by age, of which the scheduler tries only as many as necessary; or one other job."""

_number = attrgetter("number")


class WaitingJobs(Collection[Job]):
    """The jobs with waiting gangs, with plain jobs (`Job.is_plain`) indexed by kind.

    Attributes:
        by_kind: kind → its plain jobs by id, oldest first.
        others: all other jobs by id.
    """

    def __init__(self, jobs: Iterable[Job] = ()) -> None:
        self.by_kind: dict[Kind, dict[str, Job]] = {}
        self.others: dict[str, Job] = {}
        self._kinds: dict[str, Kind] = {}  # job id → the kind of a plain job
        self._uneven: set[Kind] = set()  # kinds in which a younger job may have waited longer, since clocks may jump
        for job in sorted(jobs, key=_number):
            self.sort_in(job)

    def sort_in(self, job: Job) -> None:
        """Add a job, or move it between ``by_kind`` and ``others``."""
        job_id = job.spec.job_id
        if not job.is_plain:
            self.discard(job_id)
            self.others[job_id] = job
            return
        if job_id in self._kinds:
            return
        self.others.pop(job_id, None)
        self._kinds[job_id] = kind = job.kind
        of_kind = self.by_kind.setdefault(kind, {})
        last = next(reversed(of_kind.values()), None)
        of_kind[job_id] = job
        if last is not None and last.number > job.number:
            self.by_kind[kind] = {one.spec.job_id: one for one in sorted(of_kind.values(), key=_number)}
            self._uneven.add(kind)
        elif last is not None and last.gangs[0].waiting_since > job.gangs[0].waiting_since:
            self._uneven.add(kind)

    def discard(self, job_id: str) -> None:
        """Remove a job, if it is present."""
        self.others.pop(job_id, None)
        if (kind := self._kinds.pop(job_id, None)) is not None:
            del self.by_kind[kind][job_id]
            if not self.by_kind[kind]:
                del self.by_kind[kind]
                self._uneven.discard(kind)

    def without(self, kinds: Container[Kind]) -> "WaitingJobs":
        """Return the jobs except the plain ones of some kinds. The result is valid only until these jobs change."""
        left = WaitingJobs()
        left.by_kind = {kind: jobs for kind, jobs in self.by_kind.items() if kind not in kinds}
        left.others, left._kinds, left._uneven = self.others, self._kinds, self._uneven
        return left

    def runs(self) -> Iterator[Run]:
        """Iterate over all jobs in runs. In a run, no job has waited longer than the first."""
        for kind, jobs in self.by_kind.items():
            if kind in self._uneven:
                yield from _even_runs(jobs)
            else:
                yield deque(jobs.values())
        for job in self.others.values():
            yield deque((job,))

    def __iter__(self) -> Iterator[Job]:
        """Iterate over all jobs by age."""
        plain = (job for jobs in self.by_kind.values() for job in jobs.values())
        return iter(sorted((*plain, *self.others.values()), key=_number))

    def __len__(self) -> int:
        return sum(map(len, self.by_kind.values())) + len(self.others)

    def __bool__(self) -> bool:
        return bool(self.by_kind or self.others)

    def __contains__(self, job: object) -> bool:
        return isinstance(job, Job) and (
            job.spec.job_id in self.others or job.spec.job_id in self.by_kind.get(job.kind, ())
        )

    def check(self) -> None:
        """Raise AssertionError if a job is misplaced. For tests."""
        fresh = WaitingJobs(self)
        assert fresh.others.keys() == self.others.keys(), "waiting jobs that are not plain are off"
        assert fresh.by_kind.keys() == self.by_kind.keys(), "kinds of waiting jobs are off"
        for kind, jobs in fresh.by_kind.items():
            assert [*jobs] == [*self.by_kind[kind]], f"waiting jobs of a kind are off: {[*jobs]}"
        assert fresh._uneven <= self._uneven, "a younger job has waited longer"


def _even_runs(jobs: Mapping[str, Job]) -> Iterator[Run]:
    run: Run = deque()
    for job in jobs.values():
        if run and run[-1].gangs[0].waiting_since > job.gangs[0].waiting_since:
            yield run
            run = deque()
        run.append(job)
    if run:
        yield run
