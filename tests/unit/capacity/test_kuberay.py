"""What a RayCluster and its pods say about slices. On paper."""

from typing import Any

import pytest

from iris_ray.capacity.kuberay import (
    GENERATIONS,
    WorkerGroup,
    obstacles,
    pod_troubles,
    raises,
    withdrawal,
    worker_groups,
)


def group(accelerator: str, topology: str, chips: int, hosts: int | None = None, **more: Any) -> dict[str, Any]:
    selector = {"cloud.google.com/gke-tpu-accelerator": accelerator, "cloud.google.com/gke-tpu-topology": topology}
    container = {"resources": {"limits": {"google.com/tpu": str(chips)}}}
    pod = {"nodeSelector": selector, "containers": [container]}
    hosts_too = {} if hosts is None else {"numOfHosts": hosts}
    return {"groupName": "a", "maxReplicas": 4, "template": {"spec": pod}, **hosts_too, **more}


def only_group(spec: dict[str, Any]) -> WorkerGroup:
    (found,) = worker_groups({"spec": {"workerGroupSpecs": [spec]}})
    return found


@pytest.mark.parametrize(
    ("accelerator", "topology", "chips", "hosts", "tpu_type"),
    [
        ("tpu-v4-podslice", "2x2x2", 4, 2, "v4-16"),
        ("tpu-v5-lite-podslice", "2x4", 8, 1, "v5litepod-8"),
        ("tpu-v5-lite-podslice", "2x4", 4, 2, "v5litepod-8"),
        ("tpu-v5-lite-device", "1x1", 1, None, "v5litepod-1"),
        ("tpu-v5p-slice", "2x2x4", 4, 4, "v5p-32"),
        ("tpu-v6e-slice", "4x4", 4, 4, "v6e-16"),
        ("tpu7x", "2x2x1", 4, None, "v7x-8"),
    ],
)
def test_group_makes_slices_of_its_nodes_type(
    accelerator: str, topology: str, chips: int, hosts: int | None, tpu_type: str
) -> None:
    found = only_group(group(accelerator, topology, chips, hosts, replicas=2))
    assert (found.tpu_type, found.problem, found.wanted, found.most) == (tpu_type, None, 2, 4)


def test_generations_are_rays() -> None:
    from ray.autoscaler._private.kuberay.utils import gke_tpu_accelerator_to_generation

    assert gke_tpu_accelerator_to_generation.items() <= GENERATIONS.items()


@pytest.mark.parametrize(
    ("name", "chips", "tpu_type"), [("v6e-16", 4, "v6e-16"), ("v6e-16", 0, None), ("mine", 4, None)]
)
def test_compute_class_group_has_type_of_its_name(name: str, chips: int, tpu_type: str | None) -> None:
    spec = group("", "4x4", chips, 4, groupName=name)
    del spec["template"]["spec"]["nodeSelector"]["cloud.google.com/gke-tpu-accelerator"]
    found = worker_groups({"spec": {"workerGroupSpecs": [spec]}})
    assert [each.tpu_type for each in found] == ([] if tpu_type is None else [tpu_type])


@pytest.mark.parametrize(
    "spec", [group("nvidia-l4", "2x4", 8), group("tpu-v6e-slice", "3x5", 4), group("tpu-v6e-slice", "", 4)]
)
def test_group_of_other_nodes_makes_no_slices(spec: dict[str, Any]) -> None:
    assert worker_groups({"spec": {"workerGroupSpecs": [spec]}}) == []
    assert worker_groups({"spec": {}}) == []


def test_group_of_wrong_size_says_so() -> None:
    problem = only_group(group("tpu-v6e-slice", "4x4", 4, 2)).problem
    assert problem is not None
    assert "numOfHosts is 2" in problem
    assert "a v6e-16 has 16 chips, which are 4 such hosts" in problem


def test_suspended_group_makes_no_slices() -> None:
    found = only_group(group("tpu-v6e-slice", "2x4", 8, suspend=True, replicas=1))
    assert found.problem == "it is suspended"
    assert raises([found], 0, [1], 1) == []


def test_missing_slices_go_to_groups_with_room_in_order() -> None:
    spot, on_demand = WorkerGroup("spot", 0, "v6e-8", 1, 2), WorkerGroup("on-demand", 2, "v6e-8", None, 3)
    assert [(change.group.name, change.to) for change in raises([spot, on_demand], 1, [3], 4)] == [
        ("spot", 2),
        ("on-demand", 2),
    ]
    (change,) = raises([on_demand], 0, [1], 1)
    assert change.patch == [
        {"op": "test", "path": "/spec/workerGroupSpecs/2/groupName", "value": "on-demand"},
        {"op": "add", "path": "/spec/workerGroupSpecs/2/replicas", "value": 1},
    ]


@pytest.mark.parametrize(
    ("replicas", "there", "gangs", "settled", "to"),
    [
        (0, 0, [2], 2, 2),
        (2, 0, [2], 2, None),  # on their way
        (2, 1, [1], 2, None),
        (2, 2, [1], 3, 3),
        (2, 2, [1], 2, None),  # missed for a moment only
        (0, 1, [1], 2, 1),  # the autoscaler is giving one back
        (3, 2, [2, 1], 5, None),  # the second gang is served by the one on its way
    ],
)
def test_replicas_are_raised_to_what_is_missing(
    replicas: int, there: int, gangs: list[int], settled: int, to: int | None
) -> None:
    changes = raises([WorkerGroup("a", 0, "v6e-8", replicas, 3)], there, gangs, settled)
    assert [change.to for change in changes] == ([] if to is None else [to])


