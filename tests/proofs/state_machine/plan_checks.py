"""What must hold of every plan: it is legal, within limits, and says why each job waits."""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Set

from iris_ray.model.constraints import ConstraintOp
from iris_ray.model.job_spec import SparePurpose
from iris_ray.model.jobs import Gang, Job
from iris_ray.model.lifecycle import AttemptId, JobState
from iris_ray.model.options import PriorityBand
from iris_ray.model.workers import TPU_NAME, TPU_VM_COUNT, Worker
from iris_ray.scheduler import SchedulingResult
from iris_ray.scheduler.pending_reason import PendingKind, PendingReason
from iris_ray.scheduler.scheduler import BACKFILL_BOUND_S
from iris_ray.state.events import (
    AssignedEvent,
    GivesWayEvent,
    TaskAssignedEvent,
)
from tests.proofs.state_machine.account import demand_of, uses_chips
from tests.proofs.state_machine.bookkeeping import Bookkeeper
from tests.support.worlds import World

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


def counts_of(job: Job) -> tuple[int, ...]:
    return job.spec.coscheduling.num_groups if job.spec.coscheduling else (1,)


def is_extra(job: Job) -> bool:
    """Whether its owner can do without the hosts that it holds."""
    return job.yields or (job.spec.spare_for is not None and job.spec.spare_for.purpose is not SparePurpose.REPLACEMENT)


class PlanChecks(Bookkeeper):
    """Checks plans.

    Attributes:
        latest: the versions of the fleet and of the limits, the time, and who waited, when a plan had last been carried
            out whole.
    """

    def __init__(self, world: World, places: Mapping[str, tuple[str, int]]) -> None:
        super().__init__(world, places)
        self.latest: tuple[tuple[int, int, int], float, Mapping[str, PendingReason]] = (0, 0, 0), 0.0, {}

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
        self.check_who_gives_way(plan)

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

    def versions(self) -> tuple[int, int, int]:
        """Those of all that a plan depends on but the queue."""
        return self.state.fleet.version, self.state.limits.version, self.state.yields_version

    def check_plan_after_the_latest(self, plan: SchedulingResult) -> None:
        """If fleet and limits are the same, it makes no difference whether those that waited are looked at again."""
        version, then, waiting = self.latest
        if version != self.versions() or self.world.now > then + 0.5:
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
        hopeless = (event.job_id for event in plan.unschedulable)
        had_room = any(self.state.jobs[job_id].kept for job_id in (*run, *limited, *hopeless))
        assert had_room or not plan.gave_up_room
        for job_id, waiting in plan.pending_reasons.items():
            job = self.state.jobs[job_id]
            long = any(self.waits_long(gang) for gang in job.gangs) or self.returns(job)
            takes = bool(job.kept) or any(event.job_id == job_id for event in plan.evictions)
            assert long or (job_id not in plan.starving and (takes or not waiting.kept))
            long = all(self.waits_long(gang) for gang in job.gangs if gang.pending) or self.returns(job)
            if long and waiting.kind is PendingKind.IN_USE and not (kept[job_id] or is_extra(job) or plan.gave_up_room):
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
        assert len(going) == sum(len(event.victims) for event in plan.evictions), "a job gives way twice"
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
                least = 600.0 if victim.spec.priority == 1 else 120.0
                ran = self.world.now - self.account.began.get((attempt.job_id, attempt.gang), self.world.now)
                assert is_extra(victim) or victim.spec.spare_for is not None or ran >= least
            room = rooms.get(event.job_id, job.kept)
            assert room
            if not set(takers).intersection(room):
                gone = going | self.account.evicted.keys()
                assert self.is_room(job, room, gone)
                for attempt in event.victims:
                    assert not self.is_room(job, room, gone - {attempt}), f"{attempt} need not go"

    def check_who_gives_way(self, plan: SchedulingResult) -> None:
        """Jobs that yield give way once, each for somebody who waits and then has enough groups, its own among them."""
        given = [self.state.jobs[event.job_id] for event in plan.given_back]
        gone = {job.current_attempt(job.gang) for job in given}
        assert len(gone) == len(given), "a job gives way twice"
        going = {attempt for event in plan.evictions for attempt in event.victims} | self.account.evicted.keys()
        assert gone.isdisjoint(going)
        spares = {spare.current_attempt(spare.gang) for spare in self.state.spares()}  # they may go once these have
        waiting = [self.state.jobs[job_id] for job_id in plan.pending_reasons]
        helped: set[str] = set()
        for job in waiting if given else ():
            if not is_extra(job) and any(gang.pending and gang.not_before <= self.world.now for gang in job.gangs):
                helped |= self.hosts_of_groups_for(job, gone | going | spares)
        for event, job in zip(plan.given_back, given, strict=True):
            assert is_extra(job)
            assert self.is_live(job.current_attempt(job.gang))
            assert isinstance(event, GivesWayEvent) == (job.spec.spare_for is None)
            assert not isinstance(event, GivesWayEvent) or event.deadline == self.world.now + 30.0
            assert not helped.isdisjoint(self.account.held[job.current_attempt(job.gang)].values()), (
                f"no job that waits can use the hosts of {job.spec.job_id}"
            )

    def hosts_of_groups_for(self, job: Job, gone: Set[AttemptId]) -> set[str]:
        """The hosts of all groups that are free for a job once these attempts are gone; none if they are too few."""
        coscheduling, groups = job.spec.coscheduling, defaultdict[str, list[str]](list)
        name_of = self.state.fleet.grouping(coscheduling.group_by if coscheduling else None).name_of
        for worker in self.state.workers.values():
            if (name := name_of(worker)) is not None:
                groups[name].append(worker.node_id)
        free = [hosts for hosts in groups.values() if self.is_room(job, hosts, gone)]
        return {node_id for hosts in free for node_id in hosts} if len(free) >= counts_of(job)[0] else set()

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
        return coscheduled and not job.yields and self.world.now < self.account.returning.get(job.spec.job_id, 0.0)

    def waits_long(self, gang: Gang) -> bool:
        return gang.pending and self.world.now - gang.waiting_since > BACKFILL_BOUND_S
