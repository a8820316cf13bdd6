"""Callers who send too much, too slowly or nonsense get an error, and keep nobody else out."""

import asyncio
import gzip
import http.client
import json
import re
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from iris_ray import http_server
from iris_ray.fair_limits import Turns
from iris_ray.slots.front import ApiKey, HttpFront, http_front, json_outline, request_parser
from tests.support.http_fronts import (
    ALICE,
    LARGE,
    Client,
    asked,
    bearer,
    connect,
    head,
    is_closed,
    post,
    serve,
    status_for,
)
from tests.support.waiting import wait_until


@pytest.fixture
def callers() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def test_compressed_body_is_refused_unread(front: HttpFront) -> None:
    bomb = gzip.compress(b'{"model": "m", "prompt": "' + b"[]," * 2**20)
    status, said = status_for(front, "POST", "/v1/completions", {"Content-Encoding": "gzip"}, bomb)
    assert status == 415
    assert "compressed" in json.loads(said)["error"]["message"]


@pytest.mark.parametrize("length", ["Content-Length: 99999999999", "Transfer-Encoding: chunked"])
def test_endless_body_is_refused_at_limit(front: HttpFront, callers: ExitStack, length: str) -> None:
    caller = callers.enter_context(connect(front, head(length)))
    with suppress(ConnectionError):
        for _ in range(80):
            caller.sendall(b"10000\r\n" + bytes(2**16) + b"\r\n")
    assert b" 413 " in caller.recv(2**16).splitlines()[0]


@pytest.mark.parametrize("values", [b"[]," * request_parser.MOST_VALUES, (b"[" * 50 + b"]" * 50 + b",") * 3000])
def test_body_of_too_many_values_is_refused(front: HttpFront, values: bytes) -> None:
    status, _, said = post(front, b'{"model": "m", "prompt": [' + values + b"[]]}")
    assert status == 400
    assert "more than 131,072 values" in json.loads(said)["error"]["message"]


def test_large_requests_are_parsed_elsewhere_as_small_ones_here(front: HttpFront, client: Client) -> None:
    pad = {"x": [0] * (2 * request_parser.FEW_VALUES)}
    assert json.loads(post(front, asked("a b", **pad))[2])["choices"][0]["text"] == "ab"
    assert "x" in client.bodies[-1]
    assert post(front, asked("a", **pad, stream="yes"))[2] == post(front, asked("a", stream="yes"))[2]
    status, _, said = post(front, asked("a" * 100_000, stream=True, stream_options={"include_usage": True, **pad}))
    assert (status, said.count("a" * 100_000)) == (200, 1)
    assert '"usage": null' in said
    for body in (b"[" * 100_000, b"[" + asked("a" * 100_000) + b"]", asked("a" * 100_000)[:-1] + b"\xff"):
        assert "not a JSON object" in post(front, body)[2]


def test_small_request_is_answered_while_large_one_is_parsed(
    front: HttpFront, client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "stuck.py").write_text("import time\ntime.sleep(600)")
    monkeypatch.setattr(json_outline, "__file__", str(tmp_path / "stuck.py"))
    monkeypatch.setattr(request_parser, "PARSED_S", 3.0)
    large = asked("a" * 100_000)
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(post, front, large)
        assert post(front, asked("a"))[0] == 200
        assert not waits.done()
        status, _, said = waits.result()
    assert (status, "ended or took too long" in said) == (503, True)
    monkeypatch.undo()
    assert post(front, large)[0] == 200  # by a new process


def test_half_sent_headers_and_bodies_are_closed(
    client: Any, callers: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "HEADERS_S", 0.2)
    monkeypatch.setattr(http_server, "BODY_S", 0.2)
    with HttpFront(client) as front:
        silent = callers.enter_context(connect(front, b""))
        half = callers.enter_context(connect(front, b"POST /v1/completions HTTP/1.1\r\nHost: local"))
        slow = callers.enter_context(connect(front, head("Content-Length: 1000") + b"{"))
        assert is_closed(silent)
        assert is_closed(half)
        assert b" 408 " in slow.recv(2**16).splitlines()[0]
        assert is_closed(slow)
        used = http.client.HTTPConnection(front.url.removeprefix("http://"), timeout=30)
        used.request("POST", "/v1/completions", asked("a"))
        assert used.getresponse().read()
        assert is_closed(used.sock)
        used.close()


