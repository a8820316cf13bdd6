"""What a job asks for, and its validation."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from typing import Any

from iris_ray.errors import InvalidJobError, InvalidMessageError, InvalidRequestError
from iris_ray.model.constraints import TAINT_PREFIX, Constraint
from iris_ray.model.job_info import JobInfo
from iris_ray.model.multislice import parse_num_slices
from iris_ray.model.plain import plain, shown
from iris_ray.model.requirement import Requirement, make_requirement
from iris_ray.model.topology import get_tpu_config
from iris_ray.model.workers import GPU, TPU, TPU_NAME


class PriorityBand(IntEnum):
    """Jobs of a band are placed before those of the next, and may take hosts from them, with notice."""

    PRODUCTION = 0
    INTERACTIVE = 1
    BATCH = 2


@dataclass(frozen=True, slots=True, init=False)
class CoschedulingConfig:
    """The tasks of a job are a gang. All hosts of a group share one value of ``group_by``; a gang has one or several.

    Args:
        group_by: the attribute that names a group: for TPUs the slice's name, for others a rack, a pool, a zone ….
        num_groups: how many groups (slices, racks) the job needs, or the numbers of groups that it can use; kept as an
            ascending tuple.

    Raises:
        InvalidSliceCountError: ``num_groups`` is not made of distinct positive ints.
        InvalidJobError: ``group_by`` is not the name of an attribute.
    """

    group_by: str
    num_groups: tuple[int, ...]

    def __init__(self, group_by: str = TPU_NAME, num_groups: int | Sequence[int] = (1,)) -> None:
        if not isinstance(group_by, str) or not group_by:
            raise InvalidJobError(f"group_by is {group_by!r}; give the name of an attribute, such as {TPU_NAME!r}")
        try:
            object.__setattr__(self, "group_by", plain(str, group_by, "group_by"))
        except InvalidMessageError as error:
            raise InvalidJobError(str(error)) from None
        object.__setattr__(self, "num_groups", parse_num_slices(num_groups))


EXIT_GRACE_S = 300.0
"""How long a task's process may run on after its function has returned, if its job does not say."""
GROW_AFTER_S = 12 * 3600.0
MAX_RETRIES_FAILURE = 10
MAX_RETRIES_PREEMPTION = 10_000

MOST_TASKS = 100_000
"""Of one job, on the largest number of slices that it can use."""
MOST_CONSTRAINTS = 1_000
"""Of one job; as many preferences, tolerations and resources."""
MOST_SPARES = 1_000
MOST_OF_A_RESOURCE = 9e14
"""Ray counts ten-thousandths with 64 bits."""


class SparePurpose(Enum):
    """Why slices are held ready for a gang that runs."""

    SPARE = "spare"  # its owner asked for them
    REPLACEMENT = "replacement"  # for a slice that is about to go
    GROWTH = "growth"  # it can use more


