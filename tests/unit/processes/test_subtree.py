"""A parent that takes orphans ends all its descendants; a script of ours starts without site-packages."""

import subprocess
import sys
import textwrap
from pathlib import Path

import psutil
import pytest

from iris_ray.processes.bare import bare_command
from iris_ray.processes.identity import stat_of
from iris_ray.processes.subtree import as_shells_say, descendants
from tests.support.processes import Nursery
from tests.support.waiting import wait_until


def printed(script: str, directory: Path) -> list[str]:
    """Return the lines that a script prints that `bare_command` starts."""
    path = directory / "script.py"
    path.write_text(textwrap.dedent(script))
    run = subprocess.run([*bare_command(path), "an", "argument"], capture_output=True, text=True, check=True)
    return run.stdout.splitlines()


def test_bare_script_has_its_arguments_and_only_the_standard_library(tmp_path: Path) -> None:
    script = """
        import sys
        from iris_ray.processes import identity, subtree, tree
        print(*sys.argv[1:], __name__, __file__)
        print(sorted({"psutil", "lazy_loader", "ray", "asyncio"} & set(sys.modules)))
    """
    assert printed(script, tmp_path) == [f"an argument __main__ {tmp_path / 'script.py'}", "[]"]


def test_descendants_without_their_parent_are_ended(tmp_path: Path) -> None:
    """One left its session, its parent and its environment; one ignores what it can; one is a zombie of another."""
    script = """
        import os, signal, time
        from iris_ray.processes.subtree import descendants, end_descendants, take_orphans
        take_orphans()
        said, say = os.pipe()
        if os.fork() == 0:
            if os.fork() == 0:
                os.setsid()
                os.write(say, f"{os.getpid()} ".encode())
                os.execve("/bin/sleep", ["sleep", "60"], {})
            os._exit(0)
        if os.fork() == 0:
            for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
                signal.signal(number, signal.SIG_IGN)
            if (zombie := os.fork()) == 0:
                os._exit(0)
            os.write(say, f"{os.getpid()} {zombie} ".encode())
            time.sleep(60)
        pids = []
        while len(pids) < 3:
            pids += os.read(said, 1000).split()
        print(*map(int, pids))
        print(end_descendants(), descendants(os.getpid()))
    """
    pids, ended = printed(script, tmp_path)
    assert ended == "True []"
    assert not any(psutil.pid_exists(int(pid)) for pid in pids.split())


def test_descendants_that_remain_are_told(tmp_path: Path) -> None:
    script = """
        import os, time
        from iris_ray.processes import subtree
        if os.fork() == 0:
            time.sleep(0.5)
            os._exit(0)
        os.kill = lambda pid, number: None  # as if it were another user's, or waited for a disk
        print(subtree.end_descendants(timeout_s=0.1), subtree.end_descendants(first=lambda pid: True))
    """
    assert printed(script, tmp_path) == ["False True"]


def test_descendants_are_ended_though_the_host_has_too_many_open_files_for_a_moment(tmp_path: Path) -> None:
    script = """
        import os, time
        from iris_ray.processes import subtree
        if os.fork() == 0:
            time.sleep(60)
        refused = iter(("/proc", "/proc"))
        def listdir(path, as_before=os.listdir):
            if path == next(refused, None):
                raise OSError(23, "Too many open files in system")
            return as_before(path)
        os.listdir = listdir
        print(subtree.end_descendants(), subtree.descendants(os.getpid()))
    """
    assert printed(script, tmp_path) == ["True []"]


CHILD = """
import os, sys, time
from iris_ray.processes.subtree import end_with_parent
parent, (ends, ended) = os.getpid(), os.pipe()
if os.fork() == 0:
    os.close(ended)
    if sys.argv[1] == "True":
        print(os.getpid(), flush=True)
        os.read(ends, 1)
    end_with_parent(parent)
    print(os.getpid(), flush=True)
    time.sleep(60)
time.sleep(0 if sys.argv[1] == "True" else 60)
"""


@pytest.mark.parametrize("parent_ended_before", [True, False])
def test_child_ends_with_its_parent(parent_ended_before: bool) -> None:
    words = [sys.executable, "-c", CHILD, str(parent_ended_before)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        parent.kill()
        parent.wait()
        wait_until(lambda: (stat := stat_of(child)) is None or stat.has_ended)


def test_descendants_are_parents_before_children(nursery: Nursery) -> None:
    parent, children = nursery.tree("child", "daemon")
    assert set(descendants(parent.pid)) == {child.pid for child in children}
    assert descendants(children[0].pid) == []


def test_exit_code_of_a_killed_process_is_as_shells_say() -> None:
    assert [as_shells_say(code) for code in (0, 3, -9)] == [0, 3, 137]
