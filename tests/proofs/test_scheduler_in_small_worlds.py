"""The scheduler proven on all small worlds: its plans are legal, and no jobs wait for each other for ever."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain, combinations, combinations_with_replacement, islice, product
from typing import Any

import pytest

from iris_ray.model.constraints import AttributeValue
from iris_ray.model.job_spec import CoschedulingConfig, JobSpec
from iris_ray.model.jobs import Job
from iris_ray.model.lifecycle import AttemptId, JobState, TaskState
from iris_ray.model.workers import TPU, TPU_NAME
from iris_ray.scheduler.scheduler import BACKFILL_BOUND_S
from iris_ray.state.events import (
    AttemptEndConfirmedEvent,
    GangAssignedEvent,
    JobSubmittedEvent,
    TasksAssignedEvent,
    TaskStateChangedEvent,
)
from tests.support.proofs import EXAMPLES
from tests.support.worlds import World, gang_spec, host, one_by_one

FREE, BUSY, MISSING, DRAINING = "free", "busy", "missing", "draining"
# Which of the two hosts of a slice is which, and which slice, makes no difference.
STATES = (FREE, BUSY, DRAINING, MISSING)
SLICE_STATES = [states for states in combinations_with_replacement(STATES, 2) if states != (MISSING, MISSING)]
FLEETS = [fleet for size in range(4) for fleet in combinations_with_replacement(SLICE_STATES, size)]
LONG = BACKFILL_BOUND_S + 100
SmallFleet = tuple[tuple[str, str], ...]
Place = tuple[tuple[str, ...], ...]


def gang(*counts: int, **changes: Any) -> dict[str, Any]:
    return {"coscheduling": CoschedulingConfig(TPU_NAME, counts), "constraints": ()} | changes


SMALL_JOBS: dict[str, dict[str, Any]] = {
    "slice": gang(1),
    "two slices": gang(2),
    "slice or three": gang(1, 3),
    "part of a slice": gang(1, tpu_type="v4-8"),
    "pair in the rack": gang(1, coscheduling=CoschedulingConfig("rack")),
    "two tasks": gang(1, coscheduling=None, device=None),
}
SMALL_HOSTS = {
    (name, number, state): replace(
        plain,
        attributes={**plain.attributes, "rack": AttributeValue("the only one")},
        draining="notice" if state is DRAINING else None,
    )
    for name, number, state in product("abc", range(2), (FREE, BUSY, DRAINING))
    if (plain := host(name, number))
}
SMALL_SPECS = {(shape, n): gang_spec(f"job-{n}", **SMALL_JOBS[shape]) for shape in SMALL_JOBS for n in range(3)}


def small_worlds() -> Iterator[tuple[SmallFleet, tuple[str, ...]]]:
    """All fleets with all queues; with queues of three jobs only small ones, unless more is asked for."""
    for fleet, length in product(FLEETS, (1, 2, 3)):
        small = len(fleet) < 3 and {FREE, BUSY}.issuperset(chain(*fleet))
        if length < 3 or small or EXAMPLES > 1:
            for shapes in product(SMALL_JOBS, repeat=length):
                yield fleet, shapes


class SmallWorld(World):
    """Up to three slices of two hosts, all in one rack; each busy host is used by a job of its own."""

    def __init__(self, fleet: SmallFleet, shapes: Sequence[str], age: float) -> None:
        super().__init__()
        for name, states in zip("abc", fleet, strict=False):
            for number, state in enumerate(states):
                if state is not MISSING:
                    self.do(SMALL_HOSTS[name, number, state])
                if state is BUSY:
                    self.use(f"{name}-{number}")
        for number, shape in enumerate(shapes):
            self.do(JobSubmittedEvent(SMALL_SPECS[shape, number], self.now - age))
        self.jobs = [self.state.jobs[f"job-{number}"] for number in range(len(shapes))]

    def use(self, node_id: str) -> None:
        spec = JobSpec(job_id=f"on-{node_id}", owner="pool-a", resources={TPU: 4.0})
        self.do(JobSubmittedEvent(spec, self.now))
        self.do(TasksAssignedEvent(spec.job_id, (0,), node_id))

    def end(self, attempts: Sequence[AttemptId]) -> None:
        """They succeed, and their ends are confirmed."""
        for attempt in attempts:
            job = self.state.jobs[attempt.job_id]
            for task in job.gangs[attempt.gang].tasks:
                self.do(TaskStateChangedEvent(attempt, task.index, TaskState.SUCCEEDED))
            self.do(AttemptEndConfirmedEvent(attempt))

    # -- what is legal, from hosts alone -------------------------------------------------------------------------------

    def hosts(self, idle: bool) -> set[str]:
        """Hosts that take new tasks: now, or once nothing runs any more."""
        return {i for i, w in self.state.workers.items() if w.draining is None and not (idle and w.occupants)}

    def legal_places(self, job: Job, idle: bool) -> set[Place]:
        """All places where a gang of the job might run, as groups of hosts in order."""
        hosts = self.hosts(idle)
        config = job.spec.coscheduling
        if config is None:
            return {((node_id,),) for node_id in hosts}
        if config.group_by == "rack":
            return {(pair,) for pair in combinations(sorted(hosts), 2)}
        slices = [(f"{name}-0", f"{name}-1") for name in "abc"]
        if job.spec.replicas == 1:  # there is no slice of one host, so half a slice will do, if it is a sound one
            sound = [pair for pair in slices if self.hosts(idle=False).issuperset(pair)]
            return {((node_id,),) for pair in sound for node_id in pair if node_id in hosts}
        whole = [pair for pair in slices if hosts.issuperset(pair)]
        return {groups for count in config.num_groups for groups in combinations(whole, count)}

    def commit_legal_plan(self) -> set[str]:
        """Commit a plan step by step; each step is legal after those before. Returns the jobs that got something."""
        plan = self.plan()
        assignments = one_by_one(plan.assignments)
        for event in assignments:
            place = event.groups if isinstance(event, GangAssignedEvent) else ((event.node_id,),)
            assert place in self.legal_places(self.state.jobs[event.job_id], idle=True)
            self.do(event)
        for promise in plan.promises:
            self.do(promise)
        return {event.job_id for event in assignments}

    def run_to_the_end(self, at_once: bool) -> None:
        """Until nothing runs and nothing can: what runs ends, all at once or one after the other."""
        while attempts := self.state.attempts_of("pool-a"):
            self.end(attempts if at_once else attempts[:1])
            self.commit_legal_plan()


def check_small_world(fleet: SmallFleet, shapes: Sequence[str], age: float, at_once: bool) -> None:
    world = SmallWorld(fleet, shapes, age)
    head = world.jobs[0]  # all are one user's
    feasible = {job.spec.job_id for job in world.jobs if world.legal_places(job, idle=False)}
    possible_now = bool(world.legal_places(head, idle=True))
    assert (head.spec.job_id in world.commit_legal_plan()) == possible_now
    world.run_to_the_end(at_once)
    assert feasible == {job.spec.job_id for job in world.jobs if job.state is JobState.SUCCEEDED}


SHARES = 5
"""Of all small worlds. It has no factor in common with the number of queues, so each share has every kind of them."""


@pytest.mark.parametrize("share", [0, *(pytest.param(share, marks=pytest.mark.proof) for share in range(1, SHARES))])
@pytest.mark.parametrize(
    ("age", "at_once"), [(0.0, True), (LONG, False), *([(0.0, False), (LONG, True)] if EXAMPLES > 1 else [])]
)
def test_scheduler_in_every_small_world_plans_legally_and_ends_every_feasible_job(
    age: float, at_once: bool, share: int
) -> None:
    """All plans are legal, the oldest job runs at once if that is possible, and every job runs that ever can.

    So no jobs of any shapes wait for each other for ever: neither fresh ones nor, past the bound, those for which
    groups are kept; whether what runs ends all together or one by one. The shares together are all small worlds.
    """
    for fleet, shapes in islice(small_worlds(), share, None, SHARES):
        check_small_world(fleet, shapes, age, at_once)
