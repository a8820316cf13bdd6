"""The environment of a task process."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from iris_ray.actors.host.task_environment import cpus_of, split_by_start, task_environment
from iris_ray.model.job_info import JobInfo
from iris_ray.model.multislice import MultisliceInfo
from iris_ray.model.tpu_processes import DECIDED_BY_US, TpuProcess
from tests.support.chip_holders import ChipHolder, libtpu_library

SINGLE = MultisliceInfo("10.0.0.1", 0, 1, 20_000, 20_001)
SECOND_OF_TWO = MultisliceInfo("10.0.0.1", 1, 2, 20_000, 20_001)


def info(slice_id: int = 0, num_slices: int = 1, slice_name: str = "slice-a", tasks: int = 4) -> JobInfo:
    return JobInfo("j", "j/task-0", 0, tasks, 1, slice_id, num_slices, slice_name, 0, "10.0.0.1:20002")


def environment(
    inherited: dict[str, str] | None = None,
    user_env: dict[str, str] | None = None,
    multislice: MultisliceInfo = SINGLE,
    num_cpus: float | None = None,
    host_env: dict[str, str] | None = None,
    num_gpus: float = 0.0,
    slice_name: str = "slice-a",
    tpu_process: TpuProcess | None = None,
    tasks: int = 4,
) -> dict[str, str]:
    """The task's whole environment, after the changes."""
    inherited, user_env = inherited or {}, user_env or {}
    place = info(multislice.slice_id, multislice.num_slices, slice_name, tasks)
    place = replace(place, processes_per_host=tpu_process.per_host if tpu_process else 1)
    changes = task_environment(inherited, host_env or {}, user_env, place, multislice, num_cpus, num_gpus, tpu_process)
    result = inherited | changes
    return {name: value for name, value in result.items() if value is not None}


def megascale(env: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in env.items() if name.startswith("MEGASCALE_")}


@pytest.mark.parametrize("source", ["inherited", "user_env"])
@pytest.mark.parametrize("name", ["NUM_SLICES", "COORDINATOR_ADDRESS", "SLICE_ID", "PORT", "DEBUG_PORT", "TRANSPORT"])
def test_single_slice_removes_leftover_megascale_variables(source: str, name: str) -> None:
    """Only inherited variables of an earlier attempt or the provider hung a single-slice run (defect 12)."""
    variables: dict[str, Any] = {source: {f"MEGASCALE_{name}": "stale"}}
    assert megascale(environment(**variables)) == {}


@pytest.mark.parametrize("source", ["inherited", "user_env"])
def test_multislice_overwrites_stale_identity_of_any_source(source: str) -> None:
    variables: dict[str, Any] = {source: dict.fromkeys(SECOND_OF_TWO.to_env(), "stale")}
    assert megascale(environment(**variables, multislice=SECOND_OF_TWO)) == SECOND_OF_TWO.to_env()


def test_multislice_keeps_users_megascale_tuning() -> None:
    env = environment(user_env={"MEGASCALE_GRPC_PREMAP_MEMORY_BYTES": "17"}, multislice=SECOND_OF_TWO)
    assert env["MEGASCALE_GRPC_PREMAP_MEMORY_BYTES"] == "17"


def test_user_variables_win_over_defaults() -> None:
    env = environment({"OMP_NUM_THREADS": "1"}, {"OMP_NUM_THREADS": "7", "TPU_VISIBLE_CHIPS": "0,1"}, num_cpus=4)
    assert (env["OMP_NUM_THREADS"], env["TPU_VISIBLE_CHIPS"]) == ("7", "0,1")


def test_inherited_chip_visibility_is_removed() -> None:
    env = environment({"TPU_VISIBLE_CHIPS": "0", "TPU_CHIPS_PER_HOST_BOUNDS": "1,1,1", "TPU_HOST_BOUNDS": "1,1,1"})
    assert not [name for name in env if name.startswith("TPU_")]


def test_task_without_chips_is_told_so() -> None:
    env = environment(host_env={"TPU_VISIBLE_CHIPS": "0,1", "TPU_HOST_BOUNDS": "1,1,1"}, slice_name="")
    assert (env["TPU_VISIBLE_CHIPS"], env["TPU_VISIBLE_DEVICES"]) == ("", "")
    own = environment(user_env={"TPU_VISIBLE_CHIPS": "1"}, num_gpus=1.0, slice_name="")
    assert (own["TPU_VISIBLE_CHIPS"], own["TPU_VISIBLE_DEVICES"]) == ("1", "")


