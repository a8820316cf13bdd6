"""Metadata servers: the emulator, read by clients that other people wrote, and the watch on it."""

import asyncio
import contextlib
import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from datetime import UTC, datetime
from enum import Enum
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import requests

from iris_ray.actors.host.maintenance import denies_maintenance, maintenance_notice
from iris_ray.actors.host.metadata_client import WELL_KNOWN_HOSTS, Answer, metadata_hosts
from iris_ray.actors.host.metadata_watch import PREEMPTION_NOTICE_S, UPCOMING_MAINTENANCE, MetadataWatch, WatchTimes
from iris_ray.model.notices import HostNotice, NoticeKind
from iris_ray.model.topology import get_tpu_config
from iris_ray.testing.metadata_server import PREEMPTED, Fault, HostMetadata, MetadataServers, Value
from iris_ray.testing.tpu_host import TPUHost

FLAVOR = {"Metadata-Flavor": "Google"}
QUICK = WatchTimes(long_poll=60, answer=1, at_least=0.2, look=0.05, first_pause=0.05, longest_pause=0.2)


@pytest.fixture(scope="module")
def servers() -> Iterator[MetadataServers]:
    servers = MetadataServers()
    yield servers
    servers.close()


@pytest.fixture
def host(servers: MetadataServers) -> HostMetadata:
    return servers.serve("127.0.0.1", {"project/project-id": "my-project"})


def ask(host: HostMetadata, key: str, headers: dict[str, str] = FLAVOR, **query: str | float) -> requests.Response:
    return requests.get(f"http://{host.address}/computeMetadata/v1/{key}", query, headers=headers, timeout=10)


# --------------------------------------------------------------------------------------------------- the emulator


def test_answers_carry_flavor_and_etag_and_the_etag_changes_with_the_value(host: HostMetadata) -> None:
    before, again = ask(host, PREEMPTED), ask(host, PREEMPTED)
    host.preempt()
    after = ask(host, PREEMPTED)
    assert (before.text, after.text) == ("FALSE", "TRUE")
    assert before.headers["Metadata-Flavor"] == "Google"
    assert before.headers["ETag"] == again.headers["ETag"] != after.headers["ETag"]


def test_questions_that_were_not_meant_for_it_are_refused(host: HostMetadata) -> None:
    assert ask(host, PREEMPTED, {}).status_code == 403
    assert ask(host, PREEMPTED, FLAVOR | {"X-Forwarded-For": "10.0.0.1"}).status_code == 403
    assert requests.get(f"http://{host.address}/", timeout=10).headers["Metadata-Flavor"] == "Google"


def test_what_there_is_not_is_404_and_no_maintenance_is_503_with_a_word(host: HostMetadata) -> None:
    assert ask(host, "instance/nothing").status_code == 404
    assert ask(host, "instance/service-accounts/default/token").status_code == 404
    none = ask(host, UPCOMING_MAINTENANCE, alt="json")
    assert (none.status_code, list(none.json())) == (503, ["error"])
    host.set(UPCOMING_MAINTENANCE, None)
    assert ask(host, UPCOMING_MAINTENANCE).status_code == 404


def test_long_poll_waits_for_a_change(host: HostMetadata) -> None:
    etag = ask(host, PREEMPTED).headers["ETag"]
    questions: list[dict[str, Any]] = [{"last_etag": etag}, {}]
    for known in questions:
        host.set(PREEMPTED, Value("FALSE", etag=etag))
        timer = threading.Timer(0.1, host.preempt)
        began = time.monotonic()
        timer.start()
        assert ask(host, PREEMPTED, wait_for_change="true", timeout_sec=8, **known).text == "TRUE"
        assert 0.1 <= time.monotonic() - began < 5
        timer.join()


def test_long_poll_answers_at_once_if_the_last_etag_is_an_old_one(host: HostMetadata) -> None:
    etag = ask(host, PREEMPTED).headers["ETag"]
    host.preempt()
    assert ask(host, PREEMPTED, wait_for_change="true", last_etag=etag).text == "TRUE"


