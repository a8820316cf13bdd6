"""An emulated GKE in virtual time: what KubeRay, the webhook and the node pools do to pods."""

from collections import Counter
from typing import Any

import pytest

from iris_ray.errors import UnknownNameError
from iris_ray.testing.kubernetes import NodePool
from tests.support.kubernetes import PaperPods, PlayedWorld, changed, played_world

V6E = "tpu-v6e-slice"
SLICE_POOL = NodePool("slice-0", V6E, "4x4", chips_per_node=4, spot=True)
HEAD_POOL = NodePool("default", cpus=16, memory_gib=64, max_nodes=3)


def pools_of(world: PlayedWorld, group: str) -> Counter[str]:
    return Counter(pod.node_pool for pod in world.world.pods(group))


def slices(world: PlayedWorld, count: int, group: str = "v6e-16") -> None:
    world.set_group(group, replicas=count)
    world.play(10)


def environment(world: PlayedWorld, group: str) -> list[tuple[str, str]]:
    found = [pod.ray_container.environment for pod in world.world.pods(group)]
    return [(variables["TPU_NAME"], variables["TPU_WORKER_ID"]) for variables in found]


# -- the head ----------------------------------------------------------------------------------------------------------


def embedded_storage(spec: Any, **storage: str) -> None:
    spec["gcsFaultToleranceOptions"] = {"backend": "rocksdb", "storage": storage or {"size": "10Gi"}}


def test_new_cluster_gets_its_head_and_nothing_else() -> None:
    with played_world(changed(embedded_storage)) as played:
        (head,) = played.world.pods()
        assert head.is_head
        assert [container.name for container in head.containers] == ["ray-head", "autoscaler"]
        assert head.ray_start_params["num-cpus"] == "0"
        assert head.ray_start_params["no-monitor"] == "true"
        assert head.ray_container.environment["RAY_enable_autoscaler_v2"] == "true"
        assert head.ray_container.claims == {"/data/gcs": "tpus-gcs-pvc"}
        assert head.ray_container.environment["RAY_gcs_storage_path"] == "/data/gcs"
        autoscaler = head.containers[1]
        (command,) = head.manifest["spec"]["containers"][1]["args"]
        assert command.startswith("ray kuberay-autoscaler --cluster-name $(RAY_CLUSTER_NAME) ")
        assert autoscaler.environment["RAY_CLUSTER_NAME"] == "tpus"
        assert autoscaler.environment["RAY_HEAD_POD_NAME"] == head.name
        token = autoscaler.environment["RAY_AUTH_TOKEN"]
        assert token == head.ray_container.environment["RAY_AUTH_TOKEN"]
        assert played.world.raycluster()["status"]["state"] == "ready"


def test_head_whose_ray_container_ends_is_replaced_with_its_claim() -> None:
    with played_world(changed(embedded_storage)) as played:
        (head,) = played.world.pods()
        played.runner.ended[head.name] = {"ray-head": 1}
        played.play(5)
        (successor,) = played.world.pods()
        assert successor.name != head.name
        assert successor.ray_container.claims == head.ray_container.claims
        assert played.runner.verbs("stop") == [head.name]


def test_head_without_its_volume_claim_waits() -> None:
    with played_world(changed(lambda spec: embedded_storage(spec, claimName="mine"))) as played:
        assert played.world.pods() == []
        assert played.messages("FailedScheduling") == {'persistentvolumeclaim "mine" not found'}


# -- slices of several hosts -------------------------------------------------------------------------------------------


def test_replica_is_one_slice_with_numbered_hosts() -> None:
    with played_world() as played:
        slices(played, 2)
        assert environment(played, "v6e-16") == [(f"v6e-16-{i}", str(j)) for i in range(2) for j in range(4)]
        assert sorted(pools_of(played, "v6e-16").values()) == [4, 4]
        first = played.world.pods("v6e-16")[0]
        names = [f"v6e-16-0-{host}.tpus-headless" for host in range(4)]
        assert first.ray_container.environment["TPU_WORKER_HOSTNAMES"] == ",".join(names)
        assert first.labels["ray.io/replica-host-index"] == "0"
        assert first.ray_start_params["resources"] == '{"TPU": 4.0}'
        assert played.world.raycluster()["status"]["desiredWorkerReplicas"] == 8


