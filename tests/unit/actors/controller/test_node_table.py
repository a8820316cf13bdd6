"""From Ray's node table to what the scheduler knows of a host."""

from typing import Any

import pytest

from iris_ray.actors.controller.node_table import NodeTable, failure, operator_attributes, registration
from iris_ray.model.constraints import AttributeValue
from iris_ray.model.workers import TPU_NAME, TPU_TOPOLOGY, TPU_VM_COUNT, TPU_WORKER_ID
from iris_ray.state.events import WorkerRegisteredEvent

LABELS = {
    "ray.io/node-id": "n1",
    "ray.io/tpu-slice-name": "slice-a",
    "ray.io/tpu-worker-id": "3",
    "ray.io/tpu-topology": "2x2x4",
    "ray.io/tpu-pod-type": "v4-32",
}


def node(labels: dict[str, str] | None = None, without: str = "", chips: float = 4.0) -> dict[str, Any]:
    merged = {k: v for k, v in {**LABELS, **(labels or {})}.items() if k != without}
    resources = {"CPU": 8.0, "TPU": chips, "node:10.0.0.7": 1.0}
    return {
        "NodeID": "n1",
        "Alive": True,
        "NodeManagerAddress": "10.0.0.7",
        "Labels": merged,
        "Resources": {k: v for k, v in resources.items() if v},
    }


def register(
    one: dict[str, Any], free: dict[str, float] | None = None, draining: bool = False, ours: float = 0.0
) -> WorkerRegisteredEvent | str | None:
    """``free``: what Ray says is unclaimed on the node; None if it says nothing about the node."""
    table = NodeTable((one,), {"n1": 0} if draining else {}, {} if free is None else {"n1": free})
    return registration(one, table, ours)


def worker(*args: Any, **kwargs: Any) -> WorkerRegisteredEvent:
    event = register(*args, **kwargs)
    assert isinstance(event, WorkerRegisteredEvent)
    return event


def test_tpu_host_registers_with_attributes_and_labels() -> None:
    event = worker(node({"iris/pool": "large"}))
    assert (event.node_id, event.address, event.draining, event.foreign) == ("n1", "10.0.0.7", None, None)
    assert event.attributes[TPU_NAME] == AttributeValue("slice-a")
    assert event.attributes[TPU_WORKER_ID] == AttributeValue(3)
    assert event.attributes[TPU_TOPOLOGY] == AttributeValue("v4-32")
    assert event.attributes[TPU_VM_COUNT] == AttributeValue(4)
    assert event.attributes["ray.io/tpu-topology"] == AttributeValue("2x2x4")
    assert event.attributes["iris/pool"] == AttributeValue("large")
    assert event.resources["TPU"] == 4.0


@pytest.mark.parametrize("one", [node(chips=0.0), node(without="ray.io/tpu-slice-name")], ids=["no chips", "no slice"])
def test_host_without_slice_or_chips_is_unusable_with_reason(one: dict[str, Any]) -> None:
    assert "TPU chips" in str(register(one))
    assert "10.0.0.7" in str(register(one))


def test_node_without_tpu_registers_as_worker_of_no_slice() -> None:
    worker = register({"NodeID": "h", "NodeManagerAddress": "10.0.0.1", "Resources": {"CPU": 4.0}})
    assert isinstance(worker, WorkerRegisteredEvent)
    assert (worker.node_id, worker.address, worker.resources) == ("h", "10.0.0.1", {"CPU": 4.0})
    assert worker.attributes == {}


@pytest.mark.parametrize("node_id", [None, "", "x", "-1", "1.0", " ", "²"])
def test_registration_without_valid_worker_id_is_refused(node_id: str | None) -> None:
    label = "ray.io/tpu-worker-id"
    refusal = register(node(without=label) if node_id is None else node({label: node_id}))
    assert isinstance(refusal, str)
    assert "slice-a" in refusal
    assert label in refusal


@pytest.mark.parametrize("pod_type", [None, "v9-32", ""])
def test_registration_of_an_unknown_type_is_refused(pod_type: str | None) -> None:
    label = "ray.io/tpu-pod-type"
    refusal = register(node(without=label) if pod_type is None else node({label: pod_type}))
    assert isinstance(refusal, str)
    assert "slice-a" in refusal


