"""Random events in random order, late and doubled, with the real scheduler in the loop.

The quick tests try some sequences of their own each time, the thorough ones many more.
``IRIS_TEST_EXAMPLES=20 pytest tests/proofs/test_state_random.py`` tries twenty times as many sequences.
"""

import os
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from iris_ray.errors import IllegalTransitionError
from iris_ray.model.constraints import AttributeValue, Constraint, ConstraintOp, Scalar
from iris_ray.model.ids import AttemptId
from iris_ray.model.jobs import CoschedulingConfig, Gang, Job, JobSpec, PriorityBand, SparePurpose
from iris_ray.model.lifecycle import TRANSITIONS, JobState, TaskState
from iris_ray.model.notices import Notice, NoticeKind
from iris_ray.model.workers import TPU_NAME, TPU_TOPOLOGY, TPU_VM_COUNT, TPU_WORKER_ID, Occupant, Worker
from iris_ray.scheduler.pending_reason import PendingKind, PendingReason
from iris_ray.scheduler.scheduler import BACKFILL_BOUND_S, SchedulingResult
from iris_ray.state import ControllerState
from iris_ray.state.events import (
    AssignedEvent,
    AttemptEndConfirmedEvent,
    Event,
    GangAssignedEvent,
    GangMovedEvent,
    JobCancelledEvent,
    JobRestoredEvent,
    JobSubmittedEvent,
    MaintenanceCalledOffEvent,
    PoolRestartedEvent,
    SliceHeldEvent,
    SliceReleasedEvent,
    TaintedEvent,
    TaintLiftedEvent,
    TaskAssignedEvent,
    TaskDispatchFailedEvent,
    TaskStateChangedEvent,
    TaskUnschedulableEvent,
    TimePassedEvent,
    WorkerBlamedEvent,
    WorkerDrainedEvent,
    WorkerFailedEvent,
    WorkerRegisteredEvent,
    WorkerSuspectedEvent,
)
from iris_ray.state.fleet import SUSPICION_S
from iris_ray.state.instructions import Instructions, ReclaimSlice
from iris_ray.state.records import JobRecord
from tests.support.worlds import World, gang_spec, host

EXAMPLES = int(os.environ.get("IRIS_TEST_EXAMPLES", "1"))

S = TaskState
OP = ConstraintOp
LIVE = {S.ASSIGNED, S.RUNNING, S.SUCCEEDED}
TERMINAL = {state for state, targets in TRANSITIONS.items() if not targets}

# -- what is drawn --------------------------------------------------------------------------------------------------

# Places of hosts: (slice, worker id) → TPU type; (rack, number) of hosts that are no slices; those without chips.
TPU_PLACES = {(name, number): "v4-16" for name in "abc" for number in range(2)} | {
    ("Large", number): "v4-32" for number in range(4)
}
RACK_PLACES = [(rack, number) for rack in ("rack-1", "rack-2") for number in range(2)]
CPU_PLACES = [("plain", number) for number in range(2)]
PLACES = (*TPU_PLACES, *RACK_PLACES, *CPU_PLACES)

SOUND: Mapping[str, Scalar] = {"pool": "large", "generation": 4, "zone": "us"}
ODDITIES: tuple[Mapping[str, Scalar | None], ...] = (
    {"pool": "small"},
    {"pool": None},
    {"generation": 3},
    {"generation": "four"},  # not comparable with a number
    {"taint:spot": True},
    {"taint:spot": False},  # a taint whatever its value
    {TPU_WORKER_ID: None},
    {TPU_VM_COUNT: 3},
    {"TPU": None},  # its chips were not found
)
CONSTRAINTS = (
    *[()] * 5,
    (Constraint("pool", OP.EQ, "large"),),
    (Constraint("pool", OP.NE, "small"), Constraint("generation", OP.GE, 4)),
    (Constraint("generation", OP.LT, 4.5), Constraint("zone", OP.EXISTS)),
    (Constraint("pool", OP.IN, ("large", "huge")), Constraint("taint:spot", OP.NOT_EXISTS)),
    (Constraint("zone", OP.GT, 1),),  # can never be evaluated
)


def slices(*counts: int, **changes: Any) -> dict[str, Any]:
    """A gang on whole slices of two hosts; with ``anywhere`` on any slices."""
    return {"kind": "slices", "coscheduling": CoschedulingConfig(num_groups=counts), **changes}


def racks(*counts: int) -> dict[str, Any]:
    """A gang on hosts that share a rack and are no slices."""
    return slices(*counts) | {
        "coscheduling": CoschedulingConfig("rack", counts),
        "resources": {"CPU": 3.0},
        "anywhere": True,
    }


def tasks(replicas: int, **resources: float) -> dict[str, Any]:
    """Tasks that are placed one by one."""
    return {"kind": "tasks", "replicas": replicas, "resources": resources}


SHAPES = (
    slices(1),
    slices(2),
    slices(3),
    slices(1, 2),
    slices(1, 3),
    slices(1, anywhere=True),
    slices(4, anywhere=True),
    slices(3, 4, anywhere=True),
    slices(2, resources={"TPU": 4.0, "CPU": 6.0}),
    slices(1, 2, anywhere=True, whole_groups=True),
    racks(1),
    racks(1, 2),
    tasks(1, TPU=4.0),
    tasks(3, TPU=1.0),
    tasks(2, TPU=4.0, CPU=1.0),
    tasks(2, CPU=0.5),
    tasks(4, CPU=3.0),
    tasks(2),
)
OWNERS = ("pool-a", "pool-b")
TERMS = st.fixed_dictionaries(
    {
        "owner": st.sampled_from(OWNERS),
        "user": st.sampled_from(["ann", "bob", "cy"]),
        "priority": st.sampled_from(list(PriorityBand)),
        "constraints": st.sampled_from(CONSTRAINTS),
        "preferences": st.sampled_from(CONSTRAINTS),
        "tolerations": st.sampled_from([(), ("spot",)]),
        "max_retries_failure": st.integers(0, 2),
        "max_retries_preemption": st.sampled_from([0, 1, 2, 30]),
        "max_task_failures": st.sampled_from([None, None, 0, 1, 2]),
        "scheduling_timeout": st.sampled_from([None, None, None, None, 30.0, 650.0]),
        "spares": st.sampled_from([0, 0, 0, 1, 2]),
        "grow_after": st.sampled_from([None, 0.0, 20.0, 43200.0]),
    }
)
JOBS = st.tuples(st.sampled_from(SHAPES), TERMS)
GANGS = (slices(1), slices(2), slices(1, 2), slices(1, 2, 3), slices(2, 3))
# What happens to a gang with room about it, and to its spares.
LOSSES = ("drain", "lose", "drain room", "lose room")
LIFE = st.sampled_from(
    ["run", "run", "run", *LOSSES, "move", "end quickly", "repair", "restart", "pool dies", "call off"]
)
REPORTS = st.sampled_from([S.RUNNING, S.SUCCEEDED, S.FAILED, S.WORKER_FAILED])
TROUBLE = st.sampled_from(
    [
        "lost",
        "lost",
        "drain",
        "drain by itself",
        "call off",
        "silent",
        "foreign",
        "early",
        "odd",
        "all odd",
        "blamed",
        "tainted",
    ]
)
SECONDS = st.sampled_from([0.0, 0.4, 5.0, 40.0, BACKFILL_BOUND_S + 1])
PICK = st.integers(0, 13)
INDEX = st.integers(0, 5)
# Seconds that pass; what becomes of what runs; of which member; whether the ends are confirmed.
ROUND = st.tuples(
    SECONDS,
    st.lists(st.sampled_from([S.FAILED, S.WORKER_FAILED, S.RUNNING, S.SUCCEEDED]), min_size=1, max_size=4),
    INDEX,
    st.booleans(),
)


