"""Which processes belong to a task's process tree, also after its own process has ended."""

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import pytest

from iris_ray.actors.host import process_tree as module
from iris_ray.actors.host.process_tree import ProcessTree, end_task, stat_of
from tests.support.processes import TOKEN, Nursery, alive, tree


def by_pid(processes: list[psutil.Process]) -> list[psutil.Process]:
    return sorted(processes, key=lambda process: process.pid)


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
    assert by_pid(known.members()) == by_pid(known.search()) == by_pid(children)
    assert end_task(known.members(), known.search) == []
    assert not any(map(alive, children))


@contextmanager
def no_file_descriptor_left() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_process_unreadable_for_lack_of_descriptors_counts_as_alive(nursery: Nursery) -> None:
    parent, (daemon,) = nursery.tree("daemon")
    known = tree(parent)
    known.update()
    with no_file_descriptor_left():
        with pytest.raises(OSError, match="Too many open files"):
            known.update()
        with pytest.raises(OSError, match="Too many open files"):
            end_task([daemon], known.search)
    parent.kill()
    nursery.reap(parent)
    assert known.search() == [daemon], "it is known as before"


def test_tree_includes_roots_group_while_number_is_safe(nursery: Nursery) -> None:
    parent, (unseen, daemon) = nursery.tree("child", "daemon", leads=True)
    ended, earlier = tree(parent), tree(parent)
    parent.kill()
    nursery.reap(parent)
    assert ended.search(just_ended=True) == [unseen], "the daemon had left the group, and no update had seen it"
    assert ended.search() == [unseen], "one member of the group is known"
    assert earlier.search() == [], "another process may lead the group by now"
    assert alive(daemon)


def test_tree_excludes_group_of_process_reusing_roots_pid(nursery: Nursery) -> None:
    leader, _ = nursery.tree("child", leads=True)
    assert ProcessTree(leader.pid, tree(leader).started - 1, TOKEN).search(just_ended=True) == []


def test_tree_excludes_process_reusing_members_pid(nursery: Nursery) -> None:
    stranger = nursery.sleeper()
    known = ProcessTree(2**22 + 1, 1, TOKEN, [(stranger.pid, tree(stranger).started + 1)])
    assert known.members() == known.search() == []


def ended_task(token: str) -> ProcessTree:
    """Return the tree of a task whose process has ended; it started when this one did."""
    this = stat_of(os.getpid())
    assert this is not None
    return ProcessTree(2**22 + 1, this.started, token)


def test_tree_finds_early_daemon_by_token(nursery: Nursery) -> None:
    parent, (daemon,) = nursery.tree("daemon", IRIS_RAY_TASK_TOKEN=f"{TOKEN}-1")
    another, (child,) = nursery.tree("child", IRIS_RAY_TASK_TOKEN=f"{TOKEN}-1")
    parent.kill()
    nursery.reap(parent)
    others = [nursery.sleeper(IRIS_RAY_TASK_TOKEN=token) for token in (f"{TOKEN}-11", f"{TOKEN}-2", "")]
    assert by_pid(ended_task(f"{TOKEN}-1").search()) == by_pid([daemon, another, child])
    assert all(map(alive, others))


@pytest.mark.parametrize("root_lives", [True, False])
def test_tree_finds_early_forked_daemon(nursery: Nursery, root_lives: bool) -> None:
    """It runs no program of its own, so it shows the environment with which its task's process began."""
    parent, (daemon, another) = nursery.tree(f"fork {TOKEN}-1", f"fork {TOKEN}-11")
    task = tree(parent, f"{TOKEN}-1")
    if not root_lives:
        parent.kill()
        nursery.reap(parent)
    assert by_pid(task.search()) == by_pid([parent, daemon] if root_lives else [daemon])
    assert alive(another)


def test_tree_skips_token_search_in_older_processes(nursery: Nursery) -> None:
    older = nursery.sleeper(IRIS_RAY_TASK_TOKEN=TOKEN)
    assert ProcessTree(2**22 + 1, tree(older).started + 1, TOKEN).search() == []


def test_search_finds_daemon_started_during_search(nursery: Nursery, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its parent was listed and has ended by the time its file is read."""
    started: list[psutil.Process] = []

    def read_late(pid: int) -> object:
        if not started:
            started.append(nursery.sleeper(IRIS_RAY_TASK_TOKEN=TOKEN))
        return stat_of(pid)

    monkeypatch.setattr(module, "stat_of", read_late)
    assert ended_task(TOKEN).search() == started
