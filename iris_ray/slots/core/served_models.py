"""What is known of each model: how long it loads, how often it is asked for, and how its loads and slots ended."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from iris_ray.slots.core.events import RunnerReported
from iris_ray.slots.core.fleet import SlotFleet
from iris_ray.slots.core.models import ModelSpec
from iris_ray.slots.core.policy import ServingPolicy
from iris_ray.slots.core.slot import USES_MEMORY


@dataclass(slots=True)
class ServedModel:
    """One model.

    Attributes:
        spec: what it needs.
        replicas: how many slots to keep.
        prewarm: whether each new runner gets a slot if there is room.
        load_s: how long it took to load, last; or how long a late load was under way when another one was begun.
        demand: requests in an interval of `ACTIVITY_S`, on the average; the last one has a tenth of the weight.
        arrivals: requests since then.
        failures: loads that failed in a row, since a slot was last ready.
        crashes: slots in a row that were ready and ended by themselves, since a request was last served.
        last_failure: why the last load failed, or the last slot crashed.
        not_before: when the next load may be tried.
        avoided: runners where it failed, and until when they get no slot of it.
        stuck: runners where the place of a slot did not become free, and until when no slot that waits is moved there.
        to_prewarm: runners that have just come.
        waits_for: why there is no further slot now, or "".
    """

    spec: ModelSpec
    replicas: int = 0
    prewarm: bool = False
    load_s: float = 1.0
    demand: float = 0.0
    arrivals: int = 0
    failures: int = 0
    crashes: int = 0
    last_failure: str = ""
    not_before: float = 0.0
    avoided: dict[str, float] = field(default_factory=dict)
    stuck: dict[str, float] = field(default_factory=dict)
    to_prewarm: set[str] = field(default_factory=set)
    waits_for: str = ""

    @property
    def price(self) -> int:
        """What it costs to evict one of its slots: milliseconds of loading × demand."""
        return round(1000 * self.load_s * self.demand)

    def age_demand(self) -> None:
        """Note that an interval has passed."""
        self.demand, self.arrivals = 0.9 * self.demand + 0.1 * self.arrivals, 0

    def note_failed_load(self, runner_id: str, reason: str, policy: ServingPolicy, now: float) -> None:
        """Note a load that failed: the next one waits for a pause that doubles, and goes elsewhere if it can."""
        self.failures += 1
        self.last_failure = reason
        self.not_before = max(self.not_before, now + policy.pause_after(self.failures))
        self.avoided[runner_id] = now + policy.avoid_runner_s

    def note_crash(self, runner_id: str, ready_at: float, reason: str, policy: ServingPolicy, now: float) -> None:
        """Note that a slot ended by itself after it was ready.

        A request that crashes each slot has used up its attempts after `ServingPolicy.most_attempts` crashes in a row.
        If there are as many, the model or the runner may be at fault: loads pause as after failed loads.
        """
        lasted = now - ready_at > policy.longest_pause_s
        self.crashes = 1 if lasted else self.crashes + 1
        self.last_failure = reason
        if self.crashes >= policy.most_attempts:
            pause = policy.pause_after(self.crashes - policy.most_attempts + 1)
            self.not_before = max(self.not_before, now + pause)
            self.avoided[runner_id] = now + policy.avoid_runner_s

    def note_ready(self, load_s: float) -> None:
        """Note that a load has succeeded, and how long it took."""
        self.load_s = load_s
        self.failures = 0

    def note_long_loads(self, lasted: Iterable[float]) -> None:
        """Note for how long late loads go on already, now that another one is tried elsewhere.

        Perhaps the model just loads slowly. Each further try then takes longer to come, so that they don't end all
        slots of others.
        """
        self.load_s = max(self.load_s, *lasted, 0.0)

    def note_served(self) -> None:
        """Note that a request was served."""
        self.crashes = 0

    def avoids(self, now: float) -> frozenset[str]:
        """Return the runners that get no slot of it now."""
        return _still(self.avoided, now)

    def stuck_on(self, now: float) -> frozenset[str]:
        """Return the runners to which no slot is moved that waits for its place."""
        return _still(self.stuck, now)

    def has_given_up(self, policy: ServingPolicy, now: float) -> bool:
        """Return whether so many loads have failed that those who wait should know, and none may be tried now."""
        return self.failures >= policy.most_load_failures and self.not_before > now


def _still(until: dict[str, float], now: float) -> frozenset[str]:
    return frozenset(runner_id for runner_id, end in until.items() if end > now)


# -- reports -----------------------------------------------------------------------------------------------------------
# What a runner reports, beside what should be there.


@dataclass(frozen=True, slots=True)
class Discrepancy:
    """Something that is not as it should be."""

    slot_id: str
    reason: str


def strangers(fleet: SlotFleet, report: RunnerReported) -> Iterator[Discrepancy]:
    """Yield the processes that should not be there: nobody knows them, or they belong to another runner."""
    for slot_id in report.slots:
        slot = fleet.slots.get(slot_id)
        if slot is None:
            yield Discrepancy(slot_id, "no slot of this id is wanted")
        elif slot.allocation.runner_id != report.runner_id:
            yield Discrepancy(slot_id, f"the slot of this id belongs to runner {slot.allocation.runner_id}")


def mismatches(fleet: SlotFleet, report: RunnerReported) -> Iterator[Discrepancy]:
    """Yield the slots that serve something else than they should."""
    for slot_id, identity in report.slots.items():
        slot = fleet.slots.get(slot_id)
        if slot is not None and slot.allocation.runner_id == report.runner_id and slot.identity != identity:
            yield Discrepancy(slot_id, f"it serves {identity} instead of {slot.identity}")


def vanished(fleet: SlotFleet, report: RunnerReported) -> Iterator[str]:
    """Yield the slots that should have a process on the runner, and have none."""
    for slot in fleet.on_runner(report.runner_id):
        expected = slot.state in USES_MEMORY and slot.started_at is not None and slot.started_at < report.as_of
        if expected and slot.slot_id not in report.slots:
            yield slot.slot_id