def make_spec(job_id: str, shape: Mapping[str, Any], terms: Mapping[str, Any]) -> JobSpec:
    values = {**terms, **shape}
    kind, anywhere = values.pop("kind"), values.pop("anywhere", False)
    if kind == "tasks":
        values["spares"] = 0
        return JobSpec(job_id=job_id, **values)
    if not anywhere:
        values["constraints"] = (Constraint(TPU_TOPOLOGY, OP.EQ, "v4-16"), *values["constraints"])
    return gang_spec(job_id, **values)


# -- a second account -----------------------------------------------------------------------------------------------


class GangView(NamedTuple):
    """All that is kept of one gang, at one moment."""

    states: tuple[TaskState, ...]
    node_ids: tuple[str | None, ...]
    attempt: int
    failures: int
    preemptions: int
    dispatch_failures: int
    not_before: float
    groups: tuple[str, ...]
    started: bool
    error: str | None

    @property
    def live(self) -> bool:
        """Whether its attempt has hosts and is not over."""
        return set(self.states) <= LIVE and set(self.states) != {S.SUCCEEDED}

    @property
    def over(self) -> bool:
        """Whether it will not run again, if nothing happens to it."""
        return self.states[0] in TERMINAL or set(self.states) == {S.SUCCEEDED}


class JobView(NamedTuple):
    """All that is kept of one job, at one moment."""

    state: JobState
    failures: int
    preemptions: int
    error: str | None
    gangs: tuple[GangView, ...]


def view(gang: Gang) -> GangView:
    return GangView(
        tuple(task.state for task in gang.tasks),
        tuple(task.node_id for task in gang.tasks),
        gang.attempt,
        gang.failures,
        gang.preemptions,
        gang.dispatch_failures,
        gang.not_before,
        gang.groups,
        gang.started,
        gang.error,
    )


def view_jobs(state: ControllerState) -> dict[str, JobView]:
    return {
        job_id: JobView(job.state, job.failures, job.preemptions, job.error, tuple(map(view, job.gangs)))
        for job_id, job in state.jobs.items()
    }


def when(notice: Notice | None) -> tuple[NoticeKind, float] | None:
    """Its words tell the host's name of then; that may have changed since."""
    return notice and (notice.kind, notice.deadline)


def view_all(state: ControllerState) -> tuple[dict[str, JobView], object]:
    """The whole state, to see that nothing has changed."""
    workers = {
        w.node_id: (
            w.attributes,
            (w.draining, when(w.notice), w.final and (w.final[0], when(w.final[1]))),
            w.foreign,
            w.suspected_until,
            sorted(w.occupants),
            sorted(w.ending),
        )
        for w in state.workers.values()
    }
    usage = {user: {r: round(n, 4) for r, n in held.items() if round(n, 4)} for user, held in state.usage.items()}
    usage = {user: held for user, held in usage.items() if held}
    memory = {
        (job_id, position): (
            gang.notice,
            gang.waiting_since,
            gang.returning_until,
            gang.running_since,
            gang.quick_ends,
            gang.groups_wanted,
        )
        for job_id, job in state.jobs.items()
        for position, gang in enumerate(job.gangs)
    }
    queue = sorted(job.number for job in state.pending())
    return view_jobs(state), (workers, dict(state.holders), usage, queue, memory, deepcopy(state.fleet.taints))


class BlameView(NamedTuple):
    """A failure that may be a host's fault."""

    at: float
    node_id: str
    user: str
    by_user_code: bool


PAUSES = (0.0, 0.0, 1.0, 2.0, 4.0, 8.0)
"""Before the next attempt after so many quick ends; 10 s after more of them."""
Need = tuple[SparePurpose, tuple[int, ...]]


@dataclass
class Account:
    """Who holds what and who has used up what, kept from the events alone.

    Attributes:
        held: attempt → task id → worker id, until the end is confirmed or the worker is lost.
        holders: slice → owner.
        failures, preemptions: (job, position of the gang) → attempts that were charged so.
        ended: attempts that came to an end before they had succeeded.
        verdicts: jobs that were cancelled or given up.
        now: the latest time that an event has brought.
        notices: worker id → kind and deadline of its notice.
        finals: worker id → those of the nearest drain or preemption that it had word of.
        told: attempt → kind and deadline of the notice that its tasks have.
        began: (job, position) → when the first task of the attempt was said to run.
        quick: (job, position) → ends in a row that came soon.
        returning: job → until when it comes before all others.
        wanted: job → on how many groups it ran before it lost some.
        taints: (target, name) → until when.
        blames: of the last hour.
        set_aside: worker id → until when, and the blames for which it is.
        last_held: spare that is gone → the hosts that it had.
    """

    held: dict[AttemptId, dict[str, str]] = field(default_factory=dict)
    holders: dict[str, str] = field(default_factory=dict)
    failures: Counter[tuple[str, int]] = field(default_factory=Counter)
    preemptions: Counter[tuple[str, int]] = field(default_factory=Counter)
    ended: set[AttemptId] = field(default_factory=set)
    verdicts: dict[str, JobState] = field(default_factory=dict)
    now: float = 0.0
    notices: dict[str, tuple[NoticeKind, float]] = field(default_factory=dict)
    finals: dict[str, tuple[NoticeKind, float]] = field(default_factory=dict)
    told: dict[AttemptId, tuple[NoticeKind, float]] = field(default_factory=dict)
    began: dict[tuple[str, int], float] = field(default_factory=dict)
    quick: Counter[tuple[str, int]] = field(default_factory=Counter)
    returning: dict[str, float] = field(default_factory=dict)
    wanted: dict[str, int] = field(default_factory=dict)
    taints: dict[tuple[str, str], float | None] = field(default_factory=dict)
    blames: list[BlameView] = field(default_factory=list)
    set_aside: dict[str, tuple[float, list[BlameView]]] = field(default_factory=dict)
    last_held: dict[str, list[str]] = field(default_factory=dict)

    def forgive(self, node_id: str) -> None:
        self.blames = [blame for blame in self.blames if blame.node_id != node_id]
        self.set_aside.pop(node_id, None)

    def ends_quickly(self, job_id: str, position: int) -> int:
        """How many quick ends in a row there are if the attempt ends now."""
        began = self.began.get((job_id, position))
        return 0 if began is not None and self.now >= began + 10.0 else self.quick[job_id, position] + 1

    def hears(self, attempt: AttemptId, kind: NoticeKind, deadline: float) -> bool:
        """Whether the attempt is to be told; if so, it is written down."""
        known_kind, known = self.told.get(attempt, (NoticeKind.GROWTH, 0.0))
        if known_kind is not NoticeKind.GROWTH and known <= deadline + 1.0:
            return False
        self.told[attempt] = kind, deadline
        return True

    def failures_of(self, job: Job) -> int:
        return sum(self.failures[job.spec.job_id, position] for position in range(len(job.gangs)))

    def failed_for_good(self, job: Job, position: int) -> bool:
        """Whether this gang's failures, or all of the job's, are more than there may be."""
        limit = job.spec.max_task_failures
        too_many = limit is not None and self.failures_of(job) > limit
        return too_many or self.failures[job.spec.job_id, position] > job.spec.max_retries_failure

    def lost_for_good(self, job: Job, position: int) -> bool:
        return self.preemptions[job.spec.job_id, position] > job.spec.max_retries_preemption

    def state_of(self, job: Job, now: JobView) -> JobState:
        """What a job's state should be, in the words of the rules."""
        positions = range(len(job.gangs))
        if verdict := self.verdicts.get(job.spec.job_id):
            return verdict
        limit = job.spec.max_task_failures
        if limit is None and any(self.failed_for_good(job, position) for position in positions):
            return JobState.FAILED
        if limit is not None and self.failures_of(job) > limit:
            return JobState.FAILED
        if any(self.lost_for_good(job, position) for position in positions):
            return JobState.WORKER_FAILED
        if all(gang.over for gang in now.gangs):
            succeeded = any(S.SUCCEEDED in gang.states for gang in now.gangs)
            return JobState.SUCCEEDED if succeeded else JobState.FAILED
        return JobState.PENDING if all(set(g.states) == {S.PENDING} for g in now.gangs) else JobState.RUNNING


