"""At the end of a world no more faults happen. Each job that fits on the fleet then runs in time, beside later jobs."""

import math

from iris_ray.model.jobs import Job
from iris_ray.model.lifecycle import AttemptId
from iris_ray.model.notices import NoticeKind
from iris_ray.model.options import PriorityBand
from iris_ray.model.workers import TPU_NAME
from iris_ray.scheduler.fair_queue import comes_last
from iris_ray.state.events import JobCancelledEvent, JobSubmittedEvent, MaintenanceCalledOffEvent
from tests.proofs.windows.world import Process, WindowWorld
from tests.support.worlds import gang_spec

MOST_RUN_S, MOST_LAUNCH_S, MOST_EXIT_S = 40.0, 4.0, 12.0
EACH_S = 60.0
"""For what comes between two attempts, beside the grace: launch, exit, and what returns or hopes for more slices."""
MOST_S = 8.0
"""Between two turns."""


class Quiet:
    """Nothing goes wrong any more in a world.

    Args:
        world: the world.
    """

    def __init__(self, world: WindowWorld) -> None:
        self._world = world
        self._chance = world.chance
        self._left_s: dict[tuple[str, int], float] = {}  # how long a gang has still to run
        self._began: dict[AttemptId, float] = {}
        self._leaves_at: dict[AttemptId, float] = {}
        self._confirms = False  # whether ends are confirmed that nobody could tell about
        self._crowd = 0

    def play(self) -> None:
        """Let the faults end. Then let a crowd pass, and then let all jobs end."""
        self._faults_end()
        if self._chance.random() < 0.4 or any(process.hangs for process in self._world.processes.values()):
            self._crowd_passes()
        self._all_end()

    def _faults_end(self) -> None:
        world = self._world
        world.deadly = 0.0
        for node_id, event in list(world.draining.items()):
            if event.kind is NoticeKind.MAINTENANCE:
                world.draining.pop(node_id)
                world.apply(MaintenanceCalledOffEvent(node_id))
            else:
                world.loses(node_id)
        for node_id in [node_id for node_id, event in world.hosts.items() if event.foreign]:
            world.loses(node_id)
        for node_id in list(world.gone):
            world.comes_back(node_id)
        world.turn()

    # -- a crowd -----------------------------------------------------------------------------------------------------

    def _crowd_passes(self) -> None:
        """New users come for as long as it takes; by their shares they go before those who wait, but not for ever."""
        world, band = self._world, self._chance.choice((PriorityBand.INTERACTIVE, PriorityBand.BATCH))
        waiting = {
            job.spec.job_id
            for job in world.unfinished()
            if len(job.gangs) == len(job.pending)
            and job.spec.priority <= band
            and self._could_run(job)
            and not comes_last(job)
        }
        gangs = sum(len(job.gangs) for job in world.unfinished())
        deadline = world.now + world.bound_s + (gangs + 1) * (MOST_RUN_S + EACH_S + world.grace_s)
        while waiting:
            assert world.now < deadline, f"{sorted(waiting)} have been passed for {world.now - deadline:.0f} s too long"
            while sum(job.spec.job_id.startswith("crowd") for job in world.state.pending()) < 2:
                self._crowd += 1
                name = f"crowd-{self._crowd}"
                spec = gang_spec(name, world.tpu_type, user=name, priority=band, max_retries_preemption=1000)
                world.apply(JobSubmittedEvent(spec, world.now))
            self._go_on()
            jobs = world.state.jobs
            waiting = {i for i in waiting if i in jobs and len(jobs[i].pending) == len(jobs[i].gangs)}
            waiting = {i for i in waiting if not jobs[i].state.finished}

    # -- the end of all ----------------------------------------------------------------------------------------------

    def _all_end(self) -> None:
        world = self._world
        self._confirms = True
        for process in world.processes.values():
            process.hangs, process.due = False, math.inf
        for job in world.unfinished():
            if not self._could_run(job):
                world.apply(JobCancelledEvent(job.spec.job_id, "it can't run here"))
        gangs = [(job, gang) for job in world.unfinished() for gang in job.gangs]
        runs_s = sum(self._left_of(job, gang.position) for job, gang in gangs)
        began, before = world.now, world.counts["attempts"]
        while unfinished := world.unfinished():
            attempts = len(gangs) + world.counts["attempts"] - before
            who = ", ".join(
                f"{job.spec.job_id}: {world.planner.pending_reasons.get(job.spec.job_id)}" for job in unfinished
            )
            assert attempts < 20 + 3 * (len(gangs) + 1) ** 2, f"jobs come and go, and do not end: {who}"
            most_s = world.bound_s + runs_s + attempts * (EACH_S + world.grace_s)
            assert world.now < began + most_s, f"jobs have not ended: {who}"
            self._go_on()
        until = world.now + 2 * MOST_EXIT_S
        while world.now < until:
            self._go_on()
        assert not world.processes, f"something runs for ever: {world.processes}"
        held = {worker.node_id: worker.occupants for worker in world.state.workers.values() if worker.occupants}
        assert not held, f"hosts are held for ever: {held}"

    def _could_run(self, job: Job) -> bool:
        """Return whether a job could run if it were alone, and its user's ends were confirmed."""
        world, spec = self._world, job.spec
        stuck = [attempt for attempt, process in world.processes.items() if process.hangs]
        jobs = world.state.jobs
        if comes_last(job) and stuck:
            return False
        if any(jobs[attempt.job_id].spec.user == spec.user for attempt in stuck):
            return False
        blocked = {node_id.split("-")[0] for attempt in stuck for node_id in world.processes[attempt].node_ids}
        free = set(world.slices) - blocked
        pinned = {constraint.value for constraint in spec.constraints if constraint.key == TPU_NAME}
        free = free & {str(name) for name in pinned} if pinned else free
        limits, needed = world.state.limits.of(spec.user, spec.priority), spec.groups_per_gang[0]
        chips = 4.0 * (needed * world.hosts_per_slice if spec.coscheduling else 1)
        return len(free) >= needed and limits.chips is not None and chips <= limits.chips

    # -- what goes on ------------------------------------------------------------------------------------------------

    def _left_of(self, job: Job, position: int) -> float:
        return self._left_s.setdefault((job.spec.job_id, position), self._chance.uniform(5.0, MOST_RUN_S))

    def _go_on(self) -> None:
        """Let pass the time until something happens, and let it happen."""
        world = self._world
        dues = [self._due(attempt, process) for attempt, process in world.processes.items()]
        at = min([*dues, world.a_moment(), world.now + MOST_S])
        world.now = max(world.now + 1.0, at)
        for attempt, process in list(world.processes.items()):
            if attempt in world.processes and self._due(attempt, process) <= world.now:
                self._happens(attempt, process)
        world.turn()

    def _due(self, attempt: AttemptId, process: Process) -> float:
        """Return when something happens to an attempt next."""
        world, chance = self._world, self._chance
        if process.over and attempt in self._began:  # it has saved its state
            self._left_s[attempt.job_id, attempt.gang] -= world.now - self._began.pop(attempt)
            process.due = math.inf
        if process.due == math.inf:
            process.due = world.now + chance.uniform(0.5, MOST_EXIT_S if process.over else MOST_LAUNCH_S)
            if process.over and process.hangs:
                process.due = 1e12
            elif process.begun and not process.over:
                self._began[attempt] = world.now
                live = world.live(attempt)
                is_spare = live is None or live[0].spec.spare_for is not None
                process.due = (
                    1e12 if is_spare or live is None else world.now + max(1.0, self._left_of(live[0], attempt.gang))
                )
        live = world.live(attempt)
        if live is not None and live[1].notice is not None and process.begun and live[0].spec.spare_for is None:
            leaves = self._leaves_at.setdefault(attempt, world.now + chance.choice((0.5, 3.0, 8.0, 1e12)))
            return min(process.due, leaves)
        return process.due

    def _happens(self, attempt: AttemptId, process: Process) -> None:
        world = self._world
        if process.over:
            world.does("confirm", attempt)
        elif not process.begun:
            process.due = math.inf
            world.does("begin", attempt)
        elif self._leaves_at.get(attempt, math.inf) <= world.now and process.due > world.now:
            world.does("leave", attempt)
        elif process.due <= world.now:
            world.does("finish", attempt)
            process.due = math.inf
