"""Three users' drivers on one cluster at the same time: `run_on_pod` and `submit` mixed, priorities, a SIGKILL.

They and an operator look on and step in with the command line meanwhile.
"""

import json
import signal
import subprocess
import sys
import textwrap
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import ray

from iris_ray import IrisClient, JobState
from iris_ray.cli.conventions import USAGE
from iris_ray.testing import SimulatedCluster
from tests.support.command_line import command_line, environment, iris, iris_json
from tests.support.gangs import alive
from tests.support.waiting import wait_until

COMMON = """
    import json, os, pathlib, sys, time
    import ray
    from iris_ray import IrisClient, PriorityBand, ResourceSpec, get_job_info, run_on_pod, tpu_device

    address, directory = sys.argv[1], pathlib.Path(sys.argv[2])
    user = os.environ["IRIS_USER"]

    def until(name):
        def task():
            me = get_job_info()
            print(f"{user} at work, task {me.task_index}", flush=True)
            (directory / f"{user}-{me.task_index}.pid").write_text(str(os.getpid()))
            while not (directory / name).exists():
                time.sleep(0.05)
            return f"{user} {me.task_index}"
        return task

    def done(results):
        (directory / f"{user}.tmp").write_text(json.dumps(results))
        (directory / f"{user}.tmp").rename(directory / f"{user}.json")
"""

ANN = """
    ray.init(address)
    done(run_on_pod(until("ann may end"), "v4-16", num_slices=2))
"""

BOB = """
    client = IrisClient.remote(address)
    slow = client.submit(until("nobody"), "batch", resources=ResourceSpec(device=tpu_device("v4-16")),
                         priority=PriorityBand.BATCH)
    tasks = client.submit(lambda: get_job_info().task_index, "tasks", resources=ResourceSpec(replicas=3))
    done(tasks.results())
    time.sleep(600)
"""

CARL = """
    client = IrisClient.remote(address)
    job = client.submit(until("carl may end"), "urgent", resources=ResourceSpec(device=tpu_device("v4-16")),
                        priority=PriorityBand.PRODUCTION)
    done(job.results())
"""


DORA = """
    client = IrisClient.remote(address)
    job = client.submit(until("nobody"), "sweep", resources=ResourceSpec(device=tpu_device("v4-16")), detached=True)
    done(job.job_id)
"""


def text_of(path: Path) -> str:
    """Return a file's text; nothing if there is no such file."""
    return path.read_text() if path.exists() else ""


