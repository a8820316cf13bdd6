"""The HTTP server, on a client that stands for slots."""

import asyncio
import gzip
import http.client
import json
import pickle
import re
import socket
import time
import urllib.parse
from collections.abc import AsyncGenerator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from ray.exceptions import RayActorError

from iris_ray import http_server
from iris_ray.errors import InvalidSlotError
from iris_ray.slots.client.served_command import ProgramAnswer
from iris_ray.slots.front import ApiKey, HttpFront, http_front, json_outline, request_parser
from tests.support.waiting import wait_until

ALICE = ApiKey("alice", "a" * 20)
LARGE = 2**24


class Client:
    """Answers as the prompt says."""

    def __init__(self) -> None:
        self.models: list[str] = []
        self.asked: list[str] = []
        self.bodies: list[Any] = []
        self.began: list[str] = []
        self.cancelled: list[str] = []

    async def generate(self, model: str, body: dict[str, Any], *, request_id: str, timeout_s: float | None) -> str:
        return "".join([piece async for piece in self.astream(model, body, request_id=request_id, timeout_s=timeout_s)])

    async def astream(
        self, model: str, body: dict[str, Any], *, request_id: str, timeout_s: float | None
    ) -> AsyncGenerator[str, None]:
        self.asked.append(model)
        self.bodies.append(body := pickle.loads(pickle.dumps(body)))  # it travels to the model
        try:
            for word in body["prompt"].split():
                match word:
                    case "reset":
                        raise ConnectionResetError("the model's own database")
                    case "dead":
                        raise RayActorError(error_msg="The actor died.")
                    case "endless":
                        while True:
                            yield "a" * 100_000
                    case "large":
                        yield "a" * LARGE
                    case "wait":
                        self.began.append(request_id)
                        await asyncio.sleep(60.0)
                yield word
        except (asyncio.CancelledError, GeneratorExit):
            self.cancelled.append(request_id)
            raise

    def status(self) -> Any:
        if self.models:
            return SimpleNamespace(models=[SimpleNamespace(model=name, slots=1, waiting=3) for name in self.models])
        raise RayActorError(error_msg="The actor died.")


@pytest.fixture
def client() -> Client:
    return Client()


def serve(client: Any, **options: Any) -> HttpFront:
    return HttpFront(client, **options)


@pytest.fixture
def front(client: Client) -> Iterator[HttpFront]:
    with serve(client) as front:
        yield front


def post(front: HttpFront, body: bytes, kind: str = "application/json") -> tuple[int, dict[str, str], str]:
    connection = http.client.HTTPConnection(front.url.removeprefix("http://"), timeout=30)
    try:
        connection.request("POST", "/v1/completions", body, {"Content-Type": kind})
        answer = connection.getresponse()
        return answer.status, dict(answer.headers), answer.read().decode()
    finally:
        connection.close()


def status_for(
    front: HttpFront, method: str, path: str, headers: dict[str, str], body: bytes | None = None
) -> tuple[int, str]:
    port = int(front.url.rsplit(":", 1)[1])
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        connection.request(method, path, asked("a") if body is None else body, headers)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def asked(prompt: str, **more: Any) -> bytes:
    return json.dumps({"model": "m", "prompt": prompt} | more).encode()


def test_oversized_body_is_refused(front: HttpFront) -> None:
    status, _, body = post(front, asked("a" * http_front.MOST_BODY))
    assert status == 413
    assert "more than 4,194,304 bytes" in json.loads(body)["error"]["message"]


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (b"[" * 100_000, "application/json"),
        (asked("a"), "application/json; charset=klingon"),
        (b"\xff", "application/json"),
    ],
)
def test_unreadable_body_is_callers_mistake(front: HttpFront, body: bytes, kind: str) -> None:
    status, _, answer = post(front, body, kind)
    assert status == 400
    assert "no JSON object" in json.loads(answer)["error"]["message"]


def test_unserved_models_may_come_back(front: HttpFront) -> None:
    status, headers, body = post(front, asked("dead"))
    assert (status, headers["Retry-After"]) == (503, "10")
    assert "the process that served the models is gone" in json.loads(body)["error"]["message"]
    connection = http.client.HTTPConnection(front.url.removeprefix("http://"), timeout=30)
    connection.request("GET", "/v1/models")
    assert connection.getresponse().status == 503
    connection.close()


