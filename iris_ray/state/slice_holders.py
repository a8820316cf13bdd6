"""Slice holders: which owner keeps actors on which slice, busy or warm."""

from iris_ray.model.jobs import Job
from iris_ray.state.change import Change
from iris_ray.state.fleet import Fleet
from iris_ray.state.instructions import ReclaimSlice
from iris_ray.state.job_table import JobTable


class SliceHolders:
    """Keeps `Fleet.holders` as jobs take slices and owners release them."""

    def __init__(self, table: JobTable, fleet: Fleet) -> None:
        self._table = table
        self._fleet = fleet

    def take(self, job: Job, node_ids: tuple[str, ...], change: Change) -> None:
        """Make the job's owner the holder of these hosts' slices, or tell the present holder to release them."""
        if not job.requirement.chips:
            return
        slices = dict.fromkeys(self._fleet.workers[node_id].slice_name for node_id in node_ids)
        for name in filter(None, slices):
            holder = self._fleet.holders.get(name)
            if holder is None:
                self._fleet.hold(name, job.spec.owner)
            elif holder != job.spec.owner:  # it holds the slice until it has released it
                change.instructions.reclaim.append(ReclaimSlice(name, holder))

    def held(self, slice_name: str, owner: str) -> None:
        """Record that an owner holds a slice, unless another owner does."""
        if slice_name not in self._fleet.holders:
            self._fleet.hold(slice_name, owner)

    def released(self, slice_name: str, owner: str) -> None:
        """Record that an owner has released a slice. If a job has been placed there since, its owner holds it now."""
        if self._fleet.holders.get(slice_name) != owner:
            return
        next_owner = None
        for worker in self._fleet.slice_workers(slice_name):
            for _, attempt in worker.occupants:
                job = self._table.jobs[attempt.job_id]
                gang = job.gangs[attempt.gang]
                if gang.attempt == attempt.number and gang.placed and job.requirement.chips:
                    next_owner = job.spec.owner
        self._fleet.hold(slice_name, next_owner)

    def released_all(self, owner: str) -> None:
        """Record that an owner has released all its slices."""
        for name in [name for name, holder in self._fleet.holders.items() if holder == owner]:
            self.released(name, owner)
