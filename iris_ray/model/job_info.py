"""A task's identity within its job, passed in ``IRIS_*`` variables, which its child processes inherit."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from iris_ray.errors import InvalidRequestError
from iris_ray.model.options import EACH_SLICE, END, WHOLE_JOB


@dataclass(frozen=True, slots=True)
class JobInfo:
    """A task's identity within its job.

    Tasks that start and fail together are a *gang*: all tasks of the job, or those of one slice if the job's
    ``failure_domain`` is the slice.

    Attributes:
        job_id: the job's id, which all attempts share.
        task_id: ``<job_id>/task-<task_index>``.
        task_index: 0-based over the whole job, ordered by slice id, then worker id, then local index. A slice that
            stays with the gang keeps its slice id, and its tasks keep their indices, unless the gang has shrunk.
        num_tasks: tasks in the job: ``processes_per_host`` for each host, one by default.
        attempt: 1 for the first incarnation of the gang, 2 for the next, …; never reused.
        slice_id: 0-based number of the task's slice (or other group) within the job; 0 for an independent task.
        num_slices: number of slices (or other groups) in the job; 1 for an independent task.
        slice_name: the name of the TPU slice, or of the part of a slice, in the cluster; empty without chips.
        worker_id: 0-based number of the host within its slice, part of a slice, or group.
        coordinator_address: ``ip:port`` on the host of the gang's first task, for ``iris_ray.jax.initialize()``. The
            port was free when the attempt started, and differs between attempts. Empty if the job has several
            independent tasks.
        local_dir: the job's directory on this host, shared by the job's tasks on the host. It is in memory if there is
            room and ``IRIS_RAY_HOST_DIR`` is not set. It survives across attempts. It is removed when the job ends,
            when another job takes the host, or some minutes after iris_ray's last process there. Empty without chips.
            In local processes, each task has one of its own.
        local_index: 0-based number of the task among the gang's tasks on its host.
        processes_per_host: number of the gang's tasks on each host.
        previous_task_index: index of the task that had the same local index on this host in the gang's previous
            attempt; it wrote the files in ``local_dir``. None if that attempt did not use the host. Attempts in which
            no task ran don't count.
        failure_domain: the unit that restarts together: the whole "job", or each "slice".
        group: the jobs of its group as ``name=id``, separated by commas; see `group_jobs`. Empty without a group.
        file_services: ``host:port`` of each host's file service by gang rank, which serves the job's files in
            ``local_dir`` to the job's tasks (see `iris_ray.checkpoint.peer_files`); "" for a host without one. An
            independent task has only its own host's. Empty without chips, in local processes, and in a gang whose
            addresses don't fit into a variable: about 5,000 hosts.
        children: what happens to the jobs that the task submits when it restarts: they "end", or its next attempt may
            "adopt" them.
    """

    job_id: str
    task_id: str
    task_index: int
    num_tasks: int
    attempt: int
    slice_id: int
    num_slices: int
    slice_name: str
    worker_id: int
    coordinator_address: str
    local_dir: str = ""
    local_index: int = 0
    processes_per_host: int = 1
    previous_task_index: int | None = None
    failure_domain: str = WHOLE_JOB
    file_services: tuple[str, ...] = field(default=(), repr=False)
    group: str = ""
    children: str = END

    @property
    def group_jobs(self) -> dict[str, str]:
        """The ids of all jobs in its group, by name, including its own job; empty without a group."""
        return dict(one.split("=", 1) for one in self.group.split(",") if one)

    @property
    def namespace(self) -> str:
        """The namespace of the task's endpoints: the id of its job."""
        return self.job_id

    @property
    def in_gang(self) -> bool:
        """Whether all tasks of its job start and restart together, as one gang.

        False for several independent tasks, and for a job on several slices whose ``failure_domain`` is the slice: each
        slice has a gang of its own.
        """
        return self.coordinator_address != "" and self.gang_size == self.num_tasks

    @property
    def gang_size(self) -> int:
        """The number of tasks in its gang."""
        if self.coordinator_address == "":
            return 1
        return self.num_tasks // (self.num_slices if self.failure_domain == EACH_SLICE else 1)

    @property
    def gang_rank(self) -> int:
        """The 0-based number of the task within its gang."""
        return self.task_index % self.gang_size

    def to_env(self) -> dict[str, str]:
        """Return the ``IRIS_*`` variables that describe this task."""
        values = {variable: getattr(self, name) for name, variable in _VARIABLES.items()}
        values[_FILE_SERVICES] = ",".join(self.file_services[:: self.processes_per_host])  # one for each host
        return {variable: "" if value is None else str(value) for variable, value in values.items()}


_VARIABLES = {name: f"IRIS_{name.upper()}" for name in JobInfo.__dataclass_fields__}
COORDINATOR_VARIABLE = _VARIABLES["coordinator_address"]
"""The variable by which `iris_ray.jax.initialize` finds the other processes of the gang."""
_FILE_SERVICES = _VARIABLES["file_services"]


def job_info_of(environ: Mapping[str, str]) -> JobInfo | None:
    """Return the task that an environment describes, or None if it isn't a task's environment.

    Raises:
        InvalidRequestError: some of the task's variables are missing.
    """
    if "IRIS_TASK_ID" not in environ:
        return None
    if missing := [variable for variable in _VARIABLES.values() if variable not in environ]:
        raise InvalidRequestError(
            f"IRIS_TASK_ID is set, and {missing[0]} is not; a child process of a task needs all IRIS_… variables of it"
        )
    values = {name: environ[variable] for name, variable in _VARIABLES.items()}
    types = {name: JobInfo.__dataclass_fields__[name].type for name in values}
    ints = {n: int(v) if v else None for n, v in values.items() if types[n] in (int, int | None)}
    hosts = environ[_FILE_SERVICES].split(",") if environ[_FILE_SERVICES] else []
    of_tasks = tuple(address for address in hosts for _ in range(ints["processes_per_host"] or 1))
    return JobInfo(**{**values, **ints, "file_services": of_tasks})  # type: ignore[arg-type]
