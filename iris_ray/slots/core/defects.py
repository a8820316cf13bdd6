"""Defects of iris_ray that show with one model: each is told once, and all other models go on."""

import traceback
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass, field

from iris_ray.model.containment import SetAside, by_a_defect, others_go_on
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
    _told: dict[SlotIdentity, SetAside] = field(default_factory=dict)

    def contained(self, identity: SlotIdentity, work: Iterator[Instruction]) -> Generator[Instruction, None, bool]:
        """Yield what is to be done for a model, up to a defect. Return whether there was none."""
        try:
            yield from work
        except Exception as error:
            aside = SetAside(str(identity), f"it can't be served now, {by_a_defect(error)}")
            if model := self.models.get(identity):
                model.waits_for = f"{aside.why}. {others_go_on('models', 'SlotManager')}"
            if self._told.get(identity) != aside:
                self._told[identity] = aside
                yield RaiseAlarm(f"{aside}\n{''.join(traceback.format_exception(error))}")
            return False
        return True
