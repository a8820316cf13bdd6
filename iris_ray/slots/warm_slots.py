"""Which warm slot serves a request, and how many more slots of a model are wanted."""

from collections.abc import Callable, Iterable

from iris_ray.slots.models import ModelSpec
from iris_ray.slots.slot import Slot, SlotState


def choose_warm_slot(slots: Iterable[Slot], most: int, requests_on: Callable[[str], int]) -> Slot | None:
    """Return the slot that a request should go to, or None if none has a seat.

    It is the one with the fewest requests; of these one on the runner with the fewest requests; of these the one that
    was used last, so that others become stale.

    Args:
        slots: those that serve the request's model.
        most: how many requests may run on the slot then, this one included.
        requests_on: how many requests run on a runner.
    """
    warm = (slot for slot in slots if slot.seats_for(most) > 0)
    return min(
        warm,
        key=lambda slot: (len(slot.active), requests_on(slot.allocation.runner_id), -slot.last_activity, slot.slot_id),
        default=None,
    )


def seats(slots: Iterable[Slot], most: int, late: Callable[[Slot], bool]) -> int:
    """Return how many requests the slots of a model can take, now or once they have started.

    Args:
        slots: those that serve the model.
        most: how many requests may run on a slot together with the next one that waits.
        late: whether a slot that starts takes so long that it does not count.
    """
    return sum(
        max(0, slot.seats_for(most)) if slot.state is SlotState.READY else slot.spec.requests_at_a_time
        for slot in slots
        if slot.wanted and not (slot.state is SlotState.STARTING and late(slot))
    )


def slots_wanted(waiting: int, free_seats: int, spec: ModelSpec) -> int:
    """Return how many more slots it takes so that nobody waits: those that start are among the free seats."""
    return max(0, -(-(waiting - free_seats) // spec.requests_at_a_time))
