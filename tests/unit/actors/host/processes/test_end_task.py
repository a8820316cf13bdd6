"""Ending a task ends its whole process tree and its daemons, and no other process."""

import logging
import re

import psutil
import pytest

from iris_ray.actors.host import process_tree as module
from iris_ray.actors.host.process_tree import end_task
from tests.support.processes import Nursery, alive, tree
from tests.support.waiting import wait_until


def none_left() -> list[psutil.Process]:
    return []


def test_end_task_ends_whole_process_tree(nursery: Nursery) -> None:
    parent, children = nursery.tree("child", "daemon")
    task = tree(parent)
    assert end_task(task.search(), task.search) == []
    assert not any(map(alive, [parent, *children]))


def test_end_task_ends_children_started_since_search(nursery: Nursery) -> None:
    process, since = nursery.sleeper(), nursery.sleeper()
    assert end_task([process], lambda: [since]) == []
    assert not any(map(alive, [process, since]))


@pytest.mark.parametrize("grace_s", [0.0, 1.0])
def test_end_task_skips_search_if_no_process_runs(nursery: Nursery, grace_s: float) -> None:
    """A search reads a file of every process of the machine."""
    process = nursery.sleeper()
    process.kill()
    nursery.reap(process)
    assert end_task([process], pytest.fail, grace_s=grace_s) == []


def test_end_task_counts_a_zombie_as_gone(nursery: Nursery) -> None:
    """In a container whose first process does not reap, orphans stay zombies; they hold neither memory nor chips."""
    _, (child,) = nursery.tree("child")
    assert end_task([child], none_left) == []


def test_end_task_ends_process_without_its_first_thread(nursery: Nursery) -> None:
    """It looks like a zombie, and has its memory and chips while another thread runs."""
    start = "import ctypes, threading, time; threading.Thread(target=time.sleep, args=(60,)).start()"
    process = nursery.script(f"{start}; print(flush=True); ctypes.CDLL(None).pthread_exit(None)")
    wait_until(lambda: process.status() == psutil.STATUS_ZOMBIE)
    assert end_task([process], none_left) == []
    nursery.reap(process)


class Immortal(psutil.Process):
    """A process that does not hear SIGTERM, and is gone when `kill` returns."""

    def terminate(self) -> None:
        pass

    def kill(self) -> None:
        super().kill()
        wait_until(lambda: not alive(self))


def test_sigterm_time_does_not_count_for_the_kill(nursery: Nursery) -> None:
    process = Immortal(nursery.sleeper().pid)
    assert end_task([process], none_left, timeout_s=0.1, grace_s=0.3) == []


class SlowToDie(psutil.Process):
    """A process that is gone only some time after it was killed, as one is that has hundreds of GB to give back."""

    has_waited = False

    def kill(self) -> None:
        if self.has_waited:
            super().kill()


def test_end_task_waits_for_slow_death_and_says_so(
    nursery: Nursery, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "SAY_EVERY_S", 0.2)
    process = SlowToDie(nursery.sleeper().pid)
    said: list[str] = []

    def say(record: logging.LogRecord) -> bool:
        said.append(record.getMessage())
        process.has_waited = True
        return True

    caplog.handler.addFilter(say)
    assert end_task([process], none_left, timeout_s=600.0) == []
    assert not alive(process)
    assert re.fullmatch(rf"pid {process.pid}: killed \d+ s ago and not gone yet; much memory takes long", said[0])
