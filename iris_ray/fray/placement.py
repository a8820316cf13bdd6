"""From Fray's `ResourceConfig` to what iris_ray places."""

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from iris_ray.client.placement import Placement, placement_of
from iris_ray.errors import InvalidJobError, InvalidRequestError
from iris_ray.model.constraints import Constraint, ConstraintOp
from iris_ray.model.job_spec import CoschedulingConfig
from iris_ray.model.resources import BYTES_PER_GB, ResourceSpec
from iris_ray.model.topology import TPUConfig, get_tpu_config
from iris_ray.model.workers import TPU_TOPOLOGY

if TYPE_CHECKING:
    from fray.types import ResourceConfig

ANY_REGION = "*"
"""Fray's word for "in whatever region"."""
ACCELERATOR_TYPE = "ray.io/accelerator-type"
TOPOLOGY = "ray.io/tpu-topology"
_NOT_PREEMPTIBLE = Constraint("preemptible", ConstraintOp.EQ, False)
"""A preference: most clusters don't say it of their hosts, and Marin's coordinators all ask for it."""
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgtp]?)(?:i?b|bytes?)?", re.IGNORECASE)
_POWERS: dict[str, int] = {unit: 1024**power for power, unit in enumerate(("", "k", "m", "g", "t", "p"))}


def size_in_bytes(text: str) -> float:
    """Return an amount of memory as Fray reads it: all units are binary, so "4g", "4gb" and "4GiB" are 4 × 2³⁰.

    Raises:
        InvalidRequestError: it is not an amount.
    """
    found = _SIZE.fullmatch(text.strip()) if isinstance(text, str) else None
    if found is None:
        raise InvalidRequestError(f"{text!r} is not an amount of memory; give a str such as '4g' or '512m'")
    return float(found[1]) * _POWERS[found[2].lower()]


def fray_placement(resources: "ResourceConfig", replicas: int, tpu_gang: bool) -> Placement:
    """Return where a job's tasks go.

    Args:
        resources: what each task takes.
        replicas: how many tasks; on TPUs those of all slices together, as Fray counts them.
        tpu_gang: whether tasks on TPUs are one gang even if each slice has a single VM. On larger slices they always
            are.

    Raises:
        InvalidRequestError: the parts make no sense, or not together.
    """
    device = resources.device
    amounts: dict[str, Any] = {"cpu": resources.cpu, "memory_gb": size_in_bytes(resources.ram) / BYTES_PER_GB}
    if device.kind != "tpu":
        gpu = device.chip_count() if device.kind == "gpu" else 0
        placed = placement_of(ResourceSpec(**amounts, replicas=replicas, gpu=gpu), None)
    else:
        placed = _on_slices(get_tpu_config(device.variant), replicas, tpu_gang, amounts)
    of_device = _of_device(resources)
    same = {constraint.key for constraint in of_device}
    kept = tuple(constraint for constraint in placed.constraints if constraint.key not in same)
    preferences = placed.preferences if resources.preemptible else (_NOT_PREEMPTIBLE, *placed.preferences)
    return replace(placed, constraints=(*kept, *of_device, *_of_place(resources)), preferences=preferences)


def _on_slices(tpu: TPUConfig, replicas: int, gang: bool, amounts: dict[str, Any]) -> Placement:
    slices, left = divmod(replicas, tpu.vm_count)
    if left or slices < 1:
        raise InvalidJobError(
            f"replicas is {replicas}, but every {tpu.name} slice has {tpu.vm_count} VMs with one task each; give"
            f" ResourceConfig.with_tpu({tpu.name!r}, slice_count=…), which counts them, or a multiple of {tpu.vm_count}"
        )
    if tpu.vm_count == 1 and (slices == 1 or not gang):
        return placement_of(ResourceSpec(**amounts, replicas=replicas, device=tpu), None)
    return placement_of(ResourceSpec(**amounts, device=tpu), CoschedulingConfig(num_groups=slices))


def _of_device(resources: "ResourceConfig") -> tuple[Constraint, ...]:
    """The types that will do, the first one and its alternatives, and the shape of the slice."""
    device, others = resources.device, tuple(resources.device_alternatives or ())
    if device.kind == "tpu":
        types = [get_tpu_config(variant) for variant in (device.variant, *others)]
        if len({(tpu.vm_count, tpu.chips_per_vm) for tpu in types}) > 1:
            raise InvalidJobError(
                f"{', '.join(tpu.name for tpu in types)} can't stand in for each other: the numbers of their VMs, or of"
                " chips in a VM, differ"
            )
        shape = getattr(device, "topology", None)
        of_shape = (Constraint(TOPOLOGY, ConstraintOp.EQ, shape),) if shape else ()
        return (Constraint(TPU_TOPOLOGY, ConstraintOp.IN, [tpu.name for tpu in types]), *of_shape)
    if device.kind == "gpu" and device.variant != "auto":
        return (Constraint(ACCELERATOR_TYPE, ConstraintOp.IN, [device.variant, *others]),)
    return ()


def _of_place(resources: "ResourceConfig") -> tuple[Constraint, ...]:
    """The region and the zone, by the names that operators give as labels."""
    found = []
    regions = list(resources.regions or ())
    if ANY_REGION in regions and len(regions) > 1:
        raise InvalidRequestError(f"regions is {regions}: give regions, or {ANY_REGION!r} alone for any")
    if regions and ANY_REGION not in regions:
        found.append(Constraint("region", ConstraintOp.IN, regions))
    if resources.zone:
        found.append(Constraint("zone", ConstraintOp.EQ, resources.zone))
    return tuple(found)
