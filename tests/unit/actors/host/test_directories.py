"""Directories on a host: those of iris_ray, and that of a job."""

import os
import shutil
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from iris_ray.actors.host import directories as module
from iris_ray.actors.host.directories import LEAST_MEMORY_BYTES, LocalDirectories, host_directory
from iris_ray.actors.protocol.task_files import JobDirectory

# -- iris_ray's own ---------------------------------------------------------------------------------------------------


def test_host_directory_is_private_and_configurable(tmp_path: Path) -> None:
    configured = host_directory({"IRIS_RAY_HOST_DIR": str(tmp_path / "x" / "y")})
    assert configured == tmp_path / "x" / "y"
    assert stat.S_IMODE(configured.stat().st_mode) == 0o700


@pytest.mark.parametrize("mode", [0o777, 0o770])
def test_host_directory_writable_by_others_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "open"
    path.mkdir()
    path.chmod(mode)
    with pytest.raises(PermissionError, match="can be written to by other users; remove it, or set IRIS_RAY_HOST_DIR"):
        host_directory({"IRIS_RAY_HOST_DIR": str(path)})


def test_host_directory_named_by_operator_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    assert host_directory({"IRIS_RAY_HOST_DIR": str(tmp_path / "link")}) == tmp_path / "link"


@pytest.fixture
def in_rays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where iris_ray keeps its files unless an operator says where; behind a link, as /tmp may be."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "ray").symlink_to(tmp_path / "disk")
    monkeypatch.setattr(module, "_rays_directory", lambda: str(tmp_path / "ray"))
    return tmp_path / "ray" / f"iris_ray-{os.getuid()}"


