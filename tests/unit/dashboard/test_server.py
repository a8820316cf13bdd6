"""What the dashboard answers, and whom."""

import contextlib
import gzip
import http.client
import http.cookiejar
import json
import socket
import struct
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, ClassVar
from urllib.parse import quote, urlsplit

import pytest

from iris_ray import http_server
from iris_ray.actors.calls.controller_connection import ControllerConnection
from iris_ray.actors.protocol.status import PAGE
from iris_ray.dashboard import place, server
from iris_ray.dashboard.access import COOKIE, require_token
from iris_ray.dashboard.job_pages import SHARED_S, THREADS
from iris_ray.errors import InvalidRequestError
from iris_ray.logs.calls import LogCalls
from iris_ray.logs.core import LogPosition
from iris_ray.model.checks import is_loopback
from tests.support.controller_in_process import ControllerInProcess
from tests.support.dashboard_pages import served
from tests.support.ray_in_process import Store
from tests.support.waiting import wait_until


@pytest.fixture
def url(world: ControllerInProcess) -> Iterator[str]:
    with served() as url:
        wait_until(lambda: status_of(f"{url}/readyz") == 200)
        yield url


def get(url: str, **headers: str) -> Any:
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=30) as answer:
        data = answer.read()
        return json.loads(gzip.decompress(data) if answer.headers["Content-Encoding"] == "gzip" else data)


def status_of(url: str, **headers: str) -> int:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=30) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        with error:
            return error.code


