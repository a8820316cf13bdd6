"""Random events in random order, late and doubled, with the real scheduler in the loop."""

from collections import Counter
from copy import deepcopy
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from iris_ray.errors import IllegalTransitionError
from iris_ray.events import (
    AttemptEndConfirmedEvent,
    Event,
    GangAssignedEvent,
    JobCancelledEvent,
    JobSubmittedEvent,
    SliceReleasedEvent,
    TaskDispatchFailedEvent,
    TaskStateChangedEvent,
    WorkerDrainedEvent,
    WorkerFailedEvent,
    WorkerSuspectedEvent,
)
from iris_ray.jobs import Job
from iris_ray.lifecycle import JobState, TaskState
from iris_ray.workers import TPU_NAME, Worker
from iris_ray.state import ControllerState, Effects
from tests.worlds import World, charged, gang_spec, host, task_states

S = TaskState

SLICES = ("a", "b", "c")
OWNERS = ("pool-a", "pool-b")
REPORTS = st.sampled_from([S.RUNNING, S.SUCCEEDED, S.FAILED, S.WORKER_FAILED])
COUNTS = st.sampled_from([(1,), (2,), (3,), (1, 2), (1, 3)])
PICK = st.integers(0, 5)


class RandomEvents(RuleBasedStateMachine):
    """Random events, late and twice, at the state with the real scheduler in the loop."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World()
        self.submitted = 0
        self.registered = 0
        self.held: dict[tuple[str, int], tuple[str, ...]] = {}  # a second account of who holds what
        self.charges: Counter[tuple[str, int]] = Counter()
        self.world.add_slice("Large", "v4-32")  # never right for a gang of two
        for name in SLICES:
            self.world.add_slice(name)

    @property
    def state(self) -> ControllerState:
        return self.world.state

    def apply(self, event: Event) -> Effects:
        """Apply an event and check what it may change at all."""
        before = {i: (j.state, task_states(j), charged(j), j.gang.attempt) for i, j in self.state.jobs.items()}
        effects = self.state.handle_event(event)
        stopped = Counter((stop.job_id, stop.attempt) for stop in effects.stop)
        newly_finished = []
        for job_id, (old_state, old_tasks, old_charges, attempt) in before.items():
            job = self.state.jobs[job_id]
            if old_state.finished:
                assert (job.state, task_states(job), charged(job)) == (old_state, old_tasks, old_charges)
            elif job.state.finished:
                newly_finished.append(job_id)
            self.charges[job_id, attempt] += sum(charged(job)) - sum(old_charges)
            assert 0 <= self.charges[job_id, attempt] <= 1
            ended = old_state is JobState.RUNNING and job.state not in (JobState.RUNNING, JobState.SUCCEEDED)
            told = ended and not isinstance(event, TaskDispatchFailedEvent)  # its pool knows of a failed launch
            assert stopped[job_id, attempt] == told
        assert sorted(effects.finished) == sorted(newly_finished)
        return effects

    def job(self, pick: int) -> Job:
        return list(self.state.jobs.values())[pick % len(self.state.jobs)]

    def worker(self, pick: int) -> str:
        names = sorted(w.worker_id for name in SLICES for w in self.members(name))
        return names[pick % len(names)]

    def has_jobs(self) -> bool:
        return bool(self.state.jobs)

    @initialize(count=st.integers(1, 3), slices=COUNTS)
    def some_jobs_run_already(self, count: int, slices: tuple[int, ...]) -> None:
        for _ in range(count):
            self.submit(slices, 2, 2, OWNERS[0])
        self.schedule(0.0)

    @precondition(lambda self: self.submitted < 8)
    @rule(slices=COUNTS, failures=st.integers(0, 2), preemptions=st.integers(0, 2), owner=st.sampled_from(OWNERS))
    def submit(self, slices: tuple[int, ...], failures: int, preemptions: int, owner: str) -> None:
        self.submitted += 1
        spec = gang_spec(
            f"job-{self.submitted}",
            slices=slices,
            owner=owner,
            max_retries_failure=failures,
            max_retries_preemption=preemptions,
        )
        for _ in range(2):  # submitting twice changes nothing
            self.apply(JobSubmittedEvent(spec, self.world.now))

    @rule(seconds=st.sampled_from([0.0, 0.4, 5.0, 40.0]))
    def schedule(self, seconds: float) -> None:
        self.world.now += seconds
        pending = {job.spec.job_id for job in self.state.pending()}
        plan = self.world.plan()
        assert {a.job_id for a in plan.assignments} | plan.waiting.keys() == pending
        assert not {a.job_id for a in plan.assignments} & plan.waiting.keys()
        assert all(plan.waiting.values())
        for assignment in plan.assignments:
            job = self.state.jobs[assignment.job_id]
            self.check_legal(job, assignment)
            self.apply(assignment)
            self.held[assignment.job_id, job.gang.attempt] = tuple(w for group in assignment.groups for w in group)

    def check_legal(self, job: Job, assignment: GangAssignedEvent) -> None:
        """Whole slices of the right size, every host there, in order, fit and free."""
        assert len(assignment.groups) == len(set(assignment.group_names))
        assert len(assignment.groups) in job.spec.coscheduling.num_groups
        for name, group in zip(assignment.group_names, assignment.groups, strict=True):
            members = {i: w for i, w in self.state.workers.items() if str(w.attributes[TPU_NAME]) == name}
            assert [members[worker_id].host_number for worker_id in group] == [0, 1]
            assert members.keys() == set(group)
            for worker in members.values():
                assert (worker.occupants, worker.draining, worker.foreign) == ({}, None, None)
                assert not worker.suspected or self.world.now >= worker.suspected_until

    @precondition(has_jobs)
    @rule(pick=PICK, index=st.integers(0, 5), state=REPORTS)
    def report(self, pick: int, index: int, state: TaskState) -> None:
        job = self.job(pick)
        index %= len(job.tasks)
        if state is S.FAILED and job.tasks[index].state is S.SUCCEEDED:
            state = S.WORKER_FAILED  # a function returns once
        for _ in range(2):
            self.apply(TaskStateChangedEvent(job.spec.job_id, index, job.gang.attempt, state, "boom"))

    @precondition(has_jobs)
    @rule(pick=PICK, state=st.sampled_from([S.RUNNING, S.RUNNING, S.SUCCEEDED]))
    def report_all(self, pick: int, state: TaskState) -> None:
        job = self.job(pick)
        for index in range(len(job.tasks)):
            self.apply(TaskStateChangedEvent(job.spec.job_id, index, job.gang.attempt, state))

    @precondition(has_jobs)
    @rule(pick=PICK)
    def dispatch_fails(self, pick: int) -> None:
        job = self.job(pick)
        for _ in range(2):
            self.apply(TaskDispatchFailedEvent(job.spec.job_id, job.gang.attempt, "no answer", self.world.now))

    @precondition(has_jobs)
    @rule(pick=PICK, index=st.integers(0, 5), state=REPORTS)
    def older_attempts_are_reported_late(self, pick: int, index: int, state: TaskState) -> None:
        job = self.job(pick)
        before = deepcopy(job)
        for attempt in range(job.gang.attempt):
            self.apply(TaskStateChangedEvent(job.spec.job_id, index, attempt, state, "late"))
            self.apply(TaskDispatchFailedEvent(job.spec.job_id, attempt, "late", self.world.now))
        assert job == before

    @precondition(has_jobs)
    @rule(pick=PICK)
    def cancel(self, pick: int) -> None:
        self.apply(JobCancelledEvent(self.job(pick).spec.job_id, "enough"))

    @precondition(lambda self: self.held)
    @rule(pick=PICK)
    def confirm(self, pick: int) -> None:
        job_id, attempt = list(self.held)[pick % len(self.held)]
        job = self.state.jobs[job_id]
        if job.gang.attempt == attempt and any(task.state in (S.ASSIGNED, S.RUNNING) for task in job.tasks):
            with pytest.raises(IllegalTransitionError):
                self.state.handle_event(AttemptEndConfirmedEvent(job_id, attempt))
            return
        for _ in range(2):
            self.apply(AttemptEndConfirmedEvent(job_id, attempt))
        del self.held[job_id, attempt]

    @precondition(lambda self: any(map(self.members, SLICES)))
    @rule(pick=PICK, trouble=st.sampled_from(["lost", "lost", "drain", "silent", "foreign", "replaced early"]))
    def trouble(self, pick: int, trouble: str) -> None:
        worker = self.state.workers[self.worker(pick)]
        name, number = str(worker.attributes[TPU_NAME]), worker.host_number
        match trouble:
            case "lost":
                for _ in range(2):
                    self.apply(WorkerFailedEvent(worker.worker_id, "the host died"))
            case "drain":
                self.apply(WorkerDrainedEvent(worker.worker_id, "notice"))
            case "silent":
                self.apply(WorkerSuspectedEvent(worker.worker_id, "no answer", self.world.now))
            case "foreign":
                self.apply(replace(host(name, number, worker_id=worker.worker_id), foreign="a stranger"))
            case "replaced early":  # before its death is known: then two have the same number
                self.join(name, number)

    @rule()
    def repair(self) -> None:
        """Every slice gets two sound hosts."""
        for name in SLICES:
            for number in range(2):
                there = [w for w in self.members(name) if w.host_number == number]
                for superfluous in there[1:]:
                    self.apply(WorkerFailedEvent(superfluous.worker_id, "the host died"))
                if there:
                    self.apply(host(name, number, worker_id=there[0].worker_id))
                else:
                    self.join(name, number)

    def members(self, name: str) -> list[Worker]:
        return [w for w in self.state.workers.values() if str(w.attributes[TPU_NAME]) == name]

    def join(self, name: str, number: int) -> None:
        self.registered += 1
        self.apply(host(name, number, worker_id=f"{name}-{number}-{self.registered}"))

    @rule(name=st.sampled_from(SLICES), owner=st.sampled_from(OWNERS))
    def release(self, name: str, owner: str) -> None:
        before = dict(self.state.holders)
        self.apply(SliceReleasedEvent(name, owner))
        if before.get(name) == owner:  # whoever was promised the slice holds it now
            del before[name]
            for job in self.state.jobs.values():
                if job.state is JobState.RUNNING and name in job.gang.groups:
                    before[name] = job.spec.owner
        assert self.state.holders == before

    @invariant()
    def check(self) -> None:
        self.state.check()

    @invariant()
    def every_host_has_the_tasks_that_it_should_have_and_at_most_one(self) -> None:
        expected: dict[str, set[tuple[str, int]]] = {worker_id: set() for worker_id in self.state.workers}
        for (job_id, attempt), worker_ids in self.held.items():
            for index, worker_id in enumerate(worker_ids):
                if worker_id in expected:
                    expected[worker_id].add((f"{job_id}/task-{index}", attempt))
        for worker_id, occupants in expected.items():
            assert self.state.workers[worker_id].occupants.keys() == occupants
            assert len(occupants) <= 1

    @invariant()
    def hosts_know_which_of_their_tasks_are_over(self) -> None:
        for worker in self.state.workers.values():
            over = set()
            for task_id, attempt in worker.occupants:
                job = self.state.jobs[task_id.rpartition("/")[0]]
                if job.gang.attempt != attempt or job.state is not JobState.RUNNING:
                    over.add((task_id, attempt))
            assert worker.ending == over

    @invariant()
    def gangs_are_placed_all_or_none(self) -> None:
        for job in self.state.jobs.values():
            waiting = [task.state is S.PENDING for task in job.tasks]
            assert all(waiting) or not any(waiting)
            assert all((task.worker_id is None) == (task.state is S.PENDING) for task in job.tasks) or (
                job.state.finished
            )

    @invariant()
    def budgets_are_kept(self) -> None:
        for job in self.state.jobs.values():
            assert job.failures <= job.spec.max_retries_failure + job.state.finished
            assert job.preemptions <= job.spec.max_retries_preemption + job.state.finished
            assert sum(charged(job)) <= job.gang.attempt

    def teardown(self) -> None:
        """Once hosts are there and nothing else goes wrong, every job ends."""
        for name in ("new-1", "new-2", "new-3"):
            self.world.add_slice(name)
        patience = 2 * self.submitted + 2
        while not all(job.state.finished for job in self.state.jobs.values()) and patience:
            patience -= 1
            for job in [job for job in self.state.jobs.values() if job.state is JobState.RUNNING]:
                self.report_all_succeeded(job)
            for key in [k for k in self.held if self.state.jobs[k[0]].state is not JobState.RUNNING]:
                self.apply(AttemptEndConfirmedEvent(*key))
                del self.held[key]
            self.schedule(1000.0)
            self.every_host_has_the_tasks_that_it_should_have_and_at_most_one()
            self.gangs_are_placed_all_or_none()
        assert all(job.state.finished for job in self.state.jobs.values())
        self.check()

    def report_all_succeeded(self, job: Job) -> None:
        for index in range(len(job.tasks)):
            self.apply(TaskStateChangedEvent(job.spec.job_id, index, job.gang.attempt, S.SUCCEEDED))


TestRandomEvents = RandomEvents.TestCase
TestRandomEvents.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
