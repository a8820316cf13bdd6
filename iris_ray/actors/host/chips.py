"""A host's TPU chips: who holds them, libtpu's lock, and when they are free."""

import contextlib
import errno
import fcntl
import os
import pwd
import stat
import struct
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from iris_ray.settings import HOST_DIR

if TYPE_CHECKING:  # `iris-ray doctor` sends this module to hosts that may have no iris_ray
    from iris_ray.actors.host.ledger import ProcessLedger

# -- libtpu's lock -----------------------------------------------------------------------------------------------------
# libtpu holds a POSIX write lock on a file while a process uses the chips. The kernel drops the lock when the process
# ends, so a leftover lock file means nothing. Closing *any* descriptor of a file drops all locks that the same process
# has on it. So a process that may use the chips itself must open the file by `LockProbe` only, and never call
# `lock_holder` or `find_holders`.

# struct flock: short l_type, short l_whence, off_t l_start, off_t l_len, pid_t l_pid.
_FLOCK = "hhqqi4x"

TO_ASK = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
"""Flags that open the file without blocking. Another user may have put a FIFO there, which would wait for a writer."""

NO_PID = 0
"""The kernel's pid for a process outside our container."""


def lock_holder(lock: Path) -> int | None:
    """Return the pid of the process that holds the lock; None if no process does, or the file can't be read."""
    try:
        descriptor = os.open(lock, TO_ASK)
    except OSError:
        return None
    try:
        return _other_holder(descriptor)
    finally:
        os.close(descriptor)


class LockProbe:
    """Tells a process that is about to use the chips whether another process holds libtpu's lock.

    The file stays open as long as the process lives: closing it would drop the lock that libtpu takes later.
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
    question = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    kind, _, _, _, pid = struct.unpack(_FLOCK, fcntl.fcntl(descriptor, fcntl.F_GETLK, question))
    return None if kind == fcntl.F_UNLCK else max(pid, NO_PID)  # -1: several processes share the lock


# -- holders: processes with libtpu's lock, or with a chip's device file open ------------------------------------------
# Only root sees which files other users' processes have open, so `Holders` counts the processes that it could not see.
# A process outside our container shows only through its lock, without a pid.


@dataclass(frozen=True, slots=True)
class Devices:
    """The files that a process locks or opens while it uses this host's chips: libtpu's lock, and the device files."""

    lock: Path
    chips: tuple[Path, ...]


def lock_file(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the file that libtpu locks on this host. Simulated hosts, which share one /tmp, have one each."""
    simulated = _simulated(environ)
    return (simulated / "lock" if simulated else Path("/tmp")) / "libtpu_lockfile"


def host_devices(environ: Mapping[str, str] = os.environ) -> Devices:
    """Return the lock file and the device files of this host's chips: ``accel0`` …, or ``vfio/0`` … on newer types."""
    dev = (_simulated(environ) or Path("/")) / "dev"
    return Devices(lock_file(environ), tuple(sorted([*dev.glob("accel[0-9]*"), *dev.glob("vfio/[0-9]*")])))


def _simulated(environ: Mapping[str, str]) -> Path | None:
    """Return the directory of a simulated host; None on a real host, which has no devices there."""
    directory = HOST_DIR.read(environ)
    return directory if directory and (directory / "dev").is_dir() else None


@dataclass(frozen=True, slots=True)
class Holder:
    """A process that holds the lock or a chip.

    Attributes:
        pid: `NO_PID` if it is outside our container.
        name: its name in the kernel; empty if unknown.
        started: seconds since the epoch, if known.
        ours: whether it provably belongs to a task of iris_ray on this host.
    """

    pid: int
    name: str = ""
    started: float | None = None
    ours: bool = False

    def __str__(self) -> str:
        if self.pid == NO_PID:
            return "a process that can't be seen from here"
        return f"pid {self.pid} ({self.name})" if self.name else f"pid {self.pid}"


@dataclass(frozen=True, slots=True)
class Holders:
    """The processes that hold a host's lock and chips.

    Attributes:
        seen: the holders that we found.
        hidden: how many processes of other users we could not check; each of them may hold a chip.
    """

    seen: tuple[Holder, ...]
    hidden: int = 0


def find_holders(devices: Devices, ledger: "ProcessLedger | None" = None) -> Holders:
    """Return the processes that hold the lock or a chip now. Without a ledger none counts as ours."""
    lock_pid = lock_holder(devices.lock)
    chip_pids, hidden = _pids_with_open_chips(devices.chips) if devices.chips else (set[int](), 0)
    pids = sorted(chip_pids | {lock_pid} if lock_pid is not None else chip_pids)
    return Holders(tuple(describe(pids, ledger)), hidden)


def describe(pids: Collection[int], ledger: "ProcessLedger | None") -> list[Holder]:
    """Return the processes that hold the lock or a chip, with their names and start times where these are visible."""
    ours = ledger.owned(pids) if pids and ledger is not None else set[int]()
    return [_described(pid, pid in ours) for pid in pids]