def events(url: str, version: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the kind and the content of server-sent events."""
    kind = ""
    with urllib.request.urlopen(f"{url}/api/changes?since={version}", timeout=30) as answer:
        for line in answer:
            name, _, value = line.decode().strip().partition(": ")
            if name == "event":
                kind = value
            elif name == "data":
                yield kind, json.loads(value)


def test_page_gets_everything_once_then_changes(world: ControllerInProcess, url: str) -> None:
    first = get(f"{url}/api/snapshot")
    assert set(first["tables"]["slices"]) >= {"v4-16-0", "v4-16-1", "v4-16-2"}
    coming = events(url, first["version"])
    world.start("train")
    put: dict[str, Any] = {}
    while put.get("jobs", {}).get("train", {}).get("state") != "running":
        kind, diff = next(coming)
        assert kind == "diff"
        for name, rows in diff["put"].items():
            put.setdefault(name, {}).update(rows)
    coming.close()  # type: ignore[attr-defined]
    assert [name for name in put["slices"] if name != "v4-16-0"] == [], "only what changed is sent"
    late = events(url, first["version"])
    assert next(late)[0] == "diff", "a page that was away for a moment goes on where it was"
    late.close()  # type: ignore[attr-defined]
    for stale in ("", "other-3", f"{first['version'].partition('-')[0]}-999"):
        other = events(url, stale)
        assert next(other)[0] == "reload"
        other.close()  # type: ignore[attr-defined]


def test_job_details_and_logs_are_served(world: ControllerInProcess, url: str) -> None:
    world.start("train")
    world.prints("train", 1, "step 1\nstep 2\n")
    job = get(f"{url}/api/jobs/train")
    assert (job["state"], job["size"], job["tasks"][1]["group"]) == ("running", 2, "v4-16-0")
    piece = get(f"{url}/api/jobs/train/logs?task=1&offset=0")
    assert piece["text"] == "step 1\nstep 2\n"
    world.prints("train", 1, "step 3\n")
    assert get(f"{url}/api/jobs/train/logs?task=1&attempt=1&offset={piece['next_offset']}")["text"] == "step 3\n"
    assert get(f"{url}/api/jobs/train/logs?task=1&tail=1")["text"] == "step 3\n"
    assert job["goodput"]["seconds"]["unmeasured"] >= 0
    assert job["events"][0]["what"] == "submitted by ann, interactive"
    assert get(f"{url}/api/goodput")["ann"]["jobs"] == 1
    waits = world.submit("waits", slices=(3,))
    assert "waiting for 3 slices" in get(f"{url}/api/jobs/{waits}")["explanation"]
    wait_until(lambda: get(f"{url}/api/slices")["v4-16-0"]["jobs"] == ["train"])


@pytest.mark.parametrize(
    ("path", "headers", "status"),
    [
        ("/api/nothing", {}, 404),
        ("/api/jobs/nobody", {}, 404),
        ("/api/history/jobs?hours=many", {}, 400),
        ("/api/jobs", {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "cors"}, 403),
        ("/api/jobs", {"Host": "stranger.example"}, 403),
    ],
)
def test_errors_for_programs_are_json(
    world: ControllerInProcess, url: str, path: str, headers: dict[str, str], status: int
) -> None:
    with pytest.raises(urllib.error.HTTPError) as caught:
        get(f"{url}{path}", **headers)
    with caught.value as answer:
        assert answer.code == status
        assert list(json.loads(answer.read())) == ["error"]


def test_refusal_of_too_many_requests_is_json_for_programs(
    world: ControllerInProcess, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "LARGEST_SHARE", 0.0)
    with pytest.raises(urllib.error.HTTPError) as caught:
        get(f"{url}/api/jobs")
    with caught.value as answer:
        assert (answer.code, answer.headers["Retry-After"]) == (503, "1")
        assert list(json.loads(answer.read())) == ["error"]


@pytest.mark.parametrize("job_id", ["lr-1e-3_50.5", "driver-1/eval-2"])
def test_job_of_any_id_is_served(world: ControllerInProcess, url: str, job_id: str) -> None:
    world.start(job_id)
    world.prints(job_id, 0, "step 1\n")
    path = f"{url}/api/jobs/{quote(job_id, safe='')}"
    assert get(path)["job_id"] == job_id
    assert get(f"{path}/logs?offset=0")["text"] == "step 1\n"


def test_log_chunks_cut_no_character_in_two(world: ControllerInProcess, url: str) -> None:
    job = world.start("train")
    world.prints(job, 0, "€" * 100_000 + "\n")
    first = get(f"{url}/api/jobs/{job}/logs?offset=0")
    rest = get(f"{url}/api/jobs/{job}/logs?offset={first['next_offset']}")
    assert first["text"] + rest["text"] == "€" * 100_000 + "\n"
    assert rest["next_offset"] == rest["end"]


def test_large_jobs_page_requests_only_shown_tasks(
    world: ControllerInProcess, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(ControllerConnection, "ask_all")
    job = get(f"{url}/api/jobs/{world.submit('large', slices=(300,))}")
    assert (job["size"], len(job["tasks"])) == (600, PAGE)


def test_link_leads_to_job_of_any_name(monkeypatch: pytest.MonkeyPatch) -> None:
    store = {place._KEY: json.dumps({"machine": socket.gethostname(), "url": "http://here", "ray_job": "01"}).encode()}
    monkeypatch.setattr(place, "ClusterStore", lambda: store)
    monkeypatch.setattr(place, "driver_lives", lambda ray_job: ray_job == "01")
    assert place.link_to("jobs/driver-1/lr 50%") == "http://here/#/jobs/driver-1/lr%2050%25"
    for odd in (b"[]", b"{", b'{"url": 1}'):
        store[place._KEY] = odd
        assert place.link_to("fleet") is None


def test_ending_dashboard_keeps_anothers_link_of_same_url(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store()
    monkeypatch.setattr(place, "ClusterStore", lambda: store)
    monkeypatch.setattr(place, "driver_lives", lambda ray_job: True)

    def is_in(ray_job: str) -> None:
        monkeypatch.setattr("ray.get_runtime_context", lambda: SimpleNamespace(get_job_id=lambda: ray_job))

    for ray_job in ("01", "02"):
        is_in(ray_job)
        place.announce("http://127.0.0.1:8267")
    is_in("01")
    place.withdraw()
    assert place.link_to("fleet") == "http://127.0.0.1:8267/#/fleet"
    is_in("02")
    place.withdraw()
    assert place.link_to("fleet") is None


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/", 200),
        ("/static/app.js", 200),
        ("/static/../server.py", 404),
        ("/api/jobs/nobody", 404),
        ("/api/jobs/train/logs?task=7", 404),
        ("/api/jobs/train/logs?task=first", 400),
        ("/api/secrets", 404),
        (f"/api/changes?since=other-{'9' * 5000}", 400),
        ("/healthz", 200),
    ],
)
def test_existing_paths_answer_and_others_are_not_found(
    world: ControllerInProcess, url: str, path: str, status: int
) -> None:
    world.start("train")
    assert status_of(url + path) == status


def test_errors_name_the_nearest_job(world: ControllerInProcess, url: str) -> None:
    world.start("train")
    with pytest.raises(urllib.error.HTTPError) as refused:
        get(f"{url}/api/jobs/tarin")
    with refused.value:
        assert "did you mean train" in json.loads(refused.value.read())["error"]


class SilentHosts(ControllerConnection):
    """The Controller's word on everything but logs: the hosts that have them do not answer."""

    answer = threading.Event()
    asked: ClassVar[list[LogPosition]] = []

    def ask(self, question: Any, /, *args: Any, **kwargs: Any) -> Any:
        if question is LogCalls.fetch_task_logs:
            _, _, at, _ = args
            self.asked.append(at)
            assert self.answer.wait(30)
        return super().ask(question, *args, **kwargs)


def test_silent_hosts_logs_block_no_other_request(world: ControllerInProcess) -> None:
    world.start("train")
    with served(SilentHosts) as url, ThreadPoolExecutor(60) as readers:
        wait_until(lambda: status_of(f"{url}/readyz") == 200)
        same = [readers.submit(status_of, f"{url}/api/jobs/train/logs?offset=0") for _ in range(10)]
        wait_until(lambda: SilentHosts.asked)
        time.sleep(2 * SHARED_S)
        same += [readers.submit(status_of, f"{url}/api/jobs/train/logs?offset=0") for _ in range(10)]
        others = [readers.submit(status_of, f"{url}/api/jobs/train/logs?offset={n}") for n in range(1, 40)]
        try:
            wait_until(lambda: len(SilentHosts.asked) >= 2)
            assert status_of(url) == 200
            eval_ = world.submit("eval", slices=(3,))
            wait_until(lambda: eval_ in get(f"{url}/api/jobs"), timeout_s=10)
            assert not any(reader.done() for reader in (*same, *others))
        finally:
            SilentHosts.answer.set()
        assert {reader.result() for reader in (*same, *others)} == {200}
    assert sum(at.offset == 0 for at in SilentHosts.asked) == 1, "who asks the same while it is awaited shares it"


def test_pages_without_controller_say_so(bare_cluster: ControllerInProcess) -> None:
    with served() as url:
        wait_until(lambda: get(f"{url}/api/cluster"))
        assert "no Controller runs" in get(f"{url}/api/cluster")["now"]["trouble"]
        assert status_of(f"{url}/readyz") == 503
        assert status_of(f"{url}/healthz") == 200


def test_page_of_rebound_foreign_name_is_refused(url: str) -> None:
    assert status_of(f"{url}/api/jobs", Host="evil.example:8267") == 403
    assert status_of(f"{url}/api/jobs", Host="localhost:8267") == 200


def test_only_read_methods_are_allowed(url: str) -> None:
    where = urlsplit(url)
    for method in ("POST", "PUT", "DELETE"):
        connection = http.client.HTTPConnection(where.hostname or "", where.port)
        connection.request(method, "/api/jobs/train")
        assert connection.getresponse().status == 405
        connection.close()


def test_pages_allow_no_foreign_code(url: str) -> None:
    with urllib.request.urlopen(url) as answer:
        assert "default-src 'self'" in answer.headers["Content-Security-Policy"]
        assert answer.headers["X-Content-Type-Options"] == "nosniff"


def test_token_is_required_to_read(world: ControllerInProcess) -> None:
    with served(token="open sesame") as url:
        assert status_of(f"{url}/api/jobs") == 401
        assert status_of(f"{url}/api/jobs", Authorization="Bearer wrong") == 401
        assert status_of(f"{url}/api/jobs", Authorization="Bearer open sesame") == 200
        assert status_of(f"{url}/healthz") == 200
        keeps_cookies = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
        with pytest.raises(urllib.error.HTTPError) as refused:
            keeps_cookies.open(f"{url}/login", b"token=sesame")
        with refused.value:
            assert refused.value.code == 403
        with keeps_cookies.open(f"{url}/login", b"token=open+sesame") as page:
            assert b'<nav aria-label="Pages">' in page.read()


def test_undecodable_bytes_are_no_token(world: ControllerInProcess) -> None:
    with served(token="open sesame") as url:
        assert status_of(f"{url}/api/jobs", Authorization="Bearer \xff") == 401
        assert status_of(f"{url}/api/jobs", Cookie=f"{COOKIE}=\xff") == 401
        for charset in ("utf-8", "klingon"):
            headers = {"Content-Type": f"application/x-www-form-urlencoded; charset={charset}"}
            login = urllib.request.Request(f"{url}/login", b"token=\xff", headers)
            with pytest.raises(urllib.error.HTTPError) as refused:
                urllib.request.urlopen(login, timeout=30)
            with refused.value:
                assert refused.value.code == 400


def test_public_address_requires_a_token() -> None:
    assert [is_loopback(host) for host in ("127.0.0.1", "::1", "localhost", "0.0.0.0", "head")] == [True] * 3 + [
        False
    ] * 2
    nobody = dict[str, str]()
    assert require_token("127.0.0.1", nobody) is None
    with pytest.raises(InvalidRequestError, match="IRIS_RAY_DASHBOARD_TOKEN"):
        require_token("0.0.0.0", nobody)
    with pytest.raises(InvalidRequestError, match="IRIS_RAY_DASHBOARD_TOKEN"):
        require_token("0.0.0.0", {"RAY_AUTH_TOKEN": "of the cluster"})
    with pytest.raises(InvalidRequestError, match="IRIS_RAY_DASHBOARD_TOKEN has 3 characters"):
        require_token("0.0.0.0", {"IRIS_RAY_DASHBOARD_TOKEN": "own"})
    assert require_token("0.0.0.0", {"IRIS_RAY_DASHBOARD_TOKEN": "o" * 16}) == "o" * 16


def test_cookie_is_a_session_and_not_the_token(world: ControllerInProcess) -> None:
    with served(token="open sesame") as url:
        jar = http.cookiejar.CookieJar()
        reader = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(jar))
        reader.open(f"{url}/login", b"token=open+sesame").close()
        (cookie,) = jar
        assert "sesame" not in (cookie.value or "")
        assert status_of(f"{url}/api/jobs", Cookie=f"{COOKIE}={cookie.value}") == 200
        assert status_of(f"{url}/api/jobs", Cookie=f"{COOKIE}=open sesame") == 401
    with served(token="open sesame") as url:
        assert status_of(f"{url}/api/jobs", Cookie=f"{COOKIE}={cookie.value}") == 401


