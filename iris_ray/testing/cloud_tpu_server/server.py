"""The gRPC server of the emulator."""

import time
import uuid
from collections.abc import Callable
from concurrent import futures
from dataclasses import dataclass, field
from typing import Any, Self

import grpc
from google.cloud import tpu_v2
from google.cloud.tpu_v2.services.tpu.transports import TpuGrpcTransport
from google.longrunning import operations_pb2
from google.protobuf import any_pb2, empty_pb2

from iris_ray.testing.cloud_tpu_server.zone import ApiRefusal, Initiator, State, Zone, chips_of, chips_of_type
from iris_ray.testing.servers import FaultyApi

# -- operations --------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Operations:
    """The long-running operations of a zone, and the request ids that make repeated requests harmless."""

    location: str
    _operations: dict[str, tuple[Any, float]] = field(default_factory=dict)
    """By name: the result, and when the operation is done, on the monotonic clock."""
    _by_request_id: dict[str, tuple[str, str]] = field(default_factory=dict)

    def begin(self, result: Any, duration_s: float) -> operations_pb2.Operation:
        """Begin an operation that ends after ``duration_s`` seconds, with this result."""
        name = f"{self.location}/operations/operation-{len(self._operations)}"
        self._operations[name] = result, time.monotonic() + duration_s
        return self.get(name)

    def get(self, name: str) -> operations_pb2.Operation:
        """Return the state of an operation; raises ApiRefusal if there is no such operation."""
        if name not in self._operations:
            raise ApiRefusal(grpc.StatusCode.NOT_FOUND, f"no operation {name}")
        result, done_at = self._operations[name]
        if time.monotonic() < done_at:
            return operations_pb2.Operation(name=name, done=False)
        packed = any_pb2.Any()
        packed.Pack(raw(result))
        return operations_pb2.Operation(name=name, done=True, response=packed)

    def once(
        self, request_id: str, name: str, begin: Callable[[], operations_pb2.Operation]
    ) -> operations_pb2.Operation:
        """Return the operation about the resource ``name`` that this or an earlier request with the same id began.

        Raises:
            ApiRefusal: the id is not a UUID, or an earlier request used it for another resource.
        """
        if not request_id:
            return begin()
        try:
            uuid.UUID(request_id)
        except ValueError:
            raise ApiRefusal(grpc.StatusCode.INVALID_ARGUMENT, f"request_id {request_id!r} is not a UUID") from None
        if request_id not in self._by_request_id:
            self._by_request_id[request_id] = name, begin().name
        about, operation = self._by_request_id[request_id]
        if about != name:
            raise ApiRefusal(grpc.StatusCode.INVALID_ARGUMENT, f"request_id {request_id} was used for {about}")
        return self.get(operation)


def raw(message: Any) -> Any:
    """Return the protobuf message inside one of the package's own types, or the message itself."""
    return type(message).pb(message) if hasattr(type(message), "pb") else message


# -- api ---------------------------------------------------------------------------------------------------------------

Deserialize = Callable[[bytes], Any]
Method = Callable[[Any], Any]

_Code = grpc.StatusCode
_DELETABLE = {State.ACCEPTED, State.FAILED, State.SUSPENDED}