def test_host_directory_ignores_tmpdir_of_jobs(in_rays: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", "/nowhere")
    assert host_directory({"TMPDIR": "/nowhere"}) == in_rays
    assert stat.S_IMODE(in_rays.stat().st_mode) == 0o700


def test_link_in_place_of_host_directory_is_refused(in_rays: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    in_rays.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(PermissionError, match="is not a directory"):
        host_directory({})


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory to somebody else")
def test_host_directory_of_another_user_is_refused(in_rays: Path) -> None:
    in_rays.mkdir(mode=0o700)
    os.chown(in_rays, 65534, 65534)
    with pytest.raises(PermissionError, match="belongs to another user"):
        host_directory({})


# -- a job's ----------------------------------------------------------------------------------------------------------


UNPRIVILEGED_USER = 65534


def end_of(task: LocalDirectories) -> None:
    """Close what the end of a task's process closes."""
    assert task._kept is not None
    os.close(task._kept)


def taken(disk: Path, job_id: str) -> Path:
    """The directory of a job whose task has ended."""
    task = LocalDirectories(disk, None)
    path = task.take(job_id)
    end_of(task)
    return path


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    (tmp_path / "disk").mkdir()
    return tmp_path / "disk"


@pytest.fixture
def memory(tmp_path: Path) -> Path:
    (tmp_path / "memory").mkdir()
    return tmp_path / "memory"


@pytest.mark.parametrize(
    "job_id", ["parent-1/child-2", "long" * 50 + "/child", "模型训练" * 25, "a:b", "not \udcff text"], ids=ascii
)
def test_job_of_any_id_has_one_mountable_directory(disk: Path, job_id: str) -> None:
    """Such as that of a job that a task submits, which runs on hosts where its parent's directory is not."""
    path = taken(disk, job_id)
    (path / "cache").touch()
    assert taken(disk, job_id) == path
    assert (path / "cache").exists()
    assert ":" not in str(path)
    assert list((disk / "jobs").iterdir()) == [path.parent]
    taken(disk, "parent-1")
    assert list((disk / "jobs").iterdir()) == [disk / "jobs" / "parent-1"]
    path = taken(disk, job_id)
    LocalDirectories(disk, None).remove(job_id)
    assert list((disk / "jobs").iterdir()) == []


@pytest.fixture
def room(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], None]:
    """Sets how many bytes of how many are free in memory."""

    def has(free: int, total: int) -> None:
        answer: Any = SimpleNamespace(f_bavail=free, f_blocks=total, f_frsize=1)
        monkeypatch.setattr(os, "statvfs", lambda _: answer)

    has(LEAST_MEMORY_BYTES, LEAST_MEMORY_BYTES)
    return has


def test_job_finds_own_files_at_next_attempt_only(disk: Path) -> None:
    first = taken(disk, "a")
    (first / "cache").touch()
    assert taken(disk, "a") == first
    assert (first / "cache").exists()
    second = taken(disk, "b")
    assert not first.exists()
    assert [*second.iterdir()] == []
    assert second.stat().st_mode & 0o777 == 0o700


@pytest.mark.usefixtures("room")
def test_directory_is_in_memory_if_there_is_room(disk: Path, memory: Path, room: Callable[[int, int], None]) -> None:
    here = LocalDirectories(disk, memory)
    first = here.take("a")
    assert first.is_relative_to(memory)
    room(0, LEAST_MEMORY_BYTES)
    assert here.take("a") == first
    assert here.take("b").is_relative_to(disk)


@pytest.mark.parametrize(
    ("free", "total"), [(LEAST_MEMORY_BYTES - 1, LEAST_MEMORY_BYTES), (LEAST_MEMORY_BYTES, 3 * LEAST_MEMORY_BYTES)]
)
def test_memory_with_little_room_is_not_used_for_directories(
    disk: Path, memory: Path, room: Callable[[int, int], None], free: int, total: int
) -> None:
    room(free, total)
    assert LocalDirectories(disk, memory).take("a").is_relative_to(disk)


def test_hosts_sharing_memory_have_separate_directories(
    tmp_path: Path, memory: Path, room: Callable[[int, int], None]
) -> None:
    places = [tmp_path / "one", tmp_path / "other"]
    paths = {LocalDirectories(place, memory).take("a") for place in places}
    assert len(paths) == 2
    assert all(path.exists() for path in paths)


@pytest.mark.parametrize("unsafe", ["link", "open"])
@pytest.mark.usefixtures("room")
def test_place_another_user_could_have_prepared_is_not_used(
    tmp_path: Path, disk: Path, memory: Path, unsafe: str
) -> None:
    task = LocalDirectories(disk, memory)
    root = task.take("a").parent.parent
    end_of(task)
    task.remove()
    root.rmdir()
    if unsafe == "link":
        (tmp_path / "elsewhere").mkdir()
        root.symlink_to(tmp_path / "elsewhere")
    else:
        root.mkdir()
        root.chmod(0o777)
    assert LocalDirectories(disk, memory).take("a").is_relative_to(disk)


@pytest.fixture
def not_root(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Act as a user without privileges, in a directory of all users: root may write to every directory."""
    (home := Path(tempfile.mkdtemp())).chmod(0o777)
    monkeypatch.chdir(home)
    monkeypatch.setattr(os, "getuid", os.geteuid)
    before = os.geteuid()
    if before == 0:
        os.seteuid(UNPRIVILEGED_USER)
    try:
        yield
    finally:
        os.seteuid(before)
        shutil.rmtree(home)


@pytest.mark.usefixtures("not_root")
def test_read_only_directories_of_a_job_are_removed_too() -> None:
    """A copy of a data set may have them. They may be in memory, which would not come back for as long as they stay."""
    disk, kept = Path("disk").absolute(), Path("kept").absolute()
    for path in (disk, kept):
        path.mkdir()
    own = taken(disk, "a")
    for part in ("data", "data/train", "other"):
        (own / part).mkdir()
        (own / part / "file").touch()
    (own / "data" / "link").symlink_to(kept)
    (own / "other").chmod(0)
    for path in (kept, own / "data" / "train", own / "data", own):
        path.chmod(0o500)
    LocalDirectories(disk, None).remove()
    assert not own.exists()
    assert kept.stat().st_mode & 0o777 == 0o500


@pytest.fixture
def shallow() -> Iterator[None]:
    """Lets functions call themselves less often, so that a test needs fewer directories."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(400)
    yield
    sys.setrecursionlimit(before)


@pytest.mark.usefixtures("shallow")
def test_deep_directories_of_a_job_stop_no_later_one(disk: Path) -> None:
    """Python's own ways to remove a tree call themselves for each level."""
    directories = LocalDirectories(disk, None)
    below = os.open(directories.take("deep"), os.O_RDONLY)
    for _ in range(500):
        os.mkdir("d", dir_fd=below)
        above, below = below, os.open("d", os.O_RDONLY, dir_fd=below)
        os.close(above)
    os.close(below)
    os.close(directories._kept or 0)  # the task's process has ended
    LocalDirectories(disk, None).take("next")
    assert [path.name for path in (disk / "jobs").iterdir()] == ["next"]


def test_directory_of_living_task_is_never_removed(disk: Path) -> None:
    task, other = LocalDirectories(disk, None), LocalDirectories(disk, None)
    path = task.take("a")
    other.remove()
    assert other.left()
    assert path.exists()
    end_of(task)
    other.remove()
    assert not path.exists()


@pytest.mark.usefixtures("room")
def test_unwritable_memory_is_not_used_for_directories(disk: Path, tmp_path: Path) -> None:
    assert LocalDirectories(disk, tmp_path / "missing").take("a").is_relative_to(disk)


def test_directory_taken_by_later_attempt_is_kept_despite_age(disk: Path) -> None:
    here = LocalDirectories(disk, None)
    (taken(disk, "a") / "cache").touch()
    left = here.left()
    path = taken(disk, "a")
    here.remove(not_taken_since=left)
    assert path.exists()
    left = here.left()
    here.remove(not_taken_since={})
    assert path.exists()
    here.remove(not_taken_since=left)
    assert not path.exists()


def test_end_of_job_removes_only_its_files(disk: Path) -> None:
    here, path = LocalDirectories(disk, None), taken(disk, "a")
    (path / "cache").touch()
    here.remove("b")
    assert path.exists()
    here.remove("a")
    assert not path.exists()


def test_empty_directories_are_removed_without_waiting(disk: Path) -> None:
    here, path = LocalDirectories(disk, None), taken(disk, "a")
    assert not here.left()
    assert not path.exists()
    (taken(disk, "a") / "cache").touch()
    assert here.left()
    assert path.exists()


@pytest.mark.usefixtures("room")
@pytest.mark.parametrize("in_memory", [False, True])
def test_processes_of_job_starting_together_share_its_directory(
    disk: Path, memory: Path, monkeypatch: pytest.MonkeyPatch, in_memory: bool
) -> None:
    """Both have looked before either has made it."""
    monkeypatch.setattr(LocalDirectories, "_all", lambda _: iter(()))
    tasks = [LocalDirectories(disk, memory if in_memory else None) for _ in range(2)]
    paths = {task.take("a") for task in tasks}
    assert len(paths) == 1
    assert paths.pop().is_relative_to(memory if in_memory else disk)
    for task in tasks:
        end_of(task)


# -- what its hosts know of a job -------------------------------------------------------------------------------------


def test_jobs_token_lies_beside_its_files(disk: Path) -> None:
    task = LocalDirectories(disk, None)
    path = task.take("a", "5ec2e7")
    assert [*path.iterdir()] == []
    (job,) = task.jobs()
    assert (job, job.read_token()) == (JobDirectory.of_local_dir(str(path)), "5ec2e7")
    assert job.path.stat().st_mode & 0o777 == 0o700
    end_of(task)
    assert not task.left(), "a job that has kept no files"
    assert not path.exists()
