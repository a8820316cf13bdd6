"""What must hold after every event and of every plan: the state agrees with the account that `Bookkeeper` keeps."""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Set

from iris_ray.errors import IllegalTransitionError
from iris_ray.model.constraints import ConstraintOp
from iris_ray.model.ids import AttemptId
from iris_ray.model.job_spec import PriorityBand, SpareFor, SparePurpose
from iris_ray.model.jobs import Gang, Job
from iris_ray.model.lifecycle import TRANSITIONS, JobState, TaskState
from iris_ray.model.notices import NoticeKind
from iris_ray.model.workers import TPU_NAME, TPU_VM_COUNT, Occupant, Worker
from iris_ray.scheduler.pending_reason import PendingKind, PendingReason
from iris_ray.scheduler.result import SchedulingResult
from iris_ray.scheduler.scheduler import BACKFILL_BOUND_S
from iris_ray.state.events import (
    AssignedEvent,
    Event,
    EvictionEvent,
    GangAssignedEvent,
    GangMovedEvent,
    JobSubmittedEvent,
    MaintenanceCalledOffEvent,
    PoolRestartedEvent,
    SpareGivenBackEvent,
    TaskAssignedEvent,
    TaskDispatchFailedEvent,
    TaskStateChangedEvent,
    WorkerDrainedEvent,
    WorkerFailedEvent,
    WorkerRegisteredEvent,
)
from iris_ray.state.instructions import Instructions
from tests.proofs.state_machine.account import Need, demand_of, is_nearer, uses_chips
from tests.proofs.state_machine.bookkeeping import Bookkeeper
from tests.proofs.state_machine.strategies import OWNERS
from tests.proofs.state_machine.views import TERMINAL, GangView, JobView, view, view_all, view_jobs, when
from tests.support.worlds import World

S = TaskState

UserAndBand = tuple[str, PriorityBand]


def suits(job: Job, worker: Worker) -> bool:
    """Whether a worker is what the job asks for, used or not."""
    spec = job.spec
    asked_for = {constraint.key for constraint in spec.constraints if constraint.op is not ConstraintOp.NOT_EXISTS}
    tolerated = asked_for | {f"taint:{name}" for name in spec.tolerations}
    needs = {r: n for r, n in spec.resources.items() if n and not (r == "TPU" and spec.whole_groups)}
    try:
        return (
            all(constraint.matches(worker.attributes) for constraint in spec.constraints)
            and all(key in tolerated for key in worker.attributes if key.startswith("taint:"))
            and all(worker.resources.get(resource, 0.0) >= amount for resource, amount in needs.items())
            and (not uses_chips(spec) or worker.resources.get("TPU", 0.0) > 0)
        )
    except TypeError:
        return False


def takes_new(worker: Worker, now: float) -> bool:
    numbered = TPU_NAME not in worker.attributes or worker.host_index is not None
    suspected = worker.suspected and now < worker.suspected_until
    return numbered and not (worker.draining or worker.foreign or suspected or worker.duplicate)


def job_of(event: Event, default: str) -> str:
    """The id of the job that an event is about; the default if it is about none in particular."""
    attempt: AttemptId | None = getattr(event, "attempt", None)
    return attempt.job_id if attempt is not None else getattr(event, "job_id", default)


def spares_given_by(event: Event) -> set[str]:
    """The ids of the spares that an event asks for, and of other victims."""
    if isinstance(event, SpareGivenBackEvent):
        return {event.job_id}
    return {attempt.job_id for attempt in event.victims} if isinstance(event, EvictionEvent) else set()


def counts_of(job: Job) -> tuple[int, ...]:
    return job.spec.coscheduling.num_groups if job.spec.coscheduling else (1,)


