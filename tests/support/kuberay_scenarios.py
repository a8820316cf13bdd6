"""What Ray's own autoscaler makes of missing slices on KubeRay, as small stories with a result each.

``python -m tests.support.kuberay_scenarios FILE`` writes what comes of all and what should, on whatever Ray it runs.
"""

import json
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from iris_ray.capacity.kuberay_demand import KubeRayDemand
from iris_ray.capacity.ray_internals import counts_hosts
from iris_ray.model.topology import get_tpu_config
from tests.support.kuberay_world import KubeRayWorld, OurApi, RaysAutoscaler

LOOK_S = 0.5
LOOKS_OF_AUTOSCALER = 10
"""Looks of the Controller between two of Ray's autoscaler: 0.5 s and 5 s."""
Missing = Mapping[str, Sequence[int]]


class Cluster:
    """A world with Ray's autoscaler and the Controller's demand, in virtual time."""

    def __init__(self, most_launches: int = 10) -> None:
        self.now = 1000.0
        self.world = KubeRayWorld()
        self.autoscaler = RaysAutoscaler(self.world, most_launches)
        self.demand = KubeRayDemand(OurApi(self.world), clock=lambda: self.now)
        self.pass_time({})

    def pass_time(self, missing: Missing, seconds: float = 20.0) -> None:
        for look in range(int(seconds / LOOK_S)):
            self.demand.update(missing, self.world.slices())
            if look % LOOKS_OF_AUTOSCALER == 0:
                self.autoscaler.look()
            self.now += LOOK_S

    def join(self, hosts: int) -> None:
        """Have the next pods become Ray nodes, the last of a slice first: the one with the head is the last."""
        pods = sorted((pod for pod in self.world.pods if not pod.joined), key=lambda pod: (pod.replica, -pod.index))
        for pod in pods[:hosts]:
            pod.joined = True


def with_bundles(tpu_type: str, missing: int, bundles: int, most_launches: int = 10, looks: int = 4) -> int:
    """The replicas that placement groups of so many head bundles bring."""
    world = KubeRayWorld()
    world.gangs = [([{f"TPU-{tpu_type}-head": 1.0}] * bundles, frozenset())] * missing
    autoscaler = RaysAutoscaler(world, most_launches)
    for _ in range(looks):
        autoscaler.look()
    return world.replicas(tpu_type)


DIVIDES = counts_hosts()
"""Whether this Ray's provider divides hosts by ``numOfHosts``, as newer ones do."""


def one_bundle_a_slice() -> Any:
    return [with_bundles("v6e-16", missing, 1) for missing in (1, 2, 3, 4)]


def one_bundle_a_host() -> Any:
    return [[with_bundles("v6e-16", missing, 4, most) for missing in (1, 2, 3)] for most in (10, 1000)]


def one_bundle_a_slice_of_one_host() -> Any:
    return [with_bundles("v6e-8", missing, 1) for missing in (1, 2, 3)]


def one_bundle_a_host_after_a_host_has_joined() -> Any:
    """The host that has joined has no head, so the autoscaler launches another: in vain, and it counts on it later."""
    world = KubeRayWorld()
    autoscaler = RaysAutoscaler(world)
    bundles = [{"TPU-v6e-16-head": 1.0}] * 4
    world.gangs = [(bundles, frozenset())]
    autoscaler.look()
    world.pods[3].joined = True
    autoscaler.look()
    world.gangs = []
    for pod in world.pods:
        pod.joined = True
    autoscaler.look()
    world.gangs = [(bundles, frozenset({world.pods[0].replica}))]  # the next slice
    for _ in range(4):
        autoscaler.look()
    return world.replicas("v6e-16")


