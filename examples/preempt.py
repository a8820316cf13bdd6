"""Take a slice away from a running gang and see it run again. No TPU needed.

python examples/preempt.py
"""

import time

import ray

from iris_ray import get_job_info, run_on_pod, run_on_pod_ray
from iris_ray.testing import SimulatedCluster


def train():
    time.sleep(12)  # your training loop, with checkpoints
    return get_job_info().attempt


if __name__ == "__main__":
    with SimulatedCluster({"v4-16": 2}) as cluster:  # two slices of two hosts each
        run_on_pod(time.time, "v4-16", num_slices=2)  # starts processes on both slices; the next run begins at once
        ref = run_on_pod_ray.remote(train, "v4-16", num_slices=2)
        time.sleep(2)
        cluster.preempt_slice("v4-16-1", notice_s=4)
        cluster.add_slice("v4-16")
        print(ray.get(ref))  # [2, 2, 2, 2]: the second attempt of each task
