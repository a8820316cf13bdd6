"""What the two pools have in common: members that are asked side by side."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Generic, TypeVar

from ray.actor import ActorHandle

from iris_ray.actors.wire.answers import ANSWER_TIMEOUT_S, answer

Key = TypeVar("Key")


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