def _described(pid: int, ours: bool) -> Holder:
    if pid == NO_PID:
        return Holder(pid)
    try:
        process = psutil.Process(pid)
        name = process.name().encode(errors="surrogateescape").decode(errors="replace")  # cut inside a character
        return Holder(pid, name, process.create_time(), ours)
    except psutil.Error:
        return Holder(pid)  # it has just ended


def _pids_with_open_chips(chips: tuple[Path, ...]) -> tuple[set[int], int]:
    """Return the pids of processes that have a chip open, and how many processes we could not check."""
    wanted = {_identity(os.stat(chip)) for chip in chips if chip.exists()}
    names = {chip.name for chip in chips}
    found, hidden = set[int](), 0
    for pid in psutil.pids():
        try:
            if any(_identity(file) in wanted for file in _open_files(pid, names)):
                found.add(pid)
        except PermissionError:
            hidden += _has_command(pid)
        except OSError:
            continue  # it has ended
    return found, hidden


def _open_files(pid: int, names: set[str]) -> Iterator[os.stat_result]:
    """Yield a process's open files with these names, in any directory: a container may mount them elsewhere."""
    for descriptor in os.listdir(f"/proc/{pid}/fd"):
        link = f"/proc/{pid}/fd/{descriptor}"
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            if os.path.basename(os.readlink(link)).removesuffix(" (deleted)") in names:
                yield os.stat(link)


def _identity(file: os.stat_result) -> tuple[int, ...]:
    """Return a key that all device files of one chip share, in any container. A simulated chip is a plain file."""
    return (file.st_rdev,) if stat.S_ISCHR(file.st_mode) else (file.st_dev, file.st_ino)


def _has_command(pid: int) -> bool:
    """Return whether a process has a command line. Kernel threads have none, and use no chips."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/cmdline", "rb") as command:
        return command.read(1) != b""
    return False


# -- release: wait until the chips are free. No process is ended here --------------------------------------------------

RELEASE_S = 2.0
"""The time for the kernel to take a chip back from a process that has ended."""
POLL_S = 0.05
MOST_LISTED = 10
"""The limit for holders that a message names: a holder may have forked thousands of times."""


@dataclass(frozen=True, slots=True)
class NotFree:
    """The reason why a host's chips can't be used.

    Attributes:
        why: the reason, as part of a sentence about the host.
        ours: whether only tasks of iris_ray hold the chips. Then the host is not blamed.
    """

    why: str
    ours: bool = False


def wait_until_free(devices: Devices, ledger: "ProcessLedger", timeout_s: float = RELEASE_S) -> NotFree | None:
    """Wait until no process holds the chips, for ``timeout_s`` seconds at most. Return None, or why they are not free.

    Remove a lock file that no process holds and that libtpu can't open. Other lock files stay.
    """
    deadline = time.monotonic() + timeout_s
    while (holders := find_holders(devices, ledger)).seen:
        if time.monotonic() > deadline:
            return in_use(holders.seen, holders.hidden)
        time.sleep(POLL_S)
    return remove_if_it_blocks(devices.lock, ledger)


def in_use(holders: Sequence[Holder], hidden: int = 0) -> NotFree:
    """Return why the chips can't be used, and what to do.

    Args:
        holders: the processes that hold them.
        hidden: how many processes could not be checked. Alone they are no reason, since system services are among them.
    """
    unseen = f"; {hidden} processes of other users could not be checked" if hidden else ""
    others = [holder for holder in holders if not holder.ours]
    if not others:
        why = f"its chips are held by {_listed(holders)}, which belongs to another task on it{unseen}"
        return NotFree(why, ours=True)
    return NotFree(
        f"its chips are held by {_listed(others)}, which does not belong to iris_ray;"
        f" end it if it is no longer needed{unseen}"
    )


def _listed(holders: Sequence[Holder]) -> str:
    more = f" and {len(holders) - MOST_LISTED:,} more" if len(holders) > MOST_LISTED else ""
    return ", ".join(str(holder) for holder in holders[:MOST_LISTED]) + more


def remove_if_it_blocks(lock: Path, ledger: "ProcessLedger") -> NotFree | None:
    """Remove a lock file that no process holds and that libtpu can't open, such as another user's of mode 0644.

    Returns:
        Why it can't be removed; None if libtpu can use the lock now.
    """
    if not blocks(lock):
        return None
    # A read lock keeps all processes from locking the file while we remove it. Without it, we could remove a file that
    # a process holds, and a second process could use the chips beside the first.
    try:
        descriptor = os.open(lock, TO_ASK)
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            os.unlink(lock)
        finally:
            os.close(descriptor)
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES) and (pid := lock_holder(lock)) is not None:
            return in_use(describe([pid], ledger))
        return NotFree(
            f"libtpu can't open {lock}, which belongs to {owner_of(lock)}, and iris_ray can't remove it"
            f" ({error.strerror}): if no process uses the chips, sudo rm {lock}"
        )
    return None


def owner_of(path: Path) -> str:
    try:
        return pwd.getpwuid(path.stat().st_uid).pw_name
    except (OSError, KeyError):
        return "another user"
