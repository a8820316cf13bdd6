"""What is known of each model: how long it loads, how often it is asked for, and how its loads went."""

from dataclasses import dataclass, field

from iris_ray.slots.models import ModelSpec
from iris_ray.slots.serving_policy import ServingPolicy


@dataclass(slots=True)
class ServedModel:
    """One model.

    Attributes:
        spec: what it needs.
        replicas: how many slots to keep.
        prewarm: whether each new runner gets a slot if there is room.
        load_s: how long it took to load, last.
        demand: requests in an interval of `ACTIVITY_S`, on the average; the last one has a tenth of the weight.
        arrivals: requests since then.
        failures: loads that failed since a request was last served.
        last_failure: why the last one failed.
        not_before: when the next load may be tried.
        avoided: runners where it failed, and until when they get no slot of it.
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
    last_failure: str = ""
    not_before: float = 0.0
    avoided: dict[str, float] = field(default_factory=dict)
    to_prewarm: set[str] = field(default_factory=set)
    waits_for: str = ""

    @property
    def price(self) -> int:
        """What it costs to evict one of its slots: milliseconds of loading × demand."""
        return round(1000 * self.load_s * self.demand)

    def age_demand(self) -> None:
        """Note that an interval has passed."""
        self.demand, self.arrivals = 0.9 * self.demand + 0.1 * self.arrivals, 0

    def fail(self, runner_id: str, reason: str, policy: ServingPolicy, now: float) -> None:
        """Note a load that failed: the next one waits for a pause that doubles, and goes elsewhere if it can."""
        self.failures += 1
        self.last_failure = reason
        self.not_before = now + policy.pause_after(self.failures)
        self.avoided[runner_id] = now + policy.avoid_runner_s

    def succeed(self) -> None:
        """Note that a request was served."""
        self.failures = 0

    def avoids(self, now: float) -> frozenset[str]:
        """Return the runners that get no slot of it now."""
        return frozenset(runner_id for runner_id, until in self.avoided.items() if until > now)

    def has_given_up(self, policy: ServingPolicy) -> bool:
        """Return whether so many loads have failed that those who wait should know."""
        return self.failures >= policy.most_load_failures
