"""Translates a TPU type and a `ResourceSpec` into a job's demands on its hosts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from iris_ray.errors import InvalidJobError, InvalidTopologyError
from iris_ray.model.checks import shown
from iris_ray.model.constraints import AttributeValue, Constraint, ConstraintOp
from iris_ray.model.job_spec import CoschedulingConfig
from iris_ray.model.parts import hosts_of_shape, part_attribute, require_shape
from iris_ray.model.requirement import BYTES_PER_GB, ResourceSpec
from iris_ray.model.topology import TPUConfig
from iris_ray.model.workers import GPU, TPU, TPU_NAME, TPU_TOPOLOGY

_OFF_SLICES = Constraint(TPU_NAME, ConstraintOp.NOT_EXISTS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The part of a `JobSpec` that its TPU type and `ResourceSpec` decide.

    Attributes:
        device: the TPU type, or None without TPU.
        replicas, resources, constraints, preferences, coscheduling, whole_groups: as in `JobSpec`.
    """

    device: TPUConfig | None
    replicas: int
    resources: Mapping[str, float]
    constraints: tuple[Constraint, ...] = ()
    preferences: tuple[Constraint, ...] = ()
    coscheduling: CoschedulingConfig | None = None
    whole_groups: bool = False

    def on_parts(self, topology: str | None) -> "Placement":
        """Return the placement on parts of slices of this shape; the same placement if it is None.

        Raises:
            InvalidTopologyError: slices of the type have no such parts, or the job does not run on slices.
        """
        if topology is None:
            return self
        if self.device is None:
            raise InvalidTopologyError(
                f"topology is {shown(topology)}, which is for parts of TPU slices, and the job names no TPU type; name"
                " one, such as v6e-16, or leave topology out"
            )
        shape = require_shape(self.device, topology)
        assert self.coscheduling is not None, "types with several hosts have gangs"
        return replace(
            self,
            replicas=hosts_of_shape(shape),
            coscheduling=CoschedulingConfig(part_attribute(shape), self.coscheduling.num_groups),
            whole_groups=False,
        )


def on_slices(
    device: TPUConfig, num_slices: int | Sequence[int], amounts: Mapping[str, float] | None = None
) -> Placement:
    """Return the placement of a gang on whole slices. Hosts as live nodes report them win over the rule for the type.

    Args:
        device: the TPU type.
        num_slices: how many slices, or the numbers of slices that the job can use.
        amounts: resources that each task takes of its host besides the chips, by Ray's names.

    Raises:
        InvalidSliceCountError: ``num_slices`` makes no sense.
    """
    return Placement(
        device=device,
        replicas=device.vm_count,
        resources={TPU: float(device.chips_per_vm), **(amounts or {})},
        constraints=(_of_type(device),),
        coscheduling=CoschedulingConfig(num_groups=num_slices),
        whole_groups=True,
    )


def placement_of(need: ResourceSpec, coscheduling: CoschedulingConfig | None) -> Placement:
    """Return the placement of a job of any kind.

    Raises:
        InvalidJobError: the parts don't go together.
    """
    device = need.device
    if coscheduling is not None and not isinstance(coscheduling, CoschedulingConfig):
        raise InvalidJobError(f"coscheduling is {coscheduling!r}; give a CoschedulingConfig, or leave it out")
    if device is None:
        if coscheduling is not None and coscheduling.group_by == TPU_NAME:
            raise InvalidJobError(
                'coscheduling by slice needs a TPU type; say which, for example device=tpu_device("v4-32"), or group'
                ' other hosts by an attribute of theirs, for example coscheduling=CoschedulingConfig("rack")'
            )
        return _without_tpu(need, coscheduling)
    if coscheduling is None and device.vm_count == 1:
        return Placement(
            device=device,
            replicas=need.replicas or 1,
            resources={TPU: float(device.chips_per_vm), **_amounts(need)},
            constraints=(_of_type(device),),
        )
    coscheduling = coscheduling or CoschedulingConfig()
    if coscheduling.group_by != TPU_NAME:
        raise InvalidJobError(
            f"group_by is {coscheduling.group_by!r}, but gangs on TPU hosts run on slices: leave it out. To have all"
            f" slices alike, use a constraint: Constraint({coscheduling.group_by!r}, ConstraintOp.EQ, …),"
            f" --constraint {coscheduling.group_by}=…"
        )
    if need.replicas not in (None, device.vm_count):
        raise InvalidJobError(
            f"replicas is {need.replicas}, but a gang has one task on each of the {device.vm_count} hosts of a"
            f" {device.name} slice; leave replicas out, and ask for several slices:"
            " coscheduling=CoschedulingConfig(num_groups=…), --num-slices"
        )
    return on_slices(device, coscheduling.num_groups, _amounts(need))


def _without_tpu(need: ResourceSpec, coscheduling: CoschedulingConfig | None) -> Placement:
    return Placement(
        device=None,
        replicas=need.replicas or 1,
        resources=_amounts(need) or {"CPU": 1.0},
        preferences=(_OFF_SLICES,),  # another job may need a slice whole
        coscheduling=coscheduling,
    )


def _amounts(need: ResourceSpec) -> dict[str, float]:
    amounts = {"CPU": float(need.cpu), "memory": need.memory_gb * BYTES_PER_GB, GPU: float(need.gpu)}
    return {resource: amount for resource, amount in amounts.items() if amount}


def _of_type(device: TPUConfig) -> Constraint:
    return Constraint(TPU_TOPOLOGY, ConstraintOp.EQ, AttributeValue(device.name))
