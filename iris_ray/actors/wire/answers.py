"""Answers of actors, which may be missing: a missing answer is a value, not an exception."""

import asyncio
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Any

from ray.exceptions import RayError, RayTaskError, RuntimeEnvSetupError

ANSWER_TIMEOUT_S = 5.0
"""How long a healthy actor may take to answer a question that needs no work."""


@dataclass(frozen=True, slots=True)
class Unreachable:
    """A member did not answer; a fact to be judged, not an exception."""

    reason: str


@dataclass(frozen=True, slots=True)
class Gone(Unreachable):
    """A member whose process is gone, or can't be reached at the moment, says Ray; its host may be there."""


@dataclass(frozen=True, slots=True)
class ChipsHeld(Unreachable):
    """A host that answers, but whose chips somebody holds.

    Attributes:
        node_id: Ray's id of the host.
        held: by whom, as part of a sentence about the host.
    """

    node_id: str
    held: str


@dataclass(frozen=True, slots=True)
class NotReserved(Unreachable):
    """Ray has not set the resources aside; that says nothing about the hosts."""


async def answer(call: Awaitable[Any], name: str, timeout_s: float | None) -> Any:
    """Await an actor's answer, or `Unreachable`."""

    async def received() -> Any:
        return await call

    try:
        return await asyncio.wait_for(received(), timeout_s)
    except RayTaskError as error:
        raise error.cause from None
    except RuntimeEnvSetupError:
        raise
    except RayError as error:  # the actor, or what it sent, is lost
        return Gone(f"{name} is gone ({type(error).__name__})")
    except TimeoutError:
        return Unreachable(f"{name} did not answer within {timeout_s:g} s")
