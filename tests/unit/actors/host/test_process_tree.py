"""Which processes belong to a task's process tree, also after its own process has ended."""

import psutil

from iris_ray.actors.host.end_task import end_task
from iris_ray.actors.host.process_tree import ProcessTree
from tests.support.processes import TOKEN, Nursery, alive, tree


def by_pid(processes: list[psutil.Process]) -> list[psutil.Process]:
    return sorted(processes, key=lambda process: process.pid)


def test_tree_that_was_updated_is_known_after_its_root_has_ended(nursery: Nursery) -> None:
    parent, children = nursery.tree("child", "daemon")
    known = tree(parent)
    assert known.update()
    assert not known.update(), "nothing is new"
    parent.kill()
    nursery.reap(parent)
    assert known.update()
    assert by_pid(known.members()) == by_pid(known.search()) == by_pid(children)
    assert end_task(known.members(), TOKEN) == []
    assert not any(map(alive, children))


def test_tree_includes_the_group_of_its_root_as_long_as_the_number_can_not_be_reused(nursery: Nursery) -> None:
    parent, (unseen, daemon) = nursery.tree("child", "daemon", leads=True)
    ended, earlier = tree(parent), tree(parent)
    parent.kill()
    nursery.reap(parent)
    assert ended.search(just_ended=True) == [unseen], "the daemon had left the group, and no update had seen it"
    assert ended.search() == [unseen], "one member of the group is known"
    assert earlier.search() == [], "another process may lead the group by now"
    assert alive(daemon)


def test_tree_does_not_include_the_group_of_another_process_that_got_the_pid_of_its_root(nursery: Nursery) -> None:
    leader, _ = nursery.tree("child", leads=True)
    assert ProcessTree(leader.pid, tree(leader).started - 1).search(just_ended=True) == []


def test_tree_does_not_include_another_process_that_got_the_pid_of_a_member(nursery: Nursery) -> None:
    stranger = nursery.sleeper()
    known = ProcessTree(2**22 + 1, 1, [(stranger.pid, tree(stranger).started + 1)])
    assert known.members() == known.search() == []
