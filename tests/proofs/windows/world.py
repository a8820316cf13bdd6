"""One small cluster, what happens to it, and the deaths of its Controller."""

import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from iris_ray.errors import IllegalTransitionError
from iris_ray.model.constraints import Constraint, ConstraintOp
from iris_ray.model.job_spec import JobSpec
from iris_ray.model.jobs import Gang, Job
from iris_ray.model.lifecycle import AttemptId, TaskState
from iris_ray.model.limits import Limits
from iris_ray.model.notices import NoticeKind
from iris_ray.model.options import EACH_SLICE, PriorityBand
from iris_ray.model.workers import TPU_NAME
from iris_ray.scheduler import Scheduler
from iris_ray.scheduler.eviction_costs import EvictionRules
from iris_ray.scheduler.planner import PlacedGang, Planner
from iris_ray.state import ControllerState
from iris_ray.state.events import (
    AttemptEndConfirmedEvent,
    Event,
    GangMovedEvent,
    JobCancelledEvent,
    JobRestoredEvent,
    JobSubmittedEvent,
    JobYieldsEvent,
    LimitsSetEvent,
    MaintenanceCalledOffEvent,
    TaskDispatchFailedEvent,
    TaskStateChangedEvent,
    TimePassedEvent,
    WorkerDrainedEvent,
    WorkerFailedEvent,
    WorkerRegisteredEvent,
    WorkerSuspectedEvent,
)
from iris_ray.state.instructions import Instructions
from iris_ray.state.records import JobRecord
from tests.proofs.windows.rules import Rules
from tests.proofs.windows.seen import UNCONFIRMED_S
from tests.support.worlds import gang_spec, host, tasks_spec

S = TaskState
_, PRODUCTION, INTERACTIVE, BATCH = PriorityBand
MOST_WAIT_S = 250.0
USERS = ("ann", "bob", "cy")
OFTEN = {
    "time": 7, "soon": 7, "submit": 20, "begin": 30, "finish": 14, "crash": 4, "crash again": 4, "leave": 12,
    "confirm": 16, "suspect": 2, "lose": 1, "drain": 1, "call off": 3, "come back": 6, "cancel": 4, "yield": 3,
    "limit": 1, "launch fails": 1, "hang": 1, "stranger": 1,
}  # fmt: skip
"""What happens, and how often; each world draws its own frequencies around these."""


class WatchedState(ControllerState):
    """A state whose events the rules see.

    Args:
        rules: see them.
        count: called for each.
    """

    def __init__(self, rules: Rules, count: Callable[[], None]) -> None:
        super().__init__()
        self._rules, self._count = rules, count
        self.is_watched = False

    def handle_event(self, event: Event) -> Instructions:
        self._count()
        if not self.is_watched:
            return super().handle_event(event)
        self._rules.before(event)
        instructions = super().handle_event(event)
        self._rules.after(event, instructions)
        return instructions


@dataclass
class Process:
    """What really runs of an attempt.

    Attributes:
        node_ids: its hosts that are still there.
        begun: whether its tasks run.
        over: whether they are being ended, or have ended.
        hangs: whether nobody can tell that they are gone.
        due: when it does next what it does in the end; seconds.
    """

    node_ids: set[str]
    begun: bool = False
    over: bool = False
    hangs: bool = False
    due: float = math.inf


