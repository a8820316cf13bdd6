"""Three users share the two slices of one (simulated) cluster, so that one of them waits.

python examples/three_users.py
"""

import os
import subprocess
import sys
import time

from iris_ray import IrisClient, ResourceSpec, tpu_device
from iris_ray.testing import SimulatedCluster


def train():
    time.sleep(10)


def driver(address):  # ann, ben and cleo each run this in a process of their own
    with IrisClient.remote(address) as client:
        job = client.submit(train, resources=ResourceSpec(device=tpu_device("v4-16")))
        print(job.job_id, flush=True)
        job.results()


def main():
    with SimulatedCluster({"v4-16": 2}, connect=False) as cluster:
        command = [sys.executable, __file__, cluster.address]
        ls = [sys.executable, "-m", "iris_ray", "ls", "--all", "--address", cluster.address]
        users = [
            subprocess.Popen(command, env=os.environ | {"IRIS_USER": name}, stdout=subprocess.PIPE)
            for name in ("ann", "ben", "cleo")
        ]
        for user in users:
            user.stdout.readline()  # the id of a job that is in the queue
        subprocess.run(ls)  # who runs where, and who waits
        for user in users:
            user.wait()
        subprocess.run(ls)


if __name__ == "__main__":
    main() if len(sys.argv) == 1 else driver(sys.argv[1])
