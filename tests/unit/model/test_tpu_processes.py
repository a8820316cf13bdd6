"""Several processes on a host: what libtpu is told about each."""

import pytest

from iris_ray.model.tpu_processes import DECIDED_BY_US, PROCESS_COUNTS, TpuProcess

TWO_HOSTS = ("10.0.0.1:20003", "10.0.0.1:20007", "10.0.0.2:20003", "10.0.0.2:20011")


def test_process_is_numbered_by_host_and_has_its_share_of_chips() -> None:
    assert TpuProcess(TWO_HOSTS, 3, 2, "2x2x2").to_env() == {
        "TPU_PROCESS_ADDRESSES": "10.0.0.1:20003,10.0.0.1:20007,10.0.0.2:20003,10.0.0.2:20011",
        "TPU_PROCESS_PORT": "20011",
        "CLOUD_TPU_TASK_ID": "3",
        "TPU_WORKER_ID": "3",
        "TPU_VISIBLE_CHIPS": "2,3",
        "TPU_CHIPS_PER_PROCESS_BOUNDS": "1,2,1",
        "TPU_PROCESS_BOUNDS": "2,1,2",
    }


@pytest.mark.parametrize(
    ("per_host", "topology", "processes", "chips"),
    [  # of one host, as in JAX's own tests
        (1, "2x2x1", "1,1,1", "2,2,1"),
        (2, "2x2x1", "2,1,1", "1,2,1"),
        (4, "2x2x1", "2,2,1", "1,1,1"),
        (2, "4x8x8", "4,4,8", "1,2,1"),
        (4, "4x4", "4,4,1", "1,1,1"),
    ],
)
def test_bounds_of_processes_cover_slice(per_host: int, topology: str, processes: str, chips: str) -> None:
    env = TpuProcess(("10.0.0.1:1",) * per_host, 0, per_host, topology).to_env()
    assert (env["TPU_PROCESS_BOUNDS"], env["TPU_CHIPS_PER_PROCESS_BOUNDS"]) == (processes, chips)


@pytest.mark.parametrize("per_host", PROCESS_COUNTS)
def test_processes_of_a_host_see_each_chip_once(per_host: int) -> None:
    envs = [TpuProcess(("10.0.0.1:1",) * per_host, i, per_host, "2x2x1").to_env() for i in range(per_host)]
    assert [chip for env in envs for chip in env["TPU_VISIBLE_CHIPS"].split(",")] == ["0", "1", "2", "3"]
    assert len({*DECIDED_BY_US} & envs[0].keys()) == 5
