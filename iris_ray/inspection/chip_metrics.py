"""Duty cycle and memory of the chips of a host, from libtpu, which serves them by gRPC while a process uses the chips.

Google's ``tpu-info`` asks the same service. The messages hold only the fields that are read here; a test compares them
with those in libtpu.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

from iris_ray.errors import InspectionFailedError

PORTS_VARIABLE = "TPU_RUNTIME_METRICS_PORTS"
"""The variable with the ports of libtpu's processes."""
DEFAULT_PORT = 8431
ANSWER_S = 5.0

PACKAGE = "tpu.monitoring.runtime"
METHOD = f"/{PACKAGE}.RuntimeMetricService/GetRuntimeMetric"
DUTY_CYCLE = "tpu.runtime.tensorcore.dutycycle.percent"
MEMORY_USED = "tpu.runtime.hbm.memory.usage.bytes"
MEMORY_TOTAL = "tpu.runtime.hbm.memory.total.bytes"

_FIELDS: Final[Mapping[str, Mapping[str, tuple[int, str]]]] = {
    "AttrValue": {"string_attr": (1, "string"), "int_attr": (3, "int64")},
    "Attribute": {"key": (1, "string"), "value": (2, "AttrValue")},
    "Gauge": {"as_double": (1, "double"), "as_int": (2, "int64")},
    "Metric": {"attribute": (1, "Attribute"), "gauge": (3, "Gauge")},
    "TPUMetric": {"name": (1, "string"), "metrics": (3, "[Metric]")},
    "MetricRequest": {"metric_name": (1, "string")},
    "MetricResponse": {"metric": (1, "TPUMetric")},
}
"""The messages: the number and type of each field."""


@dataclass(frozen=True, slots=True)
class ChipUse:
    """The use of a device of a host; on v2 and v3 a chip has two devices.

    Attributes:
        device: its number on the host.
        duty_cycle: the percentage of time in which its chip's TensorCore has worked lately; None if it is not known.
        memory_used, memory_total: bytes of its HBM; None if they are not known.
    """

    device: int
    duty_cycle: float | None = None
    memory_used: int | None = None
    memory_total: int | None = None


def chip_use(environ: Mapping[str, str]) -> list[ChipUse]:
    """Return the use of the chips of this host, from libtpu.

    Args:
        environ: the variables of the task that uses them.

    Raises:
        InspectionFailedError: libtpu does not answer.
    """
    import grpc  # slow to import

    found: dict[int, ChipUse] = {}
    why: grpc.RpcError | None = None
    for port in ports(environ):
        try:
            with grpc.secure_channel(
                f"localhost:{port}", grpc.local_channel_credentials(), [("grpc.enable_http_proxy", 0)]
            ) as channel:
                found |= {one.device: one for one in _uses(channel)}
        except grpc.RpcError as error:
            why = error
    if not found:
        said = "it knows no chips" if why is None else f"{why.code().name}: {why.details()}"
        raise InspectionFailedError(
            f"libtpu's metrics service does not answer on port {', '.join(map(str, ports(environ)))} of the host"
            f" ({said}); libtpu serves it once a task uses its chips"
        )
    return sorted(found.values(), key=lambda one: one.device)


def ports(environ: Mapping[str, str]) -> list[int]:
    """Return the ports of this host on which libtpu may answer, for a task with these variables."""
    given = (word.strip() for word in environ.get(PORTS_VARIABLE, "").split(","))
    return [int(word) for word in given if word.isdecimal() and len(word) <= 5] or [DEFAULT_PORT]


def _uses(channel: Any) -> list[ChipUse]:
    duty, used, total = (_asked(channel, name) for name in (DUTY_CYCLE, MEMORY_USED, MEMORY_TOTAL))
    devices = sorted({*used, *total} or {*duty})
    per_chip = max(1, len(devices) // max(1, len(duty)))  # duty cycles are those of chips
    chips = [duty[chip] for chip in sorted(duty) for _ in range(per_chip)]
    cycles = dict(zip(devices, chips, strict=False))
    return [ChipUse(one, cycles.get(one), _whole(used.get(one)), _whole(total.get(one))) for one in devices]


def _whole(number: float | None) -> int | None:
    return None if number is None else int(number)


def _asked(channel: Any, name: str) -> dict[int, float]:
    """Return the values of a metric by the number of its chip or device; none that is not a number."""
    import grpc

    ask = channel.unary_unary(
        METHOD,
        request_serializer=lambda request: request.SerializeToString(),
        response_deserializer=message("MetricResponse").FromString,
    )
    try:
        answer = ask(message("MetricRequest")(metric_name=name), timeout=ANSWER_S)
    except grpc.RpcError as error:
        if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
            raise
        return {}  # this libtpu does not know it
    values = {
        one.attribute.value.int_attr: one.gauge.as_double if one.gauge.HasField("as_double") else one.gauge.as_int
        for one in answer.metric.metrics
    }
    return {device: value for device, value in values.items() if math.isfinite(value)}


@cache
def message(name: str) -> Any:
    """Return the class of a message of the service."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    file = descriptor_pb2.FileDescriptorProto(name="iris_ray/chip_metrics.proto", package=PACKAGE, syntax="proto3")
    types = descriptor_pb2.FieldDescriptorProto
    for each, fields in _FIELDS.items():
        described = file.message_type.add(name=each)
        if each in ("AttrValue", "Gauge"):
            described.oneof_decl.add(name="value")
        for field, (number, kind) in fields.items():
            made = described.field.add(name=field, number=number)
            made.label = types.LABEL_REPEATED if kind.startswith("[") else types.LABEL_OPTIONAL
            if (inner := kind.strip("[]")) in _FIELDS:
                made.type, made.type_name = types.TYPE_MESSAGE, f".{PACKAGE}.{inner}"
            else:
                made.type = types.Type.Value(f"TYPE_{inner.upper()}")
            if described.oneof_decl:
                made.oneof_index = 0
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{PACKAGE}.{name}"))
