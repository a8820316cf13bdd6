"""Who runs where: a pure function of a snapshot. The scheduler proposes a plan; the Controller commits it.

A gang gets whole groups (for TPUs: slices), all that it needs, or nothing. A plan is made in six steps:

1. Order the pending jobs: `fair_queue.py` says who goes first.
2. End the jobs whose ``scheduling_timeout`` is over: `Deadlines` in `fair_queue.py`.
3. Find the groups that suit the job's requirement. `evaluation.py` evaluates one group, `candidates.py` those that a
   plan needs, and `candidate_cache.py` remembers them from one plan to the next. A long queue is cheap: jobs whose
   requirements differ in amounts and preferences only share one evaluation of the fleet. `ranked_groups.py` finds room
   for an amount.
4. Subtract what the plan has given away already (`remaining_capacity.py`), and choose groups among those that are left
   for the job's requirement (`availability.py`).
5. If there are too few, keep groups for a job that has waited too long, or has just lost its hosts: `promises.py`.
   Or take hosts from lower bands: `evictions.py`.
6. Explain why the job waits: `explanation.py` makes the reasons, `pending_reason.py` is their data and their sentences.

`cycle.py` takes every job through steps 2 to 6. `together.py` places the jobs of a group: all in one step, or none.

Between plans the scheduler remembers two things. The evaluations in `candidate_cache.py` decide what a plan costs, and
not what it says. `EvaluationLimits` and `SearchFairness` decide something: at which jobs a plan looks, and for which it
searches, if it has no time for all.
"""

from collections.abc import Iterable, Mapping
from itertools import chain

from iris_ray.model.jobs import Job
from iris_ray.scheduler.candidate_cache import CandidateCache, EvaluationLimits
from iris_ray.scheduler.cycle import Cycle, SchedulingResult
from iris_ray.scheduler.fair_queue import Deadlines, SearchFairness, Usage
from iris_ray.scheduler.pending_reason import PendingReason
from iris_ray.scheduler.reasons import Reasons
from iris_ray.scheduler.victims import DEFAULT_RULES, EvictionRules, Running
from iris_ray.state.fleet import Fleet
from iris_ray.state.team_use import TeamUse
from iris_ray.state.user_limits import PastUsage, UserLimits
from iris_ray.state.waiting_jobs import WaitingJobs

BACKFILL_BOUND_S = 600.0


class Scheduler:
    """Makes plans.

    Jobs that came later may pass a job that does not fit, but not for ever. Once the job has waited for
    ``backfill_bound_s`` seconds, the scheduler promises it hosts until it runs. Of jobs that compete, one at a time has
    such a promise: the first in the fair order. So a job at the head of the order waits no longer than the bound, plus
    as long as the tasks on these hosts still run.

    Args:
        backfill_bound_s: for how many seconds jobs that came later may pass a waiting job. None pass one of
            PRODUCTION.
        evictions: when jobs may take hosts from lower bands; None: never.

    Attributes:
        evictions: the same; it may be replaced between two plans.
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
        """Return a plan that places what can be placed. Changes none of its arguments, except the fleet's own indexes.

        Args:
            pending: jobs of which some or all gangs wait.
            fleet: all live workers, and who holds what.
            usage: what each user's gangs hold.
            now: seconds on the clock of the events.
            pending_reasons: the reasons of a plan made a moment ago, if the fleet has not changed since and that plan
                gave up no promise. If all new jobs can be placed, jobs with a reason keep it, and are not tried again.
            most: the plan ends after so many gangs, or as much other work, and is then not ``complete``; None: at the
                end of the queue.
            past: what each user's gangs have held; None: past use does not count.
            running: what runs, and may have to leave; None: nothing does.
            idle: jobs that hold slices ready for others, or that yield; they leave for any job before them.
            limits: of the users; None: no user has a limit.
            teams: the teams, and what they hold; None: there are none.
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
        """Forget all evaluations. A plan that failed may have left them half updated."""
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
        """Return a plan in which waiting jobs keep their reasons, or None if the plan needs a look at all jobs.

        Only jobs that are new, that pause, or that could run but hope for more groups are tried.
        """
        promised = any(job.promise for job in pending.others.values())
        if promised or any(reason.keeps for reason in pending_reasons.apart()):
            return None  # which groups are kept for a job depends on all other jobs
        tried, unchanged = WaitingJobs(), []
        for job in chain.from_iterable(pending.runs()):
            job_id = job.spec.job_id
            reason = None if pending_reasons.is_alike(job_id) else pending_reasons.get(job_id)
            if job_id not in pending_reasons or (
                reason is not None and (reason.pause is not None or reason.free >= reason.num_groups[0])
            ):
                tried.sort_in(job)
            else:
                unchanged += [one.spec.job_id for one in job.members or (job,)]
        if not unchanged:
            return None
        result = Cycle(fleet, self._cache, deadlines, most, limits=limits, teams=teams).run(tried, usage, past)
        placed = {assignment.job_id for assignment in result.assignments}
        if result.pending_reasons.keys() - pending_reasons.keys() or placed & pending_reasons.keys():
            return None
        result.pending_reasons.keep(pending_reasons, unchanged)
        result.limited.clear()  # it has not looked at all jobs of a kind
        return result
