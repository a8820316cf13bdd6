"""A small cluster on paper: the controller's state and its scheduler, with the words that tests use."""

import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest

from iris_ray.model.constraints import AttributeValue, Constraint, ConstraintOp, Scalar
from iris_ray.model.job_group import GroupSpec
from iris_ray.model.job_spec import CoschedulingConfig, JobSpec
from iris_ray.model.jobs import Job
from iris_ray.model.lifecycle import AttemptId, TaskState
from iris_ray.model.notices import NoticeKind
from iris_ray.model.teams import Teams
from iris_ray.model.topology import get_tpu_config
from iris_ray.model.workers import TPU_NAME, TPU_TOPOLOGY, TPU_VM_COUNT, TPU_WORKER_ID
from iris_ray.scheduler import Scheduler, SchedulingResult
from iris_ray.scheduler.pending_reason import PendingReason
from iris_ray.scheduler.planner import Planner, running
from iris_ray.state.attempt_ends import QUICK_S
from iris_ray.state.controller_state import ControllerState, apply_all
from iris_ray.state.events import (
    AssignedEvent,
    AttemptEndConfirmedEvent,
    Event,
    GangAssignedEvent,
    GangMovedEvent,
    GroupAssignedEvent,
    JobAssignedEvent,
    JobRestoredEvent,
    JobSubmittedEvent,
    PromiseEvent,
    TaskDispatchFailedEvent,
    TasksAssignedEvent,
    TaskStateChangedEvent,
    TeamsSetEvent,
    TimePassedEvent,
    WorkerFailedEvent,
    WorkerRegisteredEvent,
    WorkerSuspectedEvent,
)
from iris_ray.state.instructions import Instructions
from iris_ray.state.records import JobRecord

S = TaskState
LONG = 1000.0
"""So long must a gang have run for others to evict it."""
MANY = {"max_retries_preemption": 1000, "max_retries_failure": 1000}


def promised(job: Job) -> tuple[str, ...]:
    """The hosts that are promised to a job."""
    return () if job.promise is None else job.promise.node_ids


def hosts_of(job: Job) -> tuple[str, ...]:
    """The hosts on which a job runs."""
    return tuple(task.node_id for task in job.tasks if task.node_id is not None)


def asked_to_leave(plan: SchedulingResult) -> list[PromiseEvent]:
    """The promises of a plan for which somebody has to leave."""
    return [event for event in plan.promises if event.leave]


def gang_spec(job_id: str = "job", tpu_type: str = "v4-16", slices: tuple[int, ...] = (1,), **changes: Any) -> JobSpec:
    """A gang of whole slices, as run_on_pod submits it; without retries unless told."""
    values: dict[str, Any] = {
        "device": tpu_type,
        "owner": "pool-a",
        "replicas": get_tpu_config(tpu_type).vm_count,
        "coscheduling": CoschedulingConfig(num_groups=slices),
        "constraints": (Constraint(TPU_TOPOLOGY, ConstraintOp.EQ, AttributeValue(tpu_type)),),
        "resources": {"TPU": 4.0},
        "max_retries_preemption": 0,
    }
    return JobSpec(job_id=job_id, **(values | changes))


def tasks_spec(job_id: str = "job", replicas: int = 2, **changes: Any) -> JobSpec:
    """Tasks that are placed one by one, each with the chips of a host; with the default budgets unless told."""
    values: dict[str, Any] = {"owner": "pool-a", "replicas": replicas, "resources": {"TPU": 4.0}}
    return JobSpec(job_id=job_id, **(values | changes))


def host(slice_name: str, number: int, tpu_type: str = "v4-16", **changes: Any) -> WorkerRegisteredEvent:
    """The registration of one TPU host, ``<slice>-<number>`` unless told."""
    attributes = {
        TPU_NAME: AttributeValue(slice_name),
        TPU_WORKER_ID: AttributeValue(number),
        TPU_TOPOLOGY: AttributeValue(tpu_type),
        TPU_VM_COUNT: AttributeValue(get_tpu_config(tpu_type).vm_count),
    }
    values: dict[str, Any] = {
        "node_id": f"{slice_name}-{number}",
        "address": "10.0.0.1",
        "attributes": attributes,
        "resources": {"TPU": 4.0, "CPU": 8.0},
    }
    return WorkerRegisteredEvent(**(values | changes))


def cpu_host(name: str, cpus: float = 8.0, gpus: float = 0.0, **attributes: Scalar) -> WorkerRegisteredEvent:
    """The registration of a host without chips."""
    resources = {"CPU": cpus} | ({"GPU": gpus} if gpus else {})
    return tagged(WorkerRegisteredEvent(name, "10.0.0.9", {}, resources), attributes)


def tagged(event: WorkerRegisteredEvent, attributes: Mapping[str, Scalar]) -> WorkerRegisteredEvent:
    """The same registration with more attributes."""
    more = {key: AttributeValue(value) for key, value in attributes.items()}
    return replace(event, attributes={**event.attributes, **more})


