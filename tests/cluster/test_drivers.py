"""Several drivers on one cluster, and what is left when a driver ends, however it ends."""

import importlib.util
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from iris_ray import release, run_on_pod
from iris_ray.actors.calls.controller_connection import ControllerConnection, find_controller
from iris_ray.actors.calls.names import CONTROLLER_NAME, NAMESPACE
from iris_ray.testing import SimulatedCluster
from tests.support.clusters import actors_left
from tests.support.gangs import alive, free_chips
from tests.support.proofs import in_long, in_proofs
from tests.support.waiting import wait_until

CHIPS = 3 * 2 * 4

PRELUDE = """
    import os, sys, time
    from pathlib import Path
    import ray
    from iris_ray import get_job_info, run_on_pod, run_on_pod_ray
    address, directory = sys.argv[1], Path(sys.argv[2])
    ray.init(address=address, log_to_driver=False)

    def linger():
        me = get_job_info()
        (directory / f"pid-{os.getpid()}").touch()
        while not (directory / "finish").exists():
            time.sleep(0.02)
        return me.task_index
"""


@pytest.fixture
def drivers(cluster: SimulatedCluster, tmp_path: Path) -> Iterator["Drivers"]:
    release()
    wait_until(lambda: free_chips() == CHIPS, 20)
    started = Drivers(cluster.address, tmp_path)
    yield started
    started.end()


