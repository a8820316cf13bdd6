"""Removes a simulated cluster's directory when the driver and all process supervisors are gone, however they ended.

It removes the hosts' networks first; the file ``networks`` in the directory names them.

Run as a script, never imported: ``python -I -S janitor.py DIRECTORY``, with the reading end of the lifeline pipe as its
standard input. The driver and every process supervisor hold the writing end, so the pipe's end of file means that no
process is left that could write into the directory.
"""

import os
import shutil
import signal
import subprocess
import sys
import time


def main(directory: str) -> int:
    # A signal that ends the driver through its process group or terminal must not end the janitor too.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    while os.read(0, 4096):
        pass
    remove_networks(os.path.join(directory, "networks"))
    for _ in range(20):
        shutil.rmtree(directory, ignore_errors=True)
        if not os.path.lexists(directory):
            return 0
        time.sleep(0.1)  # e.g. a process outside the simulated hosts has just created a file there
    return 1


def remove_networks(record: str) -> None:
    """Remove the namespaces and the bridge that the record names, if they still exist."""
    if os.path.exists(record):
        with open(record) as lines:
            for line in reversed(lines.read().splitlines()):
                kind, name = line.split()
                subprocess.run(["ip", kind, "del", name], stderr=subprocess.DEVNULL)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
