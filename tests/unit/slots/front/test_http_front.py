"""The HTTP server, on a client that stands for slots."""

import http.client
import json
import socket
import threading
import time
import urllib.parse
from collections.abc import AsyncGenerator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from iris_ray import http_server
from iris_ray.errors import InvalidSlotError
from iris_ray.slots.client.served_command import ProgramAnswer
from iris_ray.slots.front import HttpFront, http_front
from tests.support.http_fronts import ALICE, Client, asked, bearer, post, serve, status_for
from tests.support.waiting import wait_until


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
    assert "not a JSON object" in json.loads(answer)["error"]["message"]


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


def test_program_that_says_only_a_status_is_heard() -> None:
    class Busy(Client):
        async def astream(self, model: str, body: dict[str, Any], **_: Any) -> AsyncGenerator[Any, None]:
            yield ProgramAnswer(503, "application/octet-stream", b"")

    with serve(Busy()) as front:
        assert post(front, asked("a", stream=True))[::2] == (503, "")


@pytest.mark.parametrize("stream", [False, True])
def test_redirect_of_a_program_is_passed_on(stream: bool) -> None:
    class Moved(Client):
        async def generate(self, model: str, body: dict[str, Any], **_: Any) -> Any:
            return ProgramAnswer(307, "text/html", b"there", "/v2/completions")

        async def astream(self, model: str, body: dict[str, Any], **_: Any) -> AsyncGenerator[Any, None]:
            yield ProgramAnswer(307, "text/html", b"there", "/v2/completions")

    with serve(Moved()) as front:
        found, headers, said = post(front, asked("a", stream=stream))
        assert (found, headers["Location"], said) == (307, "/v2/completions", "there")


@pytest.mark.parametrize("more", [{}, {"x": "a" * 100_000}], ids=["small", "large"])
@pytest.mark.parametrize("stream", [False, True])
def test_class_is_not_asked_for_answers_to_several_prompts(front: HttpFront, stream: bool, more: Any) -> None:
    status, _, said = post(front, asked(["a", "b"], stream=stream, **more))
    assert status == 400
    assert "'prompt' has 2 texts, and this model answers one" in json.loads(said)["error"]["message"]
    assert post(front, asked(["a b"], stream=stream, **more))[0] == 200


def test_pieces_that_come_together_are_sent_together(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[bytes] = []

    async def noted(response: Any, data: bytes, timeout_s: float) -> None:
        sent.append(data)
        await http_server.send(response, data, timeout_s)

    monkeypatch.setattr(http_front, "send", noted)
    with serve(client) as front:
        _, _, said = post(front, asked("a " * 40, stream=True))
    assert said.count('"text": "a"') == 40
    assert len(sent) == 1


def test_frozen_manager_is_reported_in_time(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    thawed = threading.Event()
    monkeypatch.setattr(http_front, "ANSWER_S", 0.1)
    monkeypatch.setattr(client, "status", lambda: thawed.wait(30) and SimpleNamespace(models=[]))
    with serve(client) as front:
        assert [status_for(front, "GET", "/ready", {})[0] for _ in range(2)] == [503, 503]
        thawed.set()
        wait_until(lambda: status_for(front, "GET", "/ready", {})[0] == 200)


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