class TpuApi:
    """Answers requests about a zone. Every method may raise `ApiRefusal`; the caller holds the zone's lock."""

    def __init__(self, zone: Zone) -> None:
        self._zone = zone
        self._operations = Operations(zone.location)

    def methods(self) -> dict[str, dict[str, tuple[Deserialize, Method]]]:
        """Return the parser of the request and the handler of each method, by service and name."""
        of_tpus: dict[str, Method] = {
            "GetNode": self._get_node,
            "ListNodes": self._list_nodes,
            "CreateNode": self._create_node,
            "DeleteNode": self._delete_node,
            "ListAcceleratorTypes": self._list_types,
            "GetQueuedResource": self._get_queued,
            "ListQueuedResources": self._list_queued,
            "CreateQueuedResource": self._create_queued,
            "DeleteQueuedResource": self._delete_queued,
        }
        return {
            "google.cloud.tpu.v2.Tpu": {
                name: (getattr(tpu_v2, f"{name}Request").deserialize, method) for name, method in of_tpus.items()
            },
            "google.longrunning.Operations": {
                "GetOperation": (operations_pb2.GetOperationRequest.FromString, self._get_operation),
            },
        }

    def _get_node(self, request: tpu_v2.GetNodeRequest) -> tpu_v2.Node:
        node: tpu_v2.Node = self._zone.find(self._zone.nodes, "nodes", request.name)
        return node

    def _list_nodes(self, request: tpu_v2.ListNodesRequest) -> tpu_v2.ListNodesResponse:
        nodes, token = self._zone.page(list(self._zone.nodes.values()), request)
        return tpu_v2.ListNodesResponse(nodes=nodes, next_page_token=token)

    def _create_node(self, request: tpu_v2.CreateNodeRequest) -> operations_pb2.Operation:
        self._zone.require_parent(request.parent)
        if request.node_id in self._zone.nodes:
            raise ApiRefusal(_Code.ALREADY_EXISTS, f"node {request.node_id} exists")
        self._zone.require_quota(chips_of_type(request.node.accelerator_type))
        self._zone.add_node(request.node_id, request.node.accelerator_type)
        return self._begin(self._zone.nodes[request.node_id])

    def _delete_node(self, request: tpu_v2.DeleteNodeRequest) -> operations_pb2.Operation:
        node = self._zone.find(self._zone.nodes, "nodes", request.name)
        if node.queued_resource:
            raise ApiRefusal(_Code.FAILED_PRECONDITION, f"{request.name} belongs to {node.queued_resource}")
        self._zone.remove_node(request.name.rpartition("/")[2])
        return self._begin(empty_pb2.Empty())

    def _list_types(self, request: tpu_v2.ListAcceleratorTypesRequest) -> tpu_v2.ListAcceleratorTypesResponse:
        kinds = [
            tpu_v2.AcceleratorType(name=f"{self._zone.location}/acceleratorTypes/{name}", type_=name)
            for name in self._zone.types
        ]
        page, token = self._zone.page(kinds, request)
        return tpu_v2.ListAcceleratorTypesResponse(accelerator_types=page, next_page_token=token)

    def _get_queued(self, request: tpu_v2.GetQueuedResourceRequest) -> tpu_v2.QueuedResource:
        found: tpu_v2.QueuedResource = self._zone.find(self._zone.queue, "queuedResources", request.name)
        return found

    def _list_queued(self, request: tpu_v2.ListQueuedResourcesRequest) -> tpu_v2.ListQueuedResourcesResponse:
        found, token = self._zone.page(list(self._zone.queue.values()), request)
        if self._zone.is_unreachable:
            return tpu_v2.ListQueuedResourcesResponse(unreachable=[self._zone.location])
        return tpu_v2.ListQueuedResourcesResponse(queued_resources=found, next_page_token=token)

    def _create_queued(self, request: tpu_v2.CreateQueuedResourceRequest) -> operations_pb2.Operation:
        self._zone.require_parent(request.parent)
        name = request.queued_resource_id
        return self._operations.once(request.request_id, f"new {name}", lambda: self._queue(name, request))

    def _queue(self, name: str, request: tpu_v2.CreateQueuedResourceRequest) -> operations_pb2.Operation:
        zone = self._zone
        if not name or name in zone.queue:
            raise ApiRefusal(_Code.ALREADY_EXISTS, f"queued resource {name!r} exists")
        if not request.queued_resource.tpu.node_spec:
            raise ApiRefusal(_Code.INVALID_ARGUMENT, "tpu.node_spec is empty")
        for spec in request.queued_resource.tpu.node_spec:
            if not spec.node.runtime_version:
                raise ApiRefusal(_Code.INVALID_ARGUMENT, "node.runtime_version is required")
        zone.require_quota(chips_of(request.queued_resource))
        zone.require_reservation(request.queued_resource.reservation_name)
        zone.accept(name, request.queued_resource)
        return self._begin(zone.queue[name])

    def _delete_queued(self, request: tpu_v2.DeleteQueuedResourceRequest) -> operations_pb2.Operation:
        return self._operations.once(request.request_id, request.name, lambda: self._unqueue(request))

    def _unqueue(self, request: tpu_v2.DeleteQueuedResourceRequest) -> operations_pb2.Operation:
        found = self._zone.find(self._zone.queue, "queuedResources", request.name)
        has_nodes = any(node.queued_resource == found.name for node in self._zone.nodes.values())
        if not request.force and has_nodes and found.state.state not in _DELETABLE:
            raise ApiRefusal(
                _Code.FAILED_PRECONDITION, f"{found.name} is {found.state.state.name}; delete its nodes, or force"
            )
        found.state = tpu_v2.QueuedResourceState(state=State.DELETING, state_initiator=Initiator.USER)
        return self._begin(empty_pb2.Empty())

    def _get_operation(self, request: operations_pb2.GetOperationRequest) -> operations_pb2.Operation:
        return self._operations.get(request.name)

    def _begin(self, result: Any) -> operations_pb2.Operation:
        return self._operations.begin(result, self._zone.operation_s)


# -- server ------------------------------------------------------------------------------------------------------------


@dataclass
class CloudTpuServer(FaultyApi[grpc.StatusCode], Zone):
    """One zone of the Cloud TPU API, on a port of its own on loopback; a context manager."""

    _server: Any = None

    def __enter__(self) -> Self:
        # Waiting calls hold threads: enough of them, or a delayed call would delay the others.
        self._server = grpc.server(futures.ThreadPoolExecutor(16, thread_name_prefix="cloud-tpu-server"))
        for service, methods in TpuApi(self).methods().items():
            handlers = {name: self._handler(name, read, answer) for name, (read, answer) in methods.items()}
            self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._server.stop(grace=None).wait()

    def client(self) -> tpu_v2.TpuClient:
        """Return the real client, connected to this server."""
        return tpu_v2.TpuClient(transport=TpuGrpcTransport(channel=grpc.insecure_channel(self.address)))

    def _handler(self, name: str, read: Deserialize, answer: Method) -> Any:
        def handle(request: Any, context: grpc.ServicerContext) -> Any:
            fault = self.take_fault(name, request)
            try:
                if fault is not None:
                    time.sleep(fault.delay_s)
                    if fault.code is not None:
                        raise ApiRefusal(fault.code, f"{name}: a test asked for {fault.code.name}")
                with self.lock:
                    return answer(request)
            except ApiRefusal as refusal:
                context.abort(refusal.code, str(refusal))

        return grpc.unary_unary_rpc_method_handler(handle, read, _serialize)


def _serialize(message: Any) -> bytes:
    data: bytes = raw(message).SerializeToString()
    return data
