"""What a task does with the files of its job on other hosts, over real sockets."""

import contextlib
import errno
import os
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

import pytest

from iris_ray.actors.host.directories import LocalDirectories
from iris_ray.checkpoint import host as file_service
from iris_ray.checkpoint import peer_files
from iris_ray.checkpoint.host import FileService
from iris_ray.checkpoint.peer_files import PeerFiles, peers, room
from iris_ray.errors import InvalidRequestError, PeerFilesError
from tests.unit.model.test_job_info import INFO

HOST, TOKEN, ROOM = "127.0.0.9", "5ec2e7", 50 << 20


@pytest.fixture
def directories(tmp_path: Path) -> LocalDirectories:
    return LocalDirectories(tmp_path, None)


@pytest.fixture
def service(directories: LocalDirectories) -> Iterator[FileService]:
    service = FileService(HOST, directories, lambda _: ROOM)
    yield service
    service.stop()


@pytest.fixture
def files(directories: LocalDirectories) -> Path:
    """The job's ``local_dir`` on the host."""
    return directories.take("job", TOKEN)


@pytest.fixture
def peer(service: FileService, files: Path) -> PeerFiles:
    return PeerFiles(service.address, TOKEN, timeout_s=2.0)


@pytest.fixture
def odd_host() -> Iterator[Callable[[bytes], str]]:
    """Starts a host that answers every request with these bytes, and then says no more. Returns its address."""
    opened: list[socket.socket] = []

    def start(answer: bytes) -> str:
        listener = socket.create_server((HOST, 0))
        opened.append(listener)

        def serve() -> None:
            connection, _ = listener.accept()
            opened.append(connection)
            connection.recv(10_000)
            connection.sendall(answer)
            if answer:
                with contextlib.suppress(OSError):  # the caller has read enough, and the test is over
                    connection.shutdown(socket.SHUT_WR)

        threading.Thread(target=serve, daemon=True).start()
        return f"{HOST}:{listener.getsockname()[1]}"

    yield start
    for each in opened:
        each.close()


def read(peer: PeerFiles, path: str, size: int, offset: int = 0) -> bytes:
    content = bytearray(size)
    peer.read(path, memoryview(content), offset)
    return bytes(content)


