"""Makes pending reasons: why a gang got no hosts, and which groups come closest.

`ImpossibleConstraints` finds jobs that can't ever run because no host can evaluate one of their constraints.
"""

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from itertools import islice
from typing import NamedTuple

from iris_ray.model.constraints import Constraint
from iris_ray.model.jobs import Job
from iris_ray.model.lifecycle import AttemptId
from iris_ray.model.requirement import Requirement
from iris_ray.model.workers import TPU, Worker
from iris_ray.scheduler.availability import Availability, buckets_for, num_groups
from iris_ray.scheduler.candidates import Candidates
from iris_ray.scheduler.evaluation import Status
from iris_ray.scheduler.pending_reason import Obstacle, PendingKind, PendingReason, Protected, ReachedLimit, Shortage
from iris_ray.scheduler.remaining_capacity import Plan
from iris_ray.state.fleet import Fleet

OBSTACLES_NAMED = 4
"""The number of groups that a shortage names."""
GIVEN_AWAY_LOOKED_AT = 64
"""The number of groups changed by the plan that a shortage searches for groups that the job could have had."""

SHORTAGES_RENEWED, SHORTAGES_KEPT = 200, 20_000
"""The number of requirements whose shortages a plan renews, and the number whose shortages later plans reuse."""

_Cause = tuple[PendingKind, int, Shortage]
"""The kind of the reason, the number of groups that suit the job, and the shortage."""


class Unplaced(NamedTuple):
    """A job that found too few groups, with the groups available to it and its pending reason."""

    job: Job
    available: Availability
    reason: PendingReason


