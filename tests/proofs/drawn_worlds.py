"""Worlds that Hypothesis draws: hosts with flaws, jobs of all kinds, and what happens to both between two plans."""

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from hypothesis import strategies as st

from iris_ray.errors import IllegalTransitionError
from iris_ray.model.constraints import AttributeValue, Constraint, ConstraintOp
from iris_ray.model.job_spec import CoschedulingConfig, JobSpec
from iris_ray.model.lifecycle import AttemptId, TaskState
from iris_ray.model.limits import EVERYBODY, Limits
from iris_ray.model.options import EACH_SLICE, PriorityBand
from iris_ray.model.outcomes import Fault
from iris_ray.model.workers import TPU, TPU_NAME, TPU_TOPOLOGY, TPU_VM_COUNT, TPU_WORKER_ID
from iris_ray.scheduler import Scheduler
from iris_ray.scheduler.scheduler import BACKFILL_BOUND_S
from iris_ray.state.events import (
    AttemptEndConfirmedEvent,
    AttemptSavesEvent,
    GangMovedEvent,
    JobCancelledEvent,
    JobSubmittedEvent,
    JobYieldsEvent,
    LimitsSetEvent,
    SliceReleasedEvent,
    TaskDispatchFailedEvent,
    TaskStateChangedEvent,
    WorkerBlamedEvent,
    WorkerDrainedEvent,
    WorkerRegisteredEvent,
    WorkerSuspectedEvent,
)
from tests.support.worlds import World, host

S = TaskState
Op = ConstraintOp
LONG = BACKFILL_BOUND_S + 100
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
    Constraint("pool", Op.LE, 1),
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
    kind=st.sampled_from(["gang", "gang", "gang", "whole", "slices", "slices", "rack", "rack", "tasks", "tasks"]),
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
        "max_runtime": st.sampled_from([None, None, None, None, 20.0, 60.0, 400.0, 2000.0]),
        "spares": st.sampled_from([0, 0, 0, 1, 2]),
        "grow_after": st.sampled_from([None, 0.0, 30.0, "auto"]),
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
            *("yield", "yield"),
            *("save", "ask"),
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
        self.scheduler = Scheduler(evictions=None)  # the referee knows none; they have proofs of their own
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
        if what == "yield" and self.state.jobs:
            whose = list(self.state.jobs.values())[pick % len(self.state.jobs)]
            if whose.spec.spare_for is None:  # only the process that submitted a job can say so
                self.do(JobYieldsEvent(whose.spec.job_id, not whose.yields))
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
                self.do(TaskStateChangedEvent(it, tasks[0].index, S.FAILED, "boom"))
            case "move":
                self.do(GangMovedEvent(it, "to more slices"))
            case "save" | "ask":
                saved_at = self.now - pick if what == "save" else 0.0
                self.do(AttemptSavesEvent(it, saved_at, (math.inf, 20.0, 60.0)[pick % 3], what == "ask"))
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
    whole = shape.kind == "whole" or (shape.kind == "slices" and typed)
    if typed and gang:
        constraints = (Constraint(TPU_TOPOLOGY, Op.EQ, shape.device), *constraints)
    counts = shape.counts
    if shape.kind == "slices":  # each is a gang by itself
        counts, changes["failure_domain"] = shape.counts[-1:], EACH_SLICE
    if not gang or shape.kind == "slices":
        changes["spares"] = 0
    return JobSpec(
        job_id=job_id,
        device=shape.device if gang else None,
        replicas=SIZES[shape.device],
        coscheduling=CoschedulingConfig("rack" if shape.kind == "rack" else TPU_NAME, counts) if gang else None,
        whole_groups=whole,
        constraints=constraints,
        resources={TPU: shape.chips, "CPU": shape.cpus},
        max_retries_failure=3,
        **changes,
    )
