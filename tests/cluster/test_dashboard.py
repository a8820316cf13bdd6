"""``iris-ray cluster dashboard`` on real Ray nodes."""

import contextlib
import gzip
import itertools
import json
import signal
import subprocess
import urllib.request
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
import ray

from iris_ray import run_on_pod_ray
from iris_ray.actors.calls.controller_connection import ControllerConnection
from iris_ray.actors.protocol.controller_interface import ControllerInterface
from iris_ray.dashboard.place import link_to
from tests.support.command_line import command_line, environment, iris
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from iris_ray.testing import SimulatedCluster
    from tests.support.gangs import Trace


def get(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=30) as answer:
        return json.load(answer)


@contextlib.contextmanager
def dashboard(cluster: "SimulatedCluster") -> Iterator[tuple["subprocess.Popen[str]", str]]:
    """The command, and the URL that it serves."""
    command = command_line("cluster", "dashboard", "--port", "0")
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment(cluster)) as server:
        try:
            assert server.stdout is not None
            yield server, next(word for word in server.stdout.readline().split() if word.startswith("http://"))
        finally:
            server.kill()


def updates(url: str, version: str) -> Iterator[dict[str, Any]]:
    """What an open page gets, as it comes. Half a second lies between one and the next."""
    with urllib.request.urlopen(f"{url}/api/changes?since={version}", timeout=60) as stream:
        for line in stream:
            if line.startswith(b"data: "):
                yield json.loads(line.removeprefix(b"data: "))


def changes_slice(update: dict[str, Any], name: str) -> bool:
    """Whether an update says that a slice is no longer busy, or gone."""
    if name in update.get("drop", {}).get("slices", ()):
        return True
    row = update.get("put", {}).get("slices", {}).get(name)
    return row is not None and row["state"] != "busy"


@pytest.mark.proof
def test_dashboard_shows_job_and_killed_host(cluster: "SimulatedCluster", trace: "Trace") -> None:
    run = run_on_pod_ray.remote(trace.gang(), "v4-16")
    trace.wait_for_tasks(2)
    (job,) = (job for job in ControllerConnection().ask_all(ControllerInterface.list_jobs) if not job.state.finished)
    with dashboard(cluster) as (server, url):
        wait_until(lambda: job.job_id in get(f"{url}/api/jobs"))
        busy = get(f"{url}/api/slices")[job.groups[0]]
        assert [host[1] for host in busy["hosts"]] == ["busy", "busy"]
        assert f"{url}/#/jobs/{job.job_id}" in iris(cluster, "job", "status", job.job_id).stdout
        idle = next(name for name in cluster.slice_names if name not in job.groups)
        cluster.kill_host(idle, 1)
        wait_until(lambda: get(f"{url}/api/slices")[idle]["state"] == "incomplete")
        server.send_signal(signal.SIGINT)
        assert server.wait(30) == 0
        assert "page" not in iris(cluster, "job", "status", job.job_id).stdout
    trace.finish()
    ray.get(run)


@pytest.mark.long
def test_killed_slice_shows_within_five_updates(cluster: "SimulatedCluster", trace: "Trace") -> None:
    """Half a second lies between updates, so it shows within two seconds."""
    run = run_on_pod_ray.remote(trace.gang(), "v4-16")
    trace.wait_for_tasks(2)
    (job,) = (job for job in ControllerConnection().ask_all(ControllerInterface.list_jobs) if not job.state.finished)
    name = job.groups[0]
    with dashboard(cluster) as (_, url):
        wait_until(lambda: get(f"{url}/api/slices").get(name, {}).get("state") == "busy")
        wait_until(lambda: get(f"{url}/api/jobs")[job.job_id]["state"] == "running")
        with urllib.request.urlopen(f"{url}/api/snapshot", timeout=30) as answer:
            snapshot = json.loads(gzip.decompress(answer.read()))
        coming = updates(url, snapshot["version"])
        cluster.preempt_slice(name)
        unchanged = list(itertools.takewhile(lambda update: not changes_slice(update, name), coming))
        assert len(unchanged) < 4
    trace.finish()
    ray.get(run)


@pytest.mark.proof
def test_killed_dashboards_link_is_not_shown(cluster: "SimulatedCluster") -> None:
    with dashboard(cluster) as (server, url):
        assert link_to("jobs/train") == f"{url}/#/jobs/train"
        server.kill()
        server.wait()
        wait_until(lambda: link_to("jobs/train") is None)
