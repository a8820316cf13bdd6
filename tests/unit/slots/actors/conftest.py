"""Processes of slots that stand aside."""

import pytest

from iris_ray.slots.actors import slot_processes
from tests.support.slot_processes import Slots


@pytest.fixture
def slots(monkeypatch: pytest.MonkeyPatch) -> Slots:
    made = Slots()
    monkeypatch.setattr(slot_processes, "_slot_actor", lambda seats: made)
    monkeypatch.setattr("ray.kill", lambda slot: slot.killed.set())
    return made
