"""Output directories on a real disk: bounded, and harmless whatever a program has left in them."""

import ctypes
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from iris_ray.model.lifecycle import TaskAttemptId
from iris_ray.outputs import core
from iris_ray.outputs import directory as directories
from iris_ray.outputs.core import FREE, Kind, Removed
from iris_ray.outputs.directory import OutputDirectory, Trimmed, entries, files_being_written, kept_outputs, opened

KB = 1 << 10
NOBODY, PR_SET_DUMPABLE = 65534, 4


@pytest.fixture
def output(tmp_path: Path) -> OutputDirectory:
    made = OutputDirectory.of(tmp_path / "outputs", TaskAttemptId("train/1", 3, 2))
    made.create()
    return made


def written(path: Path, kilobytes: int = 64) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(os.urandom(kilobytes * KB))
    time.sleep(0.02)  # the kernel's coarse clock tells the files apart
    return path


def left(output: OutputDirectory) -> set[str]:
    with opened(output.path, output.root) as top:
        assert top is not None
        return {one.path for one in entries(top)}


def test_directory_is_one_of_the_attempt_that_no_other_account_can_enter(output: OutputDirectory) -> None:
    assert output.path.parts[-3:] == ("outputs", "train%2F1", "task-3.attempt-2")
    for path in (output.root, output.path.parent, output.path):
        assert path.stat().st_mode & 0o777 == 0o700


def test_oldest_files_go_until_the_rest_fits(output: OutputDirectory) -> None:
    for name in ("a", "deep/b", "c"):
        written(output.path / name)
    assert output.trim(1 << 30) == Trimmed(Removed())
    done = output.trim(150 * KB)
    assert done == Trimmed(Removed(1, 64 * KB))
    assert left(output) == {"deep", "deep/b", "c"}
    assert output.trim(0).removed.files == 2
    assert left(output) == {"deep"}
    assert output.removed() == Removed(3, 3 * 64 * KB)


def test_time_that_a_program_has_set_protects_no_file(output: OutputDirectory) -> None:
    first, second = written(output.path / "first"), written(output.path / "second")
    os.utime(second, (0, 0))
    time.sleep(0.02)
    third = written(output.path / "third")
    os.utime(first, (4e9, 4e9))  # changed last, as the kernel knows
    output.trim(130 * KB)
    assert left(output) == {"first", "third"}
    assert third.exists()


def test_file_that_is_being_written_is_emptied_and_stays(output: OutputDirectory) -> None:
    """Without its name it would grow unseen, and with another size a program that has mapped it would be killed."""
    with open(output.path / "log", "wb", buffering=0) as log:
        log.write(os.urandom(256 * KB))
        assert output.trim(100 * KB).removed.files == 1
        assert (output.path / "log").stat().st_blocks == 0
        log.write(b"more")
    assert (output.path / "log").read_bytes() == b"\0" * (256 * KB) + b"more"
    written(output.path / "log2", 256)
    output.trim(0)
    assert left(output) == set()


def test_mapped_file_does_not_kill_its_program(output: OutputDirectory) -> None:
    program = (
        "import mmap, sys; f = open(sys.argv[1], 'w+b'); f.write(b'x' * 262144); f.flush()\n"
        "m = mmap.mmap(f.fileno(), 262144); print(flush=True); input(); print(m[262143])"
    )
    words = [sys.executable, "-c", program, str(output.path / "map")]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "\n"
        assert output.trim(0).removed.files == 1
        said, _ = process.communicate("\n")
    assert (said, process.returncode) == ("0\n", 0)


def test_only_a_file_that_is_open_for_writing_counts_as_written(output: OutputDirectory) -> None:
    path = written(output.path / "x")
    with path.open("rb"):
        assert files_being_written(output.path) == set()
    with path.open("ab"):
        found = path.stat()
        assert files_being_written(output.path) == {(found.st_dev, found.st_ino)}


def test_files_elsewhere_are_untouched(output: OutputDirectory, tmp_path: Path) -> None:
    """Links and hard links out of the directory go; what they lead to stays as it is."""
    file, folder = written(tmp_path / "elsewhere" / "file"), tmp_path / "elsewhere"
    content = file.read_bytes()
    (output.path / "link").symlink_to(file)
    (output.path / "folder").symlink_to(folder)
    os.link(file, output.path / "hard")
    with open(output.path / "hard", "r+b"):  # even if it is being written
        output.trim(0, most_entries=0)
    assert left(output) == set()
    assert file.read_bytes() == content
    output.remove()
    assert file.read_bytes() == content


