"""Messages between the driver and the actors: frozen data without behaviour, and user objects only as bytes.

No ``repr`` has the values of the user's variables or the job's token, because it ends up in logs.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from secrets import token_hex
from typing import Any, NamedTuple

from ray.actor import ActorHandle

from iris_ray.actors.protocol.payloads import Payload, stored_if_large
from iris_ray.model.constraints import Constraint
from iris_ray.model.goodput import Marks
from iris_ray.model.job_info import JobInfo
from iris_ray.model.job_spec import JobSpec
from iris_ray.model.lifecycle import AttemptId, JobState
from iris_ray.model.multislice import MultisliceInfo
from iris_ray.model.options import default_of
from iris_ray.model.plain_values import Words
from iris_ray.model.rhythm import Rhythm
from iris_ray.model.secret import SecretValue
from iris_ray.model.tpu_processes import TpuProcess
from iris_ray.model.workers import TPU

HOST_SILENCE_S = 5.0
"""A host that has not answered for this time counts as lost, unless the job has another ``host_silence``."""

NO_OWNER_YET = "no pool yet"
"""The owner in a request's `JobSpec`. The pool that runs the job puts its own id there (see `JobRun`)."""


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """The way in which a task process is started. Processes of one spec are interchangeable until they run a task.

    Args:
        runtime_env: Ray's runtime environment, with only those ``env_vars`` that act when a process starts.
        preload: modules that are imported before the task is known.
        per_host: how many run a task of one host together.
        as_actor: whether each is an actor of Ray, and not a fork of its host's zygote.
    """

    runtime_env: dict[str, Any] = field(default_factory=dict, repr=False)
    preload: tuple[str, ...] = ()
    per_host: int = 1
    as_actor: bool = False

    @property
    def variables(self) -> dict[str, str]:
        """The variables with which the process starts."""
        return dict(self.runtime_env.get("env_vars", {}))

    @property
    def needs_environment(self) -> bool:
        """Whether Ray has to make an environment for it that the actors on the host do not have."""
        return bool(self.runtime_env.keys() - {"env_vars"})

    @property
    def key(self) -> str:
        """A text that differs between processes that can't be forks of one zygote."""
        return json.dumps([self.runtime_env, self.preload], sort_keys=True, default=repr)


class ChildOf(NamedTuple):
    """The task's attempt that submits a job which the task's next attempt may adopt.

    Attributes:
        job_id: of the task.
        task_index: the task.
        attempt: its attempt.
        place: constraints that the request has only from the place where this attempt runs.
        number: how many jobs of the same name the attempt has submitted before; None if the task has one of each name.
    """

    job_id: str
    task_index: int
    attempt: int
    place: tuple[Constraint, ...] = ()
    number: int | None = None


class Adoption(NamedTuple):
    """A pool's answer to a task that submits a job which the pool may be running already.

    Attributes:
        job_id: the job, if the task has adopted it; else None.
        differs: what differs between the job's request and the task's, in words; empty if the job is not the task's, or
            can't be adopted for another reason.
    """

    job_id: str | None = None
    differs: tuple[Words, ...] = ()


@dataclass(frozen=True, slots=True)
class RunRequest:
    """One job and its function. The client builds it once, complete, before it connects to a cluster.

    Args:
        spec: the part for the Controller; its owner is `NO_OWNER_YET`.
        pickled_function: the pickled zero-argument function, or a reference to it in Ray's object store.
        env: the user's variables that are set in a running process.
        process: how the task processes are started.
        keep_warm: seconds that idle slices are kept.
        stall_timeout: seconds without a heartbeat of any task after which the gang counts as hung; None: as long as its
            own steps teach; 0: never.
        host_silence: seconds without an answer after which a host counts as lost.
        exit_grace: seconds that threads and exit handlers of a task have after its function has returned.
        files_token: the token by which hosts let tasks see the job's files. It is as old as the job: a restarted pool
            gets the same request again.
        secrets: further variables, which are not even in an export.
        child_of: who submits it, if it is a job that outlives the attempt of a task; else None.
    """

    spec: JobSpec
    pickled_function: Payload
    env: dict[str, str] = field(repr=False)
    process: ProcessSpec
    keep_warm: float
    stall_timeout: float | None = None
    host_silence: float = HOST_SILENCE_S
    exit_grace: float = default_of("exit_grace")
    files_token: str = field(default_factory=lambda: token_hex(16), repr=False, compare=False)
    secrets: Mapping[str, SecretValue] = field(default_factory=dict, repr=False)
    child_of: ChildOf | None = None


def with_stored_function(request: RunRequest) -> RunRequest:
    """Return the request with a large function moved into Ray's object store, where it lives as long as this process.

    So a launch carries a reference, and each node fetches the function once.
    """
    return replace(request, pickled_function=stored_if_large(request.pickled_function))


@dataclass(frozen=True, slots=True)
class HostPlace:
    """One host of a slice.

    Args:
        slice_name: its slice; for tasks without chips, which share their hosts, the id of the group's first task.
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
        slices: ``slices[slice_id][host_index]``; all of one size.
        bundle: the resources to reserve on each host, by Ray's names.
        epoch: of the Controller that orders it.
        incarnation: number of the pool's process that is to carry it out.
        spare_for: the job for which the slices are only held ready, or None.
        processes_per_host: how many processes each host's task consists of.
        topologies: the slices' shapes in chips, by slice id, as far as their hosts have told Ray; else "".
        previous_indices: by node id, the index of the task that the gang had on a host of this attempt in its last
            attempt that ran.
    """

    attempt: AttemptId
    slices: tuple[tuple[HostPlace, ...], ...]
    bundle: dict[str, float]
    epoch: int
    incarnation: int
    spare_for: str | None = None
    processes_per_host: int = 1
    topologies: tuple[str, ...] = ()
    previous_indices: dict[str, int] = field(default_factory=dict)

    @property
    def hosts_per_slice(self) -> int:
        return len(self.slices[0])

    @property
    def on_slices(self) -> bool:
        """Whether the gang has slices to itself. A task without chips shares its host."""
        return TPU in self.bundle

    @property
    def first_task(self) -> int:
        """The index of the gang's first task in its job, all of whose gangs have as many tasks."""
        return self.attempt.gang * len(self.slices) * self.hosts_per_slice