class World:
    """A controller's state and its scheduler, with the words that tests use.

    Args:
        slices: the names of the v4-16 slices, of two hosts each, that the world has from the start.
    """

    def __init__(self, *slices: str) -> None:
        self.state = ControllerState()
        self.scheduler = Scheduler()
        self.now = 100.0
        add_slices(self, *slices)

    def do(self, event: Event) -> Instructions:
        self.state.handle_event(TimePassedEvent(self.now))
        return self.state.handle_event(event)

    def add_slice(self, name: str, tpu_type: str = "v4-16", **attributes: Scalar) -> None:
        for number in range(get_tpu_config(tpu_type).vm_count):
            self.do(tagged(host(name, number, tpu_type), attributes))

    def submit(self, job_id: str = "job", **changes: Any) -> Job:
        self.do(JobSubmittedEvent(gang_spec(job_id, **changes), self.now))
        return self.state.jobs[job_id]

    def submit_tasks(self, job_id: str = "job", replicas: int = 2, **changes: Any) -> Job:
        """A job without coscheduling."""
        self.do(JobSubmittedEvent(tasks_spec(job_id, replicas, **changes), self.now))
        return self.state.jobs[job_id]

    def start_tasks(self, job_id: str = "job", replicas: int = 2, **changes: Any) -> Job:
        """A job without coscheduling whose tasks all run."""
        job = self.submit_tasks(job_id, replicas, **changes)
        self.schedule()
        for task in job.tasks:
            self.report(job, S.RUNNING, task.index)
        return job

    def plan(self, waiting: Mapping[str, PendingReason] | None = None, gives_back: bool = True) -> SchedulingResult:
        state = self.state
        return self.scheduler.find_assignments(
            state.pending(),
            state.fleet,
            state.usage,
            self.now,
            waiting,
            past=state.past_usage,
            running=running(state),
            idle=[*state.spares(), *state.yielding()] if gives_back else (),
            limits=state.limits,
            teams=state.teams,
        )

    def check(self) -> None:
        """Raise AssertionError if the state breaks an invariant, or an index is out of date."""
        self.state.check()
        self.scheduler.check(self.now)

    def why(self, job_id: str = "job") -> str:
        """Why a job waits, in words."""
        return str(self.plan().pending_reasons[job_id])

    def schedule(self) -> dict[str, Instructions]:
        """Commit one plan; the instructions by job."""
        plan = self.plan()
        done = {assignment.job_id: self.do(assignment) for assignment in plan.assignments}
        for event in plan.promises:
            self.do(event)
        return done

    def start(self, job_id: str = "job", **changes: Any) -> Job:
        """A job whose tasks all run."""
        job = self.submit(job_id, **changes)
        self.schedule()
        self.report_all(job, S.RUNNING)
        return job

    def report(
        self, job: Job, state: TaskState, index: int = 0, attempt: int | None = None, error: str = "boom"
    ) -> Instructions:
        return self.do(TaskStateChangedEvent(attempt_id(job, index, attempt), index, state, error))

    def report_all(self, job: Job, state: TaskState) -> Instructions:
        attempt = job.current_attempt(job.gang)
        return apply_all(self.state, [TaskStateChangedEvent(attempt, t.index, state) for t in job.tasks])

    def confirm(self, job: Job, attempt: int | None = None, index: int = 0) -> Instructions:
        return self.do(AttemptEndConfirmedEvent(attempt_id(job, index, attempt)))

    def long_run(self) -> None:
        """What runs has done so for long enough that its end is no quick one."""
        self.now += QUICK_S

    def finish(self, job: Job) -> None:
        """All that runs of the job succeeds and is gone."""
        for task in job.tasks:
            self.report(job, S.SUCCEEDED, task.index)
        for gang in job.gangs:
            self.confirm(job, gang.attempt, gang.tasks[0].index)

    def lose(self, node_id: str) -> Instructions:
        return self.do(WorkerFailedEvent(node_id, "the host died"))

    def dispatch_fails(self, job: Job, attempt: int | None = None) -> Instructions:
        return self.do(TaskDispatchFailedEvent(attempt_id(job, 0, attempt), "no answer", self.now))

    def keep_warm(self, owner: str) -> None:
        """Have this owner hold both slices "a" and "b" after a job that is over."""
        job = self.start(f"warm-up-of-{owner}", owner=owner, slices=(2,))
        self.report_all(job, S.SUCCEEDED)
        self.confirm(job)
        assert self.state.holders == {"a": owner, "b": owner}

    def restore(self, old: "World", *job_ids: str) -> Instructions:
        """Read the records of another world's jobs, of all unless told, as a new Controller does."""
        self.state.handle_event(TimePassedEvent(self.now))
        records = [old.state.record(job_id) for job_id in job_ids or old.state.jobs]
        return apply_all(self.state, [JobRestoredEvent(JobRecord.joined(one.to_bytes())) for one in records if one])

    def busy(self) -> set[str]:
        return {worker.node_id for worker in self.state.workers.values() if worker.occupants}