class Explainer:
    """Explains why jobs got no hosts. Jobs with the same requirement share a shortage.

    Args:
        fleet: the workers.
        plan: the hosts that the plan has taken so far.
        known: the shortages of earlier plans, the oldest first. If a plan has very many, only some of them are renewed.
    """

    def __init__(self, fleet: Fleet, plan: Plan, known: dict[Requirement, Shortage]) -> None:
        self._fleet = fleet
        self._plan = plan
        self._known = known
        self._shortages: dict[Availability, Shortage] = {}
        self._causes: dict[tuple[Availability, tuple[int, ...]], _Cause] = {}

    def reason(
        self,
        job: Job,
        available: Availability,
        free: int,
        kept: tuple[str, ...],
        taken_from: tuple[str, ...] = (),
        protected: Protected | None = None,
        waits_for: tuple[str, ...] = (),
    ) -> PendingReason:
        """Return a job's pending reason, and count the job as unplaced. Its shortage is empty until `complete`.

        Args:
            job, available: the job and the groups available to it.
            free: the number of groups that were free at its turn.
            kept: names of the groups that are reserved for it.
            taken_from: ids of the jobs that leave it hosts.
            protected: the hosts that it may take from lower bands later, or None.
            waits_for: the events for which the reserved groups wait, for people.
        """
        to_all, wanted = available.to_all, num_groups(job)
        kind, suitable, shortage = self._causes.get((to_all, wanted)) or self._cause(job, to_all, wanted)
        avoided = available.impaired
        reason = PendingReason(
            job.spec.job_id,
            kind,
            job.requirement,
            wanted,
            free,
            suitable,
            shortage,
            to_all.unplaced,
            to_all.first_unplaced,
            kept,
            tuple(self._display_name(name, job.requirement) for name in avoided) if avoided else (),
            job.error if avoided and job.avoided else None,
            taken_from,
            protected,
            waits_for=waits_for,
        )
        to_all.count_unplaced(job)
        return reason

    def same_reason(self, job: Job, before: Unplaced) -> PendingReason:
        """Return the reason of a job that waits like an earlier one of its kind, and count the job as unplaced."""
        to_all = before.available.to_all
        reason = replace(
            before.reason, job_id=job.spec.job_id, ahead=to_all.unplaced, first_ahead=to_all.first_unplaced
        )
        to_all.count_unplaced(job)
        return reason

    def complete(self) -> None:
        """Fill in the shortages after the whole plan is made: new ones first, then the oldest."""
        ages = {requirement: age for age, requirement in enumerate(self._known)}
        in_turn = sorted(self._shortages.items(), key=lambda item: ages.get(item[0].requirement, -1))
        for available, shortage in in_turn[:SHORTAGES_RENEWED]:
            self._fill_in(shortage, available)
            self._known.pop(available.requirement, None)
            self._known[available.requirement] = shortage
        later = in_turn[SHORTAGES_RENEWED:]
        slice_types = self._fleet.slice_types() if later else {}
        for available, shortage in later:
            earlier = self._known.get(available.requirement) or Shortage(slice_types=slice_types)
            shortage.excluded, shortage.closest, shortage.more = earlier.excluded, earlier.closest, earlier.more
            shortage.slice_types, shortage.groups = earlier.slice_types, len(available.candidates.grouping)
        for requirement in list(islice(self._known, max(0, len(self._known) - SHORTAGES_KEPT))):
            del self._known[requirement]

    def _cause(self, job: Job, available: Availability, wanted: tuple[int, ...]) -> _Cause:
        suitable = sum(map(available.suitable, buckets_for(job, available)))
        if suitable >= wanted[0]:
            kind = PendingKind.IN_USE
        else:
            kind = PendingKind.TOO_FEW if suitable or available.not_free else PendingKind.NO_SUCH_WORKERS
        cause = self._causes[available, wanted] = kind, suitable, self._shortages.setdefault(available, Shortage())
        return cause

    def _fill_in(self, shortage: Shortage, available: Availability) -> None:
        names = dict.fromkeys(islice(available.given_away(GIVEN_AWAY_LOOKED_AT), OBSTACLES_NAMED))
        names |= dict.fromkeys(available.closest(OBSTACLES_NAMED))
        excluded, need = (+available.candidates.excluded).items(), available.requirement
        shortage.excluded = tuple((_name_of(what, need), count) for what, count in excluded)
        shortage.closest = tuple(self._obstacle(available, name) for name in islice(names, OBSTACLES_NAMED))
        shortage.more = available.not_free - len(shortage.closest)
        shortage.slice_types = {} if shortage.closest else self._fleet.slice_types()
        shortage.groups = len(available.candidates.grouping)

    def _obstacle(self, available: Availability, name: str) -> Obstacle:
        shown, found = self._display_name(name, available.requirement), available.evaluation(name)
        node_ids, plan = available.group(name).node_ids, self._plan
        kept_for = next((plan.kept[node_id] for node_id in node_ids if node_id in plan.kept), None)
        if found.status is not Status.FREE:
            then = f", then kept for {kept_for}" if kept_for and found.status is Status.IN_USE else ""
            return Obstacle(shown, found.hosts_missing, found.obstacle + then, found.used_by)
        if kept_for is not None:
            return Obstacle(shown, available.tasks(name), f"is kept for {kept_for}", (kept_for,))
        taker = next(plan.takers[node_id] for node_id in node_ids if node_id in plan.takers)
        return Obstacle(shown, available.tasks(name), f"goes to {taker}", (taker,))

    def _display_name(self, name: str, requirement: Requirement) -> str:
        """Return a group's display name. A single host is named by its slice or its address."""
        worker = self._fleet.workers.get(name) if requirement.group_by is None else None
        if worker is None:
            return name
        return f"{worker.slice_name} {worker.name}" if worker.slice_name else f"host {worker.address}"


