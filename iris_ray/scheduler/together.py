"""Places all jobs of a group, or none of them.

A trial places the jobs in sequence on a copy of the plan, which is dropped if one of them finds too few groups. Jobs
with few suitable groups go first. A job that fails goes first in the next trial; there are at most as many trials as
jobs. This succeeds whenever possible if the jobs ask for different slices or for the same. It may miss a placement if
the jobs' constraints overlap in part, or if tasks of several sizes fill hosts to the last CPU.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace

from iris_ray.model.jobs import Job
from iris_ray.model.lifecycle import AttemptId
from iris_ray.model.parts import is_on_slices
from iris_ray.model.workers import UNCONFIRMED_S, Occupant, Worker, accelerators
from iris_ray.scheduler.availabilities import Availabilities
from iris_ray.scheduler.availability import assign, buckets_for, choose, num_groups, preferred
from iris_ray.scheduler.candidate_cache import CandidateCache
from iris_ray.scheduler.limits import Allowances, chips_of
from iris_ray.scheduler.pending_reason import ReachedLimit
from iris_ray.scheduler.remaining_capacity import Plan
from iris_ray.scheduler.spreading import Spreading
from iris_ray.state.events import JobAssignedEvent, TasksAssignedEvent
from iris_ray.state.fleet import Fleet

Prefers = Callable[[Job], Collection[str]]
"""Returns the names of the slices, or parts of slices, that a job takes first."""

MOST_TRIALS = 8
"""The largest number of orders in which a plan tries to place a group."""


@dataclass(frozen=True, slots=True)
class GroupPlacement:
    """A placement of all jobs of a group.

    Attributes:
        assignments: the assignments of all gangs, those of the group's first job first.
        granted: the resources that each job takes, in the group's order.
    """

    assignments: tuple[JobAssignedEvent, ...]
    granted: tuple[tuple[Job, dict[str, float]], ...]


@dataclass(frozen=True, slots=True)
class PlacementFailure:
    """The failure to place a job of a group.

    Attributes:
        job: the job.
        free: the number of groups that were free at its turn.
        beside: whether other jobs of the group had been placed before it.
        limit: the limit that the group reached with it, or None.
    """

    job: Job
    free: int
    beside: bool
    limit: ReachedLimit | None = None


def place_together(
    members: Sequence[Job],
    fleet: Fleet,
    cache: CandidateCache,
    plan: Plan,
    available: Availabilities,
    now: float,
    allowances: Allowances | None = None,
    prefers: Prefers = lambda _: (),
) -> GroupPlacement | PlacementFailure:
    """Return a placement of all jobs of a group, or the first failure, without changing any argument.

    Args:
        members: the jobs, none of which has ever had hosts.
        fleet, cache: the workers, and the evaluations of their groups.
        plan: the hosts that the plan has taken so far.
        available: the groups that remain available to each job.
        now: seconds on the clock of the events.
        allowances: the resources that each user and team may still get; None: no limits.
        prefers: see `Prefers`.
    """
    for job in members:  # decides most waiting groups, without a trial
        free = choose(job, available.to(job), {}, num_groups(job)[:1], False, False)[1]
        if free < num_groups(job)[0]:
            return PlacementFailure(job, free, beside=False)
    for job in members:  # evaluates all groups before the trials, which share the evaluations with the plan
        available.to(job).free_in_all()
    order = sorted(members, key=lambda job: (not accelerators(job.spec.resources), _choice(job, available), job.number))
    failure: PlacementFailure | None = None
    for most in (True, False) if any(len(num_groups(job)) > 1 for job in members) else (False,):
        for _ in range(min(len(members), MOST_TRIALS)):
            found = _Trial(fleet, cache, plan, now, allowances, prefers).place(order, most)
            if not isinstance(found, PlacementFailure):
                in_order = [(job, found[job.spec.job_id]) for job in members]
                assignments = (one for _, placed in in_order for one in placed.assignments)
                return GroupPlacement(tuple(assignments), tuple((job, placed.granted) for job, placed in in_order))
            failure = failure or found  # the first one is the easiest to explain
            if found.limit is not None:
                break
            if not found.beside:
                return found
            order = [found.job, *(job for job in order if job is not found.job)]
    assert failure is not None
    return failure


def without_what_ends(fleet: Fleet, hosts: Iterable[Worker], now: float, stays: Collection[Occupant] = ()) -> Fleet:
    """Return a fleet of these hosts as they will be once their occupants have ended.

    ``stays`` has the occupants that don't end by themselves. Ends that are unconfirmed for long don't count, either.
    """
    found = Fleet()
    for worker in hosts:
        stuck = {who for who, since in worker.ending.items() if now >= since + UNCONFIRMED_S}
        left = {who: held for who, held in worker.occupants.items() if who in stuck or who in stays}
        found.put(replace(worker, occupants=left, ending={who: worker.ending[who] for who in left if who in stuck}))
    for user, avoided in fleet.avoided.items():
        for node_id, until in avoided.items():
            found.avoid(user, node_id, until)
    return found


def place_on(
    members: Sequence[Job],
    fleet: Fleet,
    now: float,
    allowances: Allowances | None = None,
    given_away: Plan | None = None,
) -> GroupPlacement | PlacementFailure:
    """Return a placement of all jobs of a group in a separate fleet, as `place_together` does.

    ``given_away`` is the plan that has taken resources on these hosts, or None.
    """
    cache, plan = CandidateCache(), Plan()
    if given_away is not None:
        for node_id in given_away.taken.keys() & fleet.workers.keys():
            plan.take((fleet.workers[node_id],), given_away.taken[node_id], given_away.takers[node_id])
    available = Availabilities(fleet, cache, plan, now)
    return place_together(members, fleet, cache, plan, available, now, allowances)


class FleetOnceLeft:
    """Hosts as they will be once some occupants have left, copied once for all groups that a plan asks about.

    Args:
        fleet: the fleet as it is.
        hosts: some of its workers, or all.
        now: seconds on the clock of the events.
        stays: returns whether an attempt does not leave.
    """

    def __init__(self, fleet: Fleet, hosts: Collection[Worker], now: float, stays: Callable[[AttemptId], bool]) -> None:
        staying = {who for host in hosts for who in host.occupants if who not in host.ending and stays(who[1])}
        self._fleet = without_what_ends(fleet, hosts, now, staying)
        self._in_use = {host.node_id for host in hosts if host.occupants}
        self._free: dict[str | None, Collection[str]] = {}  # attribute → groups without occupants
        self._cache = CandidateCache()
        self._now = now
        self._without: dict[frozenset[str], tuple[Plan, Availabilities]] = {}  # the latest two sets of hosts

    def place(
        self, members: Sequence[Job], away: Collection[str], allowances: Allowances | None
    ) -> GroupPlacement | PlacementFailure:
        """Return a placement of all jobs of a group without some hosts.

        It is preferably on slices, and parts of slices, that are free already.
        """
        known = frozenset(away)
        if known not in self._without:
            plan = Plan()
            for node_id in known & self._fleet.workers.keys():
                plan.keep(self._fleet.workers[node_id], "")
            self._without = dict([*self._without.items()][-1:])
            self._without[known] = plan, Availabilities(self._fleet, self._cache, plan, self._now)
        plan, available = self._without[known]
        prefers = self._free_already
        return place_together(members, self._fleet, self._cache, plan, available, self._now, allowances, prefers)

    def _free_already(self, job: Job) -> Collection[str]:
        group_by = job.requirement.group_by
        if not is_on_slices(group_by):
            return ()
        if group_by not in self._free:
            grouping = self._fleet.grouping(group_by)
            members = ((name, grouping.members(name)) for name in grouping)
            self._free[group_by] = {
                name for name, hosts in members if self._in_use.isdisjoint(h.node_id for h in hosts)
            }
        return self._free[group_by]


def only(hosts: Iterable[Worker]) -> Fleet:
    """Return a fleet of these hosts as they are now."""
    found = Fleet()
    for worker in hosts:
        found.put(replace(worker))
    return found


def _choice(job: Job, available: Availabilities) -> int:
    """Return the number of suitable groups that a job does not need."""
    found = available.to(job)
    return sum(found.suitable(bucket) for bucket in buckets_for(job, found)) - num_groups(job)[0] * len(job.gangs)


@dataclass(slots=True)
class _Placed:
    """The hosts of a job in a trial."""

    assignments: list[JobAssignedEvent] = field(default_factory=list)
    granted: dict[str, float] = field(default_factory=dict)


class _Trial:
    """A trial on a copy of the plan."""

    def __init__(
        self,
        fleet: Fleet,
        cache: CandidateCache,
        plan: Plan,
        now: float,
        allowances: Allowances | None,
        prefers: Prefers,
    ) -> None:
        touched = [fleet.workers[node_id] for node_id in {**plan.taken, **plan.kept} if node_id in fleet.workers]
        self._plan = Plan(dict(plan.taken), dict(plan.kept), dict(plan.takers), set(plan.without_chips), touched)
        self._fleet = fleet
        self._available = Availabilities(fleet, cache, self._plan, now)
        self._allowances = allowances
        self._prefers = prefers

    def place(self, order: Sequence[Job], most: bool) -> dict[str, _Placed] | PlacementFailure:
        """Place the jobs in this order, each on as many groups as it can use (``most``) or as few."""
        placed: dict[str, _Placed] = {}
        failure: PlacementFailure | None = None
        for job in order:
            mine = placed[job.spec.job_id] = _Placed()
            if (failure := self._place(job, mine, most, beside=len(placed) > 1)) is not None:
                break
        if self._allowances is not None:
            for job in order:
                if (found := placed.get(job.spec.job_id)) is not None:
                    self._allowances.not_granted(job, found.granted)
        return placed if failure is None else failure

    def _place(self, job: Job, mine: _Placed, most: bool, beside: bool) -> PlacementFailure | None:
        """Place all gangs of a job. Return the failure if one can't be placed."""
        allowances, available = self._allowances, self._available.to(job)
        own = {**preferred(job, self._fleet), **dict.fromkeys(self._prefers(job), -1)}
        spreading = Spreading(job, self._fleet) if job.spec.spreads else None
        for gang in job.gangs:
            wanted = num_groups(job)
            if allowances is not None:
                if (reached := allowances.reached(job)) is not None:
                    return PlacementFailure(job, 0, beside, reached)
                wanted = allowances.num_groups(job)
            wanted = wanted if most else wanted[:1]
            found, free = choose(job, available, own, wanted, False, False)
            if not found:
                return PlacementFailure(job, free, beside)
            if spreading is not None:
                found = [spreading.host(found[0], available)]
                spreading.took(found[0])
            if allowances is not None and len(within := allowances.within(job, found, wanted, available)) < len(found):
                if not within:
                    return PlacementFailure(
                        job, free, beside, allowances.short_of_chips(job, chips_of(found, available))
                    )
                found = within
            assignment, granted = assign(job, gang, available, found, self._plan)
            mine.assignments.append(assignment)
            for resource, amount in granted.items():
                mine.granted[resource] = mine.granted.get(resource, 0.0) + amount
            if allowances is not None:
                allowances.granted(job, granted)
        return None


def take(found: GroupPlacement, fleet: Fleet, plan: Plan) -> tuple[str, ...]:
    """Take a group's placement from the plan. Return the node ids of its hosts."""
    jobs = {job.spec.job_id: job for job, _ in found.granted}
    hosts: dict[str, None] = {}
    for one in found.assignments:
        need = jobs[one.job_id].requirement
        for node_id, number in _tasks(one):
            worker = fleet.workers[node_id]
            plan.take((worker,), need.demand(worker), one.job_id)
            plan.take_more(worker, need.demand(worker), number - 1)
            hosts[node_id] = None
    return tuple(hosts)


def _tasks(assignment: JobAssignedEvent) -> list[tuple[str, int]]:
    """Return the hosts in an assignment, with the number of tasks on each."""
    if isinstance(assignment, TasksAssignedEvent):
        return [(assignment.node_id, len(assignment.task_indices))]
    return [(node_id, 1) for group in assignment.groups for node_id in group]
