"""The zygote: a process that has imported modules, and forks a fresh process for each task within milliseconds.

A fork copies one thread only, and whatever state the others have left. So the zygote has one thread, opens no device,
and has no connection to Ray; it checks that before each fork. A task runs in a fork and leaves nothing in the zygote.

The TPUHostActor starts it, speaks to it over one socket, and is the only one that can: the socket has no name. Python
runs this file as a script. It imports only the standard library until it knows the module path of its environment.
"""

import contextlib
import errno
import faulthandler
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
import warnings
from collections.abc import Callable
from typing import Any, NoReturn

MOST_BYTES = 1 << 17
"""Limit for a message; each is a packet of its own."""
MOST_CHARACTERS = 1 << 13
"""Of a longer text only the beginning and the end travel. JSON may take twelve bytes for a character."""
HARMLESS_DEVICES = "/dev/null", "/dev/zero", "/dev/urandom", "/dev/random", "/dev/pts/", "/dev/tty", "/dev/shm/"
REAP_S = 1.0
"""The interval between two looks for orphans that have ended; the kernel gives those of the tasks to the zygote."""

Program = Callable[[], None]


# -- what a process has that no fork should inherit --------------------------------------------------------------------


def other_threads() -> list[str]:
    """Return the kernel's names of this process's threads besides the first one."""
    own, names = str(os.getpid()), []
    for thread in os.listdir("/proc/self/task"):
        if thread != own:
            with contextlib.suppress(OSError), open(f"/proc/self/task/{thread}/comm") as name:
                names.append(name.read().strip())
    return names


def open_devices() -> list[str]:
    """Return the device files that this process has open, except stateless ones such as ``/dev/null``."""
    found = set[str]()
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found.add(os.readlink(f"/proc/self/fd/{descriptor}"))
    return sorted(path for path in found if path.startswith("/dev/") and not path.startswith(HARMLESS_DEVICES))


def own_processes() -> str | None:
    """Return why the processes that this one has started make it unfit, in words; None if it has none."""
    from iris_ray.processes.subtree import descendants, read_of_process

    found = descendants(os.getpid())
    names = {read_of_process(pid, "comm").decode(errors="replace").strip() for pid in found}
    return f"it starts processes ({', '.join(sorted(names))}), and a fork is not their parent" if found else None


def settle() -> None:
    """Fork a process that ends at once. Libraries with fork handlers, such as OpenBLAS, end their threads for it."""
    with contextlib.suppress(OSError), warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python's about threads; they are looked at afterwards
        if (pid := os.fork()) == 0:
            os._exit(0)
        os.waitpid(pid, 0)


def why_unfit() -> str | None:
    """Return why this process must not be forked, in words; None if it may be."""
    if other_threads():
        settle()
    if left := other_threads():
        return f"it starts threads ({', '.join(sorted(set(left)))}), and a fork would lose them"
    if opened := open_devices():
        return f"it opens {', '.join(opened)}, which each task must open by itself"
    return None


# -- the process -------------------------------------------------------------------------------------------------------


def main() -> None:
    """Take the settings, import modules, and fork as asked until the connection ends."""
    channel = socket.socket(fileno=int(sys.argv[1]))
    os.set_inheritable(channel.fileno(), False)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # Ray's workers block SIGINT, and threads of theirs others
    faulthandler.enable(all_threads=False)  # as Ray does in its workers
    gc.disable()  # imports make few cycles, and looking for them takes a sixth of the time until the first fork
    if os.fork():  # the TPUHostActor must not be its parent: Ray ends the children of its workers before us
        os._exit(0)
    _tell(channel, pid=os.getpid())  # at once: what follows may hang, and then somebody has to end this process
    settings = json.loads(channel.recv(MOST_BYTES))
    own = [
        entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry not in ("", *settings["path"])
    ]
    sys.path[:] = [*own, *settings["path"]]  # a user may have set PYTHONPATH
    sys.argv[:] = [""]
    here = importlib.import_module("iris_ray.actors.host.zygote")  # a module that tasks can import as well
    here.run(channel, settings)()


def run(channel: socket.socket, settings: dict[str, Any]) -> Program:
    """Import modules, say so, and serve. Return the program to run, in a task's process only."""
    from iris_ray.actors.calls.ray_internals import name_process
    from iris_ray.actors.host.forked_task import run_forked  # what each task needs
    from iris_ray.actors.host.task_environment import expect_chips
    from iris_ray.actors.host.user_code import flush_output
    from iris_ray.actors.protocol.services import installed_services, load_hooks
    from iris_ray.actors.protocol.version import installed_versions
    from iris_ray.processes.subtree import take_orphans

    name_process("iris_ray::zygote")
    take_orphans()
    hooks = ((service.variables, service.in_process, service.in_task) for service in installed_services())
    load_hooks(place for places in hooks for place in places)
    _require_fit(channel, after_import=True)
    if settings["preload"]:  # JAX reads its options when it is imported, and only tasks with chips have a preload
        expect_chips(os.environ)
    for module in settings["preload"]:
        _tell(channel, importing=module)
        try:
            importlib.import_module(module)
        except (Exception, SystemExit) as error:
            _give_up(channel, cannot_import=f"{type(error).__name__}: {error}")
        _require_fit(channel, after_import=True)
    flush_output()  # else each task would print it
    gc.freeze()  # else a collection in a task would write to the memory that it shares with the others
    gc.enable()
    _tell(channel, ready=installed_versions())
    return serve(channel, run_forked)


