"""Which processes belong to a task, also after its own has ended, and how all of them are ended."""

import logging
import re
import signal
from typing import Any

import psutil
import pytest

from iris_ray.processes import tree as module
from iris_ray.processes.identity import ProcessIdentity, ProcessStat, stat_of
from iris_ray.processes.subtree import pids, read_of_process
from iris_ray.processes.tree import Listing, ProcessTree, end_processes
from tests.support.processes import TOKEN, Nursery, alive, earlier_than, identity_of, no_file_descriptor_left, tree
from tests.support.waiting import wait_until

# -- membership -------------------------------------------------------------------------------------------------------


def all_of(processes: list[psutil.Process]) -> set[ProcessIdentity]:
    return set(map(identity_of, processes))


@pytest.mark.parametrize("kernel_lists_children", [True, False])
def test_updated_tree_is_known_after_root_ended(
    nursery: Nursery, monkeypatch: pytest.MonkeyPatch, kernel_lists_children: bool
) -> None:
    monkeypatch.setattr(module, "KERNEL_LISTS_CHILDREN", kernel_lists_children)
    parent, children = nursery.tree("child", "daemon")
    known = tree(parent)
    assert known.update()
    assert not known.update(), "nothing is new"
    parent.kill()
    nursery.reap(parent)
    assert known.update()
    assert known.known == set(known.search()) == all_of(children)
    assert end_processes(known.known, known.search) == []
    assert not any(map(alive, children))


def test_process_unreadable_for_lack_of_descriptors_counts_as_alive(nursery: Nursery) -> None:
    parent, (daemon,) = nursery.tree("daemon")
    known = tree(parent)
    known.update()
    found = [identity_of(daemon)]
    with no_file_descriptor_left():
        with pytest.raises(OSError, match="Too many open files"):
            known.update()
        with pytest.raises(OSError, match="Too many open files"):
            end_processes(found, known.search)
    parent.kill()
    nursery.reap(parent)
    assert known.search() == found, "it is known as before"


def test_tree_includes_roots_group_while_number_is_safe(nursery: Nursery) -> None:
    parent, (unseen, daemon) = nursery.tree("child", "daemon", leads=True)
    ended, earlier = tree(parent), tree(parent)
    in_group = [identity_of(unseen)]
    parent.kill()
    nursery.reap(parent)
    assert ended.search(just_ended=True) == in_group, "the daemon had left the group, and no update had seen it"
    assert ended.search() == in_group, "one member of the group is known"
    assert earlier.search() == [], "another process may lead the group by now"
    assert alive(daemon)


def test_tree_excludes_group_of_process_reusing_roots_pid(nursery: Nursery) -> None:
    leader, _ = nursery.tree("child", leads=True)
    assert ProcessTree(earlier_than(leader), TOKEN).search(just_ended=True) == []


def test_tree_excludes_process_reusing_members_pid(nursery: Nursery) -> None:
    stranger = nursery.sleeper()
    assert ProcessTree(ProcessIdentity(2**22 + 1, 1), TOKEN, [earlier_than(stranger)]).search() == []


def ended_task(token: str) -> ProcessTree:
    """Return the tree of a task whose process has ended; it started when this one did."""
    return ProcessTree(ProcessIdentity(2**22 + 1, ProcessIdentity.of_this_process().started), token)


def test_tree_finds_early_daemon_by_token(nursery: Nursery) -> None:
    parent, (daemon,) = nursery.tree("daemon", IRIS_RAY_TASK_TOKEN=f"{TOKEN}-1")
    another, (child,) = nursery.tree("child", IRIS_RAY_TASK_TOKEN=f"{TOKEN}-1")
    parent.kill()
    nursery.reap(parent)
    others = [nursery.sleeper(IRIS_RAY_TASK_TOKEN=token) for token in (f"{TOKEN}-11", f"{TOKEN}-2", "")]
    assert set(ended_task(f"{TOKEN}-1").search()) == all_of([daemon, another, child])
    assert all(map(alive, others))


