"""The specification of a job, with its validation."""

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from enum import Enum
from operator import attrgetter
from typing import Any, Literal, get_type_hints

from iris_ray.errors import InvalidJobError, InvalidMessageError, InvalidTopologyError
from iris_ray.model.checks import (
    FLAG,
    Check,
    Holds,
    OneOf,
    Whole,
    is_job_id,
    is_name,
    is_number,
    is_user,
    require_fields,
    shown,
)
from iris_ray.model.constraints import Constraint
from iris_ray.model.job_group import GroupSpec
from iris_ray.model.multislice import parse_num_slices
from iris_ray.model.options import ADOPT, EACH_SLICE, END, OPTIONS, SPREAD, WHOLE_JOB, After, PriorityBand, default_of
from iris_ray.model.parts import hosts_of_shape, is_on_slices, require_shape, shape_of_attribute
from iris_ray.model.plain_values import plain
from iris_ray.model.requirement import Requirement, make_requirement
from iris_ray.model.secret import MOST_STORED_NAMES, is_secret_name
from iris_ray.model.topology import TPUConfig, get_tpu_config
from iris_ray.model.tpu_processes import CHIPS_PER_HOST
from iris_ray.model.workers import GPU, TPU, TPU_NAME, accelerators


@dataclass(frozen=True, slots=True, init=False)
class CoschedulingConfig:
    """Says that the tasks of a job start and restart together, and on which groups of hosts.

    With ``failure_domain="slice"``, the tasks of each slice do, and slices restart on their own.

    A group is a set of hosts with the same value of one attribute: the hosts of one slice, or of one rack. By default
    the job gets one whole slice. ``CoschedulingConfig(num_groups=2)`` is for two slices, ``CoschedulingConfig("rack")``
    for tasks without TPUs that must run in the same rack.

    Args:
        group_by: the attribute whose value the hosts of a group share. For TPUs it is the slice's name, which is the
            default; the option ``topology`` asks for parts of slices. For other tasks it is an attribute of your
            cluster, such as ``rack`` or ``zone``.
        num_groups: how many groups (slices, racks) the job needs: a number, or several of which any will do, such as
            ``[2, 4]``. Kept as an ascending tuple.

    Raises:
        InvalidSliceCountError: ``num_groups`` does not consist of distinct positive ints.
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


MOST_TASKS = 100_000
"""The largest number of tasks in one job, counted on the most slices that it can use."""
MOST_CONSTRAINTS = 100
"""The largest number of constraints in one job; also of preferences, tolerations and resources. The Controller compares
each with every host. One IN constraint has room for `MOST_VALUES` values."""
MOST_PREDECESSORS = 1_000
MOST_SPARES = 1_000
MOST_OF_A_RESOURCE = 9e14
"""Ray counts ten-thousandths in 64 bits."""


class SparePurpose(Enum):
    """Why slices are held ready for a running gang."""

    SPARE = "spare"  # the job's owner asked for them
    REPLACEMENT = "replacement"  # for a slice that is about to be lost
    GROWTH = "growth"  # the gang can use more slices


@dataclass(frozen=True, slots=True)
class SpareFor:
    """The job that slices are held ready for, and why."""

    job_id: str
    purpose: SparePurpose


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec:
    """The immutable specification of a job. Its tasks are called ``<job id>/task-<index>``.

    Values of subclasses, such as a `StrEnum`, are converted to the plain types.

    Args:
        job_id: unique in the cluster.
        name: the display name; the job's id if empty.
        owner: the id of the SlicePoolManager that submits the job and holds its slices.
        user: the user, for fair share.
        team: the team whose quota it uses; empty if it has no team, or none has been chosen yet. See
            `iris_ray.model.teams`.
        priority: its priority band.
        priority_reason: why it is in the band SYSTEM; None in others.
        device: the TPU type that it is written for, such as "v4-32"; None without TPU. It determines the number of
            replicas in a gang; the constraints determine the eligible hosts.
        replicas: tasks per group if coscheduled, otherwise all tasks.
        coscheduling: how tasks form a gang; None: each task is placed, fails and is retried independently.
        whole_groups: whether the job takes each group whole, with as many hosts and chips as the live nodes report;
            ``replicas`` and the chips in ``resources`` are then those that the rule for the type predicts.
        constraints: conditions that every worker must satisfy.
        preferences: conditions that workers should satisfy; the more, the better.
        tolerations: names of taints that the job tolerates.
        resources: the resources that one task takes on its worker, by Ray's names. A task that takes chips, or whose
            job names a device, takes all chips of its host, since libtpu allows only one gang on a host.
        max_retries_failure: further attempts of a gang after its own failures.
        max_retries_preemption: further attempts of a gang after lost hosts.
        max_task_failures: the number of failed attempts in the job's life, including retried ones, that the job
            survives. None: the job fails once a gang's retries are used up.
        after: the conditions on other jobs for this job to enter the queue, by their ids; see `After`.
        scheduling_timeout: seconds after entering the queue within which a task must have run; otherwise the job is
            unschedulable. None, or 0 and less (kept as None): no limit.
        max_runtime: seconds after the first task ran at which the job is ended, with a notice. None: no limit.
        stop_without_progress: the number of consecutive attempts without a new step after which the job fails. None: no
            limit.
        spares: slices to hold ready, in addition to the gang's own, as replacements for lost ones.
        grow_after: seconds that a gang runs on fewer slices than it can use before it moves to more, once they are
            free; after a loss it does not wait. "auto": once they have been free for as long as the move costs. None:
            it never moves.
        processes_per_host: the number of processes in each task of a gang on slices.
        failure_domain: "job": a coscheduled job is one gang. "slice": each of its slices is a gang, which is placed,
            fails and is retried independently.
        children: what happens to the jobs that its tasks submit when the tasks restart: they "end", or the next attempt
            "adopt"s them.
        task_placement: the placement of independent tasks without chips and GPUs: "spread" over as many hosts as
            possible, or "pack" onto as few as possible.
        group: the group of jobs that start together or not at all, or None.
        stored_secrets: names of the stored secrets whose values each attempt of the job gets.
        spare_for: set by the state on a job that only holds slices ready for another job's gang.
        notify: destinations of notifications about the job.
        may_evict: whether the job may evict lower bands. If not, it only precedes them in the queue.

    Raises:
        InvalidJobError: a value is invalid, or the job has too many tasks, spares, predecessors or constraints, or too
            many preferences, tolerations or resources.
        UnknownTPUTypeError: the device is not a TPU type.
    """

    job_id: str
    owner: str
    name: str = ""
    user: str = ""
    team: str = ""
    priority: PriorityBand = PriorityBand.INTERACTIVE
    priority_reason: str | None = None
    device: str | None = None
    replicas: int = 1
    coscheduling: CoschedulingConfig | None = None
    whole_groups: bool = False
    constraints: tuple[Constraint, ...] = ()
    preferences: tuple[Constraint, ...] = ()
    tolerations: tuple[str, ...] = ()
    resources: Mapping[str, float] = field(default_factory=dict)
    max_retries_failure: int = default_of("max_retries_failure", "IrisClient.submit")
    max_retries_preemption: int = default_of("max_retries_preemption", "IrisClient.submit")
    max_task_failures: int | None = None
    after: Mapping[str, str] = field(default_factory=dict)
    scheduling_timeout: float | None = None
    max_runtime: float | None = None
    stop_without_progress: int | None = None
    spares: int = 0
    grow_after: float | Literal["auto"] | None = default_of("grow_after")
    processes_per_host: int = default_of("processes_per_host")
    failure_domain: str = default_of("failure_domain")
    children: str = END
    task_placement: str = default_of("task_placement")
    group: GroupSpec | None = None
    stored_secrets: tuple[str, ...] = ()
    notify: tuple[str, ...] = ()
    spare_for: SpareFor | None = None
    may_evict: bool = True

    def __post_init__(self) -> None:
        for name in ("constraints", "preferences", "tolerations", "notify"):
            if isinstance(value := getattr(self, name), list):
                object.__setattr__(self, name, tuple(value))
        who = f"job {shown(self.name or self.job_id)}"  # users don't know a new job's id yet
        require_fields(f"{who}: ", self, _CHECKS, InvalidJobError)
        object.__setattr__(self, "after", After.conditions(self.after))
        _require_resources(who, self.resources)
        for name, kind in _PLAIN.items():
            object.__setattr__(self, name, _plain(who, kind, getattr(self, name), name))
        if self.job_id in self.after:
            raise InvalidJobError(f"{who}: after names the job itself; name jobs that were submitted before")
        if self.group is not None and self.job_id not in self.group.job_ids.values():
            raise InvalidJobError(f"{who}: group {shown(self.group.name)} has no job {self.job_id}; give one that has")
        _require_bounded(who, self)
        _require_gang(who, self)
        if self.scheduling_timeout is not None and self.scheduling_timeout <= 0:
            object.__setattr__(self, "scheduling_timeout", None)

    def __getstate__(self) -> list[object]:
        """Return the values of all fields, in one step: every record of a job has them."""
        return list(_values(self))

    def owned_by(self, owner: str) -> "JobSpec":
        """Return it with its pool's id. Its other fields are as they were checked, so nothing is checked again."""
        owned = copy(self)
        object.__setattr__(owned, "owner", owner)
        return owned

    @property
    def is_one_gang(self) -> bool:
        """Whether it is coscheduled, and all its tasks form one gang."""
        return self.coscheduling is not None and self.failure_domain == WHOLE_JOB

    @property
    def part(self) -> str | None:
        """The shape of the parts of slices on which its gangs run; None if they run on anything else."""
        return shape_of_attribute(self.coscheduling.group_by) if self.coscheduling else None

    @property
    def runs_once(self) -> bool:
        """Whether the job ends if a gang that ran loses its hosts or is evicted. Failures may still be retried."""
        return self.max_retries_preemption == 0

    @property
    def spreads(self) -> bool:
        """Whether its tasks are spread over as many hosts as possible."""
        several = self.coscheduling is None and self.replicas > 1 and self.task_placement == SPREAD
        return several and self.device is None and not accelerators(self.resources)

    @property
    def num_gangs(self) -> int:
        """The number of its gangs: one, one for each slice, or one for each task."""
        if self.coscheduling is None:
            return self.replicas
        return 1 if self.is_one_gang else max(self.coscheduling.num_groups)

    @property
    def groups_per_gang(self) -> tuple[int, ...]:
        """The group counts that each of its gangs can use, ascending."""
        return self.coscheduling.num_groups if self.coscheduling and self.is_one_gang else (1,)

    @property
    def most_tasks_per_gang(self) -> int:
        """The number of tasks in each of its gangs on the largest group count that it can use."""
        return self.replicas * max(self.groups_per_gang) if self.coscheduling else 1

    @property
    def most_tasks(self) -> int:
        """The number of its tasks on the largest group count that it can use."""
        return self.num_gangs * self.most_tasks_per_gang

    @property
    def requirement(self) -> Requirement:
        """The requirement that each group of workers must meet for its gangs."""
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


