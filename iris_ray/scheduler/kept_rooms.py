"""Which groups are kept for a waiting job, so that other jobs can't pass it for ever.

A job that has waited longer than the backfill bound and does not fit gets room: as few groups as it can use, the free
ones first, then those closest to being free. A task that is a gang by itself gets a host. Of jobs that compete, one at
a time has room. The state remembers the room (`Job.kept`). The job keeps its room until it runs, or until the room does
not suit it any more. Other jobs of its band and of lower bands get no host of the room. Jobs of higher bands may take
them, since they come first, and so may a gang that has just lost hosts and returns to the groups that it had.

For such a returning gang, the plan keeps as many groups as the gang had, in this plan only.
"""

from collections.abc import Callable, Collection, Iterable
from itertools import islice

from iris_ray.model.jobs import Gang, Job
from iris_ray.model.options import PriorityBand
from iris_ray.model.workers import Worker
from iris_ray.scheduler.availability import Availability, best_free, buckets_for, num_groups, preferred
from iris_ray.scheduler.fair_queue import Deadlines
from iris_ray.scheduler.remaining_capacity import Plan
from iris_ray.state.events import RoomKeptEvent
from iris_ray.state.fleet import Fleet

Lifted = list[tuple[Worker, str]]
"""Hosts whose room is lifted for the moment, each with the id of the job whose room it is."""