def test_raylets_chip_visibility_replaces_rays() -> None:
    env = environment({"TPU_VISIBLE_CHIPS": "0", "TPU_HOST_BOUNDS": "1,1,1"}, host_env={"TPU_VISIBLE_CHIPS": "2,3"})
    assert {name: env.get(name) for name in env if name.startswith("TPU_")} == {"TPU_VISIBLE_CHIPS": "2,3"}


def test_task_without_gpus_sees_none_unless_user_decides() -> None:
    env = environment({"CUDA_VISIBLE_DEVICES": "0,1"})
    assert (env["CUDA_VISIBLE_DEVICES"], env["HIP_VISIBLE_DEVICES"]) == ("", "")
    assert environment(user_env={"CUDA_VISIBLE_DEVICES": "1"})["CUDA_VISIBLE_DEVICES"] == "1"


def test_task_with_gpus_sees_those_assigned_by_ray() -> None:
    env = environment({"CUDA_VISIBLE_DEVICES": "1"}, num_gpus=1.0)
    assert (env["CUDA_VISIBLE_DEVICES"], "HIP_VISIBLE_DEVICES" in env) == ("1", False)


@pytest.mark.parametrize("of_host", [{}, {"JAX_PLATFORMS": "tpu,cpu", "PJRT_DEVICE": "TPU"}])
def test_task_without_accelerators_keeps_off_host_chips(of_host: dict[str, str]) -> None:
    env = environment(of_host, host_env=of_host, slice_name="")
    assert (env["JAX_PLATFORMS"], env["PJRT_DEVICE"]) == ("cpu", "CPU")


@pytest.mark.parametrize("source", ["inherited", "user_env"])
def test_user_may_set_jax_platform_without_accelerators(source: str) -> None:
    """The user's Ray job may have set the variable for all its processes, so that the raylet has another value."""
    variables: dict[str, Any] = {source: {"JAX_PLATFORMS": "tpu"}}
    assert environment(**variables, host_env={"JAX_PLATFORMS": "tpu,cpu"}, slice_name="")["JAX_PLATFORMS"] == "tpu"


def test_task_with_gpus_leaves_platform_to_jax() -> None:
    assert not {"JAX_PLATFORMS", "PJRT_DEVICE"} & environment(num_gpus=1.0, slice_name="").keys()


@pytest.mark.parametrize(
    ("variables", "platforms"),
    [
        ({}, "tpu,cpu"),
        ({"user_env": {"JAX_PLATFORMS": "cpu"}}, "cpu"),
        ({"inherited": {"JAX_PLATFORMS": "cpu"}}, "cpu"),  # a simulated host, or the user's Ray job
        ({"inherited": {"JAX_PLATFORMS": ""}}, ""),
    ],
    ids=str,
)
def test_task_with_chips_expects_them_unless_told_otherwise(variables: dict[str, Any], platforms: str) -> None:
    assert environment(**variables)["JAX_PLATFORMS"] == platforms


@pytest.mark.skipif(libtpu_library() is None, reason="libtpu is not installed: pip install libtpu")
def test_broken_libtpu_is_an_error_in_task_with_chips() -> None:
    """Without the variable JAX warns, and computes on the CPU."""
    environ = {**os.environ, "TPU_SKIP_MDS_QUERY": "1"} | environment({"PATH": os.environ["PATH"]})
    command = [sys.executable, "-c", "import jax; print(jax.devices())"]
    found = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert (found.returncode, found.stdout) == (1, "")
    assert "Unable to initialize backend 'tpu'" in found.stderr


# -- processes of a host ----------------------------------------------------------------------------------------------


SECOND = TpuProcess(("10.0.0.1:20003", "10.0.0.1:20007"), 1, 2, "2x2x1")
OF_WEBHOOK = {
    "TPU_PROCESS_ADDRESSES": "workers-0-0.headless:8471,workers-0-1.headless:8471",
    "TPU_PROCESS_PORT": "8471",
    "TPU_WORKER_ID": "0",
}


