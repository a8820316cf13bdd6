"""Many small worlds in which jobs take chips from lower bands across slice sizes, or have slices held for them.

The Controller's state and plans are real, as are the provisioner and what it asks; the provider and the pools are on
paper. In stormy worlds the provider refuses, loses answers and deletes slowly, jobs are cancelled, and the provisioner
is replaced. What holds in all of them:

- The chips of all slices that exist, are being made or are being deleted never exceed the reservation.
- A slice is never deleted while an attempt holds it.
- Only attempts of lower bands leave, after their minimum time, within their budgets, and none of them is superfluous.
- Nobody leaves for a job that could not start with the chips, or that is beyond its user's limit.
- Hosts that are reserved to be removed go to no job of the same band or a lower one, unless they are lent.
- Slices are held only for a job that has waited for longer than the backfill bound, and for one job at a time. No more
  idle ones are held than it lacks, and none in use once these suffice.

And in calm ones nobody leaves in vain, and every job runs.
"""

import math
import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from iris_ray.capacity import provisioner as provisioner_module
from iris_ray.capacity.core import CapacityReport
from iris_ray.capacity.demand import WaitingGang, demand_of, is_of_type, slices_to_remove
from iris_ray.capacity.holdings import Reach, Settings
from iris_ray.capacity.lower_bands import ChipsLeft, ChipsWanted, left_for, promise_for
from iris_ray.capacity.provider import QueuedState
from iris_ray.capacity.provisioner import CLOSED_S, GIVEN_BACK, Jobs, Provisioner
from iris_ray.capacity.provisioning import Joined
from iris_ray.errors import NotPermittedError
from iris_ray.model.constraints import TAINT_PREFIX
from iris_ray.model.jobs import Job
from iris_ray.model.limits import Limits
from iris_ray.model.options import PriorityBand
from iris_ray.model.topology import get_tpu_config
from iris_ray.model.workers import TPU_NAME
from iris_ray.scheduler.eviction_costs import DEFAULT_RULES, LEAST_RUN_S
from iris_ray.scheduler.evictions import leaves_for
from iris_ray.scheduler.pending_reason import PendingReason
from iris_ray.scheduler.scheduler import BACKFILL_BOUND_S
from iris_ray.state.attempt_ends import BUDGET_S
from iris_ray.state.events import (
    AttemptEndConfirmedEvent,
    Event,
    GangAssignedEvent,
    GangMovedEvent,
    JobCancelledEvent,
    LimitsSetEvent,
    PromiseEvent,
    SliceReleasedEvent,
    TaintedEvent,
    TaintLiftedEvent,
    TimePassedEvent,
    WorkerFailedEvent,
)
from iris_ray.state.instructions import Instructions
from tests.support.paper_google import HOSTS, OWNER, PaperGoogle, reservation
from tests.support.worlds import MANY, PlannedWorld, S, set_teams

_, PRODUCTION, INTERACTIVE, BATCH = PriorityBand
CHIPS, LIMIT, TURN_S, STEP_S = 32, 16, 30.0, 10.0
TYPES = ("v4-8", "v4-16", "v4-32", "v4-64")
Q = QueuedState


