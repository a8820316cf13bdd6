"""Tasks read and write the files of their job on other hosts: after a loss, and never those of another job."""

import json
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray

from iris_ray import get_job_info, run_on_pod_ray
from iris_ray.checkpoint import peer_files
from iris_ray.checkpoint.peer_files import PeerFiles, peers
from iris_ray.errors import PeerFilesError
from iris_ray.testing import SimulatedCluster
from tests.support.gangs import Trace, job_view
from tests.support.waiting import wait_until


@pytest.mark.proof
def test_new_hosts_read_what_lost_attempt_left_on_others(
    cluster: SimulatedCluster, trace: Trace, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = trace.directory

    def keeps_copies(facts: dict[str, Any]) -> tuple[str, list[dict[str, int]], bytes]:
        me = get_job_info()
        assert me is not None
        hosts = peers()
        if me.attempt == 1:
            (Path(me.local_dir) / "own").write_bytes(b"x" * (10 + me.task_index))
            hosts[(me.task_index + 2) % 4].write(f"copies/{me.task_index}", Path(me.local_dir) / "own")
            (directory / f"wrote-{me.task_index}").write_text(json.dumps(me.file_services))
        while not (directory / "finish").exists() and me.attempt == 1:
            time.sleep(0.05)
        found = [host.list() for host in hosts]
        holder = next(index for index, files in enumerate(found) if "copies/3" in files)
        content = bytearray(found[holder]["copies/3"])
        hosts[holder].read("copies/3", memoryview(content))
        return me.slice_name, found, bytes(content)

    def spies() -> list[str]:
        peer_files.START_S = 0.2
        services = json.loads((directory / "wrote-0").read_text())
        token = peers()[0]._token
        refusals = []
        for address in services:
            with pytest.raises(PeerFilesError) as refused:
                PeerFiles(address, token).list()
            refusals.append(str(refused.value))
        return refusals

    ref = run_on_pod_ray.remote(trace.gang(keeps_copies), "v4-16", num_slices=2, max_retries_failure=0)
    first = trace.wait_for_tasks(4)
    wait_until(lambda: len([wrote for wrote in directory.glob("wrote-*") if wrote.stat().st_size]) == 4)
    services = json.loads((directory / "wrote-3").read_text())
    hosts = [cluster.host_dir(start["slice"], i % 2) for i, start in enumerate(first)]
    (token,) = {path.read_text() for host in hosts for path in host.glob("jobs/*/token")}
    addresses = [address.rpartition(":")[0] for address in services]
    assert addresses[0] == first[0]["coordinator"].rpartition(":")[0]
    assert len({*addresses}) == 4

    for refusals in ray.get(run_on_pod_ray.remote(spies, "v4-16")):
        assert all("no job with this token has started a task on this host" in refusal for refusal in refusals)

    cluster.preempt_slice(first[2]["slice"])
    results = ray.get(ref)
    survivors = [{"own": 10, "copies/2": 12}, {"own": 11, "copies/3": 13}]
    assert [found for _, found, _ in results] == [[*survivors, {}, {}]] * 4
    assert {content for _, _, content in results} == {b"x" * 13}

    assert token not in str(job_view(first[0]["job"]))
    said = "".join(" ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"]))
    assert token not in said
    logs = [path for host in hosts for path in host.rglob("*") if path.is_file() and path.name != "token"]
    assert logs
    assert not [path for path in logs if token.encode() in path.read_bytes()]
    used = [cluster.host_dir(name, i) for name in {name for name, *_ in results} for i in range(2)]
    wait_until(lambda: not any([*host.glob("jobs/*")] for host in used))  # the job is over
    monkeypatch.setattr(peer_files, "START_S", 0.1)
    for address in services[:2]:
        with pytest.raises(PeerFilesError):
            PeerFiles(address, token, timeout_s=1.0).list()
