"""Promises: hosts reserved for a waiting job, so that other jobs can't pass it for ever and no eviction is in vain.

Two kinds of jobs have a promise, which the state remembers (`Job.promise`) until the job runs:

- A job with victims, which leave hosts for it; see `evictions.py`. Its promise is firm: no other job of its band or a
  lower one gets a host of it, unless it comes first by quota. Its chips already count towards its user's limit.
- A job that does not fit and has waited longer than the backfill bound. It gets as few groups as it can use, first free
  ones, then those closest to being free; an independent task gets a host. Only one of the competing jobs has such a
  promise at a time. The hosts are lent until they are complete, and not reserved at all if they are not expected to be
  complete in time; see `calendar.py`. A gang that has just lost hosts may return to its former groups even if they are
  promised.

A promise waits for running tasks, and for events with a time limit: the deadline of an eviction, the end of a
suspicion, and `UNCONFIRMED_S` for an ended attempt. It is revoked as a whole once an end is not confirmed in time or a
host is unusable. A firm promise does not wait for tasks other than its victims. A job of a higher band may take the
hosts, since it comes first.

A promise of either kind may also be for hosts whose slices are to be removed (`Promise.removed_by`), so that the job
gets slices of another type with their chips. The service `capacity` makes such promises, and renews those without
victims. The job does not run on these hosts.

For a returning gang, the plan reserves as many groups as the gang had, in this plan only.
"""

from collections.abc import Callable, Collection, Iterable, Set
from dataclasses import dataclass
from itertools import islice

from iris_ray.model.jobs import Gang, Job
from iris_ray.model.requirement import Requirement
from iris_ray.model.workers import Worker, accelerators
from iris_ray.scheduler.availability import Availability, best_free, buckets_for, fixed_size, num_groups, preferred
from iris_ray.scheduler.calendar import Calendar, horizon_s
from iris_ray.scheduler.evictions import GROUPS_COMPARED, Evictor, Taking, leaves_for
from iris_ray.scheduler.fair_queue import Deadlines, Tier
from iris_ray.scheduler.group_rooms import GroupRooms
from iris_ray.scheduler.limits import Allowances, chips_per_group, least_chips
from iris_ray.scheduler.remaining_capacity import Plan
from iris_ray.state.events import PromiseEvent
from iris_ray.state.fleet import Fleet

MOST_LATE = 16
"""The number of kinds of jobs in a plan for which hosts may turn out not to be free in time."""
NOTHING_BOUNDS = "the jobs on the hosts have run for so long that they may run for hours more"

Lifted = list[tuple[Worker, str]]
"""Hosts temporarily free for a job, each with the id of the job to which it is promised."""


@dataclass(slots=True)
class _Promise:
    """A promise in this plan.

    Attributes:
        job: the job.
        node_ids: the hosts; empty once the promise is revoked.
        is_firm: whether it has or had victims.
        is_lost: whether committing the plan may revoke it in the state, because an earlier job gets some of its hosts.
        taking: the victims that this plan asks to leave for it, or None.
        reason: why it is revoked; otherwise empty.
        complete_at: when the hosts are expected to be free for the job; seconds. Until then they are lent; 0: not.
    """

    job: Job
    node_ids: tuple[str, ...] = ()
    is_firm: bool = False
    is_lost: bool = False
    taking: Taking | None = None
    reason: str = ""
    complete_at: float = 0.0


