"""A server that says what libtpu's metrics service says of chips, by the same messages, over gRPC on loopback."""

import contextlib
import mmap
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import grpc
from google.protobuf import descriptor_pb2

from iris_ray.inspection.chip_metrics import METHOD, message

DEVICE_ATTRIBUTE = "device-id"


@contextlib.contextmanager
def metrics_service(values: Mapping[str, Mapping[int, int | float]]) -> Iterator[int]:
    """Serve these values, by the metric's name and the device's number, within the block. Yield the port."""

    def answer(request: Any, context: grpc.ServicerContext) -> Any:
        if request.metric_name not in values:
            context.abort(grpc.StatusCode.NOT_FOUND, f"no metric {request.metric_name}")
        reply = message("MetricResponse")()
        reply.metric.name = request.metric_name
        for device, value in values[request.metric_name].items():
            one = reply.metric.metrics.add()
            one.attribute.key = DEVICE_ATTRIBUTE
            one.attribute.value.int_attr = device
            if isinstance(value, int):
                one.gauge.as_int = value
            else:
                one.gauge.as_double = value
        return reply

    service, _, method = METHOD.removeprefix("/").partition("/")
    handler = grpc.unary_unary_rpc_method_handler(
        answer,
        request_deserializer=message("MetricRequest").FromString,
        response_serializer=lambda reply: reply.SerializeToString(),
    )
    with ThreadPoolExecutor(2) as threads:
        server = grpc.server(threads)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {method: handler}),))
        port = server.add_secure_port("localhost:0", grpc.local_server_credentials())
        server.start()
        try:
            yield port
        finally:
            server.stop(None).wait()


def messages_in_libtpu() -> descriptor_pb2.FileDescriptorProto | None:
    """Return the description of the service's messages that lies in the real libtpu; None without libtpu."""
    found = find_spec("libtpu")
    if found is None or found.origin is None:
        return None
    with (
        open(Path(found.origin).with_name("libtpu.so"), "rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content,
    ):
        name = content.find(b"/tpu_metric_service.proto\x12")
        begin = content.rfind(b"\n", 0, name)
        return descriptor_pb2.FileDescriptorProto.FromString(content[begin : _end_of_message(content, begin)])


def _end_of_message(content: mmap.mmap, at: int) -> int:
    """Return where a serialized description of a file ends: where no field of it follows."""
    strings, last = {1, 2, 3, 4, 5, 6, 7, 8, 9, 12}, 0
    while content[at] & 7 == 2 and (number := content[at] >> 3) in strings and number >= last:
        size, shift, at = 0, 0, at + 1
        while True:
            byte = content[at]
            size, shift, at = size | (byte & 0x7F) << shift, shift + 7, at + 1
            if byte < 0x80:
                break
        at, last = at + size, number
    return at