class KeptRooms:
    """The room that jobs have in a plan.

    Args:
        pending: the jobs of the queue.
        fleet: the workers that the plan is made for.
        deadlines: tells which time limits have passed.
        plan: the hosts that the plan has given away.

    Attributes:
        given_up: whether a job has lost its room in this plan, since it runs now or can't run for a while.
    """

    def __init__(self, pending: Iterable[Job], fleet: Fleet, deadlines: Deadlines, plan: Plan) -> None:
        self._fleet = fleet
        self._deadlines = deadlines
        self._plan = plan
        lasting = (job for job in pending if job.kept and deadlines.timed_out(job) is None)  # others end now
        self._before = sorted(lasting, key=lambda job: -job.spec.priority)
        self._rooms: dict[str, tuple[str, ...]] = {}  # job id → node ids
        self._for_now: dict[str, tuple[str, ...]] = {}  # the same of gangs that return
        self._jobs: dict[str, Job] = {}  # those that have, or had, room
        self._taken: set[str] = set()  # ids of jobs of whose room a higher band has taken some
        self.given_up = False
        self._waiting: dict[str, int] = {}  # job id → its tasks that are left, if the plan has placed one in its room

    def begin_band(self, band: PriorityBand, available_to: Callable[[Job], Availability]) -> None:
        """Keep the rooms that jobs of a band, and of the bands before it, have from earlier plans and can still use."""
        while self._before and self._before[-1].spec.priority <= band:
            job = self._before.pop()
            if not self._plan.taken.keys().isdisjoint(job.kept):
                self._taken.add(job.spec.job_id)
            elif self._is_of_use(job, available_to(job)):
                self._rooms[job.spec.job_id] = job.kept
                for node_id in job.kept:
                    self._plan.keep(self._fleet.workers[node_id], job.spec.job_id)
            self._jobs[job.spec.job_id] = job

    @property
    def any_kept(self) -> bool:
        """Whether room is kept for any job."""
        return bool(self._rooms)

    def lift(self, job: Job) -> Lifted:
        """Lift a job's room, so that the job may use it. If its gang returns, lift the rooms in its former groups."""
        if not self._rooms:
            return []
        lifted, workers = self._own(job), self._fleet.workers
        if self._deadlines.is_returning(job):
            assert job.spec.coscheduling is not None
            name_of = self._fleet.grouping(job.spec.coscheduling.group_by).name_of
            others = [other for other, owner in self._jobs.items() if owner.spec.priority >= job.spec.priority]
            kept = ((workers[i], other) for other in others if other != job.spec.job_id for i in self._room(other))
            former = {name for position in self._deadlines.in_turn(job) for name in job.gangs[position].groups}
            lifted += [(worker, other) for worker, other in kept if name_of(worker) in former]
        for worker, _ in lifted:
            self._plan.lift(worker)
        return lifted

    def lift_own(self, job: Job) -> Lifted:
        """Lift a job's room, and what is kept for its gangs that return. Lift no other job's room."""
        job_id = job.spec.job_id
        lifted = self._own(job) + [(self._fleet.workers[i], job_id) for i in self._for_now.get(job_id, ())]
        for worker, _ in lifted:
            self._plan.lift(worker)
        return lifted

    def take(self, job: Job, node_ids: tuple[str, ...]) -> None:
        """Keep these hosts for a job instead of its room. The other hosts of its former room are free."""
        job_id, workers = job.spec.job_id, self._fleet.workers
        for node_id in (*self._rooms.get(job_id, ()), *self._for_now.pop(job_id, ())):
            self._plan.lift(workers[node_id])
        for node_id in node_ids:
            self._plan.keep(workers[node_id], job_id)
        self._jobs[job_id], self._rooms[job_id] = job, node_ids

    def put_back(self, lifted: Lifted) -> None:
        """Keep the lifted hosts again, except for jobs that have lost their room."""
        for worker, job_id in lifted:
            if worker.node_id in (*self._rooms.get(job_id, ()), *self._for_now.get(job_id, ())):
                self._plan.keep(worker, job_id)

    def give_up(self, job: Job, node_ids: Collection[str], takes: bool) -> None:
        """End a job's room, since the job runs or can't run for a while. Its hosts must be lifted.

        Room past the bound is for one gang, wherever that gang then runs. Hosts that a job takes from lower bands may
        be for several of its tasks that are placed one by one. The tasks that are left keep theirs.

        Args:
            job: the job.
            node_ids: the hosts that the job gets; none if it can't run.
            takes: whether lower bands are giving it hosts.
        """
        room = self._rooms.pop(job.spec.job_id, None)
        self.given_up |= room is not None
        if room and node_ids and job.spec.coscheduling is None and (takes or len(room) > 1):
            waiting = self._waiting[job.spec.job_id] = self._waiting.get(job.spec.job_id, len(job.pending)) - 1
            if left := tuple(node_id for node_id in room if node_id not in node_ids)[:waiting]:
                self._rooms[job.spec.job_id] = left

    def keep(self, job: Job, gang: Gang, available: Availability, lifted: Lifted) -> tuple[str, ...]:
        """Keep groups for a gang that did not fit, if it may have room, and return their names.

        Args:
            job: the gang's job.
            gang: the gang.
            available: the groups that its requirement finds.
            lifted: the hosts that `lift` has returned for it.
        """
        before = self._rooms.pop(job.spec.job_id, None) if self._rooms else None
        returning = self._deadlines.is_returning(job)
        if lifted:
            self.put_back(lifted)
        if before is None and not returning and not self._may_have_room(job, gang):
            return ()
        available.catch_up()
        if before is not None:
            names = self._better(job, gang, self._names(job, before), available)
        else:
            names = self._chosen(job, gang, available, returning)
        node_ids = tuple(node_id for name in names for node_id in available.group(name).node_ids)
        for node_id in node_ids:
            self._plan.keep(self._fleet.workers[node_id], job.spec.job_id)
        if node_ids and (before is not None or not returning):
            self._jobs[job.spec.job_id], self._rooms[job.spec.job_id] = job, node_ids
        elif node_ids:
            self._for_now[job.spec.job_id] = node_ids
        return names

    def has_room(self, job: Job) -> bool:
        """Return whether room is kept for a job because it has waited too long."""
        return job.spec.job_id in self._rooms

    def changes(self, placed: Collection[str]) -> list[RoomKeptEvent]:
        """Return the events that tell the state of changed rooms: first the rooms that end, then those that begin.

        Args:
            placed: ids of the jobs that the plan gives hosts. Once the plan is committed, their gangs keep no room. A
                job whose tasks are placed one by one may keep the hosts of its room that it did not get.
        """
        changed = []
        for job_id, job in self._jobs.items():
            node_ids = self._rooms.get(job_id, ())
            is_lost = job_id in placed or job_id in self._taken  # once the plan is committed
            is_partly_lost = job_id in placed and job.spec.coscheduling is None
            if node_ids or job.kept if is_partly_lost else node_ids != (() if is_lost else job.kept):
                changed.append(RoomKeptEvent(job_id, node_ids))
        return sorted(changed, key=lambda event: bool(event.node_ids))

    def _own(self, job: Job) -> Lifted:
        job_id = job.spec.job_id
        return [(self._fleet.workers[node_id], job_id) for node_id in self._room(job_id)]

    def _room(self, job_id: str) -> tuple[str, ...]:
        return self._rooms.get(job_id, ())

    def _may_have_room(self, job: Job, gang: Gang) -> bool:
        # If a job has lost its room in this plan, jobs before this one may be next: the next plan gives them room.
        if job.yields or job.spec.spare_for is not None:
            return False
        return self._deadlines.is_starving(gang) and not self.given_up

    def _is_of_use(self, job: Job, available: Availability) -> bool:
        """Return whether a job could still run in its room, and no job of a higher band has room there.

        A job that has begun to yield waits behind all other jobs, so it has no room.
        """
        if job.yields:
            return False
        if not self._plan.kept.keys().isdisjoint(job.kept):
            return False
        if all(self._deadlines.seconds_paused(job.gangs[position]) > 0 for position in job.pending):
            return False
        names = self._names(job, job.kept)
        if len(names) < num_groups(job)[0] or not all(map(available.knows, names)):
            return False
        buckets = {available.candidates.evaluations[name].bucket for name in names}
        of_any_size = job.spec.whole_groups and len(job.gangs) == 1
        fitting = len(buckets) == 1 if of_any_size else buckets <= {*buckets_for(job, available)}
        return fitting and all(map(available.suits, names))

    def _names(self, job: Job, node_ids: Iterable[str]) -> tuple[str, ...]:
        workers, coscheduling = self._fleet.workers, job.spec.coscheduling
        name_of = self._fleet.grouping(coscheduling.group_by if coscheduling else None).name_of
        return tuple(filter(None, dict.fromkeys(name_of(workers[node_id]) for node_id in node_ids)))

    def _better(self, job: Job, gang: Gang, names: tuple[str, ...], available: Availability) -> tuple[str, ...]:
        """Return the groups of a job's room, with free groups instead of groups in use where there are free ones."""
        free = [name for name in names if available.is_free(name)]
        buckets = {available.candidates.evaluations[name].bucket for name in names}
        more = best_free(len(names), available, sorted(buckets, reverse=True), preferred(job, self._fleet, gang))
        return (*dict.fromkeys([*free, *more, *names]),)[: len(names)]

    def _chosen(self, job: Job, gang: Gang, available: Availability, returning: bool) -> tuple[str, ...]:
        """Return the groups to keep; none if too few suit the job, or if another job has room among them."""
        buckets, wanted = buckets_for(job, available), num_groups(job)
        exist = sum(available.suitable(bucket, later=returning) for bucket in buckets)
        needed = wanted[0]
        if returning:
            needed = max([needed, *(count for count in wanted if count <= min(exist, len(gang.groups)))])
        if exist < needed or not (returning or not available.is_any_kept(buckets)):
            return ()
        names = best_free(needed, available, buckets, preferred(job, self._fleet, gang))
        kept = self._plan.kept.keys()
        others = (n for n in available.closest_to_free(buckets) if kept.isdisjoint(available.group(n).node_ids))
        return (*names, *islice(others, needed - len(names)))
