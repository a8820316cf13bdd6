"""Jobs that tell, on real Ray nodes: a lost host, and a failure with its last lines."""

import json
import subprocess
from functools import partial
from pathlib import Path

import pytest

from iris_ray import IrisClient, ResourceSpec, get_job_info, tpu_device
from iris_ray.testing import SimulatedCluster
from tests.support.command_line import command_line, environment, iris, iris_json
from tests.support.receivers import webhook
from tests.support.waiting import wait_until

V4_16 = ResourceSpec(device=tpu_device("v4-16"))


def put(cluster: SimulatedCluster, name: str, value: str) -> None:
    words = command_line("cluster", "secrets", "set", name)
    done = subprocess.run(words, input=value.encode(), env=environment(cluster), timeout=120, capture_output=True)
    assert done.returncode == 0, done.stderr


def test_job_tells_of_loss_and_end_with_its_last_lines(cluster: SimulatedCluster, tmp_path: Path) -> None:
    went_on = str(tmp_path / "lost")

    def work() -> None:
        me = get_job_info()
        assert me is not None
        if me.attempt == 1:
            Path(went_on).touch()
            wait_until(lambda: False, 300)
        print("before the end")
        raise ValueError("s3cr3t-error")

    iris(cluster, "cluster", "controller", "start")
    page = json.dumps({"page": ["/usr/bin/tee", "-a", str(tmp_path / "paged")]})
    with webhook() as hook:
        put(cluster, "HOOK", hook.url)
        put(cluster, "KEY", "sign")
        iris(cluster, "cluster", "settings", "set", "notify_private=127.0.0.1", f"notify_commands={page}")
        try:
            notify = ["http:HOOK,key=KEY,on=started+lost+ended,lines=30", "command:page,on=ended"]
            client = IrisClient()
            job = client.submit(work, "tells", resources=V4_16, max_retries_failure=0, notify=notify)
            wait_until(lambda: Path(went_on).exists() and hook.events_of(job.job_id) == ["started"], 120)
            cluster.kill_host(client.job_status(job).groups[0], 1)
            with pytest.raises(Exception, match="s3cr3t-error"):
                job.results()
            wait_until(lambda: hook.events_of(job.job_id) == ["started", "lost", "failed"], 120)
            last = hook.news[-1]
            assert "s3cr3t-error" not in last["text"]
            assert any("before the end" in line for line in last["lines"])
            assert all(got.is_signed_with(b"sign") for got in hook.got)
            wait_until(lambda: (tmp_path / "paged").exists())
            (paged,) = json.loads((tmp_path / "paged").read_text())["notifications"]
            assert (paged["event"], paged["lines"]) == ("failed", [])
            # The outcome is recorded once the command has ended, which is after its file is there.
            listed = partial(iris_json, cluster, "job", "notifications", "ls", job.job_id)
            wait_until(lambda: {one["outcome"] for one in listed()} == {"sent"})
        finally:
            iris(cluster, "cluster", "settings", "reset", "notify_private", "notify_commands")
            iris(cluster, "cluster", "secrets", "rm", "HOOK", "--yes")
            iris(cluster, "cluster", "secrets", "rm", "KEY", "--yes")
