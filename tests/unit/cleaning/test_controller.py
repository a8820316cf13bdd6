"""What the Controller itself forgets when it has all machines cleaned."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from iris_ray.actors.controller.clock import Clock
from iris_ray.actors.controller.containment import Containment
from iris_ray.cleaning import controller as cleaning
from iris_ray.cleaning.controller import CleaningInController
from iris_ray.cleaning.core import DAY_S, Limits
from iris_ray.cleaning.disk import KEEP_ALL
from tests.support.ray_in_process import Store


class SetClock(Clock):
    """A clock that a test sets."""

    at = 0.0

    def now(self) -> float:
        return self.at


@pytest.mark.parametrize(
    ("limits", "left"), [(Limits(14.0, None), ["new"]), (Limits(None, 1), ["new", "old"]), (KEEP_ALL, ["new", "old"])]
)
async def test_copies_of_unreadable_records_go_at_their_age(
    monkeypatch: pytest.MonkeyPatch, limits: Limits, left: list[str]
) -> None:
    nothing: dict[str, Any] = {"files": {}, "bytes": {}, "problems": []}
    monkeypatch.setattr(cleaning, "clean_this_machine", lambda *_: nothing)  # it would clean the one of the test
    store: Any = Store()
    contained = Containment(store, clock := SetClock())
    for name, at in (("old", 0.0), ("new", 13.0 * DAY_S)):
        clock.at = at
        contained.leave_out(name, {}, "it is damaged")
        contained.keep_records()
    clock.at = 15.0 * DAY_S
    state = SimpleNamespace(workers={})
    board = SimpleNamespace(publish=lambda *_: None)
    running: Any = SimpleNamespace(service=SimpleNamespace(name="cleaning"), in_thread=asyncio.to_thread)
    controller: Any = SimpleNamespace(state=state, contained=contained, board=board)
    await CleaningInController(controller, running).clean_all(limits, KEEP_ALL)
    assert sorted(contained.records) == left
    assert sorted(store.keys("corrupt/")) == [f"corrupt/{name}" for name in left]
