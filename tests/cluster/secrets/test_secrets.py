"""Secrets on a cluster of real processes: what tasks get, and that no other place has a value."""

import gzip
import os
import secrets
import subprocess
from collections.abc import Iterator
from pathlib import Path
from urllib.request import urlopen

import pytest

from iris_ray import IrisClient, Secret, get_job_info
from iris_ray.actors.calls.controller_connection import ControllerConnection
from iris_ray.actors.protocol.controller_interface import ControllerInterface
from iris_ray.testing import SimulatedCluster
from tests.support.command_line import command_line, environment, iris, iris_json
from tests.support.dashboard_pages import served
from tests.support.gangs import alive
from tests.support.leaks import is_in_memory, places_with
from tests.support.waiting import wait_until

pytestmark = pytest.mark.usefixtures("cluster")


def put(cluster: SimulatedCluster, name: str, value: str) -> None:
    done = subprocess.run(
        command_line("cluster", "secrets", "set", name), input=value.encode(), env=environment(cluster), timeout=120
    )
    assert done.returncode == 0


def what_people_see(cluster: SimulatedCluster, job_id: str, directory: Path) -> Iterator[str]:
    """What commands, an export and the dashboard show of a job that runs."""
    for words in (("job", "status", job_id, "--json"), ("bug-report", job_id, "-o", "-"), ("history", job_id, "--json"),
                  ("job", "tasks", job_id, "--json"), ("why", job_id), ("job", "events", job_id)):  # fmt: skip
        yield iris(cluster, *words).stdout
    export = directory / "export.jsonl"
    iris(cluster, "cluster", "controller", "export", str(export), "--variables")
    yield export.read_text()
    export.unlink()
    with served() as url:
        for path in ("snapshot", f"jobs/{job_id}", f"jobs/{job_id}/logs?task=0", f"history/jobs/{job_id}"):
            with urlopen(f"{url}/api/{path}", timeout=60) as answer:
                data = answer.read()
            yield (gzip.decompress(data) if data.startswith(b"\x1f\x8b") else data).decode()


@pytest.mark.way_in
def test_values_are_with_tasks_and_in_the_store_alone(cluster: SimulatedCluster, tmp_path: Path) -> None:
    """Of a job without a driver, which Ray could start anew: the GCS keeps what its pool was made with."""
    stored, given = secrets.token_hex(20), secrets.token_hex(20)
    values = [stored.encode(), given.encode()]
    iris(cluster, "cluster", "controller", "start")
    put(cluster, "STORED", stored + "\n")
    told = str(tmp_path)

    def work() -> None:
        path, me = os.environ["AS_FILE"], get_job_info()
        assert me is not None
        assert (os.environ["STORED"], Path(path).read_text()) == (stored_again(), os.environ["STORED"] + "\n")
        assert os.stat(path).st_mode & 0o777 == 0o400
        assert os.environ["GIVEN"]
        Path(told, f"{me.task_index}-{me.attempt}").write_text(str(os.getpid()))
        wait_until(lambda: Path(told, "finish").exists(), 120)

    def stored_again() -> str:
        return subprocess.run(["sh", "-c", 'printf %s "$STORED"'], capture_output=True, text=True, check=True).stdout

    given_to_job = {
        "STORED": Secret.from_store("STORED"),
        "AS_FILE": Secret.from_store("STORED", as_file=True),
        "GIVEN": Secret(given),
    }
    job = IrisClient().submit(work, "secretive", detached=True, secrets=given_to_job)
    pid = wait_until(lambda: (tmp_path / "0-1").exists() and (tmp_path / "0-1").read_text())
    assert all(is_in_memory([each], int(pid)) for each in values), "it would be found"
    head = Path(ControllerConnection().ask(ControllerInterface.about)["services"]["history"]["path"]).parent
    assert (head / "secrets" / "STORED").read_text().endswith(f"\n{stored}\n")
    assert places_with(values, head.parent, head / "secrets") == []
    for told_of_it in what_people_see(cluster, job.job_id, tmp_path):
        assert not any(each in told_of_it for each in (stored, given))
    (listed,) = iris_json(cluster, "cluster", "secrets", "ls")
    assert (listed["secret"]["name"], listed["jobs"]) == ("STORED", [job.job_id])
    (tmp_path / "finish").touch()
    job.results()
    wait_until(lambda: not alive(int(pid)))
    iris(cluster, "cluster", "secrets", "rm", "STORED")
    assert places_with(values, head.parent, tmp_path) == []
