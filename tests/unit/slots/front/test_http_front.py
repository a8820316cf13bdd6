"""The HTTP server, on a client that stands for slots."""

import asyncio
import http.client
import json
import socket
import time
import urllib.parse
from collections.abc import AsyncGenerator, Iterator
from typing import Any

import pytest
from ray.exceptions import RayActorError

from iris_ray.errors import InvalidSlotError
from iris_ray.slots.front import HttpFront, http_front
from tests.support.waiting import wait_until


class Client:
    """Answers as the prompt says."""

    def __init__(self) -> None:
        self.began: list[str] = []
        self.cancelled: list[str] = []

    async def generate(self, model: str, body: dict[str, Any], *, request_id: str, timeout_s: float | None) -> str:
        return "".join([piece async for piece in self.astream(model, body, request_id=request_id, timeout_s=timeout_s)])

    async def astream(
        self, model: str, body: dict[str, Any], *, request_id: str, timeout_s: float | None
    ) -> AsyncGenerator[str, None]:
        try:
            for word in body["prompt"].split():
                match word:
                    case "reset":
                        raise ConnectionResetError("the model's own database")
                    case "dead":
                        raise RayActorError(error_msg="The actor died.")
                    case "wait":
                        self.began.append(request_id)
                        await asyncio.sleep(60.0)
                yield word
        except (asyncio.CancelledError, GeneratorExit):
            self.cancelled.append(request_id)
            raise

    def status(self) -> Any:
        raise RayActorError(error_msg="The actor died.")


@pytest.fixture
def client() -> Client:
    return Client()


@pytest.fixture
def front(client: Any) -> Iterator[HttpFront]:
    with HttpFront(client) as front:
        yield front


def post(front: HttpFront, body: bytes, kind: str = "application/json") -> tuple[int, dict[str, str], str]:
    connection = http.client.HTTPConnection(front.url.removeprefix("http://"), timeout=30)
    try:
        connection.request("POST", "/v1/completions", body, {"Content-Type": kind})
        answer = connection.getresponse()
        return answer.status, dict(answer.headers), answer.read().decode()
    finally:
        connection.close()


def status_for(front: HttpFront, method: str, path: str, headers: dict[str, str]) -> tuple[int, str]:
    connection = http.client.HTTPConnection(front.url.removeprefix("http://"), timeout=30)
    try:
        connection.request(method, path, asked("a"), headers)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def asked(prompt: str, **more: Any) -> bytes:
    return json.dumps({"model": "m", "prompt": prompt, **more}).encode()


def test_oversized_body_is_refused(front: HttpFront) -> None:
    status, _, body = post(front, asked("a" * http_front.MOST_BODY))
    assert status == 413
    assert "more than 67,108,864 bytes" in json.loads(body)["error"]["message"]


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


def test_body_contradicting_its_encoding_is_callers_mistake(front: HttpFront) -> None:
    connection = http.client.HTTPConnection(front.url.removeprefix("http://"), timeout=30)
    connection.request("POST", "/v1/completions", asked("a"), {"Content-Encoding": "gzip"})
    answer = connection.getresponse()
    assert answer.status == 400
    assert "no JSON object" in json.loads(answer.read())["error"]["message"]
    connection.close()


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


@pytest.mark.parametrize("port", [99999, -1, "80", True])
def test_invalid_port_is_refused_at_once(client: Any, port: Any) -> None:
    with pytest.raises(InvalidSlotError, match="port is"):
        HttpFront(client, port=port)


@pytest.mark.parametrize("timeout_s", ["300", -1.0, float("nan"), True], ids=str)
def test_invalid_timeout_is_refused_at_once(client: Any, timeout_s: Any) -> None:
    with pytest.raises(InvalidSlotError, match="timeout_s is"):
        HttpFront(client, timeout_s=timeout_s)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_url_is_usable_by_callers(client: Any, host: str) -> None:
    with HttpFront(client, host=host) as front:
        assert urllib.parse.urlsplit(front.url).hostname == host
        assert post(front, asked("a"))[0] == 200


def test_closing_closed_or_unopened_front_does_nothing(client: Any) -> None:
    with HttpFront(client) as front:
        front.close()
    with pytest.raises(OSError, match=r"can't listen at 192\.0\.2\.1, port 0: Cannot assign requested address; give"):
        (failed := HttpFront(client, host="192.0.2.1")).start()
    failed.close()
    (idle := HttpFront(client)).close()
    with pytest.raises(InvalidSlotError, match="not started"):
        print(idle.url)


def test_invalid_address_is_an_error_and_start_returns(client: Any) -> None:
    with pytest.raises(UnicodeError):
        HttpFront(client, host="a" * 70 + ".example").start()


def test_closing_waits_for_no_request_for_long(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_front, "CLOSE_S", 0.1)
    made: Any = client
    with HttpFront(made) as front:
        caller = socket.create_connection(("127.0.0.1", int(front.url.rsplit(":", 1)[1])))
        body = asked("wait")
        caller.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body) + body
        )
        wait_until(lambda: client.began)
        started = time.monotonic()
    assert time.monotonic() - started < 20.0
    assert client.cancelled == client.began
    caller.close()


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
    with HttpFront(client, host="0.0.0.0") as front:
        assert status_for(front, "POST", "/v1/completions", {"Host": "models.example"})[0] == 200
        assert status_for(front, "POST", "/v1/completions", {"Origin": "http://models.example"})[0] == 403