def test_new_connection_replaces_idle_one_when_full(
    client: Client, callers: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "MOST_CONNECTIONS", 3)
    with serve(client) as front:
        body = asked("wait")

        def keep_busy(most: int) -> bool:
            """Open a connection, which is refused while the server still counts one that was just closed."""
            busy = callers.enter_context(connect(front, head(f"Content-Length: {len(body)}") + body))
            busy.settimeout(0.5)
            return is_closed(busy) or len(client.began) == most

        wait_until(lambda: keep_busy(2) and len(client.began) == 2)
        idle = callers.enter_context(connect(front, b"POST /v1/comp"))
        idle.settimeout(0.1)
        wait_until(lambda: post(front, asked("a"))[0] == 200 and is_closed(idle))
        wait_until(lambda: keep_busy(3) and len(client.began) == 3)
        assert post(front, asked("a"))[:1] == (503,)
        callers.close()
        wait_until(lambda: len(client.cancelled) == 3)
        assert post(front, asked("a"))[0] == 200


@pytest.fixture
def little_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "MOST_BODIES", 1000)
    monkeypatch.setattr(http_server, "SMALL_BODY", 50)


@pytest.mark.usefixtures("little_room")
@pytest.mark.parametrize("length", ["Content-Length: 400", "Transfer-Encoding: chunked"])
def test_bytes_that_have_not_come_take_no_room(client: Client, callers: ExitStack, length: str) -> None:
    with serve(client) as front:
        for _ in range(5):
            callers.enter_context(connect(front, head(length) + b"1\r\n{"))
        time.sleep(0.1)
        assert post(front, asked("a" * 100))[0] == 200


@pytest.mark.usefixtures("little_room")
@pytest.mark.parametrize("is_chunked", [False, True])
def test_bodies_of_one_key_leave_room_for_others(client: Client, callers: ExitStack, is_chunked: bool) -> None:
    bob = ApiKey("bob", "b" * 20)
    length = "Transfer-Encoding: chunked" if is_chunked else "Content-Length: 490"
    with serve(client, keys=[ALICE, bob]) as front:

        def status(key: ApiKey, body: bytes = asked("a" * 100)) -> int:
            return status_for(front, "POST", "/v1/completions", bearer(key.secret), body)[0]

        chunk = (b"1e0\r\n" if is_chunked else b"") + b"{" * 480
        callers.enter_context(connect(front, head(length, f"Authorization: Bearer {ALICE.secret}") + chunk))
        wait_until(lambda: status(ALICE) == 503)
        assert status(bob) == 200
        assert status(ALICE, asked("a")) == 200
        too_much = callers.enter_context(connect(front, head(length, f"Authorization: Bearer {bob.secret}") + chunk))
        assert b" 503 " in too_much.recv(2**16).splitlines()[0]
        callers.close()
        wait_until(lambda: status(ALICE) == 200)


def test_requests_of_one_key_leave_connections_for_others(
    client: Client, callers: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "MOST_CONNECTIONS", 8)
    bob = ApiKey("bob", "b" * 20)
    with serve(client, keys=[ALICE, bob]) as front:

        def status(key: ApiKey) -> int:
            return status_for(front, "POST", "/v1/completions", bearer(key.secret))[0]

        body = asked("wait")
        whose = head(f"Content-Length: {len(body)}", f"Authorization: Bearer {ALICE.secret}")
        for _ in range(16):
            callers.enter_context(connect(front, whose + body))
        wait_until(lambda: len(client.began) == 6)
        assert (status(bob), status(ALICE)) == (200, 503)
        callers.close()
        wait_until(lambda: status(ALICE) == 200)


