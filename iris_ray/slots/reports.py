"""What a runner reports, beside what should be there."""

from collections.abc import Iterator
from dataclasses import dataclass

from iris_ray.slots.events import RunnerReported
from iris_ray.slots.fleet import SlotFleet
from iris_ray.slots.slot import USES_MEMORY


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that is not as it should be."""

    slot_id: str
    reason: str


def strangers(fleet: SlotFleet, report: RunnerReported) -> Iterator[Finding]:
    """Yield the processes that should not be there: nobody knows them, or they belong to another runner."""
    for slot_id in report.slots:
        slot = fleet.slots.get(slot_id)
        if slot is None:
            yield Finding(slot_id, "no slot of this id is wanted")
        elif slot.allocation.runner_id != report.runner_id:
            yield Finding(slot_id, f"the slot of this id belongs to runner {slot.allocation.runner_id}")


def mismatches(fleet: SlotFleet, report: RunnerReported) -> Iterator[Finding]:
    """Yield the slots that serve something else than they should."""
    for slot_id, identity in report.slots.items():
        slot = fleet.slots.get(slot_id)
        if slot is not None and slot.allocation.runner_id == report.runner_id and slot.identity != identity:
            yield Finding(slot_id, f"it serves {identity} instead of {slot.identity}")


def vanished(fleet: SlotFleet, report: RunnerReported) -> Iterator[str]:
    """Yield the slots that should have a process on the runner, and have none."""
    for slot in fleet.on_runner(report.runner_id):
        expected = slot.state in USES_MEMORY and slot.started_at is not None and slot.started_at < report.as_of
        if expected and slot.slot_id not in report.slots:
            yield slot.slot_id
