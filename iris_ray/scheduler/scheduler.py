"""The scheduler: a pure function from a snapshot to a plan, which the Controller commits.

A gang gets all the groups that it needs (for TPUs, slices), or none. A plan is made in six steps:

1. Order the pending jobs (`fair_queue.py`).
2. End the jobs whose ``scheduling_timeout`` is over (`Deadlines` in `fair_queue.py`).
3. Find the groups that suit the job's requirement. `evaluation.py` evaluates a group, `candidates.py` evaluates the
   groups that a plan needs, and `candidate_cache.py` keeps the evaluations between plans. A long queue is cheap, since
   jobs whose requirements differ only in amounts and preferences share one evaluation of the fleet. `ranked_groups.py`
   finds room for amounts.
4. Subtract the hosts that the plan has already taken (`remaining_capacity.py`), and choose groups among the rest
   (`availability.py`).
5. If there are too few, reserve groups for a job that starves or has just lost its hosts (`promises.py`), or evict
   lower bands (`evictions.py`).
6. Explain why the job waits. `explanation.py` makes the reasons; `pending_reason.py` defines their data and text.

`cycle.py` takes every job through steps 2 to 6. `together.py` places all jobs of a group in one step, or none.

Between plans the scheduler keeps the evaluations in `candidate_cache.py`, which affect only the cost of a plan, and
`EvaluationLimits` and `SearchFairness`, which select the jobs to consider and to search victims for if a plan has no
time for all.
"""

from collections.abc import Iterable, Mapping
from itertools import chain

from iris_ray.model.jobs import Job
from iris_ray.scheduler.candidate_cache import CandidateCache, EvaluationLimits
from iris_ray.scheduler.cycle import Cycle, SchedulingResult
from iris_ray.scheduler.eviction_costs import DEFAULT_RULES, EvictionRules, Running
from iris_ray.scheduler.fair_queue import Deadlines, SearchFairness, Usage
from iris_ray.scheduler.pending_reason import PendingReason
from iris_ray.scheduler.reasons import Reasons
from iris_ray.state.fleet import Fleet
from iris_ray.state.team_use import TeamUse
from iris_ray.state.user_limits import PastUsage, UserLimits
from iris_ray.state.waiting_jobs import WaitingJobs

BACKFILL_BOUND_S = 600.0


class Scheduler:
    """Makes plans.

    Later jobs may pass a job that does not fit, but not for ever. Once the job has waited for ``backfill_bound_s``
    seconds, the scheduler promises it hosts, if these are expected to be free in time. Only one of the competing jobs
    has such a promise at a time: the first in the fair order. A job at the head of the order therefore waits at most
    for the bound plus the remaining time of the tasks on these hosts, unless a host is lost or a job of a higher band
    takes one.

    Args:
        backfill_bound_s: seconds for which later jobs may pass a waiting job; 0 for jobs of PRODUCTION and SYSTEM.
        evictions: the conditions for evicting lower bands; None: no evictions.

    Attributes:
        evictions: the conditions for evictions, which may be replaced between plans.
    """

    def __init__(
        self, backfill_bound_s: float = BACKFILL_BOUND_S, evictions: EvictionRules | None = DEFAULT_RULES
    ) -> None:
        self._backfill_bound_s = backfill_bound_s
        self.evictions = evictions
        self._cache = CandidateCache()
        self._evaluations = EvaluationLimits()
        self._fairness = SearchFairness()

    def find_assignments(
        self,
        pending: Iterable[Job],
        fleet: Fleet,
        usage: Usage,
        now: float,
        pending_reasons: Mapping[str, PendingReason] | None = None,
        most: int | None = None,
        past: PastUsage | None = None,
        running: Running | None = None,
        idle: Iterable[Job] = (),
        limits: UserLimits | None = None,
        teams: TeamUse | None = None,
    ) -> SchedulingResult:
        """Make a plan. Changes none of the arguments, except the fleet's own indexes.

        Args:
            pending: the jobs with waiting gangs.
            fleet: all live workers, with the resources held on them.
            usage: the resources that each user's gangs hold.
            now: seconds on the clock of the events.
            pending_reasons: the reasons of the previous plan, if it was recent and gave up no promise, and nothing but
                the queue has changed since. If all new jobs can be placed, and no groups are promised or kept, jobs
                with a reason keep it without being retried.
            most: the number of gangs, or the equivalent in other work, after which the plan ends without being
                ``complete``; None for no limit.
            past: each user's past usage; None to ignore it.
            running: the running attempts, which may be evicted; None: none.
            idle: spares and jobs that yield, which leave for any job that precedes them.
            limits: the users' limits; None: no limits.
            teams: the teams and their usage; None: no teams.
        """
        waiting = pending if isinstance(pending, WaitingJobs) else WaitingJobs(pending)
        deadlines = Deadlines(now, self._backfill_bound_s)
        result = None
        if pending_reasons:
            before = pending_reasons if isinstance(pending_reasons, Reasons) else Reasons(pending_reasons)
            result = self._place_new(waiting, fleet, usage, past, deadlines, before, most, limits, teams)
        if result is None:
            turns = self._fairness, self._evaluations, teams
            cycle = Cycle(fleet, self._cache, deadlines, most, running, self.evictions, limits, *turns)
            result = cycle.run(waiting, usage, past, idle)
        self._cache.trim()
        return result

    def forget(self) -> None:
        """Discard all evaluations, which a failed plan may have left half updated."""
        self._cache = CandidateCache()

    def check(self, now: float) -> None:
        """Raise AssertionError if the cache is out of date. For tests."""
        self._cache.check(now)

    def _place_new(
        self,
        pending: WaitingJobs,
        fleet: Fleet,
        usage: Usage,
        past: PastUsage | None,
        deadlines: Deadlines,
        pending_reasons: Reasons,
        most: int | None,
        limits: UserLimits | None,
        teams: TeamUse | None,
    ) -> SchedulingResult | None:
        """Return a plan in which waiting jobs keep their reasons, or None if the plan must consider all jobs.

        Only jobs that are new, that pause, or that could run but wait for more groups are tried.
        """
        promised = any(job.promise for job in pending.others.values())
        if promised or any(reason.keeps for reason in pending_reasons.apart()):
            return None  # the groups reserved for a job depend on all other jobs
        tried, unchanged = WaitingJobs(), []
        for job in chain.from_iterable(pending.runs()):
            job_id = job.spec.job_id
            reason = None if pending_reasons.is_shared(job_id) else pending_reasons.get(job_id)
            if job_id not in pending_reasons or (
                reason is not None and (reason.pause is not None or reason.free >= reason.num_groups[0])
            ):
                tried.sort_in(job)
            else:
                unchanged += [one.spec.job_id for one in job.members or (job,)]
        if not unchanged:
            return None
        cycle = Cycle(fleet, self._cache, deadlines, most, limits=limits, teams=teams)
        result = cycle.run(tried, usage, past, some_keep_reasons=True)
        placed = {assignment.job_id for assignment in result.assignments}
        if result.pending_reasons.keys() - pending_reasons.keys() or placed & pending_reasons.keys():
            return None
        result.pending_reasons.keep(pending_reasons, unchanged)
        result.limited.clear()  # the plan has not considered all jobs of a kind
        return result
