"""Where an attempt runs: from its order to names, indexes and words."""

from dataclasses import dataclass

from iris_ray.actors.wire.messages import AttemptOrder, HostPlace
from iris_ray.model.outcomes import TaskKey

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
