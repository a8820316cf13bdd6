"""How a process ended that is not our child, as the kernel tells it through a pidfd."""

import fcntl
import os
import signal
import struct

# From linux/pidfd.h: struct pidfd_info, version 0 (64 bytes): u64 mask, u64 cgroupid, 11 × u32 ids, i32 exit_code.
_INFO = struct.Struct("=QQ11Ii")
_WANT_EXIT = 1 << 3
_PIDFD_GET_INFO = (3 << 30) | (_INFO.size << 16) | (0xFF << 8) | 11

KILLED = "was killed by SIGKILL"


def how_it_ended(pidfd: int) -> str | None:
    """Return how a process ended, as the end of a sentence: its exit code or the signal that killed it.

    Returns None if the process still runs or its parent has not reaped it, and before Linux 6.15, which can't tell.
    """
    buffer = bytearray(_INFO.pack(_WANT_EXIT, *[0] * 13))
    try:
        fcntl.ioctl(pidfd, _PIDFD_GET_INFO, buffer)
    except OSError:
        return None
    mask, *_, status = _INFO.unpack(buffer)
    if not mask & _WANT_EXIT:
        return None
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        return f"exited with code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"
