"""Listing and sending output files: everything that is there, and nothing from elsewhere."""

import errno
import io
import os
import tarfile
from pathlib import Path
from typing import Any

import pytest

from iris_ray.errors import InvalidRequestError
from iris_ray.model.lifecycle import TaskAttemptId
from iris_ray.outputs import sending
from iris_ray.outputs.directory import OutputDirectory
from iris_ray.outputs.sending import PIECE_BYTES, LeftOut, checked, listing, packed


@pytest.fixture
def output(tmp_path: Path) -> OutputDirectory:
    made = OutputDirectory.of(tmp_path / "outputs", TaskAttemptId("job", 0, 1))
    made.create()
    (made.path / "traces").mkdir()
    (made.path / "traces" / "host.pb").write_bytes(os.urandom(3000))
    (made.path / "loss.json").write_text("{}")
    return made


def received(output: OutputDirectory, to: Path, path: str = "") -> Path:
    """Unpack what is sent, as `iris-ray cp` does."""
    pieces = list(packed(output, path))
    assert all(len(piece) < PIECE_BYTES + (1 << 20) for piece in pieces)
    with tarfile.open(fileobj=io.BytesIO(b"".join(pieces))) as files:
        files.extractall(to, filter="data")
    return to / "copied"


def test_all_is_sent_byte_by_byte(output: OutputDirectory, tmp_path: Path) -> None:
    large = os.urandom(9_000_000)
    (output.path / "large").write_bytes(large)
    os.utime(output.path / "large", (1e9, 1e9))
    odd = os.fsdecode(b"odd \xff name\n" + 120 * "ü".encode())
    (output.path / odd).write_text("odd")
    (output.path / "empty").mkdir()
    (output.path / "link").symlink_to("traces/host.pb")
    os.link(output.path / "large", output.path / "same")
    there = received(output, tmp_path / "there")
    assert (there / "large").read_bytes() == (there / "same").read_bytes() == large
    assert (there / "large").stat().st_mtime == 1e9
    assert (there / odd).read_text() == "odd"
    assert (there / "empty").is_dir()
    assert (there / "link").read_bytes() == (output.path / "traces" / "host.pb").read_bytes()
    assert sum(map(len, packed(output))) < 9_100_000, "a hard link is sent once"


def test_a_file_or_a_directory_is_sent_alone(output: OutputDirectory, tmp_path: Path) -> None:
    assert received(output, tmp_path / "1", "loss.json").read_text() == "{}"
    assert [one.name for one in received(output, tmp_path / "2", "./traces/").iterdir()] == ["host.pb"]


@pytest.mark.parametrize("path", ["nothing", "nothing/x", "loss.json/x"])
def test_what_is_not_there_is_not_found(output: OutputDirectory, path: str) -> None:
    with pytest.raises(FileNotFoundError):
        list(packed(output, path))


@pytest.mark.parametrize("path", ["..", "../../x", "traces/../../x", "/etc/passwd", "a\0b"])
def test_path_out_of_the_directory_is_refused(output: OutputDirectory, path: str) -> None:
    for ask in (checked, lambda path: list(packed(output, path)), lambda path: listing(output, path)):
        with pytest.raises(InvalidRequestError, match="within the task's output directory"):
            ask(path)


def test_nothing_is_read_through_a_link(output: OutputDirectory, tmp_path: Path) -> None:
    secret = tmp_path / "elsewhere" / "secret"
    secret.parent.mkdir()
    secret.write_text("another user's")
    (output.path / "out").symlink_to(secret.parent)
    (output.path / "file").symlink_to(secret)
    with pytest.raises(FileNotFoundError):
        list(packed(output, "out/secret"))
    assert b"another user's" not in b"".join(packed(output))
    with pytest.raises(InvalidRequestError, match="is a link"):
        list(packed(output, "file"))
    assert listing(output, "out") is None
    found = listing(output)
    assert found is not None
    assert [one.path for one in found.files] == ["loss.json", "traces/host.pb"]


@pytest.mark.timeout(60)
def test_fifos_and_holes_are_left_out(output: OutputDirectory) -> None:
    os.mkfifo(output.path / "fifo")
    with (output.path / "holes").open("wb") as file:
        file.truncate(1 << 40)
    with tarfile.open(fileobj=io.BytesIO(b"".join(packed(output)))) as files:
        assert {name.partition("/")[2] for name in files.getnames()} == {"", "traces", "traces/host.pb", "loss.json"}


def test_file_that_becomes_shorter_while_it_is_sent_keeps_the_stream_whole(
    output: OutputDirectory, tmp_path: Path
) -> None:
    path = output.path / "log"
    path.write_bytes(b"x" * (2 * PIECE_BYTES))
    stream = packed(output, "log")
    first = next(stream)
    os.truncate(path, 10)
    with tarfile.open(fileobj=io.BytesIO(b"".join([first, *stream]))) as files:
        files.extractall(tmp_path / "there", filter="data")
    assert (tmp_path / "there" / "copied").stat().st_size == 2 * PIECE_BYTES


def test_list_has_a_limit_and_counts_all(output: OutputDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sending, "MOST_LISTED", 10)
    for number in range(30):
        (output.path / f"{number:02d}").write_text("x")
    found, within = listing(output), listing(output, "traces")
    assert found is not None
    assert (len(found.files), found.count, found.removed.files) == (10, 32, 0)
    assert within is not None
    assert [one.path for one in within.files] == ["traces/host.pb"]
    output.trim(None, most_entries=20)
    left = listing(output)
    assert left is not None
    assert (left.removed.files >= 12, left.count <= 20) == (True, True)


def test_what_is_left_out_is_counted_and_named(output: OutputDirectory) -> None:
    os.mkfifo(output.path / "fifo")
    with (output.path / "holes").open("wb") as file:
        file.truncate(1 << 40)
    left_out = LeftOut()
    list(packed(output, "", left_out))
    assert left_out.count == 2
    assert "'fifo': it is neither a file" in left_out.first or "'holes': it is mostly holes" in left_out.first


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("fifo", "'fifo': it is neither a file nor"),
        ("holes", "'holes': it is mostly holes: 0 of 1,099,511,627,776 bytes"),
        ("latest", "'latest' is a link to 'traces/host.pb'; name what it leads to"),
    ],
)
def test_file_of_a_kind_that_is_not_sent_is_refused(output: OutputDirectory, name: str, why: str) -> None:
    os.mkfifo(output.path / "fifo")
    (output.path / "latest").symlink_to("traces/host.pb")
    with (output.path / "holes").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(InvalidRequestError, match=why):
        list(packed(output, name))


class FaultyFile(io.FileIO):
    """Fails after its first byte, as a file on a faulty disk does."""

    def read(self, size: int | None = -1, /) -> bytes | Any:
        if self.tell():
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return super().read(1)


def test_file_that_can_not_be_read_to_its_end_fails_the_copy(
    output: OutputDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its header is sent. If the next file followed, its receiver would take that for the rest of this one."""
    monkeypatch.setattr(sending, "FileIO", FaultyFile)
    with pytest.raises(InvalidRequestError, match=r"can't be read to its end: Input/output error"):
        list(packed(output))


def test_file_is_listed_alone(output: OutputDirectory) -> None:
    for path in ("loss.json", "traces/host.pb"):
        found = listing(output, path)
        assert found is not None
        assert [one.path for one in found.files] == [path]
    assert listing(output, "nothing") is None