def ours() -> Any:
    found = {}
    for tpu_type in ("v6e-16", "v6e-8"):
        for missing in (1, 2, 3):
            cluster = Cluster()
            cluster.pass_time({tpu_type: [missing]}, 30.0)
            hosts = get_tpu_config(tpu_type).vm_count
            found[f"{missing} {tpu_type}"] = [cluster.world.replicas(tpu_type), len(cluster.world.pods) // hosts]
    return found


def ours_while_hosts_join() -> Any:
    """A job needs two slices. For a second after one has come, its plan still misses it."""
    cluster = Cluster()
    cluster.pass_time({"v6e-16": [2]})
    for missing in (2, 2, 2, 2, 1, 1, 1, 1):
        cluster.join(1)
        cluster.pass_time({"v6e-16": [missing]}, 1.0)
        whole = sum(whole for _, whole in cluster.world.slices().values())
        cluster.pass_time({"v6e-16": [2 - whole]} if whole < 2 else {}, 7.0)
    cluster.pass_time({}, 60.0)
    return [cluster.world.replicas("v6e-16"), cluster.world.patches]


def ours_with_more_demand_while_hosts_join() -> Any:
    cluster = Cluster()
    cluster.pass_time({"v6e-16": [1]})
    cluster.join(2)
    cluster.pass_time({"v6e-16": [1, 1]})
    found = [cluster.world.replicas("v6e-16")]
    cluster.join(2)
    cluster.pass_time({"v6e-16": [1, 1]}, 1.0)  # the job that it came for still waits
    cluster.pass_time({"v6e-16": [1]})
    return [*found, cluster.world.replicas("v6e-16")]


def ours_with_sixteen_hosts() -> Any:
    cluster = Cluster()
    group = cluster.world.group("v6e-16")
    group["groupName"], group["numOfHosts"] = "v6e-64", 16
    group["template"]["spec"]["nodeSelector"]["cloud.google.com/gke-tpu-topology"] = "8x8"
    cluster.pass_time({"v6e-64": [1]})
    return cluster.world.replicas("v6e-64")


def ours_after_the_job() -> Any:
    cluster = Cluster()
    cluster.pass_time({"v6e-16": [2]})
    cluster.join(8)
    cluster.pass_time({})
    for pod in cluster.world.pods:
        pod.idle_s = 700.0
    cluster.pass_time({}, 60.0)
    return [cluster.world.replicas("v6e-16"), len(cluster.world.pods)]


def ours_after_a_job_that_is_cancelled_while_pods_wait() -> Any:
    """One of three slices has come, and one is just coming; the third is withdrawn, and nobody brings it back."""
    cluster = Cluster()
    cluster.pass_time({"v6e-16": [1, 1, 1]})
    cluster.join(5)
    cluster.pass_time({"v6e-16": [1, 1]})
    cluster.pass_time({"v6e-16": [1]}, 300.0)
    found = [cluster.world.replicas("v6e-16"), len(cluster.world.pods)]
    cluster.pass_time({"v6e-16": [1, 1]})
    return [*found, cluster.world.replicas("v6e-16"), len(cluster.world.pods)]


def ours_beyond_the_most() -> Any:
    """At most four: a gang that they don't complete gets none, and keeps none from those behind it."""
    found = []
    for gangs in ([5], [3, 5, 1], [1, 1, 1, 1, 1, 1]):
        cluster = Cluster()
        cluster.pass_time({"v6e-16": gangs})
        found.append(cluster.world.replicas("v6e-16"))
    return found


STORIES: dict[Callable[[], Any], Any] = {
    one_bundle_a_slice: [0, 0, 0, 1] if DIVIDES else [1, 2, 3, 4],
    one_bundle_a_slice_of_one_host: [1, 2, 3],
    one_bundle_a_host: [[1, 2, 2], [1, 2, 3]] if DIVIDES else [[4, 4, 4], [4, 4, 4]],
    one_bundle_a_host_after_a_host_has_joined: 1 if DIVIDES else 4,
    ours: {f"{missing} {tpu_type}": [missing, missing] for tpu_type in ("v6e-16", "v6e-8") for missing in (1, 2, 3)},
    ours_while_hosts_join: [2, 1],
    ours_with_more_demand_while_hosts_join: [2, 2],
    ours_with_sixteen_hosts: 1,
    ours_after_the_job: [0, 0] if DIVIDES else [4, 16],  # of 2.49 another slice for each host that goes
    ours_after_a_job_that_is_cancelled_while_pods_wait: [2, 8, 3, 12],
    ours_beyond_the_most: [0, 4, 4],
}
"""Each story and what comes of it."""


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)
    Path(sys.argv[1]).write_text(json.dumps([(story.__name__, story(), wanted) for story, wanted in STORIES.items()]))
