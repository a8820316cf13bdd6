"""An emulator of the Cloud TPU API v2, for tests: gRPC on loopback, with the types of the google-cloud-tpu package.

It is driven through the real client. Nothing happens by itself: `advance` takes every queued resource and node one step
further, and the state of each can be set. What the documentation of the API says about it is kept:

- A queued resource goes ACCEPTED → (WAITING_FOR_RESOURCES →) PROVISIONING → ACTIVE, and its node READY with it.
- It holds quota in every state, SUSPENDED and FAILED too, until it is deleted and gone.
- Without ``force`` only one without nodes can be deleted, or one that is ACCEPTED, FAILED or SUSPENDED.
- A request that comes again with the same request id gets the same operation and changes nothing.
"""

import threading
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent import futures
from dataclasses import dataclass, field
from typing import Any, Self

import grpc
from google.cloud import tpu_v2
from google.cloud.tpu_v2.services.tpu.transports import TpuGrpcTransport
from google.longrunning import operations_pb2
from google.protobuf import any_pb2, empty_pb2
from google.rpc import status_pb2

from iris_ray.errors import UnknownTPUTypeError
from iris_ray.model.topology import get_tpu_config

_State = tpu_v2.QueuedResourceState.State
_Initiator = tpu_v2.QueuedResourceState.StateInitiator
_READY, _HEALTHY = tpu_v2.Node.State.READY, tpu_v2.Node.Health.HEALTHY
_Code = grpc.StatusCode

_DELETABLE = {_State.ACCEPTED, _State.FAILED, _State.SUSPENDED}
_PAGE_SIZE = 100


@dataclass(slots=True)
class _Fault:
    """What befalls the next calls of a method (``*``: of all)."""

    method: str
    times: int
    delay_s: float = 0.0
    code: grpc.StatusCode | None = None


@dataclass(slots=True)
class _Operation:
    name: str
    result: Any
    done_at: float


