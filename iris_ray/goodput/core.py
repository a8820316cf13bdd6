"""The use of a job's time, and the time lost by several jobs. Pure."""

from collections.abc import Iterable, Mapping

from iris_ray.actors.protocol.status import JobFacts, job_in
from iris_ray.goodput.calls import JobGoodput
from iris_ray.model.goodput import JobTimes, Totals, failures, measure, time_lost
from iris_ray.model.time_lost import FailureCause, TimeLost, all_together


def job_goodput(of: JobFacts, times: JobTimes, now: float, chip_hour: tuple[float, str] | None) -> JobGoodput:
    """Return the time of a job until now, by its use.

    Args:
        of: the job.
        times: its times, with the latest marks that are known.
        now: seconds on the clock of the state.
        chip_hour: the price of a chip-hour of its type, and the currency; None if it is not known.
    """
    job = of.job
    totals, known = Totals.of(measure(times, job.submitted_at, now)), failures(times, now)
    return JobGoodput(
        **job_in("goodput", of),
        ended_at=of.wall_or_none(job.times.ended_at),
        seconds=dict(totals.seconds),
        chip_seconds=dict(totals.chip_seconds),
        goodput=totals.goodput,
        measured=totals.measured,
        time_lost=(lost := time_lost(times, now)),
        elastic_seconds=elastic_seconds(lost),
        last_failure=known[-1] if known else None,
        chip_hour=chip_hour,
        team=job.spec.team,
    )


def summed_up(jobs: Iterable[Mapping[FailureCause, TimeLost]]) -> dict[FailureCause, TimeLost]:
    """Return the total time lost by several jobs, by cause."""
    found: dict[FailureCause, list[TimeLost]] = {}
    for job in jobs:
        for cause, lost in job.items():
            found.setdefault(cause, []).append(lost)
    return {cause: all_together(parts) for cause, parts in found.items()}


def elastic_seconds(lost: Mapping[FailureCause, TimeLost]) -> dict[str, float]:
    """Return a job's time lost by the elastic kinds of badput of Google's ``ml-goodput-measurement`` 0.2, in seconds.

    MaxText records them: the wait for slices after a loss or for growth, and the time until the first step. As in the
    library, this initialization and preparation counts here only.
    """
    waits = {cause: found.waited_s for cause, found in lost.items()}
    grown_s = waits.pop(FailureCause.GROWN, 0.0)
    reinit_s = sum(found.reinit_s for found in lost.values())
    kinds = "elastic_slice_down", "elastic_scale_up", "elastic_reinitialization"
    return dict(zip(kinds, (sum(waits.values()), grown_s, reinit_s), strict=True))
