"""How files keep what tasks print: bounded, private, and read while they are written."""

import contextlib
import errno
import os
import stat
import threading
import time
from pathlib import Path

import pytest

from iris_ray.logs.files import RETRY_BYTES, AttemptLog, LogWriter, prune


@pytest.fixture
def log(tmp_path: Path) -> AttemptLog:
    return AttemptLog(tmp_path / "logs", "job-1", 3, 1)


def read_all(log: AttemptLog, offset: int = 0, limit: int = 7) -> tuple[int, bytes]:
    piece = log.read(offset, limit)
    assert piece is not None
    begin, data = piece.offset, b""
    while piece.data:
        data += piece.data
        piece = log.read(begin + len(data), limit)
        assert piece is not None
    return begin, data


def test_log_files_are_bounded_and_offsets_go_on(log: AttemptLog) -> None:
    writer = LogWriter(log, file_bytes=10, files_kept=3)
    whole = b""
    for number in range(40):
        piece = b"<%d>" % number
        writer.write(piece)
        whole += piece
    writer.write(b"a piece that is longer than a file")
    whole += b"a piece that is longer than a file"
    writer.close()
    sizes = [path.stat().st_size for _, path in log.files()]
    assert len(sizes) == 3
    assert max(sizes) <= 10
    assert writer.end == len(whole)
    begin, data = read_all(log)
    assert begin > 0
    assert data == whole[begin:]
    assert log.read(begin + 2, 5).data == whole[begin + 2 : begin + 7]  # type: ignore[union-attr]
    past_the_end = log.read(10**9, 5)
    assert past_the_end is not None
    assert (past_the_end.offset, past_the_end.data, past_the_end.end) == (len(whole), b"", len(whole))


def test_reader_continues_while_log_is_written(log: AttemptLog) -> None:
    writer = LogWriter(log, file_bytes=64, files_kept=100)
    seen, written = b"", b""
    for number in range(100):
        writer.write(b"line %d\n" % number)
        written += b"line %d\n" % number
        piece = log.read(len(seen), 1000)
        assert piece is not None
        seen += piece.data
    writer.close()
    assert seen == written


@pytest.mark.parametrize(("count", "last"), [(0, b""), (1, b"99\n"), (3, b"97\n98\n99\n"), (1000, None)])
@pytest.mark.parametrize("file_bytes", [7, 1000])
def test_tail_gives_the_last_lines_across_files(
    log: AttemptLog, count: int, last: bytes | None, file_bytes: int
) -> None:
    writer = LogWriter(log, file_bytes=file_bytes, files_kept=1000)
    writer.write(b"".join(b"%d\n" % n for n in range(100)))
    writer.close()
    piece = log.tail(count, 1 << 20)
    assert piece is not None
    assert piece.data == (b"".join(b"%d\n" % n for n in range(100)) if last is None else last)
    assert piece.offset + len(piece.data) == piece.end


def test_tail_of_one_huge_line_is_bounded(log: AttemptLog) -> None:
    writer = LogWriter(log)
    writer.write(b"x" * 100_000)
    writer.close()
    piece = log.tail(5, 1000)
    assert piece is not None
    assert len(piece.data) == 1000


def test_missing_log_is_none_and_empty_log_is_empty(log: AttemptLog) -> None:
    assert log.read(0, 10) is None
    assert log.tail(1, 10) is None
    writer = LogWriter(log)
    writer.begin()
    writer.close()
    piece = log.read(0, 10)
    assert piece is not None
    assert (piece.data, piece.end) == (b"", 0)


def test_log_files_are_private_whatever_the_job_name(tmp_path: Path) -> None:
    for job_id in ("../../etc", "a/b", "..", "x" * 1000):
        log = AttemptLog(tmp_path / "logs", job_id, 0, 1)
        writer = LogWriter(log)
        writer.write(b"secret")
        writer.close()
        (path,) = (path for _, path in log.files())
        assert path.parent.parent == tmp_path / "logs"
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_full_disk_raises_nothing_and_later_output_is_kept(log: AttemptLog) -> None:
    log.root.mkdir()
    log.directory.touch()  # in the place of the directory
    writer = LogWriter(log, file_bytes=1 << 22)
    writer.write(b"lost")
    assert writer.problem
    log.directory.unlink()
    writer.write(b"x" * (1 << 20))
    writer.write(b"kept")
    writer.close()
    piece = log.read(0, 1 << 22)
    assert piece is not None
    assert piece.offset > 0
    assert piece.data.endswith(b"xkept")
    assert piece.end == 4 + (1 << 20) + 4


def test_disk_error_at_close_loses_no_later_line(log: AttemptLog, monkeypatch: pytest.MonkeyPatch) -> None:
    """As NFS does; the kernel has closed the descriptor all the same."""
    close = os.close

    def close_late(fd: int) -> None:
        close(fd)
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    writer = LogWriter(log, file_bytes=4)
    monkeypatch.setattr(os, "close", close_late)
    writer.write(b"one\ntwo\n")
    assert writer.problem == "[Errno 122] Disk quota exceeded"
    writer.close()
    monkeypatch.undo()
    writer.write(b"more")
    writer.close()
    assert read_all(log) == (0, b"one\ntwo\nmore")


