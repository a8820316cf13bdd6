"""`iris-ray cluster selftest` on simulated slices, where JAX has CPUs for chips."""

import json
import subprocess
import sys
from subprocess import PIPE

import pytest

from iris_ray.cli.conventions import FAILED, OK
from iris_ray.model.lifecycle import JobState
from iris_ray.testing import SimulatedCluster
from tests.support.command_line import command_line
from tests.support.gangs import all_jobs
from tests.support.waiting import wait_until

pytestmark = pytest.mark.proof


def selftest(cluster: SimulatedCluster, *options: str) -> tuple[int, dict[str, dict[str, str]]]:
    """Run the command; return its exit code and its findings by check."""
    selftest = ["cluster", "selftest", "--address", cluster.address, "--json", *options]
    command = [sys.executable, "-m", "iris_ray", *selftest]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400)
    assert done.stdout, done.stderr
    return done.returncode, {finding["check"]: finding for finding in json.loads(done.stdout)}


@pytest.mark.long
def test_every_step_reports_without_chips(cluster: SimulatedCluster) -> None:
    code, found = selftest(cluster, "--tpu", "v4-16", "--num-slices", "2")
    assert code == OK, found
    assert {check: finding["level"] for check, finding in found.items()} == {
        "start": "OK",
        "chips": "WARNING",
        "warm start": "WARNING",
        "same results": "OK",
        "crash": "OK",
        "recovery": "OK",
        "processes left behind": "OK",
        "parts": "WARNING",
        "across slices": "WARNING",
    }
    assert "2 tasks on v4-16-" in found["start"]["found"]
    assert "2 programs on parts of 2x2x1 chips side by side, each on 1 host" in found["parts"]["found"]
    assert "67 MB a host from memory" in found["recovery"]["found"]
    assert "4 devices agree in every bit" in found["same results"]["found"]
    assert "4 devices (cpu) of 4 tasks, but JAX runs on cpu" in found["across slices"]["found"]


@pytest.mark.long
def test_notice_to_any_of_several_slices_is_heard(cluster: SimulatedCluster) -> None:
    command = command_line("cluster", "selftest", "--tpu", "v4-16", "--num-slices", "2", "--await-notice", "120")
    with subprocess.Popen([*command, "--address", cluster.address], stdout=PIPE, stderr=PIPE, text=True) as selftest:
        assert selftest.stdout is not None
        assert selftest.stderr is not None
        assert any("waiting 120 s for a notice" in line for line in selftest.stderr)
        wait_until(lambda: any(job.state is JobState.RUNNING for job in all_jobs()), 60)
        (job,) = (job for job in all_jobs() if job.state is JobState.RUNNING)
        assert len(job.groups) == 2
        cluster.preempt_slice(job.groups[1], notice_s=60)
        found, _ = selftest.communicate(timeout=400)
    assert "4 tasks heard of a preemption" in found


def test_type_missing_in_cluster_is_a_final_error(cluster: SimulatedCluster) -> None:
    code, found = selftest(cluster, "--tpu", "v6e-16", "--timeout", "1")
    assert code == FAILED
    assert list(found) == ["start"]
    assert "v6e-16" in found["start"]["found"]