def waiting_pod(name: str, replica: str, node: str | None = None, **meta: Any) -> dict[str, Any]:
    labels = {"ray.io/group": "a", "ray.io/worker-group-replica-name": replica}
    return {"metadata": {"name": name, "labels": labels, **meta}, "spec": {"nodeName": node} if node else {}}


def test_only_slices_of_which_no_pod_runs_are_withdrawn() -> None:
    group = WorkerGroup("a", 1, "v5p-16", 5, 9, hosts=2, going=("old", "q0"))
    pods = [
        *[waiting_pod(f"x{i}", "x", node="n") for i in range(2)],
        *[waiting_pod(f"y{i}", "y") for i in range(2)],
        waiting_pod("z0", "z"),  # and its brother runs
        *[waiting_pod(f"q{i}", "q") for i in range(2)],
        *[waiting_pod(f"w{i}", "w", deletionTimestamp="2026-01-01T00:00:00Z") for i in range(2)],
    ]
    found = withdrawal(group, pods, 3)
    assert found is not None
    assert found.patch("7") == [
        {"op": "test", "path": "/metadata/resourceVersion", "value": "7"},
        {"op": "add", "path": "/spec/workerGroupSpecs/1/replicas", "value": 3},
        {
            "op": "add",
            "path": "/spec/workerGroupSpecs/1/scaleStrategy",
            "value": {"workersToDelete": ["old", "q0", "y0", "y1", "x0", "x1"]},
        },
    ]
    one = withdrawal(group, pods, 1)
    assert one is not None
    assert one.slices == (("y0", "y1"),)
    assert withdrawal(WorkerGroup("a", 1, "v5p-16", 5, 9, hosts=2, least=5), pods, 3) is None
    assert withdrawal(WorkerGroup("b", 1, "v5p-16", 5, 9, hosts=2), pods, 3) is None


def test_obstacle_is_told_only_where_it_matters() -> None:
    small, broken = WorkerGroup("a", 0, "v6e-8", 2, 2), WorkerGroup("b", 1, "v6e-8", 0, 9, "it is odd")
    assert obstacles([small], 0, [2]) == []
    assert obstacles([small, broken], 1, [2]) == [
        "group b makes none: it is odd",
        "there may be no more slices than 2 of group a (maxReplicas)",
    ]


# -- pods --------------------------------------------------------------------------------------------------------------


def pod(name: str, **status: Any) -> dict[str, Any]:
    return {"metadata": {"name": name, "labels": {"ray.io/group": "g"}}, "status": status}


def unscheduled(message: str) -> dict[str, Any]:
    return {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}


def event(name: str, message: str, at: str, reason: str = "FailedScaleUp") -> dict[str, Any]:
    return {
        "reason": reason,
        "message": message,
        "involvedObject": {"kind": "Pod", "name": name},
        "lastTimestamp": at,
    }


def waiting(reason: str) -> dict[str, Any]:
    return {"state": {"waiting": {"reason": reason, "message": "so it is"}}}


def test_alike_pods_are_told_together() -> None:
    pods = [pod(f"p{i}", conditions=[unscheduled("0/3 nodes\n are available")]) for i in range(4)]
    said = "4 pods wait, such as p0: Unschedulable: 0/3 nodes are available"
    assert pod_troubles(pods) == {"g": (said,)}


def test_last_word_of_the_clusters_autoscaler_goes_first() -> None:
    """While it pauses after a failure, it says so, which tells nobody why."""
    pods = [pod("p", conditions=[unscheduled("0/3 nodes")])]
    pause = event("p", "1 in backoff after failed scale-up", "2026-01-01T00:02:00Z", "NotTriggerScaleUp")
    assert pod_troubles(pods, [pause]) == {"g": ("pod p: NotTriggerScaleUp: 1 in backoff after failed scale-up",)}
    failed = event("p", "GCE out of resources", "2026-01-01T00:01:00Z")
    old = event("p", "old", "2026-01-01T00:00:00Z", "TriggeredScaleUp")
    assert pod_troubles(pods, [pause, failed, old]) == {"g": ("pod p: FailedScaleUp: GCE out of resources",)}


def test_old_word_about_a_pod_that_has_its_node_is_over() -> None:
    starting = pod("p", containerStatuses=[waiting("ErrImagePull")])
    events = [event("p", "GCE out of resources", "2026-01-01T00:00:00Z")]
    assert pod_troubles([starting], events) == {"g": ("pod p: ErrImagePull: so it is",)}


@pytest.mark.parametrize(
    ("status", "words"),
    [
        ({"containerStatuses": [waiting("ImagePullBackOff")]}, "pod p: ImagePullBackOff: so it is"),
        ({"initContainerStatuses": [waiting("CrashLoopBackOff")]}, "pod p: CrashLoopBackOff: so it is"),
        ({"containerStatuses": [waiting("ContainerCreating")]}, None),
        ({"containerStatuses": [{"state": {"running": {}}}]}, None),
        ({"conditions": [{"type": "PodScheduled", "status": "True"}]}, None),
        ({}, None),
    ],
)
def test_pod_that_starts_has_no_trouble(status: dict[str, Any], words: str | None) -> None:
    assert pod_troubles([pod("p", **status)]) == ({} if words is None else {"g": (words,)})


def test_pod_that_is_being_deleted_has_no_trouble() -> None:
    going = pod("p", conditions=[unscheduled("0/3 nodes")])
    going["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    assert pod_troubles([going]) == {}