def test_long_poll_without_a_change_answers_after_its_timeout(host: HostMetadata) -> None:
    began = time.monotonic()
    assert ask(host, PREEMPTED, wait_for_change="true", timeout_sec=0.3).text == "FALSE"
    assert time.monotonic() - began >= 0.3


def test_misbehaves_on_request(host: HostMetadata) -> None:
    host.misbehave(Fault.UNAVAILABLE)
    assert ask(host, PREEMPTED).status_code == 503
    host.misbehave(Fault.HANGS)
    with pytest.raises(requests.Timeout):
        requests.get(f"http://{host.address}/", timeout=0.3)
    host.misbehave(Fault.HANGS_UP)
    with pytest.raises(requests.ConnectionError):
        ask(host, PREEMPTED)
    host.misbehave(None)
    assert ask(host, PREEMPTED).text == "FALSE"


def test_closing_does_not_wait_for_those_who_wait(capfd: pytest.CaptureFixture[str]) -> None:
    servers = MetadataServers()
    host = servers.serve("127.0.0.1", {})
    failed: list[Exception] = []

    def poll() -> None:
        try:
            ask(host, PREEMPTED, wait_for_change="true")
        except requests.RequestException as error:
            failed.append(error)

    waiting = threading.Thread(target=poll)
    waiting.start()
    until(lambda: host.asked[PREEMPTED] == 1)
    began = time.monotonic()
    servers.close()
    servers.close()
    waiting.join(5)
    assert failed
    assert time.monotonic() - began < 3
    assert capfd.readouterr().err == ""


def test_google_auth_finds_a_server_but_no_credentials(host: HostMetadata) -> None:
    script = """
        import google.auth.exceptions, google.auth.compute_engine._metadata as metadata, google.auth.transport.requests
        request = google.auth.transport.requests.Request()
        print(metadata.ping(request), metadata.get_project_id(request))
        try:
            metadata.get_service_account_token(request)
        except google.auth.exceptions.TransportError:
            print("no token")
    """
    assert run_python(script, GCE_METADATA_HOST=host.address, GCE_METADATA_IP=host.address).splitlines() == [
        "True my-project",
        "no token",
    ]


def test_ray_reads_the_same_from_the_metadata_as_from_the_environment(servers: MetadataServers) -> None:
    """Ray asks metadata.google.internal, so this server is its proxy. No environment variable helps it here."""
    script = """
        from ray._private.accelerators import TPUAcceleratorManager as manager
        print(manager.get_current_node_accelerator_labels())
        print(manager.get_current_node_accelerator_type(), manager.get_current_node_additional_resources())
    """
    tpu = TPUHost("my-slice", 3, get_tpu_config("v4-32"), "ab" * 28, "127.1.2.3", Path("/tmp/nowhere"))
    addresses = ["127.1.2.0", "127.1.2.1", "127.1.2.2", "127.1.2.3"]
    address = servers.serve("127.0.0.1", tpu.metadata(addresses)).address
    environment = {name: value for name, value in tpu.environment(addresses).items() if name.startswith("TPU_")}
    told = run_python(script, **environment)
    assert "my-slice" in told
    assert run_python(script, http_proxy=f"http://{address}", no_proxy="") == told


