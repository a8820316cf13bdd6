"""What the rules of promises go by: the state, and what they remember of it."""

import math
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field, replace

from iris_ray.model.jobs import Gang, Job
from iris_ray.model.lifecycle import AttemptId
from iris_ray.model.options import PriorityBand
from iris_ray.model.workers import TPU_NAME, Worker, accelerators
from iris_ray.scheduler.eviction_costs import EvictionRules
from iris_ray.scheduler.limits import chips_per_group
from iris_ray.state import ControllerState

UNCONFIRMED_S = 30.0
"""For so long an end that is still to be confirmed counts as about to come."""


@dataclass
class Promised:
    """What a job was told it will get.

    Attributes:
        node_ids: the hosts.
        given_up: the attempts that were asked to leave for it. With any, the promise is firm.
        left: those of them that have left.
        limits: those of its user when it was last within them, with all that is still to leave.
        begun: how many attempts of the job there had been.
        there: the attempts that held these hosts when they were promised.
        elsewhere: how many tasks of the job got other hosts meanwhile, and have not cost it one of these.
    """

    node_ids: tuple[str, ...]
    given_up: tuple[AttemptId, ...] = ()
    left: tuple[AttemptId, ...] = ()
    limits: tuple[float, float] = (math.inf, math.inf)
    begun: int = 0
    there: frozenset[AttemptId] = frozenset()
    elsewhere: int = 0

    @property
    def is_firm(self) -> bool:
        return bool(self.given_up)


@dataclass
class Ledger:
    """What the rules remember. A Controller that is killed before it writes forgets what came since the last write.

    Attributes:
        promised: by job id.
        ended: the attempts whose end is still to be confirmed, each since when.
        asked: the attempts that are to leave, each with when it is stopped.
    """

    promised: dict[str, Promised] = field(default_factory=dict)
    ended: dict[AttemptId, float] = field(default_factory=dict)
    asked: dict[AttemptId, float] = field(default_factory=dict)

    def copy(self) -> "Ledger":
        promised = {job_id: replace(one) for job_id, one in self.promised.items()}
        return Ledger(promised, dict(self.ended), dict(self.asked))


class Seen:
    """What one can observe of a Controller's state.

    Args:
        evictions: when attempts may be evicted; None: never.
        bound_s: for how many seconds jobs that came later may pass a waiting job.

    Attributes:
        now: seconds on the clock of the events.
        ledger: what is remembered.
    """

    def __init__(self, evictions: EvictionRules | None, bound_s: float) -> None:
        self.now = 0.0
        self.ledger = Ledger()
        self._evictions = evictions
        self._bound_s = bound_s
        self._state = ControllerState()

    def _live(self, attempt: AttemptId) -> Gang | None:
        job = self._state.jobs.get(attempt.job_id)
        gang = job.gangs[attempt.gang] if job is not None else None
        return gang if gang is not None and gang.attempt == attempt.number and gang.placed else None

    def _on(self, node_ids: Iterable[str]) -> Iterator[AttemptId]:
        workers = (self._state.workers[node_id] for node_id in node_ids)
        return (attempt for worker in workers for _, attempt in worker.occupants)

    def _takers(self, attempt: AttemptId) -> list[Promised]:
        """Return the promises for which an attempt was asked to leave."""
        return [promised for promised in self.ledger.promised.values() if attempt in promised.given_up]

    def _in_the_way(
        self, host: Worker, leave: Collection[AttemptId] = (), unconfirmed_s: float = UNCONFIRMED_S
    ) -> Iterator[AttemptId]:
        """Yield the attempts on a host that will not have left it within a bound."""
        for attempt in {attempt for _, attempt in host.occupants}:
            since = self.ledger.ended.get(attempt)
            if since is not None and self.now < since + unconfirmed_s:
                continue
            if attempt in leave:
                continue
            yield attempt

    def _ways(self, promised: Promised) -> Iterator[bool]:
        """Yield for each host of a promise whether something on it will not have left within a bound."""
        workers = (self._state.workers.get(node_id) for node_id in promised.node_ids)
        return (worker is None or any(self._in_the_way(worker)) for worker in workers)

    def _returns(self, job: Job) -> Iterator[Gang]:
        """Yield the gangs of a job that have lost their hosts a moment ago, and come first."""
        if job.spec.coscheduling is not None and not job.yields:
            waiting = (job.gangs[position] for position in job.pending)
            yield from (gang for gang in waiting if self.now < gang.returning_until)

    def _is_returning(self, job: Job) -> bool:
        return any(self._returns(job))

    def _is_too_late(self, job: Job) -> bool:
        """Return whether the plan gives a job up: it has not run in time."""
        timeout = job.spec.scheduling_timeout
        return timeout is not None and not job.started and self.now - job.submitted_at > timeout

    def _pauses(self, job: Job) -> bool:
        return all(job.gangs[position].not_before > self.now for position in job.pending)

    def _may_evict(self, taker: Job, job: Job, gang: Gang) -> bool:
        """Return whether a gang may be evicted for a job. No gang is for spares: they can do without."""
        if self._evictions is None or not taker.spec.may_evict or taker.spec.spare_for is not None:
            return False
        if job.spec.priority <= taker.spec.priority:
            return False
        return self.now >= gang.running_since + self._evictions.least_run_s.get(job.spec.priority, math.inf)

    def _slices(self) -> dict[str, list[Worker]]:
        slices: dict[str, list[Worker]] = {}
        for worker in self._state.workers.values():
            slices.setdefault(worker.slice_name or worker.node_id, []).append(worker)
        return slices

    def _chips_of(self, node_ids: Iterable[str]) -> float:
        workers = (self._state.workers.get(node_id) for node_id in node_ids)
        return sum(accelerators(worker.resources) for worker in workers if worker is not None)


def may_use(job: Job, worker: Worker) -> bool:
    """Return whether a job may use a worker, for all its constraints on the slice's name."""
    names = [constraint.value for constraint in job.spec.constraints if constraint.key == TPU_NAME]
    return all(name == worker.attributes[TPU_NAME] for name in names)


def account_of(job: Job) -> tuple[str, PriorityBand]:
    return job.spec.user, job.spec.priority


def begun(job: Job) -> int:
    """Return how many attempts of a job there have been."""
    return sum(gang.attempt for gang in job.gangs)


def least_chips(job: Job) -> float:
    """Return how many chips a job needs at least to run, or its next task."""
    return job.spec.groups_per_gang[0] * chips_per_group(job)


def names_of(attempts: Iterable[AttemptId]) -> str:
    return ", ".join(map(str, attempts)) or "nobody"
