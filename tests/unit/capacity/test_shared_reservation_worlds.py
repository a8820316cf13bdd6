"""Many small worlds with a reservation that slices of four types share: the real provisioner, all else on paper.

Jobs come, run and are cancelled at random. In stormy worlds the provider refuses, loses answers, lists late, fails
slices and deletes slowly. What holds in all of them:

- The chips of all slices that exist, are being made or are being deleted never exceed the reservation.
- A slice that a job uses is never deleted, and no job starts on one whose deletion the provider has accepted.
- Slices go for a job only if it waits, may start within its user's limit, and their chips suffice for all of it.

And in calm ones slices do not come and go: chips are taken back no more often than there are jobs, no more slices are
made than jobs need, and every job runs.
"""

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest

from iris_ray.capacity import provisioner as provisioner_module
from iris_ray.capacity.core import CapacityReport
from iris_ray.capacity.demand import WaitingGang
from iris_ray.capacity.holdings import Settings
from iris_ray.capacity.provider import OWNER_LABEL, HostSettings, Market, NewSlice, QueuedSlice, QueuedState, Source
from iris_ray.capacity.provisioner import Jobs, Provisioner
from iris_ray.capacity.provisioning import Joined
from iris_ray.errors import NotPermittedError, ProviderError
from iris_ray.model.topology import TPUConfig, get_tpu_config

HERE = "projects/p/locations/here"
CHIPS, LIMIT, TURN_S = 128, 96, 30.0
RES = Source.reserved(f"{HERE}/reservations/res:{CHIPS}")
TYPES = ("v6e-8", "v6e-16", "v6e-32", "v6e-64")
_FOR = re.compile(r"delete (\S+): its \d+ chips become \d+ \S+ for (\S+)")
Q = QueuedState


@dataclass
class PaperSlice:
    """A slice as it is, whatever the provider lists."""

    listed: QueuedSlice
    config: TPUConfig
    steps: int
    user: str | None = None
    is_closed: bool = False
    leaves_at: int | None = None
    is_known_to_leave: bool = False
    listed_from: int = 0
    shown_leaving_from: int = 0

    @property
    def is_free(self) -> bool:
        return self.listed.state is Q.ACTIVE and self.user is None and not self.is_closed


@dataclass
class PaperJob:
    job_id: str
    band: int
    config: TPUConfig
    slices: int
    turns: int
    is_limited: bool
    left: int | None = None
    is_over: bool = False
    takes: int = 0

    @property
    def chips(self) -> int:
        return self.slices * self.config.chip_count


