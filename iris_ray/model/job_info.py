"""A task's place in its job. It travels in ``IRIS_*`` variables, so child processes of a task know it, too."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from iris_ray.errors import InvalidRequestError
from iris_ray.model.options import EACH_SLICE, WHOLE_JOB


@dataclass(frozen=True, slots=True)
class JobInfo:
    """One task's place in its job.

    Tasks that start and fail together are a *gang*: all tasks of the job, or those of one slice if the job's
    ``failure_domain`` is the slice.

    Attributes:
        job_id: the job, the same for all its attempts.
        task_id: ``<job_id>/task-<task_index>``.
        task_index: 0-based over the whole job, ordered by slice id, then worker id, then local index. A slice that
            stays with the gang keeps its slice id, and so its tasks their indices, unless there are fewer slices now.
        num_tasks: tasks in the job; one per host, or as many as the option ``processes_per_host`` says.
        attempt: 1 for the first incarnation of the gang, 2 for the next, …; never reused.
        slice_id: 0-based number of the task's slice, or other group, within the job.
        num_slices: slices, or other groups, in the job.
        slice_name: the TPU slice's name in the cluster; empty without chips.
        worker_id: 0-based number of the host within its slice or group.
        coordinator_address: ``ip:port`` on the host of the gang's first task, free when the attempt started and new for
            every attempt; ``iris_ray.jax.initialize()`` uses it. Empty for one of several tasks that are placed one by
            one.
        local_dir: a directory of the job on this host, in memory if there is room. It outlives the job's attempts on
            the host, and is removed when the job ends or another job takes the host. Empty without chips. All tasks of
            the job on the host have the same one.
        local_index: 0-based number of the task on its host.
        processes_per_host: how many tasks of the gang its host has.
        previous_task_index: index of the task that was this host's, of the same local index, in the gang's attempt
            before: what lies in ``local_dir`` is of that task. None if the gang did not use the host then. Attempts in
            which no task ran don't count.
        failure_domain: what starts again together: the whole "job" or each "slice".
        group: the jobs of its group, ``name=id`` with commas between; see `group_jobs`. Empty if it is in none.
        file_services: ``host:port`` by gang rank, where the host of each task of the gang serves the job's files in
            ``local_dir`` to the job's tasks (see `iris_ray.checkpoint.peer_files`); "" for a host that can't. A task
            that is placed by itself knows its own host's only. Empty without chips, in local processes, and in a gang
            whose addresses don't fit into a variable: about 5,000 hosts.
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

    @property
    def group_jobs(self) -> dict[str, str]:
        """The ids of the jobs of its group by their names, its own job included; empty if it is in none."""
        return dict(one.split("=", 1) for one in self.group.split(",") if one)

    @property
    def namespace(self) -> str:
        """The id of the job whose endpoints the task sees: its own."""
        return self.job_id

    @property
    def in_gang(self) -> bool:
        """Whether all tasks of its job start and fail together, so that they are of the same attempt."""
        return self.coordinator_address != "" and self.gang_size == self.num_tasks

    @property
    def gang_size(self) -> int:
        """The number of tasks that start and fail together with this one, itself included."""
        if self.coordinator_address == "":
            return 1
        return self.num_tasks // (self.num_slices if self.failure_domain == EACH_SLICE else 1)

    @property
    def gang_rank(self) -> int:
        """The 0-based number of the task among those that start and fail together with it."""
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
    """Return the place of the task that has this environment; None if it is not the environment of a task.

    Raises:
        InvalidRequestError: variables of the task are missing.
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
