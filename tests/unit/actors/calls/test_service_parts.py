"""A service's part in an actor: calls, events, and failures that stay its own."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from typing import Any, ClassVar, Protocol

import pytest

from iris_ray.actors.calls import service_parts
from iris_ray.actors.calls.service_parts import RunningPart, RunningParts, ServicePart
from iris_ray.actors.protocol.services import Service, addressed, calls_of
from iris_ray.errors import InvalidMessageError, ServiceUnavailableError, UnknownNameError


@calls_of("echo")
class EchoCalls(Protocol):
    async def echo(self, number: int, *, times: int = 1) -> int: ...

    async def refuse(self) -> None: ...


class Echo(ServicePart[str]):
    """Answers, and does what the test says in its hooks."""

    calls = (EchoCalls,)
    made: ClassVar[list["Echo"]] = []
    start: Any = None
    hear: Any = None
    loop: Any = None

    def __init__(self) -> None:
        self.heard: list[str] = []
        self.is_closed = False
        Echo.made.append(self)

    async def started(self) -> None:
        if Echo.start is not None:
            await Echo.start()

    async def happened(self, events: list[str]) -> None:
        if Echo.hear is not None:
            await Echo.hear()
        self.heard += events

    async def run(self) -> None:
        if Echo.loop is not None:
            await Echo.loop()

    def close(self) -> None:
        self.is_closed = True

    async def echo(self, number: int, *, times: int = 1) -> int:
        return number * times

    async def refuse(self) -> None:
        raise UnknownNameError("no")

    async def hidden(self) -> None:
        raise AssertionError("it is no call of the service")


PLACE = f"{__name__}:Echo"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_parts, "FIRST_PAUSE_S", 0.01)
    for name, value in (("made", []), ("start", None), ("hear", None), ("loop", None)):
        monkeypatch.setattr(Echo, name, value)


@contextlib.asynccontextmanager
async def running() -> AsyncIterator[RunningPart[str]]:
    parts = RunningParts[str]([(Service("echo"), PLACE)], lambda kind, _: kind())
    works = [asyncio.ensure_future(work) for work, _ in parts.works()]
    (part,) = parts
    yield part
    for work in works:
        work.cancel()
    await asyncio.wait(works)


async def until(condition: Any) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.005)


async def raising() -> None:
    raise ValueError("broken\nin detail")


async def hanging() -> None:
    await asyncio.sleep(60)


async def leaving() -> None:
    raise SystemExit(3)


async def test_call_is_answered_with_checked_arguments() -> None:
    async with running() as part:
        assert await part.answer("echo", (4,), {"times": 2}) == 8
        with pytest.raises(InvalidMessageError):
            await part.answer("echo", ("four",), {})
        with pytest.raises(UnknownNameError):
            await part.answer("refuse", (), {})
        assert part.health.failures == 0


@pytest.mark.parametrize("method", ["hidden", "started", "__init__", "close"])
async def test_method_outside_of_the_protocol_is_refused(method: str) -> None:
    async with running() as part:
        with pytest.raises(InvalidMessageError):
            await part.answer(method, (), {})


def test_call_of_a_service_is_addressed_to_serve() -> None:
    assert addressed(EchoCalls.echo, (4,), {"times": 2}) == ("serve", ("echo", "echo", (4,), {"times": 2}), {})
    assert addressed(hanging, (4,), {}) == ("hanging", (4,), {})


async def test_events_reach_the_part_in_order() -> None:
    async with running() as part:
        for number in range(5):
            part.note([str(number)])
        await until(lambda: Echo.made and Echo.made[-1].heard == list("01234"))


@pytest.mark.parametrize("hook", ["start", "hear", "loop"])
@pytest.mark.parametrize("how", [raising, leaving, lambda: 5], ids=["raises", "exits", "returns garbage"])
async def test_part_that_fails_is_named_and_made_anew(hook: str, how: Any) -> None:
    async with running() as part:
        await until(lambda: part.part is not None)
        setattr(Echo, hook, staticmethod(how))
        if hook != "hear":
            part._break_down(ValueError("begin anew"))
        part.note(["event"])
        await until(lambda: part.health.failures > 1 or (hook == "hear" and part.health.failures))
        assert part.health.last_error is not None
        setattr(Echo, hook, None)
        await until(lambda: part.part is not None and part.health.trouble is None)
        assert await part.answer("echo", (1,), {}) == 1
        assert all(echo.is_closed for echo in Echo.made[:-1] if hook != "start")


async def test_hook_that_hangs_holds_up_neither_calls_nor_the_caller() -> None:
    async with running() as part:
        await until(lambda: part.part is not None)
        Echo.hear = staticmethod(hanging)
        began = time.monotonic()
        for number in range(service_parts.MOST_WAITING + 10):
            part.note([str(number)])
        assert await part.answer("echo", (1,), {}) == 1
        assert time.monotonic() - began < 5
        await until(lambda: part.health.lost_events)


async def test_hook_with_a_deadline_fails_when_it_is_late() -> None:
    async with running() as part:
        with pytest.raises(ServiceUnavailableError, match="no answer within"):
            await part.call(lambda _: hanging(), 0.05)
        await until(lambda: part.health.failures)
        await until(lambda: part.part is not None)
        assert await part.call(lambda echo: echo.echo(3), 5.0) == 3


async def test_failing_part_answers_with_the_reason() -> None:
    Echo.start = staticmethod(raising)
    async with running() as part:
        with pytest.raises(ServiceUnavailableError, match="ValueError: broken"):
            await part.answer("echo", (1,), {})


async def test_part_whose_class_is_missing_fails_alone() -> None:
    parts = RunningParts[str]([(Service("gone"), "iris_ray.gone:Gone")], lambda kind, _: kind())
    works = [asyncio.ensure_future(work) for work, _ in parts.works()]
    with pytest.raises(ServiceUnavailableError, match="ModuleNotFoundError"):
        await parts.answer("gone", "echo", (), {})
    with pytest.raises(ServiceUnavailableError, match="there is no service 'other'"):
        await parts.answer("other", "echo", (), {})
    for work in works:
        work.cancel()


async def test_step_that_blocks_the_loop_is_measured() -> None:
    async def blocking() -> None:
        await asyncio.sleep(0)
        time.sleep(0.15)

    Echo.hear = staticmethod(blocking)
    async with running() as part:
        part.note(["event"])
        await until(lambda: part.health.longest_step_s > 0.14)
