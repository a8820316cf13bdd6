"""A parent that ends all its descendants, and a child that ends with its parent.

A parent that takes orphans (Linux calls it a subreaper) loses no descendant, whatever the descendant's parent, session,
process group and environment are. So it needs no record to end them all, and to know that none is left.

Programs that start within milliseconds import this module: keep its own imports few.
"""

import contextlib
import ctypes
import math
import os
import signal
import time
from collections.abc import Callable, Collection, Mapping

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
GONE_OR_ANOTHER_USERS = FileNotFoundError, ProcessLookupError, PermissionError
KERNEL_LISTS_CHILDREN = os.path.exists("/proc/thread-self/children")
"""Whether the kernel lists the children of a thread. Most kernels do."""
AGAIN_S, SLOWLY_S = 0.004, 0.5
BRISK_S = 5.0
"""The time after which descendants are killed less often: the rest wait for a disk, or belong to another user."""


def end_with_parent(parent: int | None = None) -> None:
    """Have the kernel kill this process when the thread that has started it ends. Linux only.

    Args:
        parent: the pid of the parent. If the parent has ended already, this process is killed at once. None: not
            checked.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent not in (None, os.getppid()):
        os.kill(os.getpid(), signal.SIGKILL)


def take_orphans() -> None:
    """Have the kernel make this process the parent of each descendant that loses its own parent."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def start_child(command: list[str], prepare: Callable[[], object], environ: Mapping[str, str]) -> int:
    """Run a program in a child that ends with this process. Return the child's pid.

    Args:
        command: the program, found by ``PATH``, and its arguments.
        prepare: is called in the child, before the program.
        environ: the program's variables.

    Raises:
        OSError: the child could not prepare itself or run the program.
    """
    told, tell = os.pipe()
    parent, pid = os.getpid(), os.fork()
    if pid == 0:
        try:
            end_with_parent(parent)
            prepare()
            os.execvpe(command[0], command, environ)
        except OSError as error:
            os.write(tell, f"{error.errno or 0}".encode())
        finally:
            os._exit(127)
    os.close(tell)
    with open(told, "rb") as answer:
        failed = answer.read()
    if failed:
        os.waitpid(pid, 0)
        raise OSError(int(failed), os.strerror(int(failed)))
    return pid


def reap() -> dict[int, int]:
    """Reap each child that has ended. Return exit codes by pid; a signal counts as its negative number."""
    codes: dict[int, int] = {}
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            codes[ended[0]] = os.waitstatus_to_exitcode(ended[1])
    return codes


def end_descendants(timeout_s: float = math.inf, first: Callable[[int], bool] = bool) -> bool:
    """Kill and reap all descendants, including those that start meanwhile. Block until none is left.

    Args:
        timeout_s: how long to try, in seconds.
        first: returns whether a process, given by its pid, is killed before the others.

    Returns:
        Whether no descendant is left. Only a process that takes orphans can rely on that.
    """
    began = time.monotonic()
    while True:
        with contextlib.suppress(OSError):  # such as too many open files on the machine: the next round looks again
            for pid in sorted(descendants(os.getpid()), key=first, reverse=True):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
        reap()
        if not _has_children():
            return True
        waited_s = time.monotonic() - began
        if waited_s > timeout_s:
            return False
        time.sleep(AGAIN_S if waited_s < BRISK_S else SLOWLY_S)


def _has_children() -> bool:
    """Return whether this process has a child; a child that has ended and was not reaped counts."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def has_orphans(forks: Collection[int]) -> bool:
    """Return whether this process, which takes orphans, has a child besides these that it has forked itself.

    If not, none of its forks that it has reaped has left a descendant. True if the kernel can't tell. Children must end
    nowhere but in `reap` meanwhile: the kernel's list of them may miss some while others leave it.
    """
    return not KERNEL_LISTS_CHILDREN or not set(children(os.getpid())) <= set(forks)


def children(pid: int) -> list[int]:
    """Return the children of a process; none if it has ended.

    Raises:
        OSError: as `read_of_process`.
    """
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except GONE_OR_ANOTHER_USERS:
        return []
    return [int(child) for thread in threads for child in read_of_process(pid, f"task/{thread}/children").split()]


def descendants(root: int) -> list[int]:
    """Return the pids of all descendants of a process, zombies included, parents before their children."""
    by_parent: dict[int, list[int]] = {}
    for pid in pids():
        if fields := stat_fields(pid):
            by_parent.setdefault(int(fields[1]), []).append(pid)
    found, generation = [], [root]
    while generation := [child for pid in generation for child in by_parent.pop(pid, ())]:
        found += generation
    return found


def pids() -> list[int]:
    """Return the pids of all processes of the machine."""
    return [int(name) for name in os.listdir("/proc") if name.isdecimal()]


def stat_fields(pid: int) -> list[bytes]:
    """Return the fields of ``/proc/<pid>/stat`` after the command's name; none if there is no such process."""
    return read_of_process(pid, "stat").rpartition(b")")[2].split()


def read_of_process(pid: int, name: str) -> bytes:
    """Return a file of ``/proc`` about a process; empty if the process has ended or is another user's.

    Scans read thousands of these files, so this does without the cost of a Python file object.

    Raises:
        OSError: the file can't be read for another reason, such as too many open files in this process. If we took the
            other process for ended, it would live on.
    """
    try:
        file = os.open(f"/proc/{pid}/{name}", os.O_RDONLY | os.O_CLOEXEC)
    except GONE_OR_ANOTHER_USERS:
        return b""
    try:
        return b"".join(iter(lambda: os.read(file, 1 << 16), b""))
    except GONE_OR_ANOTHER_USERS:
        return b""
    finally:
        os.close(file)


def as_shells_say(code: int) -> int:
    """Return an exit code as shells do: 128 plus the number of the signal that killed the process, if one did."""
    return 128 - code if code < 0 else code
