"""What JAX finds in a task: a gang, through its own Cloud TPU detection with pretended chips, or nobody else."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from iris_ray.actors.host.task_environment import task_environment
from iris_ray.actors.protocol.task_files import TaskFiles
from iris_ray.model.job_info import JobInfo
from iris_ray.model.multislice import MultisliceInfo
from iris_ray.model.topology import get_tpu_config
from iris_ray.testing.metadata_server import MetadataServers
from iris_ray.testing.tpu_host import tpu_host
from tests.support.jax_reader import Found, Reader, jax_reader

# -- gangs ------------------------------------------------------------------------------------------------------------
# The only thing that is pretended is the presence of chips: JAX looks for them on the PCI bus.


@pytest.fixture(scope="module")
def as_jax_reads() -> Iterator[Reader]:
    with jax_reader() as reader:
        yield reader


STALE = {
    "MEGASCALE_COORDINATOR_ADDRESS": "10.9.9.9:8081",
    "MEGASCALE_NUM_SLICES": "7",
    "MEGASCALE_SLICE_ID": "5",
    "MEGASCALE_PORT": "8081",
}


def gang_environments(
    servers: MetadataServers, num_slices: int, tpu_type: str, kind: str
) -> tuple[list[dict[str, str]], list[JobInfo]]:
    """The environment of every task of a gang, on hosts with leftovers of another run, and who the tasks are."""
    config = get_tpu_config(tpu_type)
    environments: list[dict[str, str]] = []
    infos: list[JobInfo] = []
    for slice_id in range(num_slices):
        addresses = [f"10.0.{slice_id}.{1 + worker_id}" for worker_id in range(config.vm_count)]
        for worker_id in range(config.vm_count):
            index = len(infos)
            info = JobInfo(
                job_id="j",
                task_id=f"j/task-{index}",
                task_index=index,
                num_tasks=num_slices * config.vm_count,
                attempt=2,
                slice_id=slice_id,
                num_slices=num_slices,
                slice_name=f"slice-{slice_id}",
                worker_id=worker_id,
                coordinator_address="10.0.0.1:20002",
            )
            host = tpu_host(info.slice_name, worker_id, config, "ab" * 28, addresses, Path("/tmp/nowhere"))
            metadata = servers.serve("127.0.0.1", host.metadata).address
            inherited = STALE | {"GCE_METADATA_IP": metadata}
            if kind == "gketpu":
                inherited |= {"TPU_WORKER_ID": str(worker_id), "TPU_WORKER_HOSTNAMES": ",".join(addresses)}
                inherited["TPU_SKIP_MDS_QUERY"] = "true"
            changes = task_environment(
                inherited, {}, {}, info, MultisliceInfo("10.0.0.1", slice_id, num_slices, 20_000, 20_001), None
            )
            environments.append({name: value for name, value in (inherited | changes).items() if value is not None})
            infos.append(info)
    return environments, infos


@pytest.mark.parametrize("kind", ["gcetpu", "gketpu"])
@pytest.mark.parametrize(("num_slices", "tpu_type"), [(1, "v4-8"), (1, "v4-32"), (3, "v4-16"), (2, "v6e-8")])
def test_jax_finds_coordinator_and_process_ids(
    servers: MetadataServers, as_jax_reads: Reader, num_slices: int, tpu_type: str, kind: str
) -> None:
    """As iris_ray numbers them, on a TPU VM, which has a metadata server, and in GKE, which sets variables."""
    environments, infos = gang_environments(servers, num_slices, tpu_type, kind)
    assert as_jax_reads(environments) == [Found(kind, "10.0.0.1:8482", len(infos), info.task_index) for info in infos]


# -- single tasks -----------------------------------------------------------------------------------------------------


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


# -- notices ----------------------------------------------------------------------------------------------------------

NOTICED = """
import json, os, signal, sys, time
import jax, iris_ray.jax
from iris_ray.actors.protocol.task_files import TaskFiles, survive_notices
files, deadline = TaskFiles.of_this_task(), float(sys.argv[1])
survive_notices(files)
iris_ray.jax.initialize()
for step in range(1, 1000):
    if step == 3 and jax.process_index() in json.loads(sys.argv[2]):
        kind = ["eviction", "maintenance"][jax.process_index()]
        files.notice.write_text(json.dumps({"kind": kind, "reason": "a test", "deadline": deadline}))
        os.kill(os.getpid(), signal.SIGTERM)
    if (notice := iris_ray.jax.agreed_notice(step)) is not None:
        print(step, notice)
        break
    time.sleep(0.02)
"""


@pytest.mark.parametrize("noticed", [[1], [0, 1]])
def test_processes_agree_on_a_notice_that_only_some_got_or_that_differs(tmp_path: Path, noticed: list[int]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        coordinator = f"127.0.0.1:{free.getsockname()[1]}"
    outside = {name: value for name, value in os.environ.items() if not name.startswith("IRIS_")}
    processes = []
    for index in range(2):
        info = JobInfo("job", f"job/task-{index}", index, 2, 1, 0, 1, "slice-2", index, coordinator)
        env = outside | info.to_env() | {"JAX_PLATFORMS": "cpu", TaskFiles.VARIABLE: str(tmp_path / str(index))}
        command = [sys.executable, "-c", NOTICED, str(time.time() + 60), str(noticed)]
        processes.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True))
    said = {process.communicate(timeout=120)[0] for process in processes}
    assert len(said) == 1, said
    assert "PreemptionNotice(" in said.pop()
