"""What users hold, and were promised, beside what their limits allow."""

import math
from collections.abc import Collection

from iris_ray.model.jobs import Job
from iris_ray.model.lifecycle import AttemptId
from iris_ray.model.options import PriorityBand
from iris_ray.model.workers import accelerators
from iris_ray.scheduler.fair_queue import comes_last
from tests.proofs.windows.seen import Seen, account_of, least_chips


class SeenLimits(Seen):
    """What one can observe, limits included."""

    def _limits(self, job: Job) -> tuple[float, float]:
        """Return how many chips and running jobs the user of a job may have. A limit on all the chips is none."""
        limits = self._state.limits.of(job.spec.user, job.spec.priority)
        assert limits.chips is not None
        assert limits.running_jobs is not None
        is_limit = limits.chips < self._chips_of(self._state.workers)
        return limits.chips if is_limit else math.inf, limits.running_jobs

    def _is_over_the_limit(
        self,
        job: Job,
        more: float,
        leave: Collection[AttemptId] = (),
        besides: Collection[str] = (),
        now: bool = False,
    ) -> bool:
        """Return whether a limit keeps a job from so many more chips, beside what its user has and was promised.

        Args:
            job: the job.
            more: how many chips.
            leave: attempts that do not count, beside those that were asked to leave.
            besides: ids of jobs whose promises do not count.
            now: whether those count, too, that were asked to leave, or have ended, and have not left yet.
        """
        chips, jobs = self._held(job, leave, besides, now)
        most_chips, most_jobs = self._limits(job)
        return chips + more > most_chips or (self._is_new(job, jobs) and len(jobs) >= most_jobs)

    def _is_new(self, job: Job, running: Collection[str]) -> bool:
        """Return whether a job adds to those that run."""
        return job.spec.spare_for is None and job.spec.job_id not in running

    def _held(
        self, job: Job, leave: Collection[AttemptId] = (), besides: Collection[str] = (), now: bool = False
    ) -> tuple[float, set[str]]:
        """Return the chips that the user of a job holds, and other jobs were promised, and whose; without what leaves.

        What a waiting gang's own attempts hold that have ended, it may have again.
        """
        chips, running, account = 0.0, set[str](), account_of(job)
        for worker in self._state.workers.values():
            for (_, attempt), held in worker.occupants.items():
                other = self._state.jobs[attempt.job_id]
                if account_of(other) != account or attempt in leave or (attempt in self.ledger.asked and not now):
                    continue
                is_own = other is job and job.spec.coscheduling and attempt.gang in job.pending
                if is_own and attempt in self.ledger.ended and not now:
                    continue
                chips += accelerators(held)
                if other.spec.spare_for is None and not other.state.finished:
                    running.add(attempt.job_id)
        there = {attempt.job_id for worker in self._state.workers.values() for _, attempt in worker.occupants}
        running |= self._state.limits.held(*account).running - there  # on hosts that are all gone
        for job_id, promised in self.ledger.promised.items():
            taker = self._state.jobs.get(job_id)  # a spare of a job that has ended is gone
            if taker is None or taker is job or job_id in besides or self._is_too_late(taker):
                continue
            if promised.is_firm and account_of(taker) == account:
                chips += self._chips_of(promised.node_ids)
                running |= {job_id} if taker.spec.spare_for is None else set()
        return chips, running

    def _is_kept_for_another(self, job: Job) -> bool:
        """Return whether what a user may have yet is kept for a job that has waited too long for the limit on chips."""
        is_urgent = job.spec.priority <= PriorityBand.PRODUCTION  # or SYSTEM
        most, late = self._limits(job)[0], self.now - (0.0 if is_urgent else self._bound_s)
        return any(
            one is not job
            and account_of(one) == account_of(job)
            and not comes_last(one)
            and any(one.gangs[position].waiting_since <= late for position in one.pending)
            and self._held(one, now=True)[0] + least_chips(one) > most >= least_chips(one)
            for one in self._state.pending()
        )

    def _rivals(self, job: Job) -> bool:
        """Return whether other jobs wait for the same limit."""
        if account_of(job) not in self._state.limits.table:
            return False
        return any(one is not job and account_of(one) == account_of(job) for one in self._state.pending())