def require_reason(band: PriorityBand, reason: str | None) -> None:
    """Refuse a job of the band SYSTEM without a reason.

    Raises:
        InvalidJobError: it has none.
    """
    if band is PriorityBand.SYSTEM and not reason:
        raise InvalidJobError(
            "a job in the band system needs a reason, which everybody sees: give priority_reason (--priority-reason),"
            " or another band"
        )


OPTIONS_OF_A_JOB = tuple(name for name in OPTIONS if name in JobSpec.__slots__)
"""The options of a run that are fields of a `JobSpec`, and so reach the Controller."""
FIELDS_OF_A_JOB = JobSpec.__slots__
"""Processes compare these names before they exchange a `JobSpec`, and records carry a checksum of them."""
_values = attrgetter(*FIELDS_OF_A_JOB)


def _are_secrets(value: object) -> bool:
    return isinstance(value, tuple) and len(value) <= MOST_STORED_NAMES and all(map(is_secret_name, value))


_A_USER = "a name of letters, digits, '.', '_', '-', '@' and '+' that begins with a letter or digit (IRIS_USER sets it)"
_CHECKS: Mapping[str, Check] = {
    "job_id": Holds(is_job_id, "a name of letters, digits, '.', '_' and '-' that begins with a letter or digit"),
    "owner": Holds(is_name, "the id of the pool that runs it"),
    "name": Holds(str, "a str"),
    "user": Holds(lambda user: user == "" or is_user(user), _A_USER),
    "device": Holds(str, 'a TPU type, such as "v4-32"', or_none=True),
    "replicas": Whole(1),
    "coscheduling": Holds(CoschedulingConfig, "a CoschedulingConfig", or_none=True),
    "whole_groups": FLAG,
    "resources": Holds(Mapping, "amounts by name, such as {'CPU': 1}"),
    "group": Holds(GroupSpec, "a GroupSpec", or_none=True),
    "stored_secrets": Holds(_are_secrets, "names of secrets in the cluster's store"),
    "may_evict": FLAG,
    **{name: OPTIONS[name].check for name in OPTIONS_OF_A_JOB},
    "priority": OneOf(tuple(PriorityBand)),
    "children": OneOf((END, ADOPT)),
}

