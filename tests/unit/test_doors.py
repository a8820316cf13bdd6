"""Twice as many strangers as a server takes, from one address or two hundred: somebody who may is still answered."""

import contextlib
import json
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path

import numpy as np
import pytest

from iris_ray import framing, http_server
from iris_ray.actors.calls.controller_connection import ControllerConnection
from iris_ray.actors.host.directories import LocalDirectories
from iris_ray.checkpoint.host import MOST_STRANGERS, FileService
from iris_ray.dev.held_run import HeldRun
from iris_ray.errors import NoClusterError
from iris_ray.fair_limits import BACKLOG
from iris_ray.model.membership import Membership
from iris_ray.outer.member import Member
from iris_ray.outer.wire import ArrayConnection
from iris_ray.slots.front import ApiKey
from tests.support.dashboard_pages import served
from tests.support.held_hosts import HeldHosts
from tests.support.http_fronts import ALICE, Client, asked, bearer, serve

TOKEN = "open sesame 1234"
ADDRESSES = {"one": ["127.1.0.1"], "many": [f"127.1.0.{number}" for number in range(1, 201)]}
PROXY = ["127.0.0.1"]
"""The address of those who may."""
FEW = 256
"""The limit for connections of HTTP servers in these tests."""

STRANGERS = """
import collections, itertools, json, socket, sys, time
port, addresses, most, begins, goes_on = json.loads(sys.argv[1])
held = collections.deque()

def say(stranger, words):
    try:
        stranger.sendall(words)
    except OSError:
        pass

print("ready", flush=True)
sys.stdin.readline()
for number in itertools.count(1):
    stranger = socket.socket()
    stranger.bind((addresses[number % len(addresses)], 0))
    stranger.settimeout(5.0)
    held.append(stranger)
    try:
        stranger.connect(("127.0.0.1", port))
    except OSError:
        pass
    say(stranger, begins.encode())
    if len(held) > most:
        held.popleft().close()
    if number == most:
        print("there", flush=True)
        while goes_on == "byte by byte":
            time.sleep(0.1)
            for stranger in held:
                say(stranger, b"a")
        if goes_on == "once":
            sys.stdin.read()
            break
"""
"""Opens connections and keeps the latest, or opens those that are closed again and again, or sends bytes on all."""


@dataclass(frozen=True)
class Door:
    """A server on this machine.

    Attributes:
        port: at which it listens.
        most: its limit for connections of strangers.
        says: what a stranger begins to say and never ends.
        ask: connects as somebody who may, calls a function, and then sends a request; fails if it is not answered.
        body: the beginning of a request of which somebody else sends the body, and never ends.
    """

    port: int
    most: int
    says: str
    ask: Callable[[Callable[[], object]], None]
    body: str = ""


HALF = "POST /login HTTP/1.1\r\nHost: localhost\r\nX-Forwarded-For: 10.0.0.1\r\nContent-Len"
BOB = ApiKey("bob", "b" * 20)


def body(path: str, *headers: str) -> str:
    return "\r\n".join([f"POST {path} HTTP/1.1", "Host: localhost", "Content-Length: 60000", *headers, "", "token="])


def http(port: int, path: str, token: str, body: bytes | None = None) -> Callable[[Callable[[], object]], None]:
    def ask(meanwhile: Callable[[], object]) -> None:
        with contextlib.closing(HTTPConnection("127.0.0.1", port, timeout=60.0)) as connection:
            connection.connect()
            meanwhile()
            connection.request("GET" if body is None else "POST", path, body, bearer(token))
            assert connection.getresponse().status == 200

    return ask


@contextlib.contextmanager
def file_service(path: Path) -> Iterator[Door]:
    directories = LocalDirectories(path, None)
    (directories.take("job", TOKEN) / "file").write_text("mine")
    service = FileService("127.0.0.1", directories)
    port = int(service.address.rpartition(":")[2])
    yield Door(port, MOST_STRANGERS, HALF, http(port, "/files/file", TOKEN))
    service.stop()


@contextlib.contextmanager
def held_host(path: Path) -> Iterator[Door]:
    with HeldHosts.of(path, 1) as hosts:
        (host,) = hosts.held.hosts

        def reach(address: str, port: int) -> socket.socket:
            connection = socket.create_connection((address, port), 60.0)
            between.pop()()
            return connection

        def ask(meanwhile: Callable[[], object]) -> None:
            between.append(meanwhile)
            with HeldRun(hosts.held, reach):
                pass

        between: list[Callable[[], object]] = []
        yield Door(host.port, framing.MOST_STRANGERS, "half a proof", ask)


