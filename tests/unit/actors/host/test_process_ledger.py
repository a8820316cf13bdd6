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

from iris_ray.actors.host.end_task import TOKEN_VARIABLE, end_task
from iris_ray.actors.host.exit_status import how_it_ended
from iris_ray.actors.host.host_directory import host_directory, output_pipe, started_mark
from iris_ray.actors.host.process_ledger import ProcessLedger
from iris_ray.actors.host.process_tree import ProcessTree, stat_of

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

    def tree(self, *kinds: str, leads: bool = False, **environ: str) -> tuple[psutil.Process, list[psutil.Process]]:
        """A parent, which may lead a process group, and its children: "child" or "daemon", of a session of its own."""
        command = [sys.executable, "-c", PARENT, *kinds]
        env, group = {**os.environ, **environ}, 0 if leads else None
        parent = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True, process_group=group)
        self._started.append(parent)
        assert parent.stdout is not None
        children = [psutil.Process(int(parent.stdout.readline())) for _ in kinds]
        self._children += children
        return psutil.Process(parent.pid), children

    def script(self, script: str, *arguments: str) -> psutil.Process:
        """A Python script that has printed its first line."""
        process = subprocess.Popen([sys.executable, "-c", script, *arguments], stdout=subprocess.PIPE, text=True)
        self._started.append(process)
        assert process.stdout is not None
        process.stdout.readline()
        return psutil.Process(process.pid)

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


def tree(process: psutil.Process) -> ProcessTree:
    stat = stat_of(process.pid)
    assert stat is not None
    return ProcessTree(stat.pid, stat.started)


def by_pid(processes: list[psutil.Process]) -> list[psutil.Process]:
    return sorted(processes, key=lambda process: process.pid)


@pytest.fixture
def nursery() -> Iterator[Nursery]:
    nursery = Nursery()
    yield nursery
    nursery.clear()


# -- ending a task --------------------------------------------------------------------------------------------------


def test_end_task_takes_the_whole_tree_along(nursery: Nursery) -> None:
    parent, children = nursery.tree("child", "daemon")
    end_task(tree(parent).search(), "token", timeout_s=1.0)
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


def test_end_task_counts_a_process_that_nobody_reaps_as_gone(nursery: Nursery) -> None:
    """In a container whose first process does not reap, orphans stay zombies; they hold neither memory nor chips."""
    _, (child,) = nursery.tree("child")
    assert end_task([child], "token", timeout_s=0.5) == []


# -- who belongs to it ----------------------------------------------------------------------------------------------


def test_family_that_was_noted_is_known_after_its_parent_has_gone(nursery: Nursery) -> None:
    parent, children = nursery.tree("child", "daemon")
    noted = tree(parent)
    assert noted.update()
    assert not noted.update(), "nothing is new"
    parent.kill()
    nursery.reap(parent)
    assert noted.update()
    assert by_pid(noted.members()) == by_pid(noted.search()) == by_pid(children)
    assert end_task(noted.members(), "token") == []
    assert not any(map(alive, children))


def test_family_includes_a_group_that_its_first_process_leads_while_the_number_can_be_nobody_elses(
    nursery: Nursery,
) -> None:
    parent, (unseen, daemon) = nursery.tree("child", "daemon", leads=True)
    ended, earlier = tree(parent), tree(parent)
    parent.kill()
    nursery.reap(parent)
    assert ended.search(just_ended=True) == [unseen], "the daemon had left it, and nobody had seen it"
    assert ended.search() == [unseen], "one of the group is known"
    assert earlier.search() == [], "the group may be another's by now"
    assert alive(daemon)


def test_family_does_not_take_a_group_whose_leader_has_got_the_pid_of_its_first_process(nursery: Nursery) -> None:
    leader, _ = nursery.tree("child", leads=True)
    assert ProcessTree(leader.pid, tree(leader).started - 1).search(just_ended=True) == []


def test_family_does_not_take_who_got_the_pid_of_a_relative_for_one(nursery: Nursery) -> None:
    stranger = nursery.sleeper()
    noted = ProcessTree(2**22 + 1, 1, [(stranger.pid, tree(stranger).started + 1)])
    assert noted.members() == noted.search() == []


# -- what earlier actors left behind --------------------------------------------------------------------------------


def test_ledger_ends_what_an_earlier_actor_left_behind(nursery: Nursery, tmp_path: Path) -> None:
    process = nursery.sleeper()
    ProcessLedger(tmp_path).record(tree(process), "token")
    assert ProcessLedger(tmp_path).end_leftovers() == []
    assert not alive(process)
    assert list(tmp_path.rglob("*.json")) == []


@pytest.mark.parametrize("handler", ["lambda *_: (open(sys.argv[1], 'x'), sys.exit())", "signal.SIG_IGN"])
def test_ledger_asks_what_was_left_behind_to_end_before_it_kills_it(
    nursery: Nursery, tmp_path: Path, handler: str
) -> None:
    asked = tmp_path / "asked"
    script = f"import signal, sys, time; signal.signal(15, {handler}); print(flush=True); time.sleep(60)"
    process = nursery.script(script, str(asked))
    ProcessLedger(tmp_path).record(tree(process), "token")
    assert ProcessLedger(tmp_path).end_leftovers() == []
    assert not alive(process)
    assert asked.exists() == (handler != "signal.SIG_IGN")


