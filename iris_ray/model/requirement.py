"""What a gang asks of the workers that it runs on. Jobs that ask the same share one evaluation of the fleet."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field

from iris_ray.model.constraints import TAINT_PREFIX, Constraint, ConstraintOp
from iris_ray.model.workers import TPU, Worker, rounded


@dataclass(frozen=True, slots=True)
class Requirement:
    """Everything about a job that decides which groups of workers will do.

    Args:
        group_by: the attribute whose value the members of a group share; None: every worker is a group by itself.
        replicas: hosts that are needed of each group.
        whole_groups: take each group whole, however many hosts and chips the live nodes say it has.
        constraints: what every worker must satisfy.
        preferences: what is better satisfied.
        tolerated: attributes that do not keep the job away though they are taints.
        resources: what one task needs of its worker; sorted pairs.
        chips: whether tasks use chips. libtpu allows one process a host, so such a task takes all chips of its worker.
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
        return self._hash  # it is looked up for every job in every cycle

    def has_room(self, worker: Worker, taken: Mapping[str, float] | None = None, soon: bool = False) -> bool:
        """Whether one more task fits beside those that hold resources of the worker.

        Args:
            worker: where.
            taken: what else is taken of it.
            soon: whether tasks that are over count as gone.
        """
        free = worker.free_soon() if soon else worker.free
        if self.chips and free.get(TPU, 0.0) != worker.resources.get(TPU, 0.0):
            return False
        if taken is None:
            return self.fits_into(free)
        if self.chips and taken.get(TPU):
            return False
        return all(rounded(free.get(r, 0.0) - taken.get(r, 0.0)) >= need for r, need in self.resources)

    def lack(self, worker: Worker, taken: Mapping[str, float] | None = None) -> float:
        """How much of what a task needs is missing: 0 nothing, 1 all of one thing."""
        taken = taken or {}
        missing = [1 - rounded(worker.free.get(r, 0.0) - taken.get(r, 0.0)) / need for r, need in self.resources]
        if self.chips and (taken.get(TPU) or not worker.chips_idle):
            missing.append(1.0)
        return max(0.0, *missing) if missing else 0.0

    def fits_into(self, free: Mapping[str, float]) -> bool:
        """Whether one more task fits, chips aside."""
        for resource, need in self.resources:  # noqa: SIM110 — half the time of all() with a generator
            if free.get(resource, 0.0) < need:
                return False
        return True

    def demand(self, worker: Worker) -> dict[str, float]:
        """What one task takes of this worker."""
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
    """A requirement; equal ones are the same object.

    Args:
        tolerations: names of taints, without the prefix. A constraint that asks for a taint tolerates it, too.
        uses_device: whether tasks use chips though ``resources`` may name none.
    """
    asked_for = {c.key for c in constraints if c.op is not ConstraintOp.NOT_EXISTS}
    needs = {r: n for r, n in resources.items() if n > 0}
    chips = TPU in needs or whole_groups or uses_device
    if chips:  # a host without any is no use; however many it has are enough for a whole group
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
