"""The file service of a host, asked over real sockets, by its own client and by strange ones."""

import contextlib
import errno
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path

import pytest

from iris_ray.actors.host.directories import LocalDirectories
from iris_ray.actors.protocol.task_files import JobDirectory
from iris_ray.checkpoint import host
from iris_ray.checkpoint.host import CHUNK_BYTES, MOST_STRANGERS, FileService
from tests.support.waiting import wait_until

HOST, TOKEN = "127.0.0.9", "5ec2e7"
ROOM = 10 * CHUNK_BYTES
SILENCE_S = 0.5


class Served:
    """A host with the directory of one job.

    Attributes:
        files: the job's ``local_dir``.
        room: bytes that still fit.
    """

    def __init__(self, disk: Path) -> None:
        self.directories = LocalDirectories(disk, None)
        self.files = self.directories.take("job", TOKEN)
        self.room = ROOM
        self.service = FileService(HOST, self.directories, lambda _: self.room, SILENCE_S)
        self.port = int(self.service.address.rpartition(":")[2])

    @property
    def incoming(self) -> list[Path]:
        """What is neither there nor gone."""
        directory = JobDirectory.of_local_dir(str(self.files)).incoming
        return list(directory.iterdir()) if directory.exists() else []

    def ask(
        self, method: str, target: str, body: bytes | None = None, token: str = TOKEN, **headers: str
    ) -> tuple[int, bytes]:
        """Return the status and the body of an answer."""
        connection = HTTPConnection(HOST, self.port, timeout=5.0)
        try:
            connection.request(method, target, body, {"Authorization": f"Bearer {token}", **headers})
            response: HTTPResponse = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    def begin(self, path: str, size: int, token: str = TOKEN) -> socket.socket:
        """Announce a file, and return the connection over which its content is to come."""
        connection = socket.create_connection((HOST, self.port), timeout=5.0)
        head = f"PUT /files/{path} HTTP/1.1\r\nAuthorization: Bearer {token}\r\nContent-Length: {size}\r\n\r\n"
        connection.sendall(head.encode())
        return connection


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    (tmp_path / "disk").mkdir()
    (tmp_path / "disk" / "secret").write_text("of somebody else")
    served = Served(tmp_path / "disk")
    yield served
    served.service.stop()
    assert (tmp_path / "disk" / "secret").read_text() == "of somebody else"


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 5.0
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


# -- what it does ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wanted", "answer"),
    [
        ("bytes=0-0", (206, b"0")),
        ("bytes=8-99", (206, b"89")),
        ("bytes=10-11", (416, b"it has 10 bytes")),
        ("bytes=-3", (416, b"only ranges such as bytes=0-9 are served")),
    ],
)
def test_ranges_end_with_the_file(served: Served, wanted: str, answer: tuple[int, bytes]) -> None:
    (served.files / "digits").write_bytes(b"0123456789")
    assert served.ask("GET", "/files/digits", Range=wanted) == answer


def test_concurrent_writers_of_one_path_leave_one_whole_file(served: Served) -> None:
    contents = [bytes([i]) * (CHUNK_BYTES + i) for i in range(4)]

    def write(content: bytes) -> None:
        for _ in range(5):
            assert served.ask("PUT", "/files/same/path", content)[0] == 201

    threads = [threading.Thread(target=write, args=(content,)) for content in contents]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        status, seen = served.ask("GET", "/files/same/path")
        assert (status, seen in contents) in ((200, True), (404, False))
    assert (served.files / "same" / "path").read_bytes() in contents
    assert served.incoming == []


# -- who and what it refuses -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE"])
@pytest.mark.parametrize("token", ["", "wrong", "\xff", TOKEN + "0", TOKEN[:-1]])
def test_request_without_jobs_token_is_refused(served: Served, method: str, token: str) -> None:
    (served.files / "file").write_text("mine")
    body = b"theirs" if method == "PUT" else None
    assert served.ask(method, "/files/file", body, token)[0] == 403
    assert served.ask("GET", "/list/", token=token)[0] == 403
    assert (served.files / "file").read_text() == "mine"


def test_job_without_token_is_served_to_nobody(tmp_path: Path) -> None:
    directories = LocalDirectories(tmp_path, None)
    (directories.take("job") / "file").touch()
    service = FileService(HOST, directories)
    connection = HTTPConnection(service.address, timeout=5.0)
    connection.request("GET", "/files/file", headers={"Authorization": "Bearer "})
    assert connection.getresponse().status == 403
    connection.close()
    service.stop()


@pytest.mark.parametrize(
    "path",
    [
        "..",
        "../token",
        "../../../secret",
        "a/../../token",
        "%2e%2e/token",
        "..%2ftoken",
        "/etc/passwd",
        "%2Fetc/passwd",
        "a//b",
        "a/",
        "a/.",
        "",
        "a%00b",
    ],
)
@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE"])
def test_path_that_could_lead_elsewhere_is_refused(served: Served, method: str, path: str) -> None:
    (served.files / "a").mkdir()
    assert served.ask(method, f"/files/{path}", b"x" if method == "PUT" else None)[0] == 400
    assert [*served.files.iterdir()] == [served.files / "a"]


