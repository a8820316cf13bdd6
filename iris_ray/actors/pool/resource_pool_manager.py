"""What the two pools have in common: members that are asked side by side."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from typing import Generic, TypeVar

Key = TypeVar("Key")
Member = TypeVar("Member")
Reply = TypeVar("Reply")


class ResourcePoolManager(ABC, Generic[Key, Member]):
    """A pool of actors: ReservedSlices holds slices, SliceActor holds hosts."""

    @abstractmethod
    def members(self) -> Mapping[Key, Member]:
        """Return the members that are to be asked."""

    async def ask_all(self, question: Callable[[Member], Awaitable[Reply]]) -> dict[Key, Reply]:
        """Ask every member side by side. A member that is gone or slow answers `Unreachable`."""
        members = dict(self.members())
        answers = await asyncio.gather(*map(question, members.values()))
        return dict(zip(members, answers, strict=True))
