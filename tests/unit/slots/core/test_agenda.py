"""Which models are looked at, and when."""

import pytest

from iris_ray.slots.core.converge import Agenda
from tests.support.slots import model

A, B = model("a").identity, model("b").identity


def test_agenda_gives_each_entry_once_in_order() -> None:
    agenda = Agenda()
    agenda.note([B, A])
    agenda.note([B])
    assert agenda.take(0.0) == [B, A]
    assert agenda.take(0.0) == []


def test_entry_keeps_its_time_unless_an_earlier_comes() -> None:
    agenda = Agenda()
    agenda.look_again(A, 5.0)
    for when in (9.0, float("inf")):
        agenda.look_again(A, when)
    assert agenda.next_time() == 5.0
    assert agenda.take(4.9) == []
    agenda.look_again(A, 3.0)
    assert agenda.take(5.0) == [A]
    assert agenda.next_time() == float("inf")


@pytest.mark.parametrize("events", [1_000])
def test_moved_times_leave_nothing_behind(events: int) -> None:
    agenda = Agenda()
    for number in range(events):
        agenda.look_again(A, 30.0 + number)
        agenda.take(number / events)
    assert agenda.next_time() == 30.0
    assert agenda.take(30.0) == [A]
    assert agenda.next_time() == float("inf")


def test_entry_waiting_for_room_stays_until_looked_at() -> None:
    agenda = Agenda()
    agenda.wait_for_room(A)
    assert agenda.take(0.0) == []
    agenda.note(agenda.waits_for_room)
    assert agenda.take(0.0) == [A]
    assert not agenda.waits_for_room
