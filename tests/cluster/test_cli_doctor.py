"""``iris-ray doctor`` on a cluster: what it sees on every TPU host."""

import os
import re

import pytest

from iris_ray import run_on_pod_ray
from iris_ray.actors.controller.node_table import NodeTable
from iris_ray.cli.host_checks import ask_hosts, claimed_nodes, tpu_hosts
from iris_ray.testing import SimulatedCluster
from tests.support.command_line import iris_json
from tests.support.gangs import Trace, wait_until

pytestmark = pytest.mark.cluster


def test_doctor_names_the_host_whose_idle_chips_somebody_holds(cluster: SimulatedCluster) -> None:
    directory = cluster.host_dir("v4-16-1", 1)
    with (directory / "dev" / "accel0").open(), (cluster.host_dir("v4-16-2", 0) / "lock" / "libtpu_lockfile").open("w"):
        found = {(f["level"], f["check"]): f["found"] for f in iris_json(cluster, "doctor")}
        everywhere = ask_hosts(tpu_hosts(NodeTable.read()))
    holder = rf"pid {os.getpid()} \(\w+\)"
    assert re.match(
        rf"v4-16-[12] host [10] \(127.*\): {holder}, and nobody has claimed", found["WARNING", "chips held"]
    )
    assert found["OK", "silent hosts"] == "none; all 6 TPU hosts answered"
    assert found["INFO", "metadata server of hosts"] == "answers on none of 6 hosts"
    assert found["OK", "versions on hosts"].startswith("the same on all: python 3.")
    looks = {host.name.partition(" (")[0]: answer for host, answer in everywhere.items()}
    assert len(looks) == 6
    holding = {name for name, look in looks.items() if not isinstance(look, str) and look["holders"]}
    assert holding == {"v4-16-1 host 1", "v4-16-2 host 0"}


def test_chips_of_a_running_job_count_as_claimed(cluster: SimulatedCluster, trace: Trace) -> None:
    assert claimed_nodes(NodeTable.read()) == set()
    running = run_on_pod_ray.remote(trace.gang(), "v4-16", num_slices=2, keep_warm=0)
    slices = {start["slice"] for start in trace.wait_for_tasks(4)}
    assert claimed_nodes(NodeTable.read()) == {cluster.node_id(name, number) for name in slices for number in (0, 1)}
    trace.finish()
    del running
    wait_until(lambda: claimed_nodes(NodeTable.read()) == set())


def test_host_that_hangs_is_silent_and_keeps_nobody_waiting(cluster: SimulatedCluster) -> None:
    hosts = tpu_hosts(NodeTable.read())
    ask_hosts(hosts)  # from here on a process waits on each of them
    cluster.freeze_host("v4-16-0", 1)
    try:
        answers = ask_hosts(hosts, timeout_s=5)
    finally:
        cluster.thaw_host("v4-16-0", 1)
    silent = {host.name.partition(" (")[0]: answer for host, answer in answers.items() if isinstance(answer, str)}
    assert silent == {"v4-16-0 host 1": "no answer within 5 s"}
