"""SimulatedCluster in drivers of their own: whatever ends a driver, nothing is left behind."""

import os
import signal
import subprocess
import sys
import textwrap
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.support.proofs import in_proofs
from tests.support.waiting import wait_until


class Driver:
    """A script in a process of its own, with everything that descends from it marked by an environment variable."""

    PREAMBLE = """
        import os, signal, subprocess, sys, threading, time
        import ray
        from iris_ray.testing import SimulatedCluster

        @ray.remote(num_cpus=0, resources={"TPU": 4})
        def live(seconds):
            print("line-of-a-task")
            subprocess.Popen(["setsid", "sleep", "1000"])
            time.sleep(seconds)
    """

    def __init__(self, script: str) -> None:
        self._mark = uuid.uuid4().hex
        source = textwrap.dedent(self.PREAMBLE) + textwrap.dedent(script)
        self.process = subprocess.Popen(
            [sys.executable, "-u", "-c", source],
            env={**os.environ, "SIMULATED_CLUSTER_TEST": self._mark},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.lines: list[str] = []

    def read_until(self, text: str) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)
            if text in line:
                return
        pytest.fail(f"the driver never said {text!r}, but:\n{''.join(self.lines)}")

    def finish(self, timeout_s: float = 60) -> int:
        output, _ = self.process.communicate(timeout=timeout_s)
        self.lines += output.splitlines(keepends=True)
        return self.process.returncode

    def remains(self) -> list[str]:
        """Processes and directories that are there because of this driver."""
        processes = [
            f"{p.pid} {p.info['name']}"
            for p in psutil.process_iter(["environ", "name"])
            if (p.info["environ"] or {}).get("SIMULATED_CLUSTER_TEST") == self._mark
        ]
        return processes + [str(path) for path in Path("/tmp").glob(f"iris-{self.process.pid}-*")]


@pytest.fixture
def driver() -> Iterator[Callable[[str], Driver]]:
    drivers: list[Driver] = []

    def start(script: str) -> Driver:
        drivers.append(Driver(script))
        return drivers[-1]

    yield start
    for one in drivers:
        one.process.kill()
        one.process.wait()
        if one.process.stdout is not None:
            one.process.stdout.close()


BUSY = """
    with SimulatedCluster({"v4-8": 1}) as cluster:
        live.remote(1000)
        while not any("sleep" in open(f"/proc/{pid}/comm").read() for pid in cluster.host_pids("v4-8-0", 0)[2:]):
            time.sleep(0.02)
        %s
        print("busy")
        time.sleep(1000)
"""


@pytest.mark.parametrize(
    "number", [signal.SIGKILL, signal.SIGINT, *in_proofs(signal.SIGTERM, signal.SIGHUP)], ids=lambda n: n.name
)
def test_driver_ended_by_signal_leaves_nothing(driver: Callable[[str], Driver], number: signal.Signals) -> None:
    one = driver(BUSY % "pass")
    one.read_until("busy")
    assert len(one.remains()) > 5
    one.process.send_signal(number)
    assert one.finish() != 0
    wait_until(lambda: not one.remains())


@pytest.mark.parametrize(
    "before", in_proofs("cluster.freeze_host('v4-8-0', 0)", "cluster.preempt_slice('v4-8-0', 1000)")
)
def test_driver_killed_with_a_host_in_trouble_leaves_nothing(driver: Callable[[str], Driver], before: str) -> None:
    one = driver(BUSY % before)
    one.read_until("busy")
    one.process.kill()
    one.finish()
    wait_until(lambda: not one.remains())


@pytest.mark.parametrize("said", ["connecting", *in_proofs("starting the head", "starting 2 TPU hosts", "have joined")])
@pytest.mark.parametrize("number", [signal.SIGINT, *in_proofs(signal.SIGKILL)], ids=lambda n: n.name)
def test_driver_interrupted_while_starting_leaves_nothing(
    driver: Callable[[str], Driver], number: signal.Signals, said: str
) -> None:
    one = driver("""
        with SimulatedCluster({"v4-16": 1}):
            time.sleep(1000)
    """)
    one.read_until(said)
    one.process.send_signal(number)
    assert one.finish() != 0
    assert number == signal.SIGKILL or "KeyboardInterrupt" in "".join(one.lines)
    wait_until(lambda: not one.remains())


