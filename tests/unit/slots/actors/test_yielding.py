"""What the Controller hears of idle hosts of slots."""

import asyncio
from collections.abc import Mapping

import pytest

from iris_ray.slots.actors import runners
from iris_ray.slots.actors.runners import Yielding
from iris_ray.slots.core.policy import ServingPolicy
from iris_ray.slots.core.reconciler import Reconciler


class Told(Yielding):
    """Remembers what it tells instead of telling it, and is told which jobs yield."""

    found: Mapping[str, bool]
    answers: bool = True

    def __init__(self) -> None:
        super().__init__(Reconciler(ServingPolicy(), lambda: "slot"), {}, ("job",), "me")
        self.heard: dict[str, bool] = {}

    async def _tell(self, changed: Mapping[str, bool]) -> None:
        self.heard |= changed
        if not self.answers:
            raise TimeoutError("the answer came late")

    def _found(self, now: float) -> dict[str, bool]:
        return dict(self.found)


def test_yielding_report_with_lost_answer_is_corrected() -> None:
    told = Told()
    for yields, answers in ((False, True), (True, False), (False, True)):
        told.found, told.answers = {"job": yields}, answers
        if answers:
            asyncio.run(told.report_changes(0.0))
        else:
            with pytest.raises(TimeoutError):
                asyncio.run(told.report_changes(0.0))
        assert told.heard == {"job": yields}


def test_unchanged_yielding_is_not_reported_again() -> None:
    told = Told()
    told.found = {"job": True}
    asyncio.run(told.report_changes(0.0))
    told.heard.clear()
    asyncio.run(told.report_changes(1.0))
    assert told.heard == {}


class Deaf(Told):
    """Tells a Controller that never answers."""

    async def _tell(self, changed: Mapping[str, bool]) -> None:
        await asyncio.sleep(3600)


def test_warning_about_silent_controller_says_for_how_long(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(runners, "LOOK_S", 0.0)
    monkeypatch.setattr(runners, "ANSWER_S", 0.05)

    async def until_it_warns() -> None:
        deaf = Deaf()
        deaf.found = {"job": True}
        reports = asyncio.create_task(deaf.report(lambda: 0.0))
        while not caplog.messages:
            await asyncio.sleep(0.01)
        reports.cancel()

    asyncio.run(asyncio.wait_for(until_it_warns(), 30))
    assert caplog.messages[0].endswith("idle: it did not answer within 0.05 s")
