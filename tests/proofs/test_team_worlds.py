"""Random trees of teams on random fleets of equal slices: quotas are kept, reached, and never fought over."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from iris_ray.model.jobs import LAST_SAVE_S, Allocation, Job
from iris_ray.model.lifecycle import AttemptId
from iris_ray.model.limits import Limits
from iris_ray.model.options import PriorityBand
from iris_ray.model.teams import NO_TEAM, Quota, Team, Teams
from iris_ray.scheduler.eviction_costs import DEFAULT_RULES, GRACE_S, LEAST_RUN_S
from iris_ray.state.events import (
    Event,
    LimitsSetEvent,
    PromiseEvent,
    TaskStateChangedEvent,
    TeamsSetEvent,
    TimePassedEvent,
)
from iris_ray.state.instructions import Instructions
from iris_ray.state.team_use import own_part
from tests.support.proofs import examples
from tests.support.worlds import S, World, promised

TYPE, CHIPS = "v4-8", 4.0
STEPS = 120
STEP_S = 20.0
TAKES_S = GRACE_S + LAST_SAVE_S + 3 * STEP_S
"""How long a job at most waits for the hosts of its victims."""
SEEDS = [*range(examples(40)), 100_043, 1_087_112, 1_118_788, 12_037_142, 19_942_562, 1_519_434_531]


def random_teams(random: Random, slices: int) -> Teams:
    """A tree of up to three levels whose quotas the fleet can satisfy together."""
    teams: list[Team] = []

    def divide(parent: str, slices: int, level: int) -> None:
        for number in range(random.randint(0 if level else 1, 3)):
            mine = random.randint(0, slices)
            slices -= mine
            name = f"{parent}/{number}".lstrip("/")
            chips = mine * CHIPS
            lend = random.choice([None, None, random.randint(0, mine) * CHIPS])
            borrow = random.choice([None, None, random.randint(0, 3) * CHIPS])
            bands = {random.choice(list(PriorityBand)): random.randint(0, mine) * CHIPS}
            quotas = {TYPE: Quota(chips, lend, borrow, random.choice([{}, {}, bands]))}
            teams.append(Team(f"t{name}" if not parent else name, quotas, weight=random.choice([1.0, 1.0, 2.5])))
            if level < 2:
                divide(teams[-1].name, mine, level + 1)

    divide("", slices, 0)
    return Teams(teams)


class TeamWorld(World):
    """Slices, teams, and jobs that come, run and go.

    Attributes:
        evicted: how often somebody had to leave for a job of another team.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.random = Random(seed)
        self.evicted = 0
        self._number = 0
        self._leave: set[AttemptId] = set()  # by the plan that is being committed
        self._started: list[Job] = []  # by that plan
        self.scheduler.evictions = replace(DEFAULT_RULES, per_job=None, per_user=None)
        self.slices = self.random.randint(2, 10)
        for number in range(self.slices):
            self.add_slice(f"s{number}", TYPE)
        self.set_teams()

    def set_teams(self) -> None:
        """Replace the tree by another one, whatever runs."""
        self.teams = random_teams(self.random, self.slices)
        self.do(TeamsSetEvent(tuple(self.teams)))

    def step(self) -> None:
        random = self.random
        if random.random() < 0.02:
            self.set_teams()
        for _ in range(random.choice([0, 0, 1, 1, 2, 5])):
            self._submit()
        running = [job for job in self.state.jobs.values() if job.gang.placed and job.spec.spare_for is None]
        for job in random.sample(running, min(len(running), random.choice([0, 0, 1, 2]))):
            self.finish(job)
        self.pass_time(STEP_S * random.random())

    def pass_time(self, seconds: float) -> None:
        """Time passes, victims that are due stop and are gone, a plan is made, and what it places runs."""
        self.now += seconds
        self._gone()
        plan = self.plan()
        self._leave = {attempt for event in plan.promises for attempt in event.leave}
        self._started = [self.state.jobs[assignment.job_id] for assignment in plan.assignments]
        for assignment in plan.assignments:
            self.do(assignment)
            self._check_borrowing(self.state.jobs[assignment.job_id])
        self._leave.clear()
        for event in plan.promises:
            if event.leave:
                self._check_taking(event)
            self.do(event)
        for job in [*self.state.jobs.values()]:
            if job.gang.placed and job.gang.tasks[0].state is S.ASSIGNED:
                attempt = job.current_attempt(job.gang)
                for task in job.tasks:
                    self.do(TaskStateChangedEvent(attempt, task.index, S.RUNNING, ""))
        self.check()

    def be_quiet(self, seconds: float) -> None:
        """Let time pass in which no job comes or ends."""
        until = self.now + seconds
        while self.now < until:
            self.pass_time(5.0)

    def without_their_quota(self) -> list[Job]:
        """The waiting jobs that are within the quota of their own team; see `own_quota`."""
        return [job for job in self.state.pending() if job.spec.spare_for is None and self.own_quota(job)]

    def waits_for_young(self, job: Job) -> bool:
        """Whether lower bands of a job's team have hosts, and one had run too briefly a notice and grace ago."""
        team, asked_at = self.state.teams.path(job.spec.team)[0], self.now - GRACE_S - LAST_SAVE_S
        return any(
            self.state.teams.path(other.spec.team)[0] == team
            and other.spec.priority > job.spec.priority
            and asked_at - other.gang.running_since < LEAST_RUN_S[other.spec.priority]
            for other in self.state.jobs.values()
            if other.gang.placed
        )

    def own_quota(self, job: Job) -> bool:
        """Whether a waiting job would be within the quota of its own team, which is kept for no job before it."""
        leaf = self.state.teams.path(job.spec.team)[0]
        others = [other for other in self.state.pending() if self.state.teams.path(other.spec.team)[0] == leaf]
        if any(_may_precede(other, job) and self._comes_before_lower(leaf, other) for other in others):
            return False
        kept = sum(CHIPS * len(promised(other)) for other in others)
        in_band = sum(CHIPS * len(promised(other)) for other in others if other.spec.priority is job.spec.priority)
        return self._is_within(leaf, kept + needs(job), job.spec.priority, in_band + needs(job))

    def _comes_before_lower(self, team: str, job: Job) -> bool:
        """Whether a waiting job would be within its team's quota if lower bands had nothing."""
        lower = sum(self._held(team, band) for band in PriorityBand if band > job.spec.priority)
        return self._is_within(team, needs(job) - lower, job.spec.priority, needs(job))

    # -- parts -----------------------------------------------------------------------------------------------------

    def _submit(self) -> None:
        self._number += 1
        random, names = self.random, [NO_TEAM, *self.teams.by_name]
        self.submit(
            f"job-{self._number}",
            tpu_type=TYPE,
            user=random.choice("abc"),
            team=random.choice(names),
            priority=random.choice(list(PriorityBand)),
            slices=random.choice([(1,), (1,), (1,), (2,), (3,), (1, 2)]),
            max_retries_preemption=1000,
        )

    def _gone(self) -> None:
        """Confirm the ends of all attempts that are over."""
        self.state.handle_event(TimePassedEvent(self.now))
        for job in [*self.state.jobs.values()]:
            for attempt in [*self._allocations(job)]:
                if attempt.number != job.gang.attempt or not job.gang.placed:
                    self.confirm(job, attempt.number)

    def _allocations(self, job: Job) -> Mapping[AttemptId, Allocation]:
        record = self.state.record(job.spec.job_id)
        return {} if record is None else record.allocations

    def _is_within(self, name: str, more: float, band: PriorityBand, more_in_band: float) -> bool:
        """Whether a team is within its quota, and that of a band, with so many more chips."""
        team = self.teams.by_name.get(name)
        part = team.quotas[TYPE].by_band.get(band) if team else None
        if part is not None and self._held(name, band) + more_in_band > part:
            return False
        return self._held(name) + more <= self._quota(name)

    def _held(self, name: str, band: PriorityBand | None = None, leaving: bool = False) -> float:
        """How many chips the attempts of a team, or those of a band, hold, with those that leave only if told."""
        held, left_out = 0.0, () if leaving else {*self.state.evicted, *self._leave}
        for job in self.state.jobs.values():
            if name in self.state.teams.path(job.spec.team) and band in (None, job.spec.priority):
                for attempt, allocation in self._allocations(job).items():
                    held += 0.0 if attempt in left_out else CHIPS * len(allocation)
        return held

    def _quota(self, name: str) -> float:
        if not name.endswith("/"):
            return self.teams.chips(name, TYPE)
        whole = self.slices * CHIPS if name == own_part(NO_TEAM) else self.teams.chips(name[:-1], TYPE)
        return whole - sum(self.teams.chips(part, TYPE) for part in self.teams.parts(name[:-1]))

    def _check_taking(self, event: PromiseEvent) -> None:
        """Between teams, only who stays within its quota takes, and only from who is over it, or was lent the hosts."""
        taker = self.state.jobs[event.job_id]
        path = self.state.teams.path(taker.spec.team)
        later = [job for job in self._started if job.spec.priority >= taker.spec.priority]  # perhaps, and borrows
        taken: dict[str, list[tuple[PriorityBand, float]]] = {}
        for attempt in event.leave:
            victim = self.state.jobs[attempt.job_id]
            if victim.spec.spare_for is not None or attempt in self.state.evicted:
                continue  # it leaves anyway
            if taker.promise is not None and victim.spec.job_id in taker.promise.lent:
                bands = victim.spec.priority, taker.spec.priority
                assert bands[0] > bands[1] or bands == (PriorityBand.BATCH,) * 2, f"{event.job_id} lent it no host"
                continue  # whatever the quotas
            theirs = self.state.teams.path(victim.spec.team)
            if theirs[0] == path[0]:
                assert victim.spec.priority > taker.spec.priority, f"{victim.spec.job_id} is of no lower band"
                continue
            self.evicted += 1
            above = next(name for name in theirs if name in path)
            mine = path[path.index(above) - 1]
            band, own = taker.spec.priority, [one for one in event.leave if mine in self._path(one.job_id)]
            ids = [*(one.job_id for one in own), *(job.spec.job_id for job in later)]
            others = [job_id for job_id in ids if mine in self._path(job_id)]
            freed = sum(map(self._chips_of, others))
            in_band = sum(self._chips_of(job_id) for job_id in others if self._band(job_id) is band)
            within = self._is_within(mine, needs(taker) - freed, band, needs(taker) - in_band)
            assert within, f"{event.job_id} takes: {mine} is over"
            for name in theirs[: theirs.index(above)]:
                taken.setdefault(name, []).append((victim.spec.priority, self._chips_of(attempt.job_id)))
            if victim.gang.evicted_at:
                ran = self.now - victim.gang.running_since
                assert ran >= LEAST_RUN_S[victim.spec.priority], f"{victim.spec.job_id} is evicted again after {ran} s"
        for name, victims in taken.items():
            before_last = (
                self._is_within(name, last - sum(chips for _, chips in victims), band, last - self._sum(victims, band))
                for band, last in victims
            )
            assert not all(before_last), f"{name} gives {victims} and is back at its quota before the last"

    @staticmethod
    def _sum(victims: Iterable[tuple[PriorityBand, float]], band: PriorityBand) -> float:
        return sum(chips for of, chips in victims if of is band)

    def _band(self, job_id: str) -> PriorityBand:
        return self.state.jobs[job_id].spec.priority

    def _path(self, job_id: str) -> tuple[str, ...]:
        return self.state.teams.path(self.state.jobs[job_id].spec.team)

    def _chips_of(self, job_id: str) -> float:
        return CHIPS * len(self.state.jobs[job_id].gang.tasks)

    def _check_borrowing(self, job: Job) -> None:
        """Who is over its quota has borrowed no more than it may, and nothing that others keep for themselves.

        What leaves counts for its team until it has left.
        """
        path = self.state.teams.path(job.spec.team)[:-1]
        for name in path:
            if (team := self.teams.by_name.get(name)) and (most := team.quotas[TYPE].borrow) is not None:
                assert self._held(name, leaving=True) <= self._quota(name) + most, f"{name} has borrowed too much"
        if any(self._held(name) <= self._quota(name) for name in path):
            return
        assert self._claim(NO_TEAM) <= self.slices * CHIPS, f"{job.spec.job_id} uses what is not lent"

    def _claim(self, name: str) -> float:
        """What a team holds, or keeps for itself."""
        parts = self.teams.parts(name)
        claim = sum(map(self._claim, parts)) + self._held(own_part(name)) if parts else self._held(name)
        quota = self.teams.by_name[name].quotas[TYPE] if name else Quota(0.0)
        return max(claim, 0.0 if quota.lend is None else quota.chips - quota.lend)


