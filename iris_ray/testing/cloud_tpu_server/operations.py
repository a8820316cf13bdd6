"""Long-running operations, and the request ids that make repeated requests harmless."""

import time
import uuid
from dataclasses import dataclass, field
from typing import Any

import grpc
from google.longrunning import operations_pb2
from google.protobuf import any_pb2

from iris_ray.testing.cloud_tpu_server.refusal import Refusal


@dataclass(frozen=True, slots=True)
class _Operation:
    name: str
    result: Any
    done_at: float


@dataclass(slots=True)
class Operations:
    """All operations of a zone."""

    location: str
    _operations: dict[str, _Operation] = field(default_factory=dict)
    _by_request_id: dict[tuple[str, str], tuple[str, str]] = field(default_factory=dict)

    def begin(self, result: Any, duration_s: float) -> operations_pb2.Operation:
        """Begin an operation that is done, with this result, after so many seconds."""
        name = f"{self.location}/operations/operation-{len(self._operations)}"
        self._operations[name] = _Operation(name, result, time.monotonic() + duration_s)
        return self.get(name)

    def get(self, name: str) -> operations_pb2.Operation:
        """Return how an operation stands.

        Raises:
            Refusal: there is no such operation.
        """
        if name not in self._operations:
            raise Refusal(grpc.StatusCode.NOT_FOUND, f"no operation {name}")
        operation = self._operations[name]
        if time.monotonic() < operation.done_at:
            return operations_pb2.Operation(name=name, done=False)
        packed = any_pb2.Any()
        packed.Pack(raw(operation.result))
        return operations_pb2.Operation(name=name, done=True, response=packed)

    def remember(self, verb: str, request_id: str, name: str, operation: str) -> None:
        """Remember the operation that a request about the resource ``name`` began."""
        self._by_request_id[verb, request_id] = name, operation

    def of_request(self, verb: str, request_id: str, name: str) -> operations_pb2.Operation | None:
        """Return the operation that an earlier request with the same id began, or None.

        Raises:
            Refusal: the id is no UUID, or an earlier request used it for another resource.
        """
        if not request_id:
            return None
        try:
            uuid.UUID(request_id)
        except ValueError:
            raise Refusal(grpc.StatusCode.INVALID_ARGUMENT, f"request_id {request_id!r} is no UUID") from None
        about, operation = self._by_request_id.get((verb, request_id), (name, ""))
        if about != name:
            raise Refusal(grpc.StatusCode.INVALID_ARGUMENT, f"request_id {request_id} was used for {about}")
        return self.get(operation) if operation else None


def raw(message: Any) -> Any:
    """Return the protobuf message inside one of the package's own types, or the message itself."""
    return type(message).pb(message) if hasattr(type(message), "pb") else message
