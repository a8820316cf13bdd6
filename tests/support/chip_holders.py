"""Processes that hold a host's chips: one with the real libtpu, and one that locks as libtpu does.

As a script, ``chip_holders.py DIRECTORY [LIBRARY]`` takes the lock in that directory, says "holds" and stays; or says
what is in the way and ends. libtpu knows only /tmp/libtpu_lockfile: so the directory is mounted on /tmp, in a mount
namespace of the script's own, and no other process's /tmp changes.
"""

import ctypes
import fcntl
import importlib.util
import os
import subprocess
import sys
import time
from pathlib import Path

NO_NAMESPACE = 77

_CLONE_NEWNS, _CLONE_NEWUSER, _MS_BIND = 0x20000, 0x10000000, 4096
# pjrt_c_api.h: where these functions are in PJRT_Api, in units of a pointer.
_ERROR_MESSAGE, _PLUGIN_INITIALIZE = 6, 8


def libtpu_library() -> Path | None:
    """The real libtpu.so, if it is installed."""
    spec = importlib.util.find_spec("libtpu")
    return Path(spec.submodule_search_locations[0], "libtpu.so") if spec and spec.submodule_search_locations else None


class ChipHolder:
    """Asks for the lock of a simulated host, in a process of its own.

    Args:
        lock_directory: where the host's lock file is.
        real: with the real libtpu. The test is skipped where that can't be.
        launcher: a command to start it with.
        environ: variables for it.

    Attributes:
        said: "holds", or why it did not get the lock.
    """

    def __init__(self, lock_directory: Path, *, real: bool, launcher: tuple[str, ...] = (), **environ: str) -> None:
        import pytest  # the script has no need of it

        library = libtpu_library() if real else None
        if real and library is None:
            pytest.skip("libtpu is not installed: pip install libtpu")
        command = [*launcher, sys.executable, __file__, str(lock_directory), *([str(library)] if library else [])]
        # Otherwise it looks for Google's metadata server, for a minute.
        host = {"TPU_SKIP_MDS_QUERY": "1", "TPU_ACCELERATOR_TYPE": "v4-8", "TPU_WORKER_HOSTNAMES": "localhost"}
        self._process = subprocess.Popen(
            command,
            env={**os.environ, **host, "TPU_WORKER_ID": "0", **environ},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert self._process.stdout is not None
        self.pid, self.said = 0, ""
        for line in self._process.stdout:
            if line.startswith("lock: "):
                pid, self.said = line.removeprefix("lock: ").strip().split(" ", 1)
                self.pid = int(pid)
                break
        else:
            if self._process.wait(10) == NO_NAMESPACE:
                pytest.skip("libtpu locks a file in /tmp; this kernel does not allow the mount namespace that hides it")
            raise AssertionError(f"{command} ended with code {self._process.returncode}")

    def end(self) -> None:
        """Kill it, and its launcher, and wait until they are gone."""
        import psutil

        for child in psutil.Process().children(recursive=True):
            if child.pid == self.pid:
                child.kill()
        self._process.kill()
        self._process.wait(10)
        if self._process.stdout is not None:
            self._process.stdout.close()


def _lock(file: Path) -> str | None:
    """Lock the file as libtpu does; why not, or None."""
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o666)
    os.fchmod(descriptor, 0o666)
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return str(error)
    return None


def _mount_on_tmp(directory: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    uid, gid = os.getuid(), os.getgid()
    if libc.unshare(_CLONE_NEWNS | _CLONE_NEWUSER):
        sys.exit(NO_NAMESPACE)
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
    Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")
    if libc.mount(directory.encode(), b"/tmp", None, _MS_BIND, None):
        sys.exit(NO_NAMESPACE)


def _initialize(library: int) -> str | None:
    """Start the libtpu that this descriptor is open on; its error, or None."""
    loaded = ctypes.CDLL(f"/proc/self/fd/{library}")
    loaded.GetPjrtApi.restype = ctypes.POINTER(ctypes.c_void_p)
    api = loaded.GetPjrtApi()
    function = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)
    arguments = (ctypes.c_void_p * 2)(16, None)  # their size, and no extension
    error = function(api[_PLUGIN_INITIALIZE])(arguments)
    if not error:
        return None
    message = (ctypes.c_void_p * 5)(40, None, error, None, None)  # … the error; out: its text, and how long that is
    function(api[_ERROR_MESSAGE])(message)
    return ctypes.string_at(message[3] or 0, message[4] or 0).decode().splitlines()[0]


def _main(directory: str, library: str | None = None) -> None:
    if library is None:
        problem = _lock(Path(directory, "libtpu_lockfile"))
    else:
        open_library = os.open(library, os.O_RDONLY)  # it may be in what is /tmp now
        os.chdir("/")  # libtpu wants to look around in the directory that it is started from
        _mount_on_tmp(directory)
        problem = _initialize(open_library)
    print(f"lock: {os.getpid()} {problem or 'holds'}", flush=True)
    if problem is None:
        time.sleep(300)


if __name__ == "__main__":
    _main(*sys.argv[1:])
