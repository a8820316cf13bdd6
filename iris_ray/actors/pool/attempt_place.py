"""Where an attempt runs: from its order to names, indexes and words."""

import asyncio
from dataclasses import dataclass

from iris_ray.actors.protocol.messages import AttemptOrder, HostPlace
from iris_ray.model.notices import OUR_MOVES, Notice
from iris_ray.model.outcomes import TaskKey, TpuCancelled, TpuPreempted, TpuResult

NAMED = 8
"""How many slices, or hosts, a place names in words."""


@dataclass(frozen=True, slots=True)
class AttemptPlace:
    """The hosts of one order.

    Args:
        order: the order.
    """

    order: AttemptOrder

    @property
    def on_slices(self) -> bool:
        """Whether the gang has slices to itself; tasks without chips share their hosts."""
        return self.order.on_slices

    @property
    def names(self) -> tuple[str, ...]:
        """The slices' names by slice id."""
        return tuple(hosts[0].slice_name for hosts in self.order.slices)

    @property
    def num_tasks(self) -> int:
        return self.order.hosts_per_slice * len(self.order.slices)

    def host(self, key: TaskKey) -> HostPlace:
        return self.order.slices[key.slice_id][key.host_index]

    def name(self, key: TaskKey) -> str:
        """Return the name of a task's slice."""
        return self.order.slices[key.slice_id][0].slice_name

    def task_index(self, key: TaskKey) -> int:
        """Return the index of a task in its job."""
        return self.order.attempt.gang + key.slice_id * self.order.hosts_per_slice + key.host_index

    def tasks(self) -> list[TaskKey]:
        """Return the place of every task, ordered by slice id, then host index."""
        hosts = range(self.order.hosts_per_slice)
        return [TaskKey(slice_id, index) for slice_id in range(len(self.order.slices)) for index in hosts]

    def __str__(self) -> str:
        if self.num_tasks == 1 and not self.on_slices:
            return self.order.slices[0][0].address
        where = self.names if self.on_slices else [host.address for hosts in self.order.slices for host in hosts]
        named = f"{', '.join(where[:NAMED])}{', …' if len(where) > NAMED else ''}"
        return f"{named} ({self.num_tasks} host{'s' if self.num_tasks > 1 else ''})"

    def in_words(self, key: TaskKey) -> str:
        """Return what people call the place of a task."""
        if not self.on_slices:
            return f"task {self.task_index(key)} on {self.host(key).address}"
        return f"slice {key.slice_id} ({self.name(key)}) worker {key.host_index}"


# -- stop request ------------------------------------------------------------------------------------------------------
# Why an attempt is to end before its tasks do.


class StopRequest:
    """Set once; the first reason counts.

    Attributes:
        reason: done when the attempt is to end; why, for people.
        cause: the task because of which we end the attempt, and its outcome; None if the end was requested.
        moved_for: the notice because of which all tasks were ended, if nothing else was the matter.
    """

    def __init__(self) -> None:
        self.reason: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.cause: tuple[TaskKey, TpuResult] | None = None
        self.moved_for: Notice | None = None

    @property
    def asked(self) -> bool:
        """Whether the attempt is to end."""
        return self.reason.done()

    def ask(self, reason: str) -> None:
        """Have the attempt ended on request."""
        if not self.asked:
            self.reason.set_result(reason)

    def blame(self, key: TaskKey, result: TpuResult, reason: str) -> None:
        """Have the attempt ended because of one of its tasks."""
        if not self.asked:
            self.cause = key, result
            self.ask(reason)

    def move(self, notice: Notice, reason: str) -> None:
        """Have the attempt ended so that its gang can run elsewhere."""
        if not self.asked:
            by_us = notice.kind in OUR_MOVES
            self.moved_for = notice
            self.blame(TaskKey(0, 0), TpuCancelled(reason) if by_us else TpuPreempted(reason), reason)
