"""The Controller's answers to pools: jobs, reports, and evidence about their hosts."""

import asyncio
from dataclasses import replace

from ray.actor import ActorHandle

from iris_ray.actors.calls.clocks import by_this_clock
from iris_ray.actors.calls.message_checks import checked
from iris_ray.actors.controller.controller_process import ControllerProcess
from iris_ray.actors.controller.pool_registry import Pool
from iris_ray.actors.controller.progress_board import newer_marks, news_of_saves
from iris_ray.actors.protocol.controller_interface import OVER_WITHIN_S, ReportedEvent
from iris_ray.actors.protocol.messages import GangProgress, JobView, PoolProcess
from iris_ray.actors.protocol.status import JobFacts, job_status
from iris_ray.errors import DeposedError, InvalidJobError, InvalidMessageError, JobCancelledError, UnknownNameError
from iris_ray.model.checks import shown, unknown, unknown_number
from iris_ray.model.job_spec import JobSpec
from iris_ray.model.lifecycle import AttemptId, JobState
from iris_ray.model.notices import OUR_MOVES
from iris_ray.model.outcomes import HostEvidence, ProviderWord
from iris_ray.scheduler.never_fits import never_fits
from iris_ray.state.events import (
    AttemptMarkedEvent,
    Event,
    JobCancelledEvent,
    JobSubmittedEvent,
    TaskDispatchFailedEvent,
    WorkerDrainedEvent,
    WorkerSuspectedEvent,
)

TIMED = (TaskDispatchFailedEvent, WorkerSuspectedEvent)
"""Reports that get the Controller's time: the clocks of other hosts may differ."""
OVER_LOOK_S = 0.5
"""The interval at which the Controller looks whether a job has ended for whose end a pool waits."""