def run_python(script: str, **environment: str) -> str:
    """What a script prints, in an environment without a TPU and a proxy but for what is given."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("TPU_", "GCE_")) and "proxy" not in k.lower()}
    lines = [line.removeprefix("        ") for line in script.splitlines()]
    command = [sys.executable, "-c", "\n".join(lines)]
    return subprocess.run(command, env=kept | environment, text=True, stdout=subprocess.PIPE, check=True).stdout


# ------------------------------------------------------------------------------------------------------ the watch


class Watching:
    """A running watch, and what it told."""

    def __init__(self, *addresses: str, times: WatchTimes = QUICK, announced: HostNotice | None = None) -> None:
        self.told: asyncio.Queue[HostNotice | str] = asyncio.Queue()
        call_off = partial(self.told.put_nowait, "called off")
        self.task = asyncio.create_task(
            MetadataWatch(self.told.put_nowait, call_off, addresses, times, announced).run()
        )

    async def next(self) -> HostNotice:
        """The next notice."""
        notice = await asyncio.wait_for(self.told.get(), 10)
        assert isinstance(notice, HostNotice)
        return notice

    async def hears_that_it_is_called_off(self) -> None:
        assert await asyncio.wait_for(self.told.get(), 10) == "called off"

    async def hears_nothing(self, host: HostMetadata, questions: int = 4) -> None:
        """It asks the host so many questions more, and tells nothing for all the answers."""
        await asked(host, UPCOMING_MAINTENANCE, host.asked[UPCOMING_MAINTENANCE] + questions)
        assert self.told.empty()
        assert not self.task.done()


@contextlib.asynccontextmanager
async def watching(
    *addresses: str, times: WatchTimes = QUICK, announced: HostNotice | None = None
) -> AsyncIterator[Watching]:
    watch = Watching(*addresses, times=times, announced=announced)
    yield watch
    watch.task.cancel()
    began = time.monotonic()
    with pytest.raises(asyncio.CancelledError):
        await watch.task
    assert time.monotonic() - began < 20, "it waits for no answer"


async def asked(host: HostMetadata, key: str, times: int = 1) -> None:
    """Returns when the host was asked so often."""
    await asyncio.to_thread(until, lambda: host.asked[key] >= times)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.01)


def test_watch_tells_of_a_preemption_once_and_at_once(host: HostMetadata) -> None:
    async def scenario() -> None:
        async with watching(host.address) as watch:
            await asked(host, PREEMPTED, 2)  # the second one waits for a change
            await watch.hears_nothing(host)
            began = time.time()
            host.preempt()
            notice = await watch.next()
            assert notice.kind is NoticeKind.PREEMPTION
            assert notice.deadline is not None
            assert began <= notice.deadline - PREEMPTION_NOTICE_S <= time.time()
            await watch.hears_nothing(host)
        assert host.asked[PREEMPTED] <= 4

    asyncio.run(scenario())


def test_watch_that_begins_after_the_announcement_hears_of_it(host: HostMetadata) -> None:
    async def scenario() -> None:
        host.preempt()
        host.announce_maintenance(60)
        async with watching(host.address) as watch:
            both = {NoticeKind.PREEMPTION, NoticeKind.MAINTENANCE}
            assert {(await watch.next()).kind, (await watch.next()).kind} == both
            await watch.hears_nothing(host)

    asyncio.run(scenario())


def test_watch_tells_of_maintenance_when_it_comes_near_and_again_when_it_is_moved(host: HostMetadata) -> None:
    async def scenario() -> None:
        async with watching(host.address) as watch:
            host.announce_maintenance(7 * 86_400, "SCHEDULED")
            await watch.hears_nothing(host)
            for starts_in_s in (300, 60):
                began = time.time()
                host.announce_maintenance(starts_in_s)
                notice = await watch.next()
                assert notice.kind is NoticeKind.MAINTENANCE
                assert "UNSCHEDULED" in notice.reason
                assert notice.deadline is not None
                assert began - 1 <= notice.deadline - starts_in_s <= time.time()  # it is told in whole seconds
            await watch.hears_nothing(host)

    asyncio.run(scenario())


WITHDRAWALS: dict[str, Callable[[HostMetadata], None]] = {
    "an error": lambda host: host.call_off_maintenance(),
    "the text NONE": lambda host: host.set(UPCOMING_MAINTENANCE, Value("NONE")),
    "an empty object": lambda host: host.set(UPCOMING_MAINTENANCE, Value("{ }")),
    "no such key": lambda host: host.set(UPCOMING_MAINTENANCE, None),
    "a week later": lambda host: host.announce_maintenance(7 * 86_400),
}


@pytest.mark.parametrize("way", WITHDRAWALS)
def test_watch_tells_once_that_a_maintenance_is_called_off_and_of_the_next_one(host: HostMetadata, way: str) -> None:
    async def scenario() -> None:
        async with watching(host.address) as watch:
            WITHDRAWALS[way](host)
            await watch.hears_nothing(host)  # nothing was announced
            for _ in range(2):
                host.announce_maintenance(300)
                assert (await watch.next()).kind is NoticeKind.MAINTENANCE
                WITHDRAWALS[way](host)
                await watch.hears_that_it_is_called_off()
                await watch.hears_nothing(host)

    asyncio.run(scenario())


@pytest.mark.parametrize("fault", Fault)
def test_watch_does_not_take_silence_for_calling_off(host: HostMetadata, fault: Fault) -> None:
    async def scenario() -> None:
        times = WatchTimes(long_poll=0.5, answer=0.1, look=0.05, first_pause=0.05, longest_pause=0.1)
        async with watching(host.address, times=times) as watch:
            host.announce_maintenance(300)
            await watch.next()
            host.misbehave(fault)
            await asked(host, UPCOMING_MAINTENANCE, host.asked[UPCOMING_MAINTENANCE] + 4)
            host.misbehave(None)
            await watch.hears_nothing(host)
            host.call_off_maintenance()
            await watch.hears_that_it_is_called_off()

    asyncio.run(scenario())


def test_watch_that_begins_later_tells_that_what_was_announced_before_is_called_off(host: HostMetadata) -> None:
    async def scenario() -> None:
        host.announce_maintenance(300)
        async with watching(host.address) as earlier:
            announced = await earlier.next()
        async with watching(host.address, announced=announced) as watch:
            await watch.hears_nothing(host)
            host.call_off_maintenance()
            await watch.hears_that_it_is_called_off()
            await watch.hears_nothing(host)

    asyncio.run(scenario())


class Look(Enum):
    """What one look for maintenance finds."""

    PLANNED = "it begins in five minutes"
    NOTHING = "nothing is planned"
    STRANGE = "an answer that says neither"
    SILENCE = "no metadata server answers"


P, N, STRANGE, SILENCE = Look


@pytest.mark.parametrize(
    ("looks", "called_off_at"),
    [
        ([P, N, N], 3),
        ([P, P, N, P, N, N], 6),
        ([P, N, P, N, P, N, P], None),  # a single look is not believed, not even one now and one later
        ([P, N, SILENCE, N, P], None),  # silence between two looks makes them none in a row
        ([P, N, STRANGE, N, P], None),
        ([P, N, SILENCE, N, STRANGE, N, SILENCE, N, N], 9),
        ([P, SILENCE, STRANGE, SILENCE, N, STRANGE, N, N], 8),
        ([N, N, STRANGE, P, N, SILENCE, STRANGE, P], None),
    ],
)
def test_watch_believes_two_looks_in_a_row_that_a_maintenance_is_called_off(
    looks: list[Look], called_off_at: int | None
) -> None:
    """It looks again as soon as it can; the server knows which look it answers."""

    async def scenario(address: str) -> list[tuple[str, int]]:
        told: list[tuple[str, int]] = []
        times = WatchTimes(at_least=60, look=0.005, first_pause=0.005, longest_pause=0.005)
        watch = MetadataWatch(
            lambda notice: told.append((notice.kind.value, answered())),
            lambda: told.append(("called off", answered())),
            [address],
            times,
        )
        watching = asyncio.create_task(watch.run())
        await asyncio.to_thread(until, lambda: answered() >= len(looks) + 3)
        watching.cancel()
        return told

    with one_look_after_another(looks) as (address, answered):
        told = asyncio.run(scenario(address))
    calling_off = [] if called_off_at is None else [("called off", called_off_at)]
    assert told == [("maintenance", looks.index(P) + 1), *calling_off]


@contextlib.contextmanager
def one_look_after_another(looks: Sequence[Look]) -> Iterator[tuple[str, Callable[[], int]]]:
    """A metadata server that answers one look after another as told, and all later ones as the last; its address, and
    how many looks it has answered."""
    answered = 0
    start = datetime.fromtimestamp(time.time() + 300, UTC).isoformat()
    bodies = {
        P: (200, json.dumps({"window_start_time": start})),
        N: (503, '{ "error": "no notifications have been received yet, try again later" }'),
        STRANGE: (200, "<html>"),
    }

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            nonlocal answered
            status, body, is_silent = 200, "FALSE", False
            if UPCOMING_MAINTENANCE in self.path:
                look = looks[min(answered, len(looks) - 1)]
                answered += 1
                is_silent = look is SILENCE
                status, body = bodies.get(look, (200, "another server's page"))
            self.send_response(status)
            if not is_silent:
                self.send_header("Metadata-Flavor", "Google")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        yield f"127.0.0.1:{server.server_port}", lambda: answered
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("fault", Fault)
def test_watch_outlasts_a_server_that_misbehaves(host: HostMetadata, fault: Fault) -> None:
    async def scenario() -> None:
        times = WatchTimes(long_poll=0.5, answer=0.2, at_least=0.05, look=0.05, first_pause=0.05, longest_pause=0.1)
        async with watching(host.address, times=times) as watch:
            await asked(host, PREEMPTED, 2)
            host.misbehave(fault)
            await watch.hears_nothing(host, 2)
            host.preempt()
            await watch.hears_nothing(host, 2)
            host.misbehave(None)
            assert (await watch.next()).kind is NoticeKind.PREEMPTION

    asyncio.run(scenario())


def test_watch_goes_on_to_the_next_address(host: HostMetadata) -> None:
    async def scenario() -> None:
        host.preempt()
        async with watching("127.0.0.1:1", "no-such-host.invalid", host.address) as watch:
            assert (await watch.next()).kind is NoticeKind.PREEMPTION

    asyncio.run(scenario())


def test_watch_that_finds_nobody_says_so_once_and_asks_ever_more_seldom(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger="iris_ray")

    async def scenario(address: str) -> None:
        times = WatchTimes(answer=1, first_pause=0.05, longest_pause=10)
        async with watching(address, times=times) as watch:
            await asyncio.to_thread(until, lambda: len(questions) >= 4)
            assert watch.told.empty()

    with stranger(b"FALSE") as (address, questions):
        asyncio.run(scenario(address))
    pauses = [later.at - earlier.at for earlier, later in pairwise(questions)]
    assert all(pause > least for pause, least in zip(pauses, (0.049, 0.099, 0.199), strict=False))
    (record,) = caplog.records
    assert record.levelno == logging.INFO
    assert "no metadata server of Google's" in record.message


def test_watch_does_not_believe_anybody_else() -> None:
    """Other clouds have something at the same address."""

    async def scenario(address: str) -> None:
        async with watching(address) as watch:
            await asyncio.to_thread(until, lambda: len(questions) >= 3)
            assert watch.told.empty()

    with stranger(b"TRUE") as (address, questions):
        asyncio.run(scenario(address))


def test_watch_does_not_hurry_a_server_that_keeps_no_question() -> None:
    async def scenario(address: str) -> None:
        times = WatchTimes(at_least=0.1, look=60)
        async with watching(address, times=times) as watch:
            await asyncio.to_thread(until, lambda: len(polls()) >= 4)
            assert watch.told.empty()

    def polls() -> list[float]:
        return [question.at for question in questions if PREEMPTED in question.path]

    began = time.monotonic()
    with stranger(b"FALSE", FLAVOR) as (address, questions):
        asyncio.run(scenario(address))
    assert all(at - began > 0.099 * number for number, at in enumerate(polls()))


def test_watch_uses_no_proxy(host: HostMetadata, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        host.preempt()
        async with watching(host.address) as watch:
            assert (await watch.next()).kind is NoticeKind.PREEMPTION

    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    with stranger(b"FALSE", FLAVOR) as (proxy, questions):
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
            monkeypatch.setenv(name, f"http://{proxy}")
        asyncio.run(scenario())
    assert not questions


class Question(NamedTuple):
    """A path that somebody asked for, and when by the monotonic clock."""

    path: str
    at: float


@contextlib.contextmanager
def stranger(body: bytes, headers: dict[str, str] | None = None) -> Iterator[tuple[str, list[Question]]]:
    """A web server that says the same to everything, at once: its address, and what it was asked."""
    questions: list[Question] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            questions.append(Question(self.path, time.monotonic()))
            self.send_response(200)
            for name, value in (headers or {}).items():
                self.send_header(name, value)
            self.send_header("ETag", str(len(questions)))
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        yield f"127.0.0.1:{server.server_port}", questions
        server.shutdown()
        thread.join()


def test_metadata_host_comes_from_the_environment_or_is_the_well_known_one() -> None:
    assert metadata_hosts({"GCE_METADATA_HOST": "10.0.0.1:80"}) == ("10.0.0.1:80",)
    ours = {"IRIS_RAY_METADATA_HOST": "127.1.1.1:5", "GCE_METADATA_HOST": "10.0.0.1:80"}
    assert metadata_hosts(ours) == ("127.1.1.1:5",)
    assert metadata_hosts({"GCE_METADATA_HOST": ""}) == WELL_KNOWN_HOSTS


@pytest.mark.parametrize(
    "nothing",
    [
        "",
        "{ }",
        "NONE",
        '"NONE"',
        '{ "error": "no notifications have been received yet, try again later" }',
        "[1]",
        '{"window_start_time": 17}',
        "<html>",
    ],
)
def test_maintenance_that_is_not_planned(nothing: str) -> None:
    assert maintenance_notice(nothing) is None


@pytest.mark.parametrize(
    "fields",
    [
        {"window_start_time": "2026-01-02T03:04:05Z", "maintenance_type": "SCHEDULED", "can_reschedule": "true"},
        {"windowStartTime": "2026-01-02T04:04:05+01:00", "type": "SCHEDULED"},
    ],
)
def test_maintenance_that_is_planned(fields: dict[str, str]) -> None:
    notice = maintenance_notice(json.dumps(fields))
    assert notice is not None
    assert (notice.kind, notice.deadline) == (NoticeKind.MAINTENANCE, 1_767_323_045.0)
    assert "SCHEDULED" in notice.reason
    assert "2026-01-02T0" in notice.reason


def test_maintenance_at_a_time_that_makes_no_sense_has_no_deadline() -> None:
    notice = maintenance_notice('{"window_start_time": "soon"}')
    assert notice is not None
    assert notice.deadline is None


@pytest.mark.parametrize(
    ("status", "body", "denied"),
    [
        (200, "NONE", True),
        (200, '"NONE"', True),
        (200, "{ }", True),
        (200, '{ "error": "no notifications have been received yet, try again later" }', True),
        (503, '{ "error": "no notifications have been received yet, try again later" }', True),
        (404, "<html>not found</html>", True),
        (503, "Service Unavailable", False),
        (503, "", False),
        (500, '{ "error": "internal" }', False),
        (429, "NONE", False),
        (200, "", False),
        (200, "<html>", False),
        (200, "[1]", False),
        (200, '{"window_start_time": 17}', False),
    ],
)
def test_word_that_nothing_is_planned_is_told_from_having_no_word(status: int, body: str, denied: bool) -> None:
    assert denies_maintenance(Answer(status, body, "")) is denied
