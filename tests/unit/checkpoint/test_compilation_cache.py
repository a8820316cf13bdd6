"""JAX's compilation cache in the `local_dir` of each task, with real processes of JAX on CPU."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from iris_ray.actors.host.directories import LocalDirectories
from iris_ray.checkpoint.compilation_cache import DIRECTORY
from iris_ray.checkpoint.host import FileService
from iris_ray.model.job_info import JobInfo

TOKEN = "5ec2e7"
PROGRAM = """
import iris_ray.jax
iris_ray.jax.initialize()
import jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
mesh = Mesh(np.array(jax.devices()), ("all",))
ones = jax.make_array_from_process_local_data(NamedSharding(mesh, PartitionSpec("all")), np.ones((3, 8)))
hits = []
jax.monitoring.register_event_listener(lambda event, **_: hits.append(event.endswith("/cache_hits")))
step = jax.jit(lambda x: (x @ x.T).sum(), out_shardings=NamedSharding(mesh, PartitionSpec()))
print(int(step(ones)), any(hits))
"""


def run_gang(
    local_dirs: list[Path], attempt: int, env: dict[str, str] | None = None, file_services: tuple[str, ...] = ()
) -> list[str]:
    """Run the program as a gang of so many processes; return what they print."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        coordinator = f"127.0.0.1:{free.getsockname()[1]}"
    outside = {name: value for name, value in os.environ.items() if not name.startswith(("IRIS_", "JAX_"))}
    processes = []
    for index, local_dir in enumerate(local_dirs):
        info = JobInfo(
            job_id="j",
            task_id=f"j/task-{index}",
            task_index=index,
            num_tasks=len(local_dirs),
            attempt=attempt,
            slice_id=index,
            num_slices=len(local_dirs),
            slice_name=f"slice-{index}",
            worker_id=0,
            coordinator_address=coordinator,
            local_dir=str(local_dir),
            file_services=file_services,
        )
        of_task = outside | {"JAX_PLATFORMS": "cpu"} | (env or {}) | info.to_env()
        command = [sys.executable, "-c", PROGRAM]
        processes.append(subprocess.Popen(command, env=of_task, stdout=subprocess.PIPE, text=True))
    outputs = [process.communicate(timeout=60)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * len(processes)
    return [output.splitlines()[-1] for output in outputs]


def steps_in(local_dir: Path) -> set[str]:
    return {path.name for path in local_dir.glob(f"{DIRECTORY}/0/jit__lambda*")}


def test_next_attempt_compiles_nothing_again_even_on_a_new_host(tmp_path: Path) -> None:
    for name in ("stays", "lost", "new"):
        (tmp_path / name).mkdir()
    hosts = [LocalDirectories(tmp_path / name, None) for name in ("stays", "lost", "new")]
    stays, lost, new = (host.take("j", TOKEN) for host in hosts)
    assert run_gang([stays, lost], attempt=1) == ["288 False"] * 2
    assert steps_in(stays) == steps_in(lost) != set()  # each process has written it
    service = FileService("127.0.0.9", hosts[0], lambda _: 1 << 30)
    try:
        assert run_gang([stays, new], attempt=2, file_services=(service.address, "")) == ["288 True"] * 2
    finally:
        service.stop()


@pytest.mark.parametrize("variable", ["JAX_COMPILATION_CACHE_DIR", "JAX_ENABLE_COMPILATION_CACHE"])
def test_user_chooses_another_cache_or_none(tmp_path: Path, variable: str) -> None:
    chosen = str(tmp_path / "chosen") if variable.endswith("DIR") else "0"
    assert run_gang([tmp_path / "local"], attempt=1, env={variable: chosen}) == ["72 False"]
    assert not (tmp_path / "local").exists()