def test_slice_size_comes_from_live_host() -> None:
    assert worker(node({"ray.io/tpu-pod-type": "v5e-8"}, chips=8.0)).attributes[TPU_VM_COUNT] == AttributeValue(1)
    assert worker(node({"ray.io/tpu-pod-type": "v5e-8"}, chips=4.0)).attributes[TPU_VM_COUNT] == AttributeValue(2)


def test_host_with_impossible_chip_count_is_refused() -> None:
    assert isinstance(register(node(chips=16.0)), str)


def test_draining_host_registers_as_draining() -> None:
    assert worker(node(), draining=True).draining


@pytest.mark.parametrize(
    ("free", "ours", "in_use"),
    [
        ({"TPU": 4.0, "CPU": 8.0}, 0.0, False),
        ({"TPU": 1.0, "CPU": 8.0}, 0.0, True),
        ({"TPU": 0.0, "CPU": 8.0}, 0.0, True),
        ({"CPU": 8.0}, 0.0, True),  # Ray leaves out what is used up
        ({"CPU": 8.0}, 4.0, False),
        ({"TPU": 0.0}, 4.0, False),
        (None, 0.0, False),  # a node that has just joined
    ],
)
def test_registration_tells_chips_in_foreign_use(free: dict[str, float] | None, ours: float, in_use: bool) -> None:
    assert (worker(node(), free, ours=ours).foreign is not None) is in_use


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("large-jobs", "large-jobs"),
        ("500", 500),
        ("1.5", 1.5),
        ("-3", -3),
        ("true", True),
        ("false", False),
        ("True", "True"),
        ("007", "007"),
        ("v4-32", "v4-32"),
        ("1e3", "1e3"),
        ("nan", "nan"),
        ("", ""),
    ],
)
def test_operator_label_becomes_typed_attribute_of_short_name(text: str, value: str | int | float | bool) -> None:
    attribute = worker(node({"iris/tpu-pool": text})).attributes["tpu-pool"]
    assert attribute == AttributeValue(value)
    assert type(attribute.value) is type(value)


@pytest.mark.parametrize("text", ["true", "false", "", "soon"])
def test_taint_label_sets_taint_whatever_its_value(text: str) -> None:
    attributes = worker(node({"iris/taint.maintenance": text})).attributes
    assert "taint:maintenance" in attributes
    assert "taint.maintenance" not in attributes


def test_taint_label_keeps_rest_of_its_name() -> None:
    assert "taint:spot.eu-west" in worker(node({"iris/taint.spot.eu-west": "true"})).attributes


@pytest.mark.parametrize("name", ["taint.maintenance", "other/taint.maintenance", "iris/tainted", "iris.taint.x"])
def test_label_resembling_a_taint_sets_none(name: str) -> None:
    assert not [key for key in worker(node({name: "true"})).attributes if key.startswith("taint:")]


@pytest.mark.parametrize("text", ["12", "true", "text", ""])
def test_plain_labels_are_text_attributes_of_same_name(text: str) -> None:
    """Those of the operator, too."""
    attributes = worker(node({"market-type": text, "example.com/rack": text, "iris/disk": text})).attributes
    for name in ("market-type", "example.com/rack", "iris/disk"):
        assert attributes[name] == AttributeValue(text)
    assert attributes["ray.io/tpu-worker-id"] == AttributeValue("3")


@pytest.mark.parametrize("prefix", ["", "iris/"])
def test_label_does_not_override_reported_slice_attributes(prefix: str) -> None:
    names = (TPU_NAME, TPU_WORKER_ID, TPU_TOPOLOGY, TPU_VM_COUNT)
    plain, labelled = worker(node()), worker(node({f"{prefix}{name}": "0" for name in names}))
    assert {name: labelled.attributes[name] for name in names} == {name: plain.attributes[name] for name in names}
    assert labelled.resources == plain.resources


def test_operator_label_wins_over_plain_label_of_same_name() -> None:
    for labels in ({"pool": "a", "iris/pool": "b"}, {"iris/pool": "b", "pool": "a"}):
        assert operator_attributes(labels)["pool"] == AttributeValue("b")


def test_worker_failure_carries_rays_reason_if_there_is_one() -> None:
    assert "health check" in failure({"NodeID": "n1", "DeathReasonMessage": "health check failed"}).reason
    assert failure({"NodeID": "n1", "DeathReasonMessage": None}).reason
    assert len(failure({"NodeID": "n1", "DeathReasonMessage": "x" * 9999}).reason) < 300
