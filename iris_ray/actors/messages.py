"""What travels between the driver and the actors. Frozen data, no behaviour, no user objects except as bytes."""

from dataclasses import dataclass, field
from typing import Any

from iris_ray.job_info import JobInfo
from iris_ray.lifecycle import JobState
from iris_ray.multislice import MultisliceInfo


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
    """One call of ``run_on_pod``.

    Args:
        name: the function's name.
        user: who it is for; fair share is between users.
        function: the pickled zero-argument function.
        tpu_type: canonical name, such as "v4-32".
        hosts_per_slice, chips_per_host: as the rule for the type has them; what the live nodes report wins.
        num_slices: counts that the job can use, ascending.
        env: the user's variables that are set in a running process.
        resources: what one task claims of its host besides the chips, by Ray's resource names.
        num_cpus: the CPUs among them, None if the user named none.
        process: what the task processes are started with.
        max_retries_failure, max_retries_preemption: budgets.
        keep_warm: seconds that idle slices are kept.
    """

    name: str
    user: str
    function: bytes
    tpu_type: str
    hosts_per_slice: int
    chips_per_host: int
    num_slices: tuple[int, ...]
    env: dict[str, str]
    resources: dict[str, float]
    num_cpus: float | None
    process: ProcessSpec
    max_retries_failure: int
    max_retries_preemption: int
    keep_warm: float


@dataclass(frozen=True, slots=True)
class HostPlace:
    """One host of a slice."""

    node_id: str
    address: str
    slice_name: str
    worker_id: int


@dataclass(frozen=True, slots=True)
class AttemptOrder:
    """The Controller's order to start one attempt.

    Args:
        job_id, attempt: which.
        slices: ``slices[slice_id][worker_id]``; all of one size.
        bundle: what is to be reserved on each host, by Ray's resource names.
        epoch: which Controller orders it.
    """

    job_id: str
    attempt: int
    slices: tuple[tuple[HostPlace, ...], ...]
    bundle: dict[str, float]
    epoch: int

    @property
    def hosts_per_slice(self) -> int:
        return len(self.slices[0])


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
    """What the Controller answers to a report."""

    state: JobState
    attempt: int
    failures: int
    preemptions: int
    error: str | None
