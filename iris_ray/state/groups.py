"""Groups of workers by the value of an attribute: slices, racks, or single workers."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import chain

from iris_ray.model.constraints import AttributeValue
from iris_ray.model.workers import TPU_NAME, TPU_VM_COUNT, Worker


class Group:
    """Workers that share a value of an attribute, with properties derived from them.

    `Grouping` makes a new group when a member is added, removed or changed. Within a group, only the free room changes.

    Attributes:
        name: the shared value.
        is_slice: whether it is a TPU slice, which is usable only if it is complete.
        workers: the members; those of a slice in the order of host_index, others by slice, host_index and node_id.
        node_ids: the members' node ids, in the order of ``workers``.
        size: the number of hosts in the complete group.
        defect: why a slice is incomplete, or None.
        taints: keys of the taints of any member.
        unhealthy: node_id → why the member takes no new tasks.
        foreign_use: node_id → the process outside iris_ray that uses the member's chips.
        suspected: members that may be lost.
        has_issues: whether a defect, taint, drain, foreign use or suspicion restricts the use of any member.
    """

    __slots__ = (
        "_chips_idle",
        "_room",
        "_shared",
        "defect",
        "foreign_use",
        "has_issues",
        "is_slice",
        "name",
        "node_ids",
        "size",
        "suspected",
        "taints",
        "unhealthy",
        "workers",
    )

    def __init__(self, name: str, workers: Sequence[Worker], is_slice: bool) -> None:
        self.name = name
        self.is_slice = is_slice
        numbers = [worker.host_index for worker in workers]
        if len(numbers) == 1 or (is_slice and numbers == list(range(len(numbers)))):
            self.workers = tuple(workers)
        else:
            self.workers = tuple(sorted(workers, key=_sort_key))
        self.node_ids = tuple([worker.node_id for worker in self.workers])
        odd = [
            worker
            for worker in self.workers
            if worker.draining
            or worker.foreign
            or worker.suspected
            or worker.duplicate
            or worker.taints
            or (worker.host_index is None and worker.slice_name)
        ]
        self.taints = tuple(dict.fromkeys(chain.from_iterable(worker.taints for worker in odd)))
        self.unhealthy = {worker.node_id: why for worker in odd if (why := _health_problem(worker))}
        self.foreign_use = {worker.node_id: worker.foreign for worker in odd if worker.foreign}
        self.suspected = [worker for worker in odd if worker.suspected]
        counts = [count.value for worker in workers if (count := worker.attributes.get(TPU_VM_COUNT)) is not None]
        self.size = slice_size(counts, len(workers)) if is_slice else len(workers)
        self.defect = slice_defect([worker.host_index for worker in self.workers], self.size) if is_slice else None
        self.has_issues = bool(self.defect or self.unhealthy or self.foreign_use or self.suspected or self.taints)
        self._room: dict[str, float] | None = None
        self._chips_idle: bool | None = None
        self._shared: dict[str, bool] = {}

    def shares(self, key: str) -> bool:
        """Return whether all members have the same value of an attribute, or none has the attribute."""
        if len(self.workers) == 1:
            return True
        shared = self._shared.get(key)
        if shared is None:
            shared = self._shared[key] = _is_shared(key, self.workers)
        return shared

    def occupants_changed(self) -> None:
        """Invalidate the cached free resources."""
        self._room = self._chips_idle = None

    @property
    def chips_idle(self) -> bool:
        """Whether no task uses chips of any member."""
        if self._chips_idle is None:
            self._chips_idle = not [worker for worker in self.workers if not worker.chips_idle]
        return self._chips_idle

    @property
    def room(self) -> dict[str, float]:
        """The amount of each resource that is free on every member."""
        if self._room is None:
            first, *others = self.workers
            least = self._room = dict(first.free) if others else first.free
            for worker in others:
                if worker.free != least:
                    for resource, amount in least.items():
                        least[resource] = min(amount, worker.free.get(resource, 0.0))
        return self._room


class Grouping:
    """The workers grouped by an attribute; None makes every worker a group. Groups are made when first read."""

    def __init__(self, key: str | None, workers: Iterable[Worker] = ()) -> None:
        self._key = key
        self._groups: dict[str, Group] = {}
        self._members: dict[str, dict[str, Worker]] = {}
        if key is None:
            self._members.update((worker.node_id, {worker.node_id: worker}) for worker in workers)
        else:
            for worker in workers:
                self.add(worker)

    def __iter__(self) -> Iterator[str]:
        return iter(self._members)

    def __contains__(self, name: object) -> bool:
        return name in self._members

    def __len__(self) -> int:
        return len(self._members)

    def name_of(self, worker: Worker) -> str | None:
        """Return the name of the group that a worker belongs to, or None."""
        if self._key is None:
            return worker.node_id
        if self._key == TPU_NAME:
            return worker.slice_name
        value = worker.attributes.get(self._key)
        return None if value is None else group_name(value)

    def members(self, name: str) -> Collection[Worker]:
        """Return the workers of a group, in no particular order."""
        return self._members.get(name, {}).values()

    def groups(self) -> Iterator[Group]:
        """Iterate over all groups."""
        return filter(None, map(self.get, self._members))

    def get(self, name: str) -> Group | None:
        """Return a group by name; None if it has no live workers."""
        group = self._groups.get(name)
        if group is None and (members := self._members.get(name)):
            group = self._groups[name] = Group(name, list(members.values()), self._key == TPU_NAME)
        return group

    def add(self, worker: Worker) -> None:
        """Add a worker, or record its change; its group is rebuilt when it is next read."""
        if name := self.name_of(worker):
            self._members.setdefault(name, {})[worker.node_id] = worker
            self._groups.pop(name, None)

    def remove(self, worker: Worker) -> None:
        """Remove a worker from its group."""
        if name := self.name_of(worker):
            members = self._members[name]
            del members[worker.node_id]
            if not members:
                del self._members[name]
            self._groups.pop(name, None)

    def occupants_changed(self, worker: Worker) -> None:
        """Record that a worker's occupants have changed."""
        if (name := self.name_of(worker)) and (group := self._groups.get(name)):
            group.occupants_changed()


