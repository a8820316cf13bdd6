"""Logs are copied to a directory that outlives their host, while they grow and at their end."""

import logging
import shutil
from pathlib import Path

import pytest

from iris_ray.logs import archive as log_archive
from iris_ray.logs.archive import LogCopier, copy
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
            copy(log, archive)
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
