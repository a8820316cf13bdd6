"""The functions that ``iris-ray cluster selftest`` runs on the hosts."""

import os
import platform
import subprocess
import time
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import psutil

from iris_ray.task.job_info import get_job_info
from iris_ray.task.preemption import preemption_notice

ENDING_S = 30.0
"""How long a process that a task has left behind may take to end, which it may do after the task's result is out."""
REPLAY_LAYERS, REPLAY_SIZE = 16, 1024
PACKAGES = ("iris-ray", "ray", "jax", "jaxlib", "libtpu")


def facts() -> dict[str, Any]:
    """Return this task's slice and host, and the versions of the host's software."""
    me = get_job_info()
    assert me is not None, "the task of a gang"
    return {
        "slice": me.slice_name,
        "worker": me.worker_id,
        "python": platform.python_version(),
        "kernel": platform.release(),
        "packages": {name: found for name in PACKAGES if (found := _version(name)) is not None},
    }


def devices() -> dict[str, Any]:
    """Join the gang's processes and sum a one from each of their devices; return JAX's view of the gang."""
    import iris_ray.jax

    iris_ray.jax.initialize()
    import jax
    import numpy as np
    from jax.sharding import NamedSharding, PartitionSpec

    count = jax.device_count()
    mesh = jax.make_mesh((count,), ("all",))
    spread = NamedSharding(mesh, PartitionSpec("all"))  # type: ignore[no-untyped-call]
    on_all = NamedSharding(mesh, PartitionSpec())  # type: ignore[no-untyped-call]
    ones = jax.make_array_from_callback((count,), spread, lambda index: np.ones((count,))[index])
    total = jax.jit(lambda values: values.sum(), out_shardings=on_all)(ones)
    return {
        "platform": jax.devices()[0].platform,
        "kind": jax.devices()[0].device_kind,
        "processes": jax.process_count(),
        "devices": count,
        "here": jax.local_device_count(),
        "sum": int(total),
        "megascale_slices": int(os.environ.get("MEGASCALE_NUM_SLICES", "1")),
    }


def replay() -> tuple[bool, str]:
    """Run one computation on all devices of the gang; return whether all bits agree, and the report in words."""
    import iris_ray.jax

    iris_ray.jax.initialize()
    import jax.numpy as jnp
    import numpy as np

    def step(state: Any) -> Any:
        for _ in range(REPLAY_LAYERS):
            state = jnp.tanh(state @ state.T)
        return state

    size = (REPLAY_SIZE, REPLAY_SIZE)
    report = iris_ray.jax.replay_check(step, np.random.default_rng(1).normal(size=size).astype("float32"))
    return report.agrees, str(report)


def crash() -> None:
    """End this process without an exception."""
    os._exit(3)


def leave_a_daemon(seconds: str) -> None:
    """Start a process that leaves this task's process tree, and sleeps for some seconds."""
    subprocess.run(["sh", "-c", f"setsid sleep {float(seconds)} >/dev/null 2>&1 &"], check=True)


def daemons(seconds: str) -> int:
    """Return the number of such processes on this host, after at most `ENDING_S` in which they may be ended."""
    command, end = ["sleep", str(float(seconds))], time.monotonic() + ENDING_S
    while found := sum(bool(process.info["cmdline"] == command) for process in psutil.process_iter(["cmdline"])):
        if time.monotonic() > end:
            break
        time.sleep(0.5)
    return found


def await_notice(seconds: float) -> tuple[str, str, float] | None:
    """Wait until this task has a notice; return its kind, its reason and the seconds left, or None if none comes."""
    end = time.monotonic() + seconds
    while (notice := preemption_notice()) is None and time.monotonic() < end:
        time.sleep(0.1)
    return None if notice is None else (notice.kind.value, notice.reason, notice.seconds_left)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
