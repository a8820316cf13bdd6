"""``iris-ray dashboard`` on real Ray nodes."""

import json
import signal
import subprocess
import urllib.request
from typing import TYPE_CHECKING, Any

import pytest

from iris_ray import run_on_pod_ray
from iris_ray.actors.wire.controller_connection import ControllerConnection
from tests.support.command_line import command_line, environment, iris
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from iris_ray.testing import SimulatedCluster
    from tests.support.gangs import Trace


def get(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=30) as answer:
        return json.load(answer)


@pytest.mark.proof
def test_it_shows_a_job_and_a_killed_host_and_ends_when_told(cluster: "SimulatedCluster", trace: "Trace") -> None:
    import ray

    run = run_on_pod_ray.remote(trace.gang(), "v4-16")
    trace.wait_for_tasks(2)
    (job,) = (job for job in ControllerConnection().list_jobs() if not job.state.finished)
    server = subprocess.Popen(
        command_line("dashboard", "--port", "0"), stdout=subprocess.PIPE, text=True, env=environment(cluster)
    )
    try:
        assert server.stdout is not None
        url = next(word for word in server.stdout.readline().split() if word.startswith("http://"))
        wait_until(lambda: job.job_id in get(f"{url}/api/jobs"))
        busy = get(f"{url}/api/slices")[job.groups[0]]
        assert [host[1] for host in busy["hosts"]] == ["busy", "busy"]
        assert f"{url}/#/jobs/{job.job_id}" in iris(cluster, "status", job.job_id).stdout
        idle = next(name for name in cluster.slice_names if name not in job.groups)
        cluster.kill_host(idle, 1)
        wait_until(lambda: get(f"{url}/api/slices")[idle]["state"] == "incomplete")
        server.send_signal(signal.SIGINT)
        assert server.wait(30) == 0
        assert "page" not in iris(cluster, "status", job.job_id).stdout
    finally:
        server.kill()
        server.wait()
        trace.finish()
        assert server.stdout is not None
        server.stdout.close()
    ray.get(run)