def test_replica_that_lacks_a_pod_goes_whole() -> None:
    with played_world() as played:
        slices(played, 2)
        before = played.names("v6e-16")
        played.world.delete_pod(before[5])
        played.play(10)
        after = played.names("v6e-16")
        assert set(before) & set(after) == set(before[:4])
        assert environment(played, "v6e-16")[4:] == [("v6e-16-1", str(host)) for host in range(4)]


def test_no_pod_comes_while_rest_of_a_broken_replica_ends() -> None:
    with played_world(runner=PaperPods(stop_takes_s=20.0)) as played:
        slices(played, 1)
        before = played.names("v6e-16")
        played.world.delete_pod(before[0], grace_s=0)
        played.set_group("v6e-8", replicas=1)
        played.play(15)
        assert set(played.names("v6e-16")) == set(before[1:])
        assert played.names("v6e-8") == []
        played.play(15)
        assert len(played.names("v6e-16")) == 4
        assert len(played.names("v6e-8")) == 1


def test_one_worker_to_delete_ends_its_whole_replica() -> None:
    with played_world() as played:
        slices(played, 2)
        names = played.names("v6e-16")
        played.set_group("v6e-16", replicas=1, scaleStrategy={"workersToDelete": [names[6]]})
        played.play(10)
        assert played.names("v6e-16") == names[:4]
        assert all(grace == 60 for verb, _, grace in played.runner.log if verb == "stop")


def test_fewer_replicas_alone_delete_nothing_under_autoscaler() -> None:
    with played_world() as played:
        slices(played, 2)
        slices(played, 0)
        assert len(played.names("v6e-16")) == 8


def test_second_slice_finds_no_place_in_a_pool_that_is_taken() -> None:
    with played_world(pools=[HEAD_POOL, SLICE_POOL]) as played:
        slices(played, 2)
        assert played.phases("v6e-16") == ["Running"] * 4 + ["Pending"] * 4
        assert pools_of(played, "v6e-16") == {"slice-0": 4}
        (message,) = played.messages("NotTriggerScaleUp")
        assert "1 node(s) didn't match pod affinity rules" in message or "anti-affinity" in message


def test_slices_of_several_hosts_stay_pending_with_old_webhook() -> None:
    with played_world(webhook="1.3.1") as played:
        slices(played, 1)
        assert played.phases("v6e-16") == ["Pending"] * 4
        assert any("didn't match pod affinity rules" in message for message in played.messages("NotTriggerScaleUp"))


def test_slice_pool_has_none_of_its_nodes_or_all() -> None:
    slow = NodePool("slice-0", V6E, "4x4", chips_per_node=4, spot=True, provision_s=90, idle_s=100)
    with played_world(pools=[HEAD_POOL, slow]) as played:
        slices(played, 1)
        nodes = [node for node in played.world.nodes() if node.pool == "slice-0"]
        assert [node.ready for node in nodes] == [False] * 4
        played.play(90)
        assert played.phases("v6e-16") == ["Running"] * 4
        names = played.names("v6e-16")
        played.set_group("v6e-16", replicas=0, scaleStrategy={"workersToDelete": names})
        played.play(95)
        assert len([node for node in played.world.nodes() if node.pool == "slice-0"]) == 4
        played.play(15)
        assert [node.pool for node in played.world.nodes()] == ["default"]


# -- slices of one host ------------------------------------------------------------------------------------------------


def test_webhook_numbers_pods_of_single_hosts_itself_and_wrongly() -> None:
    with played_world() as played:
        slices(played, 3, "v6e-8")
        assert environment(played, "v6e-8") == [("v6e-8-0", "0"), ("v6e-8-1", "0"), ("v6e-8-2", "0")]
        assert "ray.io/replica-host-index" not in played.world.pods("v6e-8")[0].labels
        played.world.delete_pod(played.names("v6e-8")[0])
        played.play(10)
        assert environment(played, "v6e-8") == [("v6e-8-1", "0"), ("v6e-8-2", "0"), ("v6e-8-2", "1")]
        assert len(pools_of(played, "v6e-8")) == 1


