"""Invariants of the Controller's state after every event. Tests check them, and the Controller after a failed event."""

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import replace

from iris_ray.model.jobs import ATTEMPTS_KEPT, Allocation, Gang, Job
from iris_ray.model.lifecycle import ACTIVE, AttemptId, TaskState
from iris_ray.model.parts import is_on_slices
from iris_ray.model.workers import Worker
from iris_ray.state.fleet import Fleet
from iris_ray.state.waiting_jobs import WaitingJobs

Allocations = Mapping[str, Mapping[AttemptId, Allocation]]


def check_state(
    jobs: Mapping[str, Job],
    fleet: Fleet,
    usage: Mapping[str, Mapping[str, float]],
    allocations: Allocations,
    pending: WaitingJobs,
    finished: Collection[str],
) -> None:
    """Raise AssertionError if an invariant is broken.

    ``usage`` has the amounts that each user's gangs hold, ``allocations`` the resources of each job's attempts,
    ``pending`` the jobs with waiting gangs, and ``finished`` the ids of the finished jobs.
    """
    _check_usage(jobs, usage, allocations)
    for job_id, job in jobs.items():
        over = job.state.finished
        assert (job_id in finished) == over == (job.over is not None), f"{job_id}: finished or not?"
        _check_counts(job)
        waiting = [] if over else [i for i, gang in enumerate(job.gangs) if gang.pending]
        assert sorted(job.pending) == waiting, f"{job_id}: the queue has {list(job.pending)} of it, not {waiting}"
        held_back = job.awaits or (job.forms_group and not job.members)
        assert (job in pending) == bool(waiting and not held_back), f"{job_id}: in the queue or not?"
        assert job.forms_group or not job.members, f"{job_id}: it stands for a group that has started"
        for gang in job.gangs:
            _check_gang(job, gang, fleet)
    for worker in fleet.workers.values():
        _check_worker(worker, jobs, allocations)
    pending.check()
    fleet.check()


def _check_usage(jobs: Mapping[str, Job], usage: Mapping[str, Mapping[str, float]], allocations: Allocations) -> None:
    off = {user: Counter(held) for user, held in usage.items()}
    for job_id, held in allocations.items():
        assert held, f"{job_id}: an empty entry without allocations"
        for allocation in held.values():
            for _, _, demand in allocation:
                off.setdefault(jobs[job_id].spec.user, Counter()).subtract(demand)
    for user, amounts in off.items():
        assert all(abs(amount) < 1e-6 for amount in amounts.values()), f"usage of {user} is off by {amounts}"


def _check_counts(job: Job) -> None:
    who = job.spec.job_id
    assert job.counts == Counter(task.state for task in job.tasks), f"{who}: counts are off"
    assert [task.index for task in job.tasks] == list(range(job.size)), f"{who}: its tasks are numbered wrongly"
    assert [gang.position for gang in job.gangs] == list(range(len(job.gangs))), f"{who}: gangs of unequal size"
    assert job.failures == sum(gang.failures for gang in job.gangs), f"{who}: failures are off"
    assert job.preemptions == sum(gang.preemptions for gang in job.gangs), f"{who}: preemptions are off"
    assert job.evictions == sum(gang.evictions for gang in job.gangs), f"{who}: evictions are off"
    for gang in job.gangs:
        succeeded = sum(task.state is TaskState.SUCCEEDED for task in gang.tasks)
        assert gang.succeeded == succeeded, f"{who}: successes are off"


