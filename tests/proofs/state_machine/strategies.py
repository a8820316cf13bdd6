"""What is drawn: places of hosts, shapes and terms of jobs, what happens to gangs and hosts, how much time passes."""

from collections.abc import Mapping
from typing import Any

from hypothesis import strategies as st

from iris_ray.model.constraints import Constraint, ConstraintOp, Scalar
from iris_ray.model.job_spec import CoschedulingConfig, JobSpec
from iris_ray.model.lifecycle import TaskState
from iris_ray.model.limits import Limits
from iris_ray.model.options import PriorityBand
from iris_ray.model.workers import TPU_TOPOLOGY, TPU_VM_COUNT, TPU_WORKER_ID
from iris_ray.scheduler.scheduler import BACKFILL_BOUND_S
from tests.support.worlds import gang_spec

S = TaskState
OP = ConstraintOp

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
LIMITS = st.sampled_from(
    [
        Limits(chips=4),
        Limits(chips=8),
        Limits(chips=20),
        Limits(running_jobs=1),
        Limits(chips=8, running_jobs=2),
        Limits(),
    ]
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
        "moved",
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
