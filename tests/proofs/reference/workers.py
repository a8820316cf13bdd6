"""What workers are, alone and together, and which of them a task could run on."""

from collections import Counter

from iris_ray.model.constraints import ConstraintOp, Scalar
from iris_ray.model.job_spec import JobSpec
from iris_ray.model.workers import TPU, TPU_NAME, TPU_VM_COUNT, Worker
from tests.proofs.reference.constraints import satisfies
from tests.proofs.reference.jobs import needs, uses_chips


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
