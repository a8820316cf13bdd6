"""Notices: which hosts are to go, and which gangs are told."""

from dataclasses import replace

from iris_ray.model.jobs import Gang, Job
from iris_ray.model.notices import NOTICE_S, Notice, NoticeKind, is_as_urgent
from iris_ray.state.change import Change
from iris_ray.state.events import MaintenanceCalledOffEvent, WorkerDrainedEvent
from iris_ray.state.fleet import Fleet
from iris_ray.state.instructions import NotifyGang
from iris_ray.state.job_table import JobTable
from iris_ray.state.spares import Spares


class GangNotices:
    """Tells gangs that they are to move. A gang hears of a notice only if it is more urgent than the one it has."""

    def __init__(self, table: JobTable, fleet: Fleet, spares: Spares) -> None:
        self._table = table
        self._fleet = fleet
        self._spares = spares

    def worker_drained(self, event: WorkerDrainedEvent, change: Change) -> None:
        """Mark a worker as draining and tell the gangs on it, once. Replacements are made for their slices."""
        worker = self._fleet.workers.get(event.node_id)
        if worker is None:
            return
        known, deadline = worker.notice, event.deadline
        if deadline is None:
            deadline = change.now + NOTICE_S if known is None else known.deadline
        place = f"{worker.slice_name} {worker.name}" if worker.slice_name else f"host {worker.address}"
        notice = Notice(event.kind, f"{place}: {event.reason}", deadline)
        is_final = event.kind is not NoticeKind.MAINTENANCE
        if is_final and (worker.final is None or not is_as_urgent(worker.final[1], event.deadline)):
            worker.final = event.reason, notice
        if known is not None and is_as_urgent(known, event.deadline):
            return
        self._fleet.put(replace(worker, draining=event.reason, notice=notice))
        for _, attempt in worker.occupants:
            if (found := self._table.live(attempt)) is not None:
                self._spares.look_at(found[0])
                self.tell(*found, notice, change)

    def maintenance_called_off(self, event: MaintenanceCalledOffEvent, change: Change) -> None:
        """Take a maintenance back. If the worker is to go for another reason, its gangs are told of that.

        A gang may know of a maintenance that its worker does not have, from the gang's record.
        """
        worker = self._fleet.workers.get(event.node_id)
        if worker is None:
            return
        if worker.notice is not None and worker.notice.kind is NoticeKind.MAINTENANCE:
            draining, notice = worker.final or (None, None)
            self._fleet.put(replace(worker, draining=draining, notice=notice))
        for _, attempt in worker.occupants:
            if (found := self._table.live(attempt)) is not None:
                self._spares.look_at(found[0])
                self._look_again(*found, change)

    def _look_again(self, job: Job, gang: Gang, change: Change) -> None:
        """Take a gang's maintenance notice back, unless another of its hosts has the same one.

        The gang is told of what is left: of its other hosts, and of an eviction.
        """
        told = gang.notice
        if told is None or told.kind is not NoticeKind.MAINTENANCE:
            return
        hosts = (self._fleet.workers.get(task.node_id or "") for task in gang.tasks)
        left = [worker.notice for worker in hosts if worker is not None and worker.notice is not None]
        if any((notice.kind, notice.deadline) == (told.kind, told.deadline) for notice in left):
            return
        gang.notice = None
        self._table.gang_changed(job, gang)
        if gang.eviction is not None:
            left.append(gang.eviction.notice)
        if left:
            self.tell(job, gang, min(left, key=lambda notice: notice.deadline), change)

    def tell(self, job: Job, gang: Gang, notice: Notice, change: Change) -> None:
        """Tell a gang that it is to move, unless it has a notice as urgent. Spares are not told."""
        known = gang.notice
        if known is not None and known.kind is not NoticeKind.GROWTH and is_as_urgent(known, notice.deadline):
            return
        if job.spec.spare_for is not None:
            return
        gang.notice = notice
        self._table.gang_changed(job, gang)
        change.instructions.notices.append(NotifyGang(job.current_attempt(gang), notice))

    def tell_of_its_hosts(self, job: Job, gang: Gang, change: Change) -> None:
        """Tell a gang of notices that its hosts got before the gang was placed or its record was read."""
        for task in gang.tasks:
            worker = self._fleet.workers.get(task.node_id or "")
            if worker is not None and worker.notice is not None:
                self.tell(job, gang, worker.notice, change)
