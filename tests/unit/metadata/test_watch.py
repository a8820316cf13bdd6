"""The watch on a host's metadata server."""

import asyncio
import contextlib
import json
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from datetime import UTC, datetime
from enum import Enum
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from typing import NamedTuple

import pytest

from iris_ray.metadata.watch import PREEMPTION_NOTICE_S, UPCOMING_MAINTENANCE, MetadataWatch, WatchTimes
from iris_ray.model.notices import HostNotice, NoticeKind
from iris_ray.testing.metadata_server import PREEMPTED, HostMetadata, MetadataFault, MetadataValue
from tests.support.waiting import wait_until

QUICK = WatchTimes(long_poll=60, answer=1, at_least=0.2, look=0.02, first_pause=0.02, longest_pause=0.1)


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
    await asyncio.to_thread(wait_until, lambda: host.asked[key] >= times)


async def test_watch_tells_preemption_once_and_at_once(host_metadata: HostMetadata) -> None:
    async with watching(host_metadata.address) as watch:
        await asked(host_metadata, PREEMPTED, 2)  # the second one waits for a change
        await watch.hears_nothing(host_metadata)
        began = time.time()
        host_metadata.preempt()
        notice = await watch.next()
        assert notice.kind is NoticeKind.PREEMPTION
        assert notice.deadline is not None
        assert began <= notice.deadline - PREEMPTION_NOTICE_S <= time.time()
        await watch.hears_nothing(host_metadata)
    assert host_metadata.asked[PREEMPTED] <= 4


async def test_watch_started_after_announcement_tells_it(host_metadata: HostMetadata) -> None:
    host_metadata.preempt()
    host_metadata.announce_maintenance(60)
    async with watching(host_metadata.address) as watch:
        both = {NoticeKind.PREEMPTION, NoticeKind.MAINTENANCE}
        assert {(await watch.next()).kind, (await watch.next()).kind} == both
        await watch.hears_nothing(host_metadata)


async def test_watch_tells_maintenance_when_near_and_when_moved(host_metadata: HostMetadata) -> None:
    async with watching(host_metadata.address) as watch:
        host_metadata.announce_maintenance(7 * 86_400, "SCHEDULED")
        await watch.hears_nothing(host_metadata)
        for starts_in_s in (300, 60):
            began = time.time()
            host_metadata.announce_maintenance(starts_in_s)
            notice = await watch.next()
            assert notice.kind is NoticeKind.MAINTENANCE
            assert "UNSCHEDULED" in notice.reason
            assert notice.deadline is not None
            assert began - 1 <= notice.deadline - starts_in_s <= time.time()  # it is told in whole seconds
        await watch.hears_nothing(host_metadata)


WITHDRAWALS: dict[str, Callable[[HostMetadata], None]] = {
    "an error": lambda host_metadata: host_metadata.call_off_maintenance(),
    "the text NONE": lambda host_metadata: host_metadata.set(UPCOMING_MAINTENANCE, MetadataValue("NONE")),
    "an empty object": lambda host_metadata: host_metadata.set(UPCOMING_MAINTENANCE, MetadataValue("{ }")),
    "no such key": lambda host_metadata: host_metadata.set(UPCOMING_MAINTENANCE, None),
    "a week later": lambda host_metadata: host_metadata.announce_maintenance(7 * 86_400),
}


@pytest.mark.parametrize("way", WITHDRAWALS)
async def test_watch_tells_cancellation_once_and_next_maintenance(host_metadata: HostMetadata, way: str) -> None:
    async with watching(host_metadata.address) as watch:
        WITHDRAWALS[way](host_metadata)
        await watch.hears_nothing(host_metadata)  # nothing was announced
        for _ in range(2):
            host_metadata.announce_maintenance(300)
            assert (await watch.next()).kind is NoticeKind.MAINTENANCE
            WITHDRAWALS[way](host_metadata)
            await watch.hears_that_it_is_called_off()
            await watch.hears_nothing(host_metadata)


@pytest.mark.parametrize("fault", MetadataFault)
async def test_watch_does_not_take_silence_for_cancellation(host_metadata: HostMetadata, fault: MetadataFault) -> None:
    times = WatchTimes(long_poll=0.5, answer=0.1, look=0.05, first_pause=0.05, longest_pause=0.1)
    async with watching(host_metadata.address, times=times) as watch:
        host_metadata.announce_maintenance(300)
        await watch.next()
        host_metadata.misbehave(fault)
        await asked(host_metadata, UPCOMING_MAINTENANCE, host_metadata.asked[UPCOMING_MAINTENANCE] + 4)
        host_metadata.misbehave(None)
        await watch.hears_nothing(host_metadata)
        host_metadata.call_off_maintenance()
        await watch.hears_that_it_is_called_off()


