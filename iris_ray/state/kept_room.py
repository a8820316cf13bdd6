"""Room that is kept for jobs that have waited too long: hosts that no other job of their bands gets until they run."""

from collections.abc import Collection, Mapping

from iris_ray.errors import IllegalTransitionError
from iris_ray.model.jobs import Job
from iris_ray.state.job_table import JobTable


class KeptRoom:
    """Keeps `Job.kept`, and which host is kept for which job.

    Attributes:
        version: counts the changes.
    """

    def __init__(self, table: JobTable) -> None:
        self._table = table
        self.version = 0
        self._kept: dict[str, str] = {}  # node_id → job id

    def whose(self, node_id: str | None) -> str | None:
        """Return the id of the job that a host is kept for, or None."""
        return self._kept.get(node_id or "")

    def keep(self, job_id: str, node_ids: tuple[str, ...], workers: Collection[str]) -> None:
        """Keep these hosts for a job and no others; none of them: keep nothing for it. Whoever had them loses all.

        Raises:
            IllegalTransitionError: the job does not wait, or a host is gone.
        """
        job = self._table.known(job_id)
        if node_ids and not job.pending:
            raise IllegalTransitionError(f"job {job_id} does not wait; nothing is kept for it")
        if gone := [node_id for node_id in node_ids if node_id not in workers]:
            raise IllegalTransitionError(f"job {job_id}: {gone} are gone and can't be kept for it")
        if job.kept == node_ids:
            return
        self._drop(job)
        for node_id in node_ids:
            self.release_host(node_id)
        self._restore(job, node_ids)
        self._table.changed(job_id)

    def taken_by(self, job: Job, node_ids: Collection[str]) -> None:
        """Note that a job gets hosts: it needs that room no more, and jobs of lower bands lose room that it takes.

        A job of several tasks that are placed one by one may have room for others of them. If the job leaves nothing
        of its room to others, the next plan may wait until something happens.
        """
        left = () if job.spec.coscheduling else tuple(node_id for node_id in job.kept if node_id not in node_ids)
        left = left[: len(job.pending)]
        if left != job.kept:
            if not set(job.kept) <= {*left, *node_ids}:
                self._table.queue_changed(job.spec.job_id)
            self._drop(job)
            self._restore(job, left)
        for node_id in node_ids if self._kept else ():
            other = self._table.jobs.get(self._kept.get(node_id, ""))
            if other is not None and other.spec.priority > job.spec.priority:
                self.release(other)

    def release(self, job: Job) -> None:
        """Keep nothing for a job any more."""
        if job.kept:
            self._drop(job)
            self._table.queue_changed(job.spec.job_id)

    def release_host(self, node_id: str) -> None:
        """Note that a host is gone, or goes to somebody else: the job that it was kept for needs other room."""
        if (job_id := self._kept.get(node_id)) is not None:
            self.release(self._table.jobs[job_id])

    def restored(self, job: Job, workers: Collection[str]) -> None:
        """Note what an earlier Controller kept for a job, if all of it is still there."""
        kept, job.kept = job.kept, ()
        if job.pending and not job.state.finished and all(i in workers and i not in self._kept for i in kept):
            self._restore(job, kept)

    def _drop(self, job: Job) -> None:
        self.version += 1
        for node_id in job.kept:
            del self._kept[node_id]
        job.kept = ()

    def _restore(self, job: Job, node_ids: tuple[str, ...]) -> None:
        self.version += 1
        job.kept = node_ids
        self._kept.update(dict.fromkeys(node_ids, job.spec.job_id))

    def check(self, workers: Mapping[str, object]) -> None:
        """Raise AssertionError if this disagrees with the jobs and hosts. For tests."""
        jobs = self._table.jobs
        assert self._kept == {node_id: job_id for job_id, job in jobs.items() for node_id in job.kept}
        assert sum(len(job.kept) for job in jobs.values()) == len(self._kept), "a host is kept for two jobs"
        for node_id, job_id in self._kept.items():
            assert node_id in workers, f"{node_id} is kept for {job_id} and gone"
            assert jobs[job_id].pending, f"{node_id} is kept for {job_id}, which does not wait"
