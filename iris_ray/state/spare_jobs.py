"""Makes and drops the jobs that hold spare slices, as gangs need them."""

import math

from iris_ray.model.job_spec import JobSpec, SparePurpose
from iris_ray.model.jobs import Gang, Job
from iris_ray.model.notices import GROWTH_NOTICE_S, Notice, NoticeKind
from iris_ray.state.allocations import Allocations
from iris_ray.state.change import Change
from iris_ray.state.fleet import Fleet
from iris_ray.state.gang_notices import GangNotices
from iris_ray.state.instructions import DropSpare
from iris_ray.state.job_table import JobTable
from iris_ray.state.spares import Spares


class SpareJobs:
    """Makes and drops spare jobs as `Spares` decides."""

    def __init__(
        self, table: JobTable, fleet: Fleet, allocations: Allocations, spares: Spares, notices: GangNotices
    ) -> None:
        self._table = table
        self._fleet = fleet
        self._allocations = allocations
        self._spares = spares
        self._notices = notices

    def look_at(self, job: Job) -> None:
        """Note that a job has changed and may need other spares."""
        self._spares.look_at(job)

    def restored(self, spare: Job) -> None:
        """Note a spare that an earlier Controller made."""
        self._spares.restored(spare)

    def placed_again(self, job: Job) -> None:
        """Note a job of an earlier Controller whose gang has its hosts."""
        self._spares.gang_runs(job)

    def gang_runs(self, job: Job, gang: Gang, change: Change) -> None:
        """Note that all tasks of a gang run. If it holds room for another gang to grow, that gang is told to move."""
        self._spares.gang_runs(job)
        spare_for = job.spec.spare_for
        if spare_for is not None and spare_for.purpose is SparePurpose.GROWTH:
            parent = self._table.jobs[spare_for.job_id]
            have = len(parent.gang.groups)
            reason = f"{have + len(gang.groups)} slices are there for it instead of {have}"
            notice = Notice(NoticeKind.GROWTH, reason, change.now + GROWTH_NOTICE_S)
            self._notices.tell(parent, parent.gang, notice, change)

    def give_back(self, spare_id: str, change: Change) -> None:
        """Free what a spare holds, for a job that waits. Its parent gets another one, which waits behind all jobs."""
        spare = self._table.jobs.get(spare_id)
        if spare is not None and spare.spec.spare_for is not None and spare.gang.placed:
            self._spares.look_at(spare)
            self._spares.forget(spare)
            self._drop(spare, change)

    def settle(self, change: Change) -> None:
        """Make the spares that jobs need now and drop the others. Take growth notices back where the room is gone."""
        if self._spares.are_settled:
            return
        for job, superfluous, missing in self._spares.changes(self._table.jobs, self._fleet.workers, change.now):
            for spare in superfluous:
                self._drop(spare, change)
            for spec in missing:
                self._make(spec, change)
            if job is not None and job.gang.is_to_grow and not self._spares.room_is_ready(job, self._table.jobs):
                job.gang.notice = None  # its pool asks before it moves
                self._table.gang_changed(job, job.gang)

    def evict(self, spare: Job, change: Change) -> None:
        """Drop a spare whose hosts a higher band takes. Its gang gets another one, which waits in the queue."""
        self._drop(spare, change)
        self._spares.look_at(spare)

    def _make(self, spec: JobSpec, change: Change) -> None:
        assert spec.spare_for is not None
        self._table.submit(spec, change.now)
        self._table.changed(spec.spare_for.job_id)  # it counts them
        spare = self._table.jobs[spec.job_id]
        spare.started = True  # like its job; so it is never given up as unschedulable
        if spec.spare_for.purpose is SparePurpose.REPLACEMENT:
            spare.gang.returning_until = math.inf

    def _drop(self, spare: Job, change: Change) -> None:
        """Free what a spare holds at once, since no user code runs there. Its owner keeps the slices warm."""
        job_id = spare.spec.job_id
        if spare.gang.placed:
            change.instructions.dropped.append(DropSpare(job_id, spare.spec.owner))
        for attempt in list(self._allocations.of(job_id)):
            self._allocations.end(spare, attempt)
        self._table.remove(job_id)
