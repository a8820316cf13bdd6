"""A service's part in an actor: calls, events, and failures that stay its own."""

import asyncio
import contextlib
import gc
import subprocess
import sys
import threading
import time
import weakref
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
            part._break_down(Echo.made[-1], ValueError("begin anew"))
        part.note(["event"])
        await until(lambda: part.health.failures > 1 or (hook == "hear" and part.health.failures))
        assert part.health.last_error is not None
        setattr(Echo, hook, None)
        await until(lambda: part.part is not None and part.health.trouble is None)
        assert await part.answer("echo", (1,), {}) == 1
        assert all(echo.is_closed for echo in Echo.made[:-1])


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


@pytest.mark.parametrize("hook", [lambda _: {"garbage": 1}, lambda _: exiting_at_once()])
async def test_hook_without_coroutine_fails_alone(hook: Any) -> None:
    async with running() as part:
        await until(lambda: part.part is not None)
        assert part.call_now(lambda _: "said", str) == "said"
        assert part.call_now(lambda _: None, str) is None
        assert part.call_now(hook, str) is None
        await until(lambda: part.health.failures == 1)
        await until(lambda: part.part is not None)


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


def exiting_at_once() -> None:
    raise SystemExit(3)


async def cancelled() -> None:
    raise asyncio.CancelledError


async def stubborn() -> None:
    """Ignore each cancellation for a while, as a loop with a bare ``except`` does."""
    until_s = time.monotonic() + 3.0
    while time.monotonic() < until_s:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(0.2)


class Unreadable(Exception):
    def __str__(self) -> str:
        raise ValueError("no words")


async def unreadable() -> None:
    raise Unreadable


@pytest.mark.parametrize("hook", ["start", "hear", "loop"])
async def test_part_is_named_whatever_its_hook_raises(hook: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for how, words in ((exiting_at_once, "SystemExit"), (unreadable, "Unreadable"), (cancelled, "CancelledError")):
        monkeypatch.setattr(Echo, hook, staticmethod(how))
        method = {"start": "started", "hear": "happened", "loop": "run"}[hook]
        with monkeypatch.context() as patched:
            if how is exiting_at_once:  # a method that is not a coroutine
                patched.setattr(Echo, method, lambda *_: exiting_at_once())
            async with running() as part:
                part.note(["event"])
                await until(lambda part=part: part.health.failures)
                assert words in str(part.health.last_error)


async def test_part_whose_close_exits_is_made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Echo, "close", lambda _: exiting_at_once())
    async with running() as part:
        await until(lambda: part.part is not None)
        part._break_down(Echo.made[-1], ValueError("begin anew"))
        await until(lambda: len(Echo.made) == 2 and part.part is Echo.made[1])


async def test_message_of_an_error_is_cut() -> None:
    async def shouting() -> None:
        raise ValueError("x" * 1_000_000)

    Echo.start = staticmethod(shouting)
    async with running() as part:
        await until(lambda: part.health.failures)
        assert len(str(part.health.trouble)) < 1000


async def test_part_that_starts_for_ever_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_parts, "LONG_START_S", 0.05)
    Echo.start = staticmethod(hanging)
    async with running() as part:
        with pytest.raises(ServiceUnavailableError, match="has been starting"):
            await asyncio.wait_for(part.answer("echo", (1,), {}), 5)
        assert part.health.trouble is not None


async def test_call_that_meets_a_slow_start_does_not_break_the_part() -> None:
    Echo.start = staticmethod(lambda: asyncio.sleep(0.2))
    async with running() as part:
        with pytest.raises(ServiceUnavailableError, match="has not started"):
            await part.call(lambda echo: echo.echo(1), 0.05)
        await until(lambda: part.part is not None)
        await asyncio.sleep(0.05)
        assert (part.health.failures, len(Echo.made)) == (0, 1)


async def test_late_failure_of_a_dropped_part_leaves_the_new_one_alone() -> None:
    async with running() as part:
        await until(lambda: part.part is not None)
        failing = asyncio.Event()

        async def fails_late() -> None:
            await failing.wait()
            raise ValueError("of the first part")

        call = asyncio.ensure_future(part.call(lambda _: fails_late(), 5.0))
        await asyncio.sleep(0.01)
        part._break_down(Echo.made[-1], ValueError("begin anew"))
        await until(lambda: len(Echo.made) == 2 and part.part is Echo.made[1])
        failing.set()
        with pytest.raises(ServiceUnavailableError, match="of the first part"):
            await call
        await asyncio.sleep(0.05)
        assert part.health.failures == 1


