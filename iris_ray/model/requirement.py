"""Requirements of tasks on their hosts: the scheduler's form (`Requirement`) and the user's form (`ResourceSpec`)."""

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from iris_ray.errors import InvalidRequestError
from iris_ray.model.checks import Check, Holds, Number, Whole, require_fields
from iris_ray.model.constraints import TAINT_PREFIX, Constraint, ConstraintOp
from iris_ray.model.topology import TPUConfig, get_tpu_config
from iris_ray.model.workers import TPU, Worker, rounded, units


@dataclass(frozen=True, slots=True)
class Requirement:
    """All properties of a job that determine the groups of workers that suit it.

    Args:
        group_by: the attribute whose value the members of a group share; None: every worker is its own group.
        replicas: the number of hosts that the gang needs in each group.
        whole_groups: whether to take each group whole, with as many hosts and chips as its live nodes report.
        constraints: conditions that every worker must satisfy.
        preferences: conditions that the scheduler satisfies if it can.
        tolerated: keys of the taints that the job tolerates.
        resources: the resources that one task needs on its worker, as sorted pairs.
        chips: whether tasks use chips. libtpu allows one gang per host, so each task takes all chips of its host.
    """

    group_by: str | None
    replicas: int
    whole_groups: bool
    constraints: tuple[Constraint, ...]
    preferences: tuple[Constraint, ...]
    tolerated: frozenset[str]
    resources: tuple[tuple[str, float], ...]
    chips: bool
    _hash: int = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        parts = (self.group_by, self.replicas, self.whole_groups, self.constraints, self.preferences, self.resources)
        object.__setattr__(self, "_hash", hash(parts))

    def __hash__(self) -> int:
        return self._hash  # cached, because every cycle needs it for every job

    @property
    def shape(self) -> "Requirement":
        """This requirement without resources and preferences.

        Constraints and taints apply to tasks of any size, and preferences only order the free groups.
        """
        return _shape_of(self)

    def has_room(self, worker: Worker, taken: Mapping[str, float] | None = None, soon: float | None = None) -> bool:
        """Return whether one more task fits on a worker.

        Args:
            worker: the worker.
            taken: resources that are taken in addition to those of the worker's occupants.
            soon: the current time, to count resources of ended tasks as free (see `Worker.free_soon`); None not to.
        """
        free: Mapping[str, float] = worker.free if soon is None else worker.free_soon(soon)
        idle = worker.chips_idle if soon is None else free.get(TPU, 0.0) == worker.resources.get(TPU, 0.0)
        if self.chips and not idle:
            return False
        if taken is None:
            return self.fits_into(free)
        if self.chips and taken.get(TPU):
            return False
        return all(rounded(free.get(r, 0.0) - taken.get(r, 0.0)) >= need for r, need in self.resources)

    def most_beside(self, worker: Worker, taken: Mapping[str, float]) -> float:
        """Return how many more tasks fit on a worker, given resources that are taken in addition to its occupants'."""
        if self.chips:
            return float(self.has_room(worker, taken))
        left = ((worker.free.get(r, 0.0) - taken.get(r, 0.0), need) for r, need in self.resources)
        return min((units(amount) // units(need) for amount, need in left if units(need)), default=math.inf)

    def fits_beside(self, worker: Worker, held: Mapping[str, float]) -> bool:
        """Return whether a task would fit on a worker if only these resources were taken there."""
        if self.chips and held.get(TPU):
            return False
        return all(rounded(worker.resources.get(r, 0.0) - held.get(r, 0.0)) >= need for r, need in self.resources)

    def shortfall(self, worker: Worker, taken: Mapping[str, float] | None = None) -> float:
        """Return the missing share, from 0 to 1, of the resource that a task lacks most on a worker."""
        taken = taken or {}
        if self.chips and (taken.get(TPU) or not worker.chips_idle):
            return 1.0
        missing = [1 - rounded(worker.free.get(r, 0.0) - taken.get(r, 0.0)) / need for r, need in self.resources]
        return max(0.0, *missing) if missing else 0.0

    def fits_into(self, free: Mapping[str, float]) -> bool:
        """Return whether these free resources suffice for one task. Does not check that chips are idle."""
        for resource, need in self.resources:  # noqa: SIM110 — faster than all() with a generator
            if free.get(resource, 0.0) < need:
                return False
        return True

    def demand(self, worker: Worker) -> dict[str, float]:
        """Return the resources that one task takes on a worker."""
        demand = dict(self.resources)
        if self.chips:
            demand[TPU] = worker.resources.get(TPU, 0.0)
        return demand


def make_requirement(
    group_by: str | None,
    replicas: int,
    whole_groups: bool,
    constraints: tuple[Constraint, ...],
    preferences: tuple[Constraint, ...],
    tolerations: tuple[str, ...],
    resources: Mapping[str, float],
    uses_device: bool,
) -> Requirement:
    """Make a requirement. Equal requirements are the same object.

    Args:
        tolerations: names of taints, without the prefix. A constraint that asks for a taint also tolerates it.
        uses_device: whether tasks use chips even if ``resources`` has none.
    """
    asked_for = {c.key for c in constraints if c.op is not ConstraintOp.NOT_EXISTS}
    needs = {r: n for r, n in resources.items() if n > 0}
    chips = TPU in needs or whole_groups or uses_device
    if chips:  # at least one chip per host; a whole group is taken with all its chips
        needs[TPU] = 1.0 if whole_groups else max(1.0, needs.get(TPU, 0.0))
    return _same(
        Requirement(
            group_by,
            replicas,
            whole_groups,
            constraints,
            preferences,
            frozenset(asked_for | {TAINT_PREFIX + name for name in tolerations}),
            tuple(sorted(needs.items())),
            chips=chips,
        )
    )


@functools.lru_cache(maxsize=10_000)
def _same(requirement: Requirement) -> Requirement:
    return requirement


@functools.lru_cache(maxsize=50_000)
def _shape_of(requirement: Requirement) -> Requirement:
    return _same(replace(requirement, preferences=(), resources=()))


# -- resources ---------------------------------------------------------------------------------------------------------

BYTES_PER_GB = 10**9


def tpu_device(tpu_type: str) -> TPUConfig:
    """Return the device for a TPU type, such as ``tpu_device("v4-32")``, for use in a `ResourceSpec`.

    Raises:
        UnknownTPUTypeError: there is no such type; the message has the nearest types.
    """
    return get_tpu_config(tpu_type)


_CHECKS: Mapping[str, Check] = {
    "cpu": Number(),
    "memory_gb": Number(),
    "gpu": Whole(),
    "replicas": Whole(1, or_none=True),
    "device": Holds(TPUConfig, 'tpu_device("v4-32")', or_none=True),
}


@dataclass(frozen=True, slots=True)
class ResourceSpec:
    """The resources that each task of a job takes on its host.

    Args:
        cpu: CPUs, as Ray counts them. One by default, if ``memory_gb``, ``gpu`` and ``device`` are not given either.
        memory_gb: memory in gigabytes (10^9 bytes).
        replicas: the number of tasks, for a gang in each group; one by default. On slices of several hosts, and on all
            slices with ``coscheduling``, it must be the number of a slice's hosts, which is the default there.
        device: the TPU type, of which each task has all chips of its host, or shares them with the other processes of
            its job there (``processes_per_host``); None for tasks without TPU.
        gpu: GPUs for the task's exclusive use, listed in ``CUDA_VISIBLE_DEVICES``. Not with a TPU type.

    Raises:
        InvalidRequestError: an amount is invalid; the message names it.
    """

    cpu: float = 0.0
    memory_gb: float = 0.0
    replicas: int | None = None
    device: TPUConfig | None = None
    gpu: int = 0

    def __post_init__(self) -> None:
        require_fields("", self, _CHECKS)
        if self.device is not None and self.gpu:
            raise InvalidRequestError(f"gpu is {self.gpu}, but the hosts of a {self.device.name} slice have no GPUs")
