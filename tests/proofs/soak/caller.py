"""One caller of a soak: a driver that runs one job after the other, and tells how many it has done.

    python -m tests.proofs.soak.caller ADDRESS KIND

Each line that it prints is the id of its Ray job and a number of jobs. It ends well when its standard input does.
"""

import contextlib
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import ray
from ray.exceptions import RayTaskError
from ray.util.placement_group import placement_group, remove_placement_group

from iris_ray import IrisClient, ResourceSpec, run_on_pod, run_on_pod_ray

TPU_TYPE = "v4-8"
PLAIN_BATCH = 20


def nothing() -> int:
    return 1


plain_task = ray.remote(num_cpus=0.1)(nothing)


class Nothing:
    def nothing(self) -> int:
        return 1


plain_actor = ray.remote(num_cpus=0)(Nothing)


def fails() -> None:
    raise ValueError("on purpose")


def prints() -> str:
    for number in range(100):
        print(f"line {number} of a job that prints")
    time.sleep(2)
    return "printed"


def warm() -> int:
    """Run a job on a warm slice."""
    assert run_on_pod(nothing, TPU_TYPE) == [1]
    return 1


def gang() -> int:
    """Run a job on two warm slices."""
    assert run_on_pod(nothing, TPU_TYPE, num_slices=2) == [1, 1]
    return 1


def cpu() -> int:
    """Run a job of two tasks without chips."""
    handle = IrisClient().submit(nothing, resources=ResourceSpec(cpu=0.5, replicas=2))
    assert handle.result() == [1, 1]
    return 1


def visit() -> int:
    """Run a job that fails, one that prints, and a command beside that; none leaves a warm slice."""
    with contextlib.suppress(RayTaskError):
        run_on_pod(fails, TPU_TYPE, max_retries_failure=0, keep_warm=0)
    reference = run_on_pod_ray.remote(prints, TPU_TYPE, keep_warm=0)
    job_id, client = run_on_pod_ray.job_id(reference), IrisClient()
    while not ray.wait([reference], timeout=0.2)[0]:
        try:
            client.exec(job_id, ["sh", "-c", "echo $IRIS_TASK_INDEX"])
            break
        except Exception:  # it does not run yet, or does no more
            continue
    assert ray.get(reference) == ["printed"]
    return 2


def plain_tasks() -> int:
    """Run plain tasks of Ray's."""
    assert sum(ray.get([plain_task.remote() for _ in range(PLAIN_BATCH)])) == PLAIN_BATCH
    return PLAIN_BATCH


def plain_actors() -> int:
    """Run a plain actor of Ray's."""
    actor = plain_actor.remote()
    assert ray.get(actor.nothing.remote()) == 1
    ray.kill(actor)
    return 1


def plain_drivers() -> int:
    """Have a driver come and go that does nothing."""
    address = ray.get_runtime_context().gcs_address
    command = "import sys, ray; ray.init(sys.argv[1], logging_level='ERROR', log_to_driver=False)"
    subprocess.run([sys.executable, "-c", command, address], check=True, stdout=subprocess.DEVNULL)
    return 1


def plain_groups() -> int:
    """Make a plain placement group of Ray's on a named host, and remove it."""
    here = ray.get_runtime_context().get_node_id()
    name = f"a-pool-with-a-long-name/{secrets.token_hex(20)}/{secrets.token_hex(4)}"
    group = placement_group([{"CPU": 0.1}], name=name, bundle_label_selector=[{"ray.io/node-id": here}])
    ray.get(group.ready())
    remove_placement_group(group)
    return 1


KINDS: dict[str, Callable[[], int]] = {
    "warm": warm,
    "gang": gang,
    "cpu": cpu,
    "visit": visit,
    "plain tasks": plain_tasks,
    "plain actors": plain_actors,
    "plain placement groups": plain_groups,
    "plain drivers": plain_drivers,
}


def main(address: str, kind: str) -> None:
    ended = threading.Event()

    def wait_for_end() -> None:
        sys.stdin.read()
        ended.set()

    threading.Thread(target=wait_for_end, daemon=True).start()
    ray.init(address, logging_level="ERROR", log_to_driver=False)
    me: Any = ray.get_runtime_context().get_job_id()
    while not ended.is_set():
        print(me, KINDS[kind](), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
