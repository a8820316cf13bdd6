"""A simulated machine: all its processes are frozen, thawed and killed together."""

import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from iris_ray.actors.protocol.task_files import TaskFiles
from iris_ray.docker.host import ContainerRecord
from iris_ray.testing.machine import Machine
from tests.support.containers import a_stand_in
from tests.support.gangs import alive
from tests.support.waiting import wait_until


@pytest.fixture
def lifeline() -> Iterator[tuple[int, int]]:
    reading, writing = os.pipe()
    yield reading, writing
    os.close(reading)
    os.close(writing)


def a_machine(script: str, directory: Path, lifeline: int) -> Machine:
    command = [sys.executable, "-I", "-S", "-c", textwrap.dedent(script)]
    return Machine(command, env=os.environ, cwd=directory, log=directory / "log", lifeline=lifeline)


FAMILY = """
    import os, time
    if os.fork() == 0:          # a grandchild that escapes from its session, its parent and its environment
        os.setsid()
        if os.fork():
            os._exit(0)
        os.execve("/bin/sleep", ["sleep", "1000"], {})
    open("ready", "w").close()
    time.sleep(1000)
"""


def family_on(machine: Machine, directory: Path) -> list[int]:
    """Wait until a machine that runs `FAMILY` has only the command and the daemon, and return their pids."""
    wait_until(lambda: (directory / "ready").exists() and machine.pids("sleep 1000") == machine.pids()[1:] != [])
    return machine.pids()


def test_machine_kill_ends_daemons_too(tmp_path: Path, lifeline: tuple[int, int]) -> None:
    machine = a_machine(FAMILY, tmp_path, lifeline[1])
    pids = family_on(machine, tmp_path)
    machine.kill()
    assert not machine.running
    assert machine.pids() == []
    assert not any(psutil.pid_exists(pid) for pid in pids)
    machine.kill()  # a second time is harmless


def test_machine_freeze_stops_all_and_thaw_continues(tmp_path: Path, lifeline: tuple[int, int]) -> None:
    machine = a_machine(FAMILY, tmp_path, lifeline[1])
    family_on(machine, tmp_path)
    machine.freeze()
    assert {psutil.Process(pid).status() for pid in machine.pids()} == {psutil.STATUS_STOPPED}
    machine.thaw()
    wait_until(lambda: {psutil.Process(pid).status() for pid in machine.pids()} == {psutil.STATUS_SLEEPING})
    machine.freeze()
    machine.kill()
    assert not machine.running


def test_machine_ends_with_its_command(tmp_path: Path, lifeline: tuple[int, int]) -> None:
    machine = a_machine(FAMILY.replace("time.sleep(1000)", "time.sleep(0.2)"), tmp_path, lifeline[1])
    wait_until(lambda: not machine.running)
    assert machine.pids() == []
    machine.kill()  # closes the pipe to its supervisor


def test_machine_whose_command_was_killed_lives_until_killed(tmp_path: Path, lifeline: tuple[int, int]) -> None:
    machine = a_machine(FAMILY, tmp_path, lifeline[1])
    command, daemon = family_on(machine, tmp_path)
    machine.kill_command()
    wait_until(lambda: not psutil.pid_exists(command))
    assert machine.running
    assert machine.pids() == [daemon]
    machine.kill()
    assert not psutil.pid_exists(daemon)


def test_machine_unknown_program_says_so_in_its_log(tmp_path: Path, lifeline: tuple[int, int]) -> None:
    log = tmp_path / "log"
    machine = Machine(["/no/such/program"], env=os.environ, cwd=tmp_path, log=log, lifeline=lifeline[1])
    wait_until(lambda: not machine.running)
    assert "cannot run /no/such/program" in log.read_text()
    machine.kill()


def test_machine_takes_the_containers_of_its_tasks_with_it(
    tmp_path: Path, lifeline: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("IRIS_RAY_HOST_DIR", str(tmp_path))
    (tmp_path / "tasks").mkdir()
    damaged = TaskFiles.of_process(tmp_path, 1).owned("docker")
    damaged.parent.mkdir()
    damaged.write_text("{")
    with a_stand_in(tmp_path) as engine:
        ContainerRecord(str(engine.path), "one").write(TaskFiles.of_process(tmp_path, 77))
        arguments = ["run", "--name=one", "--label=iris-ray.container=one", "busybox", "sleep", "60"]
        with subprocess.Popen([engine.path, *arguments]) as client:
            pid = wait_until(lambda: engine.pid("one"))
            machine = a_machine(FAMILY, tmp_path, lifeline[1])
            wait_until((tmp_path / "ready").exists)
            machine.kill()
            wait_until(lambda: not alive(pid))
            client.wait(60)
        assert engine.containers() == []
