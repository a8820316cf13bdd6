"""What the time of jobs went into, and what the chips of the cluster are in, for people."""

from copy import copy
from dataclasses import replace
from datetime import UTC, datetime

from iris_ray.actors.controller.clock import Clock
from iris_ray.actors.controller.progress_board import Heard
from iris_ray.actors.wire.status import JobGoodput
from iris_ray.goodput.fleet_times import ChipState
from iris_ray.goodput.job_times import JobTimes
from iris_ray.goodput.measure import last_disruption, measure
from iris_ray.goodput.totals import Totals
from iris_ray.model.constraints import TAINT_PREFIX
from iris_ray.model.jobs import Job
from iris_ray.model.workers import TPU, Worker
from iris_ray.state import ControllerState
from iris_ray.state.quarantine import QUARANTINE


def job_goodput(job: Job, heard: Heard | None, clock: Clock) -> JobGoodput:
    """Return what the time of a job went into until now.

    Args:
        job: the job.
        heard: what its tasks have last said.
        clock: the Controller's.
    """
    times, now = _with_latest(job.times, heard), clock.now()
    totals = Totals.of(measure(times, job.submitted_at, now))
    return JobGoodput(
        number=job.number,
        job_id=job.spec.job_id,
        user=job.spec.user,
        state=job.state,
        submitted_at=clock.wall(job.submitted_at),
        ended_at=clock.wall_or_none(job.times.ended_at),
        attempts=job.attempt,
        seconds=dict(totals.seconds),
        chip_seconds=dict(totals.chip_seconds),
        goodput=totals.goodput,
        measured=totals.measured,
        last_disruption=last_disruption(times, now),
    )


def _with_latest(times: JobTimes, heard: Heard | None) -> JobTimes:
    """Return the times with what the latest attempt has said that is not recorded: it still runs, or broke off."""
    latest = times.attempts[-1] if times.attempts else None
    if heard is None or latest is None or heard.attempt != latest.number or latest.marks.steps:
        return times
    if not heard.marks.makes_sense:
        return times
    known = copy(times)
    known.attempts = [*times.attempts[:-1], replace(latest, marks=heard.marks)]
    return known


def chips_by_state(state: ControllerState) -> dict[ChipState, float]:
    """Return how many chips of the cluster are in each state now."""
    found: dict[ChipState, float] = {}
    for worker in state.workers.values():
        if chips := worker.resources.get(TPU, 0.0):
            now_in = _state_of(worker, state)
            found[now_in] = found.get(now_in, 0.0) + chips
    return found


def _state_of(worker: Worker, state: ControllerState) -> ChipState:
    if worker.occupants:
        job = state.jobs.get(next(iter(worker.occupants))[1].job_id)
        return ChipState.SPARE if job is not None and job.spec.spare_for is not None else ChipState.BUSY
    taints = [name for name in worker.attributes if name.startswith(TAINT_PREFIX)]
    if TAINT_PREFIX + QUARANTINE in taints:
        return ChipState.QUARANTINED
    if worker.draining or worker.foreign or taints:
        return ChipState.UNAVAILABLE
    return ChipState.WARM if worker.slice_name in state.holders else ChipState.FREE


def day_of(wall: float) -> str:
    """Return the day of a time in seconds since the epoch, in UTC."""
    return datetime.fromtimestamp(wall, UTC).date().isoformat()
