"""The record of each served model: its demand, its load times, and how its loads and slots ended."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from iris_ray.slots.core.models import ModelSpec
from iris_ray.slots.core.policy import ServingPolicy

MOST_DOUBLINGS = 3
"""How often the time doubles in which a model whose loads fail evicts no other one."""


@dataclass(slots=True)
class ServedModel:
    """One model.

    Attributes:
        replicas: how many slots to keep.
        prewarm: whether each new runner gets a slot if there is room.
        code: what tells its class and arguments from others.
        load_s: how long the last load took; or how long a late load had lasted when another one was begun.
        demand: the average number of requests in an interval of `ACTIVITY_S`; the last interval weighs a tenth.
        arrivals: requests in the present interval.
        turn_at: when it last had its turn: a request of it began on a slot, or a load of it failed.
        failures: loads that failed in a row, since a slot was last ready.
        crashes: ready slots in a row that ended by themselves, since a request was last served.
        last_failure: why the last load failed, or the last slot crashed.
        not_before: when the next load may be tried.
        evicts_from: when the next load may evict slots of other models.
        loaded_on: the runners that have loaded it and are there, the latest last.
        avoided: runners where a load failed, and until when they get no slot of the model.
        to_prewarm: new runners that may still get a slot.
        waits_for: why the model gets no further slot now, or "".
    """

    spec: ModelSpec
    replicas: int = 0
    prewarm: bool = False
    load_s: float = 1.0
    code: bytes = b""
    demand: float = 0.0
    arrivals: int = 0
    turn_at: float = -math.inf
    failures: int = 0
    crashes: int = 0
    last_failure: str = ""
    not_before: float = 0.0
    evicts_from: float = 0.0
    loaded_on: dict[str, None] = field(default_factory=dict)
    avoided: dict[str, float] = field(default_factory=dict)
    to_prewarm: set[str] = field(default_factory=set)
    waits_for: str = ""

    @property
    def prewarm_turn(self) -> tuple[int, str]:
        """The order in which models that have as many slots are prewarmed: the smallest first."""
        return min(sum(self.spec.sizes_on(degree)) for degree in self.spec.memory), self.spec.name

    @property
    def price(self) -> int:
        """The price of evicting one of its slots: milliseconds of loading × demand."""
        return round(1000 * self.load_s * self.demand)

    def age_demand(self) -> None:
        """Average the demand at the end of an interval."""
        self.demand, self.arrivals = 0.9 * self.demand + 0.1 * self.arrivals, 0

    def note_failed_load(self, runner_id: str, reason: str, policy: ServingPolicy, now: float, lasted_s: float) -> None:
        """Note a failed load: the next one waits for a pause that doubles, and goes to another runner if it can.

        The model also evicts no other one until 1, 3, then 7 times as long as the load lasted have passed. So a model
        whose loads hang leaves most of the time to others.
        """
        self.failures += 1
        self.evicts_from = now + lasted_s * (2 ** min(self.failures, MOST_DOUBLINGS) - 1)
        self.last_failure = reason
        self.turn_at = now
        self.not_before = max(self.not_before, now + policy.pause_after(self.failures))
        self.avoided[runner_id] = now + policy.avoid_runner_s

    def note_crash(self, runner_id: str, ready_at: float, reason: str, policy: ServingPolicy, now: float) -> None:
        """Note that a ready slot ended by itself.

        A request that crashes every slot has used up its attempts after `ServingPolicy.most_attempts` crashes in a row.
        After as many crashes, the model or the runner may be at fault: loads pause as after failed loads.
        """
        lasted = now - ready_at > policy.longest_pause_s
        self.crashes = 1 if lasted else self.crashes + 1
        self.last_failure = reason
        if self.crashes >= policy.most_attempts:
            pause = policy.pause_after(self.crashes - policy.most_attempts + 1)
            self.not_before = max(self.not_before, now + pause)
            self.avoided[runner_id] = now + policy.avoid_runner_s

    def note_ready(self, runner_id: str, load_s: float) -> None:
        """Note a load that succeeded after ``load_s``. Its host may still have the files for the next one."""
        self.load_s = load_s
        self.loaded_on[runner_id] = None
        self.failures = 0

    def note_long_loads(self, lasted: Iterable[float]) -> None:
        """Note how long late loads have lasted, when another load is begun elsewhere.

        Perhaps the model just loads slowly. Then each further load is begun later, so that the loads do not evict all
        slots of other models.
        """
        self.load_s = max(self.load_s, *lasted, 0.0)

    def avoids(self, now: float) -> frozenset[str]:
        """Return the runners that get no slot of the model now."""
        if self.avoided:
            self.avoided = {runner_id: until for runner_id, until in self.avoided.items() if until > now}
        return frozenset(self.avoided)

    def has_given_up(self, policy: ServingPolicy, now: float) -> bool:
        """Return whether waiting requests should be refused: too many loads have failed, and none may be tried now."""
        return self.failures >= policy.most_load_failures and self.not_before > now
