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
from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from iris_ray.capacity import provisioner as provisioner_module
from iris_ray.capacity.core import CapacityReport
from iris_ray.capacity.demand import WaitingGang
from iris_ray.capacity.holdings import Reach, Settings
from iris_ray.capacity.provider import QueuedState
from iris_ray.capacity.provisioner import Jobs, Provisioner
from iris_ray.capacity.provisioning import Joined
from iris_ray.errors import NotPermittedError
from iris_ray.model.topology import TPUConfig, get_tpu_config
from tests.support.paper_google import HOSTS, OWNER, PaperGoogle, reservation

CHIPS, LIMIT, TURN_S = 128, 96, 30.0
RES = reservation(CHIPS)
TYPES = ("v6e-8", "v6e-16", "v6e-32", "v6e-64")
_FOR = re.compile(r"delete (\S+): its \d+ chips become \d+ \S+ for (\S+)")
Q = QueuedState


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
    """The cluster's jobs, beside a zone on paper."""

    def __init__(self, seed: int, is_stormy: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        self.random = random.Random(seed)
        self.user_of: dict[str, str] = {}  # slice → job
        self.closed: set[str] = set()
        self.google = PaperGoogle(self.random, RES, self.user_of.get, is_stormy)
        self.jobs: dict[str, PaperJob] = {}
        self.new_for: dict[str, str] = {}  # by slice, what the provisioner says in this turn
        clock = SimpleNamespace(time=lambda: 1.7e9 + self.now, monotonic=lambda: self.now)
        monkeypatch.setattr(provisioner_module, "time", clock)
        configs = tuple(map(get_tpu_config, TYPES))
        settings = Settings(OWNER, configs, (RES,), least=0, most=12, idle_s=300.0, take_back=Reach.HELD)
        self.provisioner = Provisioner(settings, [self.google], self, HOSTS, print_line=self.read)

    @property
    def now(self) -> float:
        return 1e6 + self.google.turn * TURN_S

    def happens(self, chance: float) -> bool:
        return self.google.happens(chance)

    # -- the cluster -----------------------------------------------------------------------------------------------

    @property
    def waiting(self) -> list[PaperJob]:
        there = (job for job in self.jobs.values() if job.left is None and not job.is_over)
        return sorted(there, key=lambda job: job.band)

    def limit_left(self) -> int:
        return LIMIT - sum(job.chips for job in self.jobs.values() if job.is_limited and job.left is not None)

    def free(self, tpu_type: str) -> list[str]:
        """The slices of a type on which a job may start."""
        there = [name for name, one in self.google.slices.items() if one.config.name == tpu_type]
        there = [name for name in there if self.google.slices[name].listed.state is Q.ACTIVE]
        return [name for name in there if name not in self.user_of and name not in self.closed]

    def gangs(self) -> list[WaitingGang]:
        free = {name: len(self.free(name)) for name in TYPES}
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
        there = {name: one for name, one in self.google.slices.items() if one.listed.state is Q.ACTIVE}
        joined = {
            name: Joined(one.leaves_at is None or self.random.random() < 0.5, name in self.user_of, name in self.closed)
            for name, one in there.items()
        }
        return self.gangs(), joined

    def lease(self, owner: str, instance: str, seconds: float) -> bool:
        return True

    def report(self, report: CapacityReport) -> None:
        pass

    def close(self, name: str) -> None:
        if self.happens(0.1):
            self.start_jobs()  # they are faster
        if self.happens(0.03):
            raise NotPermittedError("only operators may taint hosts")
        self.closed.add(name)

    def reopen(self, name: str) -> None:
        self.closed.discard(name)

    def start_jobs(self) -> None:
        for job in self.waiting:
            free = self.free(job.config.name)
            if len(free) < job.slices or (job.is_limited and job.chips > self.limit_left()):
                continue
            job.left = job.turns
            for name in free[: job.slices]:
                is_leaving = self.google.slices[name].is_known_to_leave
                assert not is_leaving, f"{name} is being deleted, and {job.job_id} starts there"
                self.user_of[name] = job.job_id

    # -- time ------------------------------------------------------------------------------------------------------

    def read(self, line: str, problem: bool) -> None:
        if (found := _FOR.match(line)) is not None:
            self.new_for[found[1]] = found[2]

    def submit(self) -> None:
        config = get_tpu_config(self.random.choice(TYPES))
        slices = min(self.random.choice((1, 1, 1, 2, 3)), CHIPS // config.chip_count)
        number, band = len(self.jobs), self.random.choice((1, 2, 3)) if self.google.is_stormy else 2
        is_limited = self.random.random() < 0.3 and slices * config.chip_count <= LIMIT
        job = PaperJob(f"job-{number}", band, config, slices, self.random.randint(1, 12), is_limited)
        self.jobs[job.job_id] = job

    def turn(self) -> None:
        leaving = self.google.leaving
        self.new_for = {}
        room = self.limit_left()
        self.provisioner.try_turn()
        self.judge(leaving, room)
        for name in self.google.advance()[0]:
            if (user := self.user_of.get(name)) is not None:  # it came when nobody knew that the slice leaves
                self.jobs[user].left = None
                self.leave(user)
        for job in self.jobs.values():
            if job.left is not None and not job.is_over:
                job.left -= 1
                if job.left <= 0:
                    job.left, job.is_over = None, True
                    self.leave(job.job_id)
        self.start_jobs()

    def leave(self, job_id: str) -> None:
        for name in [name for name, user in self.user_of.items() if user == job_id]:
            del self.user_of[name]

    def judge(self, leaving: set[str], room: int) -> None:
        """Check the slices that began to leave for jobs in this turn."""
        slices, now_leaving = self.google.slices, self.google.leaving
        going = {name: job_id for name, job_id in self.new_for.items() if name in now_leaving - leaving}
        for job_id in set(going.values()):
            job = self.jobs[job_id]
            job.takes += 1
            assert job.left is None, f"{job_id} runs, and slices go for it"
            assert not job.is_over, f"{job_id} has ended, and slices go for it"
            assert not job.is_limited or job.chips <= room, f"{job_id} could not start: its user's limit"
            planned = {name for name, for_job in self.new_for.items() if for_job == job_id}
            if planned <= now_leaving:  # the provider has refused none of them
                staying = {name: one.config for name, one in slices.items() if name not in now_leaving}
                stays = sum(config.chip_count for config in staying.values())
                has = sum(config == job.config and name not in self.user_of for name, config in staying.items())
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
    world.google.is_stormy = False
    for _ in range(600):
        world.turn()
    waits = [job.job_id for job in world.jobs.values() if not job.is_over]
    assert not waits, "once the storm is over, every job runs"
    assert not world.google.slices, "and what nobody needs goes"


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
    assert world.google.made <= sum(job.slices for job in world.jobs.values())


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
