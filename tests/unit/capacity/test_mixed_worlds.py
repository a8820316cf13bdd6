"""Mixed worlds with one reservation: what types, limits, bands and teams there are is drawn, and who submits what.

Jobs need several slices, or different numbers of slices; hosts break, machines are suspended, and wall clocks are set.
The rules are those of `test_lower_bands_worlds.py`. Besides, no slice comes or goes while the demand stays as it is.
"""

import math
import random
from collections import defaultdict
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from iris_ray.capacity import provisioner as provisioner_module
from iris_ray.capacity.demand import WaitingGang
from iris_ray.capacity.holdings import Reach, Settings
from iris_ray.capacity.provisioner import Provisioner
from iris_ray.capacity.provisioning import Joined, plan
from iris_ray.capacity.provisioning_history import ProvisioningHistory
from iris_ray.model.jobs import Job
from iris_ray.model.options import PriorityBand
from iris_ray.model.topology import get_tpu_config
from iris_ray.state.events import JobCancelledEvent, PromiseEvent, WorkerFailedEvent
from tests.support.costs import calls
from tests.support.paper_google import HERE, HOSTS, OWNER, reservation
from tests.support.provisioning import queued
from tests.support.worlds import MANY
from tests.unit.capacity.test_lower_bands_worlds import TURN_S, World

_, PRODUCTION, INTERACTIVE, BATCH = PriorityBand
TEAMS = "[teams.ads]\nquota.v4 = {}\n[teams.vision]\nquota.v4 = {}\n"


