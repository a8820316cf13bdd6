import asyncio
import time
from typing import Any

import pytest

from iris_ray.actors.calls.asking_again import GIVE_UP_S, JITTER, PAUSE_S, ask_again, try_again
from iris_ray.actors.protocol.answers import Gone, Unreachable
from tests.support import virtual_time


class Asked:
    """An actor that answers late, or never. It notes when it is asked."""

    def __init__(self, *replies: Any, takes_s: float = 0.0) -> None:
        self._replies = list(replies)
        self._takes_s = takes_s
        self.at = list[float]()

    async def ask(self) -> Any:
        self.at.append(time.monotonic())
        await asyncio.sleep(self._takes_s)
        return self.ask_and_block(notes=False)

    def ask_and_block(self, notes: bool = True) -> Any:
        if notes:
            self.at.append(time.monotonic())
        reply = self._replies.pop(0) if len(self._replies) > 1 else self._replies[0]
        if isinstance(reply, Exception):
            raise reply
        return reply

    def pauses(self) -> list[float]:
        return [after - before for before, after in zip(self.at, self.at[1:], strict=False)]


def error_with_cause() -> Exception:
    try:
        raise OSError("the wire is cut") from KeyError("a plug")
    except OSError as error:
        return error


@virtual_time.in_virtual_time
async def test_first_answer_is_returned_whatever_it_is() -> None:
    asked = Asked(Unreachable("it hangs"), Gone("it restarts"), None)
    assert await ask_again(asked.ask) is None
    assert len(asked.at) == 3


@pytest.mark.parametrize("takes_s", [0.0, 10.0])
def test_it_gives_up_by_time_and_returns_the_last_missing_answer(takes_s: float) -> None:
    asked = Asked(Unreachable("it hangs"), Unreachable("it has gone"), takes_s=takes_s)

    async def main() -> tuple[Any, float]:
        return await ask_again(asked.ask), time.monotonic()

    reply, ended_at = virtual_time.run(main())
    assert reply == Unreachable("it has gone")
    assert GIVE_UP_S <= ended_at <= GIVE_UP_S + (1 + JITTER) * PAUSE_S + takes_s


@virtual_time.in_virtual_time
async def test_pauses_vary_within_their_bounds() -> None:
    asked = Asked(Unreachable("it hangs"))
    await ask_again(asked.ask, within_s=300.0, pause_s=2.0)
    pauses = asked.pauses()
    assert all(1.0 <= pause <= 3.0 for pause in pauses)
    assert min(pauses) < 1.5
    assert max(pauses) > 2.5
    assert sum(pauses) / len(pauses) == pytest.approx(2.0, abs=0.4)


@virtual_time.in_virtual_time
async def test_only_errors_that_mean_a_missing_answer_are_asked_again() -> None:
    asked = Asked(OSError("it is away"), ValueError("no such job"), "an answer")
    with pytest.raises(ValueError, match="no such job"):
        await ask_again(asked.ask, OSError)
    assert len(asked.at) == 2
    assert await ask_again(asked.ask, OSError) == "an answer"


@virtual_time.in_virtual_time
async def test_last_error_keeps_its_cause() -> None:
    with pytest.raises(OSError, match="the wire is cut") as raised:
        await ask_again(Asked(error_with_cause()).ask, OSError, within_s=5.0)
    assert isinstance(raised.value.__cause__, KeyError)


def test_blocking_policy_gives_up_by_time_and_keeps_the_cause() -> None:
    asked, began = Asked(error_with_cause()), time.monotonic()
    with pytest.raises(OSError, match="the wire is cut") as raised:
        try_again(asked.ask_and_block, OSError, within_s=0.3, pause_s=0.02)
    assert isinstance(raised.value.__cause__, KeyError)
    assert time.monotonic() - began >= 0.3
    assert 2 <= len(asked.at) <= 31
    assert try_again(Asked(OSError("it is away"), 7).ask_and_block, OSError) == 7


def test_blocking_policy_without_patience_asks_once() -> None:
    asked = Asked(OSError("it is away"))
    with pytest.raises(OSError, match="it is away"):
        try_again(asked.ask_and_block, OSError, within_s=0.0)
    assert len(asked.at) == 1
