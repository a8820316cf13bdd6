"""Which pods the emulated scheduler puts on which nodes, and in which words it refuses."""

from collections.abc import Callable
from typing import Any

import pytest

from iris_ray.testing.kubernetes import NodePool
from iris_ray.testing.kubernetes.objects import amount, requirement_holds
from iris_ray.testing.kubernetes.scheduling import hindrance
from tests.support.kubernetes import changed, played_world

SPOT = {"key": "cloud.google.com/gke-spot", "value": "true", "effect": "NoSchedule"}
V6E_8 = NodePool("v6e-8", "tpu-v6e-slice", "2x4", chips_per_node=8, spot=True, taints=(SPOT,))


def pod(change: Callable[[dict[str, Any]], None] = lambda spec: None) -> dict[str, Any]:
    """A worker of v6e-8 as the shipped file has it, changed."""
    template = changed(lambda spec: change(spec["workerGroupSpecs"][1]["template"]["spec"]))
    spec = template["spec"]["workerGroupSpecs"][1]["template"]["spec"]
    return {"metadata": {"name": "pod", "labels": {"ray.io/cluster": "tpus"}}, "spec": spec}


def wants_disk(spec: dict[str, Any], size: str) -> None:
    """As KubeRay's own samples do."""
    spec["containers"][0]["resources"]["requests"] = {"ephemeral-storage": size}


@pytest.mark.parametrize(
    ("pool", "change", "words"),
    [
        (V6E_8, lambda spec: None, None),
        (V6E_8, lambda spec: spec.pop("tolerations"), "untolerated taint {cloud.google.com/gke-spot: true}"),
        (V6E_8, lambda spec: spec["nodeSelector"].update(zone="a"), "didn't match Pod's node affinity/selector"),
        (NodePool("small", "tpu-v6e-slice", "2x4", 8, spot=True, cpus=44), lambda spec: None, "Insufficient cpu"),
        (V6E_8, lambda spec: wants_disk(spec, "20Gi"), None),
        (V6E_8, lambda spec: wants_disk(spec, "60Gi"), "Insufficient ephemeral-storage"),
        (NodePool("other", "tpu-v6e-slice", "2x4", 4, spot=True), lambda spec: None, "Insufficient google.com/tpu"),
        (
            V6E_8,
            lambda spec: spec.update(tolerations=[{"operator": "Exists"}]),
            None,
        ),
        (
            V6E_8,
            lambda spec: spec.update(tolerations=[{**SPOT, "operator": "Equal", "effect": "NoExecute"}]),
            "untolerated taint",
        ),
    ],
)
def test_pod_fits_on_a_node_or_is_told_why_not(
    pool: NodePool, change: Callable[[dict[str, Any]], None], words: str | None
) -> None:
    found = hindrance(pod(change), pool.node("node", "10.0.0.1"), [])
    assert found is None if words is None else words in str(found)


def test_node_that_is_used_has_no_room_for_a_second_pod() -> None:
    node = V6E_8.node("node", "10.0.0.1")
    assert hindrance(pod(), node, [(pod(), node)]) == "Insufficient memory"


def test_pod_without_chips_stays_off_nodes_with_chips() -> None:
    def no_chips(spec: dict[str, Any]) -> None:
        spec["containers"][0]["resources"] = {}

    found = hindrance(pod(no_chips), V6E_8.node("node", "10.0.0.1"), [])
    assert found == "node(s) had untolerated taint {google.com/tpu: present}"


def test_head_stays_off_spot_nodes() -> None:
    spot = NodePool("spot", spot=True, max_nodes=9)
    with played_world(pools=[spot]) as played:
        (head,) = played.world.pod_manifests()
        (scheduled,) = head["status"]["conditions"]
        assert (scheduled["type"], scheduled["message"]) == ("PodScheduled", "0/0 nodes are available.")
        assert "didn't match Pod's node affinity/selector" in next(iter(played.messages("NotTriggerScaleUp")))


@pytest.mark.parametrize(
    ("operator", "values", "holds"),
    [
        ("In", ["7"], True),
        ("NotIn", ["7"], False),
        ("Exists", [], True),
        ("DoesNotExist", [], False),
        ("Gt", ["6"], True),
        ("Lt", ["6"], False),
    ],
)
def test_expression_of_a_selector_holds(operator: str, values: list[str], holds: bool) -> None:
    assert requirement_holds({"size": "7"}, "size", operator, values) is holds
    assert requirement_holds({}, "size", operator, values) is (operator in ("NotIn", "DoesNotExist"))


@pytest.mark.parametrize(
    ("quantity", "number"), [("500m", 0.5), ("4", 4), (4, 4), ("10Gi", 10 * 2**30), ("1k", 1000), ("1.5M", 1_500_000)]
)
def test_quantity_is_read_as_kubernetes_does(quantity: object, number: float) -> None:
    assert float(amount(quantity)) == number


@pytest.mark.parametrize("quantity", ["", "four", "4 Gi", "Gi", "4ii"])
def test_wrong_quantity_is_refused(quantity: str) -> None:
    with pytest.raises(ValueError, match="not a quantity of Kubernetes"):
        amount(quantity)
