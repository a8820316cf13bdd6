"""What must hold after every event and of every plan: the state agrees with the account that `Bookkeeper` keeps."""

from collections import Counter, defaultdict
from collections.abc import Mapping

from iris_ray.errors import IllegalTransitionError
from iris_ray.model.job_spec import SpareFor, SparePurpose
from iris_ray.model.jobs import Job
from iris_ray.model.lifecycle import TRANSITIONS, AttemptId, JobState, TaskState
from iris_ray.model.notices import NoticeKind
from iris_ray.model.workers import Occupant
from iris_ray.state.events import (
    Event,
    EvictionEvent,
    GangAssignedEvent,
    GangMovedEvent,
    GivesWayEvent,
    JobSubmittedEvent,
    JobYieldsEvent,
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
from tests.proofs.state_machine.account import Need, is_nearer, uses_chips
from tests.proofs.state_machine.plan_checks import PlanChecks
from tests.proofs.state_machine.strategies import OWNERS
from tests.proofs.state_machine.views import TERMINAL, GangView, JobView, view, view_all, view_jobs, when
from tests.support.worlds import World

S = TaskState


def job_of(event: Event, default: str) -> str:
    """The id of the job that an event is about; the default if it is about none in particular."""
    attempt: AttemptId | None = getattr(event, "attempt", None)
    return attempt.job_id if attempt is not None else getattr(event, "job_id", default)


def spares_given_by(event: Event) -> set[str]:
    """The ids of the spares that an event asks for, and of other victims."""
    if isinstance(event, SpareGivenBackEvent):
        return {event.job_id}
    return {attempt.job_id for attempt in event.victims} if isinstance(event, EvictionEvent) else set()


class Oracle(PlanChecks):
    """Applies events and checks all that they may change."""

    def __init__(self, world: World, places: Mapping[str, tuple[str, int]]) -> None:
        super().__init__(world, places)
        self.spare_owners: dict[str, str] = {}

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
            assert not self.must_be_accepted(event)
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

    def must_be_accepted(self, event: Event) -> bool:
        """Whether an event says which jobs yield, of a job that can; or has one that yields give way."""
        if not isinstance(event, JobYieldsEvent | GivesWayEvent) or event.job_id not in self.state.jobs:
            return False
        yields = isinstance(event, JobYieldsEvent) or event.job_id in self.account.yields
        return yields and len(self.state.jobs[event.job_id].gangs) == 1

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
            self.account.yields.discard(job_id)
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
                    if attempt in account.evicted:
                        left.append((NoticeKind.EVICTION, account.evicted[attempt][1]))
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
            case GivesWayEvent(job_id, deadline):
                attempt = self.state.jobs[job_id].current_attempt(self.state.jobs[job_id].gang)
                if self.is_live(attempt) and attempt not in account.evicted:
                    account.evicted[attempt] = "", deadline
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
            elif taker and kept.isdisjoint(self.account.held[attempt].values()):
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
            assert job.state.finished or job.yields == (job_id in self.account.yields)
            assert [task.task_id for task in job.tasks] == [f"{job_id}/task-{i}" for i in range(len(job.tasks))]
        yielding = {job.spec.job_id for job in self.state.yielding()}
        placed = {i for i in self.account.yields if i in self.state.jobs and self.state.jobs[i].gang.placed}
        assert yielding == {job_id for job_id in placed if not self.state.jobs[job_id].state.finished}
        for owner in OWNERS:
            unfinished = [j for j in self.state.jobs.values() if j.spec.owner == owner and not j.state.finished]
            assert self.state.jobs_of(owner) == unfinished