def test_links_of_other_sites_find_a_reader_logged_in(world: ControllerInProcess) -> None:
    """A browser sends cookies with such a link only if they are not Strict."""
    with served(token="open sesame") as url:
        jar = http.cookiejar.CookieJar()
        reader = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(jar))
        reader.open(f"{url}/login", b"token=open+sesame").close()
        (cookie,) = jar
        assert cookie.get_nonstandard_attr("SameSite") == "Lax"
        link = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"}
        assert status_of(f"{url}/", Cookie=f"{COOKIE}={cookie.value}", **link) == 200
        image = link | {"Sec-Fetch-Mode": "no-cors", "Sec-Fetch-Dest": "image"}
        assert status_of(f"{url}/", Cookie=f"{COOKIE}={cookie.value}", **image) == 403


def test_wrong_tokens_lock_nobody_out(world: ControllerInProcess) -> None:
    """All readers behind a proxy have one address."""
    with served(token="open sesame") as url:
        assert {status_of(f"{url}/api/jobs", Authorization="Bearer wrong") for _ in range(30)} == {401}
        assert status_of(f"{url}/api/jobs", Authorization="Bearer open sesame") == 200


def test_connections_closed_within_bodies_leave_no_line_in_the_log(
    world: ControllerInProcess, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Those that the server closes for want of places, and those that their callers reset."""
    monkeypatch.setattr(http_server, "MOST_CONNECTIONS", 3)
    with served(token="open sesame") as url, contextlib.ExitStack() as callers:
        for _ in range(20):
            caller = callers.enter_context(socket.create_connection(("127.0.0.1", urlsplit(url).port or 0)))
            caller.settimeout(30.0)
            caller.sendall(b"POST /login HTTP/1.1\r\nHost: a\r\nContent-Length: 99\r\nExpect: 100-continue\r\n\r\n")
            assert b" 100 " in caller.recv(2**10)  # it waits for the body now, or is about to
            caller.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        callers.close()
        wait_until(lambda: status_of(f"{url}/healthz") == 200)
    assert not [record.message for record in caplog.records if record.name == http_server.__name__]


def test_page_beyond_the_limit_takes_the_place_of_the_oldest(
    world: ControllerInProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "MOST_PAGES", 2)
    with served() as url, contextlib.ExitStack() as stack:
        wait_until(lambda: status_of(f"{url}/readyz") == 200)
        version = get(f"{url}/api/snapshot")["version"]
        old, *_, new = [
            stack.enter_context(urllib.request.urlopen(f"{url}/api/changes?since={version}", timeout=30))
            for _ in range(3)
        ]
        while old.readline():
            pass
        world.start("train")
        assert new.readline()


@pytest.mark.parametrize(
    ("mode", "dest", "origin", "status"),
    [
        ("no-cors", "image", None, 403),
        ("cors", "empty", "https://evil.example", 403),
        ("navigate", "iframe", None, 403),
        ("navigate", "document", "https://evil.example", 403),
        ("navigate", "document", None, 200),
    ],
)
@pytest.mark.parametrize("site", ["cross-site", "same-site"])
def test_pages_of_other_sites_ask_the_cluster_nothing(
    url: str, site: str, mode: str, dest: str, origin: str | None, status: int
) -> None:
    """As browsers say it; a link may lead here."""
    headers = {"Sec-Fetch-Site": site, "Sec-Fetch-Mode": mode, "Sec-Fetch-Dest": dest}
    assert status_of(f"{url}/api/jobs", **headers, **({"Origin": origin} if origin else {})) == status
    assert status_of(f"{url}/api/jobs", **headers | {"Sec-Fetch-Site": "same-origin"}) == 200


def test_silent_host_of_one_job_holds_up_no_page_of_another(world: ControllerInProcess) -> None:
    world.start("train")
    eval_ = world.submit("eval", slices=(3,))
    with served(SilentHosts) as url, ThreadPoolExecutor(2 * THREADS) as readers:
        wait_until(lambda: status_of(f"{url}/readyz") == 200)
        SilentHosts.answer.clear()
        asked = len(SilentHosts.asked)
        waits = [readers.submit(status_of, f"{url}/api/jobs/train/logs?offset={n}") for n in range(2 * THREADS)]
        wait_until(lambda: len(SilentHosts.asked) - asked >= THREADS // 2)
        try:
            time.sleep(0.5)
            assert get(f"{url}/api/jobs/{eval_}")["job_id"] == eval_
            assert not any(one.done() for one in waits)
        finally:
            SilentHosts.answer.set()
        assert {one.result() for one in waits} == {200}