@pytest.mark.parametrize("size", [0, 1, 10 << 20])
def test_written_files_are_listed_and_read_back(peer: PeerFiles, tmp_path: Path, size: int) -> None:
    content = os.urandom(size)
    (tmp_path / "source").write_bytes(content)
    peer.write("step-5/from memory", memoryview(content))
    peer.write("step-5/from ü?#%/a file", tmp_path / "source")
    assert peer.list() == peer.list("step-5") == {"step-5/from memory": size, "step-5/from ü?#%/a file": size}
    assert read(peer, "step-5/from memory", size) == read(peer, "step-5/from ü?#%/a file", size) == content
    assert read(peer, "step-5/from memory", size // 2, size // 3) == content[size // 3 :][: size // 2]
    peer.delete("step-5/from memory")
    assert peer.list() == {"step-5/from ü?#%/a file": size}
    peer.delete("step-5")
    peer.delete("step-5")
    assert peer.list() == peer.list("step-5") == {}


def test_arrays_of_any_type_are_written_and_filled(peer: PeerFiles) -> None:
    peer.write("array", memoryview(bytes(range(16))).cast("I"))
    content = memoryview(bytearray(16)).cast("d")
    peer.read("array", content)
    assert content.tobytes() == bytes(range(16))


@pytest.mark.parametrize(("size", "offset", "why"), [(3, 8, "has 2 bytes from 8 on, and 3 were"), (1, 10, "10 bytes")])
def test_file_shorter_than_expected_is_an_error(peer: PeerFiles, files: Path, size: int, offset: int, why: str) -> None:
    (files / "digits").write_bytes(b"0123456789")
    with pytest.raises(PeerFilesError, match=why):
        read(peer, "digits", size, offset)


@pytest.mark.parametrize("path", ["missing", "../secret", "/etc/passwd", ""])
def test_refusals_name_host_path_and_reason(peer: PeerFiles, path: str) -> None:
    with pytest.raises(PeerFilesError, match=rf"{peer.address} refuses GET .*: it (does not exist|is not a path)"):
        read(peer, path, 1)


@pytest.mark.parametrize("as_file", [False, True])
def test_file_that_does_not_fit_is_refused_with_advice(peer: PeerFiles, tmp_path: Path, as_file: bool) -> None:
    content = bytes(ROOM + 1)
    (tmp_path / "big").write_bytes(content)
    with pytest.raises(PeerFilesError, match=r"don't fit: .* delete older files there first, or keep fewer"):
        peer.write("big", tmp_path / "big" if as_file else memoryview(content))
    assert peer.list() == {}


@pytest.mark.usefixtures("files")
def test_disk_that_fills_up_meanwhile_is_told(peer: PeerFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    def receive(source: BinaryIO, *_: object) -> None:
        source.read(1 << 20)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(file_service, "_receive", receive)
    with pytest.raises(PeerFilesError, match=f"{peer.address} refuses PUT file: No space left on device"):
        peer.write("file", memoryview(bytes(ROOM)))


def test_source_cut_short_while_it_is_sent_is_an_error(
    peer: PeerFiles, files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "source"
    source.write_bytes(bytes(1 << 20))

    def agrees(*_: object) -> bool:
        os.truncate(source, 7)
        return True

    monkeypatch.setattr(PeerFiles, "_agrees", agrees)
    with pytest.raises(PeerFilesError, match="has become shorter"):
        peer.write("file", source)
    assert list(files.iterdir()) == []


def test_peer_whose_task_starts_later_is_waited_for(service: FileService, directories: LocalDirectories) -> None:
    starting = threading.Timer(0.3, lambda: (directories.take("job", TOKEN) / "file").touch())
    starting.start()
    assert PeerFiles(service.address, TOKEN).list() in ({}, {"file": 0})
    starting.join()


@pytest.mark.usefixtures("files")
def test_other_jobs_token_is_refused_everywhere(service: FileService, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_files, "START_S", 0.1)
    stranger = PeerFiles(service.address, "0" + TOKEN)
    asks: list[Callable[[], object]] = [
        stranger.list,
        lambda: read(stranger, "file", 1),
        lambda: stranger.write("file", memoryview(b"x")),
        lambda: stranger.delete("file"),
    ]
    for ask in asks:
        with pytest.raises(PeerFilesError, match="no job with this token has started a task on this host"):
            ask()


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (b"", "it is silent"),
        (b"HTTP/1.1 206 Partial\r\nContent-Length: 9\r\n\r\n0123", "the host ended its answer too early"),
        (b"SSH-2.0-OpenSSH\r\n", "SSH"),
    ],
)
def test_host_that_breaks_off_is_an_error_within_timeout(
    odd_host: Callable[[bytes], str], answer: bytes, why: str
) -> None:
    peer = PeerFiles(odd_host(answer), TOKEN, timeout_s=0.3)
    with pytest.raises(PeerFilesError, match=f"{peer.address} did not answer GET file: .*{why}.*use another copy"):
        read(peer, "file", 9)


def test_list_that_makes_no_sense_is_an_error(odd_host: Callable[[bytes], str]) -> None:
    """Another program may have the port of a host that was lost."""
    with pytest.raises(PeerFilesError, match="did not answer GET the list of files"):
        PeerFiles(odd_host(b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\n<html>"), TOKEN, timeout_s=0.3).list()


def test_silent_host_keeps_no_writer(odd_host: Callable[[bytes], str]) -> None:
    with pytest.raises(PeerFilesError, match="it is silent"):
        PeerFiles(odd_host(b""), TOKEN, timeout_s=0.3).write("file", memoryview(b"x"))


@pytest.mark.parametrize(("address", "why"), [(f"{HOST}:1", "Connection refused"), ("", "serves no files")])
def test_host_without_service_is_an_error_at_once(address: str, why: str) -> None:
    with pytest.raises(PeerFilesError, match=why):
        PeerFiles(address, TOKEN).list()


# -- the peers of a task -----------------------------------------------------------------------------------------------


def test_peers_of_task_are_the_hosts_of_its_gang(
    service: FileService, files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    addresses = (service.address, service.address, f"{HOST}:1", f"{HOST}:1")
    me = replace(INFO, local_dir=str(files), file_services=addresses, processes_per_host=2)
    for name, value in me.to_env().items():
        monkeypatch.setenv(name, value)
    found = peers()
    assert tuple(peer.address for peer in found) == addresses
    (files / "mine").write_bytes(b"x")
    assert found[1].list() == {"mine": 1}
    assert TOKEN not in repr(found)
    assert TOKEN not in "".join(os.environ.values())
    assert room() > 0


@pytest.mark.parametrize("local_dir", ["", "/tmp/of-a-local-run"])
def test_task_without_file_services_has_no_peers(monkeypatch: pytest.MonkeyPatch, local_dir: str) -> None:
    for name, value in replace(INFO, local_dir=local_dir).to_env().items():
        monkeypatch.setenv(name, value)
    assert peers() == []


def test_only_tasks_have_peers() -> None:
    with pytest.raises(InvalidRequestError, match="only tasks of a job have peers"):
        peers()
    with pytest.raises(InvalidRequestError, match="no local_dir"):
        room()
