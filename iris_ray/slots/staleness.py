"""From when on slots are stale, as the policy's function says. One that fails makes no slot stale, and is reported."""

import math
from dataclasses import dataclass

from iris_ray.slots.policy import Policy
from iris_ray.slots.slot import Slot


@dataclass(slots=True, eq=False)
class Staleness:
    """Asks `Policy.stale_at`, a function of users, which may raise or return what is no time.

    Attributes:
        problem: what was wrong last, or "".
    """

    policy: Policy
    problem: str = ""

    def evictable_at(self, slot: Slot) -> float:
        """Return from when on a ready slot may be evicted if it stays idle; infinity if its runner's rule fails."""
        return max(self.resident_until(slot), self._stale_at(slot))

    def resident_until(self, slot: Slot) -> float:
        """Return how long a ready slot is kept, whatever happens."""
        assert slot.ready_at is not None, f"slot {slot.slot_id} is not ready"
        return slot.ready_at + self.policy.min_residency_s

    def _stale_at(self, slot: Slot) -> float:
        runner_id = slot.allocation.runner_id
        try:
            when = float(self.policy.stale_at(runner_id, slot.last_activity))
        except Exception as error:
            self._note(runner_id, f"raised {type(error).__name__}: {error}")
            return math.inf
        if math.isnan(when):
            self._note(runner_id, "returned NaN")
            return math.inf
        return when

    def _note(self, runner_id: str, what: str) -> None:
        self.problem = (
            f"Policy.stale_at {what}, for a slot on runner {runner_id}. The slot is not stale until the function "
            f"returns a time. Only a request that has waited for long evicts it."
        )

    def take_problem(self) -> str:
        """Return what was wrong since this was last asked, or ""."""
        problem, self.problem = self.problem, ""
        return problem
