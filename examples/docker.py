"""A program in a container on every host of two simulated slices. It needs docker or podman on this machine."""

from iris_ray import run_docker_on_pod
from iris_ray.testing import SimulatedCluster

SCRIPT = 'echo "task $IRIS_TASK_INDEX of $IRIS_NUM_TASKS on slice $MEGASCALE_SLICE_ID says: $GREETING"'

if __name__ == "__main__":
    with SimulatedCluster({"v4-16": 2}):  # on a real cluster: ray.init() instead
        run_docker_on_pod(
            "docker.io/library/busybox",
            ["sh", "-c", SCRIPT],
            tpu_type="v4-16",
            num_slices=2,
            env={"GREETING": 'it\'s "hello"\nin two lines'},
        )