async def test_hook_that_ignores_its_cancellation_does_not_hold_the_caller() -> None:
    async with running() as part:
        began = time.monotonic()
        with pytest.raises(ServiceUnavailableError, match="no answer within"):
            await part.call(lambda _: stubborn(), 0.05)
        assert time.monotonic() - began < 1.0


async def test_hook_that_is_cancelled_inside_does_not_cancel_the_caller() -> None:
    async with running() as part:
        with pytest.raises(ServiceUnavailableError):
            await part.call(lambda _: cancelled(), 5.0)
        await until(lambda: part.health.failures and part.part is not None)


async def test_hook_that_exits_at_once_fails_alone() -> None:
    async with running() as part:
        with pytest.raises(ServiceUnavailableError):
            await part.call(lambda _: exiting_at_once(), 5.0)  # type: ignore[arg-type, return-value]


async def test_part_that_causes_events_at_each_event_lets_others_run(monkeypatch: pytest.MonkeyPatch) -> None:
    rounds = 0
    async with running() as part:

        async def echoes(_: Any, events: list[str]) -> None:
            nonlocal rounds
            rounds += 1
            if rounds > 1000:
                raise AssertionError("the event loop was held for 1000 rounds")
            part.note(events)

        monkeypatch.setattr(Echo, "happened", echoes)
        part.note(["event"])
        while not rounds:
            await asyncio.sleep(0)  # `until` would pause, and a machine that stalls then has a thousand rounds
        await asyncio.sleep(0)
        assert rounds < 1000
        monkeypatch.undo()


async def test_events_in_the_hands_of_a_failing_part_count_as_lost() -> None:
    Echo.hear = staticmethod(raising)
    async with running() as part:
        part.note(["one", "two"])
        await until(lambda: part.health.failures)
        assert part.health.lost_events == 2


async def test_parts_that_ignore_their_end_do_not_pile_up() -> None:
    Echo.loop = staticmethod(stubborn)
    Echo.hear = staticmethod(raising)
    async with running() as part:
        for _ in range(30):
            part.note(["event"])
            await asyncio.sleep(0.05)
        assert len(Echo.made) == 1
        Echo.loop = Echo.hear = None
        await until(lambda: len(Echo.made) == 2 and part.part is not None)


async def test_cancelled_calls_do_not_pile_up_behind_threads_that_hang() -> None:
    gate = threading.Event()
    async with running() as part:
        stuck = [asyncio.ensure_future(part.in_thread(gate.wait)) for _ in range(service_parts.THREADS)]
        await asyncio.sleep(0.05)
        held = weakref.WeakSet[Echo]()
        for _ in range(50):
            echo = Echo()
            Echo.made.clear()
            held.add(echo)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(part.in_thread(echo.close), 0.001)
        del echo
        await asyncio.sleep(0)  # Python 3.13's event loop refers to the last call's error until its step ends
        gc.collect()
        assert not held
        gate.set()
        await asyncio.gather(*stuck)
        assert await part.in_thread(int) == 0


# -- the end of the process --------------------------------------------------------------------------------------------

ACTOR_THAT_ENDS = """
import asyncio, threading
from iris_ray.actors.calls.background import BackgroundTasks
from iris_ray.actors.calls.service_parts import RunningParts, ServicePart
from iris_ray.actors.protocol.services import Service

class Waits(ServicePart):
    async def run(self):
        await asyncio.Event().wait()

async def begin():
    parts = RunningParts([(Service("waits"), "__main__:Waits")], lambda kind, running: kind())
    for work, what in parts.works():
        background.start(work, what)
    await asyncio.sleep(0.1)
    print(parts.health())

background, loop = BackgroundTasks(), asyncio.new_event_loop()
thread = threading.Thread(target=loop.run_forever)
thread.start()
asyncio.run_coroutine_threadsafe(begin(), loop).result()
loop.call_soon_threadsafe(loop.stop)  # as Ray ends the event loops of an actor, without an end of their tasks
thread.join()
"""


def test_end_of_the_process_is_silent() -> None:
    """The users would see what asyncio says of the actors of their jobs, in their terminal."""
    done = subprocess.run(
        [sys.executable, "-c", ACTOR_THAT_ENDS], capture_output=True, text=True, timeout=60, check=True
    )
    assert "trouble=None, failures=0" in done.stdout
    assert done.stderr == ""
