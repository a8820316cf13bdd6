"""Which models to look at after an event: those for which something has changed, or whose time has come.

A model that waits for room is looked at again when a device has more of it. As a safety net, all models are looked at
every `CONVERGE_S`.
"""

import heapq
from collections.abc import Iterable
from dataclasses import dataclass, field

from iris_ray.slots.models import SlotIdentity


@dataclass(slots=True, eq=False)
class Agenda:
    """What to look at, in the order in which it was noted.

    Attributes:
        waits_for_room: those for which there was no place.
    """

    waits_for_room: dict[SlotIdentity, None] = field(default_factory=dict)
    _noted: dict[SlotIdentity, None] = field(default_factory=dict)
    _times: list[tuple[float, SlotIdentity]] = field(default_factory=list)
    _next: dict[SlotIdentity, float] = field(default_factory=dict)

    def note(self, identities: Iterable[SlotIdentity]) -> None:
        """Look at these as soon as possible."""
        self._noted.update(dict.fromkeys(identities))

    def wait_for_room(self, identity: SlotIdentity) -> None:
        """Look at this when a device has more room."""
        self.waits_for_room[identity] = None

    def look_again(self, identity: SlotIdentity, when: float) -> None:
        """Look at this at a time, or before."""
        if when < self._next.get(identity, float("inf")):
            self._next[identity] = when
            heapq.heappush(self._times, (when, identity))

    def next_time(self) -> float:
        """Return when the next look is due though nothing happens; it may be one that is needed no more."""
        return self._times[0][0] if self._times else float("inf")

    def take(self, now: float) -> list[SlotIdentity]:
        """Return what to look at now, once."""
        while self._times and self._times[0][0] <= now:
            when, identity = heapq.heappop(self._times)
            if self._next.get(identity) == when:
                del self._next[identity]
                self._noted[identity] = None
        taken = list(self._noted)
        self._noted.clear()
        for identity in taken:
            self.waits_for_room.pop(identity, None)
        return taken