@pytest.mark.parametrize("stream", [False, True])
def test_models_connection_error_is_an_ordinary_error(front: HttpFront, stream: bool) -> None:
    status, _, body = post(front, asked("reset", stream=stream))
    assert status == 500
    assert "the model raised ConnectionResetError" in json.loads(body)["error"]["message"]
    status, _, body = post(front, asked("a reset", stream=True))
    events = [json.loads(line.removeprefix("data: ")) for line in body.splitlines() if line]
    assert status == 200
    assert events[0]["choices"][0]["text"] == "a"
    assert "the model raised ConnectionResetError" in events[1]["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_disconnecting_caller_cancels_request(front: HttpFront, client: Client, stream: bool) -> None:
    with socket.create_connection(("127.0.0.1", int(front.url.rsplit(":", 1)[1]))) as caller:
        body = asked("a wait", stream=stream)
        caller.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body) + body
        )
        wait_until(lambda: client.began)
    wait_until(lambda: client.cancelled)
    assert client.cancelled == client.began


@pytest.mark.parametrize(
    ("option", "value"),
    [("port", value) for value in (99999, -1, "80", True)]
    + [("timeout_s", value) for value in ("300", -1.0, float("nan"), True)],
    ids=str,
)
def test_invalid_option_is_refused_at_once(client: Client, option: str, value: Any) -> None:
    with pytest.raises(InvalidSlotError, match=f"{option} is"):
        serve(client, **{option: value})


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_url_is_usable_by_callers(client: Any, host: str) -> None:
    with HttpFront(client, host=host) as front:
        assert urllib.parse.urlsplit(front.url).hostname == host
        assert post(front, asked("a"))[0] == 200


def test_closing_closed_or_unopened_front_does_nothing(client: Any) -> None:
    with HttpFront(client) as front:
        front.close()
    with pytest.raises(OSError, match=r"can't listen at 192\.0\.2\.1, port 0: Cannot assign requested address; give"):
        (failed := HttpFront(client, host="192.0.2.1", keys=[ALICE])).start()
    failed.close()
    (idle := HttpFront(client)).close()
    with pytest.raises(InvalidSlotError, match="not started"):
        print(idle.url)


def test_invalid_address_is_an_error_and_start_returns(client: Any) -> None:
    with pytest.raises(UnicodeError):
        HttpFront(client, host="a" * 70 + ".example", keys=[ALICE]).start()


def test_closing_ends_requests_and_streams_with_words(client: Client) -> None:
    with serve(client) as front, ThreadPoolExecutor(2) as callers:
        whole = callers.submit(post, front, asked("wait"))
        stream = callers.submit(post, front, asked("a wait", stream=True))
        wait_until(lambda: len(client.began) == 2)
        started = time.monotonic()
        front.close(grace_s=0.1)
        assert time.monotonic() - started < 10.0
        status, headers, said = whole.result()
        assert (status, headers["Retry-After"]) == (503, "10")
        assert "closing" in json.loads(said)["error"]["message"]
        status, _, said = stream.result()
        assert status == 200
        assert "closing" in json.loads(said.split("data: ")[-1])["error"]["message"]
    assert sorted(client.cancelled) == sorted(client.began)


def test_slow_charset_is_refused_without_blocking_others(front: HttpFront) -> None:
    status, _, said = post(front, b"a" * 100_000, "application/json; charset=punycode")
    assert status == 400
    assert "JSON" in said
    for charset in ("utf-8", "UTF-8", "us-ascii"):
        assert post(front, asked("a b"), f"application/json; charset={charset}")[0] == 200


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "http://localhost:3000"])
def test_web_page_cannot_use_models(front: HttpFront, origin: str) -> None:
    status, said = status_for(front, "POST", "/v1/completions", {"Content-Type": "text/plain", "Origin": origin})
    assert status == 403
    assert f"a web page of '{origin}'" in json.loads(said)["error"]["message"]


@pytest.mark.parametrize("method", ["GET", "POST"])
@pytest.mark.parametrize("host", ["evil.example:80", "evil.example", "[", "localhost.evil.example", "0.0.0.0"])
def test_rebound_foreign_name_is_refused(front: HttpFront, method: str, host: str) -> None:
    path = "/v1/models" if method == "GET" else "/v1/completions"
    status, said = status_for(front, method, path, {"Host": host})
    assert status == 403
    assert "listens for its own machine only" in json.loads(said)["error"]["message"]


