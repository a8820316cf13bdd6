"""Which files of a host are remembered as core dumps of tasks, and for how long."""

import os
import resource
import sys
from pathlib import Path

import pytest

from iris_ray.evidence import dumps
from iris_ray.evidence.dumps import DumpFile, prepare, remember, remembered
from tests.support.core_dumps import core_dump


@pytest.fixture
def dump(tmp_path: Path) -> Path:
    path = tmp_path / "cores of 100%" / "core.4711"
    path.parent.mkdir()
    path.write_bytes(core_dump())
    return path


def known(host: Path) -> list[str]:
    return [one.path for one in remembered(host)]


def test_core_dump_is_remembered_until_it_is_gone(dump: Path, tmp_path: Path) -> None:
    remember(tmp_path, [str(dump), str(tmp_path / "nothing")])
    remember(tmp_path, [f"{dump.parent}/../{dump.parent.name}/{dump.name}"])
    (found,) = remembered(tmp_path)
    assert (found.path, found.size) == (str(dump), 5000)
    assert found.bytes >= 5000
    found.remove()
    assert not dump.exists()
    assert known(tmp_path) == []
    assert list((tmp_path / "core-dumps").iterdir()) == []


@pytest.mark.parametrize(
    "content",
    [b"", b"step 1 loss 2.31\n", core_dump(kind=2), core_dump(10), Path(sys.executable).resolve().read_bytes()[:5000]],
    ids=["empty", "text", "program", "cut", "python"],
)
def test_file_that_only_has_the_name_of_a_core_dump_is_not_remembered(
    dump: Path, tmp_path: Path, content: bytes
) -> None:
    """A task may call its own files core.PID."""
    dump.write_bytes(content)
    remember(tmp_path, [str(dump)])
    assert known(tmp_path) == []


def test_core_dump_of_a_big_endian_machine_is_one(dump: Path, tmp_path: Path) -> None:
    dump.write_bytes(core_dump(order="big"))
    remember(tmp_path, [str(dump)])
    assert known(tmp_path) == [str(dump)]


def test_disk_that_the_dump_has_filled_takes_its_note(dump: Path, tmp_path: Path) -> None:
    prepare(tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            (tmp_path / "anything").write_bytes(b"x")
        remember(tmp_path, [str(dump)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert known(tmp_path) == [str(dump)]


def test_dump_whose_blocks_are_allocated_later_stays_known(dump: Path, tmp_path: Path) -> None:
    """Some file systems count the blocks of a file seconds after it was written."""
    os.truncate(dump, 1 << 20)
    remember(tmp_path, [str(dump)])
    (before,) = remembered(tmp_path)
    with dump.open("r+b") as file:
        file.seek(5000)
        file.write(b"x" * 500_000)
    os.utime(dump, ns=(before.changed_ns, before.changed_ns))
    (after,) = remembered(tmp_path)
    assert after.bytes > before.bytes


def test_what_was_replaced_meanwhile_is_not_removed(dump: Path, tmp_path: Path) -> None:
    remember(tmp_path, [str(dump)])
    (found,) = remembered(tmp_path)
    dump.rename(tmp_path / "kept")
    dump.write_bytes(core_dump())
    with pytest.raises(FileNotFoundError, match="it has been replaced"):
        found.remove()
    dump.unlink()
    dump.symlink_to(tmp_path / "kept")
    with pytest.raises(FileNotFoundError, match="it has been replaced"):
        found.remove()
    dump.unlink()
    dump.parent.rmdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "kept").rename(tmp_path / "other" / dump.name)
    dump.parent.symlink_to(tmp_path / "other")
    with pytest.raises(OSError, match=r"Not a directory|Too many levels"):
        found.remove()
    assert (tmp_path / "other" / dump.name).exists()


def test_what_is_no_note_is_forgotten_and_stops_nothing(dump: Path, tmp_path: Path) -> None:
    remember(tmp_path, [str(dump)])
    folder = tmp_path / "core-dumps"
    os.mkfifo(folder / "1-2-3-4-pipe")
    (folder / "x-2-3-4-%2Ftmp").touch()
    (folder / "1-2").write_bytes(b"[" * 100_000)
    (folder / "1-2-3-4-").mkdir()
    assert known(tmp_path) == [str(dump)]
    assert len(list(folder.iterdir())) == 2, "a directory stays"


@pytest.mark.parametrize(
    ("system", "is_one"), [("ext4", True), ("overlay", True), ("nfs4", False), ("fuse.gcsfuse", False), ("", False)]
)
def test_dump_on_a_disk_of_several_machines_is_not_remembered(
    dump: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, system: str, is_one: bool
) -> None:
    """The same process number may be that of another machine's process there."""
    where = str(dump.parent).replace(" ", r"\040")
    lines = ["1 0 8:1 / / rw - xfs disk rw"] * bool(system)
    lines += [f"2 1 0:9 / {where} rw shared:3 - {system} server rw", f"3 1 0:9 / {where}2 rw - xfs disk rw"]
    (tmp_path / "mounts").write_text("\n".join(lines[: None if system else 0]))
    monkeypatch.setattr(dumps, "MOUNTS", tmp_path / "mounts")
    remember(tmp_path, [str(dump)])
    assert known(tmp_path) == [str(dump)] * is_one


def test_dump_whose_path_is_too_long_for_a_name_is_left_alone(tmp_path: Path) -> None:
    dump = tmp_path / ("d" * 200) / ("c" * 100)
    dump.parent.mkdir()
    dump.write_bytes(core_dump())
    remember(tmp_path, [str(dump)])
    assert known(tmp_path) == []


@pytest.mark.parametrize("path", ["/a/core.1", "/100%/%2F/a-b--c/core.1", "/\udcff/core", "/core"])
def test_note_tells_the_whole_file(path: str) -> None:
    file = DumpFile(path, 2049, 77, 10**18 + 1, 2**40)
    assert "/" not in file.note
    assert DumpFile.of_note(file.note) == file
