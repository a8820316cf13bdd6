"""Names the slices of single hosts whose labels name one slice. The next Controller uses the same names."""

import json
from collections.abc import Set
from dataclasses import replace

from iris_ray.model.constraints import AttributeValue
from iris_ray.model.workers import TPU_NAME, TPU_VM_COUNT
from iris_ray.state.events import WorkerRegisteredEvent


def own_name(name: str, node_id: str) -> str:
    """Return a unique name for the slice of one host."""
    return f"{name}-{node_id[:8]}"


class OwnSlices:
    """The names of the slices of single hosts. The first host of a name keeps it; later ones get their own.

    Nobody can tell later which host was first: Ray lists its nodes in any order. So the names of hosts that share a
    label are recorded, else two hosts would swap their slices, with the jobs on them, when a new Controller begins.

    Attributes:
        version: grows with each change of what `to_json` returns.
    """

    def __init__(self) -> None:
        self.version = 0
        self._names: dict[str, str] = {}  # node id → the name of its slice
        self._hosts: dict[str, str] = {}  # name of a slice → node id
        self._shared: set[str] = set()  # the hosts that share a label with another one, or did
        self._missing: Set[str] = frozenset()

    def named(self, host: WorkerRegisteredEvent) -> WorkerRegisteredEvent:
        """Return a host with the name that its slice keeps as long as the host lives."""
        count = host.attributes.get(TPU_VM_COUNT)
        if count is None or count.value != 1:
            return host
        name = self._names.get(host.node_id)
        if name is None:
            name = str(host.attributes[TPU_NAME].value)
            if (first := self._hosts.get(name)) is not None:
                self._shared |= {first, host.node_id}
                self.version += 1
                name = own_name(name, host.node_id)
            self._names[host.node_id] = name
            self._hosts[name] = host.node_id
        return replace(host, attributes={**host.attributes, TPU_NAME: AttributeValue(name)})

    def forget(self, node_id: str) -> None:
        """Forget a host that is lost; another one may have its slice's name."""
        self._hosts.pop(self._names.pop(node_id, ""), None)
        if node_id in self._shared:
            self._shared.discard(node_id)
            self.version += 1

    def forget_missing(self, listed: Set[str]) -> None:
        """Forget the hosts that are missing in this reading of the node table, and were in the one before."""
        missing = self._names.keys() - listed
        for node_id in missing & self._missing:
            self.forget(node_id)
        self._missing = missing

    def to_json(self) -> bytes:
        """Return the names of the hosts that share a label: a JSON object, node id → name."""
        return json.dumps({node_id: self._names[node_id] for node_id in sorted(self._shared)}).encode()

    def restore(self, recorded: bytes) -> None:
        """Take up the names that `to_json` has returned."""
        names = json.loads(recorded)
        if not all(isinstance(text, str) for pair in names.items() for text in pair):
            raise ValueError("it is not a JSON object of node ids and names")
        self._names |= names
        self._hosts |= {name: node_id for node_id, name in names.items()}
        self._shared |= names.keys()
        self.version += 1
