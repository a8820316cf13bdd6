"""What libtpu tells of chips, from a server that speaks its protocol."""

import math
import socket

import pytest

from iris_ray.errors import InspectionFailedError
from iris_ray.inspection.chip_metrics import (
    DUTY_CYCLE,
    MEMORY_TOTAL,
    MEMORY_USED,
    PACKAGE,
    PORTS_VARIABLE,
    ChipUse,
    chip_use,
    message,
)
from tests.support.libtpu_metrics import messages_in_libtpu, metrics_service

GIB = 1 << 30


def test_messages_have_the_fields_of_the_real_libtpu() -> None:
    theirs = messages_in_libtpu()
    if theirs is None:
        pytest.skip("needs libtpu: pip install libtpu")
    assert theirs.package == PACKAGE
    fields = {(one.name, field.name): field for one in theirs.message_type for field in one.field}
    ours = [message("MetricResponse").DESCRIPTOR, message("MetricRequest").DESCRIPTOR]
    seen = 0
    while ours:
        for field in (described := ours.pop()).fields:
            real = fields[described.name, field.name]
            assert (field.number, field.type) == (real.number, real.type), field.full_name
            ours += [field.message_type] if field.message_type else []
            seen += 1
    assert seen == 12


def test_chips_duty_cycle_and_memory_are_told_by_device() -> None:
    values: dict[str, dict[int, int | float]] = {
        DUTY_CYCLE: {1: 25.5, 0: 98.0},
        MEMORY_USED: {0: 3 * GIB, 1: 0},
        MEMORY_TOTAL: {0: 32 * GIB, 1: 32 * GIB},
    }
    with metrics_service(values) as port:
        assert chip_use({PORTS_VARIABLE: str(port)}) == [
            ChipUse(0, 98.0, 3 * GIB, 32 * GIB),
            ChipUse(1, 25.5, 0, 32 * GIB),
        ]


def test_duty_cycle_of_chip_counts_for_both_of_its_devices() -> None:
    memory: dict[int, int | float] = dict.fromkeys(range(4), GIB)
    with metrics_service({DUTY_CYCLE: {0: 10.0, 1: 20.0}, MEMORY_USED: memory}) as port:
        assert [one.duty_cycle for one in chip_use({PORTS_VARIABLE: str(port)})] == [10.0, 10.0, 20.0, 20.0]


def test_each_process_of_a_host_tells_of_its_chips() -> None:
    with metrics_service({MEMORY_USED: {0: 1}}) as one, metrics_service({MEMORY_USED: {1: 2}}) as two:
        assert chip_use({PORTS_VARIABLE: f"{one},{two}"}) == [ChipUse(0, None, 1), ChipUse(1, None, 2)]


def test_values_that_are_no_numbers_are_not_known() -> None:
    values = {DUTY_CYCLE: {0: math.nan}, MEMORY_USED: {0: math.nan, 1: 2.0}, MEMORY_TOTAL: {0: math.inf}}
    with metrics_service(values) as port:
        ports = {PORTS_VARIABLE: f"{port},{'9' * 5000}"}
        assert chip_use(ports) == [ChipUse(1, None, 2)]


def test_host_without_metrics_service_says_so() -> None:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    with pytest.raises(InspectionFailedError, match=rf"does not answer on port {port} .*UNAVAILABLE"):
        chip_use({PORTS_VARIABLE: str(port)})
    with metrics_service({}) as empty, pytest.raises(InspectionFailedError, match="it knows no chips"):
        chip_use({PORTS_VARIABLE: str(empty)})
