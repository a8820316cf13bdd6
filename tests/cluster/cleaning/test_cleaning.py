"""The Controller has every host and the head cleaned, and ``iris-ray doctor`` tells what went."""

import os
import time
from pathlib import Path

import pytest

from iris_ray import run_on_pod
from iris_ray.actors.calls.ray_internals import logs_directory
from iris_ray.testing import SimulatedCluster
from tests.support.command_line import iris, iris_json
from tests.support.waiting import wait_until

LOG = "tpu_driver.vm.root.log.INFO.20261101-002050.15720"


def old(path: Path, days: float = 5) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("old")
    at = time.time() - days * 86_400
    os.utime(path, (at, at))
    return path


@pytest.mark.proof
def test_a_changed_setting_has_all_machines_cleaned(cluster: SimulatedCluster) -> None:
    run_on_pod(lambda: None, "v4-16")  # so that a Controller runs
    logs = logs_directory()
    dead = old(logs.parents[1] / "session_2026-11-01_00-21-14_974870_16410" / "logs" / "raylet.out").parents[1]
    worker = old(logs / "python-core-worker-0123456789abcdef_4711.log")
    of_libtpu = [old(cluster.host_dir(name, 1) / "tpu_logs" / LOG) for name in cluster.slice_names]
    kept = [old(cluster.host_dir(name, 0) / "tpu_logs" / LOG, days=1) for name in cluster.slice_names]
    iris(cluster, "cluster", "settings", "set", "host_files_days=3")
    try:
        wait_until(lambda: not any(path.exists() for path in (dead, worker, *of_libtpu)), 60)
        assert all(path.exists() for path in kept)
        said = wait_until(lambda: [found for found in iris_json(cluster, "doctor") if found["check"] == "cleaning"], 60)
        assert (said[0]["level"], said[0]["found"].split(" with ")[0]) == ("OK", "5 old files")
        (gcs,) = (found for found in iris_json(cluster, "doctor") if found["check"] == "memory of Ray's GCS")
        assert gcs["level"] == "OK"
    finally:
        iris(cluster, "cluster", "settings", "reset", "host_files_days")
