"""Which bytes of each device are promised, and which are in use.

*Promised* are the bytes of slots that are to stay, planned ones included. *In use* are the bytes of slots whose process
may exist. While slots end, both count: a device can be promised to a slot before the one that it replaces is gone, but
no process starts before the bytes are really free. Neither sum ever exceeds the device.

What devices are observed to use raises alarms (`alarms`). It never frees or allocates anything.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import sub

from iris_ray.errors import IllegalTransitionError
from iris_ray.slots.devices import Runner
from iris_ray.slots.slot import Allocation

ALARM_SHARE = 0.05
"""Of a device's memory: by how much observed use may exceed what is booked before it is worth an alarm."""


@dataclass(slots=True)
class _Books:
    memory: tuple[int, ...]
    promised: list[int] = field(init=False)
    used: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.promised, self.used = [0] * len(self.memory), [0] * len(self.memory)


@dataclass(slots=True)
class Ledger:
    """The books of all runners. Devices are given by their numbers."""

    _books: dict[str, _Books] = field(default_factory=dict)

    def open(self, runner: Runner) -> None:
        """Open empty books for a new runner."""
        self._books[runner.runner_id] = _Books(tuple(device.memory for device in runner.devices))

    def close(self, runner_id: str) -> None:
        """Forget a runner that is gone, and all that was booked on it."""
        del self._books[runner_id]

    def promise(self, place: Allocation, sign: int = 1) -> None:
        """Promise a place to a slot, or with sign -1 take the promise back."""
        books = self._books[place.runner_id]
        _add(place, books.promised, books.memory, sign)

    def use(self, place: Allocation, sign: int = 1) -> None:
        """Book a place for a process that is about to start, or with sign -1 free it: the process is gone."""
        books = self._books[place.runner_id]
        _add(place, books.used, books.memory, sign)

    def can_start(self, place: Allocation) -> bool:
        """Return whether no process that may exist holds bytes of this place."""
        books = self._books[place.runner_id]
        for device, need in place.needs:  # noqa: SIM110 — faster than all() with a generator
            if books.used[device] + need > books.memory[device]:
                return False
        return True

    def unpromised(self, runner_id: str) -> list[int]:
        """Return the bytes of each device that are promised to nobody. Some may be in use by slots that end."""
        books = self._books[runner_id]
        return [memory - promised for memory, promised in zip(books.memory, books.promised, strict=True)]

    def unpromised_on(self, runner_id: str, device: int) -> int:
        """Return the bytes of one device that are promised to nobody."""
        books = self._books[runner_id]
        return books.memory[device] - books.promised[device]

    def free_now_on(self, runner_id: str, device: int) -> int:
        """Return the bytes of one device that are neither promised nor in use."""
        books = self._books[runner_id]
        return books.memory[device] - max(books.promised[device], books.used[device])

    def free_now(self, runner_id: str) -> list[int]:
        """Return the bytes of each device that are neither promised nor in use."""
        books = self._books[runner_id]
        return list(map(sub, books.memory, map(max, books.promised, books.used)))

    def used(self, runner_id: str) -> Sequence[int]:
        """Return the bytes of each device that processes may use."""
        return tuple(self._books[runner_id].used)

    def alarms(self, runner_id: str, observed: Mapping[int, int]) -> Iterator[str]:
        """Yield a sentence for each device that was seen to use clearly more bytes than are booked on it."""
        books = self._books[runner_id]
        for device, seen in sorted(observed.items()):
            booked = books.used[device]
            if seen > booked + ALARM_SHARE * books.memory[device]:
                yield f"runner {runner_id}: device {device} uses {seen:,} bytes, but slots have only {booked:,} booked"


def _add(place: Allocation, sums: list[int], memory: Sequence[int], sign: int) -> None:
    for device, need in place.needs:
        total = sums[device] + sign * need
        if not 0 <= total <= memory[device]:
            where = f"device {device} of runner {place.runner_id}"
            raise IllegalTransitionError(f"{total:,} of {memory[device]:,} bytes of {where} can't be booked")
        sums[device] = total
