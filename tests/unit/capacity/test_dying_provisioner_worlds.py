"""Worlds whose provisioner dies, or stands still while another one works, at any of its calls.

The rules are those of `test_lower_bands_worlds.py`. The leases are real. Jobs also run on parts of slices, or on
different numbers of slices.
"""

from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest

from iris_ray.capacity.board import CapacityBoard
from iris_ray.capacity.core import CapacityReport
from iris_ray.capacity.demand import WaitingGang
from iris_ray.capacity.lower_bands import ChipsLeft, ChipsWanted
from iris_ray.capacity.provider import NewSlice, QueuedSlice
from iris_ray.capacity.provisioning import Joined
from iris_ray.model.job_spec import CoschedulingConfig
from iris_ray.model.options import PriorityBand
from iris_ray.model.parts import hosts_of_shape, part_attribute
from iris_ray.model.topology import get_tpu_config
from iris_ray.state.events import JobCancelledEvent
from tests.support.paper_google import PaperGoogle, reservation
from tests.support.worlds import MANY
from tests.unit.capacity.test_lower_bands_worlds import TURN_S, World

_, PRODUCTION, INTERACTIVE, BATCH = PriorityBand
T = TypeVar("T")
PART = "2x4"


class Dies(BaseException):
    """The provisioner's process ends at once."""


class DyingWorld(World):
    """A world in which the provisioner dies or stands still.

    Attributes:
        interrupts: how likely that is before a call, and after it.
        deaths, pauses: how often it has happened.
    """

    chips: int = 64
    types: Sequence[str] = ("v6e-16", "v6e-32", "v6e-64")

    def __init__(self, seed: int, is_stormy: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        self.interrupts = 0.0
        self.deaths = self.pauses = 0
        self._is_paused = False
        super().__init__(seed, is_stormy, monkeypatch, (PRODUCTION, INTERACTIVE, BATCH))
        clock: Any = SimpleNamespace(now=lambda: self.cluster.now, wall=lambda at: at)
        self.board = CapacityBoard(clock)

    def new_google(self, is_stormy: bool) -> PaperGoogle:
        world = self

        class Google(PaperGoogle):
            def queued_slices(self) -> list[QueuedSlice]:
                return world.call(super().queued_slices)

            def create(self, wanted: NewSlice) -> str | None:
                return world.change(lambda: PaperGoogle.create(self, wanted))

            def delete(self, name: str) -> str | None:
                return world.change(lambda: PaperGoogle.delete(self, name))

        return Google(self.random, reservation(self.chips), self.attempts_on, is_stormy)

    # -- the provisioner's calls -----------------------------------------------------------------------------------

    def call(self, work: Callable[[], T]) -> T:
        self._interrupt()
        return self.change(work)

    def change(self, work: Callable[[], T]) -> T:
        """A call that changes something. A process that stands still as it sends that can't know what has passed."""
        found = work()
        self._interrupt()
        return found

    def _interrupt(self) -> None:
        if self._is_paused or self.random.random() >= self.interrupts:
            return
        if self.random.random() < 0.5:
            self.deaths += 1
            raise Dies
        self.pauses += 1
        self._is_paused, stands_still = True, self.provisioner
        self.provisioner = self.new_provisioner()
        for _ in range(self.random.randint(1, 12)):
            self.turn()
        self._is_paused = False
        if self.random.random() < 0.5:
            self.provisioner = stands_still  # and the other one waits, or is gone

    def provision(self) -> None:
        try:
            self.provisioner.try_turn()
        except Dies:
            self.provisioner = self.new_provisioner()

    def look(self) -> tuple[Sequence[WaitingGang] | None, Mapping[str, Joined]]:
        return self.call(super().look)

    def lease(self, owner: str, instance: str, seconds: float) -> bool:
        return self.call(lambda: self.board.lease(owner, instance, seconds))

    def report(self, report: CapacityReport) -> None:
        self.call(lambda: None)

    def close(self, name: str) -> None:
        self.change(lambda: World.close(self, name))

    def reopen(self, name: str) -> None:
        self.change(lambda: World.reopen(self, name))

    def leave_chips(self, wanted: ChipsWanted) -> ChipsLeft:
        return self.change(lambda: World.leave_chips(self, wanted))

    # -- jobs ------------------------------------------------------------------------------------------------------

    def submit(self) -> None:
        kind = self.random.random()
        if kind < 0.5:
            super().submit()
            return
        job_id, band = f"job-{len(self.length)}", self.random.choice(self.bands)
        self.length[job_id] = self.random.randint(1, 25) * TURN_S
        about: dict[str, Any] = {**MANY, "user": self.random.choice(("bea", "cy")), "priority": band}
        if kind < 0.75:
            on_part = CoschedulingConfig(part_attribute(PART))
            about |= {"tpu_type": "v6e-16", "replicas": hosts_of_shape(PART), "coscheduling": on_part}
        else:
            tpu_type = self.random.choice(self.types)
            most = self.chips // get_tpu_config(tpu_type).chip_count
            about |= {"tpu_type": tpu_type, "slices": tuple(range(1, most + 1))}
        self.cluster.submit(job_id, **about)


@pytest.mark.parametrize("seed", range(6))
def test_world_keeps_all_rules_at_whatever_call_the_provisioner_dies_or_stands_still(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = DyingWorld(3000 + seed, seed % 2 > 0, monkeypatch)
    world.interrupts = 0.02
    for _ in range(100):
        if world.random.random() < 0.15:
            world.submit()
        if world.random.random() < 0.02 and (waiting := [*world.state.pending()]):
            world.cluster.do(JobCancelledEvent(world.random.choice(waiting).spec.job_id, "enough"))
        world.turn()
    assert world.deaths > 0
    assert world.pauses > 0
    world.google.is_stormy, world.interrupts = False, 0.0
    for _ in range(1500):
        if world.is_over and not world.google.slices:
            break
        world.turn()
    assert world.is_over, "every job runs in the end"
    assert not world.google.slices, "and what nobody needs goes"
