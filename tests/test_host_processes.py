"""Real processes: what is ours is ended with all its descendants, and nothing else is touched."""

import json
import os
import platform
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from iris_ray.actors.host_processes import ProcessLedger, end_task, family, host_directory
from iris_ray.actors.pidfd import how_it_ended

# Starts the children that it is told to, says their pids, and stays: without waiting for them, so that they are zombies
# when they end.
PARENT = """
import os, subprocess, sys, time
for kind in sys.argv[1:]:
    detached = kind == "daemon"
    print(subprocess.Popen(["sleep", "60"], start_new_session=detached).pid, flush=True)
time.sleep(60)
"""


class Nursery:
    """Starts processes, and ends all of them with the test."""

    def __init__(self) -> None:
        self._started: list[subprocess.Popen[str]] = []
        self._children: list[psutil.Process] = []

    def sleeper(self, **environ: str) -> psutil.Process:
        process = subprocess.Popen(["sleep", "60"], env={**os.environ, **environ}, text=True)
        self._started.append(process)
        return psutil.Process(process.pid)

    def tree(self, *kinds: str, **environ: str) -> tuple[psutil.Process, list[psutil.Process]]:
        """A parent and its children: "child" or "daemon", which has a session of its own."""
        command = [sys.executable, "-c", PARENT, *kinds]
        parent = subprocess.Popen(command, env={**os.environ, **environ}, stdout=subprocess.PIPE, text=True)
        self._started.append(parent)
        assert parent.stdout is not None
        children = [psutil.Process(int(parent.stdout.readline())) for _ in kinds]
        self._children += children
        return psutil.Process(parent.pid), children

    def reap(self, process: psutil.Process) -> None:
        next(started for started in self._started if started.pid == process.pid).wait(10)

    def clear(self) -> None:
        for child in self._children:
            if alive(child):
                child.kill()
        for process in self._started:
            process.kill()
            process.wait(10)
            if process.stdout is not None:
                process.stdout.close()


