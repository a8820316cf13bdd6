"""Which models are looked at, and when."""

import pytest

from iris_ray.slots.core.slot_planner import ModelAgenda
from tests.support.slots import model

A, B = model("a").identity, model("b").identity


def test_what_is_noted_is_looked_at_once_in_that_order() -> None:
    agenda = ModelAgenda()
    agenda.note([B, A])
    agenda.note([B])
    assert agenda.take(0.0) == [B, A]
    assert agenda.take(0.0) == []


def test_a_time_is_kept_until_it_has_come_or_an_earlier_one_is_said() -> None:
    agenda = ModelAgenda()
    agenda.look_again(A, 5.0)
    for when in (9.0, float("inf")):
        agenda.look_again(A, when)
    assert agenda.next_time() == 5.0
    assert agenda.take(4.9) == []
    agenda.look_again(A, 3.0)
    assert agenda.take(5.0) == [A]
    assert agenda.next_time() == float("inf")


@pytest.mark.parametrize("events", [1_000])
def test_times_that_move_on_leave_nothing_behind(events: int) -> None:
    agenda = ModelAgenda()
    for number in range(events):
        agenda.look_again(A, 30.0 + number)
        agenda.take(number / events)
    assert agenda.next_time() == 30.0
    assert agenda.take(30.0) == [A]
    assert agenda.next_time() == float("inf")


def test_what_waits_for_room_does_so_until_it_is_looked_at() -> None:
    agenda = ModelAgenda()
    agenda.wait_for_room(A)
    assert agenda.take(0.0) == []
    agenda.note(agenda.waits_for_room)
    assert agenda.take(0.0) == [A]
    assert not agenda.waits_for_room
