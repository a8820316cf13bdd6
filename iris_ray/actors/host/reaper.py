"""The reaper: a process outside Ray that ends the tasks of a host once their TPUHostActor is gone.

Ray ends that actor with its driver, its pool or its raylet. Daemons that a task has started would live on and might
hold the chips.
"""

import contextlib
import os
import select
import subprocess
import sys
import time
from pathlib import Path

from iris_ray.actors.host.directories import LocalDirectories
from iris_ray.actors.host.ledger import ProcessLedger
from iris_ray.processes.identity import ProcessIdentity

AGAIN_S = 1.0
LOCAL_DIRECTORIES_KEPT_S = 600.0
"""The time for a job to come back to a host before its directory there is removed."""


def start_reaper(directory: Path, exclusive: bool) -> None:
    """Start the reaper of the tasks that this process records. Block until it has started; it outlives this process.

    Args:
        directory, exclusive: as for `ProcessLedger`.

    Raises:
        OSError, subprocess.CalledProcessError: it can't be started.
    """
    own = map(str, ProcessIdentity.of_this_process())
    command = [sys.executable, "-m", __name__, str(directory), str(int(exclusive)), *own]
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    nothing = subprocess.DEVNULL
    subprocess.run(
        command, env=environ, stdin=nothing, stdout=nothing, stderr=nothing, start_new_session=True, check=True
    )


def main() -> None:
    """Wait until the process that records the tasks has ended, then end the tasks."""
    directory, exclusive, pid, started = sys.argv[1:]
    ledger, recorder = ProcessLedger(Path(directory), bool(int(exclusive))), ProcessIdentity(int(pid), int(started))
    if os.fork():
        os._exit(0)  # Ray ends the children of its workers, so the reaper must not be a child
    _wait_for_end(recorder)
    end_what_is_left(ledger, recorder)
    directories = LocalDirectories.of_host(Path(directory))
    if int(exclusive) and (left := directories.left()):
        time.sleep(LOCAL_DIRECTORIES_KEPT_S)
        directories.remove(not_taken_since=left)


def end_what_is_left(ledger: ProcessLedger, recorder: ProcessIdentity) -> None:
    """End the tasks of a TPUHostActor that is gone. Block until none is left, because no other process would try again.

    Args:
        ledger: the host's records of processes.
        recorder: the process of the TPUHostActor.
    """
    while True:
        with contextlib.suppress(OSError):  # the machine may be out of file descriptors or memory
            if not ledger.end_leftovers(recorder=recorder):
                return
        time.sleep(AGAIN_S)


def _wait_for_end(process: ProcessIdentity) -> None:
    if (pidfd := process.open_pidfd()) is not None:
        select.select([pidfd], [], [])


if __name__ == "__main__":
    main()