@pytest.mark.parametrize(
    ("ending", "code"),
    [("os._exit(3)", 3), *in_proofs(("", 0), ("raise KeyError('mine')", 1))],
    ids=["_exit", "normal", "error"],
)
def test_driver_that_never_calls_shutdown_leaves_nothing(
    driver: Callable[[str], Driver], ending: str, code: int
) -> None:
    one = driver("SimulatedCluster({'v4-8': 1}).start()\n" + ending)
    assert one.finish() == code
    wait_until(lambda: not one.remains())


@pytest.mark.proof
def test_cluster_with_dead_gcs_ends_normally(driver: Callable[[str], Driver]) -> None:
    one = driver("""
        with SimulatedCluster({"v4-8": 1}, persistent=True) as cluster:
            cluster.kill_gcs()
    """)
    assert one.finish() == 0, "".join(one.lines)
    wait_until(lambda: not one.remains())


def test_gcs_whose_death_would_end_everything_is_not_killed(driver: Callable[[str], Driver]) -> None:
    one = driver("""
        from iris_ray.errors import InvalidRequestError

        with SimulatedCluster(quiet=True) as cluster:
            for fault in (cluster.kill_gcs, cluster.restart_gcs):
                try:
                    fault()
                except InvalidRequestError as error:
                    print("refused:", error)
            print("still", len(ray.nodes()), "node")
    """)
    assert one.finish() == 0, "".join(one.lines)
    assert sum("refused:" in line and "persistent=True" in line for line in one.lines) == 2
    assert any("still 1 node" in line for line in one.lines)


def test_output_of_tasks_reaches_the_driver_once(driver: Callable[[str], Driver]) -> None:
    one = driver("""
        with SimulatedCluster({"v4-16": 1}, quiet=True):
            ray.get([live.remote(0)])
            time.sleep(2)  # that a second copy would need
    """)
    assert one.finish() == 0
    assert "".join(one.lines).count("line-of-a-task") == 1
    assert "simulated cluster" not in "".join(one.lines)


@pytest.mark.proof
def test_unconnected_cluster_takes_a_driver_with_working_dir(driver: Callable[[str], Driver], tmp_path: Path) -> None:
    (tmp_path / "shipped.py").write_text("VALUE = 'from the working directory'\n")
    one = driver(f"""
        def read():
            import shipped
            return shipped.VALUE, os.environ["COLOUR"]

        with SimulatedCluster({{"v4-8": 1}}, connect=False) as cluster:
            assert not ray.is_initialized()
            ray.init(cluster.address, runtime_env={{"working_dir": {str(tmp_path)!r}, "env_vars": {{"COLOUR": "red"}}}})
            print(ray.get(ray.remote(resources={{"v4-8-0": 1}})(read).remote()))
        assert not ray.is_initialized()  # a driver that loses its cluster aborts
        with SimulatedCluster(quiet=True):  # and the next cluster in the process works
            print(ray.get(ray.remote(lambda: "again").remote()))
    """)
    assert one.finish() == 0, "".join(one.lines)
    assert "('from the working directory', 'red')" in "".join(one.lines)
    assert "again" in "".join(one.lines)
    wait_until(lambda: not one.remains())


def test_forked_child_of_the_driver_keeps_nothing_alive(driver: Callable[[str], Driver]) -> None:
    one = driver("""
        import json
        cluster = SimulatedCluster({"v4-8": 1}).start()
        child = os.fork()
        if child == 0:
            cluster.shutdown()  # not the child's to end
            time.sleep(1000)
        assert cluster.worker_ids("v4-8-0") == [0]
        began = time.monotonic()
        cluster.shutdown()
        print("took", time.monotonic() - began)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    """)
    assert one.finish() == 0, "".join(one.lines)
    (took,) = (float(line.split()[1]) for line in one.lines if line.startswith("took"))
    assert took < 8
    wait_until(lambda: not one.remains())


def test_host_that_cannot_start_is_reported_with_its_log(driver: Callable[[str], Driver]) -> None:
    one = driver("""
        with SimulatedCluster() as cluster:
            os.environ["RAY_raylet_client_num_connect_attempts"] = "nonsense"
            try:
                cluster.add_slice("v4-8")
            except RuntimeError as error:
                print("refused:", error)
            print(cluster.slice_names)
    """)
    assert one.finish() == 0, "".join(one.lines)
    text = "".join(one.lines)
    assert "refused: Host v4-8-0-w0 ended while it started" in text
    assert "raylet ended with exit code" in text
    assert "[]" in text
