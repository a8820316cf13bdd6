"""Who holds what and who has used up what, as a second account beside the controller's state."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from iris_ray.model.job_spec import JobSpec, SparePurpose
from iris_ray.model.jobs import Job
from iris_ray.model.lifecycle import AttemptId, JobState
from iris_ray.model.notices import NoticeKind
from iris_ray.model.outcomes import Fault
from iris_ray.model.workers import Worker
from tests.proofs.state_machine.views import JobView, S


class BlameView(NamedTuple):
    """A failure that may be a host's fault."""

    at: float
    node_id: str
    user: str
    fault: Fault


PAUSES = (0.0, 0.0, 1.0, 2.0, 4.0, 8.0)
"""Before the next attempt after so many quick ends; 10 s after more of them."""
Need = tuple[SparePurpose, tuple[int, ...]]


@dataclass
class Account:
    """Who holds what and who has used up what, kept from the events alone.

    Attributes:
        held: attempt → task id → worker id, until the end is confirmed or the worker is lost.
        early: attempts of which nothing is left, say their pools, though they live as far as is known.
        holders: slice → owner.
        failures, preemptions: (job, position of the gang) → attempts that were charged so.
        ended: attempts that came to an end before they had succeeded.
        verdicts: jobs that were cancelled or given up.
        now: the latest time that an event has brought.
        notices: worker id → kind and deadline of its notice.
        finals: worker id → those of the nearest drain or preemption that it had word of.
        told: attempt → kind and deadline of the notice that its tasks have.
        began: (job, position) → when the first task of the attempt was said to run.
        launches: (job, position) → launches that failed since one has not.
        quick: (job, position) → ends in a row that came soon.
        returning: job → until when it comes before all others.
        wanted: job → on how many groups it ran before it lost some.
        taints: (target, name) → until when.
        blames: of the last hour.
        avoided: (user, worker id) → until when, and the blames for which it is.
        set_aside: worker id → until when, and the blames for which it is.
        evicted: attempt → the job that takes its hosts, and when it is stopped; "" if it yields to jobs that wait.
        evictions: (job, position) → how often it gave its hosts away.
        yields: jobs whose owners can do without them.
        last_held: spare that is gone → the hosts that it had.
    """

    held: dict[AttemptId, dict[str, str]] = field(default_factory=dict)
    early: set[AttemptId] = field(default_factory=set)
    holders: dict[str, str] = field(default_factory=dict)
    failures: Counter[tuple[str, int]] = field(default_factory=Counter)
    preemptions: Counter[tuple[str, int]] = field(default_factory=Counter)
    ended: set[AttemptId] = field(default_factory=set)
    verdicts: dict[str, JobState] = field(default_factory=dict)
    now: float = 0.0
    notices: dict[str, tuple[NoticeKind, float]] = field(default_factory=dict)
    finals: dict[str, tuple[NoticeKind, float]] = field(default_factory=dict)
    told: dict[AttemptId, tuple[NoticeKind, float]] = field(default_factory=dict)
    began: dict[tuple[str, int], float] = field(default_factory=dict)
    launches: Counter[tuple[str, int]] = field(default_factory=Counter)
    quick: Counter[tuple[str, int]] = field(default_factory=Counter)
    returning: dict[str, float] = field(default_factory=dict)
    wanted: dict[str, int] = field(default_factory=dict)
    taints: dict[tuple[str, str], float | None] = field(default_factory=dict)
    blames: list[BlameView] = field(default_factory=list)
    set_aside: dict[str, tuple[float, list[BlameView]]] = field(default_factory=dict)
    avoided: dict[tuple[str, str], tuple[float, list[BlameView]]] = field(default_factory=dict)
    evicted: dict[AttemptId, tuple[str, float]] = field(default_factory=dict)
    evictions: Counter[tuple[str, int]] = field(default_factory=Counter)
    yields: set[str] = field(default_factory=set)
    last_held: dict[str, list[str]] = field(default_factory=dict)

    def forgive(self, node_id: str) -> None:
        self.blames = [blame for blame in self.blames if blame.node_id != node_id]
        self.set_aside.pop(node_id, None)

    def ends_quickly(self, job_id: str, position: int) -> int:
        """How many quick ends in a row there are if the attempt ends now."""
        began = self.began.get((job_id, position))
        return 0 if began is not None and self.now >= began + 10.0 else self.quick[job_id, position] + 1

    def hears(self, attempt: AttemptId, kind: NoticeKind, deadline: float) -> bool:
        """Whether the attempt is to be told; if so, it is written down."""
        known_kind, known = self.told.get(attempt, (NoticeKind.GROWTH, 0.0))
        if known_kind is not NoticeKind.GROWTH and known <= deadline + 1.0:
            return False
        self.told[attempt] = kind, deadline
        return True

    def failures_of(self, job: Job) -> int:
        return sum(self.failures[job.spec.job_id, position] for position in range(len(job.gangs)))

    def failed_for_good(self, job: Job, position: int) -> bool:
        """Whether this gang's failures, or all of the job's, are more than there may be."""
        limit = job.spec.max_task_failures
        too_many = limit is not None and self.failures_of(job) > limit
        return too_many or self.failures[job.spec.job_id, position] > job.spec.max_retries_failure

    def lost_for_good(self, job: Job, position: int) -> bool:
        return self.preemptions[job.spec.job_id, position] > job.spec.max_retries_preemption

    def state_of(self, job: Job, now: JobView) -> JobState:
        """What a job's state should be, in the words of the rules."""
        positions = range(len(job.gangs))
        if verdict := self.verdicts.get(job.spec.job_id):
            return verdict
        limit = job.spec.max_task_failures
        if limit is None and any(self.failed_for_good(job, position) for position in positions):
            return JobState.FAILED
        if limit is not None and self.failures_of(job) > limit:
            return JobState.FAILED
        if any(self.lost_for_good(job, position) for position in positions):
            return JobState.WORKER_FAILED
        if all(gang.over for gang in now.gangs):
            succeeded = any(S.SUCCEEDED in gang.states for gang in now.gangs)
            return JobState.SUCCEEDED if succeeded else JobState.FAILED
        return JobState.PENDING if all(set(g.states) == {S.PENDING} for g in now.gangs) else JobState.RUNNING


def demand_of(job: Job, worker: Worker) -> Counter[str]:
    """What one task takes: with chips, all of its host's."""
    spec = job.spec
    demand: dict[str, Any] = {resource: amount for resource, amount in spec.resources.items() if amount}
    if uses_chips(spec):
        demand["TPU"] = worker.resources.get("TPU", 0.0)
    return Counter(demand)


def uses_chips(spec: JobSpec) -> bool:
    return spec.device is not None or spec.resources.get("TPU", 0.0) > 0


def is_nearer(known: dict[str, tuple[NoticeKind, float]], node_id: str, kind: NoticeKind, deadline: float) -> bool:
    """Whether that is nearer than what is known of the host; if so, it is written down."""
    if node_id in known and known[node_id][1] <= deadline + 1.0:
        return False
    known[node_id] = kind, deadline
    return True
