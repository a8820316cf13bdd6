"""Asking again, while an answer is missing: how often, and for how long. The limit is a time, not a number of tries.

The pauses vary, so that the processes that miss an answer at one time don't all ask again at one time. Tenacity is
imported when it is needed, so that the command line is quick.
"""

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

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
    from tenacity import AsyncRetrying, retry_if_result

    async def once() -> T:  # tenacity would not await what a lambda returns
        return await ask()

    policy = _policy(missing, within_s, pause_s)
    policy["retry"] |= retry_if_result(lambda answer: isinstance(answer, Unreachable))
    return await AsyncRetrying(**policy)(once)


def try_again(
    ask: Callable[[], T], *missing: type[Exception], within_s: float = GIVE_UP_S, pause_s: float = PAUSE_S
) -> T:
    """Ask until there is no error that means a missing answer. Block meanwhile. The arguments are as of `ask_again`.

    Raises:
        Exception: the last error, as it was raised.
    """
    from tenacity import Retrying

    return Retrying(**_policy(missing, within_s, pause_s))(ask)


def _policy(missing: tuple[type[Exception], ...], within_s: float, pause_s: float) -> dict[str, Any]:
    from tenacity import retry_if_exception_type, stop_after_delay, wait_random

    return {
        "retry": retry_if_exception_type(missing),
        "stop": stop_after_delay(within_s),
        "wait": wait_random((1 - JITTER) * pause_s, (1 + JITTER) * pause_s),
        "retry_error_callback": lambda state: state.outcome.result(),  # the last answer, or the last error
    }
