"""The state machine that Hypothesis drives: random events, late and twice, with the real scheduler in the loop.

Its rules make things happen; `Oracle` says what must follow from them.
"""

from collections.abc import Iterator
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from iris_ray.model.jobs import Gang, Job
from iris_ray.model.lifecycle import AttemptId, JobState, TaskState
from iris_ray.model.limits import EVERYBODY, Limits
from iris_ray.model.options import PriorityBand
from iris_ray.state.events import (
    AssignedEvent,
    AttemptEndConfirmedEvent,
    Event,
    EvictionEvent,
    GangMovedEvent,
    GivesWayEvent,
    JobCancelledEvent,
    JobSubmittedEvent,
    JobYieldsEvent,
    LimitsSetEvent,
    PoolRestartedEvent,
    SpareGivenBackEvent,
    TaskDispatchFailedEvent,
    TaskStateChangedEvent,
    TaskUnschedulableEvent,
    TimePassedEvent,
)
from iris_ray.state.instructions import Instructions
from tests.proofs.state_machine.host_rules import HostRules
from tests.proofs.state_machine.strategies import (
    GANGS,
    INDEX,
    JOBS,
    LIFE,
    LIMITS,
    OWNERS,
    PICK,
    REPORTS,
    ROUND,
    SECONDS,
    SHAPES,
    TERMS,
    make_spec,
)
from tests.proofs.state_machine.views import view, view_all

S = TaskState