_ALREADY_PLAIN = {"priority", "coscheduling", "constraints", "preferences", "spare_for"}
"""Fields with an enum, or with objects whose own constructors convert their values."""
_PLAIN: Mapping[str, Any] = {
    **{name: kind for name, kind in get_type_hints(JobSpec).items() if name not in _ALREADY_PLAIN},
    "grow_after": float | str | None,  # its check refuses any other str
}
"""The types of the fields that a `JobSpec` converts to plain values."""


def _plain(who: str, kind: Any, value: object, name: str) -> Any:
    try:
        return plain(kind, value, name)
    except InvalidMessageError as error:
        raise InvalidJobError(f"{who}: {error}") from None


def _require_resources(who: str, resources: Mapping[str, float]) -> None:
    for resource, amount in resources.items():
        if not is_number(amount) or amount < 0:
            raise InvalidJobError(f"{who}: resources has {shown(amount)} of {resource}; give a number of 0 or more")
        if amount > MOST_OF_A_RESOURCE:
            raise InvalidJobError(f"{who}: resources has {amount!r} of {resource}, more than Ray can count")
        if resource == GPU and amount % 1:
            raise InvalidJobError(f"{who}: resources has {amount!r} of {GPU}; a task has whole GPUs to itself")


def _require_bounded(who: str, spec: JobSpec) -> None:
    """Refuse a job so large that it would occupy the Controller."""
    counts = {
        "tasks": (spec.most_tasks, MOST_TASKS),
        "spares": (spec.spares, MOST_SPARES),
        **{
            name: (len(getattr(spec, name)), MOST_CONSTRAINTS)
            for name in ("constraints", "preferences", "tolerations", "resources")
        },
        "predecessors": (len(spec.after), MOST_PREDECESSORS),
    }
    for name, (count, most) in counts.items():
        if count > most:
            instead = "name the values with one IN constraint" if name == "constraints" else "ask for fewer"
            raise InvalidJobError(f"{who}: {shown(count)} {name}, and the limit is {most:,}; {instead}")


