"""A JAX program in a task without a gang. What a gang does together, `test_jax_detection.py` and proofs try."""

import os
import subprocess
import sys

from iris_ray.model.job_info import JobInfo

ALONE = JobInfo("job", "job/task-2", 2, 4, 1, 0, 1, "slice-2", 0, "")
"""One of four tasks that are placed one by one, each on a slice of one host."""

PROGRAM = """
import jax, iris_ray.jax
iris_ray.jax.initialize(initialization_timeout=1)
print(jax.distributed.is_initialized(), iris_ray.jax.agreed_notice(7))
"""


def test_single_task_waits_for_no_others() -> None:
    """A script for gangs also serves for a sweep of single tasks."""
    outside = {name: value for name, value in os.environ.items() if not name.startswith("IRIS_")}
    env = outside | ALONE.to_env() | {"JAX_PLATFORMS": "cpu"}
    run = subprocess.run([sys.executable, "-c", PROGRAM], env=env, capture_output=True, text=True, timeout=120)
    assert (run.returncode, run.stdout) == (0, "False None\n"), run.stderr
