"""Asking again, while an answer is missing: how often, and for how long. The limit is a time, not a number of tries.

The pauses vary, so that the processes that miss an answer at one time don't all ask again at one time.
"""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from iris_ray.actors.protocol.answers import Unreachable

T = TypeVar("T")

GIVE_UP_S = 60.0
"""The time after which no try begins any more."""
PAUSE_S = 0.5
JITTER = 0.5
"""The part of a pause by which it may be shorter or longer."""


async def ask_again(
    ask: Callable[[], Awaitable[T]],
    *missing: type[Exception],
    within_s: float = GIVE_UP_S,
    pause_s: float = PAUSE_S,
) -> T:
    """Ask until an answer comes.

    Args:
        ask: asks once.
        missing: the errors after which it is asked again. An `Unreachable` is always one more reason.
        within_s: for how long; seconds. A try that has begun goes on. 0: ask once.
        pause_s: the mean pause between two tries.

    Returns:
        The answer, or the last `Unreachable`.

    Raises:
        Exception: the last error, as it was raised.
    """
    give_up_at = time.monotonic() + within_s
    while True:
        try:
            answer = await ask()
            if not isinstance(answer, Unreachable) or time.monotonic() >= give_up_at:
                return answer
        except missing:
            if time.monotonic() >= give_up_at:
                raise
        await asyncio.sleep(_varied(pause_s))


def try_again(
    ask: Callable[[], T], *missing: type[Exception], within_s: float = GIVE_UP_S, pause_s: float = PAUSE_S
) -> T:
    """Ask until there is no error that means a missing answer. Block meanwhile. The arguments are as of `ask_again`.

    Raises:
        Exception: the last error, as it was raised.
    """
    give_up_at = time.monotonic() + within_s
    while True:
        try:
            return ask()
        except missing:
            if time.monotonic() >= give_up_at:
                raise
        time.sleep(_varied(pause_s))


def _varied(pause_s: float) -> float:
    return random.uniform((1 - JITTER) * pause_s, (1 + JITTER) * pause_s)
