"""Real processes for tests: children, daemons and sleepers that end with the test."""

import os
import secrets
import subprocess
import sys

import psutil

from iris_ray.actors.host.process_tree import ProcessTree, stat_of

# Starts one child for each argument, prints its pid, and sleeps. It reaps none, so children that end become zombies.
# "fork TOKEN" is a daemon that starts no program, of a parent that has marked its forks.
PARENT = """
import os, subprocess, sys, time

def fork(token):
    global mark
    from iris_ray.actors.host.process_tree import mark_forks
    mark = mark_forks(token)
    said, say = os.pipe()
    if between := os.fork():
        os.waitpid(between, 0)
        print(int(os.read(said, 20)), flush=True)
    else:
        os.setsid()
        if daemon := os.fork():
            os.write(say, str(daemon).encode())
            os._exit(0)
        time.sleep(60)
        os._exit(0)

for kind in sys.argv[1:]:
    if kind.startswith("fork "):
        fork(kind.removeprefix("fork "))
        continue
    detached = kind == "daemon"
    print(subprocess.Popen(["sleep", "60"], start_new_session=detached).pid, flush=True)
time.sleep(60)
"""

TOKEN = secrets.token_hex(8)
"""Marks the processes of this run of the tests: another run on the machine has another one."""


class Nursery:
    """Starts processes, and ends all of them with the test."""

    def __init__(self) -> None:
        self._started: list[subprocess.Popen[str]] = []
        self._children: list[psutil.Process] = []

    def sleeper(self, **environ: str) -> psutil.Process:
        process = subprocess.Popen(["sleep", "60"], env={**os.environ, **environ}, text=True)
        self._started.append(process)
        return psutil.Process(process.pid)

    def tree(self, *kinds: str, leads: bool = False, **environ: str) -> tuple[psutil.Process, list[psutil.Process]]:
        """Return a parent, which may lead a process group, and its children; a "daemon" has a session of its own."""
        command = [sys.executable, "-c", PARENT, *kinds]
        env, group = {**os.environ, **environ}, 0 if leads else None
        parent = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True, process_group=group)
        self._started.append(parent)
        assert parent.stdout is not None
        children = [psutil.Process(int(parent.stdout.readline())) for _ in kinds]
        self._children += children
        return psutil.Process(parent.pid), children

    def script(self, script: str, *arguments: str) -> psutil.Process:
        """Return a Python script that has printed its first line."""
        process = subprocess.Popen([sys.executable, "-c", script, *arguments], stdout=subprocess.PIPE, text=True)
        self._started.append(process)
        assert process.stdout is not None
        process.stdout.readline()
        return psutil.Process(process.pid)

    def reap(self, process: psutil.Process) -> None:
        next(started for started in self._started if started.pid == process.pid).wait(10)

    def clear(self) -> None:
        for child in self._children:
            if alive(child):
                child.kill()
        for process in self._started:
            process.kill()
            process.wait(10)
            if process.stdout is not None:
                process.stdout.close()


def alive(process: psutil.Process) -> bool:
    """Return whether a process exists and is not a zombie."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def tree(process: psutil.Process, token: str = TOKEN) -> ProcessTree:
    """Return the tree of a process, with no descendant known."""
    stat = stat_of(process.pid)
    assert stat is not None
    return ProcessTree(stat.pid, stat.started, token)
