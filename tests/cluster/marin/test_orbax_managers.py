"""Which losses Orbax's managers cover with a `local_dir` per host, with real processes of JAX: docs/checkpoints.md."""

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("orbax.checkpoint", reason="needs orbax-checkpoint: make marin")
from tests.support.orbax_gang import IN_BUCKET, ON_HOSTS, PROCESSES

HOSTS = {"slice 0": [0, 1], "slice 1": [2, 3]}
"""The hosts of each slice."""


class Gang:
    """A gang that saves, loses hosts, and restores.

    Args:
        directory: an empty one, for the directories of its hosts and for a bucket.
        manager: Orbax's manager.
    """

    def __init__(self, directory: Path, manager: str) -> None:
        self._manager = manager
        self._locals = [directory / f"host-{i}" for i in range(PROCESSES)]
        self._bucket = directory / "bucket"
        for each in (*self._locals, self._bucket):
            each.mkdir()
        self._run("save")

    def lose(self, hosts: list[int]) -> None:
        """Have empty hosts in their places."""
        for host in hosts:
            shutil.rmtree(self._locals[host])
            self._locals[host].mkdir()

    def restored_step(self) -> int:
        (step,) = {int(line.split()[1]) for line in self._run("restore")}
        return step

    def _run(self, verb: str) -> list[str]:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            coordinator = f"127.0.0.1:{free.getsockname()[1]}"
        command = [sys.executable, "-m", "tests.support.orbax_gang", verb, self._manager]
        places = [[str(i), coordinator, str(own), str(self._bucket)] for i, own in enumerate(self._locals)]
        env = os.environ | {"JAX_PLATFORMS": "cpu"}
        processes = [
            subprocess.Popen([*command, *place], env=env, stdout=subprocess.PIPE, text=True) for place in places
        ]
        try:
            outputs = [process.communicate(timeout=120)[0] for process in processes]
        finally:
            for process in processes:
                process.kill()
        assert [process.returncode for process in processes] == [0] * PROCESSES
        return [line for output in outputs for line in output.splitlines() if line.startswith("restored")]


@pytest.mark.proof
@pytest.mark.parametrize("lost", HOSTS)
@pytest.mark.parametrize(("manager", "covered"), [("emergency", ["slice 0"]), ("p2p", ["slice 0", "slice 1"])])
def test_manager_restores_from_hosts_only_covered_losses(
    tmp_path: Path, manager: str, covered: list[str], lost: str
) -> None:
    """The emergency manager keeps no local copies on slice 0. tests/unit/checkpoint has the replicator."""
    gang = Gang(tmp_path, manager)
    gang.lose(HOSTS[lost])
    assert gang.restored_step() == (ON_HOSTS if lost in covered else IN_BUCKET)
