"""One plan. Every job looks at every worker whenever it is its turn.

What the plan has handed out so far counts as if it were in use already.

What the rules decide (docs/sharing-a-cluster.md): the order; which groups suit a job, and which of them it takes;
limits; that room past the bound is for one job at a time among those that compete; that bounded room is lent only to
jobs that are surely gone when it can be complete.

What they leave open: whether room whose completion nothing bounds is kept in part, and which part of it. A plan is
right whether it keeps such a room or lends it: `may_be_lent` has its jobs, and `lent` says for which of them this plan
takes the room for lent. A gang that returns comes first with as many groups as it had. If it can use more, it takes
them by `returns_larger` at once, as the scheduler did at first; else as growth, after every job that waits.
"""

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from iris_ray.model.constraints import AttributeValue
from iris_ray.model.job_spec import JobSpec
from iris_ray.model.jobs import Gang, Job
from iris_ray.model.options import PriorityBand
from iris_ray.model.workers import TPU, TPU_NAME, TPU_VM_COUNT, UNCONFIRMED_S, Worker, accelerators
from iris_ray.scheduler.fair_queue import Usage
from iris_ray.state.events import AssignedEvent, GangAssignedEvent, TasksAssignedEvent
from iris_ray.state.fleet import Fleet
from iris_ray.state.groups import group_name
from iris_ray.state.user_limits import Account, PastUsage, UserLimits
from tests.proofs.reference.suitability import (
    counts,
    is_an_error,
    is_complete,
    is_extra,
    is_hopeless,
    is_met,
    lack,
    needs,
    oldest,
    place,
    suits,
    uses_chips,
    value_of,
)
from tests.support.worlds import promised


@dataclass
class Option:
    """A group of workers that would do for a job if nobody used it.

    Attributes:
        hosts: all of them, in order.
        good: those that would do for a task if nobody used them.
        ready: those among them that have room now.
        wanted: how many of them the job takes.
        exact: whether it is no part of a larger slice.
    """

    name: str
    hosts: list[Worker]
    good: list[Worker]
    ready: list[Worker]
    wanted: int
    exact: bool

    @property
    def free(self) -> bool:
        return len(self.ready) >= self.wanted