class PlannedPromises:
    """The promises to jobs during a plan.

    Args:
        pending: the jobs of the queue that are not plain, which include those with a promise.
        fleet: the workers.
        deadlines: the time limits of jobs.
        plan: the hosts that the plan has taken so far.
        allowances: the resources that each user may still get, which promises reduce.
        evictor: the attempts that are about to leave their hosts.
        groups: finds room for groups of jobs.

    Attributes:
        given_up: whether a job has lost its promise in this plan because it runs now or can't run for a while.
    """

    def __init__(
        self,
        pending: Iterable[Job],
        fleet: Fleet,
        deadlines: Deadlines,
        plan: Plan,
        allowances: Allowances,
        evictor: Evictor,
        groups: GroupRooms,
    ) -> None:
        self._groups = groups
        self._fleet = fleet
        self._deadlines = deadlines
        self._plan = plan
        self._allowances = allowances
        self._leaving = evictor.leaving()
        self._evictor = evictor
        self._calendar = Calendar(evictor, deadlines.now)
        lasting = [job for job in pending if job.promise is not None and deadlines.timed_out(job) is None]
        self._tiers: dict[str, Tier] = {}  # by job id; as of the first read
        for job in lasting:  # so that later jobs of its team don't use up its quota
            assert job.promise is not None
            for one in job.members or (job,):
                allowances.teams.promised(one, self._chips(one, job.promise.node_ids))
            evictor.go_on(job)
        self._before = sorted(lasting, key=self._last_first)  # timed-out jobs lose theirs
        self._of: dict[str, _Promise] = {}  # by job id; includes revoked ones
        self._for_now: dict[str, tuple[str, ...]] = {}  # job id → node ids reserved for a returning gang
        self._waiting: dict[str, int] = {}  # job id → number of its remaining tasks, once the plan has placed one
        self._rooms: dict[tuple[str, Requirement], tuple[int, list[Worker]]] = {}  # see `_with_room`
        self._late: set[object] = set()  # kinds of jobs whose reservations would not be complete in time
        self.given_up = False

    def begin(self, tier: Tier, available_to: Callable[[Job], Availability]) -> None:
        """Renew the earlier plans' promises to jobs up to a place in the queue."""
        while self._before and self.tier_of(self._before[-1]) <= tier:
            job = self._before.pop()
            assert job.promise is not None
            promise = self._of[job.spec.job_id] = _Promise(job, is_firm=job.promise.is_firm)
            promise.is_lost = not self._plan.taken.keys().isdisjoint(job.promise.node_ids)
            if promise.is_lost:
                self._evictor.loans_end(job)
            promise.reason = self._problem(promise, job.promise.node_ids, available_to(job))
            if promise.reason:
                for one in job.members or (job,):
                    self._allowances.teams.released(one)
            elif job.members:
                self._keep(promise, job.promise.node_ids)
            else:
                most = self._within_limit(promise, job.promise.node_ids, len(job.pending))
                self._keep(promise, most or job.promise.node_ids)  # otherwise its turn finds the limit

    @property
    def any_kept(self) -> bool:
        """Whether hosts are promised to any job."""
        return any(promise.node_ids for promise in self._of.values())

    def has_firm(self, job: Job) -> bool:
        """Return whether a job's promise has or had victims."""
        return bool(self.hosts_of(job.spec.job_id)) and self._of[job.spec.job_id].is_firm

    def hosts_of(self, job_id: str) -> tuple[str, ...]:
        """Return the node ids of the hosts that are promised to a job."""
        promise = self._of.get(job_id)
        return promise.node_ids if promise is not None else ()

    # -- lending ---------------------------------------------------------------------------------------------------

    def lendable(self, job: Job) -> Lifted:
        """Return the hosts with room for a task that are reserved for other jobs and that a job may use meanwhile."""
        lent: Lifted = []
        for job_id, promise in self._of.items():
            if promise.complete_at and self._calendar.may_lend(job, promise.job, promise.complete_at):
                lent += [(host, job_id) for host in self._with_room(promise, job.requirement)]
        return lent

    def _with_room(self, promise: _Promise, need: Requirement) -> list[Worker]:
        """Return the hosts reserved by a promise that have room for a task."""
        key, version = (promise.job.spec.job_id, need), len(self._plan.touched)
        seen, found = self._rooms.get(key, (-1, []))
        if seen != version:
            kept, taken = self._plan.kept, self._plan.taken
            hosts = (self._fleet.workers[node_id] for node_id in promise.node_ids if kept.get(node_id) == key[0])
            found = [host for host in hosts if need.has_room(host, taken.get(host.node_id))]
            self._rooms[key] = version, found
        return found

    def lift_in_use(self, job: Job) -> Lifted:
        """Free the hosts reserved for higher bands that a job may use meanwhile once victims have left."""
        lifted: Lifted = []
        for job_id, promise in self._of.items():
            may_use = promise.complete_at and promise.job is not job and leaves_for(job, promise.job)
            if may_use and self._calendar.may_lend(job, promise.job, promise.complete_at):
                hosts = (node_id for node_id in promise.node_ids if self._plan.kept.get(node_id) == job_id)
                lifted += [(self._fleet.workers[node_id], job_id) for node_id in hosts]
        return self._lift(lifted)

    # -- lifting ---------------------------------------------------------------------------------------------------

    def lift(self, job: Job) -> Lifted:
        """Free the hosts promised to a job until `put_back`, and, for a returning gang, those of its former groups.

        A gang does not return to hosts of a firm promise to another job of its band.
        """
        if not self._of:
            return []
        lifted = self._own(job)
        if self._deadlines.is_returning(job):
            assert job.spec.coscheduling is not None
            name_of, workers = self._fleet.grouping(job.spec.coscheduling.group_by).name_of, self._fleet.workers
            in_turn = (job.gangs[position] for position in self._deadlines.in_turn(job))
            former = {name for gang in in_turn if self._deadlines.seconds_paused(gang) <= 0 for name in gang.groups}
            for other in self._of.values():
                if other.job is not job and self._gives_way(other, job):
                    there = (workers[node_id] for node_id in other.node_ids)
                    lifted += [(worker, other.job.spec.job_id) for worker in there if name_of(worker) in former]
        return self._lift(lifted)

    def lift_own(self, job: Job) -> Lifted:
        """Free the hosts promised to a job or reserved for its returning gangs until `put_back`."""
        job_id = job.spec.job_id
        for_now = [(self._fleet.workers[node_id], job_id) for node_id in self._for_now.get(job_id, ())]
        return self._lift([*self._own(job), *for_now])

    def put_back(self, lifted: Lifted) -> None:
        """Reserve lifted hosts again, except for jobs that have lost their promise."""
        for worker, job_id in lifted:
            if worker.node_id in (*self.hosts_of(job_id), *self._for_now.get(job_id, ())):
                self._plan.keep(worker, job_id)

    def _lift(self, lifted: Lifted) -> Lifted:
        for worker, _ in lifted:
            self._plan.lift(worker)
        return lifted

    # -- making and ending -----------------------------------------------------------------------------------------

    def take(self, job: Job, taking: Taking) -> None:
        """Replace a job's promise by hosts that victims leave for it."""
        for node_id in (*self.hosts_of(job.spec.job_id), *self._for_now.pop(job.spec.job_id, ())):
            self._plan.lift(self._fleet.workers[node_id])
        for other in self._of.values():
            if not set(other.node_ids).isdisjoint(taking.node_ids) and other.job is not job:
                self._lose(other)
        self._of.pop(job.spec.job_id, None)  # so that promises are reported in the order in which they were made
        promise = self._of[job.spec.job_id] = _Promise(job, is_firm=True, taking=taking)
        self._keep(promise, taking.node_ids)

    def give_up(self, job: Job, node_ids: Collection[str], reason: str) -> None:
        """End a job's promise because the job runs or can't run for a while. Its hosts must be lifted.

        A promise to a starving job is for one gang, which may run elsewhere. A promise with several hosts to a job of
        independent tasks continues for the remaining tasks.

        Args:
            job: the job.
            node_ids: the hosts that the job gets; empty if it can't run.
            reason: why it can't run.
        """
        promise = self._of.get(job.spec.job_id)
        if promise is None or not promise.node_ids:
            return
        room, promise.node_ids = promise.node_ids, ()
        self.given_up = True
        if not node_ids:
            promise.reason = reason
        elif job.spec.coscheduling is None and not job.members and (promise.is_firm or len(room) > 1):
            waiting = self._waiting[job.spec.job_id] = self._waiting.get(job.spec.job_id, len(job.pending)) - 1
            left = tuple(node_id for node_id in room if node_id not in node_ids)
            promise.node_ids = self._within_limit(promise, left, waiting)
        self._reserve(promise)

    def keep(self, job: Job, gang: Gang, available: Availability, lifted: Lifted) -> tuple[str, ...]:
        """Reserve groups for a gang that did not fit, if it may have a promise, and return their names.

        Args:
            job, gang: the gang and its job.
            available: the groups available to the job.
            lifted: the hosts that `lift` returned for it.
        """
        if self.has_firm(job) or (_is_removal(job) and self.hosts_of(job.spec.job_id)):
            self.put_back(lifted)
            return () if _is_removal(job) else self._names(job, self.hosts_of(job.spec.job_id))
        before = self.hosts_of(job.spec.job_id)
        if before:
            self._of[job.spec.job_id].node_ids = ()
        returning = self._deadlines.is_returning(job)
        if lifted:
            self.put_back(lifted)
        if not before and not returning and not self._may_have_one(job, gang):
            return ()
        kind = job.requirement, num_groups(job), fixed_size(job), job.spec.priority, job.spec.team, available
        if not before and not returning and (kind in self._late or len(self._late) >= MOST_LATE):
            return ()
        if before:
            names = self._better(job, gang, self._names(job, before), available)
        else:
            names = self._chosen(job, gang, available, returning)
        complete_at = self._complete_at(job, names, available)
        if not before and not returning and self._is_too_late(complete_at, job):
            self._late.add(kind)
            return ()
        node_ids = tuple(node_id for name in names for node_id in available.group(name).node_ids)
        if node_ids and returning and not before:
            self._for_now[job.spec.job_id] = node_ids
            for node_id in node_ids:
                self._plan.keep(self._fleet.workers[node_id], job.spec.job_id)
        elif node_ids:
            known = self._of.get(job.spec.job_id)
            self._of[job.spec.job_id] = promise = _Promise(job, is_lost=known is not None and known.is_lost)
            promise.complete_at = complete_at
            self._keep(promise, node_ids)
        return names

    def lift_of_group(self, leader: Job) -> Lifted:
        """Free the hosts promised to a group until `put_back`, and stop counting their chips for its jobs."""
        lifted = self._lift(self._own(leader))
        for job in leader.members if lifted else ():
            self._allowances.released(job)
        return lifted

    def keep_for_group(self, leader: Job, lifted: Lifted) -> tuple[str, ...]:
        """Reserve hosts for a group that did not fit, if it may have a promise, and return their node ids.

        Args:
            leader: the job that represents the group.
            lifted: the hosts that `lift_of_group` returned for it.
        """
        if lifted:
            self.put_back(lifted)
            self._evictor.go_on(leader)
        elif not self._may_have_one(leader, leader.gangs[0]):
            return ()
        room = self._groups.hosts_for(leader, self.hosts_of(leader.spec.job_id))
        if room is None:
            return ()
        complete_at = self._calendar.free_at(leader, [self._fleet.workers[node_id] for node_id in room.node_ids])
        if not lifted and self._is_too_late(complete_at, leader):
            return ()
        taking = self._evictor.take(leader, room.node_ids, room.victims)
        promise = self._of[leader.spec.job_id] = self._of[leader.spec.job_id] if lifted else _Promise(leader)
        promise.taking = taking if taking.leave else None
        promise.is_firm |= bool(taking.leave)
        promise.complete_at = 0.0 if promise.is_firm else complete_at
        if lifted:
            self._reserve(promise)
        else:
            self._keep(promise, taking.node_ids)
        return taking.node_ids

    def changes(self, placed: Collection[str]) -> list[PromiseEvent]:
        """Return the events for changed promises: first those that end, then those that begin.

        If a victim of an ending promise also leaves for another one, the ending one comes last, so that the victim's
        eviction is not cancelled in between.

        ``placed`` has the ids of the jobs that the plan gives hosts, which ends their promises when the plan is
        committed. A job of independent tasks may keep the hosts that it did not get.
        """
        events: list[PromiseEvent] = []
        told = {str(attempt) for promise in self._of.values() if promise.taking for attempt in promise.taking.leave}

        def turn(event: PromiseEvent) -> tuple[bool, bool, bool]:
            before = self._of[event.job_id].job.promise
            leaves_for_both = before is not None and not told.isdisjoint(before.given_up)
            return not event.node_ids and leaves_for_both, bool(event.node_ids), bool(event.leave)

        for job_id, promise in self._of.items():
            before = promise.job.promise.node_ids if promise.job.promise else ()
            if job_id in placed:  # once the plan is committed
                is_partly_lost = promise.job.spec.coscheduling is None and not promise.job.members
                changed = bool(promise.node_ids or before) if is_partly_lost else bool(promise.node_ids)
            else:
                is_new = promise.taking is not None or (promise.is_lost and bool(promise.node_ids))
                changed = is_new or promise.node_ids != before
            if changed:
                leave, deadline = (promise.taking.leave, promise.taking.deadline) if promise.taking else ((), 0.0)
                reason = "" if promise.node_ids else promise.reason
                events.append(PromiseEvent(job_id, promise.node_ids, leave, deadline, reason))
        return sorted(events, key=turn)

    # -- helpers ---------------------------------------------------------------------------------------------------

    def _keep(self, promise: _Promise, node_ids: tuple[str, ...]) -> None:
        promise.node_ids, promise.reason = node_ids, ""
        for node_id in node_ids:
            self._plan.keep(self._fleet.workers[node_id], promise.job.spec.job_id)
        self._reserve(promise)

    def _lose(self, promise: _Promise) -> None:
        """Revoke a reservation, because victims leave one of its hosts for a job that uses it meanwhile."""
        for node_id in promise.node_ids:
            if self._plan.kept.get(node_id) == promise.job.spec.job_id:
                self._plan.lift(self._fleet.workers[node_id])
        promise.node_ids, promise.reason = (), "a job that leaves in time takes one of the hosts meanwhile"
        self._evictor.loans_end(promise.job)
        self.given_up = True
        self._reserve(promise)

    def _reserve(self, promise: _Promise) -> None:
        """Count a promise towards its team's quota and its user's limit."""
        count = self._allowances.promised if promise.is_firm else self._allowances.expects
        for job in promise.job.members or (promise.job,):
            if promise.node_ids:
                count(job, self._chips(job, promise.node_ids))
            else:
                self._allowances.released(job)

    def _chips(self, job: Job, node_ids: Iterable[str]) -> float:
        """Return the number of chips that a job takes of its promised hosts, which the jobs of a group share."""
        if job.forms_group or _is_removal(job):
            return least_chips(job)
        workers = (self._fleet.workers[node_id] for node_id in node_ids if node_id in self._fleet.workers)
        return sum(accelerators(job.requirement.demand(worker)) for worker in workers)

    def _own(self, job: Job) -> Lifted:
        return [(self._fleet.workers[node_id], job.spec.job_id) for node_id in self.hosts_of(job.spec.job_id)]

    def _within_limit(self, promise: _Promise, node_ids: tuple[str, ...], waiting: int) -> tuple[str, ...]:
        """Return as many of these hosts as waiting tasks may use within the user's limit, vacated hosts first.

        Tasks that run elsewhere count, and the limit may have changed.
        """
        job, wanted = promise.job, min(waiting, len(node_ids))
        if job.spec.coscheduling is not None:
            return node_ids
        left = self._evictor.given_back() if promise.is_firm else {}
        most = self._allowances.most_once_left(job, chips_per_group(job), wanted, left, promise.is_firm)
        if most == len(node_ids):
            return node_ids
        workers = {node_id: self._fleet.workers[node_id] for node_id in node_ids}
        in_use = {node_id for node_id, one in workers.items() if not one.occupants.keys() <= one.ending.keys()}
        return tuple(sorted(node_ids, key=lambda node_id: node_id in in_use)[:most])

    def _may_have_one(self, job: Job, gang: Gang) -> bool:
        # If a job lost its promise in this plan, an earlier job may be due for one, which the next plan makes.
        if job.yields or job.spec.spare_for is not None:
            return False
        return self._deadlines.is_starving(job, gang) and not (self.given_up or self._groups.comes_next)

    def _complete_at(self, job: Job, names: Iterable[str], available: Availability) -> float:
        """Return when these groups are expected to be free for a job; seconds."""
        return max((self._calendar.group_free_at(job, name, available) for name in names), default=0.0)

    def _is_too_late(self, complete_at: float, job: Job) -> bool:
        """Return whether a job's reservation would idle hosts for too long; see `horizon_s`."""
        now, gang = self._deadlines.now, job.gangs[next(iter(job.pending))]
        return complete_at > now + horizon_s(now - gang.waiting_since)

    def _problem_with_date(self, promise: _Promise, complete_at: float) -> str:
        """Set until when a reservation is lent. Return why it must be revoked, or an empty string."""
        promise.complete_at = complete_at
        return NOTHING_BOUNDS if self._is_too_late(complete_at, promise.job) else ""

    def _problem(self, promise: _Promise, node_ids: tuple[str, ...], available: Availability) -> str:
        """Return why a promise must be revoked, or an empty string. Sets when its hosts are expected to be free.

        A job that has begun to yield loses its promise, since it waits behind all other jobs.
        """
        job = promise.job
        assert job.promise is not None
        if job.yields:
            return "it yields"
        if not self._plan.kept.keys().isdisjoint(node_ids) or not self._plan.taken.keys().isdisjoint(node_ids):
            return "a job that comes before it gets some of the hosts"
        if job.promise.removed_by and self._deadlines.now >= job.promise.removed_by:
            return "the slices were not removed in time"
        if job.promise.removed_by and job.promise.is_firm:
            return ""
        if job.members:
            if not all(i in self._fleet.workers for i in node_ids) or not self._groups.fits_on(job, node_ids):
                return "its jobs no longer fit on the hosts together"
            if job.promise.is_firm:
                return ""
            hosts = (self._fleet.workers[node_id] for node_id in node_ids)
            return self._problem_with_date(promise, self._calendar.free_at(job, hosts))
        pauses = all(self._deadlines.seconds_paused(job.gangs[position]) > 0 for position in job.pending)
        if pauses and not job.promise.is_firm:
            return "it pauses"
        limited = None if job.promise.is_firm or self._deadlines.is_returning(job) else self._allowances.reached(job)
        if limited is not None:
            return limited.in_short
        if job.promise.removed_by:
            hosts = (self._fleet.workers[node_id] for node_id in node_ids)
            return self._problem_with_date(promise, self._calendar.chips_empty_at(job, hosts, least_chips(job)))
        names = self._names(job, node_ids)
        if len(names) < num_groups(job)[0] or not all(map(available.knows, names)):
            return "some of the hosts are gone"
        buckets = {available.candidates.evaluations[name].bucket for name in names}
        if job.spec.whole_groups:
            fitting = len(buckets) == 1 and (fixed_size(job) or max(buckets)) in buckets
        else:
            fitting = buckets <= {*buckets_for(job, available)}
        if not fitting or not all(map(available.suits_soon, names)):
            return "some of the hosts no longer suit it"
        stuck = [name for name in names if not available.may_become_free(name)]
        if stuck:
            return f"the end of what ran on {stuck[0]} is not confirmed in time"
        if job.promise.is_firm:
            busy = [name for name in names if not available.is_free_after(name, self._leaving)]
            return f"{busy[0]} is in use by a job that is not leaving" if busy else ""
        return self._problem_with_date(promise, self._complete_at(job, names, available))

    def _names(self, job: Job, node_ids: Iterable[str]) -> tuple[str, ...]:
        workers, coscheduling = self._fleet.workers, job.spec.coscheduling
        name_of = self._fleet.grouping(coscheduling.group_by if coscheduling else None).name_of
        return tuple(filter(None, dict.fromkeys(name_of(workers[node_id]) for node_id in node_ids)))

    def _better(self, job: Job, gang: Gang, names: tuple[str, ...], available: Availability) -> tuple[str, ...]:
        """Return the groups promised to a job, with groups in use replaced by free ones if possible."""
        free = [name for name in names if available.is_free(name)]
        buckets = {available.candidates.evaluations[name].bucket for name in names}
        more = self._best_free(job, gang, len(names), available, sorted(buckets, reverse=True))
        return (*dict.fromkeys([*free, *more, *names]),)[: len(names)]

    def _chosen(self, job: Job, gang: Gang, available: Availability, returning: bool) -> tuple[str, ...]:
        """Return the groups to reserve; empty if too few suit the job or some are promised to another job."""
        buckets, wanted = buckets_for(job, available), num_groups(job)
        exist = sum(available.suitable(bucket, later=returning) for bucket in buckets)
        exist -= 0 if returning else sum(map(available.stuck, buckets))
        needed = wanted[0]
        if returning:
            needed = max([needed, *(count for count in wanted if count <= min(exist, len(gang.groups)))])
        if exist < needed or not (returning or not available.is_any_kept(buckets)):
            return ()
        firm = set[str]() if returning else self._left_for_others()
        names = self._best_free(job, gang, needed, available, buckets, firm)
        kept = self._plan.kept.keys() | firm
        others = (
            name
            for name in available.closest_to_free(buckets)
            if kept.isdisjoint(available.group(name).node_ids) and (returning or available.may_become_free(name))
        )
        found = (*names, *self._soonest(job, others, needed - len(names), available))
        return () if firm and len(found) < needed else found

    def _left_for_others(self) -> set[str]:
        """Return the hosts that victims leave for jobs later in the queue, which only a job that then runs may take."""
        firm = (job.promise for job in self._before if job.promise is not None and job.promise.is_firm)
        return {node_id for promise in firm for node_id in promise.node_ids}

    def _best_free(
        self,
        job: Job,
        gang: Gang,
        count: int,
        available: Availability,
        buckets: Iterable[int],
        without: Set[str] | None = None,
    ) -> list[str]:
        """Return the best free groups for a gang to reserve, at most ``count``, without some hosts."""
        without = self._left_for_others() if without is None else without
        names = best_free(count + len(without), available, buckets, preferred(job, self._fleet, gang))
        return [name for name in names if not without or without.isdisjoint(available.group(name).node_ids)][:count]

    def _soonest(self, job: Job, names: Iterable[str], wanted: int, available: Availability) -> list[str]:
        """Return the groups to reserve. Groups that are free in time, without victims or promises, come first.

        Otherwise two jobs could repeatedly take the same host from each other, although enough hosts become free. Then
        those without a spare, since spares leave at once for any job, and the soonest to be free.
        """
        if wanted <= 0:
            return []
        promised = {i for other in self._before if other.promise is not None for i in other.promise.node_ids}

        def is_apart(name: str) -> bool:
            waited_for = not promised.isdisjoint(available.group(name).node_ids)
            return not waited_for and available.is_free_after(name, self._leaving)

        spares = self._evictor.held_ready

        def key(name: str) -> tuple[bool, bool, bool, float]:
            of_spare = any(who[1] in spares for host in available.group(name).workers for who in host.occupants)
            free_at = self._calendar.group_free_at(job, name, available)
            return self._is_too_late(free_at, job), bool(promised) and not is_apart(name), of_spare, free_at

        return sorted(islice(names, max(wanted, GROUPS_COMPARED)), key=key)[:wanted]

    def tier_of(self, job: Job) -> Tier:
        """Return a job's place in the queue."""
        if job.spec.job_id not in self._tiers:
            self._tiers[job.spec.job_id] = self._allowances.quota_source(job), job.spec.priority
        return self._tiers[job.spec.job_id]

    def _last_first(self, job: Job) -> tuple[int, int, bool]:
        """Return the sort key by reversed place in the queue, with firm promises last within a place."""
        source, band = self.tier_of(job)
        return -source, -band, job.promise is not None and job.promise.is_firm

    def _gives_way(self, promise: _Promise, job: Job) -> bool:
        """Return whether a returning gang of a job may take the hosts of a promise to another job."""
        other, tier = self.tier_of(promise.job), self.tier_of(job)
        return other > tier or (other == tier and not promise.is_firm)


def _is_removal(job: Job) -> bool:
    """Return whether a job is promised hosts whose slices are to be removed."""
    return job.promise is not None and job.promise.removed_by > 0