@contextlib.contextmanager
def member_of_outer(_: Path) -> Iterator[Door]:
    member = Member((0, 1), [np.zeros(1)], lambda: Membership(0, token=TOKEN))
    listener = socket.create_server(("127.0.0.1", 0), backlog=BACKLOG)
    port = listener.getsockname()[1]

    def ask(meanwhile: Callable[[], object]) -> None:
        with contextlib.closing(ArrayConnection(socket.create_connection(("127.0.0.1", port)))) as connection:
            meanwhile()
            connection.prove(TOKEN, calls=True, within_s=60.0)
            connection.send_message({"kind": "who", "epoch": 0})
            assert connection.receive_message(seconds=60.0)[0]["kind"] == "who"

    serving = threading.Thread(target=member.serve, args=(listener, TOKEN))
    serving.start()
    yield Door(port, framing.MOST_STRANGERS, "half a proof", ask)
    member.close()
    serving.join()


@contextlib.contextmanager
def dashboard(_: Path) -> Iterator[Door]:
    def connect() -> ControllerConnection:
        raise NoClusterError("there is none")

    with served(connect, TOKEN) as url:
        port = int(url.rpartition(":")[2])
        yield Door(port, FEW, HALF, http(port, "/api/snapshot", TOKEN), body("/login"))


@contextlib.contextmanager
def front(_: Path) -> Iterator[Door]:
    with serve(Client(), keys=[ALICE, BOB]) as front:
        port = int(front.url.rpartition(":")[2])
        ask = http(port, "/v1/completions", ALICE.secret, asked("a"))
        yield Door(port, FEW, HALF, ask, body("/v1/completions", f"Authorization: Bearer {BOB.secret}"))


@contextlib.contextmanager
def strangers(door: Door, begins: str, addresses: list[str], goes_on: str) -> Iterator[Callable[[], None]]:
    """Yield a function that lets twice as many come as there are places, and returns when all are there.

    Args:
        door: where they come.
        begins: what each says when it comes.
        addresses: from which they come, in turn.
        goes_on: "once": they say no more; "again": whoever is there longest leaves, and another one comes; "byte by
            byte": each says a byte now and then.
    """
    said = json.dumps([door.port, addresses, 2 * door.most, begins, goes_on])
    words = [sys.executable, "-I", "-S", "-c", STRANGERS, said]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        begin, there = process.stdin, process.stdout
        assert there.readline() == "ready\n"

        def come() -> None:
            print(file=begin, flush=True)
            assert there.readline() == "there\n"

        try:
            yield come
        finally:
            process.kill()


OpenDoor = Callable[[Path], contextlib.AbstractContextManager[Door]]
ALL: list[OpenDoor] = [file_service, held_host, member_of_outer, dashboard, front]


@pytest.fixture(autouse=True)
def few_places(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "MOST_CONNECTIONS", FEW)
    monkeypatch.setattr(framing, "PROOF_S", 60.0)


@pytest.mark.parametrize("goes_on", ["once", "again", "byte by byte"])
@pytest.mark.parametrize("addresses", ["one", "many"])
@pytest.mark.parametrize("open_door", ALL)
def test_somebody_who_may_is_answered_beside_strangers(
    tmp_path: Path, open_door: OpenDoor, addresses: str, goes_on: str
) -> None:
    """Who has connected before they come, and who comes after them."""
    with open_door(tmp_path) as door:
        begins = "" if goes_on == "once" else door.says
        with strangers(door, begins, ADDRESSES[addresses], goes_on) as come:
            door.ask(come)
            door.ask(lambda: None)


@pytest.mark.parametrize("addresses", ["one", "many"])
@pytest.mark.parametrize("open_door", [dashboard, front])
def test_slow_bodies_hold_up_nobody(tmp_path: Path, open_door: OpenDoor, addresses: str) -> None:
    with open_door(tmp_path) as door, strangers(door, door.body, ADDRESSES[addresses], "byte by byte") as come:
        door.ask(come)
        door.ask(lambda: None)


@pytest.mark.parametrize("goes_on", ["once", "byte by byte"])
@pytest.mark.parametrize("open_door", ALL)
def test_strangers_behind_the_proxy_of_somebody_who_may(tmp_path: Path, open_door: OpenDoor, goes_on: str) -> None:
    with open_door(tmp_path) as door, strangers(door, door.says, PROXY, goes_on) as come:
        come()
        door.ask(lambda: None)