# -- capacity ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limit", "words"),
    [("set_stock", "GCE out of resources"), ("set_quota", "GCE quota exceeded")],
)
def test_missing_capacity_shows_in_events_until_it_is_there(limit: str, words: str) -> None:
    with played_world() as played:
        getattr(played.world, limit)(V6E, 3)
        slices(played, 1)
        pending = played.world.pod_manifests("v6e-16")[0]
        (scheduled,) = (c for c in pending["status"]["conditions"] if c["type"] == "PodScheduled")
        assert (scheduled["status"], scheduled["reason"]) == ("False", "Unschedulable")
        failures = [event for event in played.world.events() if event["reason"] == "FailedScaleUp"]
        assert [event["involvedObject"]["name"] for event in failures] == played.names("v6e-16")
        assert all(words in event["message"] for event in failures)
        assert "in backoff after failed scale-up" in next(iter(played.messages("NotTriggerScaleUp")))
        getattr(played.world, limit)(V6E, None)
        played.play(5)
        assert played.phases("v6e-16") == ["Running"] * 4


def test_stock_that_comes_back_is_asked_for_after_a_while() -> None:
    with played_world(backoff_s=60) as played:
        played.world.set_stock(V6E, 0)
        slices(played, 1)
        played.play(40)
        failures = [event["count"] for event in played.world.events() if event["reason"] == "FailedScaleUp"]
        assert failures == [1] * 4
        played.play(60)
        failures = [event["count"] for event in played.world.events() if event["reason"] == "FailedScaleUp"]
        assert failures == [2] * 4


# -- losses ------------------------------------------------------------------------------------------------------------


def test_preempted_slice_is_warned_ended_and_replaced() -> None:
    with played_world(runner=PaperPods(stop_takes_s=12.0)) as played:
        slices(played, 1)
        before = played.world.pods("v6e-16")
        played.world.preempt(before[2].node)
        assert {(verb, grace) for verb, name, grace in played.runner.log if verb == "stop"} == {("stop", 15.0)}
        assert sorted(played.runner.verbs("stop")) == sorted(pod.name for pod in before)
        played.play(5)
        warned = played.world.pod_manifests("v6e-16")[0]["status"]
        assert warned["phase"] == "Running"
        assert ("DisruptionTarget", "True") in {(c["type"], c["status"]) for c in warned["conditions"]}
        played.play(15)
        after = played.world.pods("v6e-16")
        assert len(after) == 4
        assert not {pod.name for pod in before} & {pod.name for pod in after}
        assert not {pod.node for pod in before} & {node.name for node in played.world.nodes()}


def test_lost_node_ends_its_pod_at_once_and_the_slice_later() -> None:
    with played_world(lost_node_s=30) as played:
        slices(played, 1)
        lost, *others = played.world.pods("v6e-16")
        played.world.lose_node(lost.node)
        assert played.runner.verbs("kill") == [lost.name]
        played.play(20)
        assert set(played.names("v6e-16")) == {lost.name, *(pod.name for pod in others)}
        played.play(30)
        assert len(played.world.pods("v6e-16")) == 4
        assert not {pod.node for pod in others} & {pod.node for pod in played.world.pods("v6e-16")}


def test_unknown_names_are_refused_with_those_that_exist() -> None:
    with played_world() as played:
        node = played.world.nodes()[0].name
        with pytest.raises(UnknownNameError, match=node):
            played.world.lose_node("nothing")
        with pytest.raises(UnknownNameError, match="no pod nothing"):
            played.world.delete_pod("nothing")


# -- upgrades ----------------------------------------------------------------------------------------------------------


def other_image(spec: Any) -> None:
    for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
        group["template"]["spec"]["containers"][0]["image"] = "other:2"


def test_new_image_changes_no_running_pod_without_strategy() -> None:
    with played_world() as played:
        slices(played, 1)
        before = [pod.name for pod in played.world.pods()]
        played.world.apply(changed(other_image))
        played.play(10)
        assert [pod.name for pod in played.world.pods()] == before
        played.world.delete_pod(before[0])
        played.play(10)
        assert [pod.ray_container.image for pod in played.world.pods("headgroup")] == ["other:2"]


def test_new_image_replaces_every_pod_with_recreate() -> None:
    def recreate(spec: Any) -> None:
        spec["upgradeStrategy"] = {"type": "Recreate"}
        spec["workerGroupSpecs"][0]["replicas"] = 1

    def recreate_other(spec: Any) -> None:
        recreate(spec)
        other_image(spec)

    with played_world(changed(recreate)) as played:
        played.play(10)
        before = {pod.name for pod in played.world.pods()}
        played.world.apply(changed(recreate_other))
        played.play(10)
        after = played.world.pods()
        assert len(before) == len(after) == 5
        assert {pod.ray_container.image for pod in after} == {"other:2"}
