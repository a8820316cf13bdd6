"""The gRPC server of the emulator."""

import time
from concurrent import futures
from dataclasses import dataclass, field
from typing import Any, Self

import grpc
from google.cloud import tpu_v2
from google.cloud.tpu_v2.services.tpu.transports import TpuGrpcTransport

from iris_ray.testing.cloud_tpu_server.api import Api, Deserialize, Method
from iris_ray.testing.cloud_tpu_server.faults import Fault, Faults
from iris_ray.testing.cloud_tpu_server.operations import raw
from iris_ray.testing.cloud_tpu_server.refusal import Refusal
from iris_ray.testing.cloud_tpu_server.zone import Zone


@dataclass(slots=True)
class CloudTpuServer(Zone):
    """One zone of the Cloud TPU API, on a port of its own on loopback; a context manager.

    Attributes:
        calls: (method, request) of every call, refused calls included.
        address: HOST:PORT.
    """

    calls: list[tuple[str, Any]] = field(default_factory=list)
    address: str = ""
    _faults: Faults = field(default_factory=Faults)
    _server: Any = None

    def __enter__(self) -> Self:
        # Waiting calls hold threads: enough of them, or a delayed call would delay the others.
        self._server = grpc.server(futures.ThreadPoolExecutor(16, thread_name_prefix="cloud-tpu-server"))
        for service, methods in Api(self).methods().items():
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

    def fail(self, code: grpc.StatusCode, method: str = "*", times: int = 1) -> None:
        """Answer the next calls of a method, such as ``"GetNode"``, with an error."""
        with self.lock:
            self._faults.add(Fault(method, times, code=code))

    def delay(self, seconds: float, method: str = "*", times: int = 1) -> None:
        """Delay the next calls of a method by so many seconds."""
        with self.lock:
            self._faults.add(Fault(method, times, delay_s=seconds))

    def heal(self) -> None:
        """Drop the failures and delays that are still to come."""
        with self.lock:
            self._faults.clear()

    def count(self, method: str) -> int:
        """Return how many calls of a method have come."""
        with self.lock:
            return sum(called == method for called, _ in self.calls)

    def _handler(self, name: str, read: Deserialize, answer: Method) -> Any:
        def handle(request: Any, context: grpc.ServicerContext) -> Any:
            with self.lock:
                self.calls.append((name, request))
                fault = self._faults.take(name)
            try:
                if fault is not None:
                    time.sleep(fault.delay_s)
                    if fault.code is not None:
                        raise Refusal(fault.code, f"{name}: a test asked for {fault.code.name}")
                with self.lock:
                    return answer(request)
            except Refusal as refusal:
                context.abort(refusal.code, str(refusal))

        return grpc.unary_unary_rpc_method_handler(handle, read, _serialize)


def _serialize(message: Any) -> bytes:
    data: bytes = raw(message).SerializeToString()
    return data
