"""What a job asks for."""

from collections.abc import Sequence

from iris_ray.model.job_spec import JobSpec, SparePurpose
from iris_ray.model.jobs import Job
from iris_ray.model.workers import TPU


def counts(job: Job) -> tuple[int, ...]:
    return job.spec.coscheduling.num_groups if job.spec.coscheduling else (1,)


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
