"""What the kernel asks services while gangs wait for the answer, and what services publish."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from typing import Any

import pytest

from iris_ray.actors.controller import services
from iris_ray.actors.controller.services import ControllerPart, ControllerParts, PlainValue, Published, ServiceBoard
from iris_ray.actors.protocol.services import Service
from iris_ray.errors import InvalidMessageError
from iris_ray.model.outcomes import ProviderState, ProviderWord

TAKEN = ProviderWord(ProviderState.PREEMPTED, "it was taken")


class Knows(ControllerPart):
    """Knows that every slice was taken."""

    def close(self) -> None: ...

    async def slices_lost(self, names: frozenset[str]) -> Mapping[str, ProviderWord]:
        return dict.fromkeys(names, TAKEN)


class Raises(Knows):
    async def slices_lost(self, names: frozenset[str]) -> Mapping[str, ProviderWord]:
        raise ValueError("broken")


class Hangs(Knows):
    async def slices_lost(self, names: frozenset[str]) -> Mapping[str, ProviderWord]:
        await asyncio.sleep(60)
        return {}


class Babbles(Knows):
    async def slices_lost(self, names: frozenset[str]) -> Any:
        return {"a": "taken"}


class Silent(ControllerPart):
    """Has nothing to say of slices."""

    def close(self) -> None: ...


@contextlib.asynccontextmanager
async def running(*kinds: type[ControllerPart]) -> AsyncIterator[ControllerParts]:
    places = [(Service(kind.__name__), f"{__name__}:{kind.__name__}") for kind in kinds]
    parts = ControllerParts(places, lambda kind, running: kind(None, running))
    works = [asyncio.ensure_future(work) for work, _ in parts.works()]
    while any(part.part is None for part in parts):
        await asyncio.sleep(0)
    yield parts
    for work in works:
        work.cancel()
    await asyncio.wait(works)


@pytest.mark.parametrize("kind", [Raises, Hangs, Babbles, Silent])
async def test_lost_slices_are_known_whatever_other_services_do(
    kind: type[ControllerPart], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(services, "LOST_S", 0.05)
    async with running(kind, Knows) as parts, asyncio.timeout(5.0):
        assert await parts.slices_lost(frozenset({"a", "b"})) == {"a": TAKEN, "b": TAKEN}
        assert await parts.slices_lost(frozenset({"a"})) == {"a": TAKEN}, "also while it is failing"
        while kind is not Silent and not next(iter(parts.health())).failures:
            await asyncio.sleep(0)


def test_board_holds_what_each_service_publishes_until_it_fails() -> None:
    board = ServiceBoard()
    row: dict[str, PlainValue] = {"team": "ads", "used": 8.0}
    board.publish("one", Published(prices={"v4-16": (2.0, "USD")}, gauges=(("iris_missing_slices", ("v4-16",), 1.0),)))
    board.publish("other", Published(reasons={"v4-16": ("they come",)}, tables={"teams": {"ads": row}}))
    assert (board.price("v4-16"), board.price("v5p-8")) == ((2.0, "USD"), None)
    assert board.gauges() == [("iris_missing_slices", ("v4-16",), 1.0)]
    assert (board.reasons("v4-16"), board.tables()) == (("they come",), {"teams": {"ads": row}})
    with pytest.raises(InvalidMessageError):
        board.publish("one", Published(prices={"v4-16": "cheap"}))  # type: ignore[dict-item]
    board.withdraw("one")
    assert (board.price("v4-16"), board.gauges()) == (None, [])
