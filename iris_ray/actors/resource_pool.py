"""What the two pools have in common: members that are asked all at once, and answers that may be missing."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from ray.actor import ActorHandle
from ray.exceptions import RayError, RayTaskError, RuntimeEnvSetupError

Key = TypeVar("Key")

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


class ResourcePoolManager(ABC, Generic[Key]):
    """A pool of actors: SlicePoolManager holds slices, SliceActor holds hosts."""

    @abstractmethod
    def members(self) -> Mapping[Key, ActorHandle]:
        """The members that are to be asked."""

    @abstractmethod
    def member_name(self, key: Key) -> str:
        """What people call the member."""

    async def ask_all(self, method: str, *args: Any, timeout_s: float = ANSWER_TIMEOUT_S) -> dict[Key, Any]:
        """Call one method on every member side by side. A member that is gone or slow answers `Unreachable`."""
        members = dict(self.members())
        answers = await asyncio.gather(*(self.ask(key, method, *args, timeout_s=timeout_s) for key in members))
        return dict(zip(members, answers, strict=True))

    async def ask(self, key: Key, method: str, *args: Any, timeout_s: float | None = ANSWER_TIMEOUT_S) -> Any:
        """Call one method on one member; `Unreachable` if it is gone or does not answer in time.

        Raises:
            Exception: what the method itself raised.
        """
        call = getattr(self.members()[key], method).remote(*args)
        return await answer(call, self.member_name(key), timeout_s)


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