def _require_gang(who: str, spec: JobSpec) -> None:
    config = None if spec.device is None else get_tpu_config(spec.device)
    if spec.stop_without_progress is not None and not spec.is_one_gang:
        raise InvalidJobError(
            f"{who}: stop_without_progress={spec.stop_without_progress} needs a job that is a single gang, and this one"
            f" is not; leave it out, and set max_retries_failure{_how_to_be_a_gang(spec)}"
        )
    if spec.processes_per_host > 1:
        if config is None or spec.coscheduling is None:
            raise InvalidJobError(
                f"{who}: processes_per_host={spec.processes_per_host} is for gangs on TPU slices, and this job has"
                f" none; leave it out{_how_to_be_a_gang(spec)}"
            )
        if config.chips_per_vm != CHIPS_PER_HOST:
            raise InvalidJobError(
                f"{who}: processes_per_host={spec.processes_per_host} needs hosts of {CHIPS_PER_HOST} chips, and those"
                f" of {config.name} have {config.chips_per_vm}"
            )
    if spec.failure_domain == EACH_SLICE:
        _require_one_slice_each(who, spec)
    if spec.coscheduling is None:
        if spec.spares:
            raise InvalidJobError(
                f"{who}: spares={spec.spares} is for gangs on slices, and this job has none; leave it"
                f" out{_how_to_be_a_gang(spec)}"
            )
        if spec.whole_groups:
            raise InvalidJobError(f"{who}: whole_groups without coscheduling; add coscheduling=CoschedulingConfig()")
        return
    group_by = spec.coscheduling.group_by
    if (shape := shape_of_attribute(group_by)) is not None:
        _require_parts(who, spec, config, shape)
        return
    if config is None:
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
    sizes = {config.vm_count, config.chip_count // 4} if config.chips_per_vm == 8 else {config.vm_count}
    # GKE splits a host with eight chips into two VMs.
    if spec.replicas not in sizes and not spec.whole_groups:
        raise InvalidJobError(
            f"{who}: {config.name} has {config.vm_count} hosts, so a gang on it has {config.vm_count} replicas per"
            f" slice, not {spec.replicas}; set replicas={config.vm_count}, or use num_groups for several slices"
        )


def _how_to_be_a_gang(spec: JobSpec) -> str:
    """Return what to give instead, for a job of independent tasks on slices of one host; "" for others."""
    if spec.device is None or spec.coscheduling is not None:
        return ""
    count = spec.replicas
    return f", or make its tasks a gang: coscheduling=CoschedulingConfig(num_groups={count}), --num-slices {count}"


def _require_parts(who: str, spec: JobSpec, config: TPUConfig | None, shape: str) -> None:
    """Refuse a gang on parts of slices that can't work."""
    if config is None:
        raise InvalidJobError(f"{who}: topology={shape!r} is for gangs on TPU slices; name a TPU type, such as v6e-16")
    require_shape(config, shape)
    if max(spec.groups_per_gang) > 1:
        raise InvalidTopologyError(
            f"{who}: num_slices={max(spec.groups_per_gang)} with topology={shape!r} would connect parts by MEGASCALE,"
            f" which is documented for whole slices only; with failure_domain={EACH_SLICE!r} each part is a gang and a"
            " JAX program of its own"
        )
    hosts = hosts_of_shape(shape)
    if spec.replicas != hosts or spec.whole_groups:
        raise InvalidJobError(f"{who}: a {shape} part has {hosts} hosts, so a gang on it has {hosts} replicas")


def _require_one_slice_each(who: str, spec: JobSpec) -> None:
    """Refuse options that are incompatible with one gang for each slice."""
    asked = f"{who}: failure_domain={EACH_SLICE!r}"
    if spec.coscheduling is None or not is_on_slices(spec.coscheduling.group_by) or spec.device is None:
        raise InvalidJobError(
            f"{asked} is for jobs on TPU slices, and this job has none; give a TPU type and a number of slices, or"
            " leave it out: tasks without slices are placed and retried one by one anyway"
        )
    if len(spec.coscheduling.num_groups) > 1:
        raise InvalidJobError(
            f"{asked} with {list(spec.coscheduling.num_groups)} slices; give the largest number: each slice starts as"
            " soon as there is one, and waits for no other"
        )
    if spec.spares:
        raise InvalidJobError(
            f"{asked} with spares={spec.spares}; only a gang on several slices has spares. Ask for one slice more: the"
            " others go on while one is away"
        )