def demand_of(job: Job, worker: Worker) -> Counter[str]:
    """What one task takes: with chips, all of its host's."""
    spec = job.spec
    demand = Counter({resource: amount for resource, amount in spec.resources.items() if amount})
    if uses_chips(spec):
        demand["TPU"] = worker.resources.get("TPU", 0.0)
    return demand


def uses_chips(spec: JobSpec) -> bool:
    return spec.device is not None or spec.resources.get("TPU", 0.0) > 0


def suits(job: Job, worker: Worker) -> bool:
    """Whether a worker is what the job asks for, used or not."""
    spec = job.spec
    asked_for = {constraint.key for constraint in spec.constraints if constraint.op is not OP.NOT_EXISTS}
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


def is_nearer(known: dict[str, tuple[NoticeKind, float]], node_id: str, kind: NoticeKind, deadline: float) -> bool:
    """Whether that is nearer than what is known of the host; if so, it is written down."""
    if node_id in known and known[node_id][1] <= deadline + 1.0:
        return False
    known[node_id] = kind, deadline
    return True


def job_of(event: Event, default: str) -> str:
    """The id of the job that an event is about; the default if it is about none in particular."""
    attempt: AttemptId | None = getattr(event, "attempt", None)
    return attempt.job_id if attempt is not None else getattr(event, "job_id", default)


def counts_of(job: Job) -> tuple[int, ...]:
    return job.spec.coscheduling.counts if job.spec.coscheduling else (1,)


# -- the machine ----------------------------------------------------------------------------------------------------