async def test_later_watch_tells_cancellation_of_earlier_announcement(host_metadata: HostMetadata) -> None:
    host_metadata.announce_maintenance(300)
    async with watching(host_metadata.address) as earlier:
        announced = await earlier.next()
    async with watching(host_metadata.address, announced=announced) as watch:
        await watch.hears_nothing(host_metadata)
        host_metadata.call_off_maintenance()
        await watch.hears_that_it_is_called_off()
        await watch.hears_nothing(host_metadata)


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
def test_watch_believes_cancellation_after_two_looks(looks: list[Look], called_off_at: int | None) -> None:
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
        await asyncio.to_thread(wait_until, lambda: answered() >= len(looks) + 3)
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


@pytest.mark.parametrize("fault", MetadataFault)
async def test_watch_survives_misbehaving_server(host_metadata: HostMetadata, fault: MetadataFault) -> None:
    times = WatchTimes(long_poll=0.5, answer=0.2, at_least=0.05, look=0.05, first_pause=0.05, longest_pause=0.1)
    async with watching(host_metadata.address, times=times) as watch:
        await asked(host_metadata, PREEMPTED, 2)
        host_metadata.misbehave(fault)
        await watch.hears_nothing(host_metadata, 2)
        host_metadata.preempt()
        await watch.hears_nothing(host_metadata, 2)
        host_metadata.misbehave(None)
        assert (await watch.next()).kind is NoticeKind.PREEMPTION


def test_watch_reads_no_answer_without_end_and_takes_true_after_any_other_word() -> None:
    written = 0
    said = iter(["FALSE", "", "TRUE"])

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            nonlocal written
            self.send_response(200)
            self.send_header("Metadata-Flavor", "Google")
            self.end_headers()
            if UPCOMING_MAINTENANCE not in self.path:
                self.wfile.write(next(said, "TRUE").encode() if PREEMPTED in self.path else b"")
                return
            with contextlib.suppress(ConnectionError):
                while written < 1 << 30:
                    written += self.wfile.write(b"x" * (1 << 16))

        def log_message(self, format: str, *args: object) -> None:
            pass

    async def scenario(address: str) -> None:
        async with watching(address) as watch:
            assert (await watch.next()).kind is NoticeKind.PREEMPTION
            await asyncio.to_thread(wait_until, lambda: written > 0)
            await asyncio.sleep(1.5)  # longer than an answer may take
            assert not watch.task.done()

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        asyncio.run(scenario(f"127.0.0.1:{server.server_port}"))
        server.shutdown()
        thread.join()
    assert written < 500 << 20, "one answer was not read for a second"


async def test_watch_moves_on_to_next_address(host_metadata: HostMetadata) -> None:
    host_metadata.preempt()
    async with watching("127.0.0.1:1", "no-such-host_metadata.invalid", host_metadata.address) as watch:
        assert (await watch.next()).kind is NoticeKind.PREEMPTION


def test_watch_without_server_says_so_once_and_slows_down(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger="iris_ray")

    async def scenario(address: str) -> None:
        times = WatchTimes(answer=1, first_pause=0.05, longest_pause=10)
        async with watching(address, times=times) as watch:
            await asyncio.to_thread(wait_until, lambda: len(questions) >= 4)
            assert watch.told.empty()

    with stranger(b"FALSE") as (address, questions):
        asyncio.run(scenario(address))
    pauses = [later.at - earlier.at for earlier, later in pairwise(questions)]
    assert all(pause > least for pause, least in zip(pauses, (0.049, 0.099, 0.199), strict=False))
    (record,) = caplog.records
    assert record.levelno == logging.INFO
    assert "not a metadata server of Google's" in record.message


def test_watch_believes_no_other_server() -> None:
    """Other clouds have something at the same address."""

    async def scenario(address: str) -> None:
        async with watching(address) as watch:
            await asyncio.to_thread(wait_until, lambda: len(questions) >= 3)
            assert watch.told.empty()

    with stranger(b"TRUE") as (address, questions):
        asyncio.run(scenario(address))


def test_watch_does_not_hurry_server_without_long_poll() -> None:
    async def scenario(address: str) -> None:
        times = WatchTimes(at_least=0.1, look=60)
        async with watching(address, times=times) as watch:
            await asyncio.to_thread(wait_until, lambda: len(polls()) >= 4)
            assert watch.told.empty()

    def polls() -> list[float]:
        return [question.at for question in questions if PREEMPTED in question.path]

    began = time.monotonic()
    with stranger(b"FALSE", {"Metadata-Flavor": "Google"}) as (address, questions):
        asyncio.run(scenario(address))
    assert all(at - began > 0.099 * number for number, at in enumerate(polls()))


def test_watch_uses_no_proxy(host_metadata: HostMetadata, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        host_metadata.preempt()
        async with watching(host_metadata.address) as watch:
            assert (await watch.next()).kind is NoticeKind.PREEMPTION

    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    with stranger(b"FALSE", {"Metadata-Flavor": "Google"}) as (proxy, questions):
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