class MixedWorld(World):
    """A world of which most is drawn.

    Attributes:
        wall_ahead: by how much the wall clock is ahead of the monotonic one.
        needed: how many slices all jobs need, at most.
    """

    def __init__(self, seed: int, is_stormy: bool, has_teams: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        draw = random.Random(f"mixed {seed}")
        self.chips = draw.choice((24, 32, 48, 64))
        types = draw.choice((("v4-8", "v4-16", "v4-32"), ("v4-8", "v4-32"), ("v4-8", "v4-16", "v4-32", "v4-64")))
        self.types = [one for one in types if get_tpu_config(one).chip_count <= self.chips]
        self.most, self.budget = draw.choice((2, 4, 12)), draw.choice((None, self.chips))
        self.users = [f"user-{n}" for n in range(draw.choice((1, 2, 40)))]
        self.needed, self.wall_ahead = 0, 0.0
        bands = draw.choice(((INTERACTIVE,), (INTERACTIVE, BATCH), (PRODUCTION, INTERACTIVE, BATCH), (BATCH,)))
        super().__init__(seed, is_stormy, monkeypatch, bands)
        clock = SimpleNamespace(
            time=lambda: 1.7e9 + self.cluster.now + self.wall_ahead, monotonic=lambda: self.cluster.now
        )
        monkeypatch.setattr(provisioner_module, "time", clock)
        if has_teams:
            of_ads = draw.randint(0, self.chips)
            self.set_teams(TEAMS.format(of_ads, self.chips - of_ads))

    def new_provisioner(self) -> Provisioner:
        types, sources = tuple(map(get_tpu_config, self.types)), (reservation(self.chips),)
        settings = Settings(
            OWNER, types, sources, least=0, most=self.most, idle_s=300.0, budget=self.budget, take_back=Reach.HELD
        )
        return Provisioner(settings, [self.google], self, HOSTS, print_line=lambda line, problem: None)

    def judge(self, event: PromiseEvent, taker: Job) -> None:
        if any(self.state.jobs[one.job_id].spec.spare_for is not None for one in event.leave):
            self.made[event.job_id] += 1  # spares leave for any job
        else:
            super().judge(event, taker)

    def submit(self) -> None:
        chosen, job_id = self.random, f"job-{len(self.length)}"
        tpu_type = chosen.choice(self.types)
        most = min(self.most, self.chips // get_tpu_config(tpu_type).chip_count)
        slices = min(chosen.choice((1, 1, 2, 2, 3, 4)), most)
        self.length[job_id] = chosen.randint(1, 25) * TURN_S
        self.needed += slices
        about: dict[str, Any] = {**MANY, "user": chosen.choice(self.users), "priority": chosen.choice(self.bands)}
        about["team"] = chosen.choice(self.teams) if self.teams else ""
        about["slices"] = tuple(range(1, slices + 1)) if chosen.random() < 0.15 else (slices,)
        if chosen.random() < 0.15:
            about["max_runtime"] = self.length[job_id] + 60.0
        if chosen.random() < 0.1:
            about["resources"] = {"TPU": 4.0, "CPU": float(chosen.randint(1, 4))}
        self.cluster.submit(job_id, tpu_type=tpu_type, **about)

    def busy_turns(self, turns: int) -> None:
        for _ in range(turns):
            if self.random.random() < 0.25:
                for _ in range(self.random.choice((1, 1, 3))):
                    self.submit()
            if self.random.random() < 0.03 and (waiting := [*self.state.pending()]):
                self.cluster.do(JobCancelledEvent(self.random.choice(waiting).spec.job_id, "enough"))
            if self.happens(0.03) and self.state.workers:
                self.cluster.do(WorkerFailedEvent(self.random.choice(sorted(self.state.workers)), "it broke"))
            if self.happens(0.03):
                self.cluster.now += self.random.choice((300.0, 3600.0))
            if self.happens(0.03):
                self.wall_ahead += self.random.choice((-86_400.0, -3600.0, 600.0, 86_400.0))
            self.turn()

    def run_to_end(self) -> None:
        self.google.is_stormy = False
        for _ in range(1500):
            if self.is_over:
                return
            self.turn()


@pytest.mark.parametrize("has_teams", [False, True], ids=["users", "teams"])
@pytest.mark.parametrize("seed", range(2))
def test_stormy_mixed_world_keeps_all_rules_and_runs_every_job_in_the_end(
    seed: int, has_teams: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = MixedWorld(100 + seed, True, has_teams, monkeypatch)
    world.busy_turns(50)
    world.run_to_end()
    assert world.is_over


@pytest.mark.parametrize("has_teams", [False, True], ids=["users", "teams"])
@pytest.mark.parametrize("seed", range(2))
def test_calm_mixed_world_evicts_nobody_in_vain_and_makes_no_more_slices_than_jobs_need(
    seed: int, has_teams: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = MixedWorld(200 + seed, False, has_teams, monkeypatch)
    world.busy_turns(50)
    world.run_to_end()
    assert world.is_over
    assert world.in_vain == []
    assert world.google.made <= world.needed


@pytest.mark.parametrize("seed", range(3))
def test_no_slice_comes_or_goes_while_the_same_jobs_run_and_wait(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    world = MixedWorld(300 + seed, False, seed > 1, monkeypatch)
    world.busy_turns(60)
    world.length = defaultdict(lambda: math.inf)
    for _ in range(100):
        world.turn()
    before, made = {*world.google.slices}, world.google.made
    for _ in range(60):
        world.turn()
    assert ({*world.google.slices}, world.google.made) == (before, made)


def cost_of_plan(gangs: int, slices: int, groups: bool = False) -> int:
    """The calls of a plan if gangs of four types wait, and slices in use and idle ones hold all chips."""
    types, history = ("v4-8", "v4-16", "v4-32", "v4-64"), ProvisioningHistory()
    found = [
        replace(queued(n, accelerator_type=types[n % 4], reservation=f"{HERE}/reservations/res"), name=name)
        for n in range(slices)
        for name in [f"iris-ann-{types[n % 4]}-{n}"]
    ]
    joined = {one.name: Joined(True, n % 5 > 0) for n, one in enumerate(found)}
    source = reservation(sum(one.chips for one in found))
    settings = Settings(
        OWNER, tuple(map(get_tpu_config, types)), (source,), least=0, most=1000, idle_s=600.0, take_back=Reach.HELD
    )
    waiting = [
        WaitingGang(
            types[n % 4], 1 + n % 3, f"job-{n}", may_reserve=not groups, group=f"group-{n // 2}" if groups else ""
        )
        for n in range(gangs)
    ]
    for now in (0.0, 60.0):
        plan(settings, waiting, found, joined, history, now, now)
    return calls(lambda: plan(settings, waiting, found, joined, history, 120.0, 120.0))


@pytest.mark.parametrize("groups", [False, True])
def test_plan_costs_in_proportion_to_the_gangs_that_wait(groups: bool) -> None:
    """The provisioner plans up to ten times a turn, and 400 gangs cost it a tenth of a second each time."""
    few, many = (cost_of_plan(gangs, 200, groups) for gangs in (200, 800))
    assert many < 4 * few
    assert many < 250_000
