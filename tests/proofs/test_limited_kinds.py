"""Plans that leave out the jobs that wait for a limit are those of plans that look at all jobs.

But for equals: of teams with equal shares, that with the oldest job goes first, though this job may wait for a limit.
"""

from collections.abc import Mapping
from random import Random
from typing import Any

import pytest

from iris_ray.model.limits import Limits
from iris_ray.model.options import PriorityBand
from iris_ray.scheduler import Scheduler
from iris_ray.scheduler.cycle import SchedulingResult
from iris_ray.scheduler.limited_kinds import LimitedKinds
from iris_ray.scheduler.pending_reason import PendingKind, PendingReason
from iris_ray.scheduler.planner import running
from iris_ray.scheduler.reasons import Reasons
from iris_ray.state.events import JobCancelledEvent, LimitsSetEvent
from tests.proofs.test_team_worlds import TeamWorld
from tests.support.proofs import examples

STEPS = 100
SEEDS = range(examples(60))


class CrowdedWorld(TeamWorld):
    """Teams and users with limits; every plan is made twice.

    Attributes:
        left_out: how many jobs were left out of plans, all in all.
        placed: how many jobs were placed by plans that left others out.
        differ: how many plans placed others than a plan of all jobs does.
    """

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.left_out = self.placed = self.differ = 0
        self._limited = LimitedKinds(self.state)
        self._of_rest = Scheduler()
        self._of_rest.evictions = self.scheduler.evictions
        self._full_look_at = 0.0

    def plan(self, waiting: Mapping[str, PendingReason] | None = None, gives_back: bool = True) -> SchedulingResult:
        state, limited = self.state, self._limited
        if self.now >= self._full_look_at:
            limited.release_all(Reasons())
            self._full_look_at = self.now + 300.0
        limited.release_changed(Reasons())
        of_all = super().plan(waiting, gives_back)
        of_rest = self._of_rest.find_assignments(
            limited.rest(),
            state.fleet,
            state.usage,
            self.now,
            past=state.past_usage,
            running=running(state),
            idle=[*state.spares(), *state.yielding()],
            limits=state.limits,
            teams=state.teams,
        )
        for job_id in limited.reasons:
            assert of_all.pending_reasons[job_id].kind is PendingKind.LIMITED, f"{job_id} needs a look"
        if (of_rest.assignments, of_rest.promises) != (of_all.assignments, of_all.promises):
            self.differ += 1
        else:
            assert {*of_rest.pending_reasons, *limited.reasons} == of_all.pending_reasons.keys()
        self.left_out += len(limited.reasons)
        self.placed += len(of_rest.assignments) if limited.reasons else 0
        limited.add(of_rest.limited, of_rest.pending_reasons)
        return of_rest

    def pass_time(self, seconds: float) -> None:
        super().pass_time(seconds)
        self._limited.planned()

    def step(self) -> None:
        random = self.random
        if random.random() < 0.05:
            most = Limits(random.choice([None, 4.0, 8.0, 12.0]), random.choice([None, 1, 2]))
            self.do(LimitsSetEvent(random.choice("abc"), random.choice(list(PriorityBand)), most))
        waiting = list(self.state.pending())
        for job in random.sample(waiting, min(len(waiting), random.choice([0, 0, 0, 1]))):
            if job.spec.spare_for is None:
                self.do(JobCancelledEvent(job.spec.job_id, "no longer wanted"))
        super().step()

    def submit(self, job_id: str = "job", **changes: Any) -> Any:
        """Submit a job, and often more that ask for the same."""
        job = super().submit(job_id, **changes)
        for number in range(Random(self._number).choice([0, 0, 1, 3])):
            super().submit(f"{job_id}-{number}", **changes)
        return job

    def _check_borrowing(self, job: Any) -> None:
        """Other worlds check it."""


@pytest.mark.parametrize("seed", SEEDS)
def test_plans_are_those_of_all_jobs(seed: int) -> None:
    world = CrowdedWorld(seed)
    for _ in range(STEPS):
        world.step()


def test_worlds_leave_jobs_out_and_place_others() -> None:
    worlds = [CrowdedWorld(seed) for seed in range(8)]
    for world in worlds:
        for _ in range(STEPS):
            world.step()
    assert sum(world.left_out for world in worlds) > 1000
    assert sum(world.placed for world in worlds) > 50
    assert sum(world.differ for world in worlds) <= 5
