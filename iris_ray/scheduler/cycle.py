"""Makes one plan: goes through the queue and gives each gang hosts or a pending reason."""

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from iris_ray.model.jobs import Gang, Job, Kind
from iris_ray.model.requirement import Requirement
from iris_ray.model.workers import Worker, accelerators
from iris_ray.scheduler.availabilities import Availabilities
from iris_ray.scheduler.availability import (
    Availability,
    assign,
    buckets_for,
    choose,
    fixed_size,
    hosts_of,
    num_groups,
    preferred,
)
from iris_ray.scheduler.candidate_cache import EVALUATIONS_PER_GANG, CandidateCache, EvaluationLimits
from iris_ray.scheduler.eviction_costs import EvictionRules, Running
from iris_ray.scheduler.evictions import Evictor, Taking
from iris_ray.scheduler.explanation import (
    Explainer,
    ImpossibleConstraints,
    Unplaced,
    awaited_events,
    limited,
    not_considered,
    paused,
)
from iris_ray.scheduler.fair_queue import Deadlines, FairQueue, SearchFairness, Usage, comes_last
from iris_ray.scheduler.group_rooms import GroupRooms
from iris_ray.scheduler.limits import Allowances, chips_of
from iris_ray.scheduler.pending_reason import LimitAccount, PendingReason, Protected, ReachedLimit
from iris_ray.scheduler.promises import Lifted, PlannedPromises
from iris_ray.scheduler.reasons import Reasons
from iris_ray.scheduler.remaining_capacity import Plan
from iris_ray.scheduler.spreading import Spreading
from iris_ray.scheduler.team_quotas import TeamQuotas
from iris_ray.scheduler.together import PlacementFailure, take
from iris_ray.state.events import (
    AssignedEvent,
    GroupAssignedEvent,
    PromiseEvent,
    TasksAssignedEvent,
    TaskUnschedulableEvent,
)
from iris_ray.state.fleet import Fleet
from iris_ray.state.growth import moved_to_grow
from iris_ray.state.team_use import TeamUse
from iris_ray.state.user_limits import PastUsage, UserLimits
from iris_ray.state.waiting_jobs import Run, WaitingJobs


@dataclass(slots=True)
class SchedulingResult:
    """A plan: the events that it proposes, and why the other jobs wait.

    Attributes:
        assignments: events that start gangs.
        pending_reasons: job id → reason, for every other pending job that the plan considered.
        timed_out: events that end jobs that did not run within their ``scheduling_timeout``.
        unschedulable: events that end jobs with a constraint that no worker can evaluate.
        limited: the kinds of plain jobs that have reached a limit and stay beyond it until the usage that counts
            towards it changes, each with the accounts that determine it. See `LimitedKinds`.
        starving: ids of jobs that have waited longer than the backfill bound, and for hosts, not for a limit, and
            for which groups are reserved.
        promises: events that reserve hosts for jobs and name the victims.
        gave_up_promise: whether a job lost its promise because it runs or can't run for a while. The next plan may
            then promise hosts to other jobs, and must consider all jobs.
        complete: whether the plan went through the whole queue. Otherwise it stopped at its limit of gangs, and the
            next plan continues once this one is committed.
    """

    assignments: list[AssignedEvent] = field(default_factory=list)
    pending_reasons: Reasons = field(default_factory=Reasons)
    timed_out: list[TaskUnschedulableEvent] = field(default_factory=list)
    unschedulable: list[TaskUnschedulableEvent] = field(default_factory=list)
    limited: dict[Kind, tuple[LimitAccount, ...]] = field(default_factory=dict)
    starving: list[str] = field(default_factory=list)
    promises: list[PromiseEvent] = field(default_factory=list)
    gave_up_promise: bool = False
    complete: bool = True


_Loan = tuple[Requirement, tuple[int, ...], int | None, tuple[str, ...]]


def _loan(job: Job, wanted: tuple[int, ...], lent: Lifted) -> _Loan:
    """Return a key of a job's wants and of the hosts that it may be lent."""
    return job.requirement, wanted, fixed_size(job), tuple(worker.node_id for worker, _ in lent)


