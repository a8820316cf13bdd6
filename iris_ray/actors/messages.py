"""What travels between the driver and the actors. Frozen data, no behaviour, no user objects except as bytes."""

from dataclasses import dataclass, field
from typing import Any

from iris_ray.job_info import JobInfo
from iris_ray.jobs import JobSpec
from iris_ray.lifecycle import JobState
from iris_ray.multislice import MultisliceInfo
from iris_ray.workers import TPU


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """What a task process must be started with; processes of one spec are interchangeable until they run something.

    Args:
        runtime_env: Ray's runtime environment, with only those ``env_vars`` that act when a process starts.
        preload: modules that a standby imports while it waits.
    """

    runtime_env: dict[str, Any] = field(default_factory=dict)
    preload: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RunRequest:
    """One job with what its tasks run.

    Args:
        spec: what the Controller gets to know. Whoever submits it gives it its id, and whoever runs it its owner.
        function: the pickled zero-argument function.
        env: the user's variables that are set in a running process.
        process: what the task processes are started with.
        keep_warm: seconds that idle slices are kept.
    """

    spec: JobSpec
    function: bytes
    env: dict[str, str]
    process: ProcessSpec
    keep_warm: float


@dataclass(frozen=True, slots=True)
class HostPlace:
    """One host of a slice.

    Args:
        node_id, address: Ray's id of the host, and its IP address.
        slice_name: its slice; for a task without chips, which shares its host with others, the task's id.
        worker_id: the host's number in the slice.
    """

    node_id: str
    address: str
    slice_name: str
    worker_id: int


@dataclass(frozen=True, slots=True)
class AttemptOrder:
    """The Controller's order to start one attempt.

    Args:
        job_id, attempt: which.
        first_task: the index of the gang's first task.
        slices: ``slices[slice_id][worker_id]``; all of one size.
        bundle: what is to be reserved on each host, by Ray's resource names.
        epoch: which Controller orders it.
    """

    job_id: str
    attempt: int
    first_task: int
    slices: tuple[tuple[HostPlace, ...], ...]
    bundle: dict[str, float]
    epoch: int

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
        token: what its task's processes will carry in their environment.
        ports: free ports of its host that it holds.
        error: why it is of no use, or None.
    """

    pid: int
    token: str
    ports: tuple[int, ...]
    error: str | None = None


@dataclass(frozen=True, slots=True)
class TaskLaunch:
    """All that a task process needs to run one task.

    Args:
        function: the pickled function.
        env: the user's variables.
        info: the task's place in its gang.
        multislice: its slice's place among the gang's slices.
        num_cpus: CPUs that the task claims; None if the user named none.
        label: what marks the task's output.
    """

    function: bytes
    env: dict[str, str]
    info: JobInfo
    multislice: MultisliceInfo
    num_cpus: float | None
    label: str


@dataclass(frozen=True, slots=True)
class JobView:
    """What the Controller answers to a report: how a gang stands, as a job by itself."""

    state: JobState
    attempt: int
    failures: int
    preemptions: int
    error: str | None