@pytest.mark.parametrize(
    "source", [{"inherited": OF_WEBHOOK, "host_env": OF_WEBHOOK}, {"user_env": OF_WEBHOOK}], ids=str
)
def test_only_process_of_its_host_keeps_process_variables(source: dict[str, Any]) -> None:
    assert environment(**source).items() >= OF_WEBHOOK.items()


@pytest.mark.parametrize("source", ["inherited", "user_env"])
def test_each_of_several_processes_replaces_process_variables(source: str) -> None:
    stale = dict.fromkeys([*DECIDED_BY_US, *SECOND.to_env()], "stale")
    of_user = source == "user_env"
    env = environment(**{source: stale}, tpu_process=SECOND)  # type: ignore[arg-type]
    mine = {name: value for name, value in env.items() if name.startswith(("TPU_", "CLOUD_TPU_"))}
    bounds = dict.fromkeys(("TPU_PROCESS_BOUNDS", "TPU_CHIPS_PER_PROCESS_BOUNDS"), "stale") if of_user else {}
    assert mine == SECOND.to_env() | bounds, "only the bounds may be the user's"


ON_PART = TpuProcess(("10.0.0.1:8471", "10.0.0.3:8471"), 1, 1, "2x4", "v6e-16")


@pytest.mark.parametrize("source", ["inherited", "user_env"])
def test_task_on_a_part_sees_no_variable_of_the_whole_slice(source: str) -> None:
    of_slice = dict.fromkeys(ON_PART.to_env(), "of the whole slice") | {"TPU_HOST_BOUNDS": "2,2,1"}
    env = environment(**{source: of_slice}, tpu_process=ON_PART)  # type: ignore[arg-type]
    bounds = ("TPU_PROCESS_BOUNDS", "TPU_CHIPS_PER_PROCESS_BOUNDS") if source == "user_env" else ()
    assert {name for name, value in env.items() if value == "of the whole slice"} == {*bounds}
    assert "TPU_HOST_BOUNDS" not in env


def test_processes_of_a_host_share_claimed_cpus() -> None:
    assert environment(num_cpus=8, tpu_process=SECOND)["OMP_NUM_THREADS"] == "4"


@pytest.mark.skipif(libtpu_library() is None, reason="libtpu is not installed: pip install libtpu")
@pytest.mark.parametrize(("variables", "second"), [({}, False), (SECOND.to_env(), True)], ids=["whole host", "share"])
def test_libtpu_lets_processes_share_a_host_by_bounds(tmp_path: Path, variables: dict[str, str], second: bool) -> None:
    holders = [ChipHolder(tmp_path, real=True, launcher=(), **variables) for _ in range(2)]
    try:
        assert [holder.said == "holds" for holder in holders] == [True, second]
    finally:
        for holder in holders:
            holder.end()


@pytest.mark.parametrize(
    ("nodes", "per_host", "expected"),
    [
        (["0-3", "4-7"], 1, [set()]),
        (["0-3"], 2, [set(), set()]),
        (["0-1,4-5", "2-3,6-7"], 2, [{0, 1, 4, 5}, {2, 3, 6, 7}]),
        (["0-3", "4-7"], 4, [{0, 1, 2, 3}, {0, 1, 2, 3}, {4, 5, 6, 7}, {4, 5, 6, 7}]),
        (["0", "1", "2", "3"], 2, [{0, 1}, {2, 3}]),
        (["0-3", "8-9", ""], 2, [set(), set()]),  # a container has CPUs of one node, and a node may have none
    ],
    ids=str,
)
def test_processes_are_bound_to_their_numa_nodes(
    tmp_path: Path, nodes: list[str], per_host: int, expected: list[set[int]]
) -> None:
    for number, cpus in enumerate(nodes):
        (tmp_path / f"node{number}").mkdir()
        (tmp_path / f"node{number}" / "cpulist").write_text(f"{cpus}\n")
    assert [cpus_of(i, per_host, range(8), tmp_path) for i in range(per_host)] == expected