@pytest.mark.parametrize("level", ["name", "job"])
def test_directory_that_has_become_a_link_is_left_alone(output: OutputDirectory, tmp_path: Path, level: str) -> None:
    elsewhere = tmp_path / "elsewhere"
    inside = elsewhere / ("task-3.attempt-2/x" if level == "job" else "x")
    written(inside)
    path = output.path.parent if level == "job" else output.path
    output.path.rmdir()
    if level == "job":
        path.rmdir()
    path.symlink_to(elsewhere)
    assert output.trim(0, 0) == Trimmed(Removed())
    assert list(kept_outputs(output.root)) == []
    output.remove()
    output.remove_if_unused()
    assert inside.exists()


def test_fifos_and_sockets_hold_nobody_up(output: OutputDirectory) -> None:
    os.mkfifo(output.path / "fifo")
    os.mkfifo(f"{output.path}.removed")
    looking = threading.Thread(target=lambda: (output.removed(), output.trim(0, 0), list(kept_outputs(output.root))))
    looking.start()
    looking.join(10)
    assert not looking.is_alive()
    assert left(output) == set()


def test_tree_of_any_depth_is_looked_at_for_a_moment_and_goes(output: OutputDirectory) -> None:
    written(output.path / "kept")
    fd = os.open(output.path, os.O_RDONLY)
    for _ in range(800):  # its path is longer than any system call takes
        os.mkdir("deeper", dir_fd=fd)
        below = os.open("deeper", os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = below
    os.close(fd)
    with opened(output.path, output.root) as top:
        assert top is not None
        assert sum(one.kind is Kind.TOO_DEEP for one in entries(top)) == 1
    assert output.trim(1 << 30).removed.files == 1
    assert (output.path / "kept").exists()
    assert len(left(output)) == directories.DEEPEST
    output.remove()
    assert not output.path.exists()


def test_many_files_are_bounded_look_by_look(output: OutputDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directories, "LOOK_AT", 200)
    for number in range(500):
        (output.path / str(number)).touch()
    looks = 0
    while output.trim(None, most_entries=100).removed.files:
        looks += 1
    assert 3 <= looks <= 5
    assert len(left(output)) <= 100


def test_directory_that_is_read_only_goes(output: OutputDirectory) -> None:
    written(output.path / "locked" / "x")
    (output.path / "locked").chmod(0o500)
    output.trim(0)
    assert left(output) == {"locked"}
    output.remove()
    assert not output.path.exists()


def test_removal_that_fails_says_why(output: OutputDirectory, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    for name in ("rm", "chmod"):
        (tmp_path / "bin" / name).write_text("#!/bin/sh\necho the disk is read-only >&2\nexit 1\n")
        (tmp_path / "bin" / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    with pytest.raises(OSError, match="the disk is read-only"):
        output.remove()


def test_unused_directory_goes_and_one_that_was_used_stays(output: OutputDirectory) -> None:
    written(output.path / "x")
    output.remove_if_unused()
    assert output.path.exists()
    output.trim(0)
    output.remove_if_unused()
    assert output.path.exists(), "somebody may ask what was removed"
    other = OutputDirectory.of(output.root, TaskAttemptId("other", 0, 1))
    other.create()
    other.remove_if_unused()
    assert not other.path.parent.exists()


def test_kept_outputs_are_found_with_size_and_time_and_nothing_else_is(output: OutputDirectory) -> None:
    written(output.path / "x", 100)
    (output.root / "stray").write_text("x")
    (output.path.parent / "notes").mkdir()
    (found,) = kept_outputs(output.root)
    assert found.of == output
    assert found.bytes >= 100 * KB
    assert time.time() - 60 < found.changed_at < time.time() + 1


@pytest.fixture
def full(tmp_path: Path) -> Iterator[OutputDirectory]:
    """On a file system of 1 MB that is full."""
    place = tmp_path / "small"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", place], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("mounting a file system takes root")
    try:
        made = OutputDirectory.of(place / "outputs", TaskAttemptId("job", 0, 1))
        made.create()
        with pytest.raises(OSError, match="No space left"):
            (made.path / "x").write_bytes(bytes(2 << 20))
        yield made
    finally:
        subprocess.run(["umount", place], check=True)


def test_full_disk_is_made_room_on(full: OutputDirectory) -> None:
    assert full.trim(100 * KB).removed.files == 1
    assert left(full) == set()
    assert full.removed().files == 1


def test_full_disk_costs_the_attempt_that_fills_it(output: OutputDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    """However young the directories of other attempts are: those of the last hour stay."""
    for name in ("a", "b", "c"):
        written(output.path / name)
    real = os.statvfs(output.path)
    fields = list(real)
    fields[4] = real.f_blocks // FREE - 100 * KB // real.f_frsize  # f_bavail: 100 kB too little
    monkeypatch.setattr(os, "fstatvfs", lambda fd: os.statvfs_result(fields))
    assert output.trim(None) == Trimmed(Removed()), "a few megabytes are never in the way"
    monkeypatch.setattr(core, "ON_FULL_DISK", 0)
    assert output.trim(None).removed.files == 2
    assert left(output) == {"c"}


# -- a program that works on its directory meanwhile -------------------------------------------------------------------


def test_directory_is_created_while_other_attempts_of_the_job_end_beside_it(tmp_path: Path) -> None:
    mine, other = (OutputDirectory.of(tmp_path / "outputs", TaskAttemptId("job", i, 1)) for i in (0, 1))
    ended = threading.Event()

    def end_again_and_again() -> None:
        while not ended.is_set():
            other.create()
            other.remove_if_unused()

    ending = threading.Thread(target=end_again_and_again)
    ending.start()
    try:
        until = time.monotonic() + 2.0
        while time.monotonic() < until:
            mine.create()
            assert mine.path.is_dir()
            mine.remove_if_unused()
    finally:
        ended.set()
        ending.join()


@pytest.mark.parametrize("level", ["root", "job", "name"])
def test_directory_is_not_created_behind_a_link(tmp_path: Path, level: str) -> None:
    """Files there would be neither bounded nor listed."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    made = OutputDirectory.of(tmp_path / "outputs", TaskAttemptId("job", 0, 1))
    path = {"root": made.root, "job": made.path.parent, "name": made.path}[level]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(elsewhere)
    with pytest.raises(OSError, match=r"Not a directory|Too many levels"):
        made.create()
    assert list(elsewhere.iterdir()) == []


def test_file_that_is_replaced_meanwhile_stays(output: OutputDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that keeps its latest state in one file replaces the oldest file by the newest."""
    written(output.path / "latest")
    written(output.path / "other")

    def replaced(directory: Path) -> set[tuple[int, int]]:
        written(output.path / "next").replace(output.path / "latest")
        return files_being_written(directory)

    monkeypatch.setattr(directories, "files_being_written", replaced)
    assert output.trim(100 * KB) == Trimmed(Removed())
    assert left(output) == {"latest", "other"}
    monkeypatch.undo()
    assert output.trim(100 * KB).removed.files == 1, "the next look knows it"
    assert left(output) == {"latest"}


def test_hard_links_go_together(output: OutputDirectory) -> None:
    first = written(output.path / "a")
    os.link(first, output.path / "b")
    os.link(first, output.path / "c")
    written(output.path / "d")
    assert output.trim(150 * KB) == Trimmed(Removed())
    assert output.trim(100 * KB) == Trimmed(Removed(3, 64 * KB))
    assert left(output) == {"d"}


def test_many_directories_that_are_older_than_their_files_are_bounded(output: OutputDirectory) -> None:
    for number in range(60):
        (output.path / str(number)).mkdir()
        (output.path / str(number) / "x").touch()
    for number in range(60):
        (output.path / str(number) / "x").write_text("later")
    looks = 0
    while output.trim(None, most_entries=50).removed.files:
        looks += 1
    assert looks == 1
    assert len(left(output)) == 50


# -- what is mounted there ---------------------------------------------------------------------------------------------


@pytest.fixture(params=["another file system", "a directory of the same one"])
def mounted(request: pytest.FixtureRequest, output: OutputDirectory, tmp_path: Path) -> Iterator[Path]:
    """What a task's program has mounted in its output directory, such as a bucket; its name has a space."""
    elsewhere, place = tmp_path / "elsewhere", output.path / "a bucket"
    elsewhere.mkdir()
    place.mkdir()
    kind = ["-t", "tmpfs", "tmpfs"] if request.param.startswith("another") else ["--bind", str(elsewhere)]
    if subprocess.run(["mount", *kind, place], capture_output=True, check=False).returncode:
        pytest.skip("mounting takes root")
    try:
        written(place / "of the bucket")
        yield place
    finally:
        subprocess.run(["umount", place], check=True)


def test_what_is_mounted_is_neither_counted_nor_removed(output: OutputDirectory, mounted: Path) -> None:
    own = written(output.path / "own")
    assert left(output) == {"own"}
    assert output.trim(0, 0).removed.files == 1
    with pytest.raises(OSError, match=r"something is mounted at .*a bucket; unmount it"):
        output.remove()
    assert (mounted / "of the bucket").exists()
    assert not own.exists()


def test_directory_on_which_something_is_mounted_is_left_alone(output: OutputDirectory) -> None:
    if subprocess.run(["mount", "-t", "tmpfs", "tmpfs", output.path], capture_output=True, check=False).returncode:
        pytest.skip("mounting takes root")
    try:
        inside = written(output.path / "x")
        assert output.trim(0, 0) == Trimmed(Removed())
        assert list(kept_outputs(output.root)) == []
        with pytest.raises(OSError, match="something is mounted at"):
            output.remove()
        assert inside.exists()
    finally:
        subprocess.run(["umount", output.path], check=True)


def test_what_can_not_be_removed_is_told(output: OutputDirectory, tmp_path: Path) -> None:
    """Such as the files of a container's other account. Here, one on which a file is mounted."""
    written(output.path / "kept")
    written(tmp_path / "other")
    if subprocess.run(["mount", "--bind", tmp_path / "other", output.path / "kept"], check=False).returncode:
        pytest.skip("mounting takes root")
    try:
        assert output.trim(0) == Trimmed(Removed(), "'kept': Device or resource busy")
    finally:
        subprocess.run(["umount", output.path / "kept"], check=True)


# -- permissions, which don't count for root ---------------------------------------------------------------------------


@pytest.fixture
def not_roots() -> Iterator[OutputDirectory]:
    """Of an account that is not root."""
    place, is_root = Path(tempfile.mkdtemp(prefix="iris_ray-outputs-")), os.geteuid() == 0
    if is_root:
        os.chown(place, NOBODY, NOBODY)
        os.seteuid(NOBODY)
        ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 1)  # else /proc/self would be root's
    try:
        made = OutputDirectory.of(place / "outputs", TaskAttemptId("job", 0, 1))
        made.create()
        yield made
    finally:
        if is_root:
            os.seteuid(0)
        shutil.rmtree(place)


def test_directory_that_can_not_be_read_is_counted(not_roots: OutputDirectory) -> None:
    """A program could fill it all the same."""
    written(not_roots.path / "hidden" / "deep" / "x")
    (not_roots.path / "hidden" / "deep").chmod(0o300)
    (not_roots.path / "hidden").chmod(0)
    (kept,) = kept_outputs(not_roots.root)
    assert kept.bytes >= 64 * KB
    (not_roots.path / "hidden").chmod(0)
    assert not_roots.trim(0).removed.files == 1
    assert left(not_roots) == {"hidden", "hidden/deep"}


def test_files_in_a_read_only_directory_go(not_roots: OutputDirectory) -> None:
    written(not_roots.path / "locked" / "x")
    (not_roots.path / "locked").chmod(0o500)
    assert not_roots.trim(0) == Trimmed(Removed(1, 64 * KB))
    written(not_roots.path / "locked" / "y")
    (not_roots.path / "locked").chmod(0o500)
    not_roots.remove()
    assert not not_roots.path.exists()


def test_read_only_file_that_is_being_written_goes(not_roots: OutputDirectory) -> None:
    """It can't be emptied. As long as it grows, nobody sees that, but it is not kept for seven days."""
    path = not_roots.path / "log"
    with path.open("wb", buffering=0) as log:
        log.write(os.urandom(64 * KB))
        path.chmod(0o400)
        assert not_roots.trim(0) == Trimmed(Removed(1, 64 * KB))
        assert left(not_roots) == set()
