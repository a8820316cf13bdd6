"""The state of a zone: nodes, queued resources and quota."""

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
from google.cloud import tpu_v2
from google.rpc import status_pb2

from iris_ray.errors import UnknownTPUTypeError
from iris_ray.model.topology import get_tpu_config


class ApiRefusal(Exception):
    """The status that answers a call instead of a result."""

    def __init__(self, code: grpc.StatusCode, message: str) -> None:
        super().__init__(message)
        self.code = code


State = tpu_v2.QueuedResourceState.State
Initiator = tpu_v2.QueuedResourceState.StateInitiator
_READY, _HEALTHY = tpu_v2.Node.State.READY, tpu_v2.Node.Health.HEALTHY
_PAGE_SIZE = 100


@dataclass
class Zone:
    """One zone: a test sets its state, and the API reads and changes it. All methods are thread-safe.

    Args:
        location: its only valid parent, ``projects/<project>/locations/<zone>``.
        quota_chips: the limit of chips that all resources hold together; None: no limit.
        operation_s: seconds until a long-running operation is done.
        types: the accelerator types that it has.
        reservations: the chips of each reservation, by its full name.

    Attributes:
        in_stock: whether there is free capacity; if not, queued resources wait.
        is_unreachable: whether lists of queued resources are empty, and say that the zone could not be reached.
    """

    location: str = "projects/test/locations/here"
    quota_chips: int | None = None
    operation_s: float = 0.0
    types: Sequence[str] = ("v4-16", "v6e-8", "v6e-16", "v6e-32", "v6e-256")
    reservations: dict[str, int] = field(default_factory=dict)
    in_stock: bool = True
    is_unreachable: bool = False
    nodes: dict[str, tpu_v2.Node] = field(default_factory=dict)
    queue: dict[str, tpu_v2.QueuedResource] = field(default_factory=dict)
    lock: threading.RLock = field(default_factory=threading.RLock)

    # -- nodes -----------------------------------------------------------------------------------------------------

    def add_node(self, node_id: str, tpu_type: str = "v4-16") -> None:
        """Add a READY and healthy node that belongs to no queued resource."""
        with self.lock:
            self.nodes[node_id] = tpu_v2.Node(
                name=f"{self.location}/nodes/{node_id}",
                accelerator_type=tpu_type,
                state=_READY,
                health=_HEALTHY,
            )

    def set_node(self, node_id: str, state: int | None = None, health: int | None = None) -> None:
        """Set the `Node.State` and `Node.Health` of a node; None leaves one as it is."""
        with self.lock:
            node = self.nodes[node_id]
            node.state = node.state if state is None else tpu_v2.Node.State(state)
            node.health = node.health if health is None else tpu_v2.Node.Health(health)

    def remove_node(self, node_id: str) -> None:
        with self.lock:
            del self.nodes[node_id]

    def node_states(self) -> dict[str, str]:
        with self.lock:
            return {name: node.state.name for name, node in self.nodes.items()}

    # -- queued resources ------------------------------------------------------------------------------------------

    def add_queued(self, resource_id: str, tpu_type: str = "v4-16", state: Any = State.ACTIVE) -> None:
        """Add a queued resource of one node of the same name, without a request for it."""
        with self.lock:
            self.accept(resource_id, _single_node(self.location, resource_id, tpu_type))
            self.set_queued(resource_id, state)
            if state is State.ACTIVE:
                self._make_nodes(self.queue[resource_id])

    def accept(self, resource_id: str, resource: tpu_v2.QueuedResource) -> None:
        """Put a queued resource into the queue, ACCEPTED."""
        with self.lock:
            resource.name = f"{self.location}/queuedResources/{resource_id}"
            resource.state = tpu_v2.QueuedResourceState(state=State.ACCEPTED)
            resource.create_time = {"seconds": int(time.time())}
            self.queue[resource_id] = resource

    def set_queued(self, resource_id: str, state: int, by_service: bool = True, error: str = "") -> None:
        """Set the `QueuedResourceState.State` of a queued resource; a SUSPENDED or FAILED one loses its nodes."""
        with self.lock:
            found = self.queue[resource_id]
            initiator = Initiator.SERVICE if by_service else Initiator.USER
            found.state = tpu_v2.QueuedResourceState(state=state, state_initiator=initiator)
            if state is State.FAILED:
                status = status_pb2.Status(code=grpc.StatusCode.RESOURCE_EXHAUSTED.value[0], message=error)
                found.state.failed_data = tpu_v2.QueuedResourceState.FailedData(error=status)
            if state in (State.SUSPENDED, State.FAILED):
                self._drop_nodes(found)

    def queued(self, resource_id: str) -> tpu_v2.QueuedResource:
        with self.lock:
            return self.queue[resource_id]

    def queued_states(self) -> dict[str, str]:
        """Return the name of the state of every queued resource."""
        with self.lock:
            return {name: found.state.state.name for name, found in self.queue.items()}

    def advance(self, steps: int = 1) -> None:
        """Take every queued resource that is not at its goal one step further."""
        with self.lock:
            for _ in range(steps):
                for name in list(self.queue):
                    self._advance(name)

    def _advance(self, name: str) -> None:
        found = self.queue[name]
        match found.state.state:
            case State.ACCEPTED | State.WAITING_FOR_RESOURCES if not self._fits_reservation(found):
                self.set_queued(name, State.FAILED, error=f"reservation {found.reservation_name} is full")
                return
            case State.ACCEPTED | State.WAITING_FOR_RESOURCES:
                following = State.PROVISIONING if self.in_stock else State.WAITING_FOR_RESOURCES
            case State.PROVISIONING:
                following = State.ACTIVE
                self._make_nodes(found)
            case State.SUSPENDING:
                self._drop_nodes(found)
                found.state = tpu_v2.QueuedResourceState(
                    state=State.SUSPENDED, state_initiator=found.state.state_initiator
                )
                return
            case State.DELETING:
                self._drop_nodes(found)
                del self.queue[name]
                return
            case _:
                return
        found.state = tpu_v2.QueuedResourceState(state=following)

    def _make_nodes(self, resource: tpu_v2.QueuedResource) -> None:
        for spec in resource.tpu.node_spec:
            node = tpu_v2.Node(spec.node)
            node.name, node.queued_resource = f"{self.location}/nodes/{spec.node_id}", resource.name
            node.state, node.health = tpu_v2.Node.State(_READY), tpu_v2.Node.Health(_HEALTHY)
            self.nodes[spec.node_id] = node

    def _drop_nodes(self, resource: tpu_v2.QueuedResource) -> None:
        self.nodes = {n: node for n, node in self.nodes.items() if node.queued_resource != resource.name}

    def _fits_reservation(self, resource: tpu_v2.QueuedResource) -> bool:
        """Return whether its reservation, if it has one, has chips left for it."""
        name = resource.reservation_name
        used = sum(
            chips_of(other)
            for other in self.queue.values()
            if other.reservation_name == name and other.state.state in (State.PROVISIONING, State.ACTIVE)
        )
        return not name or used + chips_of(resource) <= self.reservations[name]

    # -- rules that the API holds to; each raises ApiRefusal ----------------------------------------------------------

    def find(self, among: Mapping[str, Any], kind: str, name: str) -> Any:
        """Return the node or queued resource with a full name."""
        parent, _, last = name.rpartition(f"/{kind}/")
        if parent != self.location or last not in among:
            raise ApiRefusal(grpc.StatusCode.NOT_FOUND, f"{name} was not found")
        return among[last]

    def page(self, everything: list[Any], request: Any) -> tuple[list[Any], str]:
        """Return one page of a list, and the token of the next one; an empty token after the last."""
        self.require_parent(request.parent)
        start = int(request.page_token or 0)
        end = start + (request.page_size or _PAGE_SIZE)
        return everything[start:end], str(end) if end < len(everything) else ""

    def require_parent(self, parent: str) -> None:
        if parent != self.location:
            raise ApiRefusal(grpc.StatusCode.PERMISSION_DENIED, f"no permission on {parent}, or it does not exist")

    def require_reservation(self, name: str) -> None:
        if name and name not in self.reservations:
            raise ApiRefusal(grpc.StatusCode.NOT_FOUND, f"reservation {name} was not found")

    def require_quota(self, chips: int) -> None:
        in_queue = sum(chips_of(found) for found in self.queue.values())
        alone = sum(chips_of_type(node.accelerator_type) for node in self.nodes.values() if not node.queued_resource)
        if self.quota_chips is not None and in_queue + alone + chips > self.quota_chips:
            raise ApiRefusal(
                grpc.StatusCode.RESOURCE_EXHAUSTED, f"quota: {in_queue + alone} + {chips} chips of {self.quota_chips}"
            )


def chips_of(resource: tpu_v2.QueuedResource) -> int:
    """Return how many chips a queued resource holds."""
    return sum(
        chips_of_type(spec.node.accelerator_type) * max(1, spec.multislice_params.node_count)
        for spec in resource.tpu.node_spec
    )


def chips_of_type(tpu_type: str) -> int:
    try:
        return get_tpu_config(tpu_type).chip_count
    except UnknownTPUTypeError as error:
        raise ApiRefusal(grpc.StatusCode.INVALID_ARGUMENT, str(error)) from None


def _single_node(location: str, name: str, tpu_type: str) -> tpu_v2.QueuedResource:
    node = tpu_v2.Node(accelerator_type=tpu_type, runtime_version="test")
    spec = tpu_v2.QueuedResource.Tpu.NodeSpec(parent=location, node_id=name, node=node)
    return tpu_v2.QueuedResource(tpu=tpu_v2.QueuedResource.Tpu(node_spec=[spec]), spot={})
