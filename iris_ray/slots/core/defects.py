"""Defects of iris_ray that show with one model: each is told once, and all other models go on."""

import traceback
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass, field

from iris_ray.slots.core.instructions import Instruction, RaiseAlarm
from iris_ray.slots.core.models import SlotIdentity
from iris_ray.slots.core.served_models import ServedModel


@dataclass(slots=True, eq=False)
class Defects:
    """Catches what is raised.

    Attributes:
        models: those that are served.
    """

    models: Mapping[SlotIdentity, ServedModel]
    _told: dict[SlotIdentity, str] = field(default_factory=dict)

    def contained(self, identity: SlotIdentity, work: Iterator[Instruction]) -> Generator[Instruction, None, bool]:
        """Yield what is to be done for a model, up to a defect. Return whether there was none."""
        try:
            yield from work
        except Exception as error:
            why = f"it can't be served now, by a defect of iris_ray ({type(error).__name__}: {str(error)[:500]})"
            if model := self.models.get(identity):
                model.waits_for = f"{why}. Other models go on. The SlotManager's log has more: please report it"
            if self._told.get(identity) != why:
                self._told[identity] = why
                yield RaiseAlarm(f"{identity}: {why}\n{''.join(traceback.format_exception(error))}")
            return False
        return True
