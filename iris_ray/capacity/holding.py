"""Slices of other types that are held for a waiting gang until enough of them are idle. Pure.

Without that, later jobs of the types of those slices use each one as soon as it is idle, and a job that needs the chips
of several slices may wait for ever. So after the backfill bound the scheduler's rules for reservations apply
(`scheduler/promises.py`): the slices that are expected to be idle first are reserved for the job; until all of them are
expected to be idle, they are lent (`scheduler/calendar.py`); and none are reserved if that takes too long.
"""

import math
from collections.abc import Iterable, Mapping, Sequence

from iris_ray.capacity.demand import slices_to_remove
from iris_ray.capacity.reservations import Holder, cover
from iris_ray.model.jobs import Job
from iris_ray.scheduler.calendar import Calendar, horizon_s
from iris_ray.scheduler.evictions import Evictor
from iris_ray.scheduler.fair_queue import Deadlines, SearchFairness
from iris_ray.scheduler.limits import Allowances
from iris_ray.scheduler.planner import running
from iris_ray.scheduler.promises import NOTHING_BOUNDS
from iris_ray.scheduler.remaining_capacity import Plan
from iris_ray.scheduler.scheduler import BACKFILL_BOUND_S
from iris_ray.scheduler.team_quotas import TeamQuotas
from iris_ray.scheduler.victims import EvictionRules
from iris_ray.state import ControllerState


def slices_to_hold(
    job: Job,
    chips: int,
    slices: Sequence[Holder],
    most_of_type: Mapping[str, int],
    state: ControllerState,
    rules: EvictionRules | None,
    now: float,
) -> tuple[str, ...] | str:
    """Return the slices to hold for a job: those that are expected to be idle first, and no more than it lacks.

    Slices that are held for it already stay, unless others are idle by now: an attempt is expected to run for as long
    again as it has run, so the expected times of slices with jobs that come and go remain short.

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
    held = slices_to_remove(job, state.fleet)

    def as_held(one: Holder) -> tuple[bool, bool, float]:
        return one.name in in_use, one.name not in held, empty_at[one.name]

    def soonest(one: Holder) -> float:
        return empty_at[one.name]

    too_late = now + horizon_s(now - gang.waiting_since)
    for key in (as_held, soonest) if held else (soonest,):
        chosen = _first(sorted(slices, key=key), chips, most_of_type)
        if chosen is None:
            return "too few slices may be deleted for it"
        if max(map(soonest, chosen)) <= too_late:
            return tuple(one.name for one in chosen)
    return NOTHING_BOUNDS


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