class Drivers:
    """Scripts in processes of their own, connected to the test's cluster."""

    def __init__(self, address: str, directory: Path) -> None:
        self._address, self.directory = address, directory
        self._processes: list[subprocess.Popen[str]] = []

    def start(self, body: str) -> "subprocess.Popen[str]":
        script = textwrap.dedent(PRELUDE) + textwrap.dedent(body)
        process = subprocess.Popen(
            [sys.executable, "-c", script, self._address, str(self.directory)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._processes.append(process)
        return process

    def task_pids(self, count: int) -> list[int]:
        """The tasks' processes, once that many have started."""
        paths = wait_until(lambda: len(p := list(self.directory.glob("pid-*"))) >= count and p)
        return [int(path.name.removeprefix("pid-")) for path in paths]

    def end(self) -> None:
        for process in self._processes:
            if process.poll() is None:
                process.kill()
            process.communicate()


@pytest.mark.long
def test_two_drivers_wanting_two_of_three_slices_take_turns(drivers: "Drivers") -> None:
    """If they took slices one by one, each could hold one and wait for ever."""
    (drivers.directory / "finish").touch()
    body = "print(sorted(run_on_pod(linger, 'v4-16', num_slices=2)))"
    both = [drivers.start(body), drivers.start(body)]
    for driver in both:
        output, _ = driver.communicate(timeout=120)
        assert "[0, 1, 2, 3]" in output


@pytest.mark.long
def test_idle_drivers_warm_slices_go_to_needy_driver(drivers: "Drivers") -> None:
    assert run_on_pod(lambda: 1, "v4-16", num_slices=3, keep_warm=600) == [1] * 6
    (drivers.directory / "finish").touch()
    other = drivers.start("print(run_on_pod(linger, 'v4-16'))")
    output, _ = other.communicate(timeout=120)
    assert "[0, 1]" in output


@pytest.mark.parametrize("how", ["SIGKILL", *in_proofs("normal", "SIGTERM"), *in_long("SIGINT")])
def test_ended_driver_leaves_only_the_controller(cluster: SimulatedCluster, drivers: "Drivers", how: str) -> None:
    ends_by_itself = (
        "ref = run_on_pod_ray.remote(linger, 'v4-16')\nwhile len(list(directory.glob('pid-*'))) < 2: time.sleep(0.05)"
    )
    driver = drivers.start(ends_by_itself if how == "normal" else "run_on_pod(linger, 'v4-16')")
    pids = drivers.task_pids(2)
    assert len(actors_left(cluster)) >= 2 + 2 + 1  # tasks, hosts and slices at least: it is the right place to look
    if how.startswith("SIG"):
        driver.send_signal(getattr(signal, how))
    driver.wait(timeout=30)
    wait_until(lambda: not any(map(alive, pids)), 10)
    wait_until(lambda: free_chips() == CHIPS, 10)
    wait_until(lambda: not actors_left(cluster), 10)
    controller = ray.get_actor("controller", namespace="iris_ray")
    assert "does not know" in ray.get(controller.why.remote("nobody"))


def test_interrupted_call_stops_gang_while_driver_goes_on(drivers: "Drivers") -> None:
    driver = drivers.start(
        """
        try:
            run_on_pod(linger, "v4-16")
        except KeyboardInterrupt:
            print("interrupted", flush=True)
        time.sleep(60)
        """
    )
    pids = drivers.task_pids(2)
    time.sleep(0.5)
    driver.send_signal(signal.SIGINT)
    wait_until(lambda: not any(map(alive, pids)), 10)
    assert driver.poll() is None


@pytest.mark.parametrize("seconds", [*in_proofs(2), *in_long(15)])
def test_ending_script_waits_for_tasks_still_writing(drivers: "Drivers", seconds: int) -> None:
    """Threads first, then exit handlers, as in any Python process. An asynchronous checkpoint is written like this."""
    driver = drivers.start(
        f"""
        import atexit, threading

        def write(path):
            time.sleep({seconds})
            path.write_text("all of it")

        def save_later():
            index = get_job_info().task_index
            atexit.register(write, directory / f"atexit-{{index}}")
            threading.Thread(target=write, args=[directory / f"thread-{{index}}"]).start()
            return index

        print(run_on_pod(save_later, "v4-16", keep_warm=0), list(directory.iterdir()), flush=True)
        """
    )
    output, _ = driver.communicate(timeout=120)
    assert "[0, 1] []" in output, "the results are out at once"
    assert "waiting for tasks that have returned" in output
    written = {path.name: path.read_text() for path in drivers.directory.iterdir()}
    assert written == dict.fromkeys(("atexit-0", "atexit-1", "thread-0", "thread-1"), "all of it")


@pytest.mark.long
def test_interrupt_at_script_end_ends_writing_tasks(drivers: "Drivers") -> None:
    driver = drivers.start(
        """
        import atexit

        def save_later():
            atexit.register(linger)

        run_on_pod(save_later, "v4-16")
        """
    )
    pids = drivers.task_pids(2)
    time.sleep(2.0)
    driver.send_signal(signal.SIGINT)
    output, _ = driver.communicate(timeout=30)
    assert "is lost" in output
    wait_until(lambda: not any(map(alive, pids)), 10)


@pytest.mark.long
def test_vanished_drivers_job_makes_room_for_next(drivers: "Drivers") -> None:
    greedy = drivers.start("run_on_pod(linger, 'v4-16', num_slices=3)")
    drivers.task_pids(6)
    greedy.kill()
    assert run_on_pod(lambda: os.getpid() > 0, "v4-16") == [True] * 2


FIRST_DRIVER = """
    import importlib.util, os, sys
    import ray
    from iris_ray import IrisClient

    address, workspace = sys.argv[1], sys.argv[2] + "/workspace"
    os.environ["SECRET_OF_THE_PROCESS"] = "hunter2 of the process"
    os.chdir(workspace)
    sys.path.insert(0, workspace)
    ray.init(address=address, log_to_driver=False, runtime_env={
        "working_dir": workspace,
        "env_vars": {"SECRET_OF_THE_JOB": "hunter2 of the job"},
    })

    def seen():
        return os.environ.get("SECRET_OF_THE_JOB"), importlib.util.find_spec("code_of_the_user") is not None

    print(IrisClient().submit(seen, env={"SECRET_OF_THE_TASK": "hunter2 of the task"}).results())
    print(ray.get_runtime_context().get_job_id(), flush=True)
    sys.stdin.read()  # its Ray job is there for as long as the test looks
"""


@pytest.mark.long
def test_controller_inherits_nothing_from_starting_driver(cluster: SimulatedCluster, tmp_path: Path) -> None:
    """Neither environment, nor runtime environment, nor checkout; it has a Ray job of its own, on the head node."""

    def surroundings() -> dict[str, Any]:
        """What a process of the cluster has around it."""
        here = ray.get_runtime_context()
        return {
            "environment": dict(os.environ),
            "runtime_env": dict(here.runtime_env),
            "directory": os.getcwd(),
            "path": sys.path,
            "sees the user's code": importlib.util.find_spec("code_of_the_user") is not None,
            "job": here.get_job_id(),
            "node": here.get_node_id(),
        }

    if find_controller() is not None:
        ControllerConnection().end()
    (tmp_path / "workspace").mkdir()
    (tmp_path / "workspace" / "code_of_the_user.py").touch()
    driver = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(FIRST_DRIVER), cluster.address, str(tmp_path)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert driver.stdout is not None
    try:
        assert driver.stdout.readline().strip() == "[('hunter2 of the job', True)]"  # its tasks have it all
        job_id = driver.stdout.readline().strip()
        controller = ray.get_actor(CONTROLLER_NAME, NAMESPACE)
        found = ray.get(controller.__ray_call__.remote(lambda _: surroundings()), timeout=30)
    finally:
        driver.communicate()
    environment = " ".join(f"{name}={value}" for name, value in found["environment"].items())
    assert "hunter2" not in environment
    assert "SECRET_OF" not in environment
    assert list(found["runtime_env"]) == ["py_modules"]
    assert not found["sees the user's code"]
    assert str(tmp_path) not in " ".join([found["directory"], *found["path"]])
    assert found["job"] not in (job_id, ray.get_runtime_context().get_job_id())
    (head,) = [node["NodeID"] for node in ray.nodes() if "node:__internal_head__" in node["Resources"]]
    assert found["node"] == head
