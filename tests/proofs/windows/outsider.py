"""Rules of an outsider, who knows what the queue promises its users, and nothing of how it is kept.

``python -m tests.proofs.windows.outsider`` plays the windows with these rules beside the others.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from iris_ray.model.jobs import Job
from iris_ray.model.lifecycle import AttemptId
from iris_ray.model.workers import TPU_NAME, Worker
from iris_ray.scheduler.calendar import LEAST_LOAN_S
from iris_ray.scheduler.eviction_costs import EvictionRules
from iris_ray.scheduler.fair_queue import comes_last
from iris_ray.state import ControllerState
from iris_ray.state.events import (
    Event,
    JobCancelledEvent,
    JobYieldsEvent,
    LimitsSetEvent,
    MaintenanceCalledOffEvent,
    WorkerDrainedEvent,
    WorkerFailedEvent,
    WorkerRegisteredEvent,
    WorkerSuspectedEvent,
)
from iris_ray.state.instructions import Instructions
from tests.proofs.windows.rules import Rules
from tests.proofs.windows.seen import UNCONFIRMED_S, Ledger, begun, least_chips, may_use

SETTLES_S = 2 * UNCONFIRMED_S + 45.0
"""For what lies between a decision and its effect, beside the grace: ends, returns, and what returns first."""
OF_OTHERS = (
    JobCancelledEvent,
    JobYieldsEvent,
    LimitsSetEvent,
    MaintenanceCalledOffEvent,
    WorkerDrainedEvent,
    WorkerFailedEvent,
    WorkerRegisteredEvent,
    WorkerSuspectedEvent,
)
"""What a person or a host does, after which nobody need run for whom others have left."""


@dataclass(frozen=True)
class Owed:
    """What is owed for an attempt that has left.

    Attributes:
        takers: the jobs that it left for, each with how many attempts of it there had been.
        node_ids: the hosts that were promised to them.
        since: when it left; seconds.
    """

    takers: dict[str, int]
    node_ids: tuple[str, ...]
    since: float


class OutsidersRules(Rules):
    """The rules of promises, and two more.

    No slice idles for longer than the bound while a job that fits would surely leave in time: since nobody was promised
    the slice, or since the job is of a lower band than the one that was. Nobody is lent a slice for two minutes only.

    And nobody leaves whose taker does not run, unless a person changed something, or a host did.
    """

    def __init__(self, evictions: EvictionRules | None, bound_s: float) -> None:
        super().__init__(evictions, bound_s)
        self._grace_s = 0.0 if evictions is None else evictions.grace_s
        self._idles_since: dict[tuple[str, str], float] = {}  # slice and job that fits
        self._asked_at: dict[AttemptId, float] = {}
        self._owed: dict[AttemptId, Owed] = {}
        self._changed_at = 0.0

    def watch(self, state: ControllerState, ledger: Ledger | None = None) -> None:
        super().watch(state, ledger)
        self._changed_at = self.now
        self._idles_since.clear()

    def after(self, event: Event, instructions: Instructions) -> None:
        if isinstance(event, OF_OTHERS):
            self._changed_at = self.now
        left = {attempt for one in self.ledger.promised.values() for attempt in one.left}
        super().after(event, instructions)
        for attempt in self.ledger.asked:
            self._asked_at.setdefault(attempt, self.now)
        for job_id, promised in self.ledger.promised.items():
            for attempt in {*promised.left} - left:
                takers = {job_id: promised.begun, **(self._owed[attempt].takers if attempt in self._owed else {})}
                self._owed[attempt] = Owed(takers, promised.node_ids, self.now)

    def turn_over(self, finished: bool) -> None:
        super().turn_over(finished)
        self._owed = {attempt: owed for attempt, owed in self._owed.items() if not self._is_settled(attempt, owed)}
        if finished:
            self._nothing_idles()
            self._takers_run()

    # -- nothing idles ---------------------------------------------------------------------------------------------

    def _nothing_idles(self) -> None:
        idle = {(name, job_id) for name, job_id in self._slices_that_idle()}
        self._idles_since = {pair: self._idles_since.get(pair, self.now) for pair in sorted(idle)}
        for (name, job_id), since in self._idles_since.items():
            most_s = self._bound_s + self._grace_s + LEAST_LOAN_S + SETTLES_S
            assert self.now < since + most_s, f"{name} has been idle for {self.now - since:.0f} s, and {job_id} fits"

    def _slices_that_idle(self) -> Iterator[tuple[str, str]]:
        waiting = [job for job in self._state.pending() if self._could_start(job)]
        if any(self._is_returning(job) for job in self._state.pending()):
            return
        for name, hosts in self._slices().items():
            if any(host.occupants or host.draining or host.foreign for host in hosts):
                continue
            if any(self.now < host.suspected_until for host in hosts):
                continue
            owners = [
                self._state.jobs[job_id]
                for job_id, promised in self.ledger.promised.items()
                if not {host.node_id for host in hosts}.isdisjoint(promised.node_ids)
            ]
            for job in waiting:
                if self._fits(job, hosts) and all(self._leaves_in_time(job, owner) for owner in owners):
                    yield name, job.spec.job_id

    def _could_start(self, job: Job) -> bool:
        """Return whether a job needs only a slice to run."""
        spec = job.spec
        if comes_last(job) or spec.coscheduling is None or len(job.gangs) > 1 or spec.groups_per_gang[0] > 1:
            return False
        if job.gang.not_before > self.now or self._is_too_late(job) or job.avoided or job.promise is not None:
            return False
        rivals = self._rivals(job) or self._is_kept_for_another(job) or self._holds(job)
        return not rivals and not self._is_over_the_limit(job, least_chips(job), now=True)

    def _fits(self, job: Job, hosts: list[Worker]) -> bool:
        avoided = self._state.fleet.avoided_by(job.spec.user, self.now)
        is_pinned = any(constraint.key == TPU_NAME for constraint in job.spec.constraints)
        are_fit = all(may_use(job, host) and host.node_id not in avoided for host in hosts)
        return len(hosts) == job.spec.replicas and are_fit and not is_pinned

    def _leaves_in_time(self, job: Job, owner: Job) -> bool:
        """Return whether a job would surely leave for one that was promised its hosts: it is of a lower band."""
        may_evict = self._evictions is not None and owner.spec.may_evict and not comes_last(owner)
        return may_evict and job.spec.priority > owner.spec.priority

    # -- nobody leaves in vain -------------------------------------------------------------------------------------

    def _takers_run(self) -> None:
        for attempt, owed in self._owed.items():
            waited = self.now - owed.since
            assert waited < self._grace_s + SETTLES_S, f"{attempt} left {waited:.0f} s ago for {owed.takers}: in vain"

    def _is_settled(self, attempt: AttemptId, owed: Owed) -> bool:
        """Return whether a job runs for which an attempt left, or something happened that nobody could know."""
        if self._changed_at >= self._asked_at.get(attempt, owed.since):
            return True
        for job_id, before in owed.takers.items():
            job = self._state.jobs.get(job_id)
            if job is None or job.state.finished or begun(job) > before or self._pauses(job):
                return True
        there = list(self._on(owed.node_ids))
        if any(self._comes_before(other, owed.takers) for other in there):
            return True
        ended = [self.ledger.ended.get(other, self.now) for other in there]
        return any(self.now >= since + UNCONFIRMED_S for since in ended)

    def _comes_before(self, attempt: AttemptId, takers: Collection[str]) -> bool:
        """Return whether a job of a higher band runs in their place, which takes a reservation that lets it run."""
        job = self._state.jobs.get(attempt.job_id)
        return job is not None and all(job.spec.priority < self._state.jobs[job_id].spec.priority for job_id in takers)


if __name__ == "__main__":
    from tests.proofs.plays import command
    from tests.proofs.windows.__main__ import EACH, play_by
    from tests.proofs.windows.calm import Calm

    command("windows.outsider", play_by(OutsidersRules, "windows.outsider", Calm), EACH)
