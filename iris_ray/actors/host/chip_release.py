"""Waits until a host's chips are free, and says in words why they are not. Ends no process."""

import errno
import fcntl
import os
import pwd
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from iris_ray.actors.host.chips import Devices, Holder, describe, find_holders
from iris_ray.actors.host.libtpu_lock import TO_ASK, blocks, lock_holder
from iris_ray.actors.host.processes.ledger import ProcessLedger

RELEASE_S = 2.0
"""How long the kernel may take to get a chip back from a process that has ended."""
POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class NotFree:
    """Why a host's chips can't be used.

    Attributes:
        why: as part of a sentence about the host.
        ours: whether only tasks of iris_ray hold the chips. The host is not blamed for that.
    """

    why: str
    ours: bool = False


def wait_until_free(devices: Devices, ledger: ProcessLedger, timeout_s: float = RELEASE_S) -> NotFree | None:
    """Wait until no process holds the chips, for ``timeout_s`` seconds at most.

    Removes a lock file that no process holds and that libtpu can't open. Other lock files stay.

    Returns:
        None if the chips are free; otherwise why they are not.
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
        hidden: how many processes could not be checked. Alone they are no reason: system services are among them.
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
    return ", ".join(str(holder) for holder in holders)


def remove_if_it_blocks(lock: Path, ledger: ProcessLedger) -> NotFree | None:
    """Remove a lock file that no process holds and that libtpu can't open, such as another user's of mode 0644.

    Returns:
        Why it can't be removed; None if libtpu can use the lock now.
    """
    if not blocks(lock):
        return None
    # A read lock keeps all processes from taking the file while it goes. Without it, a held file could be removed, and
    # a second process could use the chips beside the first.
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
            return in_use([describe(pid, ledger)])
        return NotFree(
            f"libtpu can't open {lock}, which belongs to {_owner(lock)}, and iris_ray can't remove it"
            f" ({error.strerror}): if no process uses the chips, sudo rm {lock}"
        )
    return None


def _owner(path: Path) -> str:
    try:
        return pwd.getpwuid(path.stat().st_uid).pw_name
    except (OSError, KeyError):
        return "another user"
