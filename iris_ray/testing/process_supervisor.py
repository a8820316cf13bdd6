"""Runs one command and owns every process that descends from it: the power switch of a simulated machine.

Run by `bare_command`, never imported: ``process_supervisor.py LIFELINE_FD DRIVER_PID COMMAND [ARG ...]``. It imports
little, because every simulated host starts one.

- The supervisor takes orphans: a process that outlives its parent, or calls ``setsid``, becomes a child of the
  supervisor instead of escaping, and the supervisor reaps it.
- The supervisor ends when the command ends, when its standard input is closed or written to, on SIGTERM, or when the
  driver process is gone (a pidfd reports that even if a forked child of the driver still holds the pipe). Before it
  ends, it sends SIGKILL to all descendants and waits until they are gone. Exit code: 0, or 3 if some are still there
  after 10 s. It removes the containers of tasks as well, which a real machine would take with it.
- If the command is killed (SIGKILL), the others live on for 30 s, as on a real machine that loses one process.
- The supervisor holds ``LIFELINE_FD`` open for as long as it lives, and passes it to no child: the reader at the other
  end of that pipe learns when all supervisors are gone.
"""

import contextlib
import math
import os
import select
import signal
import sys
import time

from iris_ray.processes.subtree import end_descendants, read_of_process, reap, start_child, take_orphans

_KILL_TIMEOUT_S = 10.0
_WITHOUT_COMMAND_S = 30.0
LEFTOVERS = 3


def remove_containers(host: str) -> None:
    """Remove the containers that the tasks of a host have recorded in its directory (``tasks/<pid>.owned/docker``)."""
    records = os.path.join(host, "tasks")
    for name in os.listdir(records) if os.path.isdir(records) else ():
        if name.endswith(".owned"):
            import json  # rarely needed

            path = os.path.join(records, name, "docker")
            with contextlib.suppress(OSError, ValueError, KeyError), open(path) as file:
                record = json.load(file)
                for command in (["kill"], ["rm", "--force", "--volumes"]):
                    run([record["engine"], *command, record["name"]])


def run(command: list[str]) -> None:
    """Run a command that prints nothing, for 10 s at most."""
    null = (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0), (os.POSIX_SPAWN_DUP2, 1, 2)
    pid = os.posix_spawn(command[0], command, os.environ, file_actions=null)
    deadline = time.monotonic() + _KILL_TIMEOUT_S
    while os.waitpid(pid, os.WNOHANG)[0] == 0:
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def is_agent(pid: int) -> bool:
    """Return whether this is Ray's runtime_env agent, or our `lazy_agent.py`."""
    arguments = read_of_process(pid, "cmdline").split(b"\0")
    return arguments[0] == b"ray::RuntimeEnvAgent" or any(one.endswith(b"/lazy_agent.py") for one in arguments)


def settle() -> None:
    """Give up the supervisor's stdin and signals in the child that becomes the command."""
    os.dup2(os.open(os.devnull, os.O_RDWR), 0)
    signal.set_wakeup_fd(-1)


class Signals:
    """Takes SIGTERM and SIGCHLD, and wakes a poll through a pipe: a signal just before poll() would be missed."""

    def __init__(self) -> None:
        self.terminated = False
        self.woken, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake)
        signal.signal(signal.SIGTERM, self._on_sigterm)
        signal.signal(signal.SIGCHLD, lambda _signum, _frame: None)
        # Ray blocks SIGINT in its own processes, so that Ctrl-C in a terminal reaches the driver only; children
        # inherit it.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})

    def _on_sigterm(self, _signum: int, _frame: object) -> None:
        self.terminated = True


def watch_driver(poll: select.poll, driver: int) -> bool:
    """Have the poll notice the end of the driver. Return False if it was gone before we began."""
    try:
        poll.register(os.pidfd_open(driver), select.POLLIN)
    except ProcessLookupError:
        return False
    except (OSError, AttributeError):
        pass  # this kernel has no pidfd: the pipe alone must do
    return True


def wait_for_the_end(poll: select.poll, signals: Signals, child: int, program: str) -> None:
    """Return when the command has ended, or the supervisor is asked to end; 30 s later if the command was killed."""
    end = math.inf
    while not signals.terminated:
        ready = {fd for fd, _ in poll.poll(None if end == math.inf else max(0.0, end - time.monotonic()) * 1000)}
        if ready != {signals.woken}:
            return
        with contextlib.suppress(BlockingIOError):
            os.read(signals.woken, 4096)
        ended = reap()
        if child in ended:
            os.write(2, f"{os.path.basename(program)} ended with exit code {ended[child]}\n".encode())
            if ended[child] != -signal.SIGKILL:
                return
            end = time.monotonic() + _WITHOUT_COMMAND_S


def main(argv: list[str]) -> int:
    lifeline, driver, command = int(argv[0]), int(argv[1]), argv[2:]
    os.set_inheritable(lifeline, False)
    take_orphans()
    poll = select.poll()
    poll.register(0, select.POLLIN | select.POLLHUP)
    if not watch_driver(poll, driver):
        return 0
    signals = Signals()
    try:
        child = start_child(command, settle, os.environ)
    except OSError as error:
        os.write(2, f"cannot run {command[0]}: {error}\n".encode())
        return 0
    poll.register(signals.woken, select.POLLIN)
    wait_for_the_end(poll, signals, child, command[0])
    all_gone = end_descendants(_KILL_TIMEOUT_S, first=is_agent)  # or it would report the raylet's end to the driver
    remove_containers(os.environ.get("IRIS_RAY_HOST_DIR", ""))
    return 0 if all_gone else LEFTOVERS


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
