"""Random fleets with groups of jobs: a group starts as a whole or not at all, ends as one, and starves for no longer.

`ControllerState.check` after every event says that no group has started in part, and that nothing is promised to a part
of one.
"""

from dataclasses import replace
from random import Random

import pytest

from iris_ray.model.job_spec import JobSpec
from iris_ray.model.jobs import Job
from iris_ray.model.lifecycle import JobState
from iris_ray.model.limits import Limits
from iris_ray.model.options import PriorityBand
from iris_ray.scheduler.eviction_costs import DEFAULT_RULES
from iris_ray.scheduler.together import GroupPlacement, place_on, without_what_ends
from iris_ray.state.events import (
    Event,
    GroupAssignedEvent,
    JobCancelledEvent,
    JobRestoredEvent,
    JobSubmittedEvent,
    JobYieldsEvent,
    LimitsSetEvent,
    TaskDispatchFailedEvent,
    TaskStateChangedEvent,
    TimePassedEvent,
    WorkerSuspectedEvent,
)
from iris_ray.state.records import JobRecord
from tests.support.proofs import examples
from tests.support.worlds import S, World, cpu_host, gang_spec, in_group, tasks_spec

TYPES = {"v4-8": 1, "v4-16": 2}
"""Each with its hosts."""
STEPS, STEP_S = 60, 20.0
RUNS_S = 200.0
"""How long a job of the crowd runs at most."""
PATIENCE_S = 600.0 + 12 * RUNS_S
"""By when a group has started that waits beside a crowd: the backfill bound, and what others were promised before."""
SEEDS = range(examples(24))


class GroupWorld(World):
    """Slices and hosts, and single jobs and groups that come, run, fail and go.

    Attributes:
        started: ids of the groups that have started.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.random = Random(seed)
        self.started: set[str] = set()
        self._number = 0
        self.scheduler.evictions = replace(DEFAULT_RULES, per_job=None, per_user=None)
        for tpu_type in TYPES:
            for number in range(self.random.randint(1, 5)):
                self.add_slice(f"{tpu_type}-{number}", tpu_type)
        for number in range(self.random.randint(0, 3)):
            self.do(cpu_host(f"cpu-{number}"))
        if self.random.random() < 0.3:
            self.do(LimitsSetEvent("ann", PriorityBand.INTERACTIVE, Limits(chips=24.0, running_jobs=6)))

    # -- what happens ----------------------------------------------------------------------------------------------

    def spec(self, **changes: object) -> JobSpec:
        random, job_id = self.random, f"j{self._number}"
        self._number += 1
        values = {"max_retries_preemption": random.choice([0, 3]), "max_retries_failure": 1} | changes
        if random.random() < 0.3:
            need = random.choice([{"CPU": 2.0}, {"CPU": 8.0}, {"TPU": 4.0}])
            return tasks_spec(job_id, random.randint(1, 4), resources=need, **values)
        tpu_type = random.choice(list(TYPES))
        slices = random.choice([(1,), (1,), (2,), (1, 2), (2, 3)])
        more = {"failure_domain": "slice"} if len(slices) == 1 and random.random() < 0.3 else {}
        whole = random.random() < 0.5
        return gang_spec(job_id, tpu_type, slices, whole_groups=whole, **more, **values)

    def submit_some(self) -> None:
        random = self.random
        about = {"user": random.choice(["ann", "bob"]), "priority": random.choice(list(PriorityBand))}
        if random.random() < 0.6:
            self.do(JobSubmittedEvent(self.spec(spares=0, **about), self.now))
            return
        specs = [self.spec(**about) for _ in range(random.randint(1, 4))]
        main = (specs[0].job_id,) if random.random() < 0.5 else ()
        specs = in_group(*specs, name=f"g{self._number}", main=main)
        if random.random() < 0.05:
            specs = specs[:-1]  # its owner dies meanwhile
        for spec in specs:
            self.do(JobSubmittedEvent(spec, self.now))

    def something_happens(self) -> None:
        random = self.random
        jobs = [job for job in self.state.jobs.values() if job.spec.spare_for is None]
        running = [(job, gang) for job in jobs for gang in job.gangs if gang.placed]
        waiting = [*self.state.pending()]
        whats = ["end", "end", "fail", "cancel", "lose", "suspect", "add", "dispatch", "yield", "restart"]
        what = random.choice(whats)
        if what == "cancel" and waiting:
            self.do(JobCancelledEvent(random.choice(waiting).spec.job_id, "enough"))
        elif what == "lose" and len(self.state.workers) > 2:
            self.lose(random.choice(list(self.state.workers)))
        elif what == "suspect":
            self.do(WorkerSuspectedEvent(random.choice(list(self.state.workers)), "no answer", self.now))
        elif what == "add":
            self._number += 1
            tpu_type = random.choice(list(TYPES))
            self.add_slice(f"{tpu_type}-new-{self._number}", tpu_type)
        elif what == "restart":
            self.restart()
        elif running:
            job, gang = random.choice(running)
            attempt, index = job.current_attempt(gang), gang.tasks[0].index
            if what == "end":
                self.ends(job)
            elif what == "fail":
                self.do(TaskStateChangedEvent(attempt, index, S.FAILED, "boom"))
            elif what == "dispatch" and gang.tasks[0].state is S.ASSIGNED:
                self.do(TaskDispatchFailedEvent(attempt, "no answer", self.now))
            elif what == "yield" and len(job.gangs) == 1:
                self.do(JobYieldsEvent(job.spec.job_id, yields=True))

    def restart(self) -> None:
        """The Controller's process is replaced. Its hosts are the same."""
        old, self.state = self.state, type(self.state)()
        for worker in old.workers.values():
            self.state.fleet.put(replace(worker, occupants={}, ending={}))
        for account, limits in old.limits.table.items():
            self.state.handle_event(LimitsSetEvent(*account, limits))
        self.state.handle_event(TimePassedEvent(self.now))
        for job_id in old.jobs:
            record = old.record(job_id)
            assert record is not None
            self.state.handle_event(JobRestoredEvent(JobRecord.joined(record.to_bytes())))
        self.state.check()

    def ends(self, job: Job) -> None:
        for gang in job.gangs:
            for task in gang.tasks if gang.placed else ():
                self.do(TaskStateChangedEvent(job.current_attempt(gang), task.index, S.SUCCEEDED, ""))

    def pass_time(self, seconds: float) -> None:
        """Time passes, what is over is gone, a plan is made, and most of what it places runs."""
        self.now += seconds
        self.do(TimePassedEvent(self.now))
        for job_id, job in list(self.state.jobs.items()):
            for attempt in list(self.state._allocations.of(job_id)):
                gang = job.gangs[attempt.gang]
                if not (gang.placed and gang.attempt == attempt.number):
                    self.confirm(job, attempt.number, attempt.gang * len(job.gangs[0].tasks))
        plan = self.plan()
        for lost in plan.promises:
            assert "no longer fit" not in lost.reason, f"{lost.job_id} loses its hosts, which are all there"
        settled = {event.job_id for event in (*plan.assignments, *plan.timed_out, *plan.unschedulable)}
        for leader in self.state.pending():
            told = {job.spec.job_id for job in leader.members or (leader,)}
            assert leader.spec.job_id in settled or told <= plan.pending_reasons.keys(), "somebody does not know why"
        for assignment in plan.assignments:
            self.do(assignment)
            self.state.check()
            if isinstance(assignment, GroupAssignedEvent):
                group = self.state.jobs[assignment.job_id].spec.group
                assert group is not None
                self.started.add(group.name)
        events: list[Event] = [*plan.promises, *plan.timed_out, *plan.unschedulable]
        for event in events:
            self.do(event)
        for job in list(self.state.jobs.values()):
            for gang in job.gangs:
                if gang.placed and gang.tasks[0].state is S.ASSIGNED and self.random.random() < 0.8:
                    for task in gang.tasks:
                        self.do(TaskStateChangedEvent(job.current_attempt(gang), task.index, S.RUNNING, ""))
        self.check()

    # -- what must hold --------------------------------------------------------------------------------------------

    def could_run(self, leader: Job) -> bool:
        """Whether a group fits on the fleet once nothing else runs."""
        there = without_what_ends(self.state.fleet, list(self.state.workers.values()), self.now)
        return isinstance(place_on(leader.members, there, self.now), GroupPlacement)

    def ends_as_one(self) -> None:
        """No job of a group goes on alone, and none was killed while the main ones have succeeded."""
        for job in self.state.jobs.values():
            if (group := job.spec.group) is None:
                continue
            states = {name: self.state.jobs[i].state for name, i in group.members if i in self.state.jobs}
            if any(state.finished and state is not JobState.SUCCEEDED for state in states.values()):
                assert all(state.finished for state in states.values()), states
            if all(states.get(name, JobState.SUCCEEDED) is JobState.SUCCEEDED for name in group.main):
                assert all(state in (JobState.SUCCEEDED, JobState.KILLED) for state in states.values()), states