@pytest.mark.parametrize("path", ["link/secret", "link", "to-file"])
@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE"])
def test_links_lead_nowhere(served: Served, tmp_path: Path, method: str, path: str) -> None:
    """The fixture sees that the file behind them stays."""
    (served.files / "link").symlink_to(tmp_path / "disk")
    (served.files / "to-file").symlink_to(tmp_path / "disk" / "secret")
    assert json.loads(served.ask("GET", "/list/")[1]) == {}
    assert json.loads(served.ask("GET", "/list/link")[1]) == {}
    assert b"somebody" not in served.ask(method, f"/files/{path}", b"x" if method == "PUT" else None)[1]


def test_fifo_and_directory_are_no_files(served: Served) -> None:
    os.mkfifo(served.files / "fifo")
    (served.files / "directory").mkdir()
    assert served.ask("GET", "/files/fifo") == (409, b"it is not a file")
    assert served.ask("GET", "/files/directory") == (409, b"Is a directory")
    assert served.ask("PUT", "/files/directory", b"x") == (409, b"Is a directory")


@pytest.mark.parametrize("says", [b"", b"G", b"GET /files/file HTTP/1.1\r\nX-a: "])
def test_strangers_keep_nobody_out_however_many_they_are(served: Served, says: bytes) -> None:
    (served.files / "file").write_text("mine")
    with contextlib.ExitStack() as stack:
        for _ in range(MOST_STRANGERS + 50):
            stranger = stack.enter_context(socket.create_connection((HOST, served.port), 5.0))
            stranger.sendall(says)
        assert served.ask("GET", "/files/file") == (200, b"mine")
    assert served.ask("GET", "/files/file") == (200, b"mine")


@pytest.mark.parametrize("pause_s", [SILENCE_S / 5, 0.0])
def test_head_without_an_end_is_heard_for_a_moment_only(served: Served, pause_s: float) -> None:
    """Sent line by line, or as fast as it goes."""
    sent, began = 0, time.monotonic()
    with socket.create_connection((HOST, served.port), 5.0) as stranger, contextlib.suppress(ConnectionError):
        stranger.sendall(b"GET /files/file HTTP/1.1\r\n")
        while sent < 10_000_000 and time.monotonic() - began < 10 * SILENCE_S:
            sent += stranger.send(b"X: y\r\n" * (1 if pause_s else 1000))
            time.sleep(pause_s)
    assert sent < 10_000_000
    assert time.monotonic() - began < 4 * SILENCE_S


def test_file_that_does_not_fit_is_refused_before_it_is_sent(served: Served) -> None:
    with served.begin("big", ROOM + 1) as connection, connection.makefile("rb") as answer:
        assert answer.readline().startswith(b"HTTP/1.1 507")
        assert f"may grow by {ROOM} bytes".encode() in answer.read()
    assert served.ask("PUT", "/files/fits", bytes(ROOM))[0] == 201


def test_room_for_transfers_under_way_is_not_given_twice(served: Served) -> None:
    with served.begin("first", ROOM):
        until(lambda: len(served.incoming) == 1)
        assert served.ask("PUT", "/files/second", b"x")[0] == 507
    until(lambda: served.incoming == [])
    assert served.ask("PUT", "/files/second", b"x")[0] == 201


def test_disk_that_fills_up_during_a_transfer_is_told(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "rename", full)
    assert served.ask("PUT", "/files/file", b"x") == (507, b"No space left on device")
    assert served.incoming == []


# -- what is broken off ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("before", [None, b"the file before"])
@pytest.mark.parametrize("how", ["closed", "silent"])
def test_transfer_broken_off_leaves_what_was_there(served: Served, before: bytes | None, how: str) -> None:
    if before is not None:
        (served.files / "file").write_bytes(before)
    with served.begin("file", CHUNK_BYTES * 2) as connection:
        connection.sendall(bytes(CHUNK_BYTES + 5))
        until(lambda: [path.stat().st_size for path in served.incoming] == [CHUNK_BYTES])
        if how == "closed":
            connection.close()
        until(lambda: served.incoming == [])
    assert {path.name: path.read_bytes() for path in served.files.iterdir()} == ({"file": before} if before else {})


def test_next_service_removes_what_a_killed_one_left(served: Served) -> None:
    with served.begin("file", CHUNK_BYTES):
        until(lambda: len(served.incoming) == 1)
        FileService(HOST, served.directories).stop()
        assert served.incoming == []


def test_job_that_ends_during_transfers_leaves_nothing(served: Served, tmp_path: Path) -> None:
    os.close(served.directories._kept or 0)  # the task's process has ended
    with served.begin("deep/below/file", CHUNK_BYTES) as connection:
        connection.sendall(bytes(CHUNK_BYTES - 1))
        until(lambda: len(served.incoming) == 1)
        served.directories.remove("job")
        connection.sendall(b"x")
        assert connection.recv(1000).startswith(b"HTTP/1.1 404")
    assert served.ask("PUT", "/files/late", b"x")[0] == 403
    assert list((tmp_path / "disk" / "jobs").iterdir()) == []


def test_transfers_of_one_job_leave_room_for_those_of_another(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "MOST_TRANSFERS", 8)
    Path(served.directories.take("other", "its token")).joinpath("file").write_text("mine")
    service = FileService(HOST, served.directories)
    served.port = int(service.address.rpartition(":")[2])
    with contextlib.ExitStack() as slow:
        for number in range(16):
            slow.enter_context(served.begin(f"slow-{number}", 1000))
        wait_until(lambda: len(served.incoming) >= 4)
        assert served.ask("GET", "/files/file", token="its token") == (200, b"mine")
        assert len(served.incoming) == 4
    wait_until(lambda: not served.incoming)
    service.stop()
