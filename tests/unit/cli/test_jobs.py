"""What the command line says about jobs, with the real Controller in this process."""

import re

import pytest

from iris_ray.cli.exits import USAGE
from tests.support.controller_in_process import ClusterInProcess


def test_why_status_tasks_and_cancel_of_a_job_that_waits(cluster: ClusterInProcess) -> None:
    first = cluster.start("train-1a2b3c4d", slices=(3,))
    second = cluster.submit("eval-5e6f7a8b")
    assert [job["job_id"] for job in cluster.json("ls")] == [first, second]
    assert f"in use by {first}" in cluster.iris("why", second).stdout
    assert "it does not wait" in cluster.iris("why", first).stdout
    assert re.search(r"tasks: +2 pending", cluster.iris("status", second).stdout)
    tasks = cluster.json("tasks", first)
    assert [(task["state"], task["group"]) for task in tasks[:2]] == [("RUNNING", "v4-16-0")] * 2
    slices = cluster.json("workers")
    assert [(view["state"], view["jobs"]) for view in slices] == [("BUSY", [first])] * 3 + [("FREE", [])]
    assert f"did you mean {second}" in cluster.iris("cancel", second[:-1], code=USAGE).stderr
    cancelled = cluster.json("cancel", second)
    assert cancelled == {"job_id": second, "cancelled": True, "state_before": "PENDING"}
    assert "had already ended: killed" in cluster.iris("cancel", second).stdout
    assert not cluster.json("cancel", second)["cancelled"]
