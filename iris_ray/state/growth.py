"""Growth: when a gang on fewer slices than it can use moves to more.

It moves once the slices have been free for as long as the move costs. How long they will stay free is unknown; with
this rule a gang loses at most twice as much as with perfect foresight (ski rental: Karlin et al., "Competitive snoopy
caching", 1988). The cost is that of the job's own planned moves so far. Each consecutive move that is undone before it
has paid for itself doubles the wait.
"""

from collections.abc import Iterable

from iris_ray.model.goodput import AttemptTimes, planned_move_s
from iris_ray.model.jobs import Job
from iris_ray.model.time_lost import FailureCause

LEAST_S = 300.0
"""The minimum time for which slices must have been free, so that a new job finds some; seconds."""
LEAST_TO_RETURN_S = 10.0
"""The minimum time if the gang only returns to the number of slices that it had before a loss; seconds."""
MOST_S = 12 * 3600.0
"""The maximum wait, however often moves were undone; seconds."""
UNKNOWN_S = 600.0
"""The assumed cost of a move for a job without measured failures, which may have no recent checkpoint; seconds."""
MOST_DOUBLINGS = 20


def patience_s(job: Job, have: int, gained: int, now: float) -> float:
    """Return for how many seconds additional slices must have been free before a job moves to them.

    A move stops the slices that the job has, ``have``, and adds ``gained`` more.
    """
    measured = planned_move_s(job.times, now)
    cost_s = UNKNOWN_S if measured is None else measured
    least_s = LEAST_TO_RETURN_S if have + gained <= job.gang.groups_wanted else LEAST_S
    doublings = min(job.gang.growths_undone, MOST_DOUBLINGS)
    return min(max(least_s, cost_s * have / gained) * 2.0**doublings, MOST_S)


def moved_to_grow(attempts: Iterable[AttemptTimes]) -> bool:
    """Return whether the latest of a job's attempts that ran ended because the gang moved to more slices."""
    causes = [attempt.cause for attempt in attempts if attempt.began_at is not None]
    return causes[-1:] == [FailureCause.GROWN]


def note_size(job: Job, now: float) -> None:
    """Record a gang's slice count once all its tasks have started, to learn whether its growth pays."""
    gang = job.gang
    have, before = len(gang.groups), len(gang.last_ran)
    if not before:
        return
    if have > before:
        gang.pays_at = now + patience_s(job, before, have - before, now)
        return
    ended_at = next((past.ended_at for past in reversed(gang.past) if past.started_at is not None), now)
    moved_in_vain = have == before and moved_to_grow(job.times.attempts[:-1])
    if moved_in_vain or (have < before and ended_at < gang.pays_at):
        gang.growths_undone += 1
    elif have < before:
        gang.growths_undone = 0
