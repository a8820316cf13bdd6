"""libtpu's lock: a POSIX write lock on a file, which a process holds as long as it uses the chips.

The kernel gives the lock back when the process ends, so a lock file that is left over means nothing.

Closing *any* descriptor of a file drops all locks that the same process has on it. So a process that may use the chips
itself must use `LockProbe`, and nothing else here.
"""

import contextlib
import fcntl
import os
import struct
from pathlib import Path

# struct flock: short l_type, short l_whence, off_t l_start, off_t l_len, pid_t l_pid.
_FLOCK = struct.Struct("hhqqi4x")

TO_ASK = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
"""Flags that open the file without waiting. Another user may have put a FIFO there, and a FIFO waits for a writer."""

NO_PID = 0
"""The kernel's number for a process that has none in our container."""


def lock_holder(lock: Path) -> int | None:
    """Return the pid of the process that holds the lock; `NO_PID` if it has none in our container.

    Returns None if no process holds the lock, or if the file can't be read.
    """
    try:
        descriptor = os.open(lock, TO_ASK)
    except OSError:
        return None
    try:
        return _other_holder(descriptor)
    finally:
        os.close(descriptor)


class LockProbe:
    """Tells a process that is about to use the chips whether another process does.

    The file stays open for the rest of the process's life: closing it would drop the lock that libtpu takes later.
    """

    def __init__(self, lock: Path) -> None:
        self._descriptor: int | None = None
        with contextlib.suppress(OSError):
            self._descriptor = os.open(lock, TO_ASK)

    def holder(self) -> int | None:
        """Return the pid of the other process that holds the lock, as `lock_holder` does."""
        return None if self._descriptor is None else _other_holder(self._descriptor)


def blocks(lock: Path) -> bool:
    """Return whether the file exists and libtpu could not open it, whether or not a process holds the lock."""
    if not lock.exists():
        return False
    try:
        os.close(os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666))
    except OSError:
        return True
    return False


def _other_holder(descriptor: int) -> int | None:
    """Return the pid of the process whose lock would refuse us a write lock. The kernel ignores our own locks."""
    question = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    kind, _, _, _, pid = _FLOCK.unpack(fcntl.fcntl(descriptor, fcntl.F_GETLK, question))
    return None if kind == fcntl.F_UNLCK else max(pid, NO_PID)  # -1: a lock that several processes share
