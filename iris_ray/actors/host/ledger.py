"""The record of a host's task processes, on disk. A later actor finds processes there that an earlier one left."""

import contextlib
import json
import os
import threading
from collections.abc import Callable, Collection, Iterator
from functools import partial
from pathlib import Path

from iris_ray.actors.host.owned import end_owned
from iris_ray.actors.protocol.task_files import TaskFiles, files_in, remove_file, write_whole
from iris_ray.processes.identity import ProcessIdentity, environ_of, stat_of
from iris_ray.processes.tree import TOKEN_VARIABLE, Listing, ProcessTree, end_processes, names_of_running

TERM_GRACE_S = 1.0
"""The time that leftover processes have to end after SIGTERM."""
LEFTOVERS_DYING_S = 240.0
"""The time that leftover processes have to end after SIGKILL: the kernel frees hundreds of gigabytes first. It is less
than `reserved_slice.START_TIMEOUT_S`."""

EXCLUSIVE, SHARED = "tasks", "shared-tasks"
"""The folders with the records of tasks that have the host to themselves, and of tasks that share it."""


class ProcessLedger:
    """Records each task process of this host in ``<directory>/tasks/<pid>.json``, with descendants and start times.

    Tasks without chips share their host and are recorded in ``<directory>/shared-tasks``. Such a task is a leftover
    only if its recorder, the process that recorded it, has ended.

    Args:
        directory: the host's directory.
        exclusive: whether this ledger's tasks have the host to themselves.
    """

    def __init__(self, directory: Path, exclusive: bool = True) -> None:
        self._host_directory = directory
        self._exclusive = exclusive
        self._directory = directory / (EXCLUSIVE if exclusive else SHARED)
        for used in (self._directory, self._files(0).output.parent):
            used.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock = threading.Lock()

    def record(self, tree: ProcessTree) -> None:
        """Record a task process."""
        self._files(tree.pid).remove()  # left by an earlier process with this pid
        with self._lock:
            self._write(tree)

    def record_descendants(self, tree: ProcessTree) -> None:
        """Update a tree and record it if it has changed, unless the process was forgotten."""
        if tree.update():
            with self._lock:
                if self._entry(tree.pid).exists():
                    self._write(tree)

    def has_started(self, pid: int) -> bool:
        """Return whether user code has begun to run in a process."""
        return os.path.exists(self._files(pid).started)  # False, too, if a faulty disk can't tell

    def forget(self, tree: ProcessTree) -> None:
        """Remove a process's record and its files. They stay if another process has got the pid and is recorded.

        On a disk that has become read-only they stay, too.
        """
        with self._lock:
            if not self._has_recorded(tree):
                return
            remove_file(self._entry(tree.pid))
        remove_file(self._files(tree.pid).output)
        self._files(tree.pid).remove()

    def end_leftovers(self, grace_s: float = TERM_GRACE_S, recorder: ProcessIdentity | None = None) -> list[str]:
        """End the processes that earlier actors left running, except the calling process.

        Args:
            grace_s: seconds between SIGTERM and SIGKILL; 0 sends no SIGTERM.
            recorder: an actor that is gone, to end only its tasks; None ends the tasks of all actors.

        Returns:
            The processes that run or may run after `LEFTOVERS_DYING_S`, as ``pid <n>``, and what `end_owned`
            could not end.

        Raises:
            OSError: the records can't be listed for now.
        """
        trees: list[ProcessTree] = []
        unread: list[str] = []
        for tree in self._entries(unread, partial(self._is_leftover, recorder)):
            if tree.pid == os.getpid():
                continue
            never_ran = not self.has_started(tree.pid) and len(tree.known) == 1
            if never_ran and not tree.root.exists():  # so it has no descendants
                self.forget(tree)
            else:
                trees.append(tree)

        def search() -> list[ProcessIdentity]:
            listing = Listing.next()
            return [process for tree in trees for process in tree.search(listing=listing)]

        still_running: list[str] = []
        end_processes(search() if trees else (), search, LEFTOVERS_DYING_S, grace_s)
        for tree in trees:
            if left := names_of_running(tree.known) + end_owned(self._files(tree.pid)):
                still_running += left
            else:
                self.forget(tree)
        return still_running + unread + self._end_lost()

    def owned(self, found: Collection[int]) -> set[int]:
        """Return the pids of those processes that provably belong to a task of this host, with or without chips.

        A process does if it or one of its ancestors is recorded or carries the token of a recorded task. A process in a
        container has such an ancestor: the container's first process. Records are read once, and each ancestor, too.
        A process that can't be read now counts as another's.
        """
        folders = (self._host_directory / name for name in (EXCLUSIVE, SHARED))
        entries = [entry for folder in folders for entry in self._entries([], folder=folder)]
        recorded = frozenset[ProcessIdentity]().union(*(tree.known for tree in entries))
        tokens = {f"{TOKEN_VARIABLE}={tree.token}".encode() for tree in entries}

        known: dict[int, bool] = {0: False}
        for pid in found:
            at, line, ours = pid, list[int](), False
            with contextlib.suppress(OSError):
                while not ours and at not in known and (stat := stat_of(at)) is not None:
                    line.append(at)
                    ours = stat.identity in recorded or not tokens.isdisjoint(environ_of(stat.identity))
                    at = stat.parent
            known |= dict.fromkeys(line, ours or known.get(at, False))
        return {pid for pid in found if known.get(pid, False)}

    def _end_lost(self) -> list[str]:
        """End what tasks without a record own: it could not be ended together with its task."""
        folders = [self._host_directory / name for name in (EXCLUSIVE, SHARED)]
        recorded = {path.stem for folder in folders for path in _entries_in(folder)}
        lost = [files for files in TaskFiles.with_owned(self._host_directory) if files.pid not in recorded]
        return [left for files in lost for left in end_owned(files)]

    def _files(self, pid: int) -> TaskFiles:
        return TaskFiles.of_process(self._host_directory, pid)

    def _entry(self, pid: int) -> Path:
        return self._directory / f"{pid}.json"

    def _has_recorded(self, tree: ProcessTree) -> bool:
        try:
            return int(json.loads(self._entry(tree.pid).read_text())["started"]) == tree.root.started
        except (OSError, ValueError, KeyError, TypeError):
            return False

    def _write(self, tree: ProcessTree) -> None:
        recorder, descendants = ProcessIdentity.of_this_process(), sorted(tree.known - {tree.root})
        entry = {**tree.root._asdict(), "token": tree.token, "descendants": descendants, "recorder": recorder}
        write_whole(self._entry(tree.pid), json.dumps(entry).encode())

    def _is_leftover(self, gone: ProcessIdentity | None, recorder: ProcessIdentity | None) -> bool:
        """Return whether the tasks of a recorder are leftovers; see `end_leftovers`."""
        if gone is not None:
            return recorder == gone
        return self._exclusive or (recorder is not None and not recorder.exists())

    def _entries(
        self,
        unread: list[str],
        wanted: Callable[[ProcessIdentity | None], bool] | None = None,
        folder: Path | None = None,
    ) -> Iterator[ProcessTree]:
        """Yield each recorded tree. Remove damaged entries.

        Args:
            unread: gets a description of each entry that the disk can't read.
            wanted: returns whether to yield the trees of a recorder, which is None if the entry names none. None: all.
            folder: the folder of the entries; None: this ledger's own.
        """
        for path in _entries_in(folder or self._directory):
            try:
                entry = json.loads(path.read_text())
                known = [ProcessIdentity(int(pid), int(started)) for pid, started in entry.get("descendants", ())]
                root = ProcessIdentity(int(entry["pid"]), int(entry["started"]))
                tree = ProcessTree(root, str(entry["token"]), known)
                tree.adopt(self._files(tree.pid).read_members())
                recorder = ProcessIdentity(*entry["recorder"]) if "recorder" in entry else None
                if wanted is None or wanted(recorder):
                    yield tree
            except FileNotFoundError:  # another actor has removed it
                pass
            except OSError as error:  # that may pass
                unread.append(f"pid {path.stem} (its record can't be read: {error.strerror})")
            except (ValueError, KeyError, TypeError, AttributeError):  # damaged
                remove_file(path)


def end_leftovers(exclusive: bool) -> None:
    """End the earlier tasks on this host, in place of its TPUHostActor, which is gone.

    Args:
        exclusive: whether those tasks had the host to themselves.

    Raises:
        RuntimeError: some of their processes can't be ended.
    """
    from iris_ray.actors.host.directories import host_directory  # it imports Ray, and the reaper starts without

    if left := ProcessLedger(host_directory(), exclusive).end_leftovers(grace_s=0.0):
        raise RuntimeError(f"{', '.join(left)} can't be ended")


def _entries_in(folder: Path) -> list[Path]:
    return [path for path in files_in(folder) if path.suffix == ".json"]