@dataclass(frozen=True, slots=True)
class SpareFor:
    """The job that slices are held ready for, and why."""

    job_id: str
    purpose: SparePurpose


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec:
    """What a job asks for. Immutable. Its tasks are called ``<job id>/task-<index>``.

    Values of subclasses, as of a `StrEnum`, become plain ones.

    Args:
        job_id: unique in the cluster.
        name: the name that people see; the id if left out.
        owner: the id of the SlicePoolManager that submitted it and whose slices it runs on.
        user: the user; fair share is between users.
        priority: its band.
        device: the TPU type that it is made for, such as "v4-32"; None without TPU. It decides how many replicas make
            a gang; the constraints decide which hosts will do.
        replicas: tasks per group if coscheduled, else tasks in all.
        coscheduling: how tasks form a gang; None: each is placed, fails and is retried by itself.
        whole_groups: take each group whole, with all chips, however many hosts and chips the live nodes say it has;
            ``replicas`` and the chips in ``resources`` are then what the rule for the type expects.
        constraints: what every worker must satisfy.
        preferences: what workers should satisfy; the more the better.
        tolerations: names of taints that the job tolerates.
        resources: what one task takes of its worker, by Ray's resource names. A task that takes chips, or whose job
            names a device, takes all chips of its host, since libtpu allows one process a host.
        max_retries_failure: further attempts of a gang after failures of its own.
        max_retries_preemption: further attempts of a gang after lost hosts.
        max_task_failures: failed attempts in the job's whole life, retried ones too, that it survives. None: only a
            gang whose retries are used up fails the job.
        scheduling_timeout: seconds after submission by which some task must have run, or the job is given up as
            unschedulable. None, and 0 or less (kept as None): it waits for as long as it takes.
        spares: slices that are held ready beside those that the gang runs on, to take the place of a lost one.
        grow_after: seconds that a gang on fewer slices than it can use runs before it moves to more, once they are
            free; None: it never does. After a loss it does not wait so long.
        spare_for: set if the job only holds slices ready for another job's gang; the state makes such jobs.
        may_evict: whether it may take hosts from lower bands. If not, it only goes before them in the queue.

    Raises:
        InvalidJobError: a value is invalid, or the job has too many tasks, constraints or spares.
        UnknownTPUTypeError: no such device.
    """

    job_id: str
    owner: str
    name: str = ""
    user: str = ""
    priority: PriorityBand = PriorityBand.INTERACTIVE
    device: str | None = None
    replicas: int = 1
    coscheduling: CoschedulingConfig | None = None
    whole_groups: bool = False
    constraints: tuple[Constraint, ...] = ()
    preferences: tuple[Constraint, ...] = ()
    tolerations: tuple[str, ...] = ()
    resources: Mapping[str, float] = field(default_factory=dict)
    max_retries_failure: int = 0
    max_retries_preemption: int = 100
    max_task_failures: int | None = None
    scheduling_timeout: float | None = None
    spares: int = 0
    grow_after: float | None = GROW_AFTER_S
    spare_for: SpareFor | None = None
    may_evict: bool = True

    def __post_init__(self) -> None:
        for name in ("constraints", "preferences", "tolerations"):
            if isinstance(value := getattr(self, name), list):
                object.__setattr__(self, name, tuple(value))
        _require_valid(self)
        for name, kind in _PLAIN.items():
            object.__setattr__(self, name, _plain(self, name, kind))
        if self.scheduling_timeout is not None and self.scheduling_timeout <= 0:
            object.__setattr__(self, "scheduling_timeout", None)

    @property
    def most_tasks(self) -> int:
        """How many tasks it has on the largest number of groups that it can use."""
        return self.replicas * (max(self.coscheduling.num_groups) if self.coscheduling else 1)

    @property
    def requirement(self) -> Requirement:
        """What its gangs require of workers."""
        return make_requirement(
            self.coscheduling.group_by if self.coscheduling else None,
            self.replicas if self.coscheduling else 1,
            self.whole_groups,
            self.constraints,
            self.preferences,
            self.tolerations,
            self.resources,
            self.device is not None,
        )


_PLAIN: Mapping[str, Any] = {
    **dict.fromkeys(("job_id", "owner", "name", "user"), str),
    "device": str | None,
    **dict.fromkeys(("replicas", "max_retries_failure", "max_retries_preemption", "spares"), int),
    **dict.fromkeys(("whole_groups", "may_evict"), bool),
    "max_task_failures": int | None,
    **dict.fromkeys(("scheduling_timeout", "grow_after"), float | None),
    "tolerations": tuple[str, ...],
    "resources": Mapping[str, float],
}
"""The fields that a job's spec makes plain. The others are objects of ours, which do it themselves."""


def _plain(spec: JobSpec, name: str, kind: Any) -> Any:
    try:
        return plain(kind, getattr(spec, name), name)
    except InvalidMessageError as error:
        raise InvalidJobError(f"{_who(spec)}: {error}") from None


def _who(spec: JobSpec) -> str:
    """Return the job's name for messages, or its id if it has no name. Users have not seen the id of a new job yet."""
    return f"job {shown(spec.name or spec.job_id)}"


def _require_valid(spec: JobSpec) -> None:
    """Raise InvalidJobError for the first invalid value, with a message that says how to fix it."""
    who = _who(spec)
    _require_names(who, spec)
    _require_counts(who, spec)
    _require_times(who, spec)
    if not isinstance(spec.priority, PriorityBand):
        bands = ", ".join(f"PriorityBand.{band.name}" for band in PriorityBand)
        raise InvalidJobError(f"{who}: priority is {spec.priority!r}; give one of {bands}")
    _require_lists(who, spec)
    if not isinstance(spec.coscheduling, CoschedulingConfig | None):
        raise InvalidJobError(f"{who}: coscheduling is {spec.coscheduling!r}; give a CoschedulingConfig or None")
    _require_resources(who, spec.resources)
    _require_bounded(who, spec)
    if spec.device is not None:
        get_tpu_config(spec.device)
    if spec.coscheduling is not None:
        _require_gang(who, spec, spec.coscheduling.group_by)
    elif spec.whole_groups:
        raise InvalidJobError(f"{who}: whole_groups without coscheduling; add coscheduling=CoschedulingConfig()")