class WindowWorld:
    """A cluster with its users, faults and Controllers, all drawn from a seed.

    Args:
        seed: of all chance.
        rules: what must hold.

    Attributes:
        steps: events that states have handled.
        rules: what they have seen.
        counts: what has happened, by name.
        now: seconds.
        processes: what really runs.
        hosts, gone, draining: the hosts that are there, those that are lost, and the notices of some, by node id.
        limits: what operators have set.
        deadly: how often the Controller is killed in a turn.
        bound_s, grace_s, evictions: how it plans.
        slices, tpu_type: the names of the slices, all of one type.
    """

    def __init__(self, seed: str, rules: type[Rules] = Rules) -> None:
        self.chance = chance = Random(seed)
        self.steps = 0
        self.counts: Counter[str] = Counter()
        self.now = 10_000.0
        self.processes: dict[AttemptId, Process] = {}
        self.hosts: dict[str, WorkerRegisteredEvent] = {}
        self.gone: dict[str, WorkerRegisteredEvent] = {}
        self.draining: dict[str, WorkerDrainedEvent] = {}
        self.limits: dict[tuple[str, PriorityBand], LimitsSetEvent] = {}
        self._records: dict[str, bytes] = {}
        self._unacknowledged: list[Event] = []
        self._instructions = Instructions()
        self._named = 0
        self._often = {what: often * chance.choice((0, 1, 1, 1, 3)) for what, often in OFTEN.items()}
        for needed in ("time", "submit", "begin", "finish", "confirm"):
            self._often[needed] = max(OFTEN[needed], self._often[needed])
        self.deadly = chance.choice((0.0, 0.0, 0.05))
        self._turns, self._check_after = 0, chance.choice((1, 5, 25))
        self._most_placed = chance.choice((None, None, None, 1))
        self._most_jobs = chance.choice((4, 6, 9))
        self.bound_s = chance.choice((30.0, 60.0, 200.0))
        self.grace_s = chance.choice((5.0, 30.0, 30.0))
        least_run_s = dict.fromkeys(PriorityBand, chance.choice((0.0, 0.0, 20.0, 60.0)))
        del least_run_s[PriorityBand.PRODUCTION]
        self.evictions = EvictionRules(self.grace_s, least_run_s) if chance.random() < 0.95 else None
        self.rules = rules(self.evictions, self.bound_s)
        self.tpu_type = chance.choice(("v4-8", "v4-16"))
        self.slices = "abcdef"[: chance.choice((2, 2, 3, 3, 4, 4, 6))]
        for name in self.slices:
            for number in range(self.hosts_per_slice):
                registration = host(name, number, self.tpu_type)
                self.hosts[registration.node_id] = registration
        if chance.random() < 0.6:
            for user in USERS:
                self._draw_limit(user, chance.choice((PRODUCTION, INTERACTIVE)))
        self._begin()

    @property
    def hosts_per_slice(self) -> int:
        """How many hosts a slice has."""
        return {"v4-8": 1, "v4-16": 2}[self.tpu_type]

    # -- the Controller --------------------------------------------------------------------------------------------

    def _begin(self, restored: Iterable[bytes] = ()) -> None:
        """Have a Controller begin, which finds the hosts and the records of the one before."""
        self.state = WatchedState(self.rules, self._count)
        scheduler = Scheduler(self.bound_s, self.evictions)
        self.planner = Planner(self.state, look_again_s=0.5, scheduler=scheduler, most_placed=self._most_placed)
        self._instructions = Instructions()
        events: list[Event] = [TimePassedEvent(self.now), *self.limits.values()]
        events += [*self.hosts.values(), *self.draining.values()]
        records = sorted(map(JobRecord.joined, restored), key=lambda record: record.job.number)
        for event in (*events, *map(JobRestoredEvent, records), TimePassedEvent(self.now)):
            self._instructions.add(self.state.handle_event(event))

    def _count(self) -> None:
        self.steps += 1

    def turn(self) -> None:
        """Plan, write and carry out. The Controller may be killed before or after it writes."""
        self._tell_the_time()
        placements = self.planner.plan(self.now, self._instructions)
        for failed in self._instructions.failed:
            raise failed.error
        assert not self.planner.left_out, self.planner.left_out
        self.rules.turn_over(finished=not self.planner.unfinished)
        self._turns += 1
        if self._turns % self._check_after == 0:
            self.state.check()
        fate = self.chance.random() if self.deadly else 1.0
        if fate < self.deadly / 2:
            self._dies()
            return
        self._write()
        if fate < self.deadly:
            self._dies()
            return
        self._carry_out()
        self._start(placements)

    def _write(self) -> None:
        self._unacknowledged.clear()
        if self.deadly:
            for job_id in self.state.unrecorded:
                record = self.state.record(job_id)
                self._records.pop(job_id, None)
                if record is not None:
                    self._records[job_id] = record.to_bytes()
            self._ledger = self.rules.ledger.copy()
        self.state.unrecorded.clear()

    def _dies(self) -> None:
        """The Controller is killed. The next one has what was written; pools and users repeat what was not."""
        self.counts["killed"] += 1
        self._begin(self._records.values())
        self.rules.watch(self.state, self._ledger.copy())
        self.state.is_watched = True
        self._carry_out()
        repeated, self._unacknowledged = self._unacknowledged, []
        self.apply(*repeated)
        gangs = ((job, gang) for job in self.state.jobs.values() for gang in job.gangs if gang.placed)
        self._start([PlacedGang(job, gang, []) for job, gang in gangs])
        self.state.check()

    def _carry_out(self) -> None:
        instructions, self._instructions = self._instructions, Instructions()
        for attempt in [attempt for attempt in self.processes if attempt.job_id not in self.state.jobs]:
            del self.processes[attempt]  # of a spare that is dropped: it has run nothing of its user
        for stop in instructions.stop:
            if stop.attempt in self.processes:
                self.processes[stop.attempt].over = True
            else:  # a pool that is asked to stop what does not run says so
                self.apply(AttemptEndConfirmedEvent(stop.attempt))

    def _start(self, placements: Iterable[PlacedGang]) -> None:
        for one in placements:
            attempt = one.job.current_attempt(one.gang)
            if attempt in self.processes or not self.state.holds_capacity(attempt) or not one.gang.placed:
                continue
            node_ids = {task.node_id or "" for task in one.gang.tasks}
            for other, process in self.processes.items():
                shared = node_ids & process.node_ids
                assert not shared, f"{attempt} starts on {sorted(shared)}, where {other} still runs"
            self.processes[attempt] = Process(node_ids)
            self.counts["attempts"] += 1

    def _tell_the_time(self) -> None:
        if self.rules.now < self.now:
            self.rules.now = self.now
            self._instructions.add(self.state.handle_event(TimePassedEvent(self.now)))

    def apply(self, *events: Event) -> None:
        """Tell the Controller what has happened."""
        self._tell_the_time()
        for event in events:
            if not isinstance(event, WorkerRegisteredEvent | WorkerFailedEvent | WorkerDrainedEvent | LimitsSetEvent):
                self._unacknowledged.append(event)
            try:
                self._instructions.add(self.state.handle_event(event))
            except IllegalTransitionError:  # it has lost the job or the attempt
                assert self.deadly, event

    # -- the story -------------------------------------------------------------------------------------------------

    def play(self, steps: int) -> None:
        """Let things happen for that many steps."""
        self.rules.watch(self.state)
        self.state.is_watched = True
        self._write()
        whats, weights = list(self._often), list(self._often.values())
        while self.steps < steps:
            before = self.steps, self.now
            while before == (self.steps, self.now) or self.chance.random() < 0.2:
                self._happens(*self.chance.choices(whats, weights))
            self.turn()

    def _happens(self, what: str) -> None:
        before = self.steps
        match what:
            case "time":
                self._wait_until(self.a_moment())
            case "soon":
                self.now += self.chance.choice((0.1, 1.0, 4.0))
            case "submit":
                self._submit()
            case "cancel":
                self._cancel()
            case "yield":
                self._yield()
            case "limit":
                self._limit()
            case "suspect" | "lose" | "drain" | "call off" | "come back" | "stranger":
                self._happens_to_hosts(what)
            case _:
                self._happens_to_processes(what)
        self.counts[what] += self.steps > before

    def _wait_until(self, until: float) -> None:
        """Let time pass, with a turn every few seconds."""
        each_s = max(5.0, (until - self.now) / 4)
        while self.now + each_s < until:
            self.now += each_s
            self.turn()
        self.now = max(self.now, until)

    def a_moment(self) -> float:
        """Return a time just before, at or after something ends."""
        ends = [worker.suspected_until for worker in self.state.workers.values()]
        ends += [since + UNCONFIRMED_S for since in self.rules.ledger.ended.values()]
        for job in self.state.jobs.values():
            for gang in job.gangs:
                ends += [gang.not_before, gang.returning_until] if gang.pending else []
                ends += [gang.waiting_since + self.bound_s + 0.1] if gang.pending else []
                ends += [gang.eviction.deadline] if gang.eviction else []
        later = sorted(end for end in ends if self.now < end < self.now + MOST_WAIT_S)
        if not later or self.chance.random() < 0.2:
            return self.now + self.chance.choice((1.0, 6.0, 20.0, 31.0, 130.0))
        at = later[0] if self.chance.random() < 0.6 else self.chance.choice(later)
        return at + self.chance.choice((-0.1, 0.0, 0.1, 1.0))

    # -- what happens to jobs --------------------------------------------------------------------------------------

    def unfinished(self) -> list[Job]:
        return [job for job in self.state.jobs.values() if not job.state.finished and job.spec.spare_for is None]

    def _waits_with_promise(self) -> list[Job]:
        return [job for job in self.unfinished() if job.promise is not None]

    def _submit(self) -> None:
        if len(self.unfinished()) >= self._most_jobs + 3 * self._is_rush_hour:
            return
        spec = self._draw_job()
        self.apply(JobSubmittedEvent(spec, self.now))
        if (spec.user, spec.priority) in self.state.limits.table and self.chance.random() < 0.5:
            self.apply(JobSubmittedEvent(self._draw_job(spec), self.now))  # both can run, but not beside each other
        if spec.user == "slots" and spec.num_gangs == 1 and self.chance.random() < 0.7:
            self.apply(JobYieldsEvent(spec.job_id, True))

    @property
    def _is_rush_hour(self) -> bool:
        """Whether jobs of the lowest band have about half of the slices, so that there are victims."""
        return 2 * len(self.state.attempts[BATCH]) >= len(self.slices)

    def _draw_job(self, rival: JobSpec | None = None) -> JobSpec:
        """Draw a job: of a low band as a rule, and of a high one while low ones have many hosts.

        If another job has a promise, it is often one that may get into its way: of its user, or of its band. If a gang
        pauses, it is often one that gets the slices of that gang.

        Args:
            rival: a job for whose limit it competes; None: chance decides.
        """
        chance = self.chance
        self._named += 1
        job_id, user, band = f"job-{self._named}", chance.choice(USERS), chance.choice(list(PriorityBand))
        if chance.random() < 0.8:
            high, low = (PRODUCTION, PRODUCTION, INTERACTIVE), (BATCH, BATCH, INTERACTIVE)
            band = chance.choice(high if self._is_rush_hour else low)
        limited = [(user, other) for user, other in self.state.limits.table if other is band]
        if limited and chance.random() < 0.6:
            user, band = chance.choice(limited)
        in_the_way = False
        if (others := self._waits_with_promise()) and chance.random() < 0.5:
            other = chance.choice(others)
            in_the_way = chance.random() < 0.7
            user, band = other.spec.user if in_the_way else user, other.spec.priority
        gangs = [job for job in self.unfinished() if job.spec.coscheduling]
        paused = [job for job in gangs if any(gang.not_before > self.now for gang in job.gangs)]
        is_large = rival is None and bool(paused) and chance.random() < 0.5
        if is_large:
            band = chance.choice(paused).spec.priority
        if rival is not None:
            user, band = rival.user, rival.priority
        terms: dict[str, Any] = {
            "user": user,
            "priority": band,
            "max_retries_failure": 1000,
            "max_retries_preemption": 1000,
        }
        if is_large:  # a gang that pauses has left its slices, and comes back to them
            return gang_spec(job_id, self.tpu_type, (2,), **terms)
        pinned: tuple[Constraint, ...] = ()
        if chance.random() < (0.5 if in_the_way else 0.1):
            pinned = (Constraint(TPU_NAME, ConstraintOp.EQ, chance.choice(self.slices)),)
        if chance.random() < 0.05:
            terms["scheduling_timeout"] = 60.0
        kinds = ("gang", "gang", "gang", "gang", "spares", "grows", "tasks", "slots", "slots", "each slice")
        kind = chance.choice(kinds)
        if kind == "tasks":
            return tasks_spec(job_id, chance.choice((1, 1, 2, 4)), **terms, constraints=pinned)
        most = len(self.slices)
        sizes = (1, 1, 1, 2) if band is BATCH else (1, 1, 1, 2, 2, min(3, most), most)  # many small victims
        slices: tuple[int, ...] = (1 if pinned else chance.choice(sizes),)
        if kind == "spares":
            terms["spares"] = chance.choice((1, 1, 2))
        if kind == "grows" and not pinned:
            slices, terms["grow_after"] = (1, 2), chance.choice((0.0, 20.0))
        if kind == "each slice":
            terms["failure_domain"] = EACH_SLICE
        if kind == "slots":
            slices, terms["user"], terms["may_evict"] = (1,), "slots", False
        spec = gang_spec(job_id, self.tpu_type, slices, **terms)
        return replace(spec, constraints=spec.constraints + pinned) if pinned else spec

    def _cancel(self) -> None:
        jobs = self._waits_with_promise() if self.chance.random() < 0.5 else self.unfinished()
        if jobs:
            self.apply(JobCancelledEvent(self.chance.choice(jobs).spec.job_id, "cancelled by its user"))

    def _yield(self) -> None:
        jobs = [job for job in self.unfinished() if len(job.gangs) == 1]
        if self.chance.random() < 0.8:
            jobs = [job for job in jobs if job.spec.user == "slots"]
        if jobs:
            job = self.chance.choice(jobs)
            self.apply(JobYieldsEvent(job.spec.job_id, not job.yields))

    def _limit(self) -> None:
        chance = self.chance
        takers = [job.spec for job in self._waits_with_promise()]
        user, band = chance.choice(USERS), chance.choice(list(PriorityBand))
        if takers and chance.random() < 0.2:
            taker = chance.choice(takers)
            user, band = taker.user, taker.priority
        self.apply(self._draw_limit(user, band))

    def _draw_limit(self, user: str, band: PriorityBand) -> LimitsSetEvent:
        each = 4.0 * self.hosts_per_slice
        choices = Limits(chips=each), Limits(chips=2 * each), Limits(running_jobs=1), Limits(running_jobs=2), Limits()
        self.limits[user, band] = event = LimitsSetEvent(user, band, self.chance.choice(choices))
        return event

    # -- what happens to attempts ----------------------------------------------------------------------------------

    def live(self, attempt: AttemptId) -> tuple[Job, Gang] | None:
        """Return an attempt's job and gang if the Controller takes it for live."""
        job = self.state.jobs.get(attempt.job_id)
        gang = job.gangs[attempt.gang] if job is not None else None
        if job is None or gang is None or gang.attempt != attempt.number or not gang.placed:
            return None
        return job, gang

    def _happens_to_processes(self, what: str) -> None:
        found = [attempt for attempt, process in self.processes.items() if self._may_happen(what, attempt, process)]
        if what == "finish" and self.chance.random() < 0.5:  # so that others find room, and can be evicted
            found = [attempt for attempt in found if self.state.jobs[attempt.job_id].spec.priority is PRODUCTION]
        if what in ("launch fails", "crash", "crash again") and self.chance.random() < 0.5:  # and pauses with a promise
            known = [attempt for attempt in found if attempt.job_id in self.state.jobs]  # a spare's may be forgotten
            promised = [attempt for attempt in known if self.state.jobs[attempt.job_id].promise is not None]
            found = promised or found
        if found:
            self.does(what, self.chance.choice(found))

    def _may_happen(self, what: str, attempt: AttemptId, process: Process) -> bool:
        match what:
            case "begin" | "launch fails":
                return not process.begun and not process.over
            case "confirm":
                return process.over and not process.hangs
            case "hang":
                return process.over and bool(process.node_ids)
        live = self.live(attempt)
        if not process.begun or process.over or live is None:
            return False
        job, gang = live
        match what:
            case "leave":
                return gang.notice is not None and job.spec.spare_for is None
            case "crash again":
                return gang.quick_ends > 0
            case "finish":
                return job.spec.spare_for is None
        return True

    def does(self, what: str, attempt: AttemptId) -> None:
        """Have something happen to an attempt."""
        process, live = self.processes[attempt], self.live(attempt)
        if live is None and what != "confirm" and what != "hang":
            return  # the Controller is about to stop it
        match what:
            case "begin":
                process.begun = True
                self._report(attempt, S.RUNNING)
            case "finish":
                process.over = True
                self._report(attempt, S.SUCCEEDED)
            case "crash" | "crash again":
                assert live is not None
                state = S.WORKER_FAILED if self.chance.random() < 0.5 else S.FAILED
                self.apply(TaskStateChangedEvent(attempt, live[1].tasks[0].index, state, "boom"))
            case "leave":
                process.over = True
                self.apply(GangMovedEvent(attempt, "it has saved its state"))
            case "launch fails":
                process.over = True
                self.apply(TaskDispatchFailedEvent(attempt, "no answer", self.now))
            case "hang":
                process.hangs = True
            case "confirm":
                del self.processes[attempt]
                self.apply(AttemptEndConfirmedEvent(attempt))

    def _report(self, attempt: AttemptId, state: TaskState) -> None:
        found = self.live(attempt)
        assert found is not None
        self.apply(*[TaskStateChangedEvent(attempt, task.index, state) for task in found[1].tasks])

    # -- what happens to hosts -------------------------------------------------------------------------------------

    def _happens_to_hosts(self, what: str) -> None:
        chance = self.chance
        if what == "come back":
            if self.gone:
                self.comes_back(chance.choice(sorted(self.gone)))
            return
        if what == "call off":
            self._drains_end()
            return
        promised = {
            node_id for job in self._waits_with_promise() for node_id in (job.promise.node_ids if job.promise else ())
        }
        ending = {node_id for process in self.processes.values() if process.over for node_id in process.node_ids}
        places = chance.choice((promised, promised, ending, set(self.hosts)))
        hosts = sorted(places & self.hosts.keys() or self.hosts)
        if not hosts:
            return
        node_id = chance.choice(hosts)
        match what:
            case "suspect" if self.state.workers[node_id].suspected_until < self.now:
                self.apply(WorkerSuspectedEvent(node_id, "no answer", self.now))
            case "lose":
                self.loses(node_id)
            case "stranger":
                foreign = None if self.hosts[node_id].foreign else "a stranger"
                self.hosts[node_id] = replace(self.hosts[node_id], foreign=foreign)
                self.apply(self.hosts[node_id])
            case "drain" if node_id not in self.draining:
                kind = chance.choice((NoticeKind.PREEMPTION, NoticeKind.MAINTENANCE))
                self.draining[node_id] = WorkerDrainedEvent(node_id, "notice", kind, self.now + 60.0)
                self.apply(self.draining[node_id])

    def _drains_end(self) -> None:
        """Maintenances are called off; hosts that were preempted are gone."""
        for node_id, event in list(self.draining.items()):
            if event.kind is NoticeKind.MAINTENANCE:
                del self.draining[node_id]
                self.apply(MaintenanceCalledOffEvent(node_id))
            elif self.chance.random() < 0.5:
                self.loses(node_id)

    def loses(self, node_id: str) -> None:
        """A host dies."""
        self.gone[node_id] = replace(self.hosts.pop(node_id), foreign=None)
        self.draining.pop(node_id, None)
        for process in self.processes.values():
            process.node_ids.discard(node_id)
            process.hangs &= bool(process.node_ids)  # a pool knows that nothing is left on dead hosts
        self.apply(WorkerFailedEvent(node_id, "the host died"))

    def comes_back(self, node_id: str) -> None:
        """A host is there again."""
        self.hosts[node_id] = self.gone.pop(node_id)
        self.apply(self.hosts[node_id])