@pytest.mark.parametrize("host", ["localhost", "LocalHost:80", "127.0.0.1:8000", "[::1]:80", "127.1.2.3"])
def test_names_of_this_machine_are_accepted(front: HttpFront, host: str) -> None:
    assert status_for(front, "POST", "/v1/completions", {"Host": host})[0] == 200


def test_front_for_other_machines_accepts_any_name(client: Any) -> None:
    with HttpFront(client, host="0.0.0.0", keys=[ALICE]) as front:
        bearer = {"Authorization": f"Bearer {ALICE.secret}"}
        assert status_for(front, "POST", "/v1/completions", {"Host": "models.example", **bearer})[0] == 200
        assert status_for(front, "POST", "/v1/completions", {"Origin": "http://models.example", **bearer})[0] == 403


# -- under attack ------------------------------------------------------------------------------------------------------


def connect(front: HttpFront, sent: bytes) -> socket.socket:
    caller = socket.create_connection(("127.0.0.1", int(front.url.rsplit(":", 1)[1])), timeout=30)
    caller.sendall(sent)
    return caller


def head(*more: str) -> bytes:
    return "\r\n".join(["POST /v1/completions HTTP/1.1", "Host: localhost", *more, "", ""]).encode()


def is_closed(caller: socket.socket) -> bool:
    try:
        while caller.recv(2**16):
            pass
    except TimeoutError:
        return False
    except ConnectionResetError:
        pass
    return True


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


def test_body_of_too_many_values_is_refused(front: HttpFront) -> None:
    status, _, said = post(front, b'{"model": "m", "prompt": [' + b"[]," * request_parser.MOST_VALUES + b"[]]}")
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
        assert "no JSON object" in post(front, body)[2]


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


def test_bodies_beyond_memory_limit_come_back_later(
    client: Client, callers: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "MOST_BODIES", 1000)
    monkeypatch.setattr(http_server, "SMALL_BODY", 50)
    with serve(client) as front:
        callers.enter_context(connect(front, head("Content-Length: 900") + b"{"))
        wait_until(lambda: post(front, asked("a" * 100))[0] == 503)
        assert post(front, asked("a" * 100))[1]["Retry-After"] == "1"
        assert post(front, asked("a"))[0] == 200
        callers.close()
        wait_until(lambda: post(front, asked("a" * 100))[0] == 200)


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


# -- keys --------------------------------------------------------------------------------------------------------------


def bearer(secret: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {secret}"}


def test_other_machines_need_a_key(client: Any) -> None:
    with pytest.raises(InvalidSlotError, match=r"everybody who reaches 0\.0\.0\.0"):
        HttpFront(client, host="0.0.0.0")


@pytest.mark.parametrize(
    "headers", [{}, bearer("b" * 20), {"Authorization": "Basic abc"}, bearer("\xff" * 20)], ids=str
)
def test_caller_without_its_key_is_refused(client: Any, headers: dict[str, str]) -> None:
    with HttpFront(client, keys=[ALICE]) as front:
        status, said = status_for(front, "POST", "/v1/completions", headers)
        assert status == 401
        assert json.loads(said)["error"]["code"] == "invalid_api_key"
        assert status_for(front, "GET", "/health", {})[0] == 200


def test_key_opens_its_own_models_only(client: Client) -> None:
    client.models = ["m", "n"]
    with serve(client, keys=[ApiKey("bob", "b" * 20, models=["n"])], aliases={"gpt": "n", "old": "m"}) as front:
        status, said = status_for(front, "POST", "/v1/completions", bearer("b" * 20))
        assert status == 403
        assert "may not use the model 'm'" in json.loads(said)["error"]["message"]
        _, said = status_for(front, "GET", "/v1/models", bearer("b" * 20))
        assert [model["id"] for model in json.loads(said)["data"]] == ["n", "gpt"]
        assert status_for(front, "GET", "/v1/models/m", bearer("b" * 20))[0] == 404


def test_key_has_its_limits_alone(client: Client) -> None:
    keys = [ApiKey("bob", "b" * 20, at_a_time=1), ApiKey("eve", "e" * 20, per_minute=2), ALICE]
    with serve(client, keys=keys) as front, ThreadPoolExecutor(1) as pool:
        waits = pool.submit(status_for, front, "POST", "/v1/completions", bearer("b" * 20), asked("wait"))
        wait_until(lambda: client.began)
        status, said = status_for(front, "POST", "/v1/completions", bearer("b" * 20))
        assert status == 429
        assert "key bob has 1 requests that run" in json.loads(said)["error"]["message"]
        found = [status_for(front, "POST", "/v1/completions", bearer("e" * 20))[0] for _ in range(3)]
        assert found == [200, 200, 429]
        assert status_for(front, "POST", "/v1/completions", bearer(ALICE.secret))[0] == 200
        front.set_access([ALICE])
        assert status_for(front, "POST", "/v1/completions", bearer("e" * 20))[0] == 401
        front.close(grace_s=0.0)
        assert waits.result()[0] == 503


# -- routes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/", 404),
        ("POST", "/v1/nothing", 404),
        ("GET", "/v1/completions", 405),
        ("DELETE", "/v1/models", 405),
        ("GET", "/v1/models/x", 404),
        ("POST", "/v1/chat/completions", 400),
        ("POST", "/v1/completions", 417),
    ],
)
def test_every_refusal_is_json_with_words(
    client: Client, front: HttpFront, method: str, path: str, status: int
) -> None:
    client.models = ["m"]
    found, said = status_for(front, method, path, {"Expect": "200-maybe"} if status == 417 else {})
    error = json.loads(said)["error"]
    assert (found, error["type"], error["param"]) == (status, "invalid_request_error", None)
    assert len(error["message"]) > 20