class World(Jobs):
    """The cluster, beside a zone on paper.

    Attributes:
        chips: those of the reservation.
        types: the types of slices.
    """

    chips: int = CHIPS
    types: Sequence[str] = TYPES

    def __init__(
        self, seed: int, is_stormy: bool, monkeypatch: pytest.MonkeyPatch, bands: Sequence[PriorityBand]
    ) -> None:
        self.random = random.Random(seed)
        self.google = self.new_google(is_stormy)
        self.bands = bands
        self.teams: list[str] = []
        self.length: dict[str, float] = {}  # how long each job runs, by id; spares run as long as their jobs
        self.cluster = PlannedWorld()
        self.state = self.cluster.state
        self.wanted: ChipsWanted | None = None
        self.made: defaultdict[str, int] = defaultdict(int)  # promises of slices to be removed, by job
        self.held: defaultdict[str, int] = defaultdict(int)  # how often slices were held for each job
        self.in_vain: list[str] = []
        self.handle = self.state.handle_event
        self.state.handle_event = self.see  # type: ignore[method-assign]
        clock = SimpleNamespace(time=lambda: 1.7e9 + self.cluster.now, monotonic=lambda: self.cluster.now)
        monkeypatch.setattr(provisioner_module, "time", clock)
        self.cluster.do(LimitsSetEvent("ann", INTERACTIVE, Limits(chips=LIMIT)))
        self.provisioner = self.new_provisioner()

    def new_google(self, is_stormy: bool) -> PaperGoogle:
        return PaperGoogle(self.random, reservation(self.chips), self.attempts_on, is_stormy)

    def new_provisioner(self) -> Provisioner:
        types, sources = tuple(map(get_tpu_config, self.types)), (reservation(self.chips),)
        settings = Settings(OWNER, types, sources, least=0, most=12, idle_s=300.0, take_back=Reach.HELD)
        return Provisioner(settings, [self.google], self, HOSTS, print_line=lambda line, problem: None)

    def happens(self, chance: float) -> bool:
        return self.google.happens(chance)

    def attempts_on(self, name: str) -> list[object]:
        return [who for host in self.state.fleet.slice_workers(name) for who in host.occupants]

    # -- what must hold --------------------------------------------------------------------------------------------

    def see(self, event: Event) -> Instructions:
        match event:
            case PromiseEvent(job_id, removed_by=removed_by) if removed_by and event.leave:
                self.judge(event, self.state.jobs[job_id])
            case PromiseEvent(job_id, removed_by=removed_by) if removed_by:
                self.judge_held(event, self.state.jobs[job_id])
            case GangAssignedEvent(job_id):
                taken = {node_id for group in event.groups for node_id in group}
                for other in self.state.pending():
                    if other.promise is None or other.spec.job_id == job_id:
                        continue
                    if slices_to_remove(other, self.state.fleet):
                        is_apart = taken.isdisjoint(other.promise.node_ids)
                        job = self.state.jobs[job_id]
                        is_lent = not other.promise.is_firm and leaves_for(job, other)
                        may_be_there = is_apart or is_lent or job.spec.priority < other.spec.priority
                        assert may_be_there, f"{job_id} takes {other}'s hosts"
        return self.handle(event)

    def judge_held(self, event: PromiseEvent, taker: Job) -> None:
        """Check slices that are held for a job until enough of them are idle."""
        state, wanted = self.state, self.wanted
        assert wanted is not None
        waited_s, bound_s = self.cluster.now - taker.gang.waiting_since, BACKFILL_BOUND_S
        assert waited_s >= (0.0 if taker.spec.priority is PRODUCTION else bound_s), f"{event.job_id} may be passed"
        self.held[event.job_id] += 1
        names = self.awaited(event, taker)
        of_each = {name: self.google.slices[name].config.chip_count for name in names}
        hosts = {name: state.fleet.slice_workers(name) for name in names}
        idle = {name for name in names if not any(one.occupants.keys() - one.ending.keys() for one in hosts[name])}
        chips = [of_each[name] for name in idle]
        assert sum(of_each.values()) >= wanted.chips, f"{event.job_id} holds too few"
        assert not chips or sum(chips) - min(chips) < wanted.chips, f"{event.job_id} holds {chips} for {wanted.chips}"
        assert idle == names or sum(chips) < wanted.chips, (
            f"{event.job_id} holds slices in use, although {idle} suffice"
        )
        for other in state.pending():
            names = {*slices_to_remove(other, state.fleet)} - self.google.leaving
            is_first = (other.spec.priority, other.number) < (taker.spec.priority, taker.number)
            if names and is_first:  # a later job's hold ends at the next look
                assert other.promise is not None
                assert other.promise.is_firm, f"{event.job_id} and {other.spec.job_id} hold slices at once: {names}"
        self.is_within_limits(taker)

    def is_within_limits(self, taker: Job) -> None:
        if taker.spec.user == "ann":
            held = self.state.limits.held("ann", INTERACTIVE).chips
            assert held + self.chips_of(taker) <= LIMIT, f"{taker.spec.job_id} is beyond its user's limit"

    def judge(self, event: PromiseEvent, taker: Job) -> None:
        now, state, wanted = self.cluster.now, self.state, self.wanted
        assert wanted is not None
        assert taker.pending
        self.made[event.job_id] += 1
        names = self.awaited(event, taker)
        of_type = {name for name in names if is_of_type(name, taker, state.fleet)}
        for victim in event.leave:
            job = state.jobs[victim.job_id]
            gang, band = job.gangs[victim.gang], job.spec.priority
            lent = taker.promise.lent if taker.promise is not None else ()
            is_lent = victim.job_id in lent and leaves_for(job, taker)
            assert band > taker.spec.priority or is_lent, f"{victim.job_id} of {band.name} leaves for {event.job_id}"
            assert is_lent or now >= gang.running_since + LEAST_RUN_S[band], f"{victim.job_id} has just begun"
            lately = [at for at in gang.evicted_at if at > now - BUDGET_S]
            assert is_lent or len(lately) < (DEFAULT_RULES.per_job or 0), f"{victim.job_id} had enough"
            there = {task.node_id for task in gang.tasks}
            without = [
                name for name in names if there.isdisjoint(host.node_id for host in state.fleet.slice_workers(name))
            ]
            chips = sum(self.google.slices[name].config.chip_count for name in without)
            assert chips < wanted.chips, f"{victim.job_id} leaves superfluously"
        for name in names:
            for host in state.fleet.slice_workers(name):
                left = {who[1] for who in host.occupants.keys() - host.ending.keys()} - {*event.leave}
                assert not left, f"{left} stay on {name}"
        self.is_within_limits(taker)
        slices = self.google.slices
        requests = {name for name, one in slices.items() if one.listed.state is Q.ACCEPTED}
        goes = (names - of_type) | self.google.leaving | requests
        staying = {name: one.config for name, one in slices.items() if name not in goes}
        stays = sum(config.chip_count for config in staying.values())
        own = [name for name, config in staying.items() if config.name == taker.spec.device]  # it would use these
        own_chips = sum(staying[name].chip_count for name in own if name in of_type or not self.attempts_on(name))
        more = max(0, self.chips_of(taker) - own_chips)
        assert stays + more <= self.chips, f"{event.job_id} could not start: {stays} chips stay"

    def awaited(self, event: PromiseEvent, taker: Job) -> set[str]:
        """The slices of a promise without those of the job's type that are free, which stay for it."""
        names = {self.state.workers[node_id].slice_name or "" for node_id in event.node_ids}
        fleet = self.state.fleet
        free = {name for name in names if is_of_type(name, taker, fleet) and not self.attempts_on(name)}
        assert len(names) > len(free), "all are free, and it waits"
        return names - free

    @staticmethod
    def chips_of(job: Job) -> int:
        return job.spec.groups_per_gang[0] * get_tpu_config(job.spec.device or "").chip_count

    # -- the cluster, as the provisioner sees it -------------------------------------------------------------------

    @property
    def waits(self) -> list[tuple[Job, PendingReason]]:
        reasons = self.cluster.planner.pending_reasons
        return [(self.state.jobs[i], why) for i, why in reasons.items() if i in self.state.jobs]

    def look(self) -> tuple[Sequence[WaitingGang] | None, Mapping[str, Joined]]:
        if self.happens(0.05):
            return None, {}
        fleet, joined = self.state.fleet, {}
        for name in fleet.grouping(TPU_NAME):
            hosts = fleet.slice_workers(name)
            in_use = any(host.occupants or fleet.holder_of(host) for host in hosts)
            closed = any(TAINT_PREFIX + GIVEN_BACK in host.attributes for host in hosts)
            joined[name] = Joined(len(hosts) == self.google.slices[name].config.vm_count, in_use, closed)
        return demand_of(self.state, self.waits, self.cluster.now), joined

    def lease(self, owner: str, instance: str, seconds: float) -> bool:
        return True

    def report(self, report: CapacityReport) -> None:
        pass

    def close(self, name: str) -> None:
        if self.happens(0.1):
            self.cluster.turn()  # jobs are faster
        if self.happens(0.03):
            raise NotPermittedError("only operators may taint hosts")
        self.cluster.do(TaintedEvent(name, GIVEN_BACK, "it goes", self.cluster.now + CLOSED_S))

    def reopen(self, name: str) -> None:
        self.cluster.do(TaintLiftedEvent(name, GIVEN_BACK))

    def leave_chips(self, wanted: ChipsWanted) -> ChipsLeft:
        if self.happens(0.03):
            raise NotPermittedError("only operators may have jobs leave")
        now, self.wanted = self.cluster.now, wanted
        event = promise_for(wanted, self.state, DEFAULT_RULES, self.waits, now)
        if isinstance(event, str):
            return ChipsLeft(why_not=event)
        if event is not None:
            self.cluster.do(event)
        return left_for(wanted.job_id, self.state, now)

    # -- time ------------------------------------------------------------------------------------------------------

    def submit(self) -> None:
        tpu_type = self.random.choice(self.types)
        chips = get_tpu_config(tpu_type).chip_count
        slices = min(self.random.choice((1, 1, 1, 2, 3)), self.chips // chips)
        job_id, band = f"job-{len(self.length)}", self.random.choice(self.bands)
        is_limited = band is INTERACTIVE and self.random.random() < 0.3 and slices * chips <= LIMIT
        self.length[job_id] = self.random.randint(1, 25) * TURN_S
        about = {**MANY, "user": "ann" if is_limited else self.random.choice(("bea", "cy"))}
        team = self.random.choice(self.teams) if self.teams else ""
        self.cluster.submit(job_id, tpu_type=tpu_type, slices=(slices,), priority=band, team=team, **about)

    def set_teams(self, text: str) -> None:
        """Set the quotas of teams of which all later jobs are."""
        set_teams(self.cluster, text)
        self.teams = sorted(self.state.teams.teams.by_name)

    def step(self) -> None:
        """The pools and the Controller do what is due."""
        cluster, state = self.cluster, self.state
        cluster.now += STEP_S
        cluster.do(TimePassedEvent(cluster.now))
        for attempt in state.attempts_of("pool-a"):
            gang = state.jobs[attempt.job_id].gangs[attempt.gang]
            if (gang.attempt != attempt.number or not gang.placed) and not self.happens(0.3):
                cluster.do(AttemptEndConfirmedEvent(attempt))
        for job in [*state.jobs.values()]:
            if not job.gang.placed:
                continue
            if job.tasks[0].state is not S.RUNNING:
                cluster.report_all(job, S.RUNNING)
            elif cluster.now >= job.gang.running_since + self.length.get(job.spec.job_id, math.inf):
                cluster.finish(job)
            elif job.gang.eviction is not None and self.random.random() < 0.3:
                cluster.do(GangMovedEvent(job.current_attempt(job.gang), "all its tasks have saved"))
        instructions = Instructions()
        cluster.planner.plan(cluster.now, instructions)
        for reclaimed in instructions.reclaim:
            cluster.do(SliceReleasedEvent(reclaimed.slice_name, reclaimed.holder))
        removed = {name for job in state.pending() for name in slices_to_remove(job, state.fleet)}
        for name, holder in [*state.holders.items()]:
            is_used = any(host.occupants for host in state.fleet.slice_workers(name))
            if not is_used and (name in removed or self.random.random() < 0.3):
                cluster.do(SliceReleasedEvent(name, holder))

    def turn(self) -> None:
        before = self.promised()
        self.provision()
        if self.happens(0.02):
            self.provisioner = self.new_provisioner()
        gone, new = self.google.advance()
        for host in [host for name in gone for host in self.state.fleet.slice_workers(name)]:
            self.cluster.do(WorkerFailedEvent(host.node_id, "its slice is deleted"))
        for name in new:
            self.cluster.add_slice(name, self.google.slices[name].config.name)
        for _ in range(round(TURN_S / STEP_S)):
            self.step()
            self.note_in_vain(before | self.promised())
            before = self.promised()
        self.state.check()

    def provision(self) -> None:
        """Have the provisioner take a turn."""
        self.provisioner.try_turn()

    def promised(self) -> dict[str, tuple[str, ...]]:
        """The slices to be removed that some attempts leave, by the job that gets their chips."""
        waiting = [job for job in self.state.pending() if job.promise is not None and job.promise.given_up]
        found = {job.spec.job_id: slices_to_remove(job, self.state.fleet) for job in waiting}
        return {job_id: names for job_id, names in found.items() if names}

    def note_in_vain(self, before: Mapping[str, tuple[str, ...]]) -> None:
        """Note the jobs that have lost a promise, although they wait and none of its slices is being deleted."""
        for job_id in before.keys() - self.promised().keys():
            stays = self.google.slices.keys() - self.google.leaving
            goes = not stays.issuperset(before[job_id])
            if self.state.jobs[job_id].pending and not goes:
                self.in_vain.append(job_id)

    @property
    def is_over(self) -> bool:
        return all(job.state.finished for job in self.state.jobs.values())


@pytest.mark.parametrize("seed", range(8))
def test_stormy_world_keeps_all_rules_and_runs_every_job_in_the_end(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(seed, True, monkeypatch, (PRODUCTION, INTERACTIVE, BATCH))
    for _ in range(120):
        if world.random.random() < 0.15:
            world.submit()
        if world.happens(0.02) and (waiting := [*world.state.pending()]):
            world.cluster.do(JobCancelledEvent(world.random.choice(waiting).spec.job_id, "enough"))
        world.turn()
    world.google.is_stormy = False
    for _ in range(1500):
        if world.is_over and not world.google.slices:
            break
        world.turn()
    assert world.is_over, "once the storm is over, every job runs"
    assert not world.google.slices, "and what nobody needs goes"


@pytest.mark.parametrize("seed", range(8))
def test_calm_world_evicts_nobody_in_vain_and_runs_every_job(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(1000 + seed, False, monkeypatch, (INTERACTIVE, BATCH, BATCH))
    for number in range(1200):
        if number < 120 and world.random.random() < 0.2:
            world.submit()
        if number > 120 and world.is_over:
            break
        world.turn()
    assert world.is_over
    assert world.in_vain == []
    takers = [job for job in world.state.jobs.values() if job.spec.priority is INTERACTIVE]
    assert sum(world.made.values()) <= len(takers), "no more often than there are jobs that may"


BY_SIZE = """
[teams.ads]
quota = { "v4-8" = 8, "v4-16" = 16, "v4-32" = 0, "v4-64" = 32 }
[teams.vision]
quota = { "v4-8" = 8, "v4-16" = 0, "v4-32" = 32, "v4-64" = 0 }
"""
TOGETHER = """
[teams.ads]
quota.v4 = 12
[teams.vision]
quota.v4 = 20
"""


@pytest.mark.parametrize("quotas", [BY_SIZE, TOGETHER], ids=["by size", "together"])
@pytest.mark.parametrize("seed", range(2))
def test_calm_world_of_teams_evicts_nobody_in_vain(seed: int, quotas: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that borrows comes after jobs of lower bands within quota, and these would get their slices again."""
    world = World(2000 + seed, False, monkeypatch, (INTERACTIVE, BATCH, BATCH))
    world.set_teams(quotas)
    for _ in range(200):
        if world.random.random() < 0.2:
            world.submit()
        world.turn()
    assert world.in_vain == []


@pytest.mark.parametrize("band", [INTERACTIVE, BATCH])
def test_large_job_starts_although_small_jobs_of_its_band_use_each_slice_that_becomes_idle(
    band: PriorityBand, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(1, False, monkeypatch, ())

    def small() -> None:
        world.length[job_id := f"small-{len(world.length)}"] = world.random.randint(10, 30) * TURN_S
        world.cluster.submit(job_id, tpu_type="v4-8", user="bea", priority=band, **MANY)

    for _ in range(9):
        small()
    for _ in range(15):
        world.turn()
    world.length["large"] = 10 * TURN_S
    large = world.cluster.submit("large", tpu_type="v4-32", user="cy", priority=band, **MANY)
    for _ in range(150):
        if len([one for one in world.state.pending() if one is not large]) < 2:  # one always waits for the next slice
            small()
        world.turn()
        if large.gang.placed:
            break
    assert large.gang.placed, "it would wait for ever"
    assert world.held["large"] > 0
    for _ in range(150):
        world.turn()
    assert world.is_over


@pytest.mark.parametrize(("band", "most_turns"), [(INTERACTIVE, 120), (BATCH, 30)])
def test_job_of_two_slices_of_which_one_is_idle_gets_the_other_from_chips_of_small_jobs(
    band: PriorityBand, most_turns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small jobs of its band use each slice that becomes idle; those of a lower band leave theirs within minutes."""
    world = World(1, False, monkeypatch, ())

    def submit(job_id: str, turns: int, priority: PriorityBand = INTERACTIVE, **about: Any) -> Job:
        world.length[job_id] = turns * TURN_S
        return world.cluster.submit(job_id, priority=priority, **MANY, **about)

    def small() -> None:
        turns = world.random.randint(10, 30) if band is INTERACTIVE else 1000
        submit(f"small-{len(world.length)}", turns, band, tpu_type="v4-8", user="bea")

    submit("first", 20, tpu_type="v4-32", user="cy")
    for _ in range(4):
        small()
    for _ in range(25):
        world.turn()
    two = submit("two", 10, tpu_type="v4-32", slices=(2,), user="cy")
    for _ in range(most_turns):
        if len([one for one in world.state.pending() if one is not two]) < 2:
            small()
        world.turn()
        if two.gang.placed:
            break
    assert two.gang.placed, "it would wait for ever"
    assert world.in_vain == []


@pytest.mark.parametrize("seed", [2, 4])
def test_large_jobs_of_equal_size_and_different_users_start_soon_although_their_fair_order_changes(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slices held for the one and then for the other would be idle together for none of them."""
    world = World(seed, False, monkeypatch, ())
    users = ("bea", "cy")

    def small() -> None:
        world.length[job_id := f"small-{len(world.length)}"] = world.random.randint(10, 30) * TURN_S
        user = users[len(world.length) % 2]
        world.cluster.submit(job_id, tpu_type="v4-8", user=user, priority=INTERACTIVE, **MANY)

    for _ in range(9):
        small()
    for _ in range(15):
        world.turn()
    large = []
    for user in users:
        world.length[job_id := f"large-{user}"] = 10 * TURN_S
        large.append(world.cluster.submit(job_id, tpu_type="v4-32", user=user, priority=INTERACTIVE, **MANY))
    for _ in range(70):
        while len([one for one in world.state.pending() if one not in large]) < 3:
            small()
        world.turn()
        if any(job.gang.placed for job in large):
            break
    assert any(job.gang.placed for job in large)


def test_worlds_take_chips_from_lower_bands_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the tests above show nothing."""
    calm = 0
    for seed in range(3):
        world = World(1000 + seed, False, monkeypatch, (INTERACTIVE, BATCH, BATCH))
        for _ in range(120):
            if world.random.random() < 0.2:
                world.submit()
            world.turn()
        calm += sum(world.made.values())
    assert calm >= 3
