"""Which runners their owner can do without for now, so that jobs that wait may have their hosts."""

from iris_ray.slots.reconciler import Reconciler
from iris_ray.slots.slot import Slot, SlotState

_GOING = (SlotState.DRAINING, SlotState.FAILED)


def needs_room(core: Reconciler) -> bool:
    """Return whether requests wait for a slot, or a model has fewer slots than it is to keep."""
    if len(core.queue):
        return True
    return any(
        sum(slot.wanted for slot in core.fleet.of_identity(identity)) < model.replicas
        for identity, model in core.models.items()
    )


def idle_runners(core: Reconciler, now: float) -> set[str]:
    """Return the runners all of whose slots could be evicted: nobody needs them, and they are stale."""
    staleness = core.allocator.staleness

    def is_stale(slot: Slot) -> bool:
        if slot.active or slot.claimed or slot.ready_at is None:
            return False
        return staleness.evictable_at(slot) <= now

    def is_idle(slot: Slot) -> bool:
        return not slot.active if slot.state in _GOING else slot.state is SlotState.READY and is_stale(slot)

    return {runner_id for runner_id in core.fleet.runners if all(map(is_idle, core.fleet.on_runner(runner_id)))}