@pytest.mark.parametrize("seed", SEEDS)
def test_group_starts_as_a_whole_whatever_happens(seed: int) -> None:
    world = GroupWorld(seed)
    for _ in range(STEPS):
        for _ in range(world.random.choice([0, 1, 1, 2])):
            world.submit_some()
        for _ in range(world.random.choice([0, 1, 2, 4])):
            world.something_happens()
            world.state.check()
        world.pass_time(STEP_S * world.random.random())
        world.ends_as_one()


@pytest.mark.parametrize("seed", SEEDS)
def test_group_gets_its_turn_beside_an_endless_crowd(seed: int) -> None:
    world = GroupWorld(seed)
    for user in ("ann", "bob"):
        world.do(LimitsSetEvent(user, PriorityBand.INTERACTIVE, Limits()))
    specs = in_group(*(world.spec(user="ann") for _ in range(world.random.randint(2, 4))), name="rl")
    began: dict[str, float] = {}
    for step in range(round((PATIENCE_S + 1000.0) / STEP_S)):
        if step == 20:
            for spec in specs:
                world.do(JobSubmittedEvent(spec, world.now))
            leader = world.state.jobs[specs[0].job_id]
            if not world.could_run(leader):
                return  # it was not to start, and the next test tells of such groups
        waiting = [job for job in world.state.pending() if job.spec.group is None]
        for _ in range(max(0, 12 - len(waiting))):
            world.do(JobSubmittedEvent(world.spec(user=world.random.choice("xyz")), world.now))
        for job in list(world.state.jobs.values()):
            is_own = job.spec.group is None and job.spec.spare_for is None
            if job.started and not job.state.finished and is_own:
                since = began.setdefault(job.spec.job_id, world.now)
                if world.now - since > RUNS_S * world.random.random():
                    world.ends(job)
        world.pass_time(STEP_S)
        if "rl" in world.started:
            return
    pytest.fail(f"it still waits: {world.why(specs[0].job_id)}")
