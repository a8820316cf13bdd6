"""Two processes on each host: numbers, results, logs, notices, JAX, and what the crash of one of them does."""

import os
import time
from typing import Any

import pytest

from iris_ray import IrisClient, get_job_info, preemption_notice, run_on_pod, run_on_pod_ray
from iris_ray.actors.calls.controller_connection import ControllerConnection
from iris_ray.logs.client import host_logs
from iris_ray.logs.stream import stream_logs
from iris_ray.testing import SimulatedCluster
from tests.support.gangs import Trace, job_view, result_of
from tests.support.jax_gangs import joined
from tests.support.jax_reader import Found, jax_reader
from tests.support.waiting import wait_until


def test_two_processes_a_host_form_one_jax_program(cluster: SimulatedCluster) -> None:
    """Two hosts, real ``jax.distributed``. Bare ``jax.distributed.initialize()`` would find the same ranks on GKE."""
    found = run_on_pod(joined, "v4-16", processes_per_host=2, max_retries_failure=0)
    assert [one["rank"] for one in found] == [(rank, 4) for rank in range(4)]
    assert {one["devices"] for one in found} == {4}
    assert {one["sum"] for one in found} == {0 + 1 + 2 + 3}
    infos = [one["info"] for one in found]
    places = [(me.slice_id, me.worker_id, me.local_index, me.task_index, me.num_tasks) for me in infos]
    assert places == [(0, rank // 2, rank % 2, rank, 4) for rank in range(4)]
    assert len({one["pid"] for one in found}) == 4
    environments = [one["environ"] for one in found]
    assert [environ["TPU_VISIBLE_CHIPS"] for environ in environments] == ["0,1", "2,3"] * 2
    assert len({environ["TPU_PROCESS_ADDRESSES"] for environ in environments}) == 1
    ports = [address.rpartition(":")[2] for address in environments[0]["TPU_PROCESS_ADDRESSES"].split(",")]
    assert [environ["TPU_PROCESS_PORT"] for environ in environments] == ports
    coordinator = environments[0]["IRIS_COORDINATOR_ADDRESS"].partition(":")[0]
    environments = [environ | {"GCE_METADATA_IP": environ["IRIS_RAY_TEST_METADATA_HOST"]} for environ in environments]
    with jax_reader() as as_jax_reads:
        assert as_jax_reads(environments) == [Found("gketpu", f"{coordinator}:8482", 4, rank) for rank in range(4)]


@pytest.mark.proof
def test_gang_starts_again_when_one_of_a_hosts_processes_crashes(cluster: SimulatedCluster, trace: Trace) -> None:
    directory = trace.directory

    def crash_once(facts: dict[str, Any]) -> tuple[int, int]:
        if (facts["attempt"], facts["index"]) == (1, 3):
            while len(list(directory.glob("start-1-*"))) < 8:
                time.sleep(0.02)
            os._exit(3)
        while facts["attempt"] == 1:
            time.sleep(0.02)
        return facts["attempt"], facts["index"]

    found = run_on_pod(trace.gang(crash_once), "v4-16", num_slices=2, processes_per_host=2, max_retries_failure=1)
    assert found == [(2, rank) for rank in range(8)]
    starts = trace.starts()
    assert len(starts) == 16
    assert not any(start["beside"] for start in starts), "no process of the first attempt was left"
    assert (job_view(starts[0]["job"]).failures, job_view(starts[0]["job"]).preemptions) == (1, 0)


@pytest.mark.proof
def test_notice_reaches_every_process_and_gang_moves_once_all_saved(cluster: SimulatedCluster, trace: Trace) -> None:
    def save(facts: dict[str, Any]) -> tuple[int, str]:
        while facts["attempt"] == 1:
            if (notice := preemption_notice()) is not None:
                notice.saved()
            time.sleep(0.02)
        return facts["index"], facts["slice"]

    reference = run_on_pod_ray.remote(trace.gang(save), "v4-16", processes_per_host=2, max_retries_preemption=1)
    wait_until(lambda: len(trace.starts()) == 4)
    lost = trace.starts()[0]["slice"]
    preemption = cluster.preempt_slice(lost, notice_s=60.0)
    found = result_of(reference)
    preemption.cancel()
    assert [rank for rank, _ in found] == [0, 1, 2, 3]
    assert lost not in {name for _, name in found}


@pytest.mark.proof
def test_each_process_has_a_log_of_its_own(cluster: SimulatedCluster) -> None:
    def say() -> str:
        me = get_job_info()
        assert me is not None
        print(f"I am {me.task_index}")
        return me.job_id

    job_id = run_on_pod(say, "v4-16", processes_per_host=2)[0]
    client = IrisClient()
    texts = [client.fetch_task_logs(job_id, rank).text for rank in range(4)]
    assert texts == [f"I am {rank}\n" for rank in range(4)]
    with host_logs(ControllerConnection()) as source:
        lines = {line.task_index: line.data for line in stream_logs(source, job_id, follow=False)}
    assert lines == {rank: f"I am {rank}".encode() for rank in range(4)}
