"""Logs are copied to a directory that outlives their host, while they grow and at their end."""

import errno
import io
import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from iris_ray.logs import archive as log_archive
from iris_ray.logs.archive import LogCopier, copy, copy_left
from iris_ray.logs.files import AttemptLog, LogWriter
from tests.support.waiting import wait_until


@pytest.fixture
def log(tmp_path: Path) -> AttemptLog:
    return AttemptLog(tmp_path / "host", "train", 3, 1)


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    (tmp_path / "archive").mkdir()
    return tmp_path / "archive"


def contents(log: AttemptLog, archive: Path) -> bytes:
    piece = AttemptLog(archive, log.job_id, log.task_index, log.attempt).read(0, 1 << 20)
    return b"" if piece is None else piece.data


def test_copy_appends_what_is_new_in_every_file(log: AttemptLog, archive: Path) -> None:
    writer, text = LogWriter(log, file_bytes=10), b""
    for part in (b"one", b"two and three", b"", b"four" * 5):
        writer.write(part)
        text += part
        for _ in range(2):
            copy([path for _, path in log.files()], archive)
        assert contents(log, archive) == text
    writer.close()
    names = [path.name for _, path in log.files()]
    assert {*names} <= {path.name for path in (archive / "train").iterdir()}, "also those that the host has deleted"


def test_output_is_copied_while_it_grows_and_at_its_end(
    log: AttemptLog, archive: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_archive, "COPY_S", 0.05)
    writer, copier = LogWriter(log), LogCopier(log, archive)
    writer.write(b"first")
    wait_until(lambda: contents(log, archive) == b"first")
    monkeypatch.setattr(log_archive, "COPY_S", 60.0)
    writer.write(b", last words")
    writer.close()
    copier.close()
    wait_until(lambda: contents(log, archive) == b"first, last words")


def test_archive_that_is_away_is_said_once_and_filled_later(
    log: AttemptLog, archive: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(log_archive, "COPY_S", 0.02)
    caplog.set_level(logging.WARNING)
    shutil.rmtree(archive)
    writer = LogWriter(log)
    writer.write(b"kept")
    writer.close()
    LogCopier(log, archive).close()
    wait_until(lambda: caplog.records)
    archive.mkdir()
    wait_until(lambda: contents(log, archive) == b"kept")
    assert [record.getMessage().count("mount it") for record in caplog.records] == [1]


def test_write_whose_answer_is_lost_doubles_nothing(
    log: AttemptLog, archive: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class File(io.FileIO):
        has_failed = False

        def write(self, data: Any, /) -> int:
            written = super().write(data)
            if not self.has_failed:
                self.has_failed = True
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return written

    opened = Path.open

    def broken(path: Path, mode: str = "r", buffering: int = -1) -> Any:
        file = File(path, mode) if archive in path.parents else opened(path, mode, buffering)
        return io.BufferedWriter(file) if archive in path.parents and buffering else file

    writer = LogWriter(log)
    writer.write(b"words" * 4000)
    files = [path for _, path in log.files()]
    with monkeypatch.context() as patch:
        patch.setattr(log_archive, "CHUNK_BYTES", 8192)
        patch.setattr(Path, "open", broken)
        with pytest.raises(OSError, match="Input/output"):
            copy(files, archive)
    copy(files, archive)
    assert contents(log, archive) == b"words" * 4000


KILLED = """
import os, pathlib, sys
from iris_ray.logs.archive import LogCopier
from iris_ray.logs.files import AttemptLog, LogWriter
root, archive = map(pathlib.Path, sys.argv[1:])
log = AttemptLog(root, "train", 3, 1)
LogCopier(log, archive)
LogWriter(log).write(b"last words")
os._exit(1)
"""


def test_next_process_copies_what_a_killed_one_has_left(log: AttemptLog, archive: Path) -> None:
    subprocess.run([sys.executable, "-c", KILLED, str(log.root), str(archive)], check=False)
    assert contents(log, archive) == b""
    copy_left(log.root, archive)
    assert contents(log, archive) == b"last words"
    assert [path.suffix for path in log.directory.iterdir()] == [".log"]


def test_what_a_living_process_copies_is_left_to_it(log: AttemptLog, archive: Path) -> None:
    copier, writer = LogCopier(log, archive), LogWriter(log)
    writer.write(b"words")
    copy_left(log.root, archive)
    assert contents(log, archive) == b""
    copier.close()
    wait_until(lambda: [path.suffix for path in log.directory.iterdir()] == [".log"])
    assert contents(log, archive) == b"words"