class CrowdedTeamWorld(TeamWorld):
    """Such a world in which users have limits as well, and gangs hold spares, which leave for a job that then runs."""

    def __init__(self, seed: int) -> None:
        self._draws = Random(f"more {seed}")
        self._owed: dict[str, float] = {}  # the job for which a spare has left → when
        super().__init__(seed)
        for user in "abc":
            for band in PriorityBand:
                if self._draws.random() < 0.5:
                    most = CHIPS * self._draws.randint(1, self.slices)
                    self.do(LimitsSetEvent(user, band, Limits(chips=most)))

    def set_teams(self) -> None:
        super().set_teams()
        self._owed.clear()

    def submit(self, job_id: str = "job", **changes: Any) -> Job:
        spares = self._draws.choice([1, 1, 2]) if self._draws.random() < 0.3 else 0
        return super().submit(job_id, spares=spares, **changes)

    def do(self, event: Event) -> Instructions:
        if isinstance(event, PromiseEvent) and any(self._is_spare(attempt.job_id) for attempt in event.leave):
            self._owed.setdefault(event.job_id, self.now)
        return super().do(event)

    def check(self) -> None:
        super().check()
        for job_id, since in list(self._owed.items()):
            job = self.state.jobs.get(job_id)
            if job is None or job.gang.placed or (job.promise is None and self._is_preceded(job)):
                del self._owed[job_id]
            else:
                assert self.now < since + TAKES_S, f"a spare left {self.now - since:.0f} s ago for {job_id} in vain"

    def _is_spare(self, job_id: str) -> bool:
        return self.state.jobs[job_id].spec.spare_for is not None

    def _is_preceded(self, job: Job) -> bool:
        """Whether a job of a higher band, or of another team, has begun since a spare left for this one."""
        since, path = self._owed[job.spec.job_id], self.state.teams.path(job.spec.team)
        begun = (one for one in self.state.jobs.values() if one.gang.placed and one.gang.running_since >= since)
        return any(
            one.spec.priority < job.spec.priority or self.state.teams.path(one.spec.team) != path for one in begun
        )