def awaited_events(
    job: Job,
    hosts: Iterable[Worker],
    need: Requirement,
    deadline_of: Callable[[AttemptId], float | None],
    now: float,
    jobs: Mapping[str, Job],
) -> tuple[str, ...]:
    """Return the events, as text, that must happen before a job can use the hosts reserved for it.

    Args:
        job: the job with the reservation.
        hosts: the hosts.
        need: the requirement of the tasks that are to run there.
        deadline_of: returns when an attempt that is about to leave is stopped; seconds; None if it stays.
        now: the time on the same clock.
        jobs: all jobs by id.
    """
    found: dict[str, None] = {}
    lent = job.promise.lent if job.promise is not None else ()
    for host in hosts:
        if host.suspected and now < host.suspected_until:
            found[f"{host.name}, which may be lost: {host.suspected_until - now:.0f} s more"] = None
        for occupant, held in host.occupants.items() if not need.has_room(host) else ():
            attempt, since = occupant[1], host.ending.get(occupant)
            if need.chips and not held.get(TPU):
                continue
            if since is not None:
                found[f"the confirmation that {attempt.job_id} has ended, {now - since:.0f} s so far"] = None
            elif (deadline := deadline_of(attempt)) is not None:
                found[f"the end of {attempt.job_id}, notice for {max(0.0, deadline - now):.0f} s more"] = None
            else:
                runs = jobs.get(attempt.job_id)
                left_s = math.inf if runs is None else runs.ends_at - now
                by = f", in {left_s:.0f} s at the latest" if 0 < left_s < math.inf else ""
                how = ", to which it is lent" if attempt.job_id in lent else ""
                found[f"the end of {attempt.job_id}{how}{by}"] = None
    return tuple(found)


def paused(job: Job, pause_s: float, cause: str | None) -> PendingReason:
    """Return the reason of a job that pauses for some seconds after a failed launch."""
    pause = pause_s, cause or "unknown cause"
    return PendingReason(job.spec.job_id, PendingKind.PAUSED, job.requirement, num_groups(job), pause=pause)


def not_considered(job: Job) -> PendingReason:
    """Return the reason of a job that the plan has not considered; see `EvaluationLimits`."""
    return PendingReason(job.spec.job_id, PendingKind.NOT_LOOKED_AT, job.requirement, num_groups(job))


def limited(job: Job, reached: ReachedLimit, kept: tuple[str, ...]) -> PendingReason:
    """Return the reason of a job whose user or team has reached a limit."""
    return PendingReason(
        job.spec.job_id, PendingKind.LIMITED, job.requirement, num_groups(job), kept=kept, limit=reached
    )


def held_back(job: Job) -> PendingReason | None:
    """Return the reason of a job that has not entered the queue yet; None if it has."""
    awaits = tuple(f"{job_id} has {wanted}" for job_id, wanted in job.awaits.items())
    if not awaits and job.spec.group is not None and job.forms_group and not job.ready_at:
        awaits = (f"the other jobs of its group {job.spec.group.name} are submitted, and await no others",)
    if not awaits or job.state.finished:
        return None
    return PendingReason(job.spec.job_id, PendingKind.HELD_BACK, job.requirement, num_groups(job), awaits=awaits)


def _name_of(what: int | str, requirement: Requirement) -> str:
    """Return a constraint (by position) or a taint (by name) as text."""
    return what if isinstance(what, str) else str(requirement.constraints[what])


class ImpossibleConstraints:
    """Finds constraints that no live worker can evaluate, such as an ordering of a str and a number."""

    def __init__(self, workers: Collection[Worker]) -> None:
        self._workers = workers
        self._found: dict[Requirement, str] = {}  # "": every constraint can be evaluated

    def problem_of(self, candidates: Candidates) -> str | None:
        """Return the first constraint that no host can evaluate, with the error; None if there is none."""
        if not candidates.incomparable:
            return None
        requirement = candidates.shape
        found = self._found.get(requirement)
        if found is None:
            problems = (self._problem(constraint, requirement) for constraint in requirement.constraints)
            found = self._found[requirement] = next(filter(None, problems), "")
        return found or None

    def _problem(self, constraint: Constraint, requirement: Requirement) -> str | None:
        """Return why no host that satisfies the requirement's other constraints can evaluate this one, or None."""
        others = [other for other in requirement.constraints if other is not constraint]
        error: TypeError | None = None
        for worker in self._workers if constraint.orders else ():
            try:
                if constraint.key in worker.attributes and _satisfies(worker, others):
                    constraint.matches(worker.attributes)
                    return None
            except TypeError as not_comparable:
                error = not_comparable
        return f"{constraint} can't be evaluated on any host: {error}" if error else None


def _satisfies(worker: Worker, constraints: Collection[Constraint]) -> bool:
    """Return whether a worker satisfies all constraints that it can evaluate."""
    for constraint in constraints:
        try:
            if not constraint.matches(worker.attributes):
                return False
        except TypeError:
            continue
    return True