class ReferencePlan:
    """One plan; its results have the names of those of `SchedulingResult`, with job ids instead of pending reasons.

    Attributes:
        limited: jobs that wait for a limit of their user.
        kept: for each job that has waited too long, or returns, the groups that are kept for it.
        rooms: for each job that has waited too long, or that others leave hosts to, its hosts until it runs.
        reserved: for each job that others leave hosts to, the chips that count towards its user's limit already.
        starving: jobs among them that did not get hosts, but for those that wait for a limit.
        may_be_lent: jobs for which room was or could be kept, though nothing bounds when it is complete.
    """

    def __init__(
        self,
        pending: Iterable[Job],
        fleet: Fleet,
        usage: Usage,
        past: PastUsage,
        now: float,
        bound: float,
        limits: UserLimits,
        all_jobs: Mapping[str, Job],
        lent: Collection[str] = (),
        returns_larger: bool = True,
    ) -> None:
        pending = list(pending)
        self.lent, self.may_be_lent, self.returns_larger = lent, set[str](), returns_larger
        self.workers = list(fleet.workers.values())
        self.avoided_by_users = fleet.avoided
        self.holders, self.now, self.bound = fleet.holders, now, bound
        self.limits, self.limited, self.kept_limits = limits, set[str](), set[Account]()
        self.chips = {account: limits.held(*account).chips for account in limits.accounts}
        self.running = {account: set(limits.held(*account).running) for account in limits.accounts}
        self.usage = {user: Counter(held) for user, held in usage.items()}
        for job in pending:
            self.usage.setdefault(job.spec.user, Counter())
        for user, held in self.usage.items():
            held.update(past.hours(user, now))
        self.taken = {worker.node_id: Counter[str]() for worker in self.workers}
        self.rooms: dict[str, list[str]] = {}
        self.all_jobs = all_jobs
        self.reserved: dict[str, float] = {}
        self.jobs = {job.spec.job_id: job for job in pending}
        self.given_up = False  # the room of some job
        self.kept_for_now: set[str] = set()
        self.assignments: list[AssignedEvent] = []
        self.timed_out: set[str] = set()
        self.unschedulable: set[str] = set()
        self.kept: dict[str, list[str]] = {}
        self.late: set[str] = set()  # jobs with a gang that has waited too long and did not get hosts
        self.unplaced = {job.spec.job_id: [job.gangs[position] for position in job.pending] for job in pending}
        self.schedule_all(list(pending))
        given_up = self.timed_out | self.unschedulable
        self.starving = (self.kept.keys() & self.rooms.keys() & self.late) - self.limited
        self.pending_reasons = {job_id for job_id, gangs in self.unplaced.items() if gangs and job_id not in given_up}

    # -- order -----------------------------------------------------------------------------------------------------

    def schedule_all(self, pending: list[Job]) -> None:
        pending.sort(key=lambda job: (job.spec.priority, job.number))
        extras = [job for job in pending if is_extra(job)]
        for some in ([job for job in pending if job not in extras], extras):
            for band in PriorityBand:
                jobs = [job for job in some if job.spec.priority == band]
                for job in jobs:
                    if self.room_is_of_use(job):
                        self.rooms[job.spec.job_id] = list(promised(job))
                        if is_firm(job):
                            self.reserved[job.spec.job_id] = self.chips_on(job, promised(job))
                returning = [job for job in jobs if self.returns(job)]
                for job in returning:
                    while self.place_one_gang(job):
                        pass
                self.share_out([job for job in jobs if job not in returning])

    def share_out(self, jobs: list[Job]) -> None:
        """Gang by gang to the user who has least."""
        jobs = list(jobs)
        while jobs:
            job = min(jobs, key=lambda job: (self.share(job.spec.user), oldest(jobs, job.spec.user), job.number))
            if not self.place_one_gang(job):
                jobs.remove(job)

    def returns(self, job: Job) -> bool:
        gangs = [job.gangs[position] for position in job.pending]
        return bool(job.spec.coscheduling) and not job.yields and any(self.now < g.returning_until for g in gangs)

    def waited_long(self, job: Job, gang: Gang) -> bool:
        bound = 0.0 if job.spec.priority is PriorityBand.PRODUCTION else self.bound
        return self.now - gang.waiting_since >= bound

    def share(self, user: str) -> float:
        """The largest part that the user holds of any resource."""
        totals = sum((Counter(worker.resources) for worker in self.workers), Counter())
        return max((n / totals[r] for r, n in self.usage.get(user, {}).items() if totals[r]), default=0.0)

    # -- one gang --------------------------------------------------------------------------------------------------

    def place_one_gang(self, job: Job) -> bool:
        """Whether one was placed. If not, the job is done with for this time."""
        spec, gangs = job.spec, self.unplaced[job.spec.job_id]
        if self.is_out_of_time(job):
            self.timed_out.add(spec.job_id)
            return False
        ready = [gang for gang in gangs if gang.not_before <= self.now]
        if self.returns(job) and len(job.gangs) > 1:  # it is not the turn of the others, unless only they are ready
            waiting = [job.gangs[position] for position in job.pending]
            first = [gang for gang in waiting if gang.not_before <= self.now < gang.returning_until]
            ready = [gang for gang in ready if gang in first or not first]
        gang = ready[0] if ready else None
        if gang is None:
            return False
        self.before = [name for name, _ in gang.last_ran]
        room, others = self.rooms.pop(spec.job_id, None), dict(self.rooms)
        if self.returns(job):  # it may go back to its own groups
            its_own = {name for one in (gang, *(ready if len(job.gangs) > 1 else ())) for name in one.groups}
            home = {w.node_id for name, hosts in self.groups(spec) if name in its_own for w in hosts}
            self.rooms = {
                job_id: [i for i in hosts if i not in home or not self.gives_way(self.jobs[job_id], job)]
                for job_id, hosts in others.items()
            }
        options, wanted = self.options(job), self.may_have(job, counts(job))
        if not self.returns_larger and self.returns(job) and gang.groups:
            had = [count for count in wanted if count <= len(gang.groups)]
            wanted = had or wanted[:1]
        found = self.choose(job, gang, options, wanted)
        chosen = next((found[:n] for n in reversed(wanted) if n <= len(found) and self.may_take(job, found[:n])), [])
        self.rooms = others
        if chosen:
            self.take(job, gang, sorted(chosen, key=lambda option: option.name))
            gangs.remove(gang)
            if job.spec.coscheduling is None and room and (is_firm(job) or len(room) > 1):
                left = [node_id for node_id in room if node_id != chosen[0].name][: len(gangs)]
                self.rooms |= {spec.job_id: left} if left else {}
        elif found or not wanted:
            self.limited.add(spec.job_id)
            of_jobs = not found and self.has_jobs_enough(job)
            may_last = self.is_within_once_left(job, room) if room and is_firm(job) else self.returns(job)
            if may_last and not spec.spare_for and not of_jobs:
                self.keep(job, gang, self.options(job), room)
                return False
            self.keep_chips(job, gang, found)
        elif not job.started and self.is_hopeless(spec):
            self.unschedulable.add(spec.job_id)
        else:
            self.keep(job, gang, self.options(job), room)
            return False
        self.given_up = self.given_up or room is not None
        if not chosen:
            self.reserved.pop(spec.job_id, None)
        return bool(chosen)

    def is_hopeless(self, spec: JobSpec) -> bool:
        """Whether a constraint can't be evaluated on any host, among them one that is in a group."""
        grouped = [worker for _, hosts in self.groups(spec) for worker in hosts]
        errs = any(is_an_error(one, worker.attributes) for one in spec.constraints for worker in grouped)
        return errs and any(is_hopeless(one, spec.constraints, self.workers) for one in spec.constraints)

    def is_out_of_time(self, job: Job) -> bool:
        timeout = job.spec.scheduling_timeout
        return timeout is not None and self.now - job.submitted_at > timeout and not job.started

    def room_is_of_use(self, job: Job) -> bool:
        """Whether the job could run in its room if nobody used it, and nobody has just got some of it.

        A suspicion passes, and does not count. What has ended for long without being confirmed does.
        """
        if self.is_out_of_time(job) or job.yields or not promised(job):
            return False
        if any(self.is_host_kept(worker) or self.taken[worker.node_id] for worker in self.hosts_of_room(job)):
            return False  # for a higher band
        if not is_firm(job) and all(job.gangs[position].not_before > self.now for position in job.pending):
            return False
        if not (is_firm(job) or self.returns(job) or self.may_have(job, counts(job))):
            return False  # its user has reached a limit
        names = [name for name, hosts in self.groups(job.spec) if any(w.node_id in promised(job) for w in hosts)]
        sound = self.options_anywhere(job, self.avoided(job), later=True)
        found = [o for o in sound if o.name in names and not any(uses_chips(job.spec) and w.foreign for w in o.hosts)]
        if len(found) < max(len(names), counts(job)[0]) or any(self.is_stuck(job.spec, option) for option in found):
            return False
        if is_firm(job) and not all(self.is_left_to(job, option) for option in found):
            return False
        if job.spec.whole_groups and len(job.gangs) == 1:
            return len({option.wanted for option in found}) == 1
        if job.spec.whole_groups:
            return {o.name for o in found} <= {o.name for o in self.options_without(job, self.avoided(job), later=True)}
        return all(o.exact for o in found) or sum(o.exact for o in sound) < counts(job)[0]

    def is_left_to(self, job: Job, option: Option) -> bool:
        """Whether the group is free once those have left that leave it, to anybody, and what has just ended is gone."""
        free = {worker.node_id: self.free(worker, once_ended=True) for worker in option.good}
        for worker in option.good:
            for occupant, held in worker.occupants.items():
                evicted = self.all_jobs[occupant[1].job_id].gangs[occupant[1].gang].eviction
                if evicted is not None and occupant not in worker.ending:
                    free[worker.node_id].update(held)
        return sum(lack(job.spec, worker, free[worker.node_id]) == 0 for worker in option.good) >= option.wanted

    def hosts_of_room(self, job: Job) -> list[Worker]:
        return [worker for worker in self.workers if worker.node_id in promised(job)]

    def gives_way(self, owner: Job, job: Job) -> bool:
        """Whether a gang of a job may return to hosts that are kept for another job."""
        mine, theirs = job.spec.priority, owner.spec.priority
        return theirs > mine or (theirs == mine and not is_firm(owner))

    def chips_on(self, job: Job, hosts: Sequence[str]) -> float:
        """What a job will take of these hosts."""
        if not uses_chips(job.spec):
            return 0.0
        return sum(worker.resources.get(TPU, 0.0) for worker in self.workers if worker.node_id in hosts)

    def reserved_beside(self, job: Job) -> dict[str, float]:
        """The chips of what others leave to the user's other jobs of the band."""
        account = job.spec.user, job.spec.priority
        others = {i: self.jobs[i] for i in self.reserved if i != job.spec.job_id}
        return {i: self.reserved[i] for i, o in others.items() if (o.spec.user, o.spec.priority) == account}

    def may_have(self, job: Job, wanted: Sequence[int]) -> list[int]:
        """Which of these counts its user's limits allow, by what a task expects of a host."""
        account = job.spec.user, job.spec.priority
        each = job.spec.resources.get(TPU, 0.0)
        if self.has_jobs_enough(job):
            return []
        if not uses_chips(job.spec):
            return list(wanted)
        if account in self.kept_limits and not self.reserved.get(job.spec.job_id):
            return []
        hosts = job.spec.replicas if job.spec.coscheduling else 1
        return [n for n in wanted if self.within_limit(job, n * hosts * max(1.0, each))]

    def has_jobs_enough(self, job: Job) -> bool:
        """Whether its user may not have one more running job."""
        account = job.spec.user, job.spec.priority
        running, most = self.running.setdefault(account, set()), self.limits.of(*account).running_jobs or 0
        is_new = job.spec.job_id not in running and not job.spec.spare_for
        return is_new and len(running | self.reserved_beside(job).keys()) >= most

    def may_take(self, job: Job, chosen: list[Option]) -> bool:
        hosts = [worker for option in chosen for worker in option.ready[: option.wanted]]
        chips = sum(worker.resources.get(TPU, 0.0) for worker in hosts)
        return not uses_chips(job.spec) or self.within_limit(job, chips)

    def within_limit(self, job: Job, chips: float) -> bool:
        account = job.spec.user, job.spec.priority
        limit = self.limits.of(*account).chips
        in_all = sum(worker.resources.get(TPU, 0.0) for worker in self.workers)
        beside = self.chips.get(account, 0.0) + sum(self.reserved_beside(job).values())
        return limit is None or limit >= in_all or beside + chips <= limit

    def is_within_once_left(self, job: Job, room: Collection[str]) -> bool:
        """Whether the job is within its limit once all have left that leave, and what has ended in rooms is gone."""
        account, rooms = (job.spec.user, job.spec.priority), {*room, *chain.from_iterable(self.rooms.values())}
        gone = 0.0
        for worker in self.workers:
            for occupant, held in worker.occupants.items():
                other, since = self.all_jobs[occupant[1].job_id], worker.ending.get(occupant)
                in_time = since is not None and worker.node_id in rooms and self.now < since + UNCONFIRMED_S
                leaves = since is None and other.gangs[occupant[1].gang].eviction is not None
                if (in_time or leaves) and (other.spec.user, other.spec.priority) == account:
                    gone += held.get(TPU, 0.0)
        hosts = job.spec.replicas if job.spec.coscheduling else 1
        each = max(1.0, job.spec.resources.get(TPU, 0.0))
        return gone > 0 and self.within_limit(job, counts(job)[0] * hosts * each - gone)

    def keep_chips(self, job: Job, gang: Gang, found: list[Option]) -> None:
        """If the gang has waited too long for a limit on chips, its user's chips are kept for it, if it has hosts."""
        anywhere = self.options_anywhere(job, self.avoided(job), later=True)
        there = self.in_time(job, self.options(job)) if job.spec.coscheduling else len(anywhere)
        if self.waited_long(job, gang) and there >= counts(job)[0] and not (job.spec.spare_for or job.yields):
            account = job.spec.user, job.spec.priority
            of_jobs = not found and self.has_jobs_enough(job)
            hosts = job.spec.replicas if job.spec.coscheduling else 1
            least = counts(job)[0] * hosts * max(1.0, job.spec.resources.get(TPU, 0.0))
            if found:
                least = sum(w.resources[TPU] for o in found[: counts(job)[0]] for w in o.ready[: o.wanted])
            limit = self.limits.of(*account).chips
            if not of_jobs and limit is not None and least <= limit:
                self.kept_limits.add(account)

    def options(self, job: Job) -> list[Option]:
        """The groups that the job could run on if nobody used them: of one size; parts of slices only if need be."""
        return self.options_without(job, self.avoided(job))

    def avoided(self, job: Job) -> set[str]:
        """The hosts where launches of the job have failed, or tasks of its user again and again.

        If there is too little else: only the last one. If there still is: none.
        """
        failed = [host for host, until in self.avoided_by_users.get(job.spec.user, {}).items() if self.now < until]
        failed += job.avoided if self.now < job.avoided_until else []
        choices = [set(failed), set(failed[-1:]), set[str]()]
        return next((c for c in choices if len(self.options_without(job, c)) >= counts(job)[0]), set())

    def options_of_any_size(self, job: Job) -> list[Option]:
        return self.options_anywhere(job, self.avoided(job), later=False)

    def options_without(self, job: Job, avoided: set[str], later: bool = False) -> list[Option]:
        found = self.options_anywhere(job, avoided, later)
        if job.spec.whole_groups:
            free, sound = Counter(o.wanted for o in found if o.free), Counter(o.wanted for o in found)
            least = counts(job)[0]
            best = max(sound, key=lambda size: (sound[size] >= least, free[size], sound[size], size), default=0)
            if len(job.gangs) > 1:  # all of one size: that of the first one that was placed
                most = max(sound, key=lambda size: (sound[size], size), default=0)
                best = len(job.gangs[0].tasks) if job.attempt else most
            return [option for option in found if option.wanted == best]
        exact = [option for option in found if option.exact]
        in_time = self.options_anywhere(job, avoided, later=True)
        return exact if sum(option.exact for option in in_time) >= counts(job)[0] else found

    def options_anywhere(self, job: Job, avoided: set[str], later: bool) -> list[Option]:
        groups = self.groups(job.spec)
        return [o for name, hosts in groups if (o := self.option(job.spec, name, hosts, avoided, later))]

    def choose(self, job: Job, gang: Gang, options: list[Option], wanted: list[int]) -> list[Option]:
        """The groups to take now; none if there are too few, or soon enough for a larger count."""
        free = self.best_first(job, options)
        soon = [option for option in options if not option.free and self.is_about_to_be_free(job.spec, option)]
        possible = [count for count in wanted if count <= len(free)]
        more = any(len(free) < count <= len(free) + len(soon) for count in wanted)
        if not possible or (more and self.now <= max(gang.waiting_since, gang.not_before) + 30.0):
            return []
        chosen = free[: possible[-1]]
        if any(self.is_its_own(job, option) for option in soon) and not all(self.is_its_own(job, o) for o in chosen):
            return [] if self.now <= max(gang.waiting_since, gang.not_before) + 10.0 else chosen
        return chosen

    def is_its_own(self, job: Job, option: Option) -> bool:
        """Whether the gang ran there, and its owner still keeps the slice warm."""
        by_slice = job.spec.coscheduling is not None and job.spec.coscheduling.group_by == TPU_NAME
        return by_slice and option.name in self.before and self.holders.get(option.name) == job.spec.owner

    def take(self, job: Job, gang: Gang, chosen: list[Option]) -> None:
        spec = job.spec
        groups = tuple(tuple(option.ready[: option.wanted]) for option in chosen)
        for worker in (worker for group in groups for worker in group):
            demand = needs(spec) | ({TPU: worker.resources.get(TPU, 0.0)} if uses_chips(spec) else {})
            self.taken[worker.node_id].update(demand)
            account = spec.user, spec.priority
            self.chips[account] = self.chips.get(account, 0.0) + demand.get(TPU, 0.0)
            if spec.job_id in self.reserved:
                self.reserved[spec.job_id] = max(0.0, self.reserved[spec.job_id] - demand.get(TPU, 0.0))
            self.usage.setdefault(spec.user, Counter()).update(demand)
        if not spec.spare_for:
            self.running[spec.user, spec.priority].add(spec.job_id)
        node_ids = tuple(tuple(worker.node_id for worker in group) for group in groups)
        if spec.coscheduling:
            names = tuple(option.name for option in chosen)
            self.assignments.append(GangAssignedEvent(spec.job_id, names, node_ids, gang.position))
        else:
            self.assignments.append(TasksAssignedEvent(spec.job_id, (gang.tasks[0].index,), node_ids[0][0]))

    def keep(self, job: Job, gang: Gang, options: list[Option], room: list[str] | None) -> None:
        """Keep groups from all jobs that come later, for a gang that has waited too long or returns."""
        job_id, least, kept_already = job.spec.job_id, counts(job)[0], [o for o in options if self.is_kept(o)]
        if self.waited_long(job, gang):
            self.late.add(job_id)
        if room is not None and is_firm(job):
            self.rooms[job_id] = room
            self.kept[job_id] = [n for n, hosts in self.groups(job.spec) if any(w.node_id in room for w in hosts)]
            return
        if room is not None:
            self.keep_better(job, room)
            return
        if self.returns(job):
            there = self.in_time(job, options)
            least = max(count for count in counts(job) if count <= max(least, min(len(gang.groups), there)))
        elif kept_already or not self.waited_long(job, gang) or self.given_up or job.spec.spare_for or job.yields:
            return
        else:
            options = [option for option in options if option.free or not self.is_stuck(job.spec, option)]
            there = len(options)
        if there < least:
            return
        others = [option for option in options if not option.free and option not in kept_already]
        in_use = sorted(others, key=lambda option: self.distance(job.spec, option))
        kept = (self.best_first(job, options) + in_use)[:least]
        hosts = [worker.node_id for option in kept for worker in option.hosts]
        if self.returns(job):
            self.kept_for_now.update(hosts)
        else:
            self.rooms[job_id] = hosts
        self.kept[job_id] = [option.name for option in kept]

    def keep_better(self, job: Job, room: list[str]) -> None:
        """Keep the same number of groups: of the room those that are free, others that are free, others of the room."""
        found, sound = self.options_of_any_size(job), self.options_anywhere(job, self.avoided(job), later=True)
        mine = [next(o for o in sound if node_id in [w.node_id for w in o.hosts]) for node_id in room]
        same_kind = [o for o in found if any((o.wanted, o.exact) == (own.wanted, own.exact) for own in mine)]
        free = [option for option in found if option.free and option.name in {own.name for own in mine}]
        free.sort(key=lambda option: [own.name for own in mine].index(option.name))
        free += self.best_first(job, same_kind)
        kept = {option.name: option for option in (*free, *mine)}
        names = list(kept)[: len({option.name for option in mine})]
        self.rooms[job.spec.job_id] = [worker.node_id for name in names for worker in kept[name].hosts]
        self.kept[job.spec.job_id] = names

    def in_time(self, job: Job, options: list[Option]) -> int:
        """How many groups there are, with those that are of no use for now only."""
        if not job.spec.coscheduling:
            return len(options)
        found = self.options_anywhere(job, self.avoided(job), later=True)
        if job.spec.whole_groups:
            its_own = len(job.gangs[0].tasks) if len(job.gangs) > 1 else job.spec.replicas
            size = options[0].wanted if options else its_own
            return sum(option.wanted == size for option in found)
        exact = [option for option in found if option.exact]
        return len(exact if len(exact) >= counts(job)[0] else found)

    def is_kept(self, option: Option) -> bool:
        """Whether some of a group is in a job's room, lent or not: among jobs that compete, one has room at a time."""
        rooms = {node_id for hosts in self.rooms.values() for node_id in hosts} | self.kept_for_now
        return any(worker.node_id in rooms for worker in option.hosts)

    def is_host_kept(self, worker: Worker, spec: JobSpec | None = None) -> bool:
        """Whether a host is kept for a job, and not lent: to others, or to a given one."""
        rooms = [job_id for job_id, hosts in self.rooms.items() if worker.node_id in hosts]
        return worker.node_id in self.kept_for_now or not all(self.is_lent(job_id, spec) for job_id in rooms)

    def is_lent(self, job_id: str, spec: JobSpec | None) -> bool:
        """Whether a job's room is lent: to everybody, or to a job that is gone when the room can be complete."""
        if self.reserved.get(job_id):
            return False  # others have left it
        by = self.complete_by(self.rooms[job_id])
        if by == math.inf:
            self.may_be_lent.add(job_id)
        most_s = None if spec is None else spec.max_runtime
        return job_id in self.lent or (most_s is not None and self.now + most_s <= by < math.inf)

    def complete_by(self, hosts: Sequence[str]) -> float:
        """When all that runs on these hosts is surely gone; infinite if nobody says so of something.

        Nobody says so of what this plan starts there.
        """
        by = math.inf if any(map(self.taken.get, hosts)) else self.now
        for worker in self.workers:
            for occupant in worker.occupants if worker.node_id in hosts else ():
                other = self.all_jobs.get(occupant[1].job_id)
                if occupant not in worker.ending:
                    limit = None if other is None else other.spec.max_runtime
                    by = max(by, math.inf if limit is None or other is None else other.began_at + limit)
        return by

    # -- groups ----------------------------------------------------------------------------------------------------

    def groups(self, spec: JobSpec) -> list[tuple[str, list[Worker]]]:
        if not spec.coscheduling:
            return [(worker.node_id, [worker]) for worker in self.workers]
        key = spec.coscheduling.group_by
        members: dict[AttributeValue, list[Worker]] = {}
        for worker in sorted(self.workers, key=place):
            if key in worker.attributes:
                members.setdefault(worker.attributes[key], []).append(worker)
        return sorted((group_name(value), hosts) for value, hosts in members.items())

    def option(self, spec: JobSpec, name: str, hosts: list[Worker], avoided: set[str], later: bool) -> Option | None:
        """What the group is to the job; None if it is no use, however idle. Later: once what passes has passed."""
        is_slice = spec.coscheduling is not None and spec.coscheduling.group_by == TPU_NAME
        if is_slice and not (is_complete(hosts) and all(self.is_well(spec, worker, later) for worker in hosts)):
            return None
        if any(is_an_error(constraint, worker.attributes) for constraint in spec.constraints for worker in hosts):
            return None
        wanted = len(hosts) if spec.whole_groups else spec.replicas if spec.coscheduling else 1
        good = [worker for worker in hosts if self.is_well(spec, worker, later) and suits(spec, worker)]
        good = [worker for worker in good if worker.node_id not in avoided]
        if len(good) < wanted:
            return None
        ready = [worker for worker in good if self.has_room(spec, worker)]
        return Option(name, hosts, good, ready, wanted, exact=not is_slice or len(hosts) == wanted)

    def is_well(self, spec: JobSpec, worker: Worker, later: bool = False) -> bool:
        slice_name = value_of(worker, TPU_NAME)
        mates = [w.host_index for w in self.workers if slice_name and value_of(w, TPU_NAME) == slice_name]
        unnumbered = bool(mates) and (worker.host_index is None or mates.count(worker.host_index) > 1)
        suspected = worker.suspected and self.now < worker.suspected_until
        passing = not later and ((uses_chips(spec) and worker.foreign) or suspected)
        return not (worker.draining or unnumbered or passing)

    def free(self, worker: Worker, once_ended: bool = False) -> Counter[str]:
        """What is left of the worker, also once all that is over is gone."""
        left = Counter(worker.resources)
        for occupant, held in worker.occupants.items():
            if not (once_ended and self.now < worker.ending.get(occupant, -math.inf) + 30.0):
                left.subtract(held)
        left.subtract({resource: min(amount, left[resource]) for resource, amount in worker.elsewhere.items()})
        left.subtract(self.taken[worker.node_id])
        return left

    def has_room(self, spec: JobSpec, worker: Worker, once_ended: bool = False) -> bool:
        return not self.is_host_kept(worker, spec) and lack(spec, worker, self.free(worker, once_ended)) == 0

    def is_stuck(self, spec: JobSpec, option: Option) -> bool:
        """Whether the group does not get free for now, whatever ends: what has ended there is not confirmed in time."""
        return sum(lack(spec, worker, self.idle_but_for_stuck(worker)) == 0 for worker in option.good) < option.wanted

    def idle_but_for_stuck(self, worker: Worker) -> Counter[str]:
        left = Counter(worker.resources)
        for occupant, since in worker.ending.items():
            if self.now >= since + 30.0:
                left.subtract(worker.occupants[occupant])
        return left

    def is_about_to_be_free(self, spec: JobSpec, option: Option) -> bool:
        return sum(self.has_room(spec, worker, once_ended=True) for worker in option.good) >= option.wanted

    def best_first(self, job: Job, options: list[Option]) -> list[Option]:
        """The free ones."""
        best = sorted((o for o in options if o.free), key=lambda option: self.rank(job, option))
        if (
            best
            and job.spec.coscheduling is None
            and len(job.gangs) > 1
            and job.spec.task_placement == "spread"
            and not takes_accelerators(job)
        ):
            alike = [o for o in best if self.rank(job, o)[:-1] == self.rank(job, best[0])[:-1]]
            share = math.ceil(len(job.gangs) / len(self.workers))
            while all(self.tasks_on(o.hosts[0], job) >= share for o in alike):
                share *= 2
            first = next(o for o in alike if self.tasks_on(o.hosts[0], job) < share)
            best = [first, *(o for o in best if o is not first)]
        return best

    def tasks_on(self, worker: Worker, job: Job) -> int:
        """How many tasks of the job the worker has, with those that the plan gives it."""
        given = sum(
            a.job_id == job.spec.job_id and a.node_id == worker.node_id
            for a in self.assignments
            if isinstance(a, TasksAssignedEvent)
        )
        return given + sum(attempt.job_id == job.spec.job_id for _, attempt in worker.occupants)

    def rank(self, job: Job, option: Option) -> tuple[object, ...]:
        spec = job.spec
        unmet = sum(not is_met(preference, option.hosts) for preference in spec.preferences)
        chips = sum(accelerators(worker.resources) for worker in option.ready[: option.wanted])
        idle_chips = 0.0 if uses_chips(spec) else chips
        left_over = len(option.ready) - option.wanted
        if not spec.coscheduling and uses_chips(spec):
            left_over = int(value_of(option.hosts[0], TPU_VM_COUNT) or 1) - 1
        return not option.exact, unmet, idle_chips, *self.warmth(job, option), left_over, option.name

    def warmth(self, job: Job, option: Option) -> tuple[int, float]:
        """-1 if the job's owner keeps the slice warm, 0 if nobody does, 1 if somebody (else) does.

        Of those that its owner keeps warm, the ones it ran on before come first, by their number.
        """
        spec = job.spec
        if spec.coscheduling and spec.coscheduling.group_by == TPU_NAME:
            holder, before = self.holders.get(option.name), self.before
            if holder == spec.owner:
                return -1, before.index(option.name) if option.name in before else math.inf
            return int(holder is not None), 0
        return int(uses_chips(spec) and any(value_of(worker, TPU_NAME) in self.holders for worker in option.hosts)), 0

    def distance(self, spec: JobSpec, option: Option) -> tuple[int, float, str]:
        """How far a group is from being free: hosts short, what the best of these lack, name."""
        short = option.wanted - len(option.ready)
        lacks = sorted(lack(spec, w, self.free(w)) for w in option.good if w not in option.ready)
        return short, sum(lacks[:short]), option.name


def takes_accelerators(job: Job) -> bool:
    return bool(job.spec.device or accelerators(job.spec.resources))


def is_firm(job: Job) -> bool:
    """Whether somebody leaves, or has left, hosts for the job."""
    return job.promise is not None and job.promise.is_firm