class RandomEvents(RuleBasedStateMachine):
    """Random events, late and twice, at the state with the real scheduler in the loop."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World()
        self.account = Account()
        self.places: dict[str, tuple[str, int]] = {}  # worker id → where it stands
        self.history: list[Event] = []
        self.unsent: list[Event] = []  # what the scheduler decided a while ago
        self.joined = 0
        self.spare_owners: dict[str, str] = {}
        self.looks_often = True
        self.latest: tuple[int, float, Mapping[str, PendingReason]] = (
            0,
            0.0,
            {},
        )  # fleet's version, time, who waited then
        for place in PLACES:
            self.join(place)

    @property
    def state(self) -> ControllerState:
        return self.world.state

    # -- one event ---------------------------------------------------------------------------------------------------

    def apply(self, event: Event) -> Instructions | None:
        """Apply an event and check all that it may change; None if it is refused."""
        everything = view_all(self.state)
        before = everything[0]
        self.account.now = max(self.account.now, getattr(event, "now", 0.0))
        charged = self.charge(event, before)
        spares_before = self.spares()
        try:
            instructions = self.state.handle_event(event)
        except IllegalTransitionError:
            assert not charged
            assert view_all(self.state) == everything
            return None
        self.history.append(event)
        after = view_jobs(self.state)
        self.check_who_came_and_went(event, before, after, instructions)
        self.book(event, before, instructions)
        self.book_ends(event, before, after, charged)
        self.check_notices(event, before, instructions)
        self.check_spares(spares_before)
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
                    stops[attempt] += not isinstance(event, TaskDispatchFailedEvent | GangMovedEvent)  # its pool knows
                self.check_gang(job, position, was, now, ended_by=charged.get(attempt))
            assert new.failures == self.account.failures_of(job)
            assert new.preemptions == sum(self.account.preemptions[job_id, i] for i in range(len(job.gangs)))
        assert Counter(instructions.finished) == Counter(finished)
        assert Counter(stop.attempt for stop in instructions.stop) == +stops
        return instructions

    def charge(self, event: Event, before: Mapping[str, JobView]) -> dict[AttemptId, TaskState]:
        """Attempts that the event ends, with the state that its cause gets if the gang is not tried again."""
        charged: dict[AttemptId, TaskState] = {}
        match event:
            case TaskStateChangedEvent(attempt, index, (S.FAILED | S.WORKER_FAILED) as end) if attempt.job_id in before:
                job_id, number, position = attempt
                job = self.state.jobs[job_id]
                if before[job_id].state.finished or not 0 <= position < len(job.gangs):
                    return {}
                gang = before[job_id].gangs[position]
                member = index - position
                if not gang.live or gang.attempt != number or not 0 <= member < len(gang.states):
                    return {}
                if gang.states[member] is S.SUCCEEDED and end is S.FAILED:
                    return {}  # a function returns once
                host = self.state.workers.get(gang.node_ids[member] or "")
                sound = host is not None and host.node_id not in self.account.notices
                if self.account.ends_quickly(job_id, position) > 5 and sound and gang.states[member] is not S.SUCCEEDED:
                    end = S.FAILED  # nothing is wrong but the task
                charged[attempt] = end
                account = self.account.failures if end is S.FAILED else self.account.preemptions
                account[job_id, position] += 1
            case WorkerFailedEvent(node_id) if worker := self.state.workers.get(node_id):
                over: set[str] = set()
                for _, attempt in worker.occupants:
                    job_id, number, position = attempt
                    job = self.state.jobs[job_id]
                    gang = before[job_id].gangs[position]
                    if job_id in over or not gang.live or gang.attempt != number or before[job_id].state.finished:
                        continue
                    charged[attempt] = S.WORKER_FAILED
                    if gang.states != (S.ASSIGNED,) * len(gang.states):  # it had begun
                        self.account.preemptions[job_id, position] += 1
                    if self.account.lost_for_good(job, position):
                        over.add(job_id)
            case PoolRestartedEvent(owner):
                self.charge_for_pool(owner, before, charged)
        return charged

    def charge_for_pool(self, owner: str, before: Mapping[str, JobView], charged: dict[AttemptId, TaskState]) -> None:
        """All its gangs that had begun lose an attempt, until one of a job has lost too many."""
        over: set[str] = set()
        for attempt in filter(self.is_live, self.account.held):
            job_id, _, position = attempt
            job, gang = self.state.jobs[job_id], before[job_id].gangs[position]
            if job.spec.owner != owner or job.spec.spare_for is not None or job_id in over:
                continue
            charged[attempt] = S.WORKER_FAILED
            if set(gang.states) == {S.ASSIGNED}:
                continue
            member = next(i for i, state in enumerate(gang.states) if state is not S.SUCCEEDED)
            host = self.state.workers[gang.node_ids[member]]
            if self.account.ends_quickly(job_id, position) > 5 and host.node_id not in self.account.notices:
                charged[attempt] = S.FAILED
                self.account.failures[job_id, position] += 1
            else:
                self.account.preemptions[job_id, position] += 1
            limited = job.spec.max_task_failures is not None
            failed, lost = self.account.failed_for_good(job, position), self.account.lost_for_good(job, position)
            if lost or (failed and (not limited or self.account.failures_of(job) > job.spec.max_task_failures)):
                over.add(job_id)
        for job_id, was in before.items():  # and with what nobody has had yet, results are lost
            job = self.state.jobs[job_id]
            if job.spec.owner != owner or was.state.finished:
                continue
            for position, gang in enumerate(was.gangs):
                if set(gang.states) == {S.SUCCEEDED} and job_id not in over:
                    charged[AttemptId(job_id, gang.attempt, position)] = S.WORKER_FAILED
                    self.account.preemptions[job_id, position] += 1
                    if self.account.lost_for_good(job, position):
                        over.add(job_id)

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

    def book_ends(
        self,
        event: Event,
        before: Mapping[str, JobView],
        after: Mapping[str, JobView],
        charged: Mapping[AttemptId, TaskState],
    ) -> None:
        """Pauses, who returns, and when attempts have begun."""
        account, now = self.account, self.account.now
        for (job_id, _, position), end in charged.items():
            job, was = self.state.jobs[job_id], before[job_id].gangs[position]
            gang = after[job_id].gangs[position]
            by_report = isinstance(event, TaskStateChangedEvent)
            if by_report or set(was.states) != {S.ASSIGNED}:
                quick = account.quick[job_id, position] = account.ends_quickly(job_id, position)
                if gang.states[0] is S.PENDING:
                    assert gang.not_before == now + (PAUSES[quick] if quick < len(PAUSES) else 10.0)
                    if job.spec.spare_for is None:
                        account.returning[job_id] = gang.not_before + 30.0
            if end is S.WORKER_FAILED and gang.states[0] is S.PENDING:
                account.wanted[job_id] = max(account.wanted.get(job_id, 0), len(was.groups))
        match event:
            case GangMovedEvent(attempt) if attempt.job_id in before:
                job_id, number, position = attempt
                was = before[job_id].gangs[position]
                if was.live and was.attempt == number and not before[job_id].state.finished:
                    assert set(after[job_id].gangs[position].states) == {S.PENDING}
                    account.returning[job_id] = now + 30.0
                    account.quick[job_id, position] = 0
            case GangAssignedEvent(job_id):
                account.began.pop((job_id, 0), None)
            case TaskAssignedEvent(job_id, index):
                account.began.pop((job_id, index), None)
            case TaskStateChangedEvent(attempt, _, S.RUNNING | S.SUCCEEDED) if attempt.job_id in before:
                job_id, _, position = attempt
                if position < len(before[job_id].gangs) and before[job_id] != after[job_id]:
                    account.began.setdefault((job_id, position), now)
                    gang = after[job_id].gangs[position]
                    if set(gang.states) == {S.RUNNING} and len(gang.groups) >= account.wanted.get(job_id, 0):
                        account.wanted[job_id] = 0

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
                if account.notices.get(node_id, ("", 0.0))[0] is NoticeKind.MAINTENANCE:
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
        told = [(told.attempt, told.notice.kind, told.notice.deadline) for told in instructions.notices]
        assert told == expected
        to_grow = self.jobs_with_room_to_grow()
        for attempt in [a for a, (kind, _) in account.told.items() if kind is NoticeKind.GROWTH]:
            if attempt.job_id not in to_grow:  # called off
                del account.told[attempt]
        for job in self.state.jobs.values():
            for gang in job.gangs:
                known = gang.notice and (gang.notice.kind, gang.notice.deadline)
                assert known == account.told.get(job.current_attempt(gang))

    def jobs_with_room_to_grow(self) -> set[str]:
        """Those for which more slices are there, with their processes started."""
        rooms = (job for job in self.state.jobs.values() if job.spec.spare_for is not None)
        growth = (job for job in rooms if job.spec.spare_for.purpose is SparePurpose.GROWTH)
        return {job.spec.spare_for.job_id for job in growth if set(view(job.gangs[0]).states) == {S.RUNNING}}

    def attempts_on(self, node_id: str) -> list[AttemptId]:
        held = self.account.held.items()
        return [attempt for attempt, hosts in held if node_id in hosts.values() and self.is_live(attempt)]

    def kind_of(self, event: Event) -> NoticeKind:
        return event.kind if isinstance(event, WorkerDrainedEvent) else NoticeKind.PREEMPTION

    def spares(self) -> dict[str, tuple[str, Need, bool]]:
        """Id of each spare → whose it is, what it is good for, whether it is on a host that is to go."""
        found = {}
        for job_id, job in self.state.jobs.items():
            if job.spec.spare_for is not None:
                need = job.spec.spare_for.purpose, job.spec.coscheduling.counts
                found[job_id] = job.spec.spare_for.job_id, need, bool(self.doomed(job))
        return found

    def doomed(self, job: Job) -> set[str]:
        """Groups that the job's gang runs on and that are to go."""
        hosts = self.account.held.get(job.current_attempt(job.gangs[0]), {}).values()
        groups = {self.places[node_id][0] for node_id in hosts if node_id in self.account.notices}
        return groups if groups and view(job.gangs[0]).live and not job.state.finished else set()

    def spares_with_slices(self, job: Job) -> int:
        """How many spares, replacements and room to grow aside, could take over now."""
        others = (other for other in self.state.jobs.values() if other.spec.spare_for is not None)
        ours = (other for other in others if other.spec.spare_for.job_id == job.spec.job_id)
        spares = (other for other in ours if other.spec.spare_for.purpose is SparePurpose.SPARE)
        return sum(view(spare.gangs[0]).live for spare in spares)

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
        more = tuple(count - have for count in config.counts if count > have)
        if more and not doomed and after is not None and set(gang.states) == {S.RUNNING}:
            lost_some = have < account.wanted.get(job.spec.job_id, 0)
            found[SparePurpose.GROWTH, more] = lost_some or account.now >= account.began[job.spec.job_id, 0] + after
        return +found

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
            assert have[job_id] == needed, job_id
            for need, count in needed.items():
                assert kept[job_id][need] >= min(count, sound[job_id][need]), f"{job_id} lost a spare"

    def check_gang(self, job: Job, position: int, was: GangView, now: GangView, ended_by: TaskState | None) -> None:
        """Only legal moves, the members together, and what the budgets say."""
        if len(was.states) != len(now.states):  # another count of groups: another set of tasks
            assert set(was.states) == {S.PENDING}
            was = was._replace(states=(S.PENDING,) * len(now.states))
        for old, new in zip(was.states, now.states, strict=True):
            unreported = old is S.ASSIGNED and new is S.SUCCEEDED  # RUNNING may be late or lost
            assert old is new or new in TRANSITIONS[old] or unreported
        assert (S.PENDING in now.states) == (set(now.states) == {S.PENDING}), "a gang is placed in part"
        assert not TERMINAL & set(now.states) or set(now.states) <= TERMINAL, "a gang is over in part"
        key = job.spec.job_id, position
        assert (now.failures, now.preemptions) == (self.account.failures[key], self.account.preemptions[key])
        assert now.attempt - was.attempt == (was.states[0] is S.PENDING and now.states[0] is S.ASSIGNED)
        assert now.failures + now.preemptions <= now.attempt
        assert S.PENDING not in now.states or set(now.node_ids) == {None}
        assert now.started >= was.started
        if ended_by is None:
            return
        for_good = self.account.failed_for_good if ended_by is S.FAILED else self.account.lost_for_good
        if for_good(job, position):
            assert Counter(now.states) == Counter({ended_by: 1, S.COSCHED_FAILED: len(now.states) - 1}) - Counter()
        elif not job.state.finished:
            assert set(now.states) == {S.PENDING}

    def book(self, event: Event, before: Mapping[str, JobView], instructions: Instructions) -> None:
        """Write down what the event says about who holds what."""
        reclaim = []
        match event:
            case GangAssignedEvent(job_id, names, groups):
                node_ids = [node_id for group in groups for node_id in group]
                self.take(job_id, 0, dict(enumerate(node_ids)))
                if self.state.jobs[job_id].spec.coscheduling.group_by == TPU_NAME:
                    reclaim = self.take_slices(names, self.state.jobs[job_id].spec.owner)
            case TaskAssignedEvent(job_id, index, node_id):
                self.take(job_id, index, {index: node_id})
                name, _ = self.places[node_id]
                spec = self.state.jobs[job_id].spec
                if TPU_NAME in self.state.workers[node_id].attributes and uses_chips(spec):
                    reclaim = self.take_slices((name,), spec.owner)
            case AttemptEndConfirmedEvent(attempt):
                self.account.held.pop(attempt, None)
            case WorkerFailedEvent(node_id):
                self.account.notices.pop(node_id, None)
                self.account.finals.pop(node_id, None)
                for hosts in self.account.held.values():
                    for task_id in [task_id for task_id, host in hosts.items() if host == node_id]:
                        del hosts[task_id]
            case SliceReleasedEvent(name, owner):
                self.released(name, owner)
            case PoolRestartedEvent(owner):  # nothing of it is left anywhere
                for attempt in list(self.account.held):
                    if self.state.jobs[attempt.job_id].spec.owner == owner:
                        assert not self.is_live(attempt)
                        del self.account.held[attempt]
                for name in list(self.account.holders):
                    self.released(name, owner)
                assert owner not in self.state.holders.values()
                assert not any(
                    set(gang.states) == {S.SUCCEEDED}
                    for job in self.state.jobs_of(owner)
                    for gang in map(view, job.gangs)
                ), "results that nobody has had are lost"
            case JobCancelledEvent(job_id) if job_id in before and not before[job_id].state.finished:
                if job_id in self.state.jobs and not self.state.jobs[job_id].spec.spare_for:
                    self.account.verdicts[job_id] = JobState.KILLED
            case TaskUnschedulableEvent(job_id, index) if job_id in before and not before[job_id].state.finished:
                gang = before[job_id].gangs[0 if self.state.jobs[job_id].spec.coscheduling else index]
                if gang.states[0] is S.PENDING and not gang.started:
                    self.account.verdicts[job_id] = JobState.UNSCHEDULABLE
            case WorkerBlamedEvent(node_id, job_id, _, by_user_code) if node_id in self.state.workers:
                self.blame(node_id, job_id, by_user_code)
            case TaintedEvent(target, name, _, until):
                self.account.taints[target, name] = until
            case TaintLiftedEvent(target, name):
                self.account.taints.pop((target, name), None)
                if name == "quarantined":
                    self.account.forgive(target)
            case TimePassedEvent():
                for taint, until in list(self.account.taints.items()):
                    if until is not None and until <= self.account.now:
                        del self.account.taints[taint]
        found = self.state.fleet.taints.items()
        assert {(t, name): taint.until for t, taints in found for name, taint in taints.items()} == self.account.taints
        assert instructions.reclaim == reclaim
        assert self.state.holders == self.account.holders

    def released(self, name: str, owner: str) -> None:
        """If the owner held the slice, whoever has been promised it holds it now."""
        if self.account.holders.get(name) != owner:
            return
        del self.account.holders[name]
        promised = {
            self.state.jobs[attempt.job_id].spec.owner
            for attempt, hosts in self.account.held.items()
            if self.is_live(attempt)
            and uses_chips(self.state.jobs[attempt.job_id].spec)
            and any(self.places[node_id][0] == name for node_id in hosts.values())
        }
        if promised:  # of several, any
            assert self.state.holders.get(name) in promised
            self.account.holders[name] = self.state.holders[name]

    def blame(self, node_id: str, job_id: str, by_user_code: bool) -> None:
        """The third failure within an hour that is not the user's own doing sets a host aside for an hour.

        For five minutes, if no user code had come to run in any of the three.
        """
        account, job = self.account, self.state.jobs.get(job_id)
        user = job.spec.user if job else job_id
        account.blames = [blame for blame in account.blames if blame.at >= account.now - 3600.0]
        account.blames.append(BlameView(account.now, node_id, user, by_user_code))
        if len(mine := self.not_the_users(node_id, account.blames)) > 2:
            until = account.now + (3600.0 if any(blame.by_user_code for blame in mine) else 300.0)
            account.taints[node_id, "quarantined"] = until
            account.forgive(node_id)
            account.set_aside[node_id] = until, mine
        by_us = {other: until for other, (until, why) in account.set_aside.items() if self.may_return(other, why)}
        for other, until in by_us.items():
            account.forgive(other)
            if account.taints.get((other, "quarantined")) == until:  # else it is an operator's
                del account.taints[other, "quarantined"]

    def may_return(self, node_id: str, blames: list[BlameView]) -> bool:
        return len(self.not_the_users(node_id, blames)) <= 2

    def not_the_users(self, node_id: str, blames: list[BlameView]) -> list[BlameView]:
        """Those against a host, but for crashes of users whose tasks crash on other hosts as well."""
        crashes = {(blame.user, blame.node_id) for blame in self.account.blames if blame.by_user_code}
        elsewhere = {user for user, host in crashes if host != node_id}
        return [b for b in blames if b.node_id == node_id and not (b.by_user_code and b.user in elsewhere)]

    def take(self, job_id: str, position: int, hosts: Mapping[int, str]) -> None:
        job = self.state.jobs[job_id]
        gang = job.gangs[position]
        attempt = job.current_attempt(gang)
        assert attempt not in self.account.held
        self.account.held[attempt] = {f"{job_id}/task-{i}": host for i, host in hosts.items()}
        assert [task.state for task in gang.tasks] == [S.ASSIGNED] * len(hosts)
        assert {task.index: task.node_id for task in gang.tasks} == hosts

    def take_slices(self, names: tuple[str, ...], owner: str) -> list[ReclaimSlice]:
        holders = self.account.holders
        reclaim = [ReclaimSlice(name, holders[name]) for name in names if holders.get(name, owner) != owner]
        for name in names:
            holders.setdefault(name, owner)
        return reclaim

    def is_live(self, attempt: AttemptId) -> bool:
        job_id, number, position = attempt
        if job_id not in self.state.jobs:
            return False
        job = self.state.jobs[job_id]
        gang = view(job.gangs[position])
        return gang.attempt == number and gang.live and not job.state.finished

    # -- jobs --------------------------------------------------------------------------------------------------------

    @initialize(jobs=st.lists(JOBS, min_size=1, max_size=4), looks_often=st.booleans())
    def some_jobs_run_already(self, jobs: list[tuple[Any, Any]], looks_often: bool) -> None:
        self.history.clear()
        self.looks_often = looks_often  # else the indexes have to catch up with several steps at once
        for job in jobs:
            self.submit(job)
        self.schedule(0.0)

    def own_jobs(self) -> list[Job]:
        """Those that somebody submitted."""
        return [job for job in self.state.jobs.values() if job.spec.spare_for is None]

    @precondition(lambda self: len(self.own_jobs()) < 10)
    @rule(job=JOBS)
    def submit(self, job: tuple[Any, Any]) -> None:
        spec = make_spec(f"job-{len(self.own_jobs()) + 1}", *job)
        for earlier in (0.0, 7.0):  # submitting twice changes nothing
            self.apply(JobSubmittedEvent(spec, self.world.now - earlier))
        submitted = self.state.jobs[spec.job_id]
        assert (submitted.state, submitted.submitted_at) == (JobState.PENDING, self.world.now)

    @rule(seconds=SECONDS, when=st.sampled_from(["now", "now", "now", "twice", "later"]))
    def schedule(self, seconds: float, when: str = "now") -> None:
        """Let time pass, make a plan, and do what it says: at once, twice, or when other things have happened."""
        self.world.now += seconds
        self.apply(TimePassedEvent(self.world.now))
        plan = self.world.plan()
        self.check_plan(plan)
        assert self.world.plan() == plan, "the same snapshot gives the same plan"
        self.check_plan_after_the_latest(plan)
        decided: list[Event] = [*plan.assignments, *plan.timed_out, *plan.unschedulable]
        if when == "later":
            self.unsent += decided
            return
        spares_changed = False
        for event in decided:
            queue_version = self.state.queue_version
            assert self.apply(event) is not None, "what was just planned fits"
            spares_changed |= isinstance(event, AssignedEvent) and self.state.queue_version != queue_version
            if when == "twice":
                is_assigned = isinstance(event, AssignedEvent)
                assert (self.apply(event) is None) == is_assigned, "nothing is assigned twice"
        if not spares_changed:  # else there is more to place, or the slices of some are free
            self.latest = self.state.fleet.version, self.world.now, plan.waiting

    @precondition(lambda self: len(self.own_jobs()) < 10)
    @rule(job=JOBS)
    def one_more_comes_when_nothing_else_has_changed(self, job: tuple[Any, Any]) -> None:
        self.schedule(0.0)
        self.submit(job)
        self.schedule(0.0)

    @rule(rounds=st.lists(ROUND, min_size=1, max_size=3))
    def some_rounds(self, rounds: list[tuple[float, list[TaskState], int, bool]]) -> None:
        """What can start does; some of what runs comes to an end, which is confirmed or not."""
        for seconds, ends, index, confirmed in rounds:
            self.schedule(seconds)
            for (job, gang), end in zip(list(self.live()), ends, strict=False):
                self.report_all(job, gang, S.RUNNING)
                if end is S.SUCCEEDED:
                    self.report_all(job, gang, S.SUCCEEDED)
                else:
                    task = gang.tasks[index % len(gang.tasks)]
                    self.apply(TaskStateChangedEvent(job.current_attempt(gang), task.index, end, "boom"))
            if confirmed:
                self.confirm_all_that_is_over()

    @precondition(lambda self: self.unsent)
    @rule(pick=PICK)
    def what_was_decided_arrives_late(self, pick: int) -> None:
        self.apply(self.unsent.pop(pick % len(self.unsent)))

    @precondition(lambda self: any(self.live()))
    @rule(pick=PICK, index=INDEX, state=REPORTS, by_all=st.booleans())
    def report(self, pick: int, index: int, state: TaskState, by_all: bool) -> None:
        job, gang = self.live_gang(pick)
        task = gang.tasks[index % len(gang.tasks)]
        for _ in range(2):
            if by_all:
                self.report_all(job, gang, state)
            else:
                self.apply(TaskStateChangedEvent(job.current_attempt(gang), task.index, state, "boom"))

    def report_all(self, job: Job, gang: Gang, state: TaskState) -> None:
        attempt = job.current_attempt(gang)
        for index in [task.index for task in gang.tasks]:
            self.apply(TaskStateChangedEvent(attempt, index, state, "boom"))

    @precondition(lambda self: any(self.live()))
    @rule(pick=PICK)
    def dispatch_fails(self, pick: int) -> None:
        job, gang = self.live_gang(pick)
        attempt = job.current_attempt(gang)
        for _ in range(2):
            self.apply(TaskDispatchFailedEvent(attempt, "no answer", self.world.now))
        assert gang.not_before > self.world.now

    @rule(
        shape=st.sampled_from(GANGS),
        terms=TERMS,
        spares=st.integers(0, 2),
        grows=st.booleans(),
        life=st.lists(st.tuples(LIFE, PICK), min_size=2, max_size=8),
    )
    def life_of_a_gang(self, shape: Any, terms: Any, spares: int, grows: bool, life: list[tuple[str, int]]) -> None:
        """All others end, so that there is room for a gang, its spares, replacements and growth.

        One that grows begins on fewer slices than there are a moment later.
        """
        for job in self.own_jobs():
            self.apply(JobCancelledEvent(job.spec.job_id, "enough"))
        self.confirm_all_that_is_over()
        self.repair()
        room = {"constraints": (), "spares": spares, "max_retries_preemption": 30, "scheduling_timeout": None}
        if grows:
            room |= {"spares": 0, "grow_after": 0.0}
            self.trouble(self.members("c")[0].node_id, 0, "lost")
            life = [("repair", 0), ("run", 0), *life]
        spec = make_spec(f"job-{len(self.own_jobs()) + 1}", shape, {**terms, **room})
        self.apply(JobSubmittedEvent(spec, self.world.now))
        job = self.state.jobs[spec.job_id]
        for step, pick in [("run", 0), *life]:
            if job.state.finished:
                return
            if step == "restart":
                self.a_successor_takes_over()
                job = self.state.jobs[spec.job_id]
            else:
                self.live_on(job, step, pick)
            self.state_is_whole()
            self.every_host_has_the_tasks_that_it_should_have()

    def live_on(self, job: Job, step: str, pick: int) -> None:
        hosts = [host for held in self.account.held.values() for host in held.values()]
        if step.endswith("room"):
            hosts = [host for a, held in self.account.held.items() if "/growth-" in a.job_id for host in held.values()]
        match step:
            case "drain" | "drain room" if hosts:
                self.trouble(hosts[pick % len(hosts)], pick, "drain")
            case "call off" if hosts:
                self.trouble(hosts[pick % len(hosts)], pick, "call off")
            case "lose" | "lose room" if hosts:
                self.trouble(hosts[pick % len(hosts)], pick, "lost")
            case "move" if job.gang.placed:
                self.apply(GangMovedEvent(job.current_attempt(job.gang), "to more slices"))
            case "end quickly":
                for _ in range(7):
                    if job.gang.placed:
                        attempt = job.current_attempt(job.gang)
                        self.apply(TaskStateChangedEvent(attempt, pick % 2, S.WORKER_FAILED, "boom"))
                        self.run_all(10.0)
            case "repair":
                self.repair()
            case "pool dies":
                self.pool_dies(job.spec.owner)
        self.run_all((0.0, 1.0, 20.0)[pick % 3])

    def run_all(self, seconds: float) -> None:
        """What is over is gone, and what can run does."""
        self.confirm_all_that_is_over()
        self.schedule(seconds)
        for job, gang in list(self.live()):
            self.report_all(job, gang, S.RUNNING)

    @precondition(lambda self: any(self.live()))
    @rule(pick=PICK)
    def moves(self, pick: int) -> None:
        job, gang = self.live_gang(pick)
        attempt, charged = job.current_attempt(gang), (job.failures, job.preemptions)
        for _ in range(2):
            self.apply(GangMovedEvent(attempt, "to more slices"))
        assert gang.pending
        assert (job.failures, job.preemptions) == charged

    @rule(owner=st.sampled_from(OWNERS))
    def pool_dies(self, owner: str) -> None:
        """Its successor says so twice."""
        self.apply(PoolRestartedEvent(owner))
        before = view_all(self.state)
        assert self.apply(PoolRestartedEvent(owner)) == Instructions()
        assert view_all(self.state) == before
        assert not [attempt for attempt in self.account.held if self.state.jobs[attempt.job_id].spec.owner == owner]

    @rule(
        pick=PICK,
        index=st.integers(-1, 7),
        ahead=st.integers(-2, 1),
        state=st.sampled_from(list(TaskState)),
    )
    def report_of_anything(self, pick: int, index: int, ahead: int, state: TaskState) -> None:
        """Tasks and attempts that there are not, or not any more, and states that are not a task's to report."""
        job = self.job(pick)
        position = 0 if job.spec.coscheduling else index
        number = job.gangs[position if position in range(len(job.gangs)) else 0].attempt + ahead
        attempt = AttemptId(job.spec.job_id, number, position)
        about_now = not job.state.finished and not ahead and index in range(len(job.tasks))
        before = view_all(self.state)
        for _ in range(2):
            self.apply(TaskStateChangedEvent(attempt, index, state, "boom"))
            if not about_now:
                self.apply(TaskDispatchFailedEvent(attempt._replace(gang=index), "late", self.world.now))
        assert about_now or view_all(self.state) == before

    @rule(pick=PICK, index=st.integers(-1, 7), cancelled=st.booleans())
    def end_early(self, pick: int, index: int, cancelled: bool) -> None:
        """Cancel a job, or give it up: late, twice, though it runs or is over. Only what never ran is given up."""
        job_id = self.job(pick).spec.job_id
        for _ in range(2):
            self.apply(JobCancelledEvent(job_id, "x") if cancelled else TaskUnschedulableEvent(job_id, index, "x"))
        job = self.state.jobs[job_id]
        assert job.state.finished == (job.spec.spare_for is None) or not cancelled

    @precondition(lambda self: self.account.held)
    @rule(pick=PICK, all_that_is_over=st.booleans())
    def confirm(self, pick: int, all_that_is_over: bool) -> None:
        if all_that_is_over:
            self.confirm_all_that_is_over()
            return
        attempt = list(self.account.held)[pick % len(self.account.held)]
        live = self.is_live(attempt)
        for _ in range(2):
            assert (self.apply(AttemptEndConfirmedEvent(attempt)) is None) == live

    def confirm_all_that_is_over(self) -> None:
        for attempt in [attempt for attempt in self.account.held if not self.is_live(attempt)]:
            self.apply(AttemptEndConfirmedEvent(attempt))

    @rule(pick=st.integers(0, 200), count=st.integers(1, 3))
    def the_past_comes_again(self, pick: int, count: int) -> None:
        """Events that were delivered before are delivered again."""
        for event in deepcopy(self.history[pick % len(self.history) :][:count]):
            if not isinstance(event, WorkerRegisteredEvent) or self.may_register(event):
                self.apply(event)

    # -- workers -----------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.state.workers)
    @rule(troubles=st.lists(st.tuples(PICK, TROUBLE), min_size=1, max_size=3))
    def some_trouble(self, troubles: list[tuple[int, str]]) -> None:
        for pick, trouble in troubles:
            if self.state.workers:
                self.trouble(self.worker(pick), pick, trouble)

    def trouble(self, node_id: str, pick: int, trouble: str) -> None:
        match trouble:
            case "lost":
                for _ in range(2):
                    self.apply(WorkerFailedEvent(node_id, "the host died"))
            case "drain":
                kind = list(NoticeKind)[pick % 2]
                deadline = (None, self.world.now + 10.0, self.world.now + 3600.0)[pick % 3]
                for _ in range(2):
                    self.apply(WorkerDrainedEvent(node_id, "notice", kind, deadline))
            case "call off":
                known = self.account.notices.items()
                announced = [host for host, (kind, _) in known if kind is NoticeKind.MAINTENANCE] or [node_id]
                for _ in range(2):
                    self.apply(MaintenanceCalledOffEvent(announced[pick % len(announced)]))
            case "drain by itself":  # Ray's node table says so
                deadline = (None, self.world.now + 20.0)[pick % 2]
                event = replace(self.registration(node_id), draining="Ray drains it", deadline=deadline)
                if self.may_register(event):
                    self.apply(event)
                    assert self.state.knows(event)
            case "blamed":
                for _ in range(1 + pick % 3):
                    self.apply(WorkerBlamedEvent(node_id, f"job-{pick % 2}", "boom", by_user_code=pick % 4 > 0))
            case "tainted":
                target = (node_id, self.places[node_id][0])[pick % 2]
                name, until = ("bad", "quarantined")[pick % 3 > 1], (None, self.world.now + 5.0)[pick % 4 > 0]
                self.apply(TaintedEvent(target, name, "an operator says so", until))
                if pick > 11:
                    self.apply(TaintLiftedEvent(target, name))
            case "silent":
                self.apply(WorkerSuspectedEvent(node_id, "no answer", self.world.now))
            case "foreign":
                self.apply(replace(self.registration(node_id), foreign="a stranger"))
            case "early":  # it is replaced before its death is known: then two have the same number
                self.join(self.places[node_id])
            case "odd":
                self.change(node_id, ODDITIES[pick % len(ODDITIES)])
            case "all odd":
                for member in self.members(self.places[node_id][0]):
                    self.change(member.node_id, ODDITIES[pick % len(ODDITIES)])

    def change(self, node_id: str, oddity: Mapping[str, Scalar | None]) -> None:
        """Another registration of the same host."""
        event = self.registration(node_id, oddity)
        if self.may_register(event):
            for _ in range(2):
                self.apply(event)
                assert self.state.knows(event)

    @rule()
    def repair(self) -> None:
        """Every place gets one sound host, and whoever was set aside comes back."""
        for target, name in list(self.account.taints):
            self.apply(TaintLiftedEvent(target, name))
        for place in PLACES:
            there = [worker for i, worker in self.state.workers.items() if self.places[i] == place]
            there.sort(key=lambda worker: worker.draining is not None)
            for superfluous in [worker for worker in there if worker.draining or worker is not there[0]]:
                self.apply(WorkerFailedEvent(superfluous.node_id, "the host died"))
            if not there or there[0].draining:
                self.join(place)
            elif not self.state.knows(event := self.registration(there[0].node_id)):
                self.apply(event)

    @rule()
    def a_successor_takes_over(self) -> None:
        """What comes back from the records is what was there; attempts that are over are stopped once more."""
        self.apply(TimePassedEvent(self.world.now))  # taints whose time is over are not left behind
        old, new = self.state, ControllerState()
        self.latest = 0, 0.0, {}  # its fleet counts its changes anew
        new.handle_event(TimePassedEvent(self.account.now))
        for target, taints in old.fleet.taints.items():
            for name, taint in taints.items():
                new.handle_event(TaintedEvent(target, name, taint.reason, taint.until))
        for worker in old.workers.values():
            facts = worker.node_id, worker.address, worker.reported, dict(worker.resources)
            new.handle_event(WorkerRegisteredEvent(*facts, foreign=worker.foreign))
            if worker.notice is not None:
                words = worker.draining, worker.notice.kind, worker.notice.deadline
                new.handle_event(WorkerDrainedEvent(worker.node_id, *words))
            if worker.final is not None:
                words = worker.final[0], worker.final[1].kind, worker.final[1].deadline
                new.handle_event(WorkerDrainedEvent(worker.node_id, *words))
            if worker.suspected:
                since = worker.suspected_until - SUSPICION_S
                new.handle_event(WorkerSuspectedEvent(worker.node_id, worker.suspected, since))
        for name, owner in old.holders.items():
            new.handle_event(SliceHeldEvent(name, owner))
        stopped, told = set(), {}
        for job_id in old.jobs:
            record = old.record(job_id)
            assert record is not None
            instructions = new.handle_event(JobRestoredEvent(JobRecord.from_bytes(record.to_bytes())))
            assert instructions.finished == instructions.dropped == []
            told |= {n.attempt: (n.notice.kind, n.notice.deadline) for n in instructions.notices}
            stopped |= {stop.attempt for stop in instructions.stop}
        assert stopped == {attempt for attempt in self.account.held if not self.is_live(attempt)}
        assert told == self.account.told, "they may not have heard of it"
        assert view_all(new) == view_all(old)
        new.handle_event(TimePassedEvent(self.account.now))
        assert view_all(new) == view_all(old)
        self.account.blames.clear()
        self.account.set_aside.clear()
        self.world.state = new

    @rule(name=st.sampled_from(["a", "b", "c", "Large"]), owner=st.sampled_from(OWNERS))
    def release(self, name: str, owner: str) -> None:
        self.apply(SliceReleasedEvent(name, owner))

    def join(self, place: tuple[str, int]) -> None:
        """A new worker at a place."""
        self.joined += 1
        node_id = f"{place[0]}-{place[1]}-{self.joined}"
        self.places[node_id] = place
        self.apply(self.registration(node_id))

    def registration(self, node_id: str, oddity: Mapping[str, Scalar | None] | None = None) -> WorkerRegisteredEvent:
        """That of a sound host in its place, but for an oddity."""
        name, number = self.places[node_id]
        if (name, number) in TPU_PLACES:
            event = host(name, number, TPU_PLACES[name, number], node_id=node_id)
        else:
            event = WorkerRegisteredEvent(node_id, "10.0.0.9", {}, {"CPU": 8.0})
        if (name, number) in RACK_PLACES:
            rack = {"rack": AttributeValue(name)}
            event = replace(event, attributes=rack, resources={"TPU": 4.0, "CPU": 8.0})
        attributes = {key: value.value for key, value in event.attributes.items()} | SOUND | (oddity or {})
        kept = {key: AttributeValue(value) for key, value in attributes.items() if value is not None}
        without_chips = "TPU" in (oddity or {})
        return replace(event, attributes=kept, resources={"CPU": 8.0} if without_chips else event.resources)

    def may_register(self, event: WorkerRegisteredEvent) -> bool:
        """What tasks use of a host does not vanish under them."""
        known = self.state.workers.get(event.node_id)
        return known is None or not known.occupants or known.resources == event.resources

    # -- picking -----------------------------------------------------------------------------------------------------

    def job(self, pick: int) -> Job:
        return list(self.state.jobs.values())[pick % len(self.state.jobs)]

    def worker(self, pick: int) -> str:
        return list(self.state.workers)[pick % len(self.state.workers)]

    def live(self) -> Iterator[tuple[Job, Gang]]:
        for job in self.state.jobs.values():
            if not job.state.finished:
                yield from ((job, gang) for gang in job.gangs if view(gang).live)

    def live_gang(self, pick: int) -> tuple[Job, Gang]:
        gangs = list(self.live())
        return gangs[pick % len(gangs)]

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
        self.check_reasons(plan, placed)
        self.check_kept(plan, takers)

    def check_plan_after_the_latest(self, plan: SchedulingResult) -> None:
        """If nothing has changed in the fleet, it makes no difference whether those that waited are looked at again."""
        version, then, waiting = self.latest
        if version != self.state.fleet.version or self.world.now > then + 0.5:
            return
        short = self.world.plan(waiting)
        assert short.assignments == plan.assignments
        if self.world.now == then:
            self.check_plan(short)
            assert short.starving == plan.starving
            assert (short.timed_out, short.unschedulable) == (plan.timed_out, plan.unschedulable)
            assert short.waiting.keys() == plan.waiting.keys()

    def check_place(self, job: Job, assignment: AssignedEvent) -> tuple[int, list[str]]:
        """The hosts are what the job asks for, take new tasks, and are groups as they should be."""
        if isinstance(assignment, TaskAssignedEvent):
            assert job.spec.coscheduling is None
            position, groups, group_by = assignment.task_index, {"": (assignment.node_id,)}, None
        else:
            assert job.spec.coscheduling is not None
            position, groups = 0, dict(zip(assignment.group_names, assignment.groups, strict=True))
            group_by = job.spec.coscheduling.group_by
            assert len(groups) == len(assignment.group_names)
            assert len(groups) in job.spec.coscheduling.counts
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
            assert len(suitable) < counts_of(job)[0], f"{suitable} would do"

    def members(self, name: str) -> list[Worker]:
        return [worker for node_id, worker in self.state.workers.items() if self.places[node_id][0] == name]

    def is_sound_slice(self, name: str) -> bool:
        members = self.members(name)
        size = members[0].attributes[TPU_VM_COUNT].value if members else 0
        return sorted(worker.host_index or 0 for worker in members) == list(range(size)) and all(
            takes_new(worker, self.world.now) and worker.attributes[TPU_VM_COUNT].value == size for worker in members
        )

    def check_reasons(self, plan: SchedulingResult, placed: Mapping[str, set[int]]) -> None:
        for event in plan.timed_out:
            job = self.state.jobs[event.job_id]
            assert self.world.now - job.submitted_at > job.spec.scheduling_timeout
        for event in plan.unschedulable:
            assert any(c.key == "zone" or c.key == "generation" for c in self.state.jobs[event.job_id].spec.constraints)
        given_up = [event.job_id for event in (*plan.timed_out, *plan.unschedulable)]
        assert len(given_up) == len(set(given_up))
        assert not set(given_up) & (placed.keys() | plan.waiting.keys())
        for event in (*plan.timed_out, *plan.unschedulable):
            gang = self.state.jobs[event.job_id].gang_of(event.task_index)
            assert (gang.pending, gang.started) == (True, False)
        for job_id, job in self.state.jobs.items():
            left = set(job.pending) - placed.get(job_id, set())
            assert (job_id in plan.waiting or job_id in given_up) == bool(left), f"{job_id}: a reason if it waits"
            if not job.state.finished:
                assert left or placed.get(job_id) or job.state is JobState.RUNNING
        for waiting in plan.waiting.values():
            assert str(waiting)

    def check_kept(self, plan: SchedulingResult, takers: Mapping[str, list[Job]]) -> None:
        """Jobs that have waited too long have groups kept, which go to nobody who comes after them."""
        kept: dict[str, list[Worker]] = {}
        for job_id, waiting in plan.waiting.items():
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
                    assert not self.comes_after(other, job), f"{other.spec.job_id} takes what is kept for {job_id}"
            returns = self.returns(job)
            assert not workers or returns or job_id in plan.starving
            assert not (returns and job_id in plan.starving)
        for job_id, waiting in plan.waiting.items():
            job = self.state.jobs[job_id]
            long = any(self.waits_long(gang) for gang in job.gangs) or self.returns(job)
            assert long or (job_id not in plan.starving and not waiting.kept)
            long = all(self.waits_long(gang) for gang in job.gangs if gang.pending) or self.returns(job)
            if long and waiting.reason is PendingKind.IN_USE and not kept[job_id]:
                others = [worker for i in kept for worker in kept[i] if i != job_id]
                names = {self.places[worker.node_id][0] for worker in others}
                rivals = [worker for name in names for worker in self.members(name) if suits(job, worker)]
                assert rivals, f"nothing is kept for {job_id}, nor for anybody who competes with it"

    def comes_after(self, other: Job, job: Job) -> bool:
        """Whether another job is surely looked at later."""
        if self.returns(job) or self.returns(other):
            return not self.returns(other)
        band, other_band = job.spec.priority, other.spec.priority
        urgent = other.spec.coscheduling is not None and self.waits_long(other.gang)
        same_queue = band == other_band and job.spec.user == other.spec.user
        return other_band > band or (same_queue and other.number > job.number and not urgent)

    def returns(self, job: Job) -> bool:
        """Whether its gang ran a moment ago, or holds slices ready in place of others that are about to go."""
        spare_for = job.spec.spare_for
        if spare_for is not None:
            return spare_for.purpose is SparePurpose.REPLACEMENT
        coscheduled = job.spec.coscheduling is not None
        return coscheduled and self.world.now < self.account.returning.get(job.spec.job_id, 0.0)

    def waits_long(self, gang: Gang) -> bool:
        return gang.pending and self.world.now - gang.waiting_since > BACKFILL_BOUND_S

    # -- after every step --------------------------------------------------------------------------------------------

    @invariant()
    def state_is_whole(self) -> None:
        self.state.check()

    @precondition(lambda self: self.looks_often)
    @invariant()
    def indexes_are_up_to_date_and_every_job_runs_or_has_a_reason(self) -> None:
        self.check_plan(self.world.plan())
        self.world.scheduler.check(self.world.now)

    @invariant()
    def every_host_has_the_tasks_that_it_should_have(self) -> None:
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

    @invariant()
    def holds_are_as_the_events_say(self) -> None:
        told = [attempt for owner in OWNERS for attempt in self.state.attempts_of(owner)]
        assert sorted(told) == sorted(self.account.held)
        assert all(map(self.state.holds_capacity, told))

    @invariant()
    def jobs_are_counted_right(self) -> None:
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

    def in_use(self, worker: Worker) -> Counter[str]:
        used: Counter[str] = Counter()
        for attempt, hosts in self.account.held.items():
            for node_id in hosts.values():
                if node_id == worker.node_id:
                    used += demand_of(self.state.jobs[attempt.job_id], worker)
        return used

    def uses_of_chips(self, worker: Worker) -> int:
        return sum(
            list(hosts.values()).count(worker.node_id)
            for attempt, hosts in self.account.held.items()
            if uses_chips(self.state.jobs[attempt.job_id].spec)
        )

    # -- the end -----------------------------------------------------------------------------------------------------

    def teardown(self) -> None:
        """Once hosts are there and nothing else goes wrong, every job ends."""
        self.repair()
        patience = 2 + sum(len(job.gangs) for job in self.state.jobs.values())
        while patience and not all(job.state.finished for job in self.state.jobs.values()):
            patience -= 1
            for job, gang in list(self.live()):
                self.report_all(job, gang, S.SUCCEEDED)
            self.confirm_all_that_is_over()
            self.schedule(1000.0)
            self.every_host_has_the_tasks_that_it_should_have()
            self.state_is_whole()
        waiting = {job_id: str(why) for job_id, why in self.world.plan().waiting.items()}
        assert all(job.state.finished for job in self.state.jobs.values()), waiting
        self.state_is_whole()


class TestRandomEvents(RandomEvents.TestCase):
    """Some dozens of sequences."""

    settings = settings(
        max_examples=80 * EXAMPLES,
        stateful_step_count=25,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
    )


@pytest.mark.thorough
@pytest.mark.timeout(900 * EXAMPLES)
class TestRandomEventsThoroughly(RandomEvents.TestCase):
    """Thousands of sequences."""

    settings = settings(TestRandomEvents.settings, max_examples=1670 * EXAMPLES)
