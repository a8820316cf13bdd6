"""The nouns of the scheduling core: jobs, tasks and workers, and the states they can be in. Pure data."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from iris_ray.constraints import Attributes, AttributeValue, Constraint

TPU = "TPU"
"""Ray's resource name for chips."""

TPU_NAME = "tpu-name"
TPU_WORKER_ID = "tpu-worker-id"
TPU_TOPOLOGY = "tpu-topology"
TPU_VM_COUNT = "tpu-vm-count"


class TaskState(Enum):
    """Where one task stands. COSCHED_FAILED: ended because another member of its gang ended."""

    PENDING = "pending"
    ASSIGNED = "assigned"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    KILLED = "killed"
    WORKER_FAILED = "worker_failed"
    UNSCHEDULABLE = "unschedulable"
    COSCHED_FAILED = "cosched_failed"


class JobState(Enum):
    """Where a job stands; derived from the counts of its tasks' states."""

    PENDING = "pending"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    KILLED = "killed"
    WORKER_FAILED = "worker_failed"
    UNSCHEDULABLE = "unschedulable"

    @property
    def finished(self) -> bool:
        """Whether the job will never change again."""
        return self not in (JobState.PENDING, JobState.RUNNING)


_S = TaskState

# The only moves there are. SUCCEEDED goes back to PENDING when a gang restarts whole: the member that had already
# finished rejoins.
TRANSITIONS: Mapping[TaskState, frozenset[TaskState]] = {
    _S.PENDING: frozenset({_S.ASSIGNED, _S.KILLED, _S.UNSCHEDULABLE}),
    _S.ASSIGNED: frozenset({_S.PENDING, _S.RUNNING, _S.KILLED, _S.FAILED, _S.WORKER_FAILED, _S.COSCHED_FAILED}),
    _S.RUNNING: frozenset({_S.PENDING, _S.SUCCEEDED, _S.KILLED, _S.FAILED, _S.WORKER_FAILED, _S.COSCHED_FAILED}),
    _S.SUCCEEDED: frozenset({_S.PENDING, _S.KILLED, _S.WORKER_FAILED, _S.COSCHED_FAILED}),
    _S.FAILED: frozenset(),
    _S.KILLED: frozenset(),
    _S.WORKER_FAILED: frozenset(),
    _S.UNSCHEDULABLE: frozenset(),
    _S.COSCHED_FAILED: frozenset(),
}
ACTIVE = frozenset({_S.ASSIGNED, _S.RUNNING})


@dataclass(frozen=True, slots=True)
class CoschedulingConfig:
    """All tasks of a group share one value of ``group_by``; a gang has one or several whole groups.

    Args:
        group_by: the attribute that names a group; for TPUs the slice's name.
        num_groups: the counts of groups that the job can use, ascending.
    """

    group_by: str = TPU_NAME
    num_groups: tuple[int, ...] = (1,)


@dataclass(frozen=True, slots=True)
class JobSpec:
    """What a job asks for; never changes.

    Args:
        job_id: unique in the cluster.
        name: what people call it.
        owner: whose slices it runs on: the id of the SlicePoolManager that submitted it.
        replicas: tasks per group.
        whole_groups: a gang takes each group whole, with all chips, however many hosts and chips the live nodes say it
            has; ``replicas`` and the chips in ``resources`` are then what the rule for the type expects.
        coscheduling: how tasks form a gang.
        constraints: what every worker must satisfy.
        resources: what one task takes of its worker, by Ray's resource names.
        max_retries_failure: further attempts after failures of the job's own.
        max_retries_preemption: further attempts after lost hosts.
    """

    job_id: str
    name: str
    owner: str
    replicas: int
    coscheduling: CoschedulingConfig
    constraints: tuple[Constraint, ...] = ()
    resources: Mapping[str, float] = field(default_factory=dict)
    max_retries_failure: int = 0
    max_retries_preemption: int = 100
    whole_groups: bool = False

    def demand(self, worker: "Worker") -> Mapping[str, float]:
        """What one task takes of this worker."""
        if not self.whole_groups:
            return self.resources
        return {**self.resources, TPU: worker.resources.get(TPU, 0.0)}


