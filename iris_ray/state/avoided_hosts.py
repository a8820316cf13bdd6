"""Avoided hosts: where launches of a job, or a disk, have failed, the job is not tried again for a while.

The cause may be the host or the job, and the pair of both is all that is known. So the host stays open to other jobs,
and the job looks for other hosts. If there are none, it tries the same ones: the scheduler sees to that.
"""

from collections.abc import Iterable, Iterator

from iris_ray.model.jobs import Gang, Job
from iris_ray.model.workers import TPU_NAME
from iris_ray.state.fleet import Fleet

AVOIDED_S = 300.0
"""How long hosts are avoided after the job's latest launch that failed."""
MOST_AVOIDED = 256
"""How many hosts a job avoids at most, those where launches failed last. Of a slice taken whole one host is enough."""


def avoid(job: Job, gang: Gang, groups: Iterable[str], fleet: Fleet, now: float) -> None:
    """Have a job avoid the hosts of an attempt that could not be started.

    Args:
        job, gang: whose attempt; the gang still has its hosts.
        groups: names of the groups in which it failed, or ids of the groups' first tasks. If the gang has none of them,
            it may be any of its groups.
        fleet: knows how large slices are.
        now: seconds on the clock of the events.
    """
    per_group, named = len(gang.tasks) // len(gang.groups), set(groups)
    first_tasks = dict(zip(gang.groups, gang.tasks[::per_group], strict=True))
    places = {name for name, task in first_tasks.items() if name in named or task.task_id in named}
    _add(job, dict.fromkeys(_hosts(job, gang, places or set(gang.groups), fleet)), now)


def avoid_host(job: Job, node_id: str, now: float) -> None:
    """Have a job avoid one host, on which its task has met a disk that is full or faulty."""
    _add(job, {node_id: None}, now)


def forgive(job: Job, gang: Gang) -> None:
    """Have a job no longer avoid the hosts of a gang that runs."""
    if job.avoided:
        here = {task.node_id for task in gang.tasks}
        job.avoided = tuple(node_id for node_id in job.avoided if node_id not in here)


def _add(job: Job, hosts: dict[str, None], now: float) -> None:
    earlier = (node_id for node_id in avoided_by(job, now) if node_id not in hosts)
    job.avoided = (*earlier, *hosts)[-MOST_AVOIDED:]
    job.avoided_until = now + AVOIDED_S


def avoided_by(job: Job, now: float) -> tuple[str, ...]:
    """Return the ids of the hosts that a job avoids now."""
    return job.avoided if now < job.avoided_until else ()


def _hosts(job: Job, gang: Gang, groups: set[str], fleet: Fleet) -> Iterator[str]:
    per_group, grouped = len(gang.tasks) // len(gang.groups), job.spec.coscheduling
    for number, name in enumerate(gang.groups):
        if name in groups:
            tasks = gang.tasks[number * per_group : (number + 1) * per_group]
            is_whole = grouped and grouped.group_by == TPU_NAME and len(fleet.slice_workers(name)) <= per_group
            yield from (task.node_id or "" for task in (tasks[:1] if is_whole else tasks))
