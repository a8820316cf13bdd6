"""What there is, as people see it."""

from collections.abc import Mapping

from iris_ray.actors.slots.messages import ModelRow, SlotRow, SlotStatus
from iris_ray.actors.slots.slot_processes import SlotProcess
from iris_ray.slots.reconciler import Reconciler
from iris_ray.slots.served_models import ServedModel
from iris_ray.slots.slot import Slot, SlotState


def status_of(core: Reconciler, processes: Mapping[str, SlotProcess], now: float) -> SlotStatus:
    """Return runners, slots and models."""
    runners = {runner_id: tuple(core.fleet.ledger.free_now(runner_id)) for runner_id in core.fleet.runners}
    slots = tuple(_slot_row(core, slot, processes.get(slot.slot_id), now) for slot in core.fleet.slots.values())
    return SlotStatus(runners, slots, tuple(_model_row(core, model) for model in core.models.values()))


def _slot_row(core: Reconciler, slot: Slot, made: SlotProcess | None, now: float) -> SlotRow:
    return SlotRow(
        slot_id=slot.slot_id,
        model=str(slot.identity),
        runner=slot.allocation.runner_id,
        devices=slot.allocation.devices,
        memory=slot.allocation.total,
        state=slot.state.value,
        active=len(slot.active),
        sessions=len(core.sessions.on(slot)),
        idle_s=0.0 if slot.active else now - slot.last_activity,
        pid=made.processes[0].pid if made and made.processes else 0,
    )


def _model_row(core: Reconciler, model: ServedModel) -> ModelRow:
    slots = core.fleet.of_identity(model.spec.identity)
    waiting = core.queue.waiting(model.spec.identity)
    misses_replicas = sum(slot.wanted for slot in slots) < model.replicas
    return ModelRow(
        model=model.spec.name,
        slots=sum(slot.state is SlotState.READY for slot in slots),
        starting=sum(slot.state in (SlotState.PLANNED, SlotState.STARTING) for slot in slots),
        waiting=waiting,
        replicas=model.replicas,
        load_s=model.load_s,
        failures=model.failures,
        waits_for=model.waits_for if waiting or misses_replicas else "",
    )