def _check_gang(job: Job, gang: Gang, fleet: Fleet) -> None:
    who = job.spec.job_id
    _check_history(gang, who)
    assert gang.pending == all(task.state is TaskState.PENDING for task in gang.tasks), f"{who}: gang is split"
    assert not (job.state.finished and (gang.pending or gang.placed)), f"{who} is over, a gang of it is not"
    assert gang.placed or not gang.end_confirmed, f"{who}: its attempt should hold nothing"
    if not gang.placed:
        assert gang.notice is None, f"{who}: a notice for a gang that does not run"
        return
    live = {TaskState.ASSIGNED, TaskState.RUNNING, TaskState.SUCCEEDED}
    assert {task.state for task in gang.tasks} <= live, f"{who}: gang is placed in part"
    per_group, rest = divmod(len(gang.tasks), len(gang.groups))
    assert rest == 0, f"{who}: groups of unequal size"
    for number, task in enumerate(gang.tasks):
        worker = fleet.workers.get(task.node_id or "")
        assert worker is not None, f"{task.task_id}: its worker is gone and it does not know"
        assert (task.task_id, job.current_attempt(gang)) in worker.occupants, f"{task.task_id}: holds nothing"
        if job.spec.coscheduling:
            group = fleet.grouping(job.spec.coscheduling.group_by).name_of(worker)
            assert group == gang.groups[number // per_group], f"{task.task_id}: gang is split"
    _check_numbers(job, gang, fleet)


def _check_numbers(job: Job, gang: Gang, fleet: Fleet) -> None:
    """Check that groups that stay keep their numbers, as far as these exist, and hosts theirs within their groups.

    The hosts of a slice must be in the order of their worker ids, unless some have got none or the same since.
    """
    who, on_slices = job.spec.job_id, is_on_slices(job.spec.coscheduling.group_by if job.spec.coscheduling else None)
    before = {name: (number, node_ids) for number, (name, node_ids) in enumerate(gang.last_ran)}
    for number, (name, node_ids) in enumerate(gang.layout):
        known, node_ids_before = before.get(name, (number, ()))
        assert known == number or known >= len(gang.groups), f"{who}: {name} was group {known} and is {number}"
        if on_slices:
            ids = [-1 if (i := fleet.workers[node_id].host_index) is None else i for node_id in node_ids]
            is_sound = -1 not in ids and len({*ids}) == len(ids)
            assert not is_sound or ids == sorted(ids), f"{who}: the hosts of {name} are {ids}"
            continue
        for i, node_id in enumerate(node_ids_before[: len(node_ids)]):
            assert node_id not in node_ids or node_id == node_ids[i], f"{who}: {node_id} was host {i} of {name}"


def _check_worker(worker: Worker, jobs: Mapping[str, Job], allocations: Allocations) -> None:
    for resource, amount in worker.resources.items():
        free = worker.free[resource]
        assert 0 <= free <= amount, f"{worker.node_id}: {free} of {amount} {resource} is free"
    assert worker.tasks_of == replace(worker).tasks_of, f"{worker.node_id}: it miscounts the tasks of jobs"
    assert worker.free == replace(worker).free, f"{worker.node_id}: its free resources are not what occupants leave"
    using_chips = [task_id for task_id, attempt in worker.occupants if jobs[attempt.job_id].requirement.chips]
    assert len(using_chips) <= 1, f"{worker.node_id}: {using_chips} share its chips"
    for task_id, attempt in worker.occupants:
        assert attempt in allocations.get(attempt.job_id, {}), f"{task_id} holds it without an allocation"
        gang = jobs[attempt.job_id].gangs[attempt.gang]
        over = gang.attempt != attempt.number or not gang.placed
        assert ((task_id, attempt) in worker.ending) == over, f"{worker.node_id}: is {task_id} over or not?"


def _check_history(gang: Gang, who: str) -> None:
    for task in gang.tasks:
        if task.state in {TaskState.PENDING, *ACTIVE}:
            assert (task.ended_at, task.exit_code) == (None, None), f"{task.task_id} has not ended"
        if task.state in {TaskState.PENDING, TaskState.ASSIGNED}:
            assert task.started_at is None, f"{task.task_id} has not started"
        if task.state is TaskState.SUCCEEDED:
            assert task.exit_code == 0, f"{task.task_id} has succeeded"
        if task.started_at is not None and task.ended_at is not None:
            assert task.started_at <= task.ended_at, f"{task.task_id} ended before it started"
    numbers = [past.number for past in gang.past]
    assert len(numbers) <= ATTEMPTS_KEPT, f"{who}: {len(numbers)} earlier attempts"
    assert numbers == sorted(set(numbers)), f"{who}: earlier attempts {numbers}"
    over = gang.attempt - 1 if gang.placed else gang.attempt
    assert not numbers or numbers[-1] <= over, f"{who}: attempt {numbers[-1]} is not over"
