"""How a process that is not our child ended, as the kernel tells it through a pidfd."""

import fcntl
import os
import signal
import struct

# From linux/pidfd.h: struct pidfd_info, version 0 (64 bytes): u64 mask, u64 cgroupid, 11 × u32 ids, i32 exit_code.
_INFO = struct.Struct("=QQ11Ii")
_WANT_EXIT = 1 << 3
_PIDFD_GET_INFO = (3 << 30) | (_INFO.size << 16) | (0xFF << 8) | 11


def exit_code_of(pidfd: int) -> int | None:
    """Return a process's exit code, or the negative number of the signal that killed it.

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
    return os.waitstatus_to_exitcode(status)


def in_words(code: int) -> str:
    """Return an exit code or a signal as the end of a sentence."""
    if code >= 0:
        return f"exited with code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


def as_shells_say(code: int | None) -> int | None:
    """Return an exit code; of a process that a signal killed, 128 and the signal's number, as shells and Kubernetes."""
    return 128 - code if code is not None and code < 0 else code