class RandomEvents(HostRules):
    """Random events, late and twice, at the state with the real scheduler in the loop."""

    # -- jobs --------------------------------------------------------------------------------------------------------

    @initialize(jobs=st.lists(JOBS, min_size=1, max_size=4), looks_often=st.booleans())
    def some_jobs_run_already(self, jobs: list[tuple[Any, Any]], looks_often: bool) -> None:
        self.history.clear()
        self.looks_often = looks_often  # else the indexes have to catch up with several steps at once
        for job in jobs:
            self.submit(job)
        self.schedule(0.0)

    def own_jobs(self) -> list[Job]:
        """Those that somebody submitted."""
        return [job for job in self.state.jobs.values() if job.spec.spare_for is None]

    @precondition(lambda self: len(self.own_jobs()) < 10)
    @rule(job=JOBS)
    def submit(self, job: tuple[Any, Any]) -> None:
        spec = make_spec(f"job-{len(self.own_jobs()) + 1}", *job)
        for earlier in (0.0, 7.0):  # submitting twice changes nothing
            self.apply(JobSubmittedEvent(spec, self.world.now - earlier))
        submitted = self.state.jobs[spec.job_id]
        assert (submitted.state, submitted.submitted_at) == (JobState.PENDING, self.world.now)

    @rule(user=st.sampled_from(["ann", "bob", EVERYBODY]), band=st.sampled_from(PriorityBand), limits=LIMITS)
    def limit(self, user: str, band: PriorityBand, limits: Limits) -> None:
        self.apply(LimitsSetEvent(user, band, limits))

    @rule(seconds=SECONDS, when=st.sampled_from(["now", "now", "now", "twice", "later"]))
    def schedule(self, seconds: float, when: str = "now") -> None:
        """Let time pass, make a plan, and do what it says: at once, twice, or when other things have happened."""
        self.world.now += seconds
        self.apply(TimePassedEvent(self.world.now))
        plan = self.world.plan()
        self.oracle.check_plan(plan)
        assert self.world.plan() == plan, "the same snapshot gives the same plan"
        self.oracle.check_plan_after_the_latest(plan)
        decided: list[Event] = [
            *plan.assignments, *plan.rooms, *plan.evictions, *plan.given_back, *plan.timed_out, *plan.unschedulable,
        ]  # fmt: skip
        if when == "later":
            self.unsent += decided
            return
        spares_changed = False
        for event in decided:
            queue_version = self.state.queue_version
            assert self.apply(event) is not None, "what was just planned fits"
            may_change_spares = isinstance(event, AssignedEvent | SpareGivenBackEvent)
            spares_changed |= may_change_spares and self.state.queue_version != queue_version
            if when == "twice":
                is_assigned = isinstance(event, AssignedEvent)
                assert (self.apply(event) is None) == is_assigned, "nothing is assigned twice"
        if not (spares_changed or plan.gave_up_room):  # else there is more to place or to keep, or some slices are free
            self.oracle.latest = self.oracle.versions(), self.world.now, plan.pending_reasons

    @precondition(lambda self: len(self.own_jobs()) < 10)
    @rule(job=JOBS)
    def one_more_comes_when_nothing_else_has_changed(self, job: tuple[Any, Any]) -> None:
        self.schedule(0.0)
        self.submit(job)
        self.schedule(0.0)

    @rule(rounds=st.lists(ROUND, min_size=1, max_size=3))
    def some_rounds(self, rounds: list[tuple[float, list[TaskState], int, bool]]) -> None:
        """What can start does; some of what runs comes to an end, which is confirmed or not."""
        for seconds, ends, index, confirmed in rounds:
            self.schedule(seconds)
            for (job, gang), end in zip(list(self.live()), ends, strict=False):
                self.report_all(job, gang, S.RUNNING)
                if end is S.SUCCEEDED:
                    self.report_all(job, gang, S.SUCCEEDED)
                else:
                    task = gang.tasks[index % len(gang.tasks)]
                    self.apply(TaskStateChangedEvent(job.current_attempt(gang), task.index, end, "boom"))
            if confirmed:
                self.confirm_all_that_is_over()

    @rule(
        shapes=st.lists(st.sampled_from((*GANGS, *SHAPES)), min_size=1, max_size=3),
        taker=JOBS,
        pauses=st.lists(SECONDS, min_size=1, max_size=4),
        pick=PICK,
    )
    def a_lower_band_gives_way(self, shapes: list[Any], taker: tuple[Any, Any], pauses: list[float], pick: int) -> None:
        """Gangs of the lowest band run for long, then a job of a higher one comes; they move, or end, or go on."""
        self.only_these_run(shapes, pick)
        self.schedule(500.0)
        higher = {"priority": PriorityBand(pick % 2), "constraints": (), "scheduling_timeout": None}
        self.submit((taker[0], taker[1] | higher))
        for number, seconds in enumerate(pauses):
            self.schedule(seconds)
            evicted = [attempt for attempt in self.account.evicted if self.oracle.is_live(attempt)]
            others = [(job, gang) for job, gang in self.live() if job.current_attempt(gang) not in evicted]
            match (pick + number) % 5:
                case 0 if evicted:
                    for _ in range(2):
                        self.apply(GangMovedEvent(evicted[pick % len(evicted)], "all its tasks have saved"))
                case 1 if evicted:
                    self.apply(JobCancelledEvent(self.account.evicted[evicted[0]][0], "enough"))
                case 2 if evicted and others:  # there is other room now
                    job, gang = others[pick % len(others)]
                    self.apply(GangMovedEvent(job.current_attempt(gang), "it goes"))
                    self.confirm_all_that_is_over()
            if (pick + number) % 3 == 0:
                self.confirm_all_that_is_over()

    @rule(comers=st.lists(JOBS, min_size=1, max_size=2), pick=PICK, pauses=st.lists(SECONDS, min_size=1, max_size=3))
    def jobs_come_while_spares_are_held(self, comers: list[tuple[Any, Any]], pick: int, pauses: list[float]) -> None:
        """A gang of the lowest band holds what others of that band want."""
        self.only_these_run([GANGS[pick % 3]], 2 * pick + 1)
        for shape, terms in comers:
            self.submit((shape, terms | {"priority": PriorityBand.BATCH, "constraints": ()}))
        for seconds in pauses:
            self.schedule(seconds)

    @rule(pick=PICK, yields=st.booleans())
    def its_owner_can_do_without_it_or_needs_it_again(self, pick: int, yields: bool) -> None:
        for _ in range(2):
            self.apply(JobYieldsEvent(self.job(pick).spec.job_id, yields))

    @rule(pick=PICK, seconds=SECONDS)
    def one_is_to_give_its_hosts_to_whoever_waits(self, pick: int, seconds: float) -> None:
        """Whether it yields or not."""
        for _ in range(2):
            self.apply(GivesWayEvent(self.job(pick).spec.job_id, self.world.now + seconds))

    @precondition(lambda self: len(self.own_jobs()) < 20)
    @rule(
        shapes=st.lists(st.sampled_from((*GANGS, *SHAPES)), min_size=1, max_size=4),
        comers=st.lists(JOBS, min_size=1, max_size=3),
        pick=PICK,
        leave_early=st.booleans(),
    )
    def some_yield_and_others_come(
        self, shapes: list[Any], comers: list[tuple[Any, Any]], pick: int, leave_early: bool
    ) -> None:
        """Jobs that wait get hosts. After that no job gives way any more, so no host moves back and forth."""
        self.only_these_run(shapes, pick)
        for user, band in list(self.state.limits.table):
            self.limit(user, band, Limits())
        yielding = [job for job in self.own_jobs() if len(job.gangs) == 1 and job.gang.placed]
        for job in yielding:
            self.apply(JobYieldsEvent(job.spec.job_id, True))
        before = {job.spec.job_id: (job.failures, job.preemptions, job.evictions) for job in yielding}
        for shape, terms in comers:
            self.submit((shape, terms | {"scheduling_timeout": None, "spares": 0, "grow_after": None}))
        for number in range(8):
            self.schedule((6.0, 1.0, 0.0)[(pick + number) % 3])
            evicted = [attempt for attempt in self.account.evicted if self.oracle.is_live(attempt)]
            for attempt in evicted if leave_early or number % 4 == 3 else ():
                self.apply(GangMovedEvent(attempt, "all its tasks have saved"))
            if (pick + number) % 2:
                self.confirm_all_that_is_over()
            for job, gang in list(self.live()):
                if any(task.state is S.ASSIGNED for task in gang.tasks):
                    self.report_all(job, gang, S.RUNNING)
            self.state_is_whole()
        for _ in range(2):
            self.confirm_all_that_is_over()
            self.schedule(31.0)
        self.confirm_all_that_is_over()
        self.schedule(6.0)
        assert not [attempt for attempt, (taker, _) in self.account.evicted.items() if not taker], "they go to and fro"
        for job in yielding:
            failures, preemptions, evictions = before[job.spec.job_id]
            assert (job.failures, job.preemptions) == (failures, preemptions), "nothing is charged"
            assert job.evictions - evictions <= 1 + len(comers), "it goes to and fro"

    def only_these_run(self, shapes: list[Any], pick: int) -> None:
        """Gangs of the lowest band have all the hosts, for themselves or their spares."""
        for job in self.own_jobs():
            self.apply(JobCancelledEvent(job.spec.job_id, "enough"))
        self.confirm_all_that_is_over()
        self.repair()
        owner = OWNERS[pick % 2]
        terms = {"priority": PriorityBand.BATCH, "constraints": (), "owner": owner, "max_retries_preemption": 30}
        for number, shape in enumerate(shapes):
            spares = {"spares": (pick + number) % 3, "grow_after": (None, 0.0)[pick % 2]}
            self.submit((shape, terms | spares))
        self.schedule(0.0)
        for job, gang in list(self.live()):
            self.report_all(job, gang, S.RUNNING)
        self.schedule(0.0)

    @precondition(lambda self: any(self.live()))
    @rule(pick=PICK, victims=st.lists(PICK, min_size=1, max_size=3), seconds=SECONDS)
    def somebody_is_to_give_way(self, pick: int, victims: list[int], seconds: float) -> None:
        """Whether that makes sense or not."""
        gangs = list(self.live())
        attempts = tuple(job.current_attempt(gang) for job, gang in (gangs[i % len(gangs)] for i in victims))
        for _ in range(2):
            self.apply(EvictionEvent(self.job(pick).spec.job_id, attempts, self.world.now + seconds))

    @precondition(lambda self: self.unsent)
    @rule(pick=PICK)
    def what_was_decided_arrives_late(self, pick: int) -> None:
        self.apply(self.unsent.pop(pick % len(self.unsent)))

    @precondition(lambda self: any(self.live()))
    @rule(pick=PICK, index=INDEX, state=REPORTS, by_all=st.booleans())
    def report(self, pick: int, index: int, state: TaskState, by_all: bool) -> None:
        job, gang = self.live_gang(pick)
        task = gang.tasks[index % len(gang.tasks)]
        for _ in range(2):
            if by_all:
                self.report_all(job, gang, state)
            else:
                self.apply(TaskStateChangedEvent(job.current_attempt(gang), task.index, state, "boom"))

    def report_all(self, job: Job, gang: Gang, state: TaskState) -> None:
        attempt = job.current_attempt(gang)
        for index in [task.index for task in gang.tasks]:
            self.apply(TaskStateChangedEvent(attempt, index, state, "boom"))

    @precondition(lambda self: any(self.live()))
    @rule(pick=PICK, again=st.sampled_from([0, 0, 0, 10]), named=st.integers(0, 2), counts=st.booleans())
    def dispatch_fails(self, pick: int, again: int, named: int, counts: bool) -> None:
        """Once, or again and again, as long as there is room for the gang."""
        job, gang = self.live_gang(pick)
        for _ in range(1 + again):
            attempt = job.current_attempt(gang)
            failed = TaskDispatchFailedEvent(attempt, "no answer", self.world.now, gang.groups[:named], counts)
            for _ in range(2):
                self.apply(failed)
            assert gang.not_before > self.world.now
            self.confirm_all_that_is_over()
            if again and gang.pending:
                self.schedule(gang.not_before - self.world.now)
            if not gang.placed:
                return

    @rule(
        shape=st.sampled_from(GANGS),
        terms=TERMS,
        spares=st.integers(0, 2),
        grows=st.booleans(),
        life=st.lists(st.tuples(LIFE, PICK), min_size=2, max_size=8),
    )
    def life_of_a_gang(self, shape: Any, terms: Any, spares: int, grows: bool, life: list[tuple[str, int]]) -> None:
        """All others end, so that there is room for a gang, its spares, replacements and growth.

        One that grows begins on fewer slices than there are a moment later.
        """
        for job in self.own_jobs():
            self.apply(JobCancelledEvent(job.spec.job_id, "enough"))
        self.confirm_all_that_is_over()
        self.repair()
        room = {"constraints": (), "spares": spares, "max_retries_preemption": 30, "scheduling_timeout": None}
        if grows:
            room |= {"spares": 0, "grow_after": 0.0}
            self.trouble(self.oracle.members("c")[0].node_id, 0, "lost")
            life = [("repair", 0), ("run", 0), *life]
        spec = make_spec(f"job-{len(self.own_jobs()) + 1}", shape, {**terms, **room})
        self.apply(JobSubmittedEvent(spec, self.world.now))
        job = self.state.jobs[spec.job_id]
        for step, pick in [("run", 0), *life]:
            if job.state.finished:
                return
            if step == "restart":
                self.a_successor_takes_over()
                job = self.state.jobs[spec.job_id]
            else:
                self.live_on(job, step, pick)
            self.state_is_whole()
            self.every_host_has_the_tasks_that_it_should_have()

    def live_on(self, job: Job, step: str, pick: int) -> None:
        hosts = [host for held in self.account.held.values() for host in held.values()]
        if step.endswith("room"):
            hosts = [host for a, held in self.account.held.items() if "/growth-" in a.job_id for host in held.values()]
        match step:
            case "drain" | "drain room" if hosts:
                self.trouble(hosts[pick % len(hosts)], pick, "drain")
            case "call off" if hosts:
                self.trouble(hosts[pick % len(hosts)], pick, "call off")
            case "lose" | "lose room" if hosts:
                self.trouble(hosts[pick % len(hosts)], pick, "lost")
            case "move" if job.gang.placed:
                self.apply(GangMovedEvent(job.current_attempt(job.gang), "to more slices"))
            case "end quickly":
                for _ in range(7):
                    if job.gang.placed:
                        attempt = job.current_attempt(job.gang)
                        self.apply(TaskStateChangedEvent(attempt, pick % 2, S.WORKER_FAILED, "boom"))
                        self.run_all(10.0)
            case "repair":
                self.repair()
            case "pool dies":
                self.pool_dies(job.spec.owner)
        self.run_all((0.0, 1.0, 20.0)[pick % 3])

    def run_all(self, seconds: float) -> None:
        """What is over is gone, and what can run does."""
        self.confirm_all_that_is_over()
        self.schedule(seconds)
        for job, gang in list(self.live()):
            self.report_all(job, gang, S.RUNNING)

    @precondition(lambda self: any(self.live()))
    @rule(pick=PICK)
    def moves(self, pick: int) -> None:
        job, gang = self.live_gang(pick)
        attempt, charged = job.current_attempt(gang), (job.failures, job.preemptions)
        for _ in range(2):
            self.apply(GangMovedEvent(attempt, "to more slices"))
        assert gang.pending
        assert (job.failures, job.preemptions) == charged

    @rule(owner=st.sampled_from(OWNERS))
    def pool_dies(self, owner: str) -> None:
        """Its successor says so twice."""
        self.apply(PoolRestartedEvent(owner))
        before = view_all(self.state)
        assert self.apply(PoolRestartedEvent(owner)) == Instructions()
        assert view_all(self.state) == before
        assert not [attempt for attempt in self.account.held if self.state.jobs[attempt.job_id].spec.owner == owner]

    @rule(
        pick=PICK,
        index=st.integers(-1, 7),
        ahead=st.integers(-2, 1),
        state=st.sampled_from(list(TaskState)),
    )
    def report_of_anything(self, pick: int, index: int, ahead: int, state: TaskState) -> None:
        """Tasks and attempts that there are not, or not any more, and states that are not a task's to report."""
        job = self.job(pick)
        position = 0 if job.spec.coscheduling else index
        number = job.gangs[position if position in range(len(job.gangs)) else 0].attempt + ahead
        attempt = AttemptId(job.spec.job_id, number, position)
        about_now = not job.state.finished and not ahead and index in range(len(job.tasks))
        before = view_all(self.state)
        for _ in range(2):
            self.apply(TaskStateChangedEvent(attempt, index, state, "boom"))
            if not about_now:
                self.apply(TaskDispatchFailedEvent(attempt._replace(gang=index), "late", self.world.now))
        assert about_now or view_all(self.state) == before

    @rule(pick=PICK, index=st.integers(-1, 7), cancelled=st.booleans())
    def end_early(self, pick: int, index: int, cancelled: bool) -> None:
        """Cancel a job, or give it up: late, twice, though it runs or is over. Only what never ran is given up."""
        job_id = self.job(pick).spec.job_id
        for _ in range(2):
            self.apply(JobCancelledEvent(job_id, "x") if cancelled else TaskUnschedulableEvent(job_id, index, "x"))
        job = self.state.jobs[job_id]
        assert job.state.finished == (job.spec.spare_for is None) or not cancelled

    @precondition(lambda self: self.account.held)
    @rule(pick=PICK, all_that_is_over=st.booleans())
    def confirm(self, pick: int, all_that_is_over: bool) -> None:
        if all_that_is_over:
            self.confirm_all_that_is_over()
            return
        attempt = list(self.account.held)[pick % len(self.account.held)]
        live = self.oracle.is_live(attempt)
        for _ in range(2):
            assert self.apply(AttemptEndConfirmedEvent(attempt)) is not None
        assert self.state.holds_capacity(attempt) == live, "what lives holds its hosts until its last report"

    def confirm_all_that_is_over(self) -> None:
        for attempt in [attempt for attempt in self.account.held if not self.oracle.is_live(attempt)]:
            self.apply(AttemptEndConfirmedEvent(attempt))

    # -- picking -----------------------------------------------------------------------------------------------------

    def job(self, pick: int) -> Job:
        return list(self.state.jobs.values())[pick % len(self.state.jobs)]

    def live(self) -> Iterator[tuple[Job, Gang]]:
        for job in self.state.jobs.values():
            if not job.state.finished:
                yield from ((job, gang) for gang in job.gangs if view(gang).live)

    def live_gang(self, pick: int) -> tuple[Job, Gang]:
        gangs = list(self.live())
        return gangs[pick % len(gangs)]

    # -- after every step --------------------------------------------------------------------------------------------

    @precondition(lambda self: self.looks_often)
    @invariant()
    def indexes_are_up_to_date_and_every_job_runs_or_has_a_reason(self) -> None:
        self.oracle.check_plan(self.world.plan())
        self.world.scheduler.check(self.world.now)

    # -- the end -----------------------------------------------------------------------------------------------------

    def teardown(self) -> None:
        try:
            self.every_job_ends()
        finally:
            self.small_chunks.stop()

    def every_job_ends(self) -> None:
        """Once hosts are there, no limit is set and nothing else goes wrong, every job ends."""
        self.repair()
        for user, band in list(self.state.limits.table):
            self.limit(user, band, Limits())
        patience = 2 + sum(len(job.gangs) for job in self.state.jobs.values())
        while patience and not all(job.state.finished for job in self.state.jobs.values()):
            patience -= 1
            for job, gang in list(self.live()):
                self.report_all(job, gang, S.SUCCEEDED)
            self.confirm_all_that_is_over()
            self.schedule(1000.0)
            self.every_host_has_the_tasks_that_it_should_have()
            self.state_is_whole()
        waiting = {job_id: str(why) for job_id, why in self.world.plan().pending_reasons.items()}
        assert all(job.state.finished for job in self.state.jobs.values()), waiting
        self.state_is_whole()