def alive(process: psutil.Process) -> bool:
    """Whether it runs: neither gone nor a zombie that nobody has reaped."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.fixture
def nursery() -> Iterator[Nursery]:
    nursery = Nursery()
    yield nursery
    nursery.clear()


# -- ending a task --------------------------------------------------------------------------------------------------


def test_end_task_takes_the_whole_tree_along(nursery: Nursery) -> None:
    parent, children = nursery.tree("child", "daemon")
    end_task(family(parent), "token", timeout_s=1.0)
    assert not any(map(alive, [parent, *children]))


def test_end_task_finds_a_daemon_that_left_the_tree_by_its_token(nursery: Nursery) -> None:
    parent, (daemon,) = nursery.tree("daemon", IRIS_RAY_TASK_TOKEN="token-1")
    parent.kill()
    nursery.reap(parent)
    assert alive(daemon)
    end_task([], "token-1", timeout_s=1.0)
    assert not alive(daemon)


def test_end_task_leaves_other_tasks_alone(nursery: Nursery) -> None:
    ours = nursery.sleeper(IRIS_RAY_TASK_TOKEN="token-1")
    others = [nursery.sleeper(IRIS_RAY_TASK_TOKEN=token) for token in ("token-11", "token-2", "")]
    assert end_task([], "token-1") == []
    assert not alive(ours)
    assert all(map(alive, others))


def test_end_task_of_what_is_gone_already_is_nobody_left(nursery: Nursery) -> None:
    process = nursery.sleeper()
    process.kill()
    nursery.reap(process)
    assert end_task([process], "token") == []
    assert family(process) == []


def test_end_task_counts_a_process_that_nobody_reaps_as_gone(nursery: Nursery) -> None:
    """In a container whose first process does not reap, orphans stay zombies; they hold neither memory nor chips."""
    _, (child,) = nursery.tree("child")
    assert end_task([child], "token", timeout_s=0.5) == []


# -- what earlier actors left behind --------------------------------------------------------------------------------


def test_ledger_ends_what_an_earlier_actor_left_behind(nursery: Nursery, tmp_path: Path) -> None:
    process = nursery.sleeper()
    ProcessLedger(tmp_path).record(process, "token")
    assert ProcessLedger(tmp_path).end_leftovers() == []
    assert not alive(process)
    assert list(tmp_path.rglob("*.json")) == []


def test_ledger_does_not_touch_what_it_was_told_to_forget(nursery: Nursery, tmp_path: Path) -> None:
    process = nursery.sleeper()
    ledger = ProcessLedger(tmp_path)
    ledger.record(process, "token")
    ledger.forget(process.pid)
    ledger.forget(process.pid)
    assert ledger.end_leftovers() == []
    assert alive(process)


def test_ledger_does_not_touch_a_process_that_got_the_pid_of_a_task(nursery: Nursery, tmp_path: Path) -> None:
    stranger = nursery.sleeper()
    ledger = ProcessLedger(tmp_path)
    ledger.record(stranger, "token")
    (entry,) = tmp_path.rglob("*.json")
    entry.write_text(json.dumps(json.loads(entry.read_text()) | {"started": stranger.create_time() - 100.0}))
    assert ledger.end_leftovers() == []
    assert alive(stranger)
    assert list(tmp_path.rglob("*.json")) == []


@pytest.mark.parametrize("text", ["", '{"pid": 1', "{}", "[]", "null"])
def test_ledger_with_an_entry_that_makes_no_sense_still_ends_the_others(
    nursery: Nursery, tmp_path: Path, text: str
) -> None:
    process = nursery.sleeper()
    ledger = ProcessLedger(tmp_path)
    ledger.record(process, "token")
    (entry,) = tmp_path.rglob("*.json")
    entry.with_name("1.json").write_text(text)
    entry.with_name("99999999.json").write_text(text)
    assert ledger.end_leftovers() == []
    assert not alive(process)


def test_ledger_ends_a_daemon_of_a_task_whose_own_process_is_gone(nursery: Nursery, tmp_path: Path) -> None:
    """A child with a session of its own survives a SIGKILL of its worker, and may hold the chips."""
    parent, (daemon,) = nursery.tree("daemon", IRIS_RAY_TASK_TOKEN="token-1")
    ProcessLedger(tmp_path).record(parent, "token-1")
    parent.kill()
    nursery.reap(parent)
    ProcessLedger(tmp_path).end_leftovers()
    assert not alive(daemon)


def test_host_directory_is_private_and_configurable(tmp_path: Path) -> None:
    configured = host_directory({"IRIS_RAY_HOST_DIR": str(tmp_path / "x" / "y")})
    assert configured == tmp_path / "x" / "y"
    assert stat.S_IMODE(configured.stat().st_mode) == 0o700


def test_host_directory_by_default_is_one_per_user() -> None:
    assert str(os.getuid()) in host_directory({}).name


# -- how a process ended --------------------------------------------------------------------------------------------

TELLS = tuple(map(int, platform.release().split("-")[0].split(".")[:2])) >= (6, 15)


@pytest.mark.parametrize(
    ("script", "how"),
    [
        ("exit 0", "exited with code 0"),
        ("exit 3", "exited with code 3"),
        ("kill -KILL $$", "was killed by SIGKILL"),
        ("kill -SEGV $$", "was killed by SIGSEGV"),
        ("kill -ABRT $$", "was killed by SIGABRT"),
        ("kill -40 $$", "was killed by signal 40"),
    ],
)
def test_how_it_ended_tells_code_or_signal_to_who_is_not_the_parent(script: str, how: str) -> None:
    process = subprocess.Popen(["sh", "-c", f"ulimit -c 0; read wait; {script}"], stdin=subprocess.PIPE)
    pidfd = os.pidfd_open(process.pid)
    try:
        assert how_it_ended(pidfd) is None  # it still runs
        process.communicate(b"\n", timeout=10)
        assert how_it_ended(pidfd) == (how if TELLS else None)
    finally:
        os.close(pidfd)
