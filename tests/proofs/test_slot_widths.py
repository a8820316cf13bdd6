"""Models of one, two and four devices, some of a group or alone, in fleets of several runners: no wait is too long.

A model waits from the moment at which a request of it arrives, or at which another one of it begins, until its next
request begins. That takes at most `ServingPolicy.ageing_s`, and then a turn for itself and one for each model that
competes: that starves, too, and has waited for longer. Turns come one after the other. A turn takes the longest load
and residency of what has to leave, its longest request, its end, and the load of the model whose turn it is.
"""

import random
from dataclasses import replace
from typing import Any

import pytest

from iris_ray.slots.core import events as ev
from iris_ray.slots.core.allocator import Allocator, SlotRequirement
from iris_ray.slots.core.devices import Device, DeviceKind, Runner
from iris_ray.slots.core.instructions import StartRequest
from iris_ray.slots.core.models import ModelSpec
from iris_ray.slots.core.policy import ServingPolicy
from iris_ray.slots.core.slot_planner import SlotPlanner
from tests.support.proofs import examples
from tests.support.slot_world import Order, TimedWorld
from tests.support.slots import GB, gpus, model

POLICY = ServingPolicy()
SECONDS = 600.0


class Mixed(TimedWorld):
    """A fleet and models as a seed says, with requests of random lengths at random times.

    Attributes:
        overdue: the waits that took longer than their bounds, in words.
        longest: the longest part of its bound that a wait took.
        competed: how many models competed with one that waited, at most.
    """

    def __init__(self, seed: int) -> None:
        chance = self.chance = random.Random(seed)
        devices = [chance.choice([1, 2, 4]) for _ in range(chance.randint(1, 3))]
        widths = [width for width in (1, 2, 4) if width <= max(devices)]
        self.specs = [self._model(number, widths) for number in range(chance.randint(2, 7))]
        longest = chance.choice([1.0, 15.0, 60.0, 150.0])
        self.lengths = {spec.name: [chance.uniform(0.05, longest) for _ in range(3)] for spec in self.specs}
        super().__init__(POLICY, {spec.name: chance.choice([0.5, 5.0, 20.0, 45.0]) for spec in self.specs}, {})
        self.since: dict[str, float] = {}
        self.ahead: dict[str, set[str]] = {}
        self.overdue: list[str] = []
        self.longest = self.competed = 0.0
        for number, count in enumerate(devices):
            self.join(gpus(f"r{number}", count))
        for spec in self.specs:
            self.hear(ev.ModelRegistered(spec, load_s=self.load_s[spec.name]))
        for spec in self.specs:
            self.ask_at_random(spec, every_s=chance.choice([0.5, 4.0, 20.0, 120.0]))

    def _model(self, number: int, widths: list[int]) -> ModelSpec:
        width, size = self.chance.choice(widths), self.chance.choice([20, 45, 60, 80])
        memory = {width: size * GB}
        if self.chance.random() < 0.2:  # it can be divided further
            memory |= {2 * width: size * GB // 2} if 2 * width in widths else {}
        rules: dict[str, Any] = self.chance.choice([{}] * 6 + [{"group": "g"}] * 2 + [{"alone": True}])
        return model(f"m{number}", memory=memory, concurrency=self.chance.choice([1, 1, 2, 8]), **rules)

    def ask_at_random(self, spec: ModelSpec, every_s: float) -> None:
        def ask() -> None:
            if self.reconciler.queue.waiting(spec.name) < 20:  # who has the answers asks on
                self.ask(f"{spec.name}-{next(self._numbers)}", spec.name)
            self.later(self.chance.expovariate(1 / every_s), ask)

        self.later(self.chance.uniform(0.0, 60.0), ask)

    def answer_takes(self, name: str) -> float:
        return self.chance.choice(self.lengths[name])

    def bound(self, name: str) -> float:
        """How long a model may wait that has waited with those who are ahead of it."""
        leaves = max(self.load_s.values()) + POLICY.placement.min_residency_s
        leaves += max(map(max, self.lengths.values())) + self.end_s
        return POLICY.ageing_s + sum(leaves + self.load_s[each] for each in (name, *self.ahead[name])) + 0.001

    def hear(self, event: ev.Event) -> None:
        super().hear(event)
        queue, models = self.reconciler.queue, self.reconciler.models
        waiting = [each.name for each in self.specs if queue.waiting(each.name)]
        asked_at = {name: max(queue.oldest(name), models[name].turn_at) for name in waiting}
        starve = [name for name in waiting if queue.oldest(name) + POLICY.ageing_s <= self.now]
        for name in waiting:
            self.since.setdefault(name, self.now)
            ahead = self.ahead.setdefault(name, set())
            ahead.update(other for other in starve if other != name and asked_at[other] <= asked_at[name])
        for name in self.since.keys() - set(waiting):  # served
            del self.since[name], self.ahead[name]

    def look_at_waits(self) -> None:
        """Note the models that wait for too long."""
        for name in list(self.since):
            self._note_wait(name)

    def _order(self, runner_id: str, order: Order) -> None:
        if isinstance(order, StartRequest) and (name := order.request.model) in self.since:
            self._note_wait(name)
            del self.since[name], self.ahead[name]
        super()._order(runner_id, order)

    def _note_wait(self, name: str) -> None:
        waited, most = self.now - self.since[name], self.bound(name)
        self.longest, self.competed = max(self.longest, waited / most), max(self.competed, len(self.ahead[name]))
        if waited > most:
            self.overdue.append(f"{name} waited {waited:.1f} s of {most:.1f}, behind {sorted(self.ahead[name])}")


class Uneven(Mixed):
    """The same fleets with GPUs that differ, and models whose parts do. The large GPU is not the first of several."""

    def join(self, runner: Runner) -> None:
        sizes = (40, 80, 40, 60)[: len(runner.devices)] if len(runner.devices) > 1 else (80,)
        super().join(replace(runner, devices=tuple(Device(DeviceKind.GPU, each * GB) for each in sizes)))

    def _model(self, number: int, widths: list[int]) -> ModelSpec:
        spec = super()._model(number, widths)
        parts = {width: (need, *[need // 2] * (width - 1)) for width, need in spec.memory.items()}
        return replace(spec, memory=parts)


def played(seed: int, seconds: float = SECONDS, kind: type[Mixed] = Mixed) -> Mixed:
    world = kind(seed)
    world.run_until(seconds)
    world.look_at_waits()
    return world


@pytest.mark.parametrize("part", range(4))
def test_every_mix_of_widths_is_served_within_its_bound(part: int) -> None:
    for number in range(examples(5)):
        world = played(4 * number + part)
        assert not world.overdue, (4 * number + part, world.overdue, world.specs)


@pytest.mark.parametrize("part", range(2))
def test_models_of_uneven_parts_are_served_within_their_bounds(part: int) -> None:
    for number in range(examples(5)):
        world = played(2 * number + part, kind=Uneven)
        assert not world.overdue, (2 * number + part, world.overdue, world.specs)


def takes_planned_room(real: Any) -> Any:
    """Room that is kept for a model that starves is taken by the next one."""

    def decide(self: Allocator, requirement: SlotRequirement, now: float) -> Any:
        return real(self, requirement._replace(asked_at=float("-inf")), now)

    return decide


def keeps_no_room(real: Any) -> Any:
    """No room is kept for a model that starves: its devices have to be free by chance, all at once."""
    return lambda self, name, now: False


@pytest.mark.parametrize(
    ("where", "name", "mutant"),
    [(Allocator, "decide", takes_planned_room), (SlotPlanner, "_has_waited_long", keeps_no_room)],
)
def test_code_that_does_not_keep_room_is_found(
    monkeypatch: pytest.MonkeyPatch, where: type, name: str, mutant: Any
) -> None:
    monkeypatch.setattr(where, name, mutant(getattr(where, name)))
    assert any(played(seed).overdue for seed in range(20))
