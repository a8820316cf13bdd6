"""A cluster file for GKE on this machine: a job brings its slice, which is a spot slice and is taken away."""

import time
from pathlib import Path

import ray

from iris_ray import get_job_info, preemption_notice, run_on_pod_ray
from iris_ray.testing import SimulatedCluster

FILE = Path(__file__).parent / "clusters" / "gke.yaml"


def train():
    for _ in range(20):  # your training loop
        time.sleep(1)
        if notice := preemption_notice():  # save a checkpoint here
            notice.saved()
    return get_job_info().attempt


if __name__ == "__main__":
    with SimulatedCluster.from_raycluster(FILE, idle_timeout_s=10) as cluster:
        ref = run_on_pod_ray.remote(train, "v6e-8")
        while not cluster.slice_names:  # the autoscaler, KubeRay and a new node pool bring one
            time.sleep(0.5)
        time.sleep(8)
        cluster.preempt_slice("v6e-8-0")  # its pod runs its hook, and ends; another slice comes
        print(ray.get(ref))  # [2]
        for event in cluster.kubernetes.events():
            print(event["reason"], event["message"])