class _Refusal(Exception):
    """The status that a call is answered with instead of a result."""

    def __init__(self, code: grpc.StatusCode, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(slots=True)
class CloudTpuServer:
    """One zone of the Cloud TPU API, on a port of its own on loopback; a context manager.

    Args:
        location: the one parent that it knows, ``projects/<project>/locations/<zone>``.
        quota_chips: what all resources together may hold; None: no limit.
        operation_s: seconds until a long-running operation is done.

    Attributes:
        in_stock: whether there is any free capacity; if not, queued resources wait.
        calls: (method, request) of every call that came, refused ones included.
        address: HOST:PORT.
    """

    location: str = "projects/test/locations/here"
    quota_chips: int | None = None
    operation_s: float = 0.0
    in_stock: bool = True
    calls: list[tuple[str, Any]] = field(default_factory=list)
    address: str = ""
    _nodes: dict[str, tpu_v2.Node] = field(default_factory=dict)
    _queue: dict[str, tpu_v2.QueuedResource] = field(default_factory=dict)
    _operations: dict[str, _Operation] = field(default_factory=dict)
    _by_request_id: dict[tuple[str, str], tuple[str, str]] = field(default_factory=dict)
    _faults: list[_Fault] = field(default_factory=list)
    _lock: threading.RLock = field(default_factory=threading.RLock)
    _server: Any = None

    def __enter__(self) -> Self:
        # Waiting calls hold threads: enough of them, or a delayed call would delay the others.
        self._server = grpc.server(futures.ThreadPoolExecutor(16, thread_name_prefix="cloud-tpu-server"))
        self._server.add_generic_rpc_handlers(self._handlers())
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._server.stop(grace=None).wait()

    def client(self) -> tpu_v2.TpuClient:
        """The real client, connected to this server."""
        return tpu_v2.TpuClient(transport=TpuGrpcTransport(channel=grpc.insecure_channel(self.address)))

    # -- what a test asks for --------------------------------------------------------------------------------------

    def fail(self, code: grpc.StatusCode, method: str = "*", times: int = 1) -> None:
        """Answer the next calls of a method, such as ``"GetNode"``, with an error."""
        with self._lock:
            self._faults.append(_Fault(method, times, code=code))

    def delay(self, seconds: float, method: str = "*", times: int = 1) -> None:
        """Let the next calls of a method wait before they are carried out."""
        with self._lock:
            self._faults.append(_Fault(method, times, delay_s=seconds))

    def heal(self) -> None:
        """Forget the failures and delays that were asked for."""
        with self._lock:
            self._faults.clear()

    def add_node(self, node_id: str, tpu_type: str = "v4-16") -> None:
        """A READY and healthy node that no queued resource has asked for."""
        with self._lock:
            self._nodes[node_id] = tpu_v2.Node(
                name=f"{self.location}/nodes/{node_id}",
                accelerator_type=tpu_type,
                state=_READY,
                health=_HEALTHY,
            )

    def set_node(
        self, node_id: str, state: tpu_v2.Node.State | None = None, health: tpu_v2.Node.Health | None = None
    ) -> None:
        """Set what the API says about a node."""
        with self._lock:
            node = self._nodes[node_id]
            node.state = node.state if state is None else state
            node.health = node.health if health is None else health

    def remove_node(self, node_id: str) -> None:
        with self._lock:
            del self._nodes[node_id]

    def set_queued(
        self, resource_id: str, state: tpu_v2.QueuedResourceState.State, by_service: bool = True, error: str = ""
    ) -> None:
        """Set the state of a queued resource; one that is SUSPENDED or FAILED has no nodes any more."""
        with self._lock:
            found = self._queue[resource_id]
            initiator = _Initiator.SERVICE if by_service else _Initiator.USER
            found.state = tpu_v2.QueuedResourceState(state=state, state_initiator=initiator)
            if state is _State.FAILED:
                status = status_pb2.Status(code=_Code.RESOURCE_EXHAUSTED.value[0], message=error)
                found.state.failed_data = tpu_v2.QueuedResourceState.FailedData(error=status)
            if state in (_State.SUSPENDED, _State.FAILED):
                self._drop_nodes(found)

    def add_queued(self, resource_id: str, tpu_type: str = "v4-16", state: Any = _State.ACTIVE) -> None:
        """A queued resource of one node of the same name, made by nobody's request."""
        with self._lock:
            self._add_queued(resource_id, _single_node(self.location, resource_id, tpu_type))
            self.set_queued(resource_id, state)
            if state is _State.ACTIVE:
                self._make_nodes(self._queue[resource_id])

    def queued_states(self) -> dict[str, str]:
        """The name of the state of every queued resource."""
        with self._lock:
            return {name: found.state.state.name for name, found in self._queue.items()}

    def queued(self, resource_id: str) -> tpu_v2.QueuedResource:
        with self._lock:
            return self._queue[resource_id]

    def node_states(self) -> dict[str, str]:
        with self._lock:
            return {name: node.state.name for name, node in self._nodes.items()}

    def count(self, method: str) -> int:
        """How many calls of a method have come."""
        with self._lock:
            return sum(called == method for called, _ in self.calls)

    def advance(self, steps: int = 1) -> None:
        """Let everything go one step further, that is not at its goal."""
        with self._lock:
            for _ in range(steps):
                for name in list(self._queue):
                    self._advance(name)

    def _advance(self, name: str) -> None:
        found = self._queue[name]
        match found.state.state:
            case _State.ACCEPTED | _State.WAITING_FOR_RESOURCES:
                following = _State.PROVISIONING if self.in_stock else _State.WAITING_FOR_RESOURCES
            case _State.PROVISIONING:
                following = _State.ACTIVE
                self._make_nodes(found)
            case _State.SUSPENDING:
                self._drop_nodes(found)
                found.state = tpu_v2.QueuedResourceState(
                    state=_State.SUSPENDED, state_initiator=found.state.state_initiator
                )
                return
            case _State.DELETING:
                self._drop_nodes(found)
                del self._queue[name]
                return
            case _:
                return
        found.state = tpu_v2.QueuedResourceState(state=following)

    # -- the API ---------------------------------------------------------------------------------------------------

    def _handlers(self) -> Sequence[grpc.GenericRpcHandler]:
        types = tpu_v2
        tpu: dict[str, tuple[Any, Callable[[Any], Any]]] = {
            "GetNode": (types.GetNodeRequest, self._get_node),
            "ListNodes": (types.ListNodesRequest, self._list_nodes),
            "CreateNode": (types.CreateNodeRequest, self._create_node),
            "DeleteNode": (types.DeleteNodeRequest, self._delete_node),
            "GetQueuedResource": (types.GetQueuedResourceRequest, self._get_queued),
            "ListQueuedResources": (types.ListQueuedResourcesRequest, self._list_queued),
            "CreateQueuedResource": (types.CreateQueuedResourceRequest, self._create_queued),
            "DeleteQueuedResource": (types.DeleteQueuedResourceRequest, self._delete_queued),
        }
        methods = {name: self._handler(name, request.deserialize, method) for name, (request, method) in tpu.items()}
        get_operation = self._handler(
            "GetOperation", operations_pb2.GetOperationRequest.FromString, self._get_operation
        )
        return (
            grpc.method_handlers_generic_handler("google.cloud.tpu.v2.Tpu", methods),
            grpc.method_handlers_generic_handler("google.longrunning.Operations", {"GetOperation": get_operation}),
        )

    def _handler(self, name: str, deserialize: Callable[[bytes], Any], method: Callable[[Any], Any]) -> Any:
        def handle(request: Any, context: grpc.ServicerContext) -> Any:
            with self._lock:
                self.calls.append((name, request))
                fault = self._next_fault(name)
            try:
                if fault is not None:
                    time.sleep(fault.delay_s)
                    if fault.code is not None:
                        raise _Refusal(fault.code, f"{name}: a test asked for {fault.code.name}")
                with self._lock:
                    return method(request)
            except _Refusal as refusal:
                context.abort(refusal.code, str(refusal))

        return grpc.unary_unary_rpc_method_handler(handle, deserialize, _serialize)

    def _next_fault(self, method: str) -> _Fault | None:
        for fault in self._faults:
            if fault.method in (method, "*"):
                fault.times -= 1
                if fault.times <= 0:
                    self._faults.remove(fault)
                return fault
        return None

    def _get_node(self, request: tpu_v2.GetNodeRequest) -> tpu_v2.Node:
        node: tpu_v2.Node = self._found(self._nodes, "nodes", request.name)
        return node

    def _list_nodes(self, request: tpu_v2.ListNodesRequest) -> tpu_v2.ListNodesResponse:
        nodes, token = self._page(list(self._nodes.values()), request)
        return tpu_v2.ListNodesResponse(nodes=nodes, next_page_token=token)

    def _create_node(self, request: tpu_v2.CreateNodeRequest) -> operations_pb2.Operation:
        self._require_parent(request.parent)
        if request.node_id in self._nodes:
            raise _Refusal(_Code.ALREADY_EXISTS, f"node {request.node_id} exists")
        self._require_quota(_chips(request.node.accelerator_type))
        self.add_node(request.node_id, request.node.accelerator_type)
        return self._operation(self._nodes[request.node_id])

    def _delete_node(self, request: tpu_v2.DeleteNodeRequest) -> operations_pb2.Operation:
        node = self._found(self._nodes, "nodes", request.name)
        if node.queued_resource:
            raise _Refusal(_Code.FAILED_PRECONDITION, f"{request.name} belongs to {node.queued_resource}")
        del self._nodes[request.name.rpartition("/")[2]]
        return self._operation(empty_pb2.Empty())

    def _get_queued(self, request: tpu_v2.GetQueuedResourceRequest) -> tpu_v2.QueuedResource:
        found: tpu_v2.QueuedResource = self._found(self._queue, "queuedResources", request.name)
        return found

    def _list_queued(self, request: tpu_v2.ListQueuedResourcesRequest) -> tpu_v2.ListQueuedResourcesResponse:
        found, token = self._page(list(self._queue.values()), request)
        return tpu_v2.ListQueuedResourcesResponse(queued_resources=found, next_page_token=token)

    def _create_queued(self, request: tpu_v2.CreateQueuedResourceRequest) -> operations_pb2.Operation:
        self._require_parent(request.parent)
        if (known := self._repeated("create", request.request_id, request.queued_resource_id)) is not None:
            return known
        if not request.queued_resource_id or request.queued_resource_id in self._queue:
            raise _Refusal(_Code.ALREADY_EXISTS, f"queued resource {request.queued_resource_id!r} exists")
        if not request.queued_resource.tpu.node_spec:
            raise _Refusal(_Code.INVALID_ARGUMENT, "tpu.node_spec is empty")
        for spec in request.queued_resource.tpu.node_spec:
            if not spec.node.runtime_version:
                raise _Refusal(_Code.INVALID_ARGUMENT, "node.runtime_version is required")
        self._require_quota(_chips_of(request.queued_resource))
        self._add_queued(request.queued_resource_id, request.queued_resource)
        operation = self._operation(self._queue[request.queued_resource_id])
        self._by_request_id["create", request.request_id] = request.queued_resource_id, operation.name
        return operation

    def _delete_queued(self, request: tpu_v2.DeleteQueuedResourceRequest) -> operations_pb2.Operation:
        name = request.name.rpartition("/")[2]
        if (known := self._repeated("delete", request.request_id, name)) is not None:
            return known
        found = self._found(self._queue, "queuedResources", request.name)
        has_nodes = any(node.queued_resource == found.name for node in self._nodes.values())
        if not request.force and has_nodes and found.state.state not in _DELETABLE:
            raise _Refusal(_Code.FAILED_PRECONDITION, f"{name} is {found.state.state.name}; delete its nodes, or force")
        found.state = tpu_v2.QueuedResourceState(state=_State.DELETING, state_initiator=_Initiator.USER)
        operation = self._operation(empty_pb2.Empty())
        self._by_request_id["delete", request.request_id] = name, operation.name
        return operation

    def _get_operation(self, request: operations_pb2.GetOperationRequest) -> operations_pb2.Operation:
        if request.name not in self._operations:
            raise _Refusal(_Code.NOT_FOUND, f"no operation {request.name}")
        return self._view(self._operations[request.name])

    # -- its parts -------------------------------------------------------------------------------------------------

    def _found(self, among: dict[str, Any], kind: str, name: str) -> Any:
        parent, _, last = name.rpartition(f"/{kind}/")
        if parent != self.location or last not in among:
            raise _Refusal(_Code.NOT_FOUND, f"{name} was not found")
        return among[last]

    def _require_parent(self, parent: str) -> None:
        if parent != self.location:
            raise _Refusal(_Code.PERMISSION_DENIED, f"no permission on {parent}, or it does not exist")

    def _page(self, all_of_them: list[Any], request: Any) -> tuple[list[Any], str]:
        self._require_parent(request.parent)
        start = int(request.page_token or 0)
        end = start + (request.page_size or _PAGE_SIZE)
        return all_of_them[start:end], str(end) if end < len(all_of_them) else ""

    def _require_quota(self, chips: int) -> None:
        in_queue = sum(_chips_of(found) for found in self._queue.values())
        alone = sum(_chips(node.accelerator_type) for node in self._nodes.values() if not node.queued_resource)
        if self.quota_chips is not None and in_queue + alone + chips > self.quota_chips:
            raise _Refusal(_Code.RESOURCE_EXHAUSTED, f"quota: {in_queue + alone} + {chips} chips of {self.quota_chips}")

    def _repeated(self, verb: str, request_id: str, name: str) -> operations_pb2.Operation | None:
        """The operation of the same request, if it has come before."""
        if not request_id:
            return None
        try:
            uuid.UUID(request_id)
        except ValueError:
            raise _Refusal(_Code.INVALID_ARGUMENT, f"request_id {request_id!r} is no UUID") from None
        about, operation = self._by_request_id.get((verb, request_id), (name, ""))
        if about != name:
            raise _Refusal(_Code.INVALID_ARGUMENT, f"request_id {request_id} was used for {about}")
        return self._view(self._operations[operation]) if operation else None

    def _add_queued(self, name: str, resource: tpu_v2.QueuedResource) -> None:
        resource.name = f"{self.location}/queuedResources/{name}"
        resource.state = tpu_v2.QueuedResourceState(state=_State.ACCEPTED)
        resource.create_time = {"seconds": int(time.time())}
        self._queue[name] = resource

    def _make_nodes(self, resource: tpu_v2.QueuedResource) -> None:
        for spec in resource.tpu.node_spec:
            node = tpu_v2.Node(spec.node)
            node.name, node.queued_resource = f"{self.location}/nodes/{spec.node_id}", resource.name
            node.state, node.health = tpu_v2.Node.State(_READY), tpu_v2.Node.Health(_HEALTHY)
            self._nodes[spec.node_id] = node

    def _drop_nodes(self, resource: tpu_v2.QueuedResource) -> None:
        self._nodes = {n: node for n, node in self._nodes.items() if node.queued_resource != resource.name}

    def _operation(self, result: Any) -> operations_pb2.Operation:
        name = f"{self.location}/operations/operation-{len(self._operations)}"
        self._operations[name] = _Operation(name, result, time.monotonic() + self.operation_s)
        return self._view(self._operations[name])

    def _view(self, operation: _Operation) -> operations_pb2.Operation:
        if time.monotonic() < operation.done_at:
            return operations_pb2.Operation(name=operation.name, done=False)
        packed = any_pb2.Any()
        packed.Pack(_raw(operation.result))
        return operations_pb2.Operation(name=operation.name, done=True, response=packed)


def _single_node(location: str, name: str, tpu_type: str) -> tpu_v2.QueuedResource:
    node = tpu_v2.Node(accelerator_type=tpu_type, runtime_version="test")
    spec = tpu_v2.QueuedResource.Tpu.NodeSpec(parent=location, node_id=name, node=node)
    return tpu_v2.QueuedResource(tpu=tpu_v2.QueuedResource.Tpu(node_spec=[spec]), spot={})


def _chips_of(resource: tpu_v2.QueuedResource) -> int:
    return sum(
        _chips(spec.node.accelerator_type) * max(1, spec.multislice_params.node_count)
        for spec in resource.tpu.node_spec
    )


def _chips(tpu_type: str) -> int:
    try:
        return get_tpu_config(tpu_type).chip_count
    except UnknownTPUTypeError as error:
        raise _Refusal(_Code.INVALID_ARGUMENT, str(error)) from None


def _raw(message: Any) -> Any:
    """The protobuf message, which the package's own types wrap."""
    return type(message).pb(message) if hasattr(type(message), "pb") else message


def _serialize(message: Any) -> bytes:
    data: bytes = _raw(message).SerializeToString()
    return data