def _require_fit(channel: socket.socket, after_import: bool = False) -> None:
    if after_import:
        settle()  # what starts threads anew after a fork shows it
    if why := (own_processes() if after_import else None) or why_unfit():
        _give_up(channel, unfit=why)


def _give_up(channel: socket.socket, **why: str) -> NoReturn:
    from iris_ray.processes.subtree import end_descendants

    _tell(channel, **why)
    end_descendants()
    os._exit(1)


def serve(channel: socket.socket, run_forked: Callable[[socket.socket], None]) -> Program:
    """Fork for each packet with a socket, until the connection ends. Return the program, in a task's process only."""
    from iris_ray.processes.subtree import end_descendants

    # A module that has SIGCHLD ignored, or that reaps all children by itself, would keep the exit codes from us.
    tasks_own = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    poll, running, forks, zygote = select.poll(), dict[int, int](), set[int](), os.getpid()
    poll.register(channel, select.POLLIN)
    while True:
        for ready, _ in poll.poll(REAP_S * 1000):
            if ready != channel.fileno():
                poll.unregister(ready)
                os.close(ready)
                del running[ready]
                continue
            data, descriptors = b"", list[int]()
            with contextlib.suppress(ConnectionResetError):  # the other end has left answers unread
                data, descriptors, _, _ = socket.recv_fds(channel, 1, 1)
            if not data:
                end_descendants()
                os._exit(0)
            try:
                if not descriptors:
                    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
                # A module's signal handler or timer may have started some. The tasks that run go on.
                if other_threads() and (why := why_unfit()):
                    os.close(descriptors[0])
                    _tell(channel, retired=why)
                    continue
                os.set_inheritable(descriptors[0], False)  # programs of the task can't speak for it
                pid = os.fork()
            except OSError as error:  # at the host's limit of processes, or at this one's of open files
                for descriptor in descriptors:
                    os.close(descriptor)
                _tell(channel, failed=error.strerror)
                continue
            if pid == 0:
                signal.signal(signal.SIGCHLD, tasks_own or signal.SIG_DFL)  # None: a handler that is not Python's
                return _in_fork(zygote, channel, [*running], descriptors[0], run_forked)
            forks.add(pid)
            os.close(descriptors[0])
            with contextlib.suppress(OSError):  # too many open files: it is reaped a moment later
                pidfd = os.pidfd_open(pid)
                running[pidfd] = pid
                poll.register(pidfd, select.POLLIN)
            _tell(channel, forked=pid)
        _reap(channel, forks)


def _in_fork(
    zygote: int,
    channel: socket.socket,
    pidfds: list[int],
    descriptor: int,
    run_forked: Callable[[socket.socket], None],
) -> Program:
    """Make a fork a process of its own, which ends with the zygote. Return what it runs."""
    from iris_ray.processes.subtree import end_with_parent

    end_with_parent(zygote)
    os.setsid()
    channel.close()
    for pidfd in pidfds:
        os.close(pidfd)
    if (numpy_random := sys.modules.get("numpy.random")) is not None:
        numpy_random.seed()  # else all tasks would draw the same numbers
    if (processes := sys.modules.get("multiprocessing.process")) is not None:
        processes.current_process().authkey = os.urandom(32)  # else tasks could talk to each other's managers
    return lambda: run_forked(socket.socket(fileno=descriptor))


def _reap(channel: socket.socket, forks: set[int]) -> None:
    """Reap each child that has ended, orphans of the tasks included. Tell the exit codes, and if orphans are left."""
    from iris_ray.processes.subtree import has_orphans, reap

    codes = reap()
    forks -= codes.keys()
    orphans = bool(codes) and has_orphans(forks)
    for pid, code in codes.items():
        _tell(channel, ended=pid, code=code, orphans=orphans)


def _tell(channel: socket.socket, **facts: Any) -> None:
    half = MOST_CHARACTERS // 2
    said = {
        name: f"{fact[:half]} … {fact[-half:]}" if isinstance(fact, str) and len(fact) > MOST_CHARACTERS else fact
        for name, fact in facts.items()
    }
    with contextlib.suppress(OSError):  # the other end is gone; the next look at the channel says so
        channel.send(json.dumps(said).encode())


if __name__ == "__main__":
    main()