def test_alias_asks_the_model_under_its_own_name(client: Client) -> None:
    client.models = ["real"]
    with serve(client, aliases={"gpt": "real"}) as front:
        _, _, said = post(front, json.dumps({"model": "gpt", "prompt": "a"}).encode())
        assert json.loads(said)["model"] == "gpt"
        assert client.asked == ["real"]
        assert json.loads(status_for(front, "GET", "/v1/models/gpt", {})[1])["id"] == "gpt"


@pytest.mark.parametrize(("stream", "kind"), [(False, "application/json"), (True, "text/event-stream")])
@pytest.mark.parametrize("status", [200, 400])
def test_answer_of_a_program_is_passed_on_as_it_is(stream: bool, kind: str, status: int) -> None:
    class Program(Client):
        async def generate(self, model: str, body: dict[str, Any], **_: Any) -> Any:
            return ProgramAnswer(status, kind, b"abcd")

        async def astream(self, model: str, body: dict[str, Any], **_: Any) -> AsyncGenerator[Any, None]:
            yield ProgramAnswer(status, kind, b"ab")
            yield ProgramAnswer(status, kind, b"cd")

    with serve(Program()) as front:
        found, headers, said = post(front, asked("a", stream=stream))
        assert (found, headers["Content-Type"].split(";")[0], said) == (status, kind, "abcd")


def test_metrics_count_requests_of_served_models(client: Client) -> None:
    client.models = ["m"]
    with serve(client, keys=[ALICE]) as front:
        for body in (asked("a"), asked("a b", stream=True), asked("reset"), b"{}", asked("reset", model="m" * 300)):
            status_for(front, "POST", "/v1/completions", bearer(ALICE.secret), body)
        _, said = status_for(front, "GET", "/metrics", bearer(ALICE.secret))
        counted = 'iris_front_requests_total{key="alice",model="%s",route="/v1/completions",status="%d"} %.1f'
        assert counted % ("m", 200, 2) in said
        assert counted % ("m", 500, 1) in said
        assert counted % ("other", 400, 1) in said
        assert counted % ("other", 500, 1) in said, "a long name is not told"
        assert 'iris_front_waiting_requests{model="m"} 3.0' in said
        assert status_for(front, "GET", "/metrics", {})[0] == 401


def test_key_for_some_models_reads_no_metrics_of_others(client: Client) -> None:
    client.models = ["m", "secret"]
    with serve(client, keys=[ALICE, ApiKey("bob", "b" * 20, models=["m"])]) as front:
        status, said = status_for(front, "GET", "/metrics", bearer("b" * 20))
        assert (status, "secret" in said, "alice" in said) == (403, False, False)
        assert "secret" in status_for(front, "GET", "/metrics", bearer(ALICE.secret))[1]