@pytest.mark.parametrize("root_lives", [True, False])
def test_tree_finds_early_forked_daemon(nursery: Nursery, root_lives: bool) -> None:
    """It runs no program of its own, so it shows the environment with which its task's process began."""
    parent, (daemon, another) = nursery.tree(f"fork {TOKEN}-1", f"fork {TOKEN}-11")
    task = tree(parent, f"{TOKEN}-1")
    if not root_lives:
        parent.kill()
        nursery.reap(parent)
    assert set(task.search()) == all_of([parent, daemon] if root_lives else [daemon])
    assert alive(another)


def test_tree_skips_token_search_in_older_processes(nursery: Nursery) -> None:
    older = nursery.sleeper(IRIS_RAY_TASK_TOKEN=TOKEN)
    root = ProcessIdentity(2**22 + 1, identity_of(older).started + 1)
    assert ProcessTree(root, TOKEN).search() == []


class Stats(dict[int, ProcessStat]):
    """Counts how often all processes are looked at."""

    looks = 0

    def items(self) -> Any:
        self.looks += 1
        return super().items()


def test_search_of_a_deep_tree_looks_at_all_processes_a_few_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """A task may start thousands of processes, each the child of the one before."""
    some = stat_of(1)
    assert some is not None
    first, count = 2**22 + 1, 1000
    line = range(first, first + count)
    stats = Stats({pid: some._replace(pid=pid, parent=pid - 1, group=first, session=first) for pid in line})
    monkeypatch.setattr(module, "_all_stats", lambda: stats)
    assert len(ProcessTree(stats[first].identity).search()) == count
    assert stats.looks < 10