@dataclass(frozen=True, slots=True)
class ProcessStart:
    """The start of one process that is to wait for a task.

    Args:
        place: the place of its task.
        process: how it is started.
        actor: what Ray has made for it: the `TaskProcess` itself if it is to be an actor, an `EnvironmentActor` if it
            needs an environment of its own; else None.
        avoid_ports: ports that earlier attempts used.
        placement_group: the id of the one that has the task's resources.
    """

    place: str
    process: ProcessSpec
    actor: ActorHandle | None
    avoid_ports: frozenset[int]
    placement_group: str


class ProcessReady(NamedTuple):
    """A task process has started, and waits for its task.

    Attributes:
        started: when its process started, in clock ticks since boot, because pids are used again.
        token: the token that its task's processes will carry in their environment.
        ports: free ports of its host that it holds.
        error: why it can't run a task, or None.
    """

    pid: int
    started: int
    token: str
    ports: tuple[int, ...]
    error: str | None = None


class HostReady(NamedTuple):
    """A task process waits on a host, and the host watches it.

    Attributes:
        pid: of the process.
        ports: free ports of the host that it holds.
        file_service: the ``host:port`` where the host serves files of jobs (see `PeerFiles`); "" if it serves none.
    """

    pid: int
    ports: tuple[int, ...]
    file_service: str


class SliceReady(NamedTuple):
    """Every host of a slice could start a task at once.

    Attributes:
        ports: free ports that the waiting processes hold, by process. With one process a host only those of the first.
        file_services: where each host serves files of jobs, as `HostReady` says.
    """

    ports: tuple[tuple[int, ...], ...]
    file_services: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class TaskLaunch:
    """All that a task process needs to run one task.

    Args:
        pickled_function: as in `RunRequest`.
        env: the user's variables.
        info: the task's place in its gang.
        multislice: its slice's place among the gang's slices.
        num_cpus: CPUs that the task claims; None if the user named none.
        label: marks the task's output.
        num_gpus: GPUs that the task claims.
        tpu_process: its place among the processes of its slice if its host has several, else None.
        files_token: as in `RunRequest`.
        secret_files: texts that the task gets as files, by the names of the variables with their paths.
    """

    pickled_function: Payload
    env: dict[str, str] = field(repr=False)
    info: JobInfo
    multislice: MultisliceInfo
    num_cpus: float | None
    label: str
    num_gpus: float = 0.0
    tpu_process: TpuProcess | None = None
    files_token: str = field(default="", repr=False)
    secret_files: Mapping[str, str] = field(default_factory=dict, repr=False)


@dataclass(frozen=True, slots=True)
class Saves:
    """The saves of a task, from which it could go on if it lost its hosts, as the task has told.

    Attributes:
        ago_s: seconds since its latest save ended that outlives its hosts; None if it has told of none.
        every_s: seconds between its latest two saves; None if there were no two.
        heeds_notices: whether it asks for notices.
    """

    ago_s: float | None = None
    every_s: float | None = None
    heeds_notices: bool = False


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress that a task has reported.

    Attributes:
        age: seconds since its latest heartbeat, or the end of a declared pause after it; None before the first.
        step: of the latest heartbeat, if the task named one.
        saved: whether it has saved its state and waits for its end.
        status: its latest `report_status`, or None.
        marks: its marks of time; of its steps the first two and the latest.
        rhythm: how regular its heartbeats are.
        saves: its latest save, and whether it asks for notices.
    """

    age: float | None
    step: int | None
    saved: bool = False
    status: str | None = None
    marks: Marks = field(default_factory=Marks)
    rhythm: Rhythm = field(default_factory=Rhythm)
    saves: Saves = field(default_factory=Saves)


@dataclass(frozen=True, slots=True)
class GangProgress:
    """The progress of an attempt.

    Attributes:
        age: seconds since the latest heartbeat of any task; None before the first.
        step: the furthest step that any task has named, or None.
        status: the status of the first task that has one, or None.
        marks: the marks of the first task that has named a step.
        stragglers: tasks that are clearly slower than the others, in words, the slowest first.
        stall_limit: the time without a heartbeat after which it counts as hung, and why, in words; None: never.
        saves: the latest save of any task, and whether any asks for notices.
    """

    attempt: AttemptId
    age: float | None
    step: int | None
    status: Words | None
    marks: Marks = field(default_factory=Marks)
    stragglers: tuple[Words, ...] = ()
    stall_limit: Words | None = None
    saves: Saves = field(default_factory=Saves)


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
    """The answer of a pool to a new Controller.

    Attributes:
        incarnation: number of its process; larger after a restart.
        slices: names of the slices that it holds.
    """

    incarnation: int
    slices: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class JobView:
    """The Controller's answer to a report: the state of a gang, as if it were a job by itself, and of its whole job.

    Attributes:
        state, attempt, failures, preemptions, failed_launches, error: of the gang.
        job_state: of the whole job.
    """

    state: JobState
    attempt: int
    failures: int
    preemptions: int
    failed_launches: int
    error: str | None
    job_state: JobState