def needs(job: Job) -> float:
    return job.spec.groups_per_gang[0] * CHIPS


def _may_precede(other: Job, job: Job) -> bool:
    """Whether the quota that a job needs may be kept for another one of its team."""
    same_band = other.spec.priority is job.spec.priority
    return other.spec.priority < job.spec.priority or (same_band and needs(other) > needs(job))


@pytest.mark.parametrize("seed", SEEDS)
def test_quotas_are_kept_and_reached_on_random_trees(seed: int) -> None:
    world = TeamWorld(seed)
    for _ in range(STEPS):
        world.step()
    # no job comes or ends any more: a job within the quota of its team gets it within notice and grace, or, if lower
    # bands of its team have it, once they have run for long enough
    new = {job.spec.job_id for job in world.state.jobs.values() if job.gang.placed and not job.gang.evicted_at}
    calm = len(new) == sum(job.gang.placed for job in world.state.jobs.values())
    if calm:
        world.be_quiet(2 * (GRACE_S + LAST_SAVE_S))
        for job in world.without_their_quota():
            assert world.waits_for_young(job), f"{job.spec.job_id} of {job.spec.team} does not get its quota"
    if not calm or world.without_their_quota():
        world.be_quiet(max(LEAST_RUN_S.values()) + 3 * (GRACE_S + LAST_SAVE_S))
    for job in world.without_their_quota():
        raise AssertionError(f"{job.spec.job_id} of {job.spec.team} does not get its quota")


@pytest.mark.parametrize("seed", [98, *range(examples(10))])
def test_quotas_are_kept_beside_limits_and_no_spare_leaves_in_vain(seed: int) -> None:
    world = CrowdedTeamWorld(seed)
    for _ in range(STEPS):
        world.step()


def test_random_trees_have_evictions_between_teams() -> None:
    evicted = 0
    for seed in range(10):
        world = TeamWorld(seed)
        for _ in range(STEPS):
            world.step()
        evicted += world.evicted
    assert evicted > 10
