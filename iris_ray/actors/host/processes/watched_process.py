"""A process that is not our child, held by a pidfd: when it ends, how, and signals that can't hit another process."""

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable

from iris_ray.actors.host.exits.status import exit_code_of
from iris_ray.actors.host.processes.tree import runs_since


class WatchedProcess:
    """One running process of this host.

    Args:
        pid, started: the process and its start in clock ticks since boot.

    Raises:
        RuntimeError: the process has ended; another process may have its pid.
    """

    def __init__(self, pid: int, started: int) -> None:
        self._pidfd = _open_pidfd(pid, started)
        self._exited = asyncio.Event()

    def watch(self, on_exit: Callable[[], None]) -> None:
        """Have a function called on the running event loop when the process ends, before `ended` turns true."""

        def ended() -> None:
            asyncio.get_running_loop().remove_reader(self._pidfd)
            on_exit()
            self._exited.set()

        asyncio.get_running_loop().add_reader(self._pidfd, ended)

    @property
    def ended(self) -> bool:
        return self._exited.is_set()

    async def wait(self) -> None:
        """Wait for the end of the process."""
        await self._exited.wait()

    async def wait_at_most(self, seconds: float) -> None:
        """Wait for the end of the process, but no longer than this."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._exited.wait()

    def signal(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        with contextlib.suppress(ProcessLookupError):
            if not self.ended:
                signal.pidfd_send_signal(self._pidfd, number)

    def exit_code(self) -> int | None:
        """Return the process's exit code, or the negative number of a signal; None if the kernel can't tell (yet)."""
        return exit_code_of(self._pidfd)

    def close(self) -> None:
        """Close the file descriptor. Call this once, when the process has ended or no caller watches it any more."""
        os.close(self._pidfd)


def _open_pidfd(pid: int, started: int) -> int:
    with contextlib.suppress(ProcessLookupError):
        pidfd = os.pidfd_open(pid)
        if runs_since(pid, started):
            return pidfd
        os.close(pidfd)
    raise RuntimeError(f"the process that waited for a task, pid {pid}, has ended before it got one")
