"""The shortest useful script: one process on every host of two (simulated) TPU slices."""

from iris_ray import get_job_info, run_on_pod
from iris_ray.testing import SimulatedCluster


def hello():
    me = get_job_info()
    return f"task {me.task_index} of {me.num_tasks}: slice {me.slice_id} ({me.slice_name}), worker {me.worker_id}"


if __name__ == "__main__":
    with SimulatedCluster({"v4-16": 2}):  # on a real cluster: ray.init() instead
        print(*run_on_pod(hello, "v4-16", num_slices=2), sep="\n")