@pytest.mark.parametrize(
    ("tasks", "hostnames", "number"),
    [(1, "localhost", "0"), (1, "a-0,a-1", "1"), (2, "localhost", "1")],
    ids=["single host", "one host of two", "two hosts"],
)
def test_single_host_is_host_0_whatever_the_webhook_says(tasks: int, hostnames: str, number: str) -> None:
    """JAX takes it for the number of the process among those of the slice (0.10.2, cloud_tpu_cluster.py)."""
    webhook = {"TPU_WORKER_ID": "1", "TPU_WORKER_HOSTNAMES": hostnames}
    assert environment(webhook, tasks=tasks)["TPU_WORKER_ID"] == number


def test_unrelated_inherited_variable_is_kept() -> None:
    assert (
        environment({"PATH": "/bin", "IRIS_RAY_HOST_DIR": "/d"}).items()
        >= {"PATH": "/bin", "IRIS_RAY_HOST_DIR": "/d"}.items()
    )


@pytest.mark.parametrize(("num_cpus", "threads"), [(None, None), (0.5, "1"), (1.0, "1"), (3.9, "3"), (8, "8")], ids=str)
def test_thread_count_follows_claimed_cpus(num_cpus: float | None, threads: str | None) -> None:
    """Ray sets one thread for a process that claims no CPU, on a host that the task has to itself."""
    assert environment({"OMP_NUM_THREADS": "1"}, num_cpus=num_cpus).get("OMP_NUM_THREADS") == threads


def test_task_identity_wins_over_everything() -> None:
    stale = dict.fromkeys(info().to_env(), "someone else")
    assert environment(stale, stale).items() >= info().to_env().items()


@pytest.mark.parametrize("source", ["inherited", "user_env"])
def test_variable_merely_starting_with_iris_is_kept(source: str) -> None:
    """What the user asks for is honoured or refused with a reason, never dropped."""
    variables: dict[str, Any] = {source: {"IRIS_DATASET": "iris.csv"}}
    assert environment(**variables).get("IRIS_DATASET") == "iris.csv"


def test_split_by_start_separates_variables_acting_at_process_start() -> None:
    at_start = {
        "LD_PRELOAD": "libtcmalloc.so",
        "LD_LIBRARY_PATH": "/lib",
        "PYTHONPATH": "/src",
        "PYTHONUNBUFFERED": "1",
        "MALLOC_ARENA_MAX": "2",
        "TZ": "UTC",
        "RAY_DEDUP_LOGS": "0",
    }
    at_run = {"XLA_FLAGS": "--x", "JAX_PLATFORMS": "cpu", "MEGASCALE_X": "1", "OLD_PYTHON": "1", "BUILD_LD_FLAGS": "2"}
    assert split_by_start(at_start | at_run) == (at_start, at_run)


def test_jax_options_act_at_process_start_with_preload() -> None:
    env = {"JAX_ENABLE_X64": "1", "XLA_FLAGS": "--x", "WANDB_API_KEY": "secret"}
    assert split_by_start(env, ["jax"]) == ({"JAX_ENABLE_X64": "1"}, {"XLA_FLAGS": "--x", "WANDB_API_KEY": "secret"})


def test_split_by_start_of_nothing_is_nothing() -> None:
    assert split_by_start({}) == ({}, {})


# -- the environment of the raylet ------------------------------------------------------------------------------------


START = "import os, subprocess, sys; del os.environ['OF_THE_HOST']; sys.exit(subprocess.call(sys.argv[1:]))"
"""Starts a program without a variable of its own."""
READ = (
    "from iris_ray.actors.host.task_environment import raylet_environment;"
    "print(raylet_environment().get('OF_THE_HOST'))"
)


@pytest.mark.parametrize("between", [[], [sys.executable, "-c", START.replace("del os.environ['OF_THE_HOST']; ", "")]])
def test_worker_finds_raylet_behind_wrapper_program(tmp_path: Path, between: list[str]) -> None:
    """A runtime environment may have Ray start its workers by ``uv run``."""
    raylet = tmp_path / "raylet"
    raylet.symlink_to(os.path.realpath(sys.executable))
    command = [str(raylet), "-c", START, *between, sys.executable, "-c", READ]
    environ = {**os.environ, "OF_THE_HOST": "chips"}
    assert subprocess.run(command, env=environ, capture_output=True, text=True, check=True).stdout == "chips\n"
