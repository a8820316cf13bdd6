"""Groups of workers by the value of an attribute: slices, parts of slices, racks, or single workers."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import chain

from iris_ray.model.constraints import AttributeValue
from iris_ray.model.parts import hosts_of_shape, part_of_host, shape_of_attribute, split_by
from iris_ray.model.workers import TOPOLOGY_LABEL, TPU_NAME, TPU_TOPOLOGY, TPU_VM_COUNT, Worker, string_attribute


class Group:
    """Workers that share a value of an attribute, with properties derived from them.

    `Grouping` makes a new group when a member is added, removed or changed. Within a group, only the free room changes.

    Attributes:
        name: the shared value.
        is_slice: whether it is a TPU slice, which is usable only if it is complete.
        shape: the shape of the part of a slice that the group is, such as ``2x4``; None for any other group.
        workers: the members; those of a slice in the order of host_index, others by slice, host_index and node_id.
        node_ids: the members' node ids, in the order of ``workers``.
        size: the number of hosts in the complete group.
        defect: why a slice, or a part of one, is incomplete; None if it is complete, and for other groups.
        taints: keys of the taints of any member.
        unhealthy: node_id → why the member takes no new tasks.
        foreign_use: node_id → the process outside iris_ray that uses the member's chips.
        suspected: members that may be lost.
        has_issues: whether a defect, taint, drain, foreign use or suspicion restricts the use of any member.
    """

    __slots__ = (
        "_chips_idle",
        "_idle",
        "_idle_boxes",
        "_room",
        "_shared",
        "_slices",
        "defect",
        "foreign_use",
        "has_issues",
        "is_slice",
        "name",
        "node_ids",
        "shape",
        "size",
        "suspected",
        "taints",
        "unhealthy",
        "workers",
    )

    def __init__(
        self,
        name: str,
        workers: Sequence[Worker],
        is_slice: bool,
        shape: str | None = None,
        slices: "Grouping | None" = None,
    ) -> None:
        self.name = name
        self.is_slice = is_slice
        self.shape = shape
        self._slices = slices
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
        self.defect = None
        if is_slice:
            self.defect = slice_defect([worker.host_index for worker in self.workers], self.size)
        elif shape is not None and len(workers) != hosts_of_shape(shape):
            self.defect = f"has {len(workers)} of its {hosts_of_shape(shape)} hosts"
        elif shape is not None and not _is_shared(TOPOLOGY_LABEL, self.workers):
            self.defect = f"its hosts report different values of {TOPOLOGY_LABEL}"
        self.has_issues = bool(self.defect or self.unhealthy or self.foreign_use or self.suspected or self.taints)
        self._room: dict[str, float] | None = None
        self._chips_idle: bool | None = None
        self._idle: frozenset[int] | None = None  # the numbers of the members without tasks that use chips
        self._idle_boxes: dict[frozenset[int], int] = {}  # results of `_idle_in`
        self._shared: dict[str, bool] = {}

    def shares(self, key: str) -> bool:
        """Return whether all members have the same value of an attribute, or none has the attribute."""
        if len(self.workers) == 1:
            return True
        shared = self._shared.get(key)
        if shared is None:
            shared = self._shared[key] = _is_shared(key, self.workers)
        return shared

    @property
    def splits(self) -> int:
        """The hosts of all larger parts, and of the whole slice, that are idle now and that a gang on a part splits."""
        first = self.workers[0]
        whole = self._slices.get(first.slice_name) if self._slices is not None and first.slice_name else None
        if self.shape is None or first.host_index is None or whole is None:
            return 0
        tpu_type, told = (
            string_attribute(first.attributes, TPU_TOPOLOGY),
            string_attribute(first.attributes, TOPOLOGY_LABEL),
        )
        larger = split_by(tpu_type or "", told, self.shape, first.host_index)
        return sum(map(whole._idle_in, larger))

    def _idle_in(self, hosts: frozenset[int]) -> int:
        """Return the number of these hosts, given by their numbers, if all of them are idle; else 0."""
        known = self._idle_boxes.get(hosts)
        if known is None:
            if self._idle is None:
                self._idle = frozenset(w.host_index for w in self.workers if w.chips_idle and w.host_index is not None)
            known = self._idle_boxes[hosts] = len(hosts) if hosts <= self._idle else 0
        return known

    def occupants_changed(self) -> None:
        """Invalidate the cached free resources."""
        self._room = self._chips_idle = self._idle = None
        self._idle_boxes.clear()

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
    """The workers grouped by an attribute; None makes every worker a group. Groups are made when first read.

    Workers do not carry the attributes that number the parts of their slices: these values follow from others.

    Args:
        key: the attribute.
        workers: the workers.
        slices: the slices of these workers, for groups that are parts of slices.

    Attributes:
        shape: the shape of the parts of slices that the groups are, or None.
    """

    def __init__(self, key: str | None, workers: Iterable[Worker] = (), slices: "Grouping | None" = None) -> None:
        self._key = key
        self._slices = slices
        self.shape = shape_of_attribute(key)
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
        if self.shape is not None:
            return part_name(worker, self.shape)
        value = worker.attributes.get(self._key)
        return None if value is None else group_name(value)

    def affected_by(self, changed: Iterable[Worker]) -> dict[str | None, None]:
        """Return the names of the groups whose evaluation depends on these workers, which have changed.

        A part's place among the free parts depends on the other hosts of its slice.
        """
        names = dict.fromkeys(map(self.name_of, changed))
        if self.shape is not None and self._slices is not None:
            for name in dict.fromkeys(worker.slice_name for worker in changed):
                names |= dict.fromkeys(map(self.name_of, self._slices.members(name or "")))
        return names

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
            group = self._groups[name] = Group(
                name, list(members.values()), self._key == TPU_NAME, self.shape, self._slices
            )
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


def part_name(worker: Worker, shape: str) -> str | None:
    """Return the name of the part of this shape that a worker belongs to, or None."""
    tpu_type, count = string_attribute(worker.attributes, TPU_TOPOLOGY), worker.attributes.get(TPU_VM_COUNT)
    if worker.slice_name is None or worker.host_index is None or tpu_type is None or count is None:
        return None
    told = string_attribute(worker.attributes, TOPOLOGY_LABEL)
    end = part_of_host(tpu_type, told, int(count.value), worker.host_index, shape)
    return None if end is None else worker.slice_name + end


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