def test_search_finds_daemon_started_during_search(nursery: Nursery, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its parent was listed and has ended by the time its file is read."""
    started: list[psutil.Process] = []

    def read_late(pid: int) -> object:
        if not started:
            started.append(nursery.sleeper(IRIS_RAY_TASK_TOKEN=TOKEN))
        return stat_of(pid)

    monkeypatch.setattr(module, "stat_of", read_late)
    assert ended_task(TOKEN).search() == list(map(identity_of, started))


def test_listing_that_has_begun_is_not_the_next_one(nursery: Nursery, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have passed the place of a process that starts now."""
    asked_before, asked_during = Listing.next(), list[Listing]()

    def look() -> list[int]:
        asked_during.append(Listing.next())
        return pids()

    monkeypatch.setattr(module, "pids", look)
    assert ended_task(TOKEN).search(listing=asked_before) == []
    daemon = nursery.sleeper(IRIS_RAY_TASK_TOKEN=TOKEN)
    assert ended_task(TOKEN).search(listing=asked_before) == []
    assert ended_task(TOKEN).search(listing=asked_during[0]) == [identity_of(daemon)]


def test_member_seen_after_the_listing_stays_a_member(nursery: Nursery) -> None:
    task, listing = ended_task(TOKEN), Listing.next().read()
    parent, (child,) = nursery.tree("child")
    stranger = nursery.sleeper()
    task.adopt([identity_of(parent), earlier_than(stranger)])
    assert task.search(listing=listing) == [identity_of(parent)]
    assert set(task.search()) == all_of([parent, child])


def test_trees_of_different_ages_share_a_listing(nursery: Nursery) -> None:
    """Processes older than a tree's root are not read for it, and may belong to the next tree."""
    carriers = [nursery.sleeper(**{name: TOKEN}) for name in ("IRIS_RAY_TASK_TOKEN", "ANOTHER_TOKEN")]
    oldest = min(identity_of(carrier).started for carrier in carriers)
    trees = [
        ProcessTree(ProcessIdentity(2**22 + 1, oldest + later), TOKEN, variable=variable)
        for later in (1000, 0)
        for variable in (None, "ANOTHER_TOKEN")
    ]
    listing = Listing.next()
    assert [tree.search(listing=listing) for tree in trees] == [[], [], *([identity_of(one)] for one in carriers)]


def test_maps_of_a_known_tasks_own_process_are_not_read(nursery: Nursery, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are long, and a host may have hundreds of tasks. Whatever these have started is read."""
    parents, daemons, tasks, read = list[int](), list[psutil.Process](), list[ProcessTree](), list[tuple[int, str]]()
    for token in (f"{TOKEN}-1", f"{TOKEN}-2"):
        parent, (daemon,) = nursery.tree(f"fork {token}")
        parents.append(parent.pid)
        daemons.append(daemon)
        tasks.append(tree(parent, token))

    def noted(pid: int, name: str) -> bytes:
        read.append((pid, name))
        return read_of_process(pid, name)

    monkeypatch.setattr(module, "read_of_process", noted)
    listing = Listing.next()
    found = [set(task.search(listing=listing)) for task in tasks]
    assert found == [{task.root, identity_of(daemon)} for task, daemon in zip(tasks, daemons, strict=True)]
    with_maps = {pid for pid, name in read if name == "maps"}
    assert with_maps >= {daemon.pid for daemon in daemons}
    assert with_maps.isdisjoint(parents)


def test_listing_that_fails_is_tried_again(nursery: Nursery) -> None:
    listing, daemon = Listing.next(), nursery.sleeper(IRIS_RAY_TASK_TOKEN=TOKEN)
    with no_file_descriptor_left(), pytest.raises(OSError, match="Too many open files"):
        listing.read()
    listing.read()
    with no_file_descriptor_left(), pytest.raises(OSError, match="Too many open files"):
        ended_task(TOKEN).search(listing=listing)
    assert ended_task(TOKEN).search(listing=listing) == [identity_of(daemon)]


# -- ending -----------------------------------------------------------------------------------------------------------


def test_ending_ends_whole_process_tree(nursery: Nursery) -> None:
    parent, children = nursery.tree("child", "daemon")
    task = tree(parent)
    assert end_processes(task.search(), task.search) == []
    assert not any(map(alive, [parent, *children]))


def test_ending_ends_children_started_since_search(nursery: Nursery) -> None:
    process, since = nursery.sleeper(), nursery.sleeper()
    found = identity_of(since)
    assert end_processes([identity_of(process)], lambda: [found]) == []
    assert not any(map(alive, [process, since]))


@pytest.mark.parametrize("grace_s", [0.0, 1.0])
def test_ending_skips_search_if_no_process_runs(nursery: Nursery, grace_s: float) -> None:
    """A search reads a file of every process of the machine."""
    process = nursery.sleeper()
    found = identity_of(process)
    process.kill()
    nursery.reap(process)
    assert end_processes([found], pytest.fail, grace_s=grace_s) == []


def test_ending_counts_a_zombie_as_gone(nursery: Nursery) -> None:
    """In a container whose first process does not reap, orphans stay zombies; they hold neither memory nor chips."""
    _, (child,) = nursery.tree("child")
    assert end_processes([identity_of(child)], list) == []


def test_ending_ends_process_without_its_first_thread(nursery: Nursery) -> None:
    """It looks like a zombie, and has its memory and chips while another thread runs."""
    start = "import ctypes, threading, time; threading.Thread(target=time.sleep, args=(60,)).start()"
    process = nursery.script(f"{start}; print(flush=True); ctypes.CDLL(None).pthread_exit(None)")
    wait_until(lambda: process.status() == psutil.STATUS_ZOMBIE)
    assert end_processes([identity_of(process)], list) == []
    nursery.reap(process)


class Immortal(ProcessIdentity):
    """A process that does not hear SIGTERM, and is gone once it was sent SIGKILL."""

    def signal(self, number: int) -> None:
        if number == signal.SIGKILL:
            super().signal(number)
            wait_until(lambda: not self.runs())


def test_sigterm_time_does_not_count_for_the_kill(nursery: Nursery) -> None:
    process = Immortal(*identity_of(nursery.sleeper()))
    assert end_processes([process], list, timeout_s=0.1, grace_s=0.3) == []


class SlowToDie(ProcessIdentity):
    """A process that is gone only some time after it was killed, as one is that has hundreds of GB to give back."""

    has_waited = False

    def signal(self, number: int) -> None:
        if self.has_waited:
            super().signal(number)


def test_ending_waits_for_slow_death_and_says_so(
    nursery: Nursery, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "SAY_EVERY_S", 0.2)
    process = SlowToDie(*identity_of(nursery.sleeper()))
    said: list[str] = []

    def say(record: logging.LogRecord) -> bool:
        said.append(record.getMessage())
        process.has_waited = True
        return True

    caplog.handler.addFilter(say)
    assert end_processes([process], list, timeout_s=600.0) == []
    assert not process.runs()
    assert re.fullmatch(rf"pid {process.pid}: killed \d+ s ago and not gone yet; much memory takes long", said[0])
