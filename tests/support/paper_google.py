"""A zone of a provider on paper, whose slices of all types share the chips of one reservation.

In a storm it loses requests and answers, refuses, lists late, fails slices, and deletes slowly.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random

from iris_ray.capacity.provider import OWNER_LABEL, HostSettings, Market, NewSlice, QueuedSlice, QueuedState, Source
from iris_ray.errors import ProviderError
from iris_ray.model.topology import TPUConfig

HERE = "projects/p/locations/here"
OWNER = "ann"
HOSTS = HostSettings("image", {OWNER_LABEL: OWNER}, "#!/bin/sh")
Q = QueuedState


def reservation(chips: int) -> Source:
    """A reservation with so many chips."""
    return Source.reserved(f"{HERE}/reservations/res:{chips}")


@dataclass
class PaperSlice:
    """A slice as it is, whatever the provider lists. Times are numbers of turns."""

    listed: QueuedSlice
    config: TPUConfig
    steps: int
    leaves_at: int | None = None
    is_known_to_leave: bool = False
    listed_from: int = 0
    shown_leaving_from: int = 0


class PaperGoogle:
    """The zone.

    Args:
        random: decides what happens.
        source: the reservation, with its chips.
        used_by: says what uses the slice of a name; nothing may, when it is deleted.

    Attributes:
        slices: those that exist, are being made or are being deleted, by name.
        is_stormy: whether the provider does what providers do on a bad day.
        turn: the number of turns so far.
        made: how many slices it has begun to make.
    """

    location = HERE

    def __init__(self, random: Random, source: Source, used_by: Callable[[str], object], is_stormy: bool) -> None:
        self._random, self._source, self._used_by = random, source, used_by
        self.slices: dict[str, PaperSlice] = {}
        self.is_stormy = is_stormy
        self.turn = self.made = 0

    def happens(self, chance: float) -> bool:
        return self.is_stormy and self._random.random() < chance

    @property
    def leaving(self) -> set[str]:
        """The slices that are being deleted."""
        return {name for name, one in self.slices.items() if one.leaves_at is not None}

    @property
    def chips(self) -> int:
        """The chips of all slices."""
        return sum(one.config.chip_count for one in self.slices.values())

    # -- the API ---------------------------------------------------------------------------------------------------

    def require_type(self, config: TPUConfig) -> None:
        raise NotImplementedError

    def queued_slices(self) -> list[QueuedSlice]:
        if self.happens(0.05) and self.turn:
            raise ProviderError("no answer to the list")
        return [
            replace(one.listed, state=Q.DELETING)
            if one.leaves_at is not None and one.shown_leaving_from <= self.turn
            else one.listed
            for one in self.slices.values()
            if one.listed_from <= self.turn
        ]

    def create(self, wanted: NewSlice) -> str | None:
        if self.happens(0.05):
            raise ProviderError("the request is lost")
        if wanted.name in self.slices:
            return None
        if self.happens(0.15):
            return "no capacity"
        self.made += 1
        listed = QueuedSlice(
            wanted.name, wanted.config.accelerator_type, Q.ACCEPTED, {OWNER_LABEL: OWNER},
            location=HERE, market=Market.RESERVED, reservation=self._source.reservation,
        )  # fmt: skip
        steps, listed_from = self._random.randint(1, 6), self.turn + self.happens(0.2)
        self.slices[wanted.name] = PaperSlice(listed, wanted.config, steps, listed_from=listed_from)
        assert self.chips <= (self._source.chips or 0), f"{self.chips} chips: a chip has two owners"
        if self.happens(0.05):
            raise ProviderError("the answer is lost")
        return None

    def delete(self, name: str) -> str | None:
        if self.happens(0.1):
            raise ProviderError("the request is lost")
        if (one := self.slices.get(name)) is None:
            return None
        user = self._used_by(name)
        assert not user, f"{name} is deleted, and {user} is there"
        if self.happens(0.1):
            return "it can't be deleted now"
        if one.leaves_at is None:
            one.leaves_at = self.turn + self._random.choice((1, 2, 3, *([20, 90] if self.is_stormy else [])))
            one.shown_leaving_from = self.turn + (3 if self.happens(0.2) else 0)
        if self.happens(0.1):
            raise ProviderError("the answer is lost")
        one.is_known_to_leave = True
        return None

    # -- time ------------------------------------------------------------------------------------------------------

    def advance(self) -> tuple[list[str], list[str]]:
        """Take a turn: make and delete slices. Return the names of those that are gone, and those that are new."""
        self.turn += 1
        gone, new = list[str](), list[str]()
        for name, one in list(self.slices.items()):
            if one.leaves_at is not None:
                if one.leaves_at <= self.turn:
                    del self.slices[name]
                    gone.append(name)
                continue
            one.steps -= 1
            if one.listed.state is Q.ACCEPTED and self.happens(0.1):
                one.listed = replace(one.listed, state=Q.FAILED, error="out of stock")
            elif one.listed.state is Q.ACCEPTED:
                one.listed = replace(one.listed, state=Q.PROVISIONING)
            elif one.listed.state is Q.PROVISIONING and one.steps <= 0:
                one.listed = replace(one.listed, state=Q.ACTIVE)
                new.append(name)
        return gone, new
