"""The scheduler proven against a slow, obvious one on random worlds, and alone on all small worlds.

The quick tests take some of both, the thorough ones the rest.
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain, combinations, combinations_with_replacement, islice, product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from iris_ray.errors import IllegalTransitionError
from iris_ray.model.constraints import AttributeValue, Constraint, ConstraintOp
from iris_ray.model.ids import AttemptId
from iris_ray.model.job_spec import CoschedulingConfig, JobSpec, PriorityBand
from iris_ray.model.jobs import Job
from iris_ray.model.lifecycle import JobState, TaskState
from iris_ray.model.limits import EVERYBODY, Limits
from iris_ray.model.outcomes import Fault
from iris_ray.model.workers import TPU, TPU_NAME, TPU_TOPOLOGY, TPU_VM_COUNT, TPU_WORKER_ID
from iris_ray.scheduler import Scheduler
from iris_ray.scheduler.fair_queue import comes_last
from iris_ray.scheduler.result import SchedulingResult
from iris_ray.scheduler.scheduler import BACKFILL_BOUND_S
from iris_ray.state.events import (
    AttemptEndConfirmedEvent,
    GangAssignedEvent,
    GangMovedEvent,
    JobCancelledEvent,
    JobSubmittedEvent,
    LimitsSetEvent,
    SliceReleasedEvent,
    TaskAssignedEvent,
    TaskDispatchFailedEvent,
    TaskStateChangedEvent,
    WorkerBlamedEvent,
    WorkerDrainedEvent,
    WorkerRegisteredEvent,
    WorkerSuspectedEvent,
)
from tests.proofs.reference import ReferencePlan
from tests.support.proofs import EXAMPLES
from tests.support.worlds import World, gang_spec, host

S = TaskState
Op = ConstraintOp
LONG = BACKFILL_BOUND_S + 100

# -- random worlds -----------------------------------------------------------------------------------------------------

SIZES = {"v4-8": 1, "v4-16": 2, "v4-32": 4}
TYPES = ("v4-16", "v4-16", "v4-8", "v4-32")
POOLS: tuple[object, ...] = (None, None, None, "x", "x", "y", 3, 1.5, True)
HOST_FLAWS = ("missing", "draining", "foreign", "suspected", "tainted", "no number", "same number", "odd pool")
SLICE_FLAWS = (*HOST_FLAWS, "no vm count", "split", "fewer CPUs", "one too many")
CONSTRAINTS = (
    Constraint("pool", Op.EQ, "x"),
    Constraint("pool", Op.NE, "x"),
    Constraint("pool", Op.EXISTS),
    Constraint("pool", Op.NOT_EXISTS),
    Constraint("pool", Op.GT, 2),
    Constraint("pool", Op.LE, "x"),
    Constraint("pool", Op.IN, ("y", 3, True)),
    Constraint("rack", Op.NE, "r1"),
    Constraint("taint:spot", Op.EXISTS),
    Constraint("taint:spot", Op.NOT_EXISTS),
    Constraint("taint:spot", Op.NE, False),
    Constraint(TPU_WORKER_ID, Op.GE, 1),
    Constraint(TPU_TOPOLOGY, Op.GT, 4),
)
COUNTS = ((1,), (2,), (3,), (1, 2), (1, 2), (1, 3), (2, 3), (1, 2, 3))


@dataclass(frozen=True)
class Shape:
    """What a random job asks for, but for its constraints: see `spec_of`."""

    kind: str
    device: str
    counts: tuple[int, ...]
    chips: float
    cpus: float


SHAPES = st.builds(
    Shape,
    kind=st.sampled_from(["gang", "gang", "gang", "whole", "rack", "rack", "tasks", "tasks"]),
    device=st.sampled_from(TYPES),
    counts=st.sampled_from(COUNTS),
    chips=st.sampled_from([4.0, 4.0, 0.0]),
    cpus=st.sampled_from([0.0, 0.0, 2.0, 4.0, 8.0]),
)


def some(values: Sequence[object], most: int) -> st.SearchStrategy[tuple[object, ...]]:
    """Mostly none of them."""
    few = st.lists(st.sampled_from(values), min_size=1, max_size=most).map(tuple)
    return st.integers(0, 3).flatmap(lambda chance: few if chance == 3 else st.just(()))


KINDS = st.fixed_dictionaries(
    {
        "shape": SHAPES,
        "typed": st.booleans(),
        "constraints": some(CONSTRAINTS, 2),
        "preferences": some(CONSTRAINTS, 2),
        "tolerations": st.sampled_from([(), (), ("spot",)]),
        "owner": st.sampled_from(["pool-a", "pool-b"]),
        "priority": st.sampled_from([PriorityBand.INTERACTIVE] * 3 + [PriorityBand.PRODUCTION, PriorityBand.BATCH]),
        "scheduling_timeout": st.sampled_from([None, None, None, 300.0]),
        "spares": st.sampled_from([0, 0, 0, 1, 2]),
        "grow_after": st.sampled_from([None, 0.0, 30.0]),
    }
)
JOBS = st.tuples(st.integers(0, 3), st.sampled_from(["ann", "bob", "cem"]), st.sampled_from([0.0, 0.0, LONG]))
SLICES = st.fixed_dictionaries(
    {
        "tpu_type": st.sampled_from(TYPES),
        "rack": st.sampled_from(["r1", "r1", "r2", None, True, "True", "true", 1, 1.0, "1"]),
        "pool": st.sampled_from(POOLS),
        "flaw": st.sampled_from((None,) * 2 * len(SLICE_FLAWS) + SLICE_FLAWS),
        "at": st.integers(0, 3),
    }
)
CPU_HOSTS = st.fixed_dictionaries(
    {
        "cpus": st.sampled_from([4.0, 8.0]),
        "rack": st.sampled_from(["c1", "c1", "c2", "c2", None]),
        "pool": st.sampled_from(POOLS),
        "tainted": st.sampled_from([False, False, False, True]),
        "elsewhere": st.sampled_from([0.0, 0.0, 2.0, 4.0]),
    }
)
HAPPENINGS = st.tuples(
    st.sampled_from(
        (
            *("submit",) * 6,
            *("end", "end", "end", "end", "confirm", "confirm", "confirm all"),
            *("run", "run", "retry", "move", "launch fails", "cancel"),
            *("lose", "drain", "suspect", "relabel", "repair", "repair", "release", "hold", "time", "long time"),
            "blame",
            *("limit", "limit"),
        )
    ),
    st.integers(0, 11),
)
WORLDS = st.fixed_dictionaries(
    {
        "slices": st.lists(SLICES, min_size=2, max_size=6),
        "cpu_hosts": st.lists(CPU_HOSTS, max_size=6),
        "kinds": st.lists(KINDS, min_size=2, max_size=4),
        "jobs": st.lists(JOBS, min_size=4, max_size=14),
        "at_first": st.integers(1, 8),
        "limits": st.lists(st.integers(0, 19), max_size=2),
        "cycles": st.lists(st.lists(HAPPENINGS, min_size=1, max_size=8), min_size=1, max_size=6),
    }
)


class RandomWorld(World):
    """A world made of drawn values, and all that can happen to it between two plans."""

    def __init__(self, slices: list[dict], cpu_hosts: list[dict], kinds: list[dict], jobs: list[tuple]) -> None:
        super().__init__()
        self.scheduler = Scheduler(evictions=None)  # the reference knows none; they have proofs of their own
        self.now = 2 * LONG
        self.specs = [
            (spec_of(f"job-{number}", user=user, **kinds[pick % len(kinds)]), age)
            for number, (pick, user, age) in enumerate(jobs)
        ]
        self.hosts: dict[str, WorkerRegisteredEvent] = {}
        for name, drawn in zip("abcdef", slices, strict=False):
            for registration in slice_of(name, drawn):
                self.hosts[registration.node_id] = registration
                self.do(registration)
            if drawn["flaw"] in HOST_FLAWS:
                self.spoil(drawn["flaw"], f"{name}-{drawn['at'] % SIZES[drawn['tpu_type']]}")
        for number, drawn in enumerate(cpu_hosts):
            self.do(cpu_host(f"cpu-{number}", drawn))

    def spoil(self, flaw: str, node_id: str) -> None:
        plain = self.hosts[node_id]
        attributes = dict(plain.attributes)
        match flaw:
            case "missing":
                self.lose(node_id)
            case "draining":
                self.do(WorkerDrainedEvent(node_id, "notice"))
            case "foreign":
                self.do(replace(plain, foreign="a stranger"))
            case "suspected":
                self.do(WorkerSuspectedEvent(node_id, "no answer", self.now))
            case "tainted":
                self.do(replace(plain, attributes=attributes | {"taint:spot": AttributeValue(False)}))
            case "no number":
                del attributes[TPU_WORKER_ID]
                self.do(replace(plain, attributes=attributes))
            case "same number":
                self.do(replace(plain, node_id=f"{node_id}-twin"))
            case "odd pool":
                self.do(replace(plain, attributes=attributes | {"pool": AttributeValue("odd")}))

    def happen(self, what: str, pick: int) -> None:
        """What is refused because it makes no sense just now changes nothing."""
        with suppress(IllegalTransitionError):
            if what == "limit":
                self.limit(pick)
            self.happen_to_jobs(what, pick)
            self.happen_to_hosts(what, pick)

    def limit(self, pick: int) -> None:
        user = ("ann", "bob", "cem", EVERYBODY)[pick % 4]
        limits = (Limits(chips=4), Limits(chips=16), Limits(running_jobs=1), Limits(chips=8, running_jobs=2), Limits())
        for band in PriorityBand:
            self.do(LimitsSetEvent(user, band, limits[(pick + band) % 5]))

    def happen_to_jobs(self, what: str, pick: int) -> None:
        if what == "submit" and self.specs:
            spec, age = self.specs.pop(0)
            self.do(JobSubmittedEvent(spec, self.now - age))
        attempts = [c for owner in ("pool-a", "pool-b") for c in self.state.attempts_of(owner)]
        if not attempts:
            return
        it = attempts[pick % len(attempts)]
        job = self.state.jobs[it.job_id]
        tasks = job.gangs[it.gang].tasks
        match what:
            case "run" | "end":
                for task in tasks:
                    state = S.RUNNING if what == "run" else S.SUCCEEDED
                    self.do(TaskStateChangedEvent(it, task.index, state))
            case "retry":
                self.do(TaskStateChangedEvent(it, it.gang, S.FAILED, "boom"))
            case "move":
                self.do(GangMovedEvent(it, "to more slices"))
            case "launch fails":
                groups = job.gangs[it.gang].groups[: pick % 2]
                self.do(TaskDispatchFailedEvent(it, "no answer", self.now, groups))
            case "cancel":
                self.do(JobCancelledEvent(it.job_id, "enough"))
            case "confirm":
                self.do(AttemptEndConfirmedEvent(it))
            case "confirm all":
                for one in attempts:
                    self.confirm_if_over(one)

    def confirm_if_over(self, attempt: AttemptId) -> None:
        with suppress(IllegalTransitionError):
            self.do(AttemptEndConfirmedEvent(attempt))

    def happen_to_hosts(self, what: str, pick: int) -> None:
        node_id = list(self.hosts)[pick % len(self.hosts)]
        name = node_id[0]
        match what:
            case "lose" | "drain" | "suspect":
                self.spoil({"lose": "missing", "drain": "draining", "suspect": "suspected"}[what], node_id)
            case "relabel":
                self.spoil(HOST_FLAWS[4 + pick % 4], node_id)
            case "repair":
                for there in [w for w in self.state.workers if w.startswith(f"{name}-")]:
                    if there not in self.hosts or self.state.workers[there].draining:
                        self.lose(there)
                for there, registration in self.hosts.items():
                    if there.startswith(name):
                        self.do(registration)
            case "blame":
                user, jobs = ("ann", "bob", "cem")[pick % 3], self.state.jobs.values()
                for job in [job for job in jobs if job.spec.user == user][:1] * 3:
                    self.do(WorkerBlamedEvent(node_id, job.spec.job_id, "boom", Fault.CRASH))
            case "hold":
                self.state.fleet.hold(name, ("pool-a", "pool-b")[pick % 2])
            case "release":
                self.do(SliceReleasedEvent(name, ("pool-a", "pool-b")[pick % 2]))
            case "time" | "long time":
                self.now += 7.0 if what == "time" else LONG / 2


def slice_of(name: str, drawn: dict) -> list[WorkerRegisteredEvent]:
    """The hosts of a slice before anything is wrong with one of them."""
    tpu_type, flaw, count = drawn["tpu_type"], drawn["flaw"], SIZES[drawn["tpu_type"]]
    extra = labels(drawn)
    if flaw == "split":  # as many chips on twice as many hosts
        count *= 2
        extra = labels(drawn | {"rack": None}) | {TPU_VM_COUNT: AttributeValue(count)}
    resources = {TPU: 2.0 if flaw == "split" else 4.0, "CPU": 4.0 if flaw == "fewer CPUs" else 8.0}
    registrations = []
    for number in range(count + (flaw == "one too many")):
        plain = host(name, number, tpu_type, resources=resources)
        attributes = {**plain.attributes, **extra}
        if flaw == "no vm count":
            del attributes[TPU_VM_COUNT]
        registrations.append(replace(plain, attributes=attributes))
    return registrations


def cpu_host(node_id: str, drawn: dict) -> WorkerRegisteredEvent:
    attributes = labels(drawn) | ({"taint:spot": AttributeValue(True)} if drawn["tainted"] else {})
    elsewhere = {"CPU": drawn["elsewhere"]} if drawn["elsewhere"] else {}
    return WorkerRegisteredEvent(node_id, "10.0.0.2", attributes, {"CPU": drawn["cpus"]}, elsewhere=elsewhere)


def labels(drawn: dict) -> dict[str, AttributeValue]:
    return {key: AttributeValue(drawn[key]) for key in ("rack", "pool") if drawn[key] is not None}


def spec_of(job_id: str, shape: Shape, typed: bool, constraints: tuple[Constraint, ...], **changes: Any) -> JobSpec:
    """A job of a random shape."""
    gang = shape.kind != "tasks"
    whole = shape.kind == "whole"
    if typed and gang:
        constraints = (Constraint(TPU_TOPOLOGY, Op.EQ, shape.device), *constraints)
    if not gang:
        changes["spares"] = 0
    return JobSpec(
        job_id=job_id,
        device=shape.device if gang else None,
        replicas=SIZES[shape.device],
        coscheduling=CoschedulingConfig("rack" if shape.kind == "rack" else TPU_NAME, shape.counts) if gang else None,
        whole_groups=whole,
        constraints=constraints,
        resources={TPU: shape.chips, "CPU": shape.cpus},
        max_retries_failure=3,
        **changes,
    )


def commit_what_both_plan(world: World) -> None:
    """Plan twice, compare, commit."""
    state = world.state
    result = world.plan()
    before = {account: state.limits.held(*account).chips for account in state.limits.accounts}
    reference = ReferencePlan(
        state.pending(), state.fleet, state.usage, state.past_usage, world.now, BACKFILL_BOUND_S, state.limits
    )
    assert result.assignments == reference.assignments
    assert {event.job_id for event in result.timed_out} == reference.timed_out
    assert {event.job_id for event in result.unschedulable} == reference.unschedulable
    assert result.pending_reasons.keys() == reference.pending_reasons
    assert {i for i, waiting in result.pending_reasons.items() if waiting.limit} == reference.limited
    assert set(result.starving) == reference.starving
    assert {i: list(waiting.kept) for i, waiting in result.pending_reasons.items() if waiting.kept} == {
        job_id: names for job_id, names in reference.kept.items() if names
    }
    world.scheduler.check(world.now)
    for event in (*result.assignments, *result.rooms, *result.timed_out, *result.unschedulable):
        state.handle_event(event)
    check_given_back(world, result)
    kept = {job_id: job.kept for job_id, job in state.jobs.items() if job.kept}
    given_up = reference.timed_out | reference.unschedulable
    assert kept == {job_id: tuple(hosts) for job_id, hosts in reference.rooms.items() if job_id not in given_up}
    for account in state.limits.accounts:
        most, held = state.limits.of(*account).chips, state.limits.held(*account).chips
        assert most is not None
        assert held <= max(most, before.get(account, 0.0)), f"{account} holds more than the limit"
    state.check()


def check_given_back(world: World, result: SchedulingResult) -> None:
    """What spares give back helps some job that waits."""
    hosts = {t.node_id for event in result.given_back for t in world.state.jobs[event.job_id].gang.tasks}
    for event in result.given_back:
        world.do(event)
    if hosts:
        placed = [a for a in world.plan().assignments if not comes_last(world.state.jobs[a.job_id])]
        groups = [a.groups if isinstance(a, GangAssignedEvent) else ((a.node_id,),) for a in placed]
        assert hosts & {node_id for some in groups for group in some for node_id in group}


def check_random_world(drawn: dict) -> None:
    """Cycle after cycle the same assignments, the same jobs that wait, time out, are given up, and get groups kept.

    Between the cycles jobs end, return and move, and hosts change, so the fleet's indexes have catching up to do. Jobs
    have spares, get replacements, and grow.
    """
    world = RandomWorld(drawn["slices"], drawn["cpu_hosts"], drawn["kinds"], drawn["jobs"])
    for pick in drawn["limits"]:
        world.limit(pick)
    for _ in range(drawn["at_first"]):
        world.happen("submit", 0)
    commit_what_both_plan(world)
    for happenings in drawn["cycles"]:
        for what, pick in happenings:
            world.happen(what, pick)
        commit_what_both_plan(world)


@settings(max_examples=120 * EXAMPLES)
@given(WORLDS)
def test_scheduler_in_random_worlds_plans_what_the_reference_plans(drawn: dict) -> None:
    check_random_world(drawn)


@pytest.mark.proof
@pytest.mark.parametrize("part", range(2))
@settings(max_examples=190 * EXAMPLES)
@given(drawn=WORLDS)
def test_scheduler_in_many_random_worlds_plans_what_the_reference_plans(part: int, drawn: dict) -> None:
    check_random_world(drawn)


def test_room_is_kept_where_least_is_missing_also_for_a_job_that_avoids_a_host() -> None:
    kind: dict[str, Any] = {
        "typed": False,
        "constraints": (),
        "preferences": (),
        "tolerations": (),
        "owner": "pool-a",
        "priority": PriorityBand.INTERACTIVE,
        "scheduling_timeout": None,
        "spares": 0,
        "grow_after": None,
    }
    kinds = [kind | {"shape": Shape("gang", device, (1,), 4.0, 0.0)} for device in ("v4-16", "v4-8")]
    slices = [{"tpu_type": "v4-16", "rack": "r1", "pool": None, "flaw": None, "at": 0}] * 6
    jobs = [*[(0, "ann", 0.0)] * 6, (1, "cem", LONG)]
    cycles = [[("submit", 0), ("blame", 8)]]  # e-0
    check_random_world(
        {"slices": slices, "cpu_hosts": [], "kinds": kinds, "jobs": jobs, "at_first": 6, "limits": [], "cycles": cycles}
    )


# -- all small worlds --------------------------------------------------------------------------------------------------

FREE, BUSY, MISSING, DRAINING = "free", "busy", "missing", "draining"
# Which of the two hosts of a slice is which, and which slice, makes no difference.
STATES = (FREE, BUSY, DRAINING, MISSING)
SLICE_STATES = [states for states in combinations_with_replacement(STATES, 2) if states != (MISSING, MISSING)]
FLEETS = [fleet for size in range(4) for fleet in combinations_with_replacement(SLICE_STATES, size)]
SmallFleet = tuple[tuple[str, str], ...]
Place = tuple[tuple[str, ...], ...]


def gang(*counts: int, **changes: Any) -> dict[str, Any]:
    return {"coscheduling": CoschedulingConfig(TPU_NAME, counts), "constraints": ()} | changes


SMALL_JOBS: dict[str, dict[str, Any]] = {
    "slice": gang(1),
    "two slices": gang(2),
    "slice or three": gang(1, 3),
    "part of a slice": gang(1, tpu_type="v4-8"),
    "pair in the rack": gang(1, coscheduling=CoschedulingConfig("rack")),
    "two tasks": gang(1, coscheduling=None, device=None),
}

SMALL_HOSTS = {
    (name, number, state): replace(
        plain,
        attributes={**plain.attributes, "rack": AttributeValue("the only one")},
        draining="notice" if state is DRAINING else None,
    )
    for name, number, state in product("abc", range(2), (FREE, BUSY, DRAINING))
    if (plain := host(name, number))
}
SMALL_SPECS = {(shape, n): gang_spec(f"job-{n}", **SMALL_JOBS[shape]) for shape in SMALL_JOBS for n in range(3)}


def small_worlds() -> Iterator[tuple[SmallFleet, tuple[str, ...]]]:
    """All fleets with all queues; with queues of three jobs only small ones, unless more is asked for."""
    for fleet, length in product(FLEETS, (1, 2, 3)):
        small = len(fleet) < 3 and {FREE, BUSY}.issuperset(chain(*fleet))
        if length < 3 or small or EXAMPLES > 1:
            for shapes in product(SMALL_JOBS, repeat=length):
                yield fleet, shapes


class SmallWorld(World):
    """Up to three slices of two hosts, all in one rack; each busy host is used by a job of its own."""

    def __init__(self, fleet: SmallFleet, shapes: Sequence[str], age: float) -> None:
        super().__init__()
        for name, states in zip("abc", fleet, strict=False):
            for number, state in enumerate(states):
                if state is not MISSING:
                    self.do(SMALL_HOSTS[name, number, state])
                if state is BUSY:
                    self.use(f"{name}-{number}")
        for number, shape in enumerate(shapes):
            self.do(JobSubmittedEvent(SMALL_SPECS[shape, number], self.now - age))
        self.jobs = [self.state.jobs[f"job-{number}"] for number in range(len(shapes))]

    def use(self, node_id: str) -> None:
        spec = JobSpec(job_id=f"on {node_id}", owner="pool-a", resources={TPU: 4.0})
        self.do(JobSubmittedEvent(spec, self.now))
        self.do(TaskAssignedEvent(spec.job_id, 0, node_id))

    def end(self, attempts: Sequence[AttemptId]) -> None:
        """They succeed, and their ends are confirmed."""
        for attempt in attempts:
            job = self.state.jobs[attempt.job_id]
            for task in job.gangs[attempt.gang].tasks:
                self.do(TaskStateChangedEvent(attempt, task.index, S.SUCCEEDED))
            self.do(AttemptEndConfirmedEvent(attempt))

    # -- what is legal, from hosts alone -------------------------------------------------------------------------------

    def hosts(self, idle: bool) -> set[str]:
        """Hosts that take new tasks: now, or once nothing runs any more."""
        return {i for i, w in self.state.workers.items() if w.draining is None and not (idle and w.occupants)}

    def legal_places(self, job: Job, idle: bool) -> set[Place]:
        """All places where a gang of the job might run, as groups of hosts in order."""
        hosts = self.hosts(idle)
        config = job.spec.coscheduling
        if config is None:
            return {((node_id,),) for node_id in hosts}
        if config.group_by == "rack":
            return {(pair,) for pair in combinations(sorted(hosts), 2)}
        slices = [(f"{name}-0", f"{name}-1") for name in "abc"]
        if job.spec.replicas == 1:  # there is no slice of one host, so half a slice will do, if it is a sound one
            sound = [pair for pair in slices if self.hosts(idle=False).issuperset(pair)]
            return {((node_id,),) for pair in sound for node_id in pair if node_id in hosts}
        whole = [pair for pair in slices if hosts.issuperset(pair)]
        return {groups for count in config.num_groups for groups in combinations(whole, count)}

    def commit_legal_plan(self) -> set[str]:
        """Commit a plan step by step; each step is legal after those before. Returns the jobs that got something."""
        plan = self.plan()
        assignments = plan.assignments
        for event in assignments:
            place = event.groups if isinstance(event, GangAssignedEvent) else ((event.node_id,),)
            assert place in self.legal_places(self.state.jobs[event.job_id], idle=True)
            self.do(event)
        for room in plan.rooms:
            self.do(room)
        return {event.job_id for event in assignments}

    def run_to_the_end(self, at_once: bool) -> None:
        """Until nothing runs and nothing can: what runs ends, all at once or one after the other."""
        while attempts := self.state.attempts_of("pool-a"):
            self.end(attempts if at_once else attempts[:1])
            self.commit_legal_plan()


def check_small_world(fleet: SmallFleet, shapes: Sequence[str], age: float, at_once: bool) -> None:
    world = SmallWorld(fleet, shapes, age)
    head = world.jobs[0]  # all are one user's
    feasible = {job.spec.job_id for job in world.jobs if world.legal_places(job, idle=False)}
    possible_now = bool(world.legal_places(head, idle=True))
    assert (head.spec.job_id in world.commit_legal_plan()) == possible_now
    world.run_to_the_end(at_once)
    assert feasible == {job.spec.job_id for job in world.jobs if job.state is JobState.SUCCEEDED}


SHARES = 5
"""Of all small worlds. It has no factor in common with the number of queues, so each share has every kind of them."""


@pytest.mark.parametrize("share", [0, *(pytest.param(share, marks=pytest.mark.proof) for share in range(1, SHARES))])
@pytest.mark.parametrize(
    ("age", "at_once"), [(0.0, True), (LONG, False), *([(0.0, False), (LONG, True)] if EXAMPLES > 1 else [])]
)
def test_scheduler_in_every_small_world_plans_legally_and_ends_every_feasible_job(
    age: float, at_once: bool, share: int
) -> None:
    """All plans are legal, the oldest job runs at once if that is possible, and every job runs that ever can.

    So no jobs of any shapes wait for each other for ever: neither fresh ones nor, past the bound, those for which
    groups are kept; whether what runs ends all together or one by one. The shares together are all small worlds.
    """
    for fleet, shapes in islice(small_worlds(), share, None, SHARES):
        check_small_world(fleet, shapes, age, at_once)
