"""What travels between the driver and the actors. Frozen data, no behaviour, no user objects except as bytes.

Values of the user's variables are in no ``repr``: that ends up in logs.
"""

from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from iris_ray.actors.protocol.payloads import Payload, stored_if_large
from iris_ray.model.goodput import Marks
from iris_ray.model.job_info import JobInfo
from iris_ray.model.job_spec import JobSpec
from iris_ray.model.lifecycle import AttemptId, JobState
from iris_ray.model.multislice import MultisliceInfo
from iris_ray.model.options import default_of
from iris_ray.model.plain_values import Words
from iris_ray.model.workers import TPU

HOST_SILENCE_S = 5.0
"""A host that has not answered for so long counts as lost, unless its job's option ``host_silence`` says otherwise."""

NO_OWNER_YET = "no pool yet"
"""The owner in a request's `JobSpec`. The pool that runs the job puts its own id there (see `JobRun`)."""


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """What a task process must be started with; processes of one spec are interchangeable until they run something.

    Args:
        runtime_env: Ray's runtime environment, with only those ``env_vars`` that act when a process starts.
        preload: modules that a standby imports while it waits.
    """

    runtime_env: dict[str, Any] = field(default_factory=dict, repr=False)
    preload: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RunRequest:
    """One job with what its tasks run. The client builds it once, complete, before it connects to a cluster.

    Args:
        spec: what the Controller gets to know; its owner is `NO_OWNER_YET`.
        pickled_function: the pickled zero-argument function, or where it is in Ray's object store.
        env: the user's variables that are set in a running process.
        process: what the task processes are started with.
        keep_warm: seconds that idle slices are kept.
        stall_timeout: seconds without a heartbeat of any task after which the gang counts as hung; None: never.
        host_silence: seconds without an answer after which a host counts as lost.
        exit_grace: seconds that threads and exit handlers of a task have after its function has returned.
        standbys: how many standbys a host of a warm slice keeps; None: as many as it has room for.
    """

    spec: JobSpec
    pickled_function: Payload
    env: dict[str, str] = field(repr=False)
    process: ProcessSpec
    keep_warm: float
    stall_timeout: float | None = None
    host_silence: float = HOST_SILENCE_S
    exit_grace: float = default_of("exit_grace")
    standbys: int | None = None


def with_stored_function(request: RunRequest) -> RunRequest:
    """Return the request with a large function moved into Ray's object store, where it lasts as long as this process.

    So a launch carries a reference, and each node fetches the function once.
    """
    return replace(request, pickled_function=stored_if_large(request.pickled_function))


@dataclass(frozen=True, slots=True)
class HostPlace:
    """One host of a slice.

    Args:
        node_id, address: Ray's id of the host, and its IP address.
        slice_name: its slice; for tasks without chips, which share their hosts with others, the id of the first task of
            the group.
        host_index: the host's number in the slice or group.
    """

    node_id: str
    address: str
    slice_name: str
    host_index: int


@dataclass(frozen=True, slots=True)
class AttemptOrder:
    """The Controller's order to start one attempt.

    Args:
        attempt: which.
        slices: ``slices[slice_id][host_index]``; all of one size.
        bundle: what is to be reserved on each host, by Ray's resource names.
        epoch: which Controller orders it.
        incarnation: number of the pool's process that it is meant for.
        spare_for: the job for which the slices are only held ready, or None.
    """

    attempt: AttemptId
    slices: tuple[tuple[HostPlace, ...], ...]
    bundle: dict[str, float]
    epoch: int
    incarnation: int
    spare_for: str | None = None

    @property
    def hosts_per_slice(self) -> int:
        return len(self.slices[0])

    @property
    def on_slices(self) -> bool:
        """Whether the gang has slices to itself; a task without chips shares its host."""
        return TPU in self.bundle


@dataclass(frozen=True, slots=True)
class StandbyReady:
    """A standby has started.

    Args:
        pid: its process.
        started: when that started, in clock ticks since boot; another process may get its pid.
        token: what its task's processes will carry in their environment.
        ports: free ports of its host that it holds.
        cores: how many CPUs of its host it may use.
        free_bytes: how much memory of its host is free.
        error: why it is of no use, or None.
    """

    pid: int
    started: int
    token: str
    ports: tuple[int, ...]
    cores: int
    free_bytes: int
    error: str | None = None


class SliceReady(NamedTuple):
    """Every host of a slice could start a task at once.

    Attributes:
        ports: free ports that host 0's standby holds.
        cores: how many CPUs host 0 has.
        free_bytes: how much memory of host 0 is free.
    """

    ports: tuple[int, ...]
    cores: int
    free_bytes: int


@dataclass(frozen=True, slots=True)
class TaskLaunch:
    """All that a task process needs to run one task.

    Args:
        pickled_function: the pickled function, or where it is in Ray's object store.
        env: the user's variables.
        info: the task's place in its gang.
        multislice: its slice's place among the gang's slices.
        num_cpus: CPUs that the task claims; None if the user named none.
        label: what marks the task's output.
        num_gpus: GPUs that the task claims.
    """

    pickled_function: Payload
    env: dict[str, str] = field(repr=False)
    info: JobInfo
    multislice: MultisliceInfo
    num_cpus: float | None
    label: str
    num_gpus: float = 0.0


@dataclass(frozen=True, slots=True)
class Progress:
    """What a task has said about itself.

    Attributes:
        age: seconds since its latest heartbeat, or None before the first.
        step: how far it was then, if it said so.
        saved: it has saved its state and waits for its end.
        status: its latest words about itself, or None.
        marks: what it has said about its time; of its steps the first two and the latest.
    """

    age: float | None
    step: int | None
    saved: bool = False
    status: str | None = None
    marks: Marks = field(default_factory=Marks)


@dataclass(frozen=True, slots=True)
class GangProgress:
    """What the tasks of an attempt have said about themselves.

    Attributes:
        attempt: whose tasks.
        age: seconds since the latest heartbeat of any, or None before the first.
        step: the furthest that any has named, or None.
        status: the words of the first task that has said any, or None.
        marks: what the first task that has said so has said about its time.
        stragglers: tasks that make clearly fewer steps than the others, in words, the slowest first.
    """

    attempt: AttemptId
    age: float | None
    step: int | None
    status: Words | None
    marks: Marks = field(default_factory=Marks)
    stragglers: tuple[Words, ...] = ()


class PoolProcess(NamedTuple):
    """One process of a pool.

    Args:
        owner: the pool.
        incarnation: number of the process, larger than those of all processes of the pool before it.
    """

    owner: str
    incarnation: int


@dataclass(frozen=True, slots=True)
class PoolView:
    """What a pool tells a new Controller.

    Attributes:
        incarnation: number of its process; larger after a restart.
        slices: names of those that it holds.
    """

    incarnation: int
    slices: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class JobView:
    """What the Controller answers to a report: how a gang stands, as a job by itself, and how its whole job does.

    Attributes:
        state: of the gang.
        attempt, failures, preemptions, failed_launches, error: of the gang.
        job_state: of the job that the gang is a part of.
    """

    state: JobState
    attempt: int
    failures: int
    preemptions: int
    failed_launches: int
    error: str | None
    job_state: JobState