def _require_names(who: str, spec: JobSpec) -> None:
    if not isinstance(spec.job_id, str) or not spec.job_id:
        raise InvalidJobError(f"job_id is {shown(spec.job_id)}; give a name")
    for name in ("owner", "user", "name"):
        if not isinstance(value := getattr(spec, name), str):
            raise InvalidJobError(f"{who}: {name} is {shown(value)}; give a str")
    if not spec.owner:
        raise InvalidJobError(f"{who}: owner is empty; give the id of the pool that runs it")


def _require_counts(who: str, spec: JobSpec) -> None:
    _require_int(who, "replicas", spec.replicas, 1)
    _require_int(who, "max_retries_failure", spec.max_retries_failure, 0)
    _require_int(who, "max_retries_preemption", spec.max_retries_preemption, 0)
    if spec.max_task_failures is not None:
        _require_int(who, "max_task_failures", spec.max_task_failures, 0)
    _require_int(who, "spares", spec.spares, 0)
    if spec.spares and spec.coscheduling is None:
        raise InvalidJobError(f"{who}: spares={spec.spares} without coscheduling; only gangs on slices have spares")


def _require_times(who: str, spec: JobSpec) -> None:
    if spec.grow_after is not None and not _is_amount(spec.grow_after):
        raise InvalidJobError(f"{who}: grow_after is {spec.grow_after!r}; give seconds, or None never to grow")
    if spec.scheduling_timeout is not None and not _is_number(spec.scheduling_timeout):
        raise InvalidJobError(
            f"{who}: scheduling_timeout is {spec.scheduling_timeout!r}; give seconds, or None to wait"
        )


def _require_lists(who: str, spec: JobSpec) -> None:
    constraints = 'Constraint objects, such as [Constraint("pool", ConstraintOp.EQ, "a")]'
    _require_list(who, "constraints", spec.constraints, Constraint, constraints)
    _require_list(who, "preferences", spec.preferences, Constraint, constraints)
    _require_list(who, "tolerations", spec.tolerations, str, 'names of taints, such as ["spot"]')
    for name in spec.tolerations:
        if not name or name.startswith(TAINT_PREFIX):
            raise InvalidJobError(
                f"{who}: tolerations has {name!r}, which no taint is called; give its name without {TAINT_PREFIX!r}"
            )


def _require_list(who: str, name: str, value: Any, kind: type, example: str) -> None:
    if not isinstance(value, tuple):
        raise InvalidJobError(f"{who}: {name} is {shown(value)}; give a list of {example}")
    for one in value:
        if not isinstance(one, kind):
            raise InvalidJobError(f"{who}: {name} has {shown(one)}; give a list of {example}")


def _require_resources(who: str, resources: Any) -> None:
    if not isinstance(resources, Mapping) or not all(isinstance(name, str) for name in resources):
        raise InvalidJobError(f"{who}: resources is {resources!r}; give amounts by name, such as {{'CPU': 1}}")
    for resource, amount in resources.items():
        if not _is_amount(amount):
            raise InvalidJobError(f"{who}: resources has {amount!r} of {resource}; give a number of 0 or more")
        if amount > MOST_OF_A_RESOURCE:
            raise InvalidJobError(f"{who}: resources has {shown(amount)} of {resource}, more than Ray can count")
        if resource == GPU and amount % 1:
            raise InvalidJobError(f"{who}: resources has {amount!r} of {GPU}; a task has whole GPUs to itself")


def _require_bounded(who: str, spec: JobSpec) -> None:
    """Refuse a job whose mere size would keep the Controller busy, before anything is made of it."""
    counts = {
        "tasks": (spec.most_tasks, MOST_TASKS),
        "spares": (spec.spares, MOST_SPARES),
        **{
            name: (len(getattr(spec, name)), MOST_CONSTRAINTS)
            for name in ("constraints", "preferences", "tolerations", "resources")
        },
    }
    for name, (count, most) in counts.items():
        if count > most:
            raise InvalidJobError(f"{who}: {shown(count)} {name}, and the limit is {most:,}; ask for fewer")