class Oracle(Bookkeeper):
    """Applies events and checks all that they may change.

    Attributes:
        latest: the versions of the fleet and of the limits, the time, and who waited, when a plan had last been carried
            out whole.
    """

    def __init__(self, world: World, places: Mapping[str, tuple[str, int]]) -> None:
        super().__init__(world, places)
        self.spare_owners: dict[str, str] = {}
        self.latest: tuple[tuple[int, int], float, Mapping[str, PendingReason]] = (0, 0), 0.0, {}

    # -- one event ---------------------------------------------------------------------------------------------------

    def apply(self, event: Event) -> Instructions | None:
        """Apply an event and check all that it may change; None if it is refused."""
        everything = view_all(self.state)
        before = everything[0]
        self.account.now = max(self.account.now, getattr(event, "now", 0.0))
        lost = self.lost_by(event)
        charged = self.charge(lost or event, before)
        spares_before = self.spares()
        try:
            instructions = self.state.handle_event(event)
        except IllegalTransitionError:
            assert not charged
            assert view_all(self.state) == everything
            return None
        after = view_jobs(self.state)
        self.check_who_came_and_went(event, before, after, instructions)
        if lost is not None:
            for hosts in self.account.held.values():
                for task_id in [task_id for task_id, host in hosts.items() if host == lost.node_id]:
                    del hosts[task_id]
        self.book(event, before, instructions)
        self.book_ends(event, before, after, charged)
        self.check_notices(event, before, instructions)
        given = spares_given_by(event)
        self.check_spares({job_id: spare for job_id, spare in spares_before.items() if job_id not in given})
        stops: Counter[AttemptId] = Counter()
        finished = []
        for job_id, old in before.items():
            if job_id not in after:
                continue
            new, job = after[job_id], self.state.jobs[job_id]
            owner = self.state.jobs[job_id].spec.owner
            concerned = job_id == job_of(event, job_id)
            if isinstance(event, PoolRestartedEvent):
                concerned = owner == event.owner
            if old.state.finished or not concerned:
                assert new == old, f"{job_id} is not concerned"
                continue
            if new.state.finished:
                finished.append(job_id)
            assert new.state is self.account.state_of(job, new), job_id
            for position, (was, now) in enumerate(zip(old.gangs, new.gangs, strict=True)):
                attempt = AttemptId(job_id, was.attempt, position)
                if was.live and not now.live and set(now.states) != {S.SUCCEEDED}:
                    assert attempt not in self.account.ended, "an attempt ends once"
                    self.account.ended.add(attempt)
                    pool_knows = (
                        isinstance(event, TaskDispatchFailedEvent | GangMovedEvent) and event.attempt == attempt
                    )
                    stops[attempt] += not pool_knows
                self.check_gang(job, position, was, now, ended_by=charged.get(attempt))
            assert new.failures == self.account.failures_of(job)
            assert new.preemptions == sum(self.account.preemptions[job_id, i] for i in range(len(job.gangs)))
        assert Counter(instructions.finished) == Counter(finished)
        assert Counter(stop.attempt for stop in instructions.stop) == +stops
        return instructions

    def lost_by(self, event: Event) -> WorkerFailedEvent | None:
        """The loss of a host that registers with less than is in use, or in another group than that of a gang on it."""
        worker = self.state.workers.get(event.node_id) if isinstance(event, WorkerRegisteredEvent) else None
        if worker is None or not isinstance(event, WorkerRegisteredEvent):
            return None
        less = any(amount > event.resources.get(resource, 0.0) for resource, amount in self.in_use(worker).items())
        held = [a.job_id for a, hosts in self.account.held.items() if worker.node_id in hosts.values()]
        configs = [self.state.jobs[job_id].spec.coscheduling for job_id in held]
        keys = {config.group_by for config in configs if config is not None}
        moved = any(worker.attributes.get(key) != event.attributes.get(key) for key in keys)
        return WorkerFailedEvent(worker.node_id, "it is another one") if less or moved else None

    def check_who_came_and_went(
        self, event: Event, before: Mapping[str, JobView], after: Mapping[str, JobView], instructions: Instructions
    ) -> None:
        """Jobs come with a submission and stay; but spares come and go by themselves."""
        new = {event.spec.job_id} if isinstance(event, JobSubmittedEvent) else set()
        for job_id in after.keys() - before.keys() - new:
            assert self.state.jobs[job_id].spec.spare_for is not None
            assert after[job_id].state is JobState.PENDING
        dropped = {(spare.job_id, spare.owner) for spare in instructions.dropped}
        assert len(dropped) == len(instructions.dropped)
        for job_id in before.keys() - after.keys():
            (gang,), owner = before[job_id].gangs, self.spare_owners.pop(job_id)
            assert ((job_id, owner) in dropped) == gang.live
            dropped.discard((job_id, owner))
            self.account.last_held[job_id] = []
            for attempt in [attempt for attempt in self.account.held if attempt.job_id == job_id]:
                hosts = self.account.held.pop(attempt)  # nothing runs there, so it is free at once
                self.account.last_held[job_id] += hosts.values() if attempt.number == gang.attempt else ()
        assert not dropped
        self.spare_owners |= {i: j.spec.owner for i, j in self.state.jobs.items() if j.spec.spare_for}

    def check_gang(self, job: Job, position: int, was: GangView, now: GangView, ended_by: TaskState | None) -> None:
        """Only legal moves, the members together, and what the budgets say."""
        if len(was.states) != len(now.states):  # another count of groups: another set of tasks
            assert set(was.states) == {S.PENDING}
            was = was._replace(states=(S.PENDING,) * len(now.states))
        for old, new in zip(was.states, now.states, strict=True):
            unreported = old is S.ASSIGNED and new is S.SUCCEEDED  # RUNNING may be late or lost
            given_up = old is S.ASSIGNED and new is S.UNSCHEDULABLE  # by way of the queue
            assert old is new or new in TRANSITIONS[old] or unreported or given_up
        assert (S.PENDING in now.states) == (set(now.states) == {S.PENDING}), "a gang is placed in part"
        assert not TERMINAL & set(now.states) or set(now.states) <= TERMINAL, "a gang is over in part"
        key = job.spec.job_id, position
        assert (now.failures, now.preemptions) == (self.account.failures[key], self.account.preemptions[key])
        assert now.attempt - was.attempt == (was.states[0] is S.PENDING and now.states[0] is S.ASSIGNED)
        assert now.failures + now.preemptions <= now.attempt
        assert S.PENDING not in now.states or set(now.node_ids) == {None}
        if ended_by is None:
            return
        for_good = self.account.failed_for_good if ended_by is S.FAILED else self.account.lost_for_good
        if for_good(job, position):
            assert Counter(now.states) == Counter({ended_by: 1, S.COSCHED_FAILED: len(now.states) - 1}) - Counter()
        elif not job.state.finished:
            assert set(now.states) == {S.PENDING}

    # -- notices and spares ------------------------------------------------------------------------------------------

    def check_notices(self, event: Event, before: Mapping[str, JobView], instructions: Instructions) -> None:
        """Gangs hear of it once when a host of theirs is to go, or when there are more slices for them."""
        account, expected = self.account, []
        for attempt in [attempt for attempt in account.told if not self.is_live(attempt)]:
            del account.told[attempt]

        def tell(attempt: AttemptId, kind: NoticeKind, deadline: float) -> None:
            if self.state.jobs[attempt.job_id].spec.spare_for is None and account.hears(attempt, kind, deadline):
                expected.append((attempt, kind, deadline))

        match event:
            case WorkerDrainedEvent(node_id) | WorkerRegisteredEvent(node_id) if node_id in self.state.workers:
                is_notice = isinstance(event, WorkerDrainedEvent) or event.draining is not None
                kind, deadline = self.kind_of(event), event.deadline
                if deadline is None:
                    deadline = account.notices.get(node_id, (kind, account.now + 30.0))[1]
                if is_notice and kind is not NoticeKind.MAINTENANCE:
                    is_nearer(account.finals, node_id, kind, deadline)
                if is_notice and is_nearer(account.notices, node_id, kind, deadline):
                    for attempt in self.attempts_on(node_id):
                        tell(attempt, kind, deadline)
            case MaintenanceCalledOffEvent(node_id) if node_id in self.state.workers:
                if account.notices.get(node_id, (None, 0.0))[0] is NoticeKind.MAINTENANCE:
                    del account.notices[node_id]
                    if node_id in account.finals:
                        account.notices[node_id] = account.finals[node_id]
                for attempt in self.attempts_on(node_id):
                    hosts = account.held[attempt].values()
                    left = [account.notices[host] for host in hosts if host in account.notices]
                    told_of = account.told.get(attempt, (None, 0.0))
                    if told_of[0] is NoticeKind.MAINTENANCE and told_of not in left:
                        del account.told[attempt]
                        if left:
                            tell(attempt, *min(left, key=lambda notice: notice[1]))
            case GangAssignedEvent(job_id) | TaskAssignedEvent(job_id):  # decided before the notice came
                job = self.state.jobs[job_id]
                attempt = job.current_attempt(job.gangs[getattr(event, "task_index", 0)])
                for node_id in account.held[attempt].values():
                    if node_id in account.notices:
                        tell(attempt, *account.notices[node_id])
            case TaskStateChangedEvent(attempt, _, S.RUNNING) if attempt.job_id in self.state.jobs:
                job_id = attempt.job_id
                spare_for, gang = self.state.jobs[job_id].spec.spare_for, view(self.state.jobs[job_id].gangs[0])
                news = set(before[job_id].gangs[0].states) != {S.RUNNING} == set(gang.states)
                if spare_for is not None and spare_for.purpose is SparePurpose.GROWTH and news:
                    parent = self.state.jobs[spare_for.job_id]
                    tell(parent.current_attempt(parent.gang), NoticeKind.GROWTH, account.now + 60.0)
            case EvictionEvent(job_id, victims, deadline):
                for attempt in victims:
                    if self.is_live(attempt) and attempt not in account.evicted:
                        account.evicted[attempt] = job_id, deadline
                        tell(attempt, NoticeKind.EVICTION, deadline)
        for attempt in self.evictions_called_off():
            if account.told.get(attempt, (None, 0.0))[0] is NoticeKind.EVICTION:
                del account.told[attempt]
            for node_id in account.held[attempt].values():
                if node_id in account.notices:
                    tell(attempt, *account.notices[node_id])
        told = [(told.attempt, told.notice.kind, told.notice.deadline) for told in instructions.notices]
        assert told == expected
        to_grow = self.jobs_with_room_to_grow()
        for attempt in [a for a, (kind, _) in account.told.items() if kind is NoticeKind.GROWTH]:
            if attempt.job_id not in to_grow:  # called off
                del account.told[attempt]
        for job in self.state.jobs.values():
            for member in job.gangs:
                attempt = job.current_attempt(member)
                assert when(member.notice) == account.told.get(attempt)
                eviction = member.eviction and (member.eviction.job_id, member.eviction.deadline)
                assert eviction == account.evicted.get(attempt)
                assert member.evictions == account.evictions[job.spec.job_id, member.position]

    def evictions_called_off(self) -> list[AttemptId]:
        """Attempts whose hosts are not taken any more; they go on."""
        evicted, called_off = self.account.evicted, []
        for attempt, (taker, _) in list(evicted.items()):
            kept = set(self.state.jobs[taker].kept) if taker in self.state.jobs else set()
            if not self.is_live(attempt):
                del evicted[attempt]
            elif kept.isdisjoint(self.account.held[attempt].values()):
                del evicted[attempt]
                called_off.append(attempt)
        return called_off

    def jobs_with_room_to_grow(self) -> set[str]:
        """Those for which more slices are there, with their processes started."""
        return {
            held_for.job_id
            for job in self.state.jobs.values()
            if (held_for := job.spec.spare_for) is not None and held_for.purpose is SparePurpose.GROWTH
            if set(view(job.gangs[0]).states) == {S.RUNNING}
        }

    def kind_of(self, event: Event) -> NoticeKind:
        return event.kind if isinstance(event, WorkerDrainedEvent) else NoticeKind.PREEMPTION

    def check_spares(self, before: Mapping[str, tuple[str, Need, bool]]) -> None:
        """There are those that are needed and no others, and none goes that is still good."""
        now = self.spares()
        needs = {job_id: self.needs(job) for job_id, job in self.state.jobs.items()}
        have: defaultdict[str, Counter[Need]] = defaultdict(Counter)
        kept: defaultdict[str, Counter[Need]] = defaultdict(Counter)
        sound: defaultdict[str, Counter[Need]] = defaultdict(Counter)
        for job_id, (parent, need, doomed) in now.items():
            assert not doomed, f"{job_id} is held on a host that is to go"
            assert self.state.jobs[job_id].spec.owner == self.state.jobs[parent].spec.owner
            have[parent][need] += 1
            kept[parent][need] += job_id in before
        for job_id, (parent, need, _) in before.items():
            gone = job_id not in now
            hosts = self.account.last_held.get(job_id, ()) if gone else ()
            sound[parent][need] += not any(node_id in self.account.notices for node_id in hosts)
        for job_id, needed in needs.items():
            assert have[job_id] == needed, f"{job_id} has {have[job_id]}, and needs {needed}"
            for need, count in needed.items():
                assert kept[job_id][need] >= min(count, sound[job_id][need]), f"{job_id} lost a spare"

    def spares(self) -> dict[str, tuple[str, Need, bool]]:
        """Id of each spare → whose it is, what it is good for, whether it is on a host that is to go."""
        found = {}
        for job_id, job in self.state.jobs.items():
            held_for, config = job.spec.spare_for, job.spec.coscheduling
            if held_for is not None and config is not None:
                need = held_for.purpose, config.num_groups
                found[job_id] = held_for.job_id, need, bool(self.doomed(job))
        return found

    def needs(self, job: Job) -> Counter[Need]:
        """What is to be held ready for a job, in the words of the rules."""
        config, account = job.spec.coscheduling, self.account
        if job.spec.spare_for or not config or not uses_chips(job.spec) or job.state.finished:
            return Counter()
        gang = view(job.gangs[0])
        if not gang.live:
            return Counter()
        have, doomed, after = len(gang.groups), len(self.doomed(job)), job.spec.grow_after
        found: Counter[Need] = Counter()
        found[SparePurpose.SPARE, (1,)] = job.spec.spares
        found[SparePurpose.REPLACEMENT, (1,)] = max(0, doomed - self.spares_with_slices(job))
        more = tuple(count - have for count in config.num_groups if count > have)
        evicted = job.current_attempt(job.gang) in account.evicted
        if more and not doomed and not evicted and after is not None and set(gang.states) == {S.RUNNING}:
            lost_some = have < account.wanted.get(job.spec.job_id, 0)
            found[SparePurpose.GROWTH, more] = lost_some or account.now >= account.began[job.spec.job_id, 0] + after
        return +found

    def doomed(self, job: Job) -> set[str]:
        """Groups that the job's gang runs on and that are to go."""
        hosts = self.account.held.get(job.current_attempt(job.gangs[0]), {}).values()
        groups = {self.places[node_id][0] for node_id in hosts if node_id in self.account.notices}
        return groups if groups and view(job.gangs[0]).live and not job.state.finished else set()

    def spares_with_slices(self, job: Job) -> int:
        """How many spares, replacements and room to grow aside, could take over now."""
        wanted = SpareFor(job.spec.job_id, SparePurpose.SPARE)
        spares = (other for other in self.state.jobs.values() if other.spec.spare_for == wanted)
        return sum(view(spare.gangs[0]).live for spare in spares)

    # -- plans -------------------------------------------------------------------------------------------------------

    def check_plan(self, plan: SchedulingResult) -> None:
        """Everything in it is legal, and every job that waits for something is told why."""
        placed: defaultdict[str, set[int]] = defaultdict(set)
        taken: defaultdict[str, Counter[str]] = defaultdict(Counter)
        takers: defaultdict[str, list[Job]] = defaultdict(list)
        for assignment in plan.assignments:
            job = self.state.jobs[assignment.job_id]
            position, node_ids = self.check_place(job, assignment)
            assert position in job.pending
            assert position not in placed[assignment.job_id], "one place for each gang"
            assert job.gangs[position].not_before <= self.world.now
            placed[assignment.job_id].add(position)
            assert len(node_ids) == len(set(node_ids)), "two members on one host"
            for node_id in node_ids:
                worker = self.state.workers[node_id]
                taken[node_id].update(demand_of(job, worker))
                takers[node_id].append(job)
        for node_id, demand in taken.items():
            worker = self.state.workers[node_id]
            for resource, amount in (self.in_use(worker) + demand).items():
                assert amount <= worker.resources.get(resource, 0.0), f"{node_id}: too much {resource}"
            with_chips = [job for job in takers[node_id] if uses_chips(job.spec)]
            assert len(with_chips) + self.uses_of_chips(worker) <= 1
        self.check_limits(taken, takers, placed)
        self.check_reasons(plan, placed)
        self.check_kept(plan, takers)
        self.check_evictions(plan, takers.keys())

    def check_limits(
        self,
        taken: Mapping[str, Counter[str]],
        takers: Mapping[str, list[Job]],
        placed: Mapping[str, set[int]],
    ) -> None:
        """No user who gets something has more than the limits of the band allow."""
        chips: Counter[UserAndBand] = Counter()
        for node_id, jobs in takers.items():
            for job in jobs:  # only one of them takes chips
                if uses_chips(job.spec):
                    chips[job.spec.user, job.spec.priority] += int(taken[node_id]["TPU"])
        started: defaultdict[UserAndBand, set[str]] = defaultdict(set)
        for job in map(self.state.jobs.__getitem__, placed):
            if job.spec.spare_for is None and not any(a.job_id == job.spec.job_id for a in self.account.held):
                started[job.spec.user, job.spec.priority].add(job.spec.job_id)
        for who in chips.keys() | started.keys():
            limits, held = self.state.limits.of(*who), self.state.limits.held(*who)
            assert limits.chips is not None
            assert limits.running_jobs is not None
            assert not chips[who] or held.chips + chips[who] <= limits.chips, f"{who} gets too many chips"
            assert not started[who] or len(held.running) + len(started[who]) <= limits.running_jobs, f"{who}: jobs"

    def check_plan_after_the_latest(self, plan: SchedulingResult) -> None:
        """If fleet and limits are the same, it makes no difference whether those that waited are looked at again."""
        version, then, waiting = self.latest
        if version != (self.state.fleet.version, self.state.limits.version) or self.world.now > then + 0.5:
            return
        short = self.world.plan(waiting)
        assert short.assignments == plan.assignments
        if self.world.now == then:
            self.check_plan(short)
            assert short.starving == plan.starving
            assert (short.timed_out, short.unschedulable) == (plan.timed_out, plan.unschedulable)
            assert short.pending_reasons.keys() == plan.pending_reasons.keys()

    def check_place(self, job: Job, assignment: AssignedEvent) -> tuple[int, list[str]]:
        """The hosts are what the job asks for, take new tasks, and are groups as they should be."""
        if isinstance(assignment, TaskAssignedEvent):
            assert job.spec.coscheduling is None
            position, group_by = assignment.task_index, None
            groups: dict[str, tuple[str, ...]] = {"": (assignment.node_id,)}
        else:
            assert job.spec.coscheduling is not None
            position, groups = 0, dict(zip(assignment.group_names, assignment.groups, strict=True))
            group_by = job.spec.coscheduling.group_by
            assert len(groups) == len(assignment.group_names)
            assert len(groups) in job.spec.coscheduling.num_groups
        for name, node_ids in groups.items():
            for worker in map(self.state.workers.__getitem__, node_ids):
                assert suits(job, worker)
                assert takes_new(worker, self.world.now)
                assert group_by is None or worker.attributes[group_by].value == name, "a gang is split"
            if group_by is not None and not job.spec.whole_groups:
                assert len(node_ids) == job.spec.replicas
            if group_by == TPU_NAME:
                self.check_slice(job, name, node_ids)
        return position, [node_id for node_ids in groups.values() for node_id in node_ids]

    def check_slice(self, job: Job, name: str, node_ids: tuple[str, ...]) -> None:
        """Complete and all in order; its hosts by number; of a larger one a part only if there is nothing else."""
        assert self.is_sound_slice(name)
        numbers = [self.state.workers[node_id].host_index for node_id in node_ids]
        assert numbers == sorted(numbers, key=lambda number: number or 0)
        size = len(self.members(name))
        assert len(node_ids) == size or (len(node_ids) < size and not job.spec.whole_groups)
        if len(node_ids) < size:
            right = [name for name in "abc" if self.is_sound_slice(name) and len(self.members(name)) == len(node_ids)]
            suitable = [name for name in right if all(suits(job, worker) for worker in self.members(name))]
            avoided = set(job.avoided) if self.world.now < job.avoided_until else set()
            avoided.update(self.state.fleet.avoided_by(job.spec.user, self.world.now))
            suitable = [name for name in suitable if avoided.isdisjoint(w.node_id for w in self.members(name))]
            assert len(suitable) < counts_of(job)[0], f"{suitable} would do"

    def is_sound_slice(self, name: str) -> bool:
        members = self.members(name)
        size = members[0].attributes[TPU_VM_COUNT].value if members else 0
        assert isinstance(size, int)
        return sorted(worker.host_index or 0 for worker in members) == list(range(size)) and all(
            takes_new(worker, self.world.now) and worker.attributes[TPU_VM_COUNT].value == size for worker in members
        )

    def check_reasons(self, plan: SchedulingResult, placed: Mapping[str, set[int]]) -> None:
        for event in plan.timed_out:
            job = self.state.jobs[event.job_id]
            assert job.spec.scheduling_timeout is not None
            assert self.world.now - job.submitted_at > job.spec.scheduling_timeout
        for event in plan.unschedulable:
            assert any(c.key == "zone" or c.key == "generation" for c in self.state.jobs[event.job_id].spec.constraints)
        given_up = [event.job_id for event in (*plan.timed_out, *plan.unschedulable)]
        assert len(given_up) == len(set(given_up))
        assert not set(given_up) & (placed.keys() | plan.pending_reasons.keys())
        for event in (*plan.timed_out, *plan.unschedulable):
            job = self.state.jobs[event.job_id]
            assert (job.gang_of(event.task_index).pending, job.started) == (True, False)
        for job_id, job in self.state.jobs.items():
            left = set(job.pending) - placed.get(job_id, set())
            assert (job_id in plan.pending_reasons or job_id in given_up) == bool(left), (
                f"{job_id}: a reason if it waits"
            )
            if not job.state.finished:
                assert left or placed.get(job_id) or job.state is JobState.RUNNING
        for waiting in plan.pending_reasons.values():
            assert str(waiting)

    def check_kept(self, plan: SchedulingResult, takers: Mapping[str, list[Job]]) -> None:
        """The scheduler keeps groups for jobs that have waited too long. Jobs behind them do not get these groups."""
        kept: dict[str, list[Worker]] = {}
        for job_id, waiting in plan.pending_reasons.items():
            group_by = waiting.requirement.group_by
            kept[job_id] = [
                worker
                for worker in self.state.workers.values()
                if (worker.node_id if group_by is None else self.places[worker.node_id][0]) in waiting.kept
            ]
        for job_id, workers in kept.items():
            job = self.state.jobs[job_id]
            for worker in workers:
                for other in takers.get(worker.node_id, ()):
                    late = self.comes_after(other, job, is_room=worker.node_id in job.kept)
                    assert not late, f"{other.spec.job_id} takes what is kept for {job_id}"
            returns = self.returns(job)
            takes = bool(job.kept) or any(event.job_id == job_id for event in plan.evictions)
            assert not workers or returns or takes or job_id in plan.starving
            assert not (returns and job_id in plan.starving)
            assert not (workers and is_extra(job)), f"{job_id} keeps something from jobs that wait"
        run = (assignment.job_id for assignment in plan.assignments)
        limited = (job_id for job_id, waiting in plan.pending_reasons.items() if waiting.limit)
        given_up = any(self.state.jobs[job_id].kept for job_id in (*run, *limited))  # the next plan keeps some
        for job_id, waiting in plan.pending_reasons.items():
            job = self.state.jobs[job_id]
            long = any(self.waits_long(gang) for gang in job.gangs) or self.returns(job)
            takes = bool(job.kept) or any(event.job_id == job_id for event in plan.evictions)
            assert long or (job_id not in plan.starving and (takes or not waiting.kept))
            long = all(self.waits_long(gang) for gang in job.gangs if gang.pending) or self.returns(job)
            if long and waiting.kind is PendingKind.IN_USE and not (kept[job_id] or is_extra(job) or given_up):
                others = [worker for i in kept for worker in kept[i] if i != job_id]
                names = {self.places[worker.node_id][0] for worker in others}
                rivals = [worker for name in names for worker in self.members(name) if suits(job, worker)]
                assert rivals, f"nothing is kept for {job_id}, nor for anybody who competes with it"

    def check_evictions(self, plan: SchedulingResult, takers: Collection[str]) -> None:
        """All victims may go and have to, and then there is the room that is kept.

        Args:
            plan: a plan.
            takers: ids of the hosts that it gives away.
        """
        rooms = {event.job_id: event.node_ids for event in plan.rooms}
        assert len({event.job_id for event in plan.evictions}) == len(plan.evictions)
        going = {attempt for event in plan.evictions for attempt in event.victims}
        assert len(going) == sum(len(event.victims) for event in plan.evictions), "nobody gives way twice"
        assert going.isdisjoint(self.account.evicted)
        for event in plan.evictions:
            job = self.state.jobs[event.job_id]
            assert not is_extra(job)
            assert any(gang.pending and gang.not_before <= self.world.now for gang in job.gangs)
            assert event.deadline == self.world.now + 30.0
            for attempt in event.victims:
                victim = self.state.jobs[attempt.job_id]
                assert self.is_live(attempt)
                assert victim.spec.priority > job.spec.priority
                ran = self.world.now - self.account.began.get((attempt.job_id, attempt.gang), self.world.now)
                assert victim.spec.spare_for is not None or ran >= (600.0 if victim.spec.priority == 1 else 120.0)
            room = rooms.get(event.job_id, job.kept)
            assert room
            if not set(takers).intersection(room):
                gone = going | self.account.evicted.keys()
                assert self.is_room(job, room, gone)
                for attempt in event.victims:
                    assert not self.is_room(job, room, gone - {attempt}), f"{attempt} need not go"

    def is_room(self, job: Job, node_ids: Iterable[str], gone: Set[AttemptId]) -> bool:
        """Whether all groups of some hosts are free for a job once these attempts are gone."""
        spec, free = job.spec, Counter[str]()
        name_of = self.state.fleet.grouping(spec.coscheduling.group_by if spec.coscheduling else None).name_of
        needs = {r: n for r, n in spec.resources.items() if n and not (r == "TPU" and uses_chips(spec))}
        names = set()
        for worker in map(self.state.workers.__getitem__, node_ids):
            names.add(name := str(name_of(worker)))
            left = Counter(worker.resources)
            for occupant, held in worker.occupants.items():
                if occupant[1] not in gone and occupant not in worker.ending:
                    left.subtract(held)
            chips = not uses_chips(spec) or left["TPU"] == worker.resources.get("TPU", 0.0)
            free[name] += suits(job, worker) and chips and all(left[r] >= n for r, n in needs.items())
        sizes = Counter(str(name_of(self.state.workers[node_id])) for node_id in node_ids)
        each = spec.replicas if spec.coscheduling else 1
        return all(free[name] >= (sizes[name] if spec.whole_groups else each) for name in names)

    def comes_after(self, other: Job, job: Job, is_room: bool) -> bool:
        """Whether another job is surely looked at later, or the host is room that an earlier plan has kept."""
        band, other_band = job.spec.priority, other.spec.priority
        if is_extra(other) or band != other_band:
            return is_extra(other) or other_band > band
        if self.returns(job) or self.returns(other):
            return not self.returns(other)
        return is_room or (job.spec.user == other.spec.user and other.number > job.number)

    def returns(self, job: Job) -> bool:
        """Whether its gang ran a moment ago, or holds slices ready in place of others that are about to go."""
        spare_for = job.spec.spare_for
        if spare_for is not None:
            return spare_for.purpose is SparePurpose.REPLACEMENT
        coscheduled = job.spec.coscheduling is not None
        return coscheduled and self.world.now < self.account.returning.get(job.spec.job_id, 0.0)

    def waits_long(self, gang: Gang) -> bool:
        return gang.pending and self.world.now - gang.waiting_since > BACKFILL_BOUND_S

    # -- the whole state ---------------------------------------------------------------------------------------------

    def check_hosts(self) -> None:
        expected: dict[str, set[Occupant]] = {node_id: set() for node_id in self.state.workers}
        over: dict[str, set[Occupant]] = {node_id: set() for node_id in self.state.workers}
        for attempt, hosts in self.account.held.items():
            live = self.is_live(attempt)
            for task_id, node_id in hosts.items():
                expected[node_id].add((task_id, attempt))
                if not live:
                    over[node_id].add((task_id, attempt))
        for node_id, occupants in expected.items():
            worker = self.state.workers[node_id]
            assert worker.occupants.keys() == occupants
            assert worker.ending == over[node_id]
            assert self.uses_of_chips(worker) <= 1, f"{node_id} is used twice"
            used = self.in_use(worker)
            for resource, amount in worker.resources.items():
                assert 0 <= used[resource] <= amount
                assert worker.free[resource] == amount - used[resource]

    def check_holds(self) -> None:
        told = [attempt for owner in OWNERS for attempt in self.state.attempts_of(owner)]
        assert sorted(told) == sorted(self.account.held)
        assert all(map(self.state.holds_capacity, told))

    def check_jobs(self) -> None:
        pending = {job.spec.job_id for job in self.state.pending()}
        for job_id, job in self.state.jobs.items():
            assert +job.counts == Counter(task.state for task in job.tasks)
            positions = {i for i, gang in enumerate(job.gangs) if gang.tasks[0].state is S.PENDING}
            assert set(job.pending) == positions
            assert (job_id in pending) == bool(positions)
            assert [task.task_id for task in job.tasks] == [f"{job_id}/task-{i}" for i in range(len(job.tasks))]
        for owner in OWNERS:
            unfinished = [j for j in self.state.jobs.values() if j.spec.owner == owner and not j.state.finished]
            assert self.state.jobs_of(owner) == unfinished


def is_extra(job: Job) -> bool:
    """Whether it holds slices that its owner can do without."""
    return job.spec.spare_for is not None and job.spec.spare_for.purpose is not SparePurpose.REPLACEMENT
