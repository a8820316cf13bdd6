"""What earlier actors left running on a host is ended, and nothing else is touched."""

import errno
import json
import os
import threading
from collections.abc import Iterable
from pathlib import Path
from signal import SIGKILL

import psutil
import pytest

from iris_ray.actors.host import reaper
from iris_ray.actors.host.ledger import ProcessLedger
from iris_ray.actors.protocol.task_files import TaskFiles
from iris_ray.model.notices import Notice, NoticeKind
from iris_ray.processes.identity import ProcessIdentity
from iris_ray.processes.subtree import pids
from iris_ray.processes.tree import TOKEN_VARIABLE, ProcessTree, end_processes
from tests.support.processes import (
    TOKEN,
    Nursery,
    alive,
    counted_looks,
    earlier_than,
    identity_of,
    no_file_descriptor_left,
    tree,
)


def test_ledger_ends_processes_left_by_earlier_actor(nursery: Nursery, tmp_path: Path) -> None:
    process = nursery.sleeper()
    ProcessLedger(tmp_path).record(tree(process))
    assert ProcessLedger(tmp_path).end_leftovers() == []
    assert not alive(process)
    assert list(tmp_path.rglob("*.json")) == []


def test_reaper_tries_again_after_an_error(nursery: Nursery, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    process = nursery.sleeper()
    ledger = ProcessLedger(tmp_path)
    ledger.record(tree(process))
    errors = [OSError(errno.ENFILE, os.strerror(errno.ENFILE))]

    def fail_once() -> list[int]:
        if errors:
            raise errors.pop()
        return pids()

    monkeypatch.setattr("iris_ray.processes.tree.pids", fail_once)
    monkeypatch.setattr(reaper, "AGAIN_S", 0.01)
    reaper.end_what_is_left(ledger, ProcessIdentity.of_this_process())
    assert not errors
    assert not alive(process)


def test_ledger_finds_daemons_of_all_tasks_by_one_listing(
    nursery: Nursery, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A host may have recorded a thousand tasks."""
    ledger, daemons, looks = ProcessLedger(tmp_path), list[psutil.Process](), counted_looks(monkeypatch)
    for number in range(4):
        token = f"{TOKEN}-{number}"
        task = nursery.sleeper()
        ledger.record(tree(task, token))
        TaskFiles.of_process(tmp_path, task.pid).started.touch()
        daemons += [nursery.sleeper(**{TOKEN_VARIABLE: token})] if number == 3 else []
        task.kill()
        nursery.reap(task)
    found: list[int] = []

    def killed(left: Iterable[ProcessIdentity], search: object, timeout_s: float, grace_s: float) -> list[str]:
        found.extend(process.pid for process in left)
        return end_processes(left, list, timeout_s, grace_s)

    monkeypatch.setattr("iris_ray.actors.host.ledger.end_processes", killed)
    assert ledger.end_leftovers(grace_s=0.0) == []
    assert found == [daemon.pid for daemon in daemons]
    assert len(looks) == 3
    assert not [*tmp_path.rglob("*.json")]


def test_ledger_keeps_only_tasks_that_cannot_be_ended(
    nursery: Nursery, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    processes = [nursery.sleeper() for _ in range(3)]
    ledger = ProcessLedger(tmp_path)
    for number, process in enumerate(processes):
        ledger.record(tree(process, f"{TOKEN}-{number}"))
    send = ProcessIdentity.signal
    monkeypatch.setattr("iris_ray.actors.host.ledger.LEFTOVERS_DYING_S", 0.0)
    monkeypatch.setattr(ProcessIdentity, "signal", lambda one, _: one.pid != processes[1].pid and send(one, SIGKILL))
    for process in (processes[0], processes[2]):
        process.kill()
        nursery.reap(process)
    TaskFiles.of_process(tmp_path, processes[0].pid).started.touch()
    assert ledger.end_leftovers(grace_s=0.0) == [f"pid {processes[1].pid}"]
    assert [path.stem for path in tmp_path.rglob("*.json")] == [str(processes[1].pid)]
    monkeypatch.undo()
    assert ledger.end_leftovers() == []
    assert not alive(processes[1])


def test_ledger_ends_processes_named_by_task_and_children(nursery: Nursery, tmp_path: Path) -> None:
    """A model's process is started by Ray, not by the task that keeps the host for it."""
    process, stranger = nursery.sleeper(), nursery.sleeper()
    parent, (child,) = nursery.tree("child")
    ProcessLedger(tmp_path).record(tree(process))
    files = TaskFiles.of_process(tmp_path, process.pid)
    files.add_member(identity_of(parent))
    files.add_member(earlier_than(stranger))  # another process had this pid
    assert ProcessLedger(tmp_path).end_leftovers() == []
    assert not any(map(alive, (process, parent, child)))
    assert alive(stranger)
    assert files.read_members() == set()


@pytest.mark.parametrize("handler", ["lambda *_: (open(sys.argv[1], 'x'), sys.exit())", "signal.SIG_IGN"])
def test_ledger_sends_sigterm_before_killing_leftovers(nursery: Nursery, tmp_path: Path, handler: str) -> None:
    asked = tmp_path / "asked"
    script = f"import signal, sys, time; signal.signal(15, {handler}); print(flush=True); time.sleep(60)"
    process = nursery.script(script, str(asked))
    ProcessLedger(tmp_path).record(tree(process))
    assert ProcessLedger(tmp_path).end_leftovers() == []
    assert not alive(process)
    assert asked.exists() == (handler != "signal.SIG_IGN")


def test_ledger_ends_leftovers_on_read_only_disk(
    nursery: Nursery, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a disk refuses to remove even what is not there."""

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    processes = [nursery.sleeper() for _ in range(3)]
    for process in processes:
        ProcessLedger(tmp_path).record(tree(process))
    (tmp_path / "tasks" / "1.json").write_text("damaged")
    monkeypatch.setattr(os, "unlink", refuse)
    assert ProcessLedger(tmp_path).end_leftovers() == []
    assert not any(map(alive, processes))


def test_shared_hosts_ledger_makes_place_for_first_output(tmp_path: Path) -> None:
    ProcessLedger(tmp_path / "host", exclusive=False)
    output = TaskFiles.of_process(tmp_path / "host", 1).output
    os.mkfifo(output)
    assert output.is_fifo()


@pytest.mark.parametrize("recorder_lives", [True, False])
def test_shared_hosts_ledger_ends_only_tasks_of_ended_recorders(
    nursery: Nursery, tmp_path: Path, recorder_lives: bool
) -> None:
    process, recorder = nursery.sleeper(), nursery.sleeper()
    ledger = ProcessLedger(tmp_path, exclusive=False)
    ledger.record(tree(process))
    (entry,) = tmp_path.rglob("*.json")
    noted = json.loads(entry.read_text())
    assert noted["recorder"][0] == os.getpid()
    entry.write_text(json.dumps(noted | {"recorder": identity_of(recorder)}))
    if not recorder_lives:
        recorder.kill()
        nursery.reap(recorder)
    assert ledger.end_leftovers() == []
    assert alive(process) == entry.exists() == recorder_lives


def test_shared_hosts_ledger_spares_task_without_recorder(nursery: Nursery, tmp_path: Path) -> None:
    process = nursery.sleeper()
    ledger = ProcessLedger(tmp_path, exclusive=False)
    ledger.record(tree(process))
    (entry,) = tmp_path.rglob("*.json")
    noted = json.loads(entry.read_text())
    del noted["recorder"]
    entry.write_text(json.dumps(noted))
    assert ledger.end_leftovers() == []
    assert alive(process)


def test_ledger_forgets_process_ended_before_its_task(nursery: Nursery, tmp_path: Path) -> None:
    """It has no descendants, so the ledger does not search all processes of the machine for them."""
    ended, carrier = nursery.sleeper(), nursery.sleeper(**{TOKEN_VARIABLE: TOKEN})
    ledger = ProcessLedger(tmp_path)
    ledger.record(tree(ended))
    ended.kill()
    nursery.reap(ended)
    assert ledger.end_leftovers() == []
    assert alive(carrier)
    assert not [*tmp_path.rglob("*.json")]


def test_ledger_spares_calling_process(nursery: Nursery, tmp_path: Path) -> None:
    left, me = nursery.sleeper(), psutil.Process()
    ledger = ProcessLedger(tmp_path)
    ledger.record(tree(left, f"{TOKEN}-1"))
    ledger.record(tree(me, f"{TOKEN}-2"))
    assert ledger.end_leftovers(grace_s=0.0) == []
    assert not alive(left)


def test_ledger_spares_forgotten_process(nursery: Nursery, tmp_path: Path) -> None:
    process = nursery.sleeper()
    ledger = ProcessLedger(tmp_path)
    ledger.record(tree(process))
    ledger.forget(tree(process))
    ledger.forget(tree(process))
    assert ledger.end_leftovers() == []
    assert alive(process)


def test_ledger_spares_process_reusing_a_tasks_pid(nursery: Nursery, tmp_path: Path) -> None:
    stranger = nursery.sleeper()
    ledger = ProcessLedger(tmp_path)
    ledger.record(tree(stranger))
    (entry,) = tmp_path.rglob("*.json")
    entry.write_text(json.dumps(json.loads(entry.read_text()) | {"started": stranger.create_time() - 100.0}))
    assert ledger.end_leftovers() == []
    assert alive(stranger)
    assert list(tmp_path.rglob("*.json")) == []


@pytest.mark.parametrize("text", ["", '{"pid": 1', "{}", "[]", "null"])
def test_ledger_with_damaged_entry_ends_other_tasks(nursery: Nursery, tmp_path: Path, text: str) -> None:
    process = nursery.sleeper()
    ledger = ProcessLedger(tmp_path)
    ledger.record(tree(process))
    (entry,) = tmp_path.rglob("*.json")
    entry.with_name("1.json").write_text(text)
    entry.with_name("99999999.json").write_text(text)
    assert ledger.end_leftovers() == []
    assert not alive(process)


def test_ledger_keeps_temporarily_unreadable_entry(
    nursery: Nursery, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until it is read nobody may take its process for ended."""

    def fail(path: Path) -> str:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    process = nursery.sleeper()
    ledger = ProcessLedger(tmp_path)
    ledger.record(tree(process))
    with monkeypatch.context() as faulty:
        faulty.setattr(Path, "read_text", fail)
        assert not ledger.owned({process.pid})
        assert ledger.end_leftovers() == [f"pid {process.pid} (its record can't be read: Input/output error)"]
    assert alive(process)
    assert ledger.end_leftovers() == []
    assert not alive(process)


def test_ledger_ends_daemon_of_ended_task(nursery: Nursery, tmp_path: Path) -> None:
    """A child with a session of its own survives a SIGKILL of its worker, and may hold the chips."""
    parent, (daemon,) = nursery.tree("daemon", IRIS_RAY_TASK_TOKEN=f"{TOKEN}-1")
    ProcessLedger(tmp_path).record(tree(parent, f"{TOKEN}-1"))
    TaskFiles.of_process(tmp_path, parent.pid).started.touch()
    parent.kill()
    nursery.reap(parent)
    ProcessLedger(tmp_path).end_leftovers()
    assert not alive(daemon)


def test_ledger_ends_recorded_descendants_without_token(nursery: Nursery, tmp_path: Path) -> None:
    """Forked ones and those with another environment; the kernel forgets their parent when it ends."""
    parent, children = nursery.tree("child", "daemon")
    ledger, one = ProcessLedger(tmp_path), tree(parent)
    ledger.record(one)
    ledger.record_descendants(one)
    parent.kill()
    nursery.reap(parent)
    pids = {child.pid for child in children}
    assert ProcessLedger(tmp_path).owned(pids) == pids
    assert ProcessLedger(tmp_path).end_leftovers() == []
    assert not any(map(alive, children))


def test_ledger_does_not_record_descendants_of_forgotten_process(nursery: Nursery, tmp_path: Path) -> None:
    parent, _ = nursery.tree("child")
    ledger, one = ProcessLedger(tmp_path), tree(parent)
    ledger.record(one)
    ledger.forget(one)
    ledger.record_descendants(one)
    assert list(tmp_path.rglob("*.json")) == []


@pytest.mark.parametrize("when", ["recorded", "forgotten"])
def test_notice_of_earlier_process_with_same_pid_is_gone(tmp_path: Path, when: str) -> None:
    files, ledger = TaskFiles.of_process(tmp_path, os.getpid()), ProcessLedger(tmp_path)
    other, me = TaskFiles.of_process(tmp_path, os.getpid() + 1), tree(psutil.Process(), "token")
    if when == "forgotten":
        ledger.record(me)
    for one in (files, other):
        for path in (one.notice, one.saved, one.heartbeat, one.status, one.first_steps, one.marked):
            path.write_text("{}")
    if when == "recorded":
        ledger.record(me)
    else:
        ledger.forget(me)
    assert not any(
        path.exists()
        for path in (files.notice, files.saved, files.heartbeat, files.status, files.first_steps, files.marked)
    )
    assert all(path.exists() for path in (other.notice, other.saved, other.heartbeat))
    files.remove()  # there is nothing left to remove


def test_process_reusing_pid_survives_forgetting_of_earlier_one(nursery: Nursery, tmp_path: Path) -> None:
    """Another actor on the host has recorded it; this one forgets its own tasks some time after they have ended."""
    process = nursery.sleeper()
    later, earlier = tree(process), earlier_than(process)
    files = TaskFiles.of_process(tmp_path, later.pid)
    ProcessLedger(tmp_path, exclusive=False).record(later)
    files.started.touch()
    ProcessLedger(tmp_path, exclusive=False).forget(ProcessTree(earlier, "earlier"))
    assert [path.stem for path in tmp_path.rglob("*.json")] == [str(later.pid)]
    assert files.started.exists()


def test_ledger_and_notice_are_written_concurrently(tmp_path: Path, nursery: Nursery) -> None:
    """The record of descendants and the notice are written by different threads, into one directory."""
    process = nursery.sleeper()
    ledger, files = ProcessLedger(tmp_path), TaskFiles.of_process(tmp_path, process.pid)
    ledger.record(tree(process))
    over = threading.Event()

    def keep_recording() -> None:
        while not over.is_set():
            ledger.record(tree(process))

    recording = threading.Thread(target=keep_recording)
    recording.start()
    try:
        for number in range(500):
            files.write_notice(Notice(NoticeKind.PREEMPTION, f"notice {number}", 1.0))
    finally:
        over.set()
        recording.join()
    assert ledger.owned({process.pid}) == {process.pid}


def test_ledger_keeps_task_whose_named_processes_are_unreadable(nursery: Nursery, tmp_path: Path) -> None:
    process, named = nursery.sleeper(), nursery.sleeper()
    ProcessLedger(tmp_path).record(tree(process))
    files = TaskFiles.of_process(tmp_path, process.pid)
    files.members.mkdir()  # reading it fails
    (left,) = ProcessLedger(tmp_path).end_leftovers()
    assert left.startswith(f"pid {process.pid} (its record can't be read: ")
    files.members.rmdir()
    files.add_member(identity_of(named))
    assert ProcessLedger(tmp_path).end_leftovers() == []
    assert not any(map(alive, (process, named)))


def test_ledger_without_file_descriptors_does_not_say_that_nothing_is_left(nursery: Nursery, tmp_path: Path) -> None:
    process = nursery.sleeper()
    ledger = ProcessLedger(tmp_path)
    ledger.record(tree(process))
    with no_file_descriptor_left(), pytest.raises(OSError, match="Too many open files"):
        ledger.end_leftovers()
    assert alive(process)


def test_torn_line_of_named_process_is_ignored(nursery: Nursery, tmp_path: Path) -> None:
    """Some file systems leave zeros of what was appended when the machine went down."""
    process, named = nursery.sleeper(), nursery.sleeper()
    ProcessLedger(tmp_path).record(tree(process))
    files = TaskFiles.of_process(tmp_path, process.pid)
    files.add_member(identity_of(named))
    with files.members.open("ab") as members:
        members.write(b"\0\0\0 \0\0\n\xff 12\n" + b"9" * 300 + b" 1\n" + b"9" * 5000 + b" 1\n12")
    assert ProcessLedger(tmp_path).end_leftovers() == []
    assert not any(map(alive, (process, named)))