class PoolCalls(ControllerProcess):
    """The actor's methods for pools. See `ForPools`."""

    @checked
    async def submit(self, spec: JobSpec, pool: ActorHandle, incarnation: int) -> JobState:
        await self.ping()
        if not Pool.is_one(pool):
            raise InvalidJobError(
                f"job {spec.job_id}: {shown(pool)} is not a SlicePoolManager; submit it through IrisClient"
            )
        if spec.spare_for is not None:
            raise InvalidJobError(f"job {spec.job_id} says that it is a spare of another one; leave spare_for out")
        if spec.owner not in self._pools:
            self._pools.meet(spec.owner, Pool(pool), incarnation)
        await self._pools.process_is(spec.owner, incarnation)
        if spec.owner not in self._pools:
            raise DeposedError("the pool that submits this job is gone")
        known = self._state.jobs.get(spec.job_id)
        if known is None or self._state.job_groups.is_submitted_again(spec):
            team = self._state.teams.teams.team_for(spec.user, spec.team or None)
            spec = spec if team == spec.team else replace(spec, team=team)
            self._permissions.require_band(spec)
            await self._services.admit(spec)
            self._require_predecessors(spec)
            await self._require_fitting_group(spec)
            self._state.limits.require_room(spec)
        elif replace(spec, team=known.spec.team) != known.spec:
            raise InvalidJobError(f"there is a job {spec.job_id} already, of {known.spec.user}; choose another id")
        else:
            spec = known.spec
        await self._events.recorded([JobSubmittedEvent(spec, self._clock.now())])
        if (aside := self._journal.contained.jobs.get(spec.job_id)) is not None:
            raise JobCancelledError(f"job {spec.job_id} was cancelled: {aside.why}")
        return self._state.jobs[spec.job_id].state

    async def _require_fitting_group(self, spec: JobSpec) -> None:
        """Refuse a job whose group can never start as a whole. Its other jobs end with that reason."""
        if spec.group is None:
            return
        if (why := self._state.job_groups.mismatch(spec)) is not None:
            raise InvalidJobError(why)
        known = (self._state.jobs.get(job_id) for job_id in spec.group.job_ids.values())
        there = [job for job in known if job is not None and not job.state.finished]
        if len(there) + 1 < len(spec.group.members) or self._board.brings_slices:
            return  # some are still to come, or somebody brings more slices
        if (why := never_fits([*(job.spec for job in there), spec], self._state.workers.values())) is not None:
            reason = f"group {spec.group.name} can never start: {why}"
            await self._events.recorded(JobCancelledEvent(job.spec.job_id, reason) for job in there[:1])
            raise InvalidJobError(f"{reason}. Ask for fewer, or add what is missing first")

    def _require_predecessors(self, spec: JobSpec) -> None:
        """Refuse a job that comes after one that is not known, or is forgotten."""
        for job_id in spec.after:
            if job_id not in self._state.jobs:
                problem = unknown("job", job_id, self._state.jobs)
                raise UnknownNameError(
                    f"{spec.name or spec.job_id} is to run after {job_id}: {problem}. If that has ended long ago, it is"
                    " forgotten: leave it out of `after`"
                )

    @checked
    async def report(
        self,
        job_id: str | None,
        events: list[ReportedEvent],
        gang: int = 0,
        sender: PoolProcess | None = None,
        sent_at: float | None = None,
    ) -> JobView | None:
        if sent_at is not None:  # before any wait
            events = [by_this_clock(one, sent_at) if isinstance(one, WorkerDrainedEvent) else one for one in events]
        await self.ping()
        if sender is not None:
            self._pools.require_latest(sender)
            self._permissions.require_pools_own(sender.owner, job_id or "")
        if any(isinstance(event, WorkerDrainedEvent) and event.kind in OUR_MOVES for event in events):
            raise InvalidMessageError("a host gives notice of preemption or maintenance only")
        events = self._permissions.of_pools_own(sender.owner if sender else "", events)
        self._nodes.note_drains(events)
        owner = sender.owner if sender is not None else None
        await self._events.recorded(self._as_of_pool(event, owner) for event in events)
        job = self._state.jobs.get(job_id or "")
        if job is None:
            return None
        if not 0 <= gang < len(job.gangs):
            raise unknown_number(f"gang of {job_id}", gang, range(len(job.gangs)))
        found, state = job.gangs[gang], job.gang_state(gang)
        counts = found.attempt, found.failures, found.preemptions, found.dispatch_failures
        return JobView(state, *counts, found.error or job.error, job.state)

    @checked
    async def until_over(self, job_id: str) -> bool:
        for _ in range(int(OVER_WITHIN_S / OVER_LOOK_S)):
            await self.ping()
            job = self._state.jobs.get(job_id)
            if job is None or job.state.finished:
                return True
            await asyncio.sleep(OVER_LOOK_S)
        return False

    @checked
    async def why(self, job_id: str) -> str:
        await self.ping()
        job = self._state.jobs.get(job_id)
        if job is None:
            return "the Controller does not know it"
        if not job.pending:
            return (
                f"it is being started on {', '.join(job_status(JobFacts(job, self._state, self._clock.wall)).groups)}"
            )
        return str(self._waiting(job) or "it will be looked at in a moment")

    @checked
    async def evidence(self, node_ids: list[str]) -> dict[str, HostEvidence]:
        await self.ping()
        return self._nodes.evidence(node_ids)

    @checked
    async def is_to_grow(self, attempt: AttemptId) -> bool:
        await self.ping()
        job = self._state.jobs.get(attempt.job_id)
        gang = None if job is None else job.gangs[attempt.gang]
        return gang is not None and gang.attempt == attempt.number and gang.is_to_grow

    @checked
    async def provider_words(self, node_ids: list[str]) -> dict[str, ProviderWord]:
        await self.ping()
        names = self._nodes.slices_of(node_ids)
        words = await self._services.slices_lost(frozenset(names.values()))
        return {node_id: words[name] for node_id, name in names.items() if name in words}

    @checked
    async def note_progress(self, progress: GangProgress, sender: PoolProcess) -> None:
        job_id = progress.attempt.job_id
        self._permissions.require_pools_own(sender.owner, job_id)
        if job_id in self._state.jobs:
            self._progress.note(progress, self._clock.now(), self._state.jobs)
            self._state.show_anew(job_id)
            job = self._state.jobs[job_id]
            times, gang = job.times, job.gangs[progress.attempt.gang]
            if (news := news_of_saves(gang, progress, self._clock.now())) is not None:
                self._events.apply([news])
            marks = newer_marks(times, self._progress.of(job_id))
            if marks is not None and len(marks.steps) > 1 and not times.attempts[-1].marks.steps:
                self._events.apply([AttemptMarkedEvent(progress.attempt, marks)])  # a gang makes progress again

    def _as_of_pool(self, event: ReportedEvent, owner: str | None) -> Event:
        """Return a pool's event with times by the Controller's clock, and with its sender."""
        if isinstance(event, TIMED):
            return replace(event, now=self._clock.now())
        return self._clock.heard(replace(event, told_by=owner)) if isinstance(event, WorkerDrainedEvent) else event