@dataclass(slots=True)
class Task:
    """One member of a gang, in its current attempt."""

    task_id: str
    index: int
    state: TaskState = TaskState.PENDING
    worker_id: str | None = None
    error: str | None = None


@dataclass(slots=True)
class Job:
    """A job's past and present. Changed by ControllerState alone.

    Attributes:
        attempt: number of the current or latest attempt; 0 before the first.
        failures, preemptions: charged so far, at most one of them per attempt.
        dispatch_failures: launches that never started, since the last one that did.
        not_before: seconds on the caller's clock; the job is not scheduled earlier.
        groups: names of the groups that the current attempt runs on, by group (slice) id.
        error: the first cause of the latest attempt's end, in words.
    """

    spec: JobSpec
    submitted_at: float
    tasks: list[Task]
    counts: Counter[TaskState]
    attempt: int = 0
    failures: int = 0
    preemptions: int = 0
    dispatch_failures: int = 0
    not_before: float = 0.0
    groups: tuple[str, ...] = ()
    error: str | None = None

    @property
    def state(self) -> JobState:
        """Derived from the counts of the tasks' states, whatever the number of tasks."""
        counts = self.counts
        for task_state, job_state in _DECISIVE:
            if counts[task_state]:
                return job_state
        if counts[_S.SUCCEEDED] == len(self.tasks):
            return JobState.SUCCEEDED
        if counts[_S.PENDING] == len(self.tasks):
            return JobState.PENDING
        return JobState.RUNNING


_DECISIVE = (
    (_S.FAILED, JobState.FAILED),
    (_S.WORKER_FAILED, JobState.WORKER_FAILED),
    (_S.KILLED, JobState.KILLED),
    (_S.UNSCHEDULABLE, JobState.UNSCHEDULABLE),
)

Occupant = tuple[str, int]  # (task id, attempt)


@dataclass(slots=True)
class Worker:
    """One host as the scheduler sees it. Changed by ControllerState alone.

    Attributes:
        worker_id: Ray's node id.
        address: the host's IP address.
        attributes: typed facts about the host and its slice.
        resources: what the host has in all, by Ray's resource names.
        draining: why the host takes nothing new, or None.
        foreign: who outside iris_ray uses the chips, or None.
        suspected: why the host may be gone, or None.
        suspected_until: seconds on the caller's clock; later the suspicion counts no more.
        occupants: tasks that hold resources here until their end is confirmed.
        ending: those among them that are over and will be confirmed in a moment.
    """

    worker_id: str
    address: str
    attributes: Attributes
    resources: Mapping[str, float]
    draining: str | None = None
    foreign: str | None = None
    suspected: str | None = None
    suspected_until: float = 0.0
    occupants: dict[Occupant, Mapping[str, float]] = field(default_factory=dict)
    ending: set[Occupant] = field(default_factory=set)

    @property
    def host_number(self) -> int | None:
        """The 0-based number of the host within its slice; None if it has none, which is not 0."""
        value = self.attributes.get(TPU_WORKER_ID, AttributeValue("")).value
        return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None

    def has_room_for(self, spec: JobSpec) -> bool:
        """Whether one more task of the job fits besides those that are here."""
        return all(self.available(resource) >= need for resource, need in spec.demand(self).items())

    def available(self, resource: str) -> float:
        """How much of a resource is not held by a task."""
        return self.resources.get(resource, 0.0) - sum(held.get(resource, 0.0) for held in self.occupants.values())


def string_attribute(attributes: Attributes, key: str) -> str | None:
    """The attribute's value if it is a str."""
    value = attributes.get(key, AttributeValue(0)).value
    return value if isinstance(value, str) else None