async def test_owners_of_large_requests_take_turns() -> None:
    turns, came = Turns(), list[str]()

    async def parse(name: str) -> None:
        async with turns.turn(name[0]):
            came.append(name)
            await asyncio.sleep(0)

    requests = [asyncio.ensure_future(parse(name)) for name in ("a1", "a2", "a3", "a4", "b1", "c1", "b2")]
    await asyncio.sleep(0)
    requests[1].cancel()
    await asyncio.wait(requests)
    assert came == ["a1", "a3", "b1", "c1", "a4", "b2"]
    async with asyncio.timeout(5), turns.turn("a"):
        pass


def test_caller_who_does_not_read_is_cancelled(
    client: Client, callers: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_front, "SLOW_READER_S", 0.2)
    with serve(client) as front:
        body = asked("endless", stream=True)
        callers.enter_context(connect(front, head(f"Content-Length: {len(body)}") + body))
        wait_until(lambda: client.cancelled)


@pytest.mark.parametrize(
    "more",
    [
        ["Content-Length: 2", "Transfer-Encoding: chunked"],
        ["Content-Length: 2", "Content-Length: 3"],
        ["Content-Length: +2"],
        ["Content-Length : 2"],
        ["Transfer-Encoding: xchunked"],
        ["A: b", " folded: c"],
        ["A: \0"],
        ["A\x1b[2J: b"],
        [f"X-{number}: b" for number in range(200)],
        [f"X: {'a' * 9000}"],
    ],
)
def test_ambiguous_headers_are_refused_without_a_line_in_the_log(
    front: HttpFront, callers: ExitStack, caplog: pytest.LogCaptureFixture, more: list[str]
) -> None:
    caller = callers.enter_context(connect(front, head(*more)))
    with suppress(ConnectionError):
        caller.sendall(b"{}")
    with suppress(ConnectionResetError):
        assert re.match(rb'HTTP/1.. 400 [^{]*{"error": {"message": "\w', caller.recv(2**16))
    assert is_closed(caller)
    assert not caplog.records


def test_upgrade_is_an_ordinary_request(front: HttpFront, callers: ExitStack) -> None:
    body = asked("a")
    upgrade = head(f"Content-Length: {len(body)}", "Connection: Upgrade", "Upgrade: websocket") + body
    caller = callers.enter_context(connect(front, upgrade))
    assert b" 200 " in caller.recv(2**16).splitlines()[0]


def test_unread_pipelined_requests_end_when_caller_does_not_read(
    client: Any, callers: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server does not read on while its answers are not read."""
    monkeypatch.setattr(http_server, "HEADERS_S", 0.5)
    monkeypatch.setattr(http_server, "BODY_S", 0.5)
    with HttpFront(client) as front:
        caller = callers.enter_context(connect(front, b""))
        many, sent = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n" * 1000, 0
        with suppress(ConnectionError):
            while sent < 2**30:
                caller.sendall(many)
                sent += len(many)
        assert sent < 2**26


def test_large_answer_has_its_time_and_no_more(
    client: Client, callers: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "HEADERS_S", 0.2)
    monkeypatch.setattr(http_server, "LEAST_RATE", LARGE / 3)
    with serve(client) as front:
        body = asked("large")
        request = head(f"Content-Length: {len(body)}") + body
        slow, never = (callers.enter_context(connect(front, request)) for _ in range(2))
        wait_until(lambda: len(client.bodies) == 2)
        time.sleep(1.0)
        assert len(slow.makefile("rb").read(LARGE)) == LARGE
        wait_until(lambda: is_cut(never))


def is_cut(caller: socket.socket) -> bool:
    """Whether the server, a thread of this process, has closed a connection whose caller has not read all."""
    ends = caller.getpeername(), caller.getsockname()
    here = psutil.Process().net_connections("tcp4")
    return not any((tuple(each.laddr), tuple(each.raddr)) == ends for each in here if each.status == "ESTABLISHED")