def group_name(value: AttributeValue) -> str:
    """Return the name of the group for an attribute's value. Names are equal exactly if the values are."""
    raw = value.value
    if isinstance(raw, bool):
        return "true" if raw else "false"
    if isinstance(raw, str):
        return repr(raw) if _reads_like_another_kind(raw) else raw
    return str(int(raw)) if isinstance(raw, float) and raw.is_integer() else str(raw)


@lru_cache(maxsize=100_000)
def _reads_like_another_kind(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return text in ("true", "false") or text.startswith(("'", '"'))
    return True


def _sort_key(worker: Worker) -> tuple[str, int, str]:
    number = worker.host_index
    return worker.slice_name or "", -1 if number is None else number, worker.node_id


def _is_shared(key: str, workers: Sequence[Worker]) -> bool:
    found = [worker.attributes.get(key) for worker in workers]
    values = [value.value for value in found if value is not None]
    if len(values) < len(found):
        return not values
    # 4 and 4.0 count as different here, which only makes evaluations slower.
    return values.count(values[0]) == len(values) and (type(values[0]) is str or len(set(map(type, values))) == 1)


def _health_problem(worker: Worker) -> str | None:
    if worker.draining:
        return f"{worker.name} is draining ({worker.draining})"
    if worker.slice_name and worker.host_index is None:
        return f"{worker.name} has no worker id"
    if worker.duplicate:
        return f"two hosts of {worker.slice_name} claim worker id {worker.host_index}"
    return None


def slice_size(counts: Iterable[object], hosts: int) -> int:
    """Return the number of hosts of a complete slice; 0 if its hosts report different sizes.

    Args:
        counts: the sizes that its hosts report.
        hosts: how many of its hosts are there; its size if none reports one.
    """
    sizes = set(counts)
    if not sizes:
        return hosts
    size = sizes.pop()
    return size if isinstance(size, int) and not sizes else 0


def slice_defect(numbers: Sequence[int | None], size: int) -> str | None:
    """Return why a slice is not complete, or None.

    Args:
        numbers: the numbers of its hosts, in any order.
        size: the number of hosts of the complete slice; see `slice_size`.
    """
    if None in numbers:
        return "a host has no worker id"
    if size and set(numbers) == set(range(size)) and len(numbers) == size:
        return None
    if len(set(numbers)) != len(numbers):
        return "two hosts claim the same worker id"
    if not size:
        return "its hosts report different slice sizes"
    if missing := sorted(set(range(size)).difference(numbers)):
        some = ", ".join(map(str, missing[:8])) + (", …" if len(missing) > 8 else "")
        return f"host {some} of {size} is missing"
    if len(numbers) > size:
        return f"has more hosts than the {size} of its type"
    return None
