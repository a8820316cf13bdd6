"""Who holds this host's TPU chips, and whether they are free.

libtpu locks a file (a POSIX write lock) and opens the chips' device files. The kernel takes both back when the process
ends, so a lock file that is left over means nothing, and a chip is free when no process has it in its hands.

Two things can't be seen from everywhere. Which files the processes of other users have open, only root sees: `Holders`
counts those that were not looked into. Of processes outside our container only the lock shows, without a pid.

Closing *any* descriptor of a file drops all locks that the same process has on it. Therefore nothing here is for a
process that may use the chips itself, except `LockProbe`.
"""

import contextlib
import errno
import fcntl
import os
import pwd
import stat
import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from iris_ray.actors.host.process_ledger import ProcessLedger

RELEASE_S = 2.0
"""How long the kernel may take to get a chip back from a process that has ended."""
POLL_S = 0.05

# struct flock: short l_type, short l_whence, off_t l_start, off_t l_len, pid_t l_pid.
_FLOCK = struct.Struct("hhqqi4x")
_UNSEEN = 0
"""The kernel's word for a process that has no number in our container."""


@dataclass(frozen=True, slots=True)
class Devices:
    """What a process that uses this host's chips has in its hands.

    Attributes:
        lock: the file that libtpu locks.
        chips: the chips' device files.
    """

    lock: Path
    chips: tuple[Path, ...]


def libtpu_lock(environ: Mapping[str, str] = os.environ) -> Path:
    """The file that libtpu locks on this host. Simulated hosts, which share one /tmp, have one each."""
    simulated = _simulated(environ)
    return (simulated / "lock" if simulated else Path("/tmp")) / "libtpu_lockfile"


def host_devices(environ: Mapping[str, str] = os.environ) -> Devices:
    """The lock file and the device files of this host's chips: ``accel0`` …, or ``vfio/0`` … on newer types."""
    dev = (_simulated(environ) or Path("/")) / "dev"
    return Devices(libtpu_lock(environ), tuple(sorted([*dev.glob("accel[0-9]*"), *dev.glob("vfio/[0-9]*")])))


def _simulated(environ: Mapping[str, str]) -> Path | None:
    directory = environ.get("IRIS_RAY_HOST_DIR")  # on a real host it has no devices in it
    return Path(directory) if directory and Path(directory, "dev").is_dir() else None


# -- who holds them ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Holder:
    """A process that holds the lock or a chip.

    Attributes:
        pid: 0 if it has none in our container.
        name: as the kernel has it; empty if that can't be seen.
        started: seconds since the epoch, or None.
        ours: it is provably of a task that had this host to itself.
    """

    pid: int
    name: str = ""
    started: float | None = None
    ours: bool = False

    def __str__(self) -> str:
        if self.pid == _UNSEEN:
            return "a process that can't be seen from here"
        return f"pid {self.pid} ({self.name})" if self.name else f"pid {self.pid}"


@dataclass(frozen=True, slots=True)
class Holders:
    """Who holds a host's lock and chips.

    Attributes:
        seen: whoever does.
        hidden: processes of other users that were not looked into; one of them may hold a chip.
    """

    seen: tuple[Holder, ...]
    hidden: int = 0


def find_holders(devices: Devices, ledger: ProcessLedger | None = None) -> Holders:
    """Who holds the lock or a chip now. Not for a process that may hold them itself.

    Args:
        devices: the host's.
        ledger: tells which processes are ours.
    """
    locker = lock_holder(devices.lock)
    openers, hidden = _openers(devices.chips) if devices.chips else (set[int](), 0)
    pids = sorted(openers | {locker} if locker is not None else openers)
    return Holders(tuple(describe(pid, ledger) for pid in pids), hidden)


