"""Fleets of slices, and the jobs that wait for them."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations

from iris_ray.model.constraints import AttributeValue, Constraint, ConstraintOp, Scalar
from iris_ray.model.job_spec import CoschedulingConfig, JobSpec
from iris_ray.model.lifecycle import AttemptId, TaskState
from iris_ray.model.workers import TPU_NAME, TPU_TOPOLOGY, TPU_VM_COUNT, TPU_WORKER_ID
from iris_ray.state import ControllerState
from iris_ray.state.events import (
    AttemptEndConfirmedEvent,
    GangAssignedEvent,
    JobCancelledEvent,
    JobSubmittedEvent,
    TasksAssignedEvent,
    TaskStateChangedEvent,
    WorkerRegisteredEvent,
)

TPU_TYPE, SLICE = "v4-128", 16
HOST = {"TPU": 4.0, "CPU": 120.0}
SHARED: dict[str, Scalar] = {
    TPU_TOPOLOGY: TPU_TYPE,
    TPU_VM_COUNT: SLICE,
    "region": "us",
    "zone": "us-a",
    "pool": "large",
    "generation": 4,
}
"""Attributes that all hosts share. With a host's slice, its number there and its address there are nine."""

Constraints = tuple[Constraint, ...]


def kinds() -> Iterator[Constraints]:
    """All pairs of shared attributes, as two EQ constraints that every host satisfies."""
    for pair in combinations(SHARED, 2):
        yield tuple(Constraint(key, ConstraintOp.EQ, AttributeValue(SHARED[key])) for key in pair)


USUAL = next(kinds())


def host(number: int) -> WorkerRegisteredEvent:
    place: dict[str, Scalar] = {
        TPU_NAME: f"slice-{number // SLICE}",
        TPU_WORKER_ID: number % SLICE,
        "address": f"host-{number}",
    }
    attributes = {key: AttributeValue(value) for key, value in {**place, **SHARED}.items()}
    return WorkerRegisteredEvent(f"w{number}", "10.0.0.1", attributes, dict(HOST))


def bare(hosts: int) -> ControllerState:
    state = ControllerState()
    for number in range(hosts):
        state.handle_event(host(number))
    return state


def full(hosts: int) -> ControllerState:
    """A gang on every slice."""
    state = bare(hosts)
    for number in range(hosts // SLICE):
        start_gang(state, f"full-{number}", number)
    return state


def one_busy(hosts: int) -> ControllerState:
    """A task that uses chips on one host of every slice."""
    state = bare(hosts)
    for number in range(hosts // SLICE):
        job = JobSpec(job_id=f"busy-{number}", owner="busy", resources={"TPU": 4.0})
        state.handle_event(JobSubmittedEvent(job, 0.0))
        state.handle_event(TasksAssignedEvent(job.job_id, (0,), f"w{number * SLICE + 3}"))
    return state


def busy_hosts(hosts: int) -> ControllerState:
    """Hosts that differ in memory, with a task on each that leaves room for some CPUs: on hardly two for as many."""
    state = ControllerState()
    for number in range(hosts):
        event = host(number)
        state.handle_event(replace(event, resources={**event.resources, "memory": 4e11 + 4096.0 * number}))
        used = {"CPU": 100.0 + number * 7919 % 1899 / 100, "memory": 1e9 * (1 + number % 13)}
        state.handle_event(JobSubmittedEvent(JobSpec(job_id=f"busy-{number}", owner="busy", resources=used), 0.0))
        state.handle_event(TasksAssignedEvent(f"busy-{number}", (0,), f"w{number}"))
    return state


def gang(number: int, name: str, constraints: Constraints = USUAL) -> JobSpec:
    return JobSpec(
        job_id=name,
        owner=f"owner-{number}",
        user=f"user-{number % 7}",
        device=TPU_TYPE,
        replicas=SLICE,
        coscheduling=CoschedulingConfig(),
        constraints=constraints,
        resources={"TPU": 4.0, "CPU": 1.0},
    )


def gang_with_ge(number: int, name: str, constraints: Constraints = USUAL) -> JobSpec:
    return gang(number, name, (*constraints, Constraint("generation", ConstraintOp.GE, AttributeValue(3))))


def cpu_job(number: int, name: str, constraints: Constraints = USUAL) -> JobSpec:
    return JobSpec(
        job_id=name,
        owner=f"owner-{number}",
        user=f"user-{number % 7}",
        constraints=constraints,
        resources={"CPU": 1.0},
    )


def start_gang(state: ControllerState, name: str, slice_number: int) -> None:
    state.handle_event(JobSubmittedEvent(gang(0, name), 0.0))
    hosts = tuple(f"w{slice_number * SLICE + i}" for i in range(SLICE))
    state.handle_event(GangAssignedEvent(name, (f"slice-{slice_number}",), (hosts,)))


def submit(state: ControllerState, specs: list[JobSpec]) -> None:
    for spec in specs:
        state.handle_event(JobSubmittedEvent(spec, 0.0))


def withdraw(state: ControllerState, specs: list[JobSpec]) -> None:
    for spec in specs:
        state.handle_event(JobCancelledEvent(spec.job_id, "measured"))


def stir(state: ControllerState, number: int) -> None:
    """Sixteen tasks come and go on the hosts of one slice."""
    job = JobSpec(job_id=f"stir-{number}", owner="stir", replicas=SLICE, resources={"CPU": 1.0})
    first = number * 37 % (len(state.workers) // SLICE) * SLICE
    state.handle_event(JobSubmittedEvent(job, 0.0))
    for i in range(SLICE):
        state.handle_event(TasksAssignedEvent(job.job_id, (i,), f"w{first + i}"))
    for i in range(SLICE):
        state.handle_event(TaskStateChangedEvent(AttemptId(job.job_id, 1, i), i, TaskState.SUCCEEDED))
        state.handle_event(AttemptEndConfirmedEvent(AttemptId(job.job_id, 1, i)))