TASKS_PER_GANG = 10
"""The number of tasks in a gang that takes about twice the work of placing a single task."""


def _borrows_otherwise(job: Job) -> bool:
    """Return whether a job may be lent other reserved hosts than other jobs of its kind."""
    return job.spec.max_runtime is not None or job.spec.runs_once


class Cycle:
    """One pass over the queue, or over its beginning. `scheduler.py` describes the steps.

    Args:
        fleet, cache: the workers, and the evaluations of their groups.
        deadlines: the time, and the time limits that have passed.
        most: the number of gangs, or the equivalent in other work (`TASKS_PER_GANG`, `EVALUATIONS_PER_GANG`), after
            which the plan ends; None for no limit.
        running: the running attempts.
        rules: the conditions for evicting gangs of lower bands; None: no evictions.
        limits: the users' limits; None: no limits.
        fairness: the kinds of jobs for which earlier plans found no victims.
        evaluations: selects the jobs that the plan considers; None: the first in the queue.
        teams: the teams and their usage; None: no teams.
    """

    def __init__(
        self,
        fleet: Fleet,
        cache: CandidateCache,
        deadlines: Deadlines,
        most: int | None,
        running: Running | None = None,
        rules: EvictionRules | None = None,
        limits: UserLimits | None = None,
        fairness: SearchFairness | None = None,
        evaluations: EvaluationLimits | None = None,
        teams: TeamUse | None = None,
    ) -> None:
        self._fleet = fleet
        self._most = most
        self._cache = cache
        self._deadlines = deadlines
        self._limits = evaluations or EvaluationLimits()
        self._limits.begin_plan(fleet)
        self._evaluated_before = cache.evaluated
        self._plan = Plan()
        self._teams = teams
        self._allowances = Allowances(limits, accelerators(fleet.totals), TeamQuotas(teams, fleet, deadlines.now))
        self._explainer = Explainer(fleet, self._plan, cache.shortages)
        self._impossible = ImpossibleConstraints(fleet.workers.values())
        self._available = Availabilities(fleet, cache, self._plan, deadlines.now)
        self._available_to = self._available.to
        self._in_vain: dict[Kind, Unplaced] = {}  # kinds of jobs at this place in the queue that found too few groups
        self._over: dict[Kind, PendingReason] = {}  # kinds of jobs at this place that have reached a limit
        self._placed: Counter[str] = Counter()  # job id → number of its gangs
        self._spreads: dict[str, Spreading] = {}  # by job id
        self._untried: dict[str, Iterator[int]] = {}  # job id → positions of its untried gangs
        self._result = SchedulingResult()
        self._lent_in_vain: set[_Loan] = set()
        self._waiting = WaitingJobs()
        self._some_keep_reasons = False
        self._running = running or Running()
        self._rules = rules
        self._fairness = fairness or SearchFairness()

    def run(
        self,
        pending: WaitingJobs,
        usage: Usage,
        past: PastUsage | None,
        idle: Iterable[Job] = (),
        some_keep_reasons: bool = False,
    ) -> SchedulingResult:
        """Make the plan. Call this only once. ``some_keep_reasons``: whether jobs wait that are not tried."""
        self._waiting, self._some_keep_reasons = pending, some_keep_reasons
        fleet, plan, allowances, deadlines = self._fleet, self._plan, self._allowances, self._deadlines
        about = fleet, plan, allowances, deadlines, self._fairness
        self._evictor = Evictor(self._running, self._rules, idle, *about)
        about_groups = fleet, self._cache, plan, self._available, allowances
        self._groups = GroupRooms(*about_groups, self._running, self._evictor, deadlines.now)
        about_promises = fleet, deadlines, plan, allowances, self._evictor, self._groups
        promises = self._promises = PlannedPromises(pending.others.values(), *about_promises)

        def source(job: Job) -> int:
            return promises.tier_of(job)[0] if job.promise is not None else allowances.quota_source(job)

        about_queue = (
            usage,
            past,
            fleet.totals,
            deadlines,
            self._teams,
            source,
            self._pass_over,
            self._share_reason,
        )
        queue = self._queue = FairQueue(pending, *about_queue)
        tier = None
        for job in queue:
            if queue.tier != tier:
                tier = queue.tier
                self._in_vain.clear()
                self._over.clear()
                self._promises.begin(tier, self._available_to)
            granted = self._try(job)
            if self._most is not None and self._is_full(self._most):
                self._result.complete = False
                break
            if granted is not None:
                comes_again = not job.members and len(job.pending) > self._placed[job.spec.job_id]
                queue.granted(job, granted, comes_again)
        self._limits.end_plan(self._result.complete)
        self._evictor.end_plan(self._result.complete)
        self._explainer.complete()
        self._result.promises = self._promises.changes(self._placed)
        for event in self._result.promises:
            if not event.node_ids and (lost := pending.others.get(event.job_id)) is not None:
                self._result.limited.pop(lost.kind, None)  # it may be plain now, and its reason was noted as its own
        self._result.gave_up_promise = self._promises.given_up
        return self._result

    def _share_reason(self, run: Run) -> bool:
        """Return whether plain jobs of a kind wait for the same reason as an earlier one, and record that reason."""
        first, reasons = run[0], self._result.pending_reasons
        if (limited_like := self._over.get(first.kind)) is not None:
            reasons.note_shared(run, limited_like)
            return True
        before = self._in_vain.get(first.kind)
        if before is None or self._is_special(first, first.gangs[next(iter(first.pending))], before):
            return False  # the others have not waited for longer
        if self._promises.any_kept and any(map(_borrows_otherwise, run)):
            return False
        to_all = before.available.to_all
        reasons.note_shared(run, before.reason, to_all.unplaced, to_all.first_unplaced)
        to_all.count_unplaced(first, len(run))
        return True

    def _is_full(self, most: int) -> bool:
        evaluated = self._cache.evaluated - self._evaluated_before
        placed = max(self._placed.total(), self._plan.tasks / TASKS_PER_GANG)
        return max(placed, evaluated / EVALUATIONS_PER_GANG) >= most

    def _try(self, job: Job) -> Mapping[str, float] | None:
        """Place one gang of the job and return its resources. If none can be placed, record why and return None.

        If no other user is in turn, more of the job's tasks may be placed.
        """
        job_id = job.spec.job_id
        if job.members:
            return None if job_id in self._placed else self._try_group(job)
        untried = self._untried.get(job_id)
        if untried is None:
            if (late := self._deadlines.timed_out(job)) is not None:
                self._result.timed_out.append(late)
                return None
            if job.requirement not in self._available and not self._limits.admit(job):
                self._result.pending_reasons.note(job, not_considered(job))
                return None
            untried = self._deadlines.in_turn(job)
        for position in untried:
            gang = job.gangs[position]
            if (pause_s := self._deadlines.seconds_paused(gang)) > 0:
                self._pause(job, pause_s, gang.error)
                continue
            granted = self._place(job, gang)
            if granted is not None and len(job.pending) > 1:  # the job comes again
                self._untried[job_id] = untried
                if self._queue.is_alone and not (job.promise or accelerators(granted)):
                    return self._place_beside(job, untried, granted)
            return granted
        if len(job.gangs) > 1 and len(job.pending) > self._placed[job_id] and self._deadlines.is_returning(job):
            self._untried.pop(job_id, None)
            self._queue.comes_by_share(job)
        return None

    def _place(self, job: Job, gang: Gang) -> Mapping[str, float] | None:
        if (before := self._in_vain.get(job.kind)) is not None and not self._is_special(job, gang, before):
            self._result.pending_reasons.note(job, self._explainer.same_reason(job, before))
            return None
        lifted = self._promises.lift(job)
        self._result.limited.pop(job.kind, None)
        if (reached := self._allowances.reached(job)) is not None:
            may_make_room = self._evictor.may_make_room(job, reached)
            self._limit(job, gang, reached, lifted, may_make_room)
            if job.is_plain and job.kind in self._over and not (reached.is_kept_back or may_make_room):
                self._result.limited[job.kind] = self._allowances.accounts(job, reached)
            return None
        has_groups = job.spec.coscheduling is not None
        hopes = has_groups and self._deadlines.waits_for_more(gang)
        awaits = has_groups and self._deadlines.waits_for_own_slices(gang)
        ending = self._own_chips_ending(job, gang) if hopes else 0.0
        available, wanted = self._available_to(job), self._allowances.num_groups(job, ending)
        if len(wanted) > 1 and self._may_not_grow(job):
            wanted = tuple(count for count in wanted if count <= gang.groups_had) or wanted[:1]  # growth comes last
        found: list[str] = []
        lent: Lifted = []
        alike = wanted, fixed_size(job)
        free = None if lifted else available.failed_placements.get(alike)
        if free is None:
            found, free = choose(job, available, preferred(job, self._fleet, gang), wanted, hopes, awaits)
        if free < wanted[0]:
            if not lifted:
                available.failed_placements[alike] = free
            if lent := self._lend(job, available, wanted):
                found, _ = choose(job, available, preferred(job, self._fleet, gang), wanted, False, False)
                if not found:
                    self._lent_in_vain.add(_loan(job, wanted, lent))
        if found and job.spec.spreads:
            found = [self._spread(job, [*lifted, *lent]).host(found[0], available)]
        names = self._allowances.within(job, found, wanted, available) if found else found
        waits = ending > 0 and len(names) < len(found)  # until its own chips are free and it may have more groups
        if names and not waits:
            assignment, granted = assign(job, gang, available, names, self._plan)
            if lent:
                hosts = hosts_of(assignment)
                lent_by = dict.fromkeys(job_id for worker, job_id in lent if worker.node_id in hosts)
                assignment = replace(assignment, lent_by=tuple(lent_by))
            self._allowances.granted(job, granted)
            self._in_vain.clear()  # the user may have reached a limit
            self._result.assignments.append(assignment)
            self._placed[job.spec.job_id] += 1
            if isinstance(assignment, TasksAssignedEvent) and job.spec.spreads:
                self._spreads[job.spec.job_id].took(assignment.node_id)
            if lifted or self._promises.hosts_of(job.spec.job_id):
                self._let_go(job, lifted, hosts_of(assignment))
            if lent:
                self._promises.put_back(lent)
            return granted
        needed = chips_of(found if waits else found[: wanted[0]], available) if found else 0.0
        if lent:
            self._promises.put_back(lent)
        if found:
            self._limit(job, gang, self._allowances.short_of_chips(job, needed), lifted)
        else:
            self._wait(job, gang, available, free, lifted)
        return None

    def _may_not_grow(self, job: Job) -> bool:
        """Return whether a returning gang may take no more groups than it had, because other jobs wait.

        A gang that moves to its growth spare's slices may take them: the waiting jobs could have taken them before.
        """
        grows = job.spec.is_one_gang and moved_to_grow(job.times.attempts)
        return self._deadlines.is_returning(job) and not grows and self._others_wait(job)

    def _others_wait(self, job: Job) -> bool:
        """Return whether any other job waits for hosts."""
        waiting = (one for one in self._waiting.others.values() if not comes_last(one) and one is not job)
        return bool(self._waiting.by_kind) or self._some_keep_reasons or any(waiting)

    def _lend(self, job: Job, available: Availability, wanted: tuple[int, ...]) -> Lifted:
        """Free the hosts that are reserved for other jobs and lent to a job, unless they are known not to help."""
        lent = self._promises.lendable(job)
        if not lent or _loan(job, wanted, lent) in self._lent_in_vain:
            return []
        for worker, _ in lent:
            self._plan.lift(worker)
        return lent

    # -- groups of jobs --------------------------------------------------------------------------------------------

    def _try_group(self, leader: Job) -> Mapping[str, float] | None:
        """Place all jobs of a group and return their resources. If they can't be placed, record why and return None."""
        if late := [one for job in leader.members if (one := self._deadlines.timed_out(job)) is not None]:
            self._result.timed_out += late[:1]  # which ends the others
            return None
        for job in leader.members:
            self._limits.admit(job)
        lifted, own = self._promises.lift_of_group(leader), self._promises.hosts_of(leader.spec.job_id)
        found = self._groups.place(leader, own)
        if isinstance(found, PlacementFailure):
            self._group_waits(leader, found, lifted)
            return None
        hosts, total = take(found, self._fleet, self._plan), Counter[str]()
        for job, granted in found.granted:
            self._allowances.granted(job, granted)
            total.update(granted)
            self._placed[job.spec.job_id] += len(job.gangs)
        self._result.assignments.append(GroupAssignedEvent(found.assignments))
        self._in_vain.clear()
        self._let_go(leader, lifted, hosts)
        return total

    def _group_waits(self, leader: Job, failure: PlacementFailure, lifted: Lifted) -> None:
        """Record why a group waits, and reserve hosts for it if it starves."""
        name, about, reasons = leader.spec.group, leader.members, self._result.pending_reasons
        assert name is not None
        which = name.name_of(failure.job.spec.job_id)
        if failure.limit is not None:
            self._let_go(leader, lifted, reason=failure.limit.in_short)
            for job in about:
                reasons.note(job, replace(limited(job, failure.limit, ()), together=(name.name, which)))
            return
        for job in about if not leader.started else ():
            problem = self._impossible.problem_of(self._available_to(job).candidates)
            if problem is not None:
                self._result.unschedulable.append(TaskUnschedulableEvent(job.spec.job_id, 0, problem))
                self._let_go(leader, lifted, reason=problem)
                return
        self._groups.limit = None
        node_ids = self._promises.keep_for_group(leader, lifted)
        hosts = [self._fleet.workers[node_id] for node_id in node_ids]
        kept = tuple(dict.fromkeys(worker.slice_name or worker.name for worker in hosts))
        if kept and self._deadlines.is_starving(leader, leader.gangs[0]):
            self._result.starving.append(leader.spec.job_id)
        waits_for: tuple[str, ...] = ()
        if kept:
            waits_for = self._events_on(leader, hosts, failure.job.requirement)
        taken_from = self._evictor.taken_from(leader) if kept else ()
        for job in about:
            available = self._available_to(job)
            free = failure.free if job is failure.job else choose(job, available, {}, num_groups(job), False, False)[1]
            reason = self._explainer.reason(job, available, free, kept, taken_from, None, waits_for)
            if self._groups.limit is not None and not kept:
                reason = limited(job, self._groups.limit, ())
            reasons.note(job, replace(reason, together=(name.name, which)))

    # -- helpers ---------------------------------------------------------------------------------------------------

    def _spread(self, job: Job, lifted: Lifted) -> Spreading:
        spreading = self._spreads.get(job.spec.job_id)
        if spreading is None:
            spreading = self._spreads[job.spec.job_id] = Spreading(job, self._fleet)
        if lifted:
            spreading.begin_anew()
        return spreading

    def _place_beside(self, job: Job, untried: Iterator[int], granted: Mapping[str, float]) -> Mapping[str, float]:
        """Place more tasks on the host of the job's last task while there is room. Return the resources of all.

        A job that spreads its tasks stops at the host's share. The host stays the best choice, because taking resources
        changes a host's room but not its rank.
        """
        last = self._result.assignments[-1]
        if not isinstance(last, TasksAssignedEvent):
            return granted
        job_id, need, taken, indices = job.spec.job_id, job.requirement, self._plan.taken, [*last.task_indices]
        worker = self._fleet.workers[last.node_id]
        most = need.most_beside(worker, taken[worker.node_id])
        most = min(most, math.inf if self._most is None else self._most - self._placed.total())
        spreading = self._spreads.get(job_id)
        if spreading is not None:
            most = min(most, spreading.room_in_share(worker.node_id))
        while len(indices) <= most:
            position = next(untried, None)
            if position is None:
                break
            gang = job.gangs[position]
            if (pause_s := self._deadlines.seconds_paused(gang)) > 0:
                self._pause(job, pause_s, gang.error)
                continue
            indices.append(gang.tasks[0].index)
        number = len(indices) - 1
        self._plan.take_more(worker, granted, number)
        if spreading is not None:
            spreading.took(worker.node_id, number)
        self._result.assignments[-1] = replace(last, task_indices=tuple(indices))
        self._placed[job_id] += number
        more = {resource: amount * number for resource, amount in granted.items()}
        self._allowances.granted(job, more)
        return {resource: amount + more[resource] for resource, amount in granted.items()}

    def _own_chips_ending(self, job: Job, gang: Gang) -> float:
        """Return the chips that a gang's last attempt still holds; 0 if the gang has only one possible group count."""
        if job.spec.coscheduling is None or len(num_groups(job)) == 1:
            return 0.0
        grouping, job_id = self._fleet.grouping(job.spec.coscheduling.group_by), job.spec.job_id
        workers = (worker for name in gang.groups for worker in grouping.members(name))
        own = (held for worker in workers for who, held in worker.occupants.items() if who[1].job_id == job_id)
        return sum(map(accelerators, own))

    def _take(self, job: Job, available: Availability) -> tuple[tuple[str, ...], Protected | None]:
        """Evict attempts for a job if the job can then run.

        Returns:
            The names of the groups that are promised to the job, and the hosts that it may take later.
        """
        lifted = self._promises.lift_own(job)
        own = [worker.node_id for worker, _ in lifted]
        lifted += self._promises.lift_in_use(job)
        taking = self._evictor.find(job, available, own, self._placed[job.spec.job_id])
        self._promises.put_back(lifted)
        if isinstance(taking, Taking):
            self._promises.take(job, taking)
            self._in_vain.clear()  # another promise may have ended
        return (taking.names, None) if isinstance(taking, Taking) else ((), taking)

    def _let_go(self, job: Job, lifted: Lifted, node_ids: Collection[str] = (), reason: str = "") -> None:
        """End a job's promise, which frees its lifted hosts, except those that are promised to another job."""
        self._promises.give_up(job, node_ids, reason)
        self._promises.put_back(lifted)
        if lifted:
            self._in_vain.clear()
            self._over.clear()
            self._available.forget_failures()
            for spreading in self._spreads.values():
                spreading.begin_anew()

    def _limit(self, job: Job, gang: Gang, reached: ReachedLimit, lifted: Lifted, may_make_room: bool = True) -> None:
        """Record that a gang waits for a limit. In general it loses its promise, so that others may use the hosts.

        ``may_make_room``: see `Evictor.may_make_room`.
        """
        kept: tuple[str, ...] = ()
        if self._keeps_its_hosts(job, reached):
            kept = self._promises.keep(job, gang, self._available_to(job), lifted)
        else:
            self._let_go(job, lifted, reason=reached.in_short)
            is_first = reached.what != "running jobs" and not reached.before
            if may_make_room and is_first and not self._own_chips_ending(job, gang):
                taking = self._evictor.find_within_limit(job, self._available_to(job), reached)
                if taking is not None:
                    self._promises.take(job, taking)
                    kept = taking.names
            if not kept and self._waits_too_long(job, gang):
                reached = self._allowances.keep_for(job, reached)
                self._in_vain.clear()
        reason = limited(job, reached, kept)
        self._result.pending_reasons.note(job, reason)
        if job.is_plain and not (kept or lifted):
            self._over[job.kind] = limited(job, replace(reached, kept=False), kept=()) if reached.kept else reason

    def _keeps_its_hosts(self, job: Job, reached: ReachedLimit) -> bool:
        """Return whether a job with victims, or a returning gang, is within its limits once some attempts have left.

        These are all that leave or have ended; for a gang without victims, only those of its own job.
        """
        is_firm, returns = self._promises.has_firm(job), self._deadlines.is_returning(job)
        if not is_firm and (job.spec.spare_for is not None or not returns):
            return False
        given_back = self._evictor.given_back().items()
        left = {attempt: held for attempt, held in given_back if is_firm or attempt.job_id == job.spec.job_id}
        return self._allowances.limit_once_left(job, reached.needed, left, is_asked=True) is None

    def _pass_over(self, job: Job, quota_source: int) -> None:
        """Reserve its team's quota for a starving job, so that the team's lower bands don't take it first."""
        has_quota = job.promise is not None or job.members  # for its promised hosts; groups get none
        if not has_quota and self._waits_too_long(job, job.gangs[next(iter(job.pending))]):
            self._allowances.keep_quota_for(job, quota_source)

    def _waits_too_long(self, job: Job, gang: Gang) -> bool:
        return self._deadlines.is_starving(job, gang) and not comes_last(job) and self._has_hosts_for(job)

    def _has_hosts_for(self, job: Job) -> bool:
        """Return whether the cluster has enough groups that suit a job, including those in use."""
        available = self._available_to(job)
        exist = sum(available.suitable(bucket, later=True) for bucket in buckets_for(job, available))
        return exist >= num_groups(job)[0]

    def _wait(self, job: Job, gang: Gang, available: Availability, free: int, lifted: Lifted) -> None:
        job_id = job.spec.job_id
        if not job.started and (problem := self._impossible.problem_of(available.candidates)) is not None:
            self._result.unschedulable.append(TaskUnschedulableEvent(job_id, gang.tasks[0].index, problem))
            self._let_go(job, lifted, reason=problem)
            return
        kept = self._promises.keep(job, gang, available, lifted)
        if lifted and not kept:
            self._in_vain.clear()
        if kept and self._promises.hosts_of(job.spec.job_id) and self._deadlines.is_starving(job, gang):
            self._result.starving.append(job_id)
        searches = not self._promises.has_firm(job) and self._evictor.may_help(job)
        taken, protected = self._take(job, available) if searches else ((), None)
        kept = taken or kept
        taken_from, waits_for = (self._evictor.taken_from(job), self._waits_for(job, kept)) if kept else ((), ())
        reason = self._explainer.reason(job, available, free, kept, taken_from, protected, waits_for)
        self._result.pending_reasons.note(job, reason)
        hopes = free >= num_groups(job)[0]  # it could run, but waits for more groups or for its own
        if not (searches or kept or lifted or hopes or self._is_special(job, gang)):
            self._in_vain[job.kind] = Unplaced(job, available, reason)

    def _waits_for(self, job: Job, names: Iterable[str]) -> tuple[str, ...]:
        groups = filter(None, map(self._fleet.grouping(job.requirement.group_by).get, names))
        hosts = (worker for group in groups for worker in group.workers)
        return self._events_on(job, hosts, job.requirement)

    def _events_on(self, job: Job, hosts: Iterable[Worker], need: Requirement) -> tuple[str, ...]:
        about = self._evictor.deadline_of, self._deadlines.now, self._running.jobs
        return awaited_events(job, hosts, need, *about)

    def _is_special(self, job: Job, gang: Gang, before: Unplaced | None = None) -> bool:
        """Return whether a gang may find groups even if gangs of other jobs of its kind found too few.

        A gang that starves may get a promise. But if an older plain job of its kind starves and got none, it gets none
        either. ``before``: the other job; None: any.
        """
        if job.attempt or job.avoided or job.spec.spare_for is not None:  # the available hosts may differ for it
            return True
        if not job.is_plain or (self._promises.any_kept and _borrows_otherwise(job)):
            return self._promises.any_kept or self._deadlines.is_starving(job, gang)
        older = None if before is None else before.job.gangs[next(iter(before.job.pending))]
        return older is not None and older.waiting_since > gang.waiting_since and self._deadlines.is_starving(job, gang)

    def _pause(self, job: Job, pause_s: float, cause: str | None) -> None:
        """Record that a gang pauses."""
        reasons, job_id = self._result.pending_reasons, job.spec.job_id
        if job_id not in reasons:
            reasons.note(job, paused(job, pause_s, cause))
