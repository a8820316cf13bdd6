"""Slices of other types that are held for a waiting gang until enough of them are idle. Pure.

Without that, later jobs of the types of those slices use each one as soon as it is idle, and a job that needs the chips
of several slices may wait for ever. So after the backfill bound the scheduler's rules for reservations apply
(`scheduler/promises.py`): the slices that are expected to be idle first are reserved for the job; until enough of them
are expected to be idle, they are lent (`scheduler/calendar.py`); and those for which that takes too long are not
reserved.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from iris_ray.capacity.demand import reserved_slices
from iris_ray.capacity.reservations import Holder, cover
from iris_ray.model.jobs import Job
from iris_ray.scheduler.calendar import Calendar, horizon_s
from iris_ray.scheduler.eviction_costs import EvictionRules
from iris_ray.scheduler.evictions import Evictor
from iris_ray.scheduler.fair_queue import Deadlines, SearchFairness
from iris_ray.scheduler.limits import Allowances
from iris_ray.scheduler.planner import running
from iris_ray.scheduler.promises import NOTHING_BOUNDS
from iris_ray.scheduler.remaining_capacity import Plan
from iris_ray.scheduler.scheduler import BACKFILL_BOUND_S
from iris_ray.scheduler.team_quotas import TeamQuotas
from iris_ray.state import ControllerState

MOST_BESIDES = 16
"""The number of slices in use that are held besides as many as a job lacks: a job of a higher band that takes one ends
the hold."""


def slices_to_hold(
    job: Job,
    chips: int,
    slices: Sequence[Holder],
    most_of_type: Mapping[str, int],
    state: ControllerState,
    rules: EvictionRules | None,
    now: float,
) -> tuple[str, ...] | str:
    """Return the slices to hold for a job: those that are expected to be idle first, as many as it lacks.

    As long as too few are idle, slices in use that are held for it already stay held, and those that are expected to be
    idle before the last of them are held in addition. So the job gets the slices that become idle first, whatever was
    expected: an attempt is expected to run for as long again as it has run, and one that has begun lately may run for
    ever. Idle slices are never held beyond what it lacks.

    Return why none are held otherwise; an empty string if the job may be passed for a while yet.

    Args:
        job: the job.
        chips: how many it lacks.
        slices: the slices that could go, the preferred ones first.
        most_of_type: how many of each type may go.
        state: the Controller's state.
        rules: the conditions for evictions that the job may count on; None: no evictions.
        now: seconds on the clock of the events.
    """
    gang, deadlines = job.gangs[next(iter(job.pending))], Deadlines(now, BACKFILL_BOUND_S)
    if not deadlines.is_starving(job, gang):
        return ""
    allowances = Allowances(state.limits, math.inf, TeamQuotas(state.teams, state.fleet, now))
    about = state.fleet, Plan(), allowances, deadlines, SearchFairness()
    calendar = Calendar(Evictor(running(state), rules, [*state.spares(), *state.yielding()], *about), now)
    hosts = {one.name: state.fleet.slice_workers(one.name) for one in slices}
    empty_at = {name: calendar.empty_at(job, of_slice) for name, of_slice in hosts.items()}
    in_use = {name for name, of_slice in hosts.items() if any(one.occupants.keys() - one.ending for one in of_slice)}
    held = reserved_slices(job, state.fleet)

    def soonest(one: Holder) -> tuple[bool, bool, float]:
        return one.name in in_use, one.name not in held, empty_at[one.name]

    too_late = now + horizon_s(now - gang.waiting_since)
    in_time = sorted((one for one in slices if empty_at[one.name] <= too_late), key=soonest)
    if (chosen := _first(in_time, chips, most_of_type)) is None:
        enough = _first(slices, chips, most_of_type) is not None
        return NOTHING_BOUNDS if enough else "too few slices may be deleted for it"
    used = [one for one in in_time if one.name in in_use]
    last = max((empty_at[one.name] for one in used if one in chosen or one.name in held), default=now)
    names, left = {one.name for one in chosen}, Counter(most_of_type)
    left.subtract(one.tpu_type for one in chosen)
    most = len(chosen) + MOST_BESIDES if names & in_use else 0
    for one in used:
        if len(chosen) >= most:
            break
        if one.name not in names and empty_at[one.name] <= last and left[one.tpu_type] > 0:
            chosen.append(one)
            left[one.tpu_type] -= 1
    return tuple(one.name for one in chosen)


def _first(slices: Iterable[Holder], chips: int, most_of_type: Mapping[str, int]) -> list[Holder] | None:
    """Return the first slices that have a number of chips, none of them superfluous; None: too few."""
    left, chosen = dict(most_of_type), list[Holder]()
    for one in slices:
        if sum(other.chips for other in chosen) >= chips:
            break
        if left.get(one.tpu_type, 0) > 0:
            chosen.append(one)
            left[one.tpu_type] -= 1
    return cover(chosen, chips) if sum(one.chips for one in chosen) >= chips else None