def _require_gang(who: str, spec: JobSpec, group_by: str) -> None:
    if spec.device is None:
        if group_by == TPU_NAME:
            raise InvalidJobError(
                f'{who} is coscheduled by slice but names no TPU device; say which, for example device="v4-32", or'
                ' group by another attribute of hosts, for example CoschedulingConfig("rack")'
            )
        if spec.spares or spec.whole_groups or spec.resources.get(TPU):
            raise InvalidJobError(
                f"{who}: a gang by {group_by} has no spares, no whole groups and no TPU chips; only gangs on slices do"
            )
        return
    config = get_tpu_config(spec.device)
    sizes = {config.vm_count, config.chip_count // 4} if config.chips_per_vm == 8 else {config.vm_count}
    # GKE makes two VMs of a host with eight chips.
    if spec.replicas not in sizes and not spec.whole_groups:
        raise InvalidJobError(
            f"{who}: {config.name} has {config.vm_count} hosts, so a gang on it has {config.vm_count} replicas per"
            f" slice, not {spec.replicas}; set replicas={config.vm_count}, or use num_groups for several slices"
        )


def _require_int(who: str, name: str, value: Any, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise InvalidJobError(f"{who}: {name} is {shown(value)}; give an int of {least} or more")


def _is_amount(value: Any) -> bool:
    return _is_number(value) and value >= 0


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and -math.inf < value < math.inf


# -- container ---------------------------------------------------------------------------------------------------------
# A program in a container image, as a user asks for it, and the name of the container in which a task runs it.

OURS = frozenset({"--name", "--rm", "-d", "--detach", "--restart", "--cidfile", "-i", "--interactive", "-t", "--tty"})
"""Options of the engine that would take a container out of our hands."""

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")
_IMAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:/@+-]*")
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9_.-]")


@dataclass(frozen=True, slots=True)
class ContainerSpec:
    """A program that every task of a gang runs in a container of its own.

    Args:
        image: the image, such as ``"gcr.io/project/train:v7"``.
        command: the program and its arguments. No shell reads them. Empty: what the image runs by itself.
        env: the user's environment variables. Values may hold anything but NUL.
        options: further options of ``docker run``, such as ``["--volume=/data:/data"]``.

    Raises:
        InvalidRequestError: something can't work as written. No message has the value of a variable.
    """

    image: str
    command: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict, repr=False)
    options: Sequence[str] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.image, str) or not _IMAGE.fullmatch(self.image):
            raise InvalidRequestError(f'image_id is {shown(self.image)}; give an image, such as "gcr.io/project/train"')
        _require_arguments("command", self.command, '["python", "train.py"]')
        _require_arguments("container_options", self.options, '["--volume=/data:/data"]')
        for option in self.options:
            if option.partition("=")[0] in OURS:
                raise InvalidRequestError(
                    f"container_options holds {option!r}, which is iris_ray's to choose; leave it out"
                )
        _require_variables(self.env)


def container_name(task: JobInfo) -> str:
    """Return the container's name: it has the job, the task and the attempt, so no two containers share one."""
    job = _NOT_IN_NAMES.sub("-", task.job_id)  # its last characters make the job's id unique
    return f"iris-{job}-task-{task.task_index}-attempt-{task.attempt}"


def _require_arguments(what: str, given: object, example: str) -> None:
    if not isinstance(given, (list, tuple)) or not all(isinstance(part, str) for part in given):
        raise InvalidRequestError(f"{what} is {shown(given)}; give a list of str, such as {example}")
    if any("\0" in part for part in given):
        raise InvalidRequestError(f"{what} holds a NUL, which no argument can")


def _require_variables(env: object) -> None:
    if not isinstance(env, Mapping) or not all(isinstance(part, str) for item in env.items() for part in item):
        raise InvalidRequestError("env must be a mapping of names to values, all str")
    for name in env:
        if not _VARIABLE.fullmatch(name):
            raise InvalidRequestError(
                f"env holds the name {shown(name)}; a container's variable has letters, digits, _, - and . only"
            )