def test_full_disk_loses_no_earlier_line(log: AttemptLog, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a disk still lets files be created. These are empty, and push out none that has something to say."""

    def refuse(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    writer = LogWriter(log)
    writer.write(b"the cause\n")
    with monkeypatch.context() as full:
        full.setattr(os, "write", refuse)
        for _ in range(10):
            writer.write(b"x" * RETRY_BYTES)
    writer.write(b"y" * RETRY_BYTES)
    writer.close()
    first = log.read(0, 100)
    assert first is not None
    assert (first.offset, first.data) == (0, b"the cause\n")
    then = log.read(10, 100)
    assert then is not None
    assert then.data == b"y" * 100


def test_output_continues_in_new_file_after_log_deletion(log: AttemptLog) -> None:
    """Other tasks of a shared host print so much that the file of a quiet one is the oldest."""
    quiet = LogWriter(log)
    quiet.write(b"step 1\n")
    noisy = LogWriter(AttemptLog(log.root, "job-2", 0, 1))
    noisy.write(b"x" * 100)
    os.utime(log.file(0), (0, 0))
    prune(log.root, time.time(), most_bytes=100)
    assert log.read(0, 100) is None
    quiet.write(b"step 2\n")
    quiet.write(b"step 3\n")
    for writer in (quiet, noisy):
        writer.close()
    piece = log.read(0, 100)
    assert piece is not None
    assert (piece.offset, piece.data, piece.end) == (7, b"step 2\nstep 3\n", 21)


def test_hole_left_by_full_disk_is_skipped(log: AttemptLog) -> None:
    for offset, data in ((0, b"before"), (100, b"behind")):
        writer = LogWriter(log)
        writer.end = writer._next_file = offset
        writer.write(data)
        writer.close()
    first = log.read(0, 1000)
    assert first is not None
    assert (first.data, first.end) == (b"before", 106)
    then = log.read(6, 1000)
    assert then is not None
    assert (then.offset, then.data) == (100, b"behind")


def test_prune_deletes_old_then_oldest_never_newest(tmp_path: Path) -> None:
    now = 1_000_000.0
    for number, age in enumerate((900.0, 50.0, 40.0, 30.0, 0.0)):
        log = AttemptLog(tmp_path, f"job-{number}", 0, 1)
        writer = LogWriter(log)
        writer.write(b"x" * 100)
        writer.close()
        os.utime(log.file(0), (now - age, now - age))
    prune(tmp_path, now, most_bytes=250, kept_s=500.0)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["job-3", "job-4"]
    LogWriter(AttemptLog(tmp_path, "job-5", 0, 1)).begin()
    prune(tmp_path, time.time(), most_files=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["job-5"], "the others are of 1970"
    LogWriter(AttemptLog(tmp_path, "job-6", 0, 1)).begin()
    LogWriter(AttemptLog(tmp_path, "job-7", 0, 1)).begin()
    prune(tmp_path, time.time(), most_files=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["job-6", "job-7"]


def test_prune_keeps_newest_log_however_large(tmp_path: Path) -> None:
    now = 1_000_000.0
    for number in (3, 4):
        log = AttemptLog(tmp_path, f"job-{number}", 0, 1)
        writer = LogWriter(log)
        writer.write(b"x" * 100)
        writer.close()
        os.utime(log.file(0), (now + number, now + number))
    prune(tmp_path, now, most_bytes=1, kept_s=500.0)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["job-4"]


def test_jobs_with_long_names_have_separate_logs(tmp_path: Path) -> None:
    """Ids differ at their end, behind a name of up to 100 characters; each may take nine bytes in a file name."""
    names = {AttemptLog(tmp_path, "世" * 100 + end, 0, 1).directory.name for end in ("-1a2b", "-3c4d")}
    assert len(names) == 2
    assert all(len(name) <= 255 for name in names)


def test_prune_tolerates_concurrent_removals(tmp_path: Path) -> None:
    """All tasks of a gang prune when they begin their files, and remove empty directories of jobs."""
    writer = LogWriter(AttemptLog(tmp_path, "kept", 0, 1))
    writer.write(b"a line")
    writer.close()
    over = threading.Event()

    def make_and_remove(name: str) -> None:
        while not over.is_set():
            (tmp_path / name).mkdir(exist_ok=True)
            with contextlib.suppress(FileNotFoundError):  # `prune` was first
                (tmp_path / name).rmdir()

    others = [threading.Thread(target=make_and_remove, args=(f"job-{number}",)) for number in range(3)]
    for other in others:
        other.start()
    try:
        for _ in range(10_000):
            prune(tmp_path, time.time())
    finally:
        over.set()
        for other in others:
            other.join()
    assert [path.name for path in tmp_path.iterdir() if not path.name.startswith("job-")] == ["kept"]
