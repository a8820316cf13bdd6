"""Hosts, jobs and heads with different installations of iris_ray. Each is a directory of its own on PYTHONPATH."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from iris_ray import get_job_info, run_on_pod, run_on_pod_ray
from iris_ray.actors.protocol.version import PROTOCOL_VERSION, package_directory
from iris_ray.errors import VersionMismatchError
from iris_ray.testing import SimulatedCluster
from tests.support.gangs import Trace
from tests.support.odd_hosts import other_iris_ray, with_installed


@pytest.fixture
def own_cluster(no_shared_cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SimulatedCluster]:
    """Without any slice. Ray would have every host import from this process's current directory first."""
    monkeypatch.chdir(tmp_path)
    with SimulatedCluster(quiet=True) as running:
        yield running


def add_slice_with(cluster: SimulatedCluster, package: Path) -> str:
    """Add a slice whose hosts have that package installed."""
    return cluster.add_slice("v4-16", under=with_installed(package))


@pytest.mark.proof
def test_host_of_other_protocol_runs_nothing(own_cluster: SimulatedCluster, tmp_path: Path) -> None:
    newer = other_iris_ray(tmp_path / "newer", "9.9.0", PROTOCOL_VERSION + 1)
    name = add_slice_with(own_cluster, newer)
    ran = tmp_path / "ran"
    with pytest.raises(VersionMismatchError) as refused:
        run_on_pod(ran.touch, "v4-16", scheduling_timeout=60.0)
    ours = f"and this is iris_ray 0.1.0 (protocol {PROTOCOL_VERSION}) from {package_directory()} on"
    for said in (f"{name} host 0 is iris_ray 9.9.0 (protocol {PROTOCOL_VERSION + 1}) from {newer} on", ours):
        assert said in str(refused.value)
    assert not ran.exists()


@pytest.mark.proof
def test_job_leaves_the_slice_of_other_protocol_for_another(own_cluster: SimulatedCluster, tmp_path: Path) -> None:
    """As during a rolling upgrade of the hosts' image."""

    def where() -> tuple[str, int]:
        me = get_job_info()
        assert me is not None
        return me.slice_name, me.attempt

    add_slice_with(own_cluster, other_iris_ray(tmp_path / "older", "0.0.9", PROTOCOL_VERSION - 1))
    fitting = add_slice_with(own_cluster, Path(package_directory()))
    assert run_on_pod(where, "v4-16", scheduling_timeout=60.0) == [(fitting, 2)] * 2


@pytest.mark.proof
def test_host_of_other_patch_version_runs_tasks(own_cluster: SimulatedCluster, tmp_path: Path) -> None:
    def version() -> str:
        import iris_ray

        return iris_ray.__version__

    add_slice_with(own_cluster, other_iris_ray(tmp_path / "patched", "0.1.99"))
    assert run_on_pod(version, "v4-16") == ["0.1.99", "0.1.99"]


@pytest.mark.proof
def test_host_without_iris_ray_is_named(own_cluster: SimulatedCluster, tmp_path: Path) -> None:
    broken = tmp_path / "broken" / "iris_ray"
    broken.mkdir(parents=True)
    (broken / "__init__.py").write_text("raise ImportError('nothing is installed here')")
    name = add_slice_with(own_cluster, broken)
    with pytest.raises(VersionMismatchError) as refused:
        run_on_pod(os.getpid, "v4-16", scheduling_timeout=60.0)
    for said in (
        f"{name} host 0 can't use iris_ray",
        "nothing is installed here",
        "install iris_ray 0.1.0 in the image",
    ):
        assert said in str(refused.value)


def iris(cluster: SimulatedCluster, package: Path, *arguments: str) -> Any:
    """Run the command line of another iris_ray, as a job does that brings its own."""
    environ = {**os.environ, "PYTHONPATH": str(package.parent), "RAY_ADDRESS": cluster.address}
    command = [sys.executable, "-m", "iris_ray", *arguments, "--json"]
    done = subprocess.run(command, env=environ, cwd=package.parent, capture_output=True, text=True, timeout=120)
    return json.loads(done.stdout) if done.returncode == 0 else done.stderr


def test_jobs_own_iris_ray_starts_the_installed_controller(own_cluster: SimulatedCluster, tmp_path: Path) -> None:
    newer = other_iris_ray(tmp_path / "newer", "9.9.0", PROTOCOL_VERSION + 1)
    refused = iris(own_cluster, newer, "cluster", "controller", "start")
    assert f"iris_ray 0.1.0 (protocol {PROTOCOL_VERSION}) from {package_directory()} on" in refused
    assert f"iris_ray 9.9.0 (protocol {PROTOCOL_VERSION + 1}) from {newer} on" in refused
    started = iris(own_cluster, other_iris_ray(tmp_path / "patched", "0.1.99"), "cluster", "controller", "start")
    assert (started["version"], started["package"]) == ("0.1.0", package_directory())


@pytest.mark.long
def test_upgrade_to_broken_version_loses_no_job(
    no_shared_cluster: None, trace: Trace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_head = other_iris_ray(tmp_path / "head", "0.1.0")
    works = tmp_path / "works"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(on_head.parent))
    with SimulatedCluster(quiet=True) as cluster:
        add_slice_with(cluster, Path(package_directory()))
        results = run_on_pod_ray.remote(trace.gang(), "v4-16")
        trace.wait_for_tasks(2)

        on_head.rename(works)
        other_iris_ray(on_head.parent, "0.2.0")
        with (on_head / "actors" / "controller" / "controller.py").open("a") as controller:
            controller.write("\n\nController.__init__ = lambda self: 1 / 0\n")
        refused = iris(cluster, on_head, "cluster", "controller", "upgrade")
        assert "The Controller of iris_ray 0.1.0 is ended, and the new one, of iris_ray 0.2.0, did not start" in refused

        shutil.rmtree(on_head)
        works.rename(on_head)
        started = iris(cluster, on_head, "cluster", "controller", "start")
        assert (started["version"], started["package"]) == ("0.1.0", str(on_head))
        trace.finish()
        assert [task["attempt"] for task in ray.get(results, timeout=120)] == [1, 1]