def test_task_that_shares_a_host_on_which_no_other_was_has_a_place_for_its_output(tmp_path: Path) -> None:
    ProcessLedger(tmp_path / "host", exclusive=False)
    os.mkfifo(output_pipe(tmp_path / "host", 1))


@pytest.mark.parametrize("keeper_lives", [True, False])
def test_ledger_of_a_shared_host_ends_only_tasks_whose_keeper_is_gone(
    nursery: Nursery, tmp_path: Path, keeper_lives: bool
) -> None:
    process, keeper = nursery.sleeper(), nursery.sleeper()
    ledger = ProcessLedger(tmp_path, exclusive=False)
    ledger.record(tree(process), "token")
    (entry,) = tmp_path.rglob("*.json")
    noted = json.loads(entry.read_text())
    assert noted["recorder"][0] == os.getpid()
    entry.write_text(json.dumps(noted | {"recorder": [keeper.pid, tree(keeper).started]}))
    if not keeper_lives:
        keeper.kill()
        nursery.reap(keeper)
    assert ledger.end_leftovers() == []
    assert alive(process) == entry.exists() == keeper_lives


def test_ledger_of_a_shared_host_leaves_alone_what_nobody_says_he_keeps(nursery: Nursery, tmp_path: Path) -> None:
    process = nursery.sleeper()
    ledger = ProcessLedger(tmp_path, exclusive=False)
    ledger.record(tree(process), "token")
    (entry,) = tmp_path.rglob("*.json")
    noted = json.loads(entry.read_text())
    del noted["recorder"]
    entry.write_text(json.dumps(noted))
    assert ledger.end_leftovers() == []
    assert alive(process)


def test_ledger_forgets_a_process_that_ended_before_it_got_a_task(nursery: Nursery, tmp_path: Path) -> None:
    """Nothing can descend from it; so nobody looks through all processes of the machine for each of them."""
    ended, relative = nursery.sleeper(), nursery.sleeper(**{TOKEN_VARIABLE: "token"})
    ledger = ProcessLedger(tmp_path)
    ledger.record(tree(ended), "token")
    ended.kill()
    nursery.reap(ended)
    assert ledger.end_leftovers() == []
    assert alive(relative)
    assert not [*tmp_path.rglob("*.json")]


def test_ledger_does_not_end_who_asks(nursery: Nursery, tmp_path: Path) -> None:
    left, me = nursery.sleeper(), psutil.Process()
    ledger = ProcessLedger(tmp_path)
    ledger.record(tree(left), "token-1")
    ledger.record(tree(me), "token-2")
    assert ledger.end_leftovers(grace_s=0.0) == []
    assert not alive(left)


def test_ledger_does_not_touch_what_it_was_told_to_forget(nursery: Nursery, tmp_path: Path) -> None:
    process = nursery.sleeper()
    ledger = ProcessLedger(tmp_path)
    ledger.record(tree(process), "token")
    ledger.forget(process.pid)
    ledger.forget(process.pid)
    assert ledger.end_leftovers() == []
    assert alive(process)


def test_ledger_does_not_touch_a_process_that_got_the_pid_of_a_task(nursery: Nursery, tmp_path: Path) -> None:
    stranger = nursery.sleeper()
    ledger = ProcessLedger(tmp_path)
    ledger.record(tree(stranger), "token")
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
    ledger.record(tree(process), "token")
    (entry,) = tmp_path.rglob("*.json")
    entry.with_name("1.json").write_text(text)
    entry.with_name("99999999.json").write_text(text)
    assert ledger.end_leftovers() == []
    assert not alive(process)


def test_ledger_ends_a_daemon_of_a_task_whose_own_process_is_gone(nursery: Nursery, tmp_path: Path) -> None:
    """A child with a session of its own survives a SIGKILL of its worker, and may hold the chips."""
    parent, (daemon,) = nursery.tree("daemon", IRIS_RAY_TASK_TOKEN="token-1")
    ProcessLedger(tmp_path).record(tree(parent), "token-1")
    started_mark(tmp_path, parent.pid).touch()
    parent.kill()
    nursery.reap(parent)
    ProcessLedger(tmp_path).end_leftovers()
    assert not alive(daemon)


def test_ledger_ends_descendants_without_a_token_that_were_noted_while_their_parent_lived(
    nursery: Nursery, tmp_path: Path
) -> None:
    """Forked ones and those with an environment of their own; nobody's children once the task's process is gone."""
    parent, children = nursery.tree("child", "daemon")
    ledger, one = ProcessLedger(tmp_path), tree(parent)
    ledger.record(one, "token")
    ledger.record_descendants(one, "token")
    parent.kill()
    nursery.reap(parent)
    assert all(map(ProcessLedger(tmp_path).owns, children))
    assert ProcessLedger(tmp_path).end_leftovers() == []
    assert not any(map(alive, children))


def test_ledger_does_not_write_down_again_what_it_was_told_to_forget(nursery: Nursery, tmp_path: Path) -> None:
    parent, _ = nursery.tree("child")
    ledger, one = ProcessLedger(tmp_path), tree(parent)
    ledger.record(one, "token")
    ledger.forget(parent.pid)
    ledger.record_descendants(one, "token")
    assert list(tmp_path.rglob("*.json")) == []


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