@pytest.mark.long
@pytest.mark.usefixtures("no_shared_cluster")
def test_three_users_share_a_cluster(tmp_path: Path) -> None:
    """Ann has both slices. Bob's batch job came before Carl's urgent one, and gets a slice after it; Bob is killed.

    Dora's detached job waits behind theirs, until somebody else cancels it.
    """
    with SimulatedCluster({"v4-16": 2}, cpus_per_host=4, quiet=True) as cluster:
        drivers: dict[str, subprocess.Popen[bytes]] = {}

        def start(user: str, body: str) -> None:
            script = tmp_path / f"{user}.py"
            script.write_text(textwrap.dedent(COMMON) + textwrap.dedent(body))
            drivers[user] = subprocess.Popen(
                [sys.executable, str(script), cluster.address, str(tmp_path)], env=environment(cluster, user)
            )

        def result(user: str) -> Any:
            path = tmp_path / f"{user}.json"
            return wait_until(lambda: path.exists() and json.loads(path.read_text()), 180)

        client = IrisClient()

        def jobs() -> dict[str, Any]:
            return {f"{job.user} {job.name}": job for job in client.list_jobs()}

        try:
            start("ann", ANN)
            wait_until(lambda: len(list(tmp_path.glob("ann-*.pid"))) == 4, 120)
            start("bob", BOB)
            assert result("bob") == [0, 1, 2]
            start("carl", CARL)
            urgent = wait_until(lambda: (job := jobs().get("carl urgent")) and job.waiting and job, 120)
            assert "in use by" in client.explain(urgent.job_id)
            batch, anns = jobs()["bob batch"], next(job for job in client.list_jobs() if job.user == "ann")
            assert urgent.job_id in client.explain(batch.job_id)
            start("dora", DORA)
            sweep = result("dora")

            seen = {job["job_id"]: (job["user"], job["state"]) for job in iris_json(cluster, "ls")}
            assert seen == {
                anns.job_id: ("ann", "RUNNING"),
                batch.job_id: ("bob", "PENDING"),
                urgent.job_id: ("carl", "PENDING"),
                sweep: ("dora", "PENDING"),
            }
            assert f"in use by {anns.job_id}" in iris(cluster, "why", urgent.job_id, user="carl").stdout
            assert urgent.job_id in iris(cluster, "why", batch.job_id, user="bob").stdout
            assert "in use by" in iris_json(cluster, "job", "status", urgent.job_id)["waiting"]["sentence"]
            assert iris_json(cluster, "job", "status", anns.job_id)["groups"] == ["v4-16-0", "v4-16-1"]
            tasks = iris_json(cluster, "job", "tasks", anns.job_id)
            assert [(t["state"], t["group"]) for t in tasks] == [
                ("RUNNING", slice_name) for slice_name in ("v4-16-0", "v4-16-1") for _ in (0, 1)
            ]
            assert iris(cluster, "logs", anns.job_id, "3", user="bob").stdout == "ann at work, task 3\n"
            busy = {view["slice"]: view["jobs"] for view in iris_json(cluster, "host", "ls") if view["state"] == "BUSY"}
            assert busy == {"v4-16-0": [anns.job_id], "v4-16-1": [anns.job_id]}
            typo = iris(cluster, "cancel", sweep[:-1], user="bob", code=USAGE).stderr
            assert f"did you mean {sweep}" in typo
            assert f"{sweep} is cancelled; it was pending" in iris(cluster, "cancel", sweep, user="bob").stdout
            assert iris_json(cluster, "job", "status", sweep)["error"] == "cancelled by bob"
            drained = iris(cluster, "host", "drain", "v4-16-1", "--reason", "a fan", user="olga").stdout
            assert f"still there until they end: {anns.job_id}" in drained

            (tmp_path / "ann may end").touch()
            assert sorted(result("ann")) == [f"ann {i}" for i in range(4)]
            wait_until(lambda: client.job_status(urgent.job_id).state is JobState.RUNNING)
            states = {view["slice"]: (view["state"], view["reason"]) for view in iris_json(cluster, "host", "ls")}
            assert states["v4-16-0"][0] == "BUSY"
            assert states["v4-16-1"] == ("CLOSED", "drained (a fan)")
            assert "drained (a fan)" in iris(cluster, "why", batch.job_id, user="bob").stdout
            iris(cluster, "host", "undrain", "v4-16-1", user="olga")

            bobs = [wait_until(partial(text_of, tmp_path / f"bob-{i}.pid")) for i in (0, 1)]
            assert client.job_status(urgent.job_id).state is JobState.RUNNING
            following = subprocess.Popen(
                command_line("logs", "-f", urgent.job_id),
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, env=environment(cluster, "ann"),
            )  # fmt: skip
            drivers["bob"].send_signal(signal.SIGKILL)
            wait_until(lambda: client.job_status(batch.job_id).state is JobState.KILLED)
            wait_until(lambda: not any(alive(int(pid)) for pid in bobs))
            (tmp_path / "carl may end").touch()
            assert result("carl") == ["carl 0", "carl 1"]
            printed, _ = following.communicate(timeout=60)
            assert sorted(printed.splitlines()) == [f"task-{i}| carl at work, task {i}" for i in (0, 1)]
            ended = {job["job_id"]: job["state"] for job in iris_json(cluster, "ls", "--all")}
            assert [ended[job] for job in (anns.job_id, batch.job_id, urgent.job_id, sweep)] == [
                "SUCCEEDED", "KILLED", "SUCCEEDED", "KILLED",
            ]  # fmt: skip
            wait_until(lambda: ray.available_resources().get("TPU") == 16.0)
        finally:
            for driver in drivers.values():
                driver.kill()
                driver.wait()
