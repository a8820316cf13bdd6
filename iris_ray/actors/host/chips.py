"""A host's TPU chips, and the processes that hold them: those with libtpu's lock, or with a chip's device file open.

Two things can't be seen from everywhere. Only root sees which files other users' processes have open: `Holders` counts
the processes that could not be checked. A process outside our container shows only through its lock, without a pid.

`find_holders` is not for a process that may use the chips itself: see `libtpu_lock`.
"""

import contextlib
import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from iris_ray.actors.host.libtpu_lock import NO_PID, lock_holder
from iris_ray.actors.host.processes.ledger import ProcessLedger
from iris_ray.settings import HOST_DIR


@dataclass(frozen=True, slots=True)
class Devices:
    """The files that a process has open or locked while it uses this host's chips.

    Attributes:
        lock: the file that libtpu locks.
        chips: the chips' device files.
    """

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
        pid: the process; 0 if it has no pid in our container.
        name: the process's name in the kernel; empty if that can't be seen.
        started: seconds since the epoch, or None.
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
        seen: those that were found.
        hidden: how many processes of other users could not be checked; each of them may hold a chip.
    """

    seen: tuple[Holder, ...]
    hidden: int = 0


def find_holders(devices: Devices, ledger: ProcessLedger | None = None) -> Holders:
    """Return the processes that hold the lock or a chip now.

    Args:
        devices: the host's chips.
        ledger: tells which processes belong to tasks; without it, none count as ours.
    """
    lock_pid = lock_holder(devices.lock)
    chip_pids, hidden = _pids_with_open_chips(devices.chips) if devices.chips else (set[int](), 0)
    pids = sorted(chip_pids | {lock_pid} if lock_pid is not None else chip_pids)
    return Holders(tuple(describe(pid, ledger) for pid in pids), hidden)


def describe(pid: int, ledger: ProcessLedger | None) -> Holder:
    """Return what can be seen of a process that holds the lock or a chip."""
    if pid == NO_PID:
        return Holder(pid)
    try:
        process = psutil.Process(pid)
        return Holder(pid, process.name(), process.create_time(), ledger is not None and ledger.owns(process))
    except psutil.Error:
        return Holder(pid)  # it has just ended


def _pids_with_open_chips(chips: tuple[Path, ...]) -> tuple[set[int], int]:
    """Return the pids of processes that have a chip open, and how many processes could not be checked."""
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
    """Yield a process's open files with these names. In its container their directories may have other names."""
    for descriptor in os.listdir(f"/proc/{pid}/fd"):
        link = f"/proc/{pid}/fd/{descriptor}"
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            if os.path.basename(os.readlink(link)).removesuffix(" (deleted)") in names:
                yield os.stat(link)


def _identity(file: os.stat_result) -> tuple[int, ...]:
    """Return what all device files of one chip share, in any container; a simulated chip is a plain file."""
    return (file.st_rdev,) if stat.S_ISCHR(file.st_mode) else (file.st_dev, file.st_ino)


def _has_command(pid: int) -> bool:
    """Return whether a process has a command line. Threads of the kernel have none, and use no chips."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/cmdline", "rb") as command:
        return command.read(1) != b""
    return False