class World(Jobs):
    """The provider's zone, and the cluster's jobs."""

    location = HERE

    def __init__(self, seed: int, is_stormy: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        self.random = random.Random(seed)
        self.is_stormy = is_stormy
        self.turn_number = 0
        self.slices: dict[str, PaperSlice] = {}
        self.jobs: dict[str, PaperJob] = {}
        self.made = 0
        self.new_for: dict[str, str] = {}  # by slice, what the provisioner says in this turn
        clock = SimpleNamespace(time=lambda: 1.7e9 + self.now, monotonic=lambda: self.now)
        monkeypatch.setattr(provisioner_module, "time", clock)
        configs = tuple(map(get_tpu_config, TYPES))
        settings = Settings("ann", configs, (RES,), least=0, most=12, idle_s=300.0)
        hosts = HostSettings("image", {OWNER_LABEL: "ann"}, "#!/bin/sh")
        self.provisioner = Provisioner(settings, [self], self, hosts, print_line=self.read)

    @property
    def now(self) -> float:
        return 1e6 + self.turn_number * TURN_S

    def happens(self, chance: float) -> bool:
        return self.is_stormy and self.random.random() < chance

    # -- the provider ----------------------------------------------------------------------------------------------

    def require_type(self, config: TPUConfig) -> None:
        raise NotImplementedError

    def queued_slices(self) -> list[QueuedSlice]:
        if self.happens(0.05) and self.turn_number:
            raise ProviderError("no answer to the list")
        there = [one for one in self.slices.values() if one.listed_from <= self.turn_number]
        return [
            replace(one.listed, state=Q.DELETING)
            if one.leaves_at is not None and one.shown_leaving_from <= self.turn_number
            else one.listed
            for one in there
        ]

    def create(self, wanted: NewSlice) -> str | None:
        if self.happens(0.05):
            raise ProviderError("the request is lost")
        if wanted.name in self.slices:
            return None
        if self.happens(0.15):
            return "no capacity"
        self.made += 1
        listed = QueuedSlice(
            wanted.name, wanted.config.accelerator_type, Q.ACCEPTED, {OWNER_LABEL: "ann"},
            location=HERE, market=Market.RESERVED, reservation=RES.reservation,
        )  # fmt: skip
        steps = self.random.randint(1, 6)
        self.slices[wanted.name] = PaperSlice(
            listed, wanted.config, steps, listed_from=self.turn_number + self.happens(0.2)
        )
        held = sum(one.config.chip_count for one in self.slices.values())
        assert held <= CHIPS, f"{held} chips of {CHIPS}: a chip has two owners"
        if self.happens(0.05):
            raise ProviderError("the answer is lost")
        return None

    def delete(self, name: str) -> str | None:
        if self.happens(0.1):
            raise ProviderError("the request is lost")
        if (one := self.slices.get(name)) is None:
            return None
        assert one.user is None, f"{name} is deleted, and {one.user} runs there"
        if self.happens(0.1):
            return "it can't be deleted now"
        if one.leaves_at is None:
            one.leaves_at = self.turn_number + self.random.choice((1, 2, 3, *([20, 90] if self.is_stormy else [])))
            one.shown_leaving_from = self.turn_number + (3 if self.happens(0.2) else 0)
        if self.happens(0.1):
            raise ProviderError("the answer is lost")
        one.is_known_to_leave = True
        return None

    # -- the cluster -----------------------------------------------------------------------------------------------

    @property
    def waiting(self) -> list[PaperJob]:
        there = (job for job in self.jobs.values() if job.left is None and not job.is_over)
        return sorted(there, key=lambda job: job.band)

    def limit_left(self) -> int:
        return LIMIT - sum(job.chips for job in self.jobs.values() if job.is_limited and job.left is not None)

    def gangs(self) -> list[WaitingGang]:
        free = {name: sum(one.is_free and one.config.name == name for one in self.slices.values()) for name in TYPES}
        found, left = [], self.limit_left()
        for job in self.waiting:
            there = min(job.slices, free[job.config.name])
            free[job.config.name] -= there
            may_take = not job.is_limited or job.chips <= left
            left -= job.chips if job.is_limited and may_take else 0
            missing = job.slices - there
            if self.happens(0.1):  # the latest plan has not looked at it
                missing, there = 0, job.slices
            found.append(WaitingGang(job.config.name, missing, job.job_id, there, (), may_take and missing > 0))
        return found

    def look(self) -> tuple[Sequence[WaitingGang] | None, Mapping[str, Joined]]:
        if self.happens(0.05):
            return None, {}
        there = {name: one for name, one in self.slices.items() if one.listed.state is Q.ACTIVE}
        joined = {
            name: Joined(one.leaves_at is None or self.random.random() < 0.5, one.user is not None, one.is_closed)
            for name, one in there.items()
        }
        return self.gangs(), joined

    def lease(self, owner: str, instance: str, seconds: float) -> None:
        pass

    def report(self, report: CapacityReport) -> None:
        pass

    def close(self, name: str) -> None:
        if self.happens(0.1):
            self.start_jobs()  # they are faster
        if self.happens(0.03):
            raise NotPermittedError("only operators may taint hosts")
        if name in self.slices:
            self.slices[name].is_closed = True

    def reopen(self, name: str) -> None:
        if name in self.slices:
            self.slices[name].is_closed = False

    def start_jobs(self) -> None:
        for job in self.waiting:
            free = [one for one in self.slices.values() if one.is_free and one.config == job.config]
            if len(free) < job.slices or (job.is_limited and job.chips > self.limit_left()):
                continue
            job.left = job.turns
            for one in free[: job.slices]:
                assert not one.is_known_to_leave, f"{one.listed.name} is being deleted, and {job.job_id} starts there"
                one.user = job.job_id

    # -- time ------------------------------------------------------------------------------------------------------

    def read(self, line: str, problem: bool) -> None:
        if (found := _FOR.match(line)) is not None:
            self.new_for[found[1]] = found[2]

    def submit(self) -> None:
        config = get_tpu_config(self.random.choice(TYPES))
        slices = min(self.random.choice((1, 1, 1, 2, 3)), CHIPS // config.chip_count)
        number, band = len(self.jobs), self.random.choice((1, 2, 3)) if self.is_stormy else 2
        is_limited = self.random.random() < 0.3 and slices * config.chip_count <= LIMIT
        job = PaperJob(f"job-{number}", band, config, slices, self.random.randint(1, 12), is_limited)
        self.jobs[job.job_id] = job

    def turn(self) -> None:
        leaving = {name for name, one in self.slices.items() if one.leaves_at is not None}
        self.new_for = {}
        room = self.limit_left()
        self.provisioner.try_turn()
        self.judge(leaving, room)
        self.turn_number += 1
        for name, one in list(self.slices.items()):
            if one.leaves_at is not None:
                if one.leaves_at <= self.turn_number:
                    del self.slices[name]
                    if one.user is not None:  # it came when nobody knew that the slice leaves
                        self.jobs[one.user].left = None
                        self.leave(one.user)
                continue
            one.steps -= 1
            if one.listed.state is Q.ACCEPTED and self.happens(0.1):
                one.listed = replace(one.listed, state=Q.FAILED, error="out of stock")
            elif one.listed.state is Q.ACCEPTED:
                one.listed = replace(one.listed, state=Q.PROVISIONING)
            elif one.listed.state is Q.PROVISIONING and one.steps <= 0:
                one.listed = replace(one.listed, state=Q.ACTIVE)
        for job in self.jobs.values():
            if job.left is not None and not job.is_over:
                job.left -= 1
                if job.left <= 0:
                    job.left, job.is_over = None, True
                    self.leave(job.job_id)
        self.start_jobs()

    def leave(self, job_id: str) -> None:
        for one in self.slices.values():
            one.user = None if one.user == job_id else one.user

    def judge(self, leaving: set[str], room: int) -> None:
        """Check the slices that began to leave for jobs in this turn."""
        now_leaving = {name for name, one in self.slices.items() if one.leaves_at is not None}
        going = {name: job_id for name, job_id in self.new_for.items() if name in now_leaving - leaving}
        for job_id in set(going.values()):
            job = self.jobs[job_id]
            job.takes += 1
            assert job.left is None, f"{job_id} runs, and slices go for it"
            assert not job.is_over, f"{job_id} has ended, and slices go for it"
            assert not job.is_limited or job.chips <= room, f"{job_id} could not start: its user's limit"
            planned = {name for name, for_job in self.new_for.items() if for_job == job_id}
            if planned <= now_leaving:  # the provider has refused none of them
                own = [one for one in self.slices.values() if one.config == job.config and one.leaves_at is None]
                stays = sum(o.config.chip_count for n, o in self.slices.items() if n not in now_leaving)
                has = sum(one.user is None for one in own)
                missing = max(0, job.slices - has) * job.config.chip_count
                assert stays + missing <= CHIPS, f"{job_id} could not start: {stays} chips stay, it misses {missing}"


@pytest.mark.parametrize("seed", range(40))
def test_stormy_world_has_no_chip_twice_and_deletes_nothing_in_vain(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(seed, True, monkeypatch)
    for _ in range(150):
        if world.random.random() < 0.15:
            world.submit()
        if world.happens(0.03) and world.waiting:
            world.random.choice(world.waiting).is_over = True
        world.turn()
    world.is_stormy = False
    for _ in range(600):
        world.turn()
    waits = [job.job_id for job in world.jobs.values() if not job.is_over]
    assert not waits, "once the storm is over, every job runs"
    assert not world.slices, "and what nobody needs goes"


@pytest.mark.parametrize("seed", range(40))
def test_calm_world_makes_no_more_slices_than_jobs_need_and_runs_every_job(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(1000 + seed, False, monkeypatch)
    for number in range(700):
        if number < 120 and world.random.random() < 0.15:
            world.submit()
        world.turn()
    assert all(job.is_over for job in world.jobs.values())
    assert sum(job.takes for job in world.jobs.values()) <= len(world.jobs)
    assert world.made <= sum(job.slices for job in world.jobs.values())


def test_worlds_take_chips_back_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the tests above show nothing."""
    takes = 0
    for seed in range(5):
        world = World(seed, True, monkeypatch)
        for _ in range(150):
            if world.random.random() < 0.2:
                world.submit()
            world.turn()
        takes += sum(job.takes for job in world.jobs.values())
    assert takes >= 10
