"""What a job asks for, what constraints mean, and which workers a task could run on."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from iris_ray.model.constraints import Attributes, Constraint, ConstraintOp, Scalar
from iris_ray.model.job_spec import JobSpec, SparePurpose
from iris_ray.model.jobs import Job
from iris_ray.model.workers import TPU, TPU_NAME, TPU_VM_COUNT, Worker

Op = ConstraintOp


def kind(value: Scalar) -> str:
    return "bool" if isinstance(value, bool) else "text" if isinstance(value, str) else "number"


def satisfies(constraint: Constraint, attributes: Attributes) -> bool:
    """Raises TypeError if the two can't be ordered."""
    if constraint.key not in attributes:
        return constraint.op is Op.NOT_EXISTS
    if constraint.op in (Op.EXISTS, Op.NOT_EXISTS):
        return constraint.op is Op.EXISTS
    have: Any = attributes[constraint.key].value
    if isinstance(constraint.value, tuple):  # IN
        return any(kind(have) == kind(asked.value) and have == asked.value for asked in constraint.value)
    assert constraint.value is not None
    asked: Any = constraint.value.value
    equal = kind(have) == kind(asked) and have == asked
    if constraint.op in (Op.EQ, Op.NE):
        return equal == (constraint.op is Op.EQ)
    if kind(have) != kind(asked) or kind(have) == "bool":
        raise TypeError(f"{have!r} and {asked!r} have no order")
    return {Op.GT: have > asked, Op.GE: have >= asked, Op.LT: have < asked, Op.LE: have <= asked}[constraint.op]


def is_an_error(constraint: Constraint, attributes: Attributes) -> bool:
    try:
        satisfies(constraint, attributes)
    except TypeError:
        return True
    return False


def is_hopeless(constraint: Constraint, all_of_them: tuple[Constraint, ...], workers: list[Worker]) -> bool:
    """Whether it can't be evaluated on any of the workers that have the attribute and satisfy the other constraints."""
    others = [other for other in all_of_them if other is not constraint]
    having = [
        worker
        for worker in workers
        if constraint.key in worker.attributes
        and all(is_an_error(other, worker.attributes) or satisfies(other, worker.attributes) for other in others)
    ]
    return bool(having) and all(is_an_error(constraint, worker.attributes) for worker in having)


def is_met(preference: Constraint, hosts: list[Worker]) -> bool:
    """What can't be evaluated is not met."""
    return not any(is_an_error(preference, w.attributes) or not satisfies(preference, w.attributes) for w in hosts)


def counts(job: Job) -> tuple[int, ...]:
    return job.spec.coscheduling.num_groups if job.spec.coscheduling and len(job.gangs) == 1 else (1,)


def is_extra(job: Job) -> bool:
    """Whether its owner can do without the hosts that it holds."""
    spec = job.spec
    return job.yields or (spec.spare_for is not None and spec.spare_for.purpose is not SparePurpose.REPLACEMENT)


def oldest(jobs: Sequence[Job], user: str) -> int:
    return min(job.number for job in jobs if job.spec.user == user)


def uses_chips(spec: JobSpec) -> bool:
    return spec.whole_groups or spec.device is not None or spec.resources.get(TPU, 0.0) > 0


def needs(spec: JobSpec) -> dict[str, float]:
    """What a task needs at least; of a slice that is taken whole, any number of chips is enough."""
    needed = {r: n for r, n in spec.resources.items() if n > 0}
    if uses_chips(spec):
        needed[TPU] = 1.0 if spec.whole_groups else max(1.0, needed.get(TPU, 0.0))
    return needed


def value_of(worker: Worker, key: str) -> Scalar | None:
    return worker.attributes[key].value if key in worker.attributes else None


def place(worker: Worker) -> tuple[str, int, str]:
    number = -1 if worker.host_index is None else worker.host_index
    return str(value_of(worker, TPU_NAME) or ""), number, worker.node_id


def is_complete(hosts: list[Worker]) -> bool:
    sizes = {size for worker in hosts if (size := value_of(worker, TPU_VM_COUNT)) is not None} or {len(hosts)}
    numbers = {worker.host_index for worker in hosts}
    return sizes == {len(hosts)} and numbers == set(range(len(hosts)))


def suits(spec: JobSpec, worker: Worker) -> bool:
    """Whether a task could run on the worker if it were idle."""
    named = {constraint.key for constraint in spec.constraints if constraint.op is not ConstraintOp.NOT_EXISTS}
    tolerated = named | {f"taint:{name}" for name in spec.tolerations}
    taints = {key for key in worker.attributes if key.startswith("taint:")}
    matches = all(satisfies(constraint, worker.attributes) for constraint in spec.constraints)
    return matches and taints <= tolerated and all(worker.resources.get(r, 0.0) >= n for r, n in needs(spec).items())


def lack(spec: JobSpec, worker: Worker, free: Counter[str]) -> float:
    """How much of what a task needs is missing: 0 nothing, 1 (of) one thing all."""
    chips_in_use = uses_chips(spec) and free[TPU] != worker.resources.get(TPU, 0.0)
    return max([float(chips_in_use), *(1 - round(free[r], 4) / n for r, n in needs(spec).items()), 0.0])
