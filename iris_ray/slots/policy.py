"""What operators can choose: when a slot may be taken for others, and how places are preferred."""

from collections.abc import Callable
from dataclasses import dataclass

from iris_ray.errors import InvalidSlotError
from iris_ray.model.checks import require_amount

StalenessFunction = Callable[[str, float], float]
"""Of a runner's id and the time of a slot's last activity: from when on the idle slot is stale. Times in seconds."""


@dataclass(frozen=True, slots=True)
class IdleFor:
    """A slot is stale once it has been idle for so many seconds, on every runner alike."""

    seconds: float

    def __call__(self, runner_id: str, last_activity: float) -> float:
        return last_activity + self.seconds


@dataclass(frozen=True, slots=True)
class Policy:
    """How slots are placed and evicted.

    Args:
        stale_at: from when on an idle slot may be evicted. While it raises, or returns NaN, the slot is not stale.
        min_residency_s: for how many seconds a slot is kept after it was ready, whatever happens.
        spread_before_evicting: take free devices for a model that can be split over them, before a slot is evicted so
            that one device is enough.
    """

    stale_at: StalenessFunction = IdleFor(10.0)
    min_residency_s: float = 10.0
    spread_before_evicting: bool = True

    def __post_init__(self) -> None:
        require_amount("min_residency_s", self.min_residency_s, InvalidSlotError)
