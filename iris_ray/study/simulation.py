"""The Controller in virtual time: events change the state, the planner plans and commits, simulated pools carry out."""

import math
from collections.abc import Iterable, Iterator

from iris_ray.model.jobs import Job
from iris_ray.model.workers import TPU
from iris_ray.scheduler import Scheduler
from iris_ray.scheduler.eviction_costs import DEFAULT_RULES, EvictionRules
from iris_ray.scheduler.pending_reason import PendingReason
from iris_ray.scheduler.planner import PlacedGang, Planner
from iris_ray.scheduler.scheduler import BACKFILL_BOUND_S
from iris_ray.state import ControllerState
from iris_ray.state.events import Event, JobCancelledEvent, JobSubmittedEvent, TimePassedEvent
from iris_ray.state.instructions import Instructions
from iris_ray.study.agenda import Agenda, Timings
from iris_ray.study.history import History
from iris_ray.study.hosts import SimulatedHosts
from iris_ray.study.jobs import SimulatedJob
from iris_ray.study.pools import SimulatedPools

LOOK_AGAIN_S, LOOKS_APART = 60.0, 16


class Simulation:
    """A cluster in virtual time. The Controller's own code makes all its decisions.

    Args:
        timings: how long the actions of hosts and pools take.
        backfill_bound_s: for how many seconds later jobs may pass a waiting job.
        plan_every_s: make plans only at multiples of this number of seconds, for speed; 0: after every event, as the
            Controller does.
        look_again_s: how long the latest plan holds while jobs wait and nothing happens; each further plan holds twice
            as long, up to 16 times this. The Controller looks twice a second. Pauses and timeouts end at their time
            anyway.
        check_every: the number of events between two checks of the state's invariants, for tests; 0: no checks.
        evictions: when jobs may take hosts from lower bands; None: never.
    """

    def __init__(
        self,
        timings: Timings | None = None,
        backfill_bound_s: float = BACKFILL_BOUND_S,
        plan_every_s: float = 0.0,
        look_again_s: float = LOOK_AGAIN_S,
        check_every: int = 0,
        evictions: EvictionRules | None = DEFAULT_RULES,
    ) -> None:
        self.state = ControllerState()
        self.agenda = Agenda()
        self.history = History()
        self._planner = Planner(self.state, look_again_s, Scheduler(backfill_bound_s, evictions))
        self.pools = SimulatedPools(
            self.agenda, self.state, self.apply, self.look_at, self.history, timings or Timings()
        )
        self.hosts = SimulatedHosts(self.agenda, self.state.fleet, self.apply, self.history, self.pools)
        self._plan_every_s = plan_every_s
        self._look_again_s = look_again_s
        self._check_every = check_every
        self._instructions = Instructions()  # of the events since the latest plan
        self._backlogs: dict[str, Iterator[SimulatedJob]] = {}  # id of a waiting job → its user's next jobs
        self._changed = False  # whether events have come since the latest plan
        self._told = 0.0  # the time that the state knows
        self._looks_at = 0.0
        self._looks_apart_s = look_again_s
        self._events_looked_at = 0
        self._growth_at = math.inf

    @property
    def now(self) -> float:
        """Seconds since the beginning."""
        return self.agenda.now

    def why(self, job_id: str) -> str:
        """Return why a job waits, by the latest plan; an empty string if it does not."""
        return str(self._planner.pending_reasons.get(job_id, ""))

    @property
    def waits(self) -> list[tuple[Job, PendingReason]]:
        """The jobs that wait, with their reasons from the latest plan."""
        reasons = self._planner.pending_reasons
        return [(self.state.jobs[i], why) for i, why in reasons.items() if i in self.state.jobs]

    # -- planned events --------------------------------------------------------------------------------------------

    def submit(self, job: SimulatedJob, at: float | None = None) -> None:
        """Submit a job, now or at a time."""
        self.agenda.at(self.now if at is None else at, self._submit, job)

    def submit_all(self, jobs: Iterable[tuple[float, SimulatedJob]]) -> None:
        """Submit many jobs, each at its time. They must come in the order of their times, and are read one by one."""
        self._submit_next(iter(jobs))

    def keep_waiting(self, jobs: Iterable[SimulatedJob], waiting: int = 1) -> None:
        """Submit one job after the other, so that ``waiting`` of them wait for their first hosts while any are left."""
        backlog = iter(jobs)
        for _ in range(waiting):
            self._submit_from(backlog)

    def cancel(self, job_id: str, at: float | None = None) -> None:
        """Have a job's user cancel it, now or at a time."""
        event = JobCancelledEvent(job_id, "cancelled by its user")
        self.agenda.at(self.now if at is None else at, self.apply, (event,))

    def finish(self, job_id: str, at: float | None = None) -> None:
        """Have all running tasks of a job return, now or at a time."""
        self.agenda.at(self.now if at is None else at, self.pools.finish, job_id)

    # -- the course of time ----------------------------------------------------------------------------------------

    def run_until(self, end: float) -> None:
        """Let time pass, in seconds since the beginning."""
        while (when := self.now if self._changed else self.agenda.next_at) <= end:
            self.agenda.run_until(min(end, self._turn_at(when)))
            self._take_turn()
        self.agenda.now = end

    def look_at(self, when: float) -> None:
        """Request a plan at a time, even without events."""
        self.agenda.at(when, self._planner.look_again)

    def apply(self, events: Iterable[Event]) -> None:
        """Have the state handle events, at the current time."""
        state, history, instructions = self.state, self.history, self._instructions
        if self._told < self.agenda.now:
            self._told = self.agenda.now
            instructions.add(state.handle_event(TimePassedEvent(self._told)))
        for event in events:
            instructions.add(state.handle_event(event))
            history.events += 1
            self._changed = True
            if self._check_every and history.events % self._check_every == 0:
                state.check()

    def _turn_at(self, when: float) -> float:
        every_s = self._plan_every_s
        return max(when, math.ceil(when / every_s) * every_s) if every_s else when  # the product may be rounded down

    def _take_turn(self) -> None:
        self.apply(())
        self._changed = False
        self.history.plans += 1
        placements = self._planner.plan(self.now, self._instructions)
        self._require_no_defect()
        self.history.starved = self._planner.counts["starved"]
        instructions, self._instructions = self._instructions, Instructions()
        self.state.unrecorded.clear()
        for placement in placements:
            self._note(placement)
        self.pools.carry_out(instructions, placements)
        if self._growth_at != self.state.next_growth_at:
            self._growth_at = self.state.next_growth_at
            self.look_at(self._growth_at)
        if self._planner.pending_reasons and self._looks_at <= self.now:
            happened = self.history.events > self._events_looked_at
            self._events_looked_at = self.history.events
            most_s = LOOKS_APART * self._look_again_s
            self._looks_apart_s = self._look_again_s if happened else min(most_s, 2 * self._looks_apart_s)
            self._looks_at = self.now + self._looks_apart_s
            self.look_at(self._looks_at)

    def _require_no_defect(self) -> None:
        """Raise the defects that the Controller would contain: a simulation has to show them."""
        for failure in self._instructions.failed:
            raise failure.error
        for aside in self._planner.left_out.values():
            raise RuntimeError(str(aside))

    def _note(self, placement: PlacedGang) -> None:
        job, gang = placement.job, placement.gang
        host = self.state.workers[gang.tasks[0].node_id or ""]
        held = {name: amount * len(gang.tasks) for name, amount in job.requirement.demand(host).items()}
        self.history.assigned(job, gang, held, self.now, beside_tpus=TPU in host.resources)
        if (backlog := self._backlogs.pop(job.spec.job_id, None)) is not None:
            self._submit_from(backlog)

    # -- submitting ------------------------------------------------------------------------------------------------

    def _submit(self, job: SimulatedJob) -> None:
        self.pools.accept(job)
        self.history.submitted(job.spec, self.now)
        self.apply([JobSubmittedEvent(job.spec, self.now)])
        if job.spec.scheduling_timeout is not None:
            self.look_at(self.now + job.spec.scheduling_timeout + 1.0)

    def _submit_next(self, jobs: Iterator[tuple[float, SimulatedJob]]) -> None:
        if (following := next(jobs, None)) is not None:
            at, job = following
            self.agenda.at(at, self._submit, job)
            self.agenda.at(at, self._submit_next, jobs)

    def _submit_from(self, backlog: Iterator[SimulatedJob]) -> None:
        if (job := next(backlog, None)) is not None:
            self._backlogs[job.spec.job_id] = backlog
            self.submit(job)
