"""A host whose disk is full, on real Ray nodes: a small file system of its own, filled to the last byte."""

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from iris_ray import release, run_on_pod
from iris_ray.actors.host.ledger import EXCLUSIVE
from iris_ray.testing import SimulatedCluster
from tests.support.gangs import slice_of_this_task
from tests.support.odd_hosts import fill, unmount

pytestmark = pytest.mark.proof


@contextlib.contextmanager
def full(directory: Path) -> Iterator[None]:
    """Put a file system without any room over a directory."""
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "full-disk", str(directory)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("the test needs to mount a file system, which its user may not")
    try:
        fill(directory)
        yield
    finally:
        unmount(directory)


def test_gang_leaves_full_disk_host_uncharged(cluster: SimulatedCluster) -> None:
    before = set(run_on_pod(slice_of_this_task, "v4-16", keep_warm=0))
    release()
    (name,) = before
    with full(cluster.host_dir(name, 1) / EXCLUSIVE):
        after = run_on_pod(slice_of_this_task, "v4-16", max_retries_failure=0, max_retries_preemption=0)
    assert before.isdisjoint(after)
