"""The methods of the API that the emulator offers."""

from collections.abc import Callable
from typing import Any

import grpc
from google.cloud import tpu_v2
from google.longrunning import operations_pb2
from google.protobuf import empty_pb2

from iris_ray.testing.cloud_tpu_server.operations import Operations
from iris_ray.testing.cloud_tpu_server.refusal import Refusal
from iris_ray.testing.cloud_tpu_server.zone import Initiator, State, Zone, chips_of, chips_of_type

Deserialize = Callable[[bytes], Any]
Method = Callable[[Any], Any]

_Code = grpc.StatusCode
_DELETABLE = {State.ACCEPTED, State.FAILED, State.SUSPENDED}


class Api:
    """Answers requests about a zone. Every method may raise `Refusal`; the caller holds the zone's lock."""

    def __init__(self, zone: Zone) -> None:
        self._zone = zone
        self._operations = Operations(zone.location)

    def methods(self) -> dict[str, dict[str, tuple[Deserialize, Method]]]:
        """Return, by service and name, how each method reads its request, and what answers it."""
        types = tpu_v2
        return {
            "google.cloud.tpu.v2.Tpu": {
                "GetNode": (types.GetNodeRequest.deserialize, self._get_node),
                "ListNodes": (types.ListNodesRequest.deserialize, self._list_nodes),
                "CreateNode": (types.CreateNodeRequest.deserialize, self._create_node),
                "DeleteNode": (types.DeleteNodeRequest.deserialize, self._delete_node),
                "GetQueuedResource": (types.GetQueuedResourceRequest.deserialize, self._get_queued),
                "ListQueuedResources": (types.ListQueuedResourcesRequest.deserialize, self._list_queued),
                "CreateQueuedResource": (types.CreateQueuedResourceRequest.deserialize, self._create_queued),
                "DeleteQueuedResource": (types.DeleteQueuedResourceRequest.deserialize, self._delete_queued),
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
            raise Refusal(_Code.ALREADY_EXISTS, f"node {request.node_id} exists")
        self._zone.require_quota(chips_of_type(request.node.accelerator_type))
        self._zone.add_node(request.node_id, request.node.accelerator_type)
        return self._begin(self._zone.nodes[request.node_id])

    def _delete_node(self, request: tpu_v2.DeleteNodeRequest) -> operations_pb2.Operation:
        node = self._zone.find(self._zone.nodes, "nodes", request.name)
        if node.queued_resource:
            raise Refusal(_Code.FAILED_PRECONDITION, f"{request.name} belongs to {node.queued_resource}")
        self._zone.remove_node(request.name.rpartition("/")[2])
        return self._begin(empty_pb2.Empty())

    def _get_queued(self, request: tpu_v2.GetQueuedResourceRequest) -> tpu_v2.QueuedResource:
        found: tpu_v2.QueuedResource = self._zone.find(self._zone.queue, "queuedResources", request.name)
        return found

    def _list_queued(self, request: tpu_v2.ListQueuedResourcesRequest) -> tpu_v2.ListQueuedResourcesResponse:
        found, token = self._zone.page(list(self._zone.queue.values()), request)
        return tpu_v2.ListQueuedResourcesResponse(queued_resources=found, next_page_token=token)

    def _create_queued(self, request: tpu_v2.CreateQueuedResourceRequest) -> operations_pb2.Operation:
        zone, name = self._zone, request.queued_resource_id
        zone.require_parent(request.parent)
        if (known := self._operations.of_request("create", request.request_id, name)) is not None:
            return known
        if not name or name in zone.queue:
            raise Refusal(_Code.ALREADY_EXISTS, f"queued resource {name!r} exists")
        if not request.queued_resource.tpu.node_spec:
            raise Refusal(_Code.INVALID_ARGUMENT, "tpu.node_spec is empty")
        for spec in request.queued_resource.tpu.node_spec:
            if not spec.node.runtime_version:
                raise Refusal(_Code.INVALID_ARGUMENT, "node.runtime_version is required")
        zone.require_quota(chips_of(request.queued_resource))
        zone.accept(name, request.queued_resource)
        operation = self._begin(zone.queue[name])
        self._operations.remember("create", request.request_id, name, operation.name)
        return operation

    def _delete_queued(self, request: tpu_v2.DeleteQueuedResourceRequest) -> operations_pb2.Operation:
        name = request.name.rpartition("/")[2]
        if (known := self._operations.of_request("delete", request.request_id, name)) is not None:
            return known
        found = self._zone.find(self._zone.queue, "queuedResources", request.name)
        has_nodes = any(node.queued_resource == found.name for node in self._zone.nodes.values())
        if not request.force and has_nodes and found.state.state not in _DELETABLE:
            raise Refusal(_Code.FAILED_PRECONDITION, f"{name} is {found.state.state.name}; delete its nodes, or force")
        found.state = tpu_v2.QueuedResourceState(state=State.DELETING, state_initiator=Initiator.USER)
        operation = self._begin(empty_pb2.Empty())
        self._operations.remember("delete", request.request_id, name, operation.name)
        return operation

    def _get_operation(self, request: operations_pb2.GetOperationRequest) -> operations_pb2.Operation:
        return self._operations.get(request.name)

    def _begin(self, result: Any) -> operations_pb2.Operation:
        return self._operations.begin(result, self._zone.operation_s)