def lock_holder(lock: Path) -> int | None:
    """The pid of the process that has libtpu's lock, 0 if it has none in our container; None if nobody holds it, or if
    the file can't be read. Not for a process that may hold it itself."""
    try:
        descriptor = os.open(lock, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        return _asked(descriptor)
    finally:
        os.close(descriptor)


class LockProbe:
    """Tells a process that is about to use the chips whether another one does.

    The file stays open for the rest of the process's life: closing it would drop the lock that libtpu takes later.
    """

    def __init__(self, lock: Path) -> None:
        self._descriptor: int | None = None
        with contextlib.suppress(OSError):
            self._descriptor = os.open(lock, os.O_RDONLY | os.O_CLOEXEC)

    def holder(self) -> int | None:
        """The pid of the other process that has the lock, as `lock_holder` tells it."""
        return None if self._descriptor is None else _asked(self._descriptor)


def _asked(descriptor: int) -> int | None:
    """Whose lock stands against a write lock on this file; a process's own never does."""
    question = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    kind, _, _, _, pid = _FLOCK.unpack(fcntl.fcntl(descriptor, fcntl.F_GETLK, question))
    return None if kind == fcntl.F_UNLCK else max(pid, _UNSEEN)  # -1: a lock of several processes


def describe(pid: int, ledger: ProcessLedger | None) -> Holder:
    """Who a process is, as far as that can be seen."""
    if pid == _UNSEEN:
        return Holder(pid)
    try:
        process = psutil.Process(pid)
        return Holder(pid, process.name(), process.create_time(), ledger is not None and ledger.owns(process))
    except psutil.Error:
        return Holder(pid)  # it has just ended


def _openers(chips: tuple[Path, ...]) -> tuple[set[int], int]:
    """The pids of processes that have a chip open, and how many processes could not be looked into."""
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
    """The files of these names that a process has open. Their directories may be called otherwise in its container."""
    for descriptor in os.listdir(f"/proc/{pid}/fd"):
        link = f"/proc/{pid}/fd/{descriptor}"
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            if os.path.basename(os.readlink(link)).removesuffix(" (deleted)") in names:
                yield os.stat(link)


def _identity(file: os.stat_result) -> tuple[int, ...]:
    """The same for every device file of one chip, wherever it is; a simulated chip is a plain file."""
    return (file.st_rdev,) if stat.S_ISCHR(file.st_mode) else (file.st_dev, file.st_ino)


def _has_command(pid: int) -> bool:
    """Threads of the kernel have none; they use no chips."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/cmdline", "rb") as command:
        return command.read(1) != b""
    return False


# -- making them free --------------------------------------------------------------------------------------------------


def wait_until_free(devices: Devices, ledger: ProcessLedger, timeout_s: float = RELEASE_S) -> str | None:
    """Wait for the kernel to get the chips back from processes that have ended; ends nobody itself.

    A left-over lock file stays where it is, unless libtpu could not open it.

    Returns:
        None if the chips are free; why they are not, as part of a sentence, if somebody holds them all that time.
    """
    deadline = time.monotonic() + timeout_s
    while (holders := find_holders(devices, ledger)).seen:
        if time.monotonic() > deadline:
            return in_the_way(holders.seen, holders.hidden)
        time.sleep(POLL_S)
    return remove_if_it_blocks(devices.lock, ledger)


def in_the_way(holders: Sequence[Holder], hidden: int = 0) -> str:
    """Why these chips can't be used, and what to do, as part of a sentence about their host.

    Args:
        holders: who has them.
        hidden: how many processes could not be looked into; they alone are no reason: system services are always among
            them.
    """
    unseen = f"; {hidden} processes of other users could not be looked into" if hidden else ""
    others = [holder for holder in holders if not holder.ours]
    if not others:
        return f"its chips are held by {_listed(holders)}, of another task on it{unseen}"
    return f"its chips are held by {_listed(others)}, which is not of iris_ray; end it if nobody needs it{unseen}"


def _listed(holders: Sequence[Holder]) -> str:
    return ", ".join(str(holder) for holder in holders)


def remove_if_it_blocks(lock: Path, ledger: ProcessLedger) -> str | None:
    """Remove a lock file that nobody holds and that libtpu can't open, such as another user's of mode 0644.

    Returns:
        Why it can't be removed; None if nothing is in the way.
    """
    if not blocks(lock):
        return None
    # A read lock keeps everybody from taking the file while it goes: what is held must not be removed, or a second
    # process could use the chips beside the first.
    try:
        descriptor = os.open(lock, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            os.unlink(lock)
        finally:
            os.close(descriptor)
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES) and (pid := lock_holder(lock)) is not None:
            return in_the_way([describe(pid, ledger)])
        return (
            f"libtpu can't open {lock}, which belongs to {_owner(lock)}, nor can we remove it ({error.strerror}):"
            f" if nobody uses the chips, sudo rm {lock}"
        )
    return None


def blocks(lock: Path) -> bool:
    """Whether the file is there, and libtpu could not open it in the way that it does, whoever holds it."""
    if not lock.exists():
        return False
    try:
        os.close(os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666))
    except OSError:
        return True
    return False


def _owner(path: Path) -> str:
    try:
        return pwd.getpwuid(path.stat().st_uid).pw_name
    except (OSError, KeyError):
        return "another user"
