"""When a gang on fewer slices than it can use moves to more: once these have been free for as long as the move costs.

Nobody knows how long the slices will stay. A gang that moves once the wait has cost as much as the move loses at most
twice as much as one that knew the future (ski rental: Karlin et al., "Competitive snoopy caching", 1988). The price is
what the job's own planned moves have cost. A gang whose moves in a row were undone before they had paid waits twice as
long after each of them.
"""

from iris_ray.model.goodput import planned_move_s
from iris_ray.model.jobs import Job
from iris_ray.model.time_lost import FailureCause

LEAST_S = 300.0
"""Slices must have been free for at least so long, so that the next job finds some free."""
LEAST_TO_RETURN_S = 10.0
"""The same for a gang that goes back to as many slices as it had before it lost some."""
MOST_S = 12 * 3600.0
"""No gang waits longer, however often its moves were undone."""
UNKNOWN_S = 600.0
"""The assumed cost of a move for a job without measured failures, which may have no recent checkpoint."""
MOST_DOUBLINGS = 20


def patience_s(job: Job, have: int, gained: int, now: float) -> float:
    """Return for how many seconds further slices must have been free before a job moves to them.

    A move stops the slices that the job has, and wins the others.

    Args:
        job: the job.
        have: how many slices it has.
        gained: how many it would have in addition.
        now: seconds on the clock of the events.
    """
    measured = planned_move_s(job.times, now)
    cost_s = UNKNOWN_S if measured is None else measured
    least_s = LEAST_TO_RETURN_S if have + gained <= job.gang.groups_wanted else LEAST_S
    doublings = min(job.gang.growths_undone, MOST_DOUBLINGS)
    return min(max(least_s, cost_s * have / gained) * 2.0**doublings, MOST_S)


def note_size(job: Job, now: float) -> None:
    """Note the number of slices of a gang whose tasks have all started, and so whether its moves to more pay."""
    gang = job.gang
    have, before = len(gang.groups), len(gang.last_ran)
    if not before:
        return
    if have > before:
        gang.pays_at = now + patience_s(job, before, have - before, now)
        return
    ended_at = next((past.ended_at for past in reversed(gang.past) if past.started_at is not None), now)
    causes = [attempt.cause for attempt in job.times.attempts[:-1] if attempt.began_at is not None]
    moved_in_vain = have == before and causes[-1:] == [FailureCause.GROWN]
    if moved_in_vain or (have < before and ended_at < gang.pays_at):
        gang.growths_undone += 1
    elif have < before:
        gang.growths_undone = 0