def checked(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """For a fixture: the invariants of each world that a test makes are checked when the test is over."""
    worlds: list[World] = []
    make = World.__init__

    def noted(world: World, *slices: str) -> None:
        worlds.append(world)
        make(world, *slices)

    monkeypatch.setattr(World, "__init__", noted)
    yield
    for world in worlds:
        world.check()


def set_teams(world: World, text: str) -> None:
    """Set the teams of a file that operators apply."""
    world.do(TeamsSetEvent(tuple(Teams.from_tables(tomllib.loads(text).get("teams", {})))))


def add_slices(world: World, *names: str, tpu_type: str = "v4-16", **attributes: Scalar) -> None:
    for name in names:
        world.add_slice(name, tpu_type, **attributes)


def placed(world: World) -> dict[str, tuple[str, ...]]:
    """Job id → the slices that the job would get now."""
    return {a.job_id: a.group_names for a in assigned_gangs(world.plan())}


def assigned_gangs(plan: SchedulingResult) -> list[GangAssignedEvent]:
    """The assignments of a plan that consists of gangs."""
    gangs = [event for event in plan.assignments if isinstance(event, GangAssignedEvent)]
    assert gangs == plan.assignments
    return gangs


def assigned_tasks(plan: SchedulingResult) -> list[TasksAssignedEvent]:
    """The assignments of a plan that consists of tasks without coscheduling, one for each task."""
    tasks = [event for event in one_by_one(plan.assignments) if isinstance(event, TasksAssignedEvent)]
    assert tasks == one_by_one(plan.assignments)
    return tasks


def one_by_one(assignments: Iterable[AssignedEvent]) -> list[JobAssignedEvent]:
    """The same assignments with an event for each gang and each task."""
    found: list[JobAssignedEvent] = []
    for event in assignments:
        if isinstance(event, GroupAssignedEvent):
            found += one_by_one(event.assignments)
        elif isinstance(event, TasksAssignedEvent):
            found += [replace(event, task_indices=(index,)) for index in event.task_indices]
        else:
            found.append(event)
    return found


def task_states(job: Job) -> list[TaskState]:
    return [task.state for task in job.tasks]


def attempts(world: World, job_id: str = "job") -> list[int]:
    """Return the number of the current attempt of each gang, or single task, of a job."""
    return [gang.attempt for gang in world.state.jobs[job_id].gangs]


def charged(job: Job) -> tuple[int, int]:
    return job.failures, job.preemptions


def attempt_id(job: Job, task_index: int = 0, number: int | None = None) -> AttemptId:
    """An attempt of the gang that a task belongs to: its current one, if no number is given."""
    if number is None:
        return job.current_attempt(job.gang_of(task_index))
    gang = 0 if len(job.gangs) == 1 else task_index // len(job.gangs[0].tasks)
    return AttemptId(job.spec.job_id, number, gang)


def in_group(*specs: JobSpec, name: str = "rl", main: tuple[str, ...] = ()) -> list[JobSpec]:
    """The same jobs as a group, each under its id; all are main jobs unless told."""
    ids = tuple(spec.job_id for spec in specs)
    group = GroupSpec(name, name, tuple(zip(ids, ids, strict=True)), main or ids)
    return [replace(spec, group=group) for spec in specs]


def submit_group(world: World, *specs: JobSpec, **about: Any) -> list[Job]:
    """Submit jobs as a group."""
    for spec in in_group(*specs, **about):
        world.do(JobSubmittedEvent(spec, world.now))
    return [world.state.jobs[spec.job_id] for spec in specs]


class PlannedWorld(World):
    """A world whose plans are the Controller's, one after the other."""

    def __init__(self, *slices: str) -> None:
        super().__init__(*slices)
        self.now = 10_000.0
        self.planner = Planner(self.state, look_again_s=0.5)

    def turn(self, seconds: float = 0.0, times: int = 1) -> None:
        """Let time pass and plan, so many times."""
        for _ in range(times):
            self.now += seconds
            self.do(TimePassedEvent(self.now))
            self.planner.plan(self.now, Instructions())

    def run(self, job_id: str, **changes: object) -> Job:
        """A gang on one slice that has run for so long that it may be evicted."""
        job = self.submit(job_id, **{**MANY, **changes})
        self.turn()
        assert job.gang.placed, job_id
        self.report_all(job, S.RUNNING)
        self.now += LONG
        self.do(TimePassedEvent(self.now))
        return job

    def leave(self, job: Job) -> None:
        """The gang heeds its notice. Its end is still to be confirmed."""
        self.do(GangMovedEvent(job.current_attempt(job.gang), "all its tasks have saved"))

    def suspect(self, node_id: str) -> None:
        self.do(WorkerSuspectedEvent(node_id, "no answer", self.now))


def on(slice_name: str) -> dict[str, object]:
    """The options of a job that can use this slice alone."""
    return {"constraints": (Constraint(TPU_NAME, ConstraintOp.EQ, slice_name),)}


def is_told_to_leave(job: Job) -> bool:
    return job.gang.notice is not None and job.gang.notice.kind is NoticeKind.EVICTION
