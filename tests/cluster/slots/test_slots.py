"""Slots on real Ray nodes: models load in processes of their own, give way to each other, and outlive their hosts."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from itertools import count, islice
from pathlib import Path
from typing import Any

import psutil
import pytest

from iris_ray import SlotClient, SlotHosts
from iris_ray.cli.conventions import USAGE
from iris_ray.errors import (
    InvalidSlotError,
    JobCancelledError,
    ModelUnavailableError,
    RequestExpiredError,
    RequestLostError,
)
from iris_ray.slots.actors.streams import MOST_PIECES
from iris_ray.slots.core.policy import IdleFor, PlacementPolicy, ServingPolicy
from iris_ray.testing import SimulatedCluster
from tests.support.command_line import environment, iris, iris_json
from tests.support.processes import host_of
from tests.support.waiting import wait_until

MB = 2**20
EAGER = ServingPolicy(placement=PlacementPolicy(stale_at=IdleFor(0.0), min_residency_s=0.0))


class Echo:
    """Answers with its word, the payload and its process."""

    def __init__(self, word: str = "echo") -> None:
        self.word = word

    def __call__(self, payload: Any) -> tuple[str, Any, int]:
        if isinstance(payload, Exception):
            raise payload
        return self.word, payload, os.getpid()


class Counter:
    """Counts, slowly, in pieces."""

    @staticmethod
    def memory_estimate() -> dict[int, int]:
        return {1: 600 * MB}

    async def __call__(self, pieces: int):
        for number in range(pieces):
            await asyncio.sleep(0.02)
            yield number


class Broken:
    def load(self) -> None:
        raise FileNotFoundError("no weights")

    def __call__(self, payload: Any) -> None:
        raise AssertionError("it never loads")


class Chips:
    """Says which chips it sees, after a moment."""

    def __call__(self, payload: int) -> tuple[int, str]:
        time.sleep(0.05)
        return payload, os.environ.get("TPU_VISIBLE_CHIPS", "all")


class Sleeper:
    async def __call__(self, seconds: float) -> str:
        await asyncio.sleep(seconds)
        return "slept"


class Endless:
    """Counts without end, in a thread or in an event loop, and writes down how far it is."""

    def __init__(self, made: Path) -> None:
        self.made = made

    def __call__(self, kind: str) -> Any:
        return self._in_thread() if kind == "thread" else self._in_loop()

    def _in_thread(self):
        for number in count():
            time.sleep(0.002)
            self.made.write_text(str(number))
            yield number

    async def _in_loop(self):
        for number in count():
            await asyncio.sleep(0.002)
            self.made.write_text(str(number))
            yield number


@pytest.fixture(scope="module")
def client(cluster: SimulatedCluster) -> Iterator[SlotClient]:
    """One host with room for one large model."""
    with SlotClient([SlotHosts(memory=1000 * MB)], policy=EAGER) as client:
        client.register(Echo, memory={1: 600 * MB}, arguments={"word": "hi"})
        client.register(Counter, concurrency=4)
        yield client


def slot_of(client: SlotClient, model: str) -> int:
    """The pid of the only slot of a model."""
    (pid,) = [slot.pid for slot in client.status().slots if slot.model == model and slot.state == "ready"]
    return pid


def test_models_answer_stream_raise_and_give_way(client: SlotClient) -> None:
    word, payload, pid = client.submit("Echo", "a").result(60)
    assert (word, payload) == ("hi", "a")
    assert client.submit("Echo", "b").result(60)[2] == pid
    with pytest.raises(ZeroDivisionError, match="mine"):
        client.submit("Echo", ZeroDivisionError("mine")).result(60)
    assert list(client.stream("Counter", 3)) == [0, 1, 2]
    assert client.submit("Counter", 2).result(60) == [0, 1]
    assert [slot.model for slot in client.status().slots] == ["Counter"]
    assert not psutil.pid_exists(pid)


@pytest.mark.proof
@pytest.mark.parametrize("kind", ["thread", "loop"])
def test_model_waits_for_slow_reader_and_stops_for_leaver(client: SlotClient, tmp_path: Path, kind: str) -> None:
    client.register(Endless, "Endless " + kind, memory={1: 600 * MB}, arguments={"made": tmp_path / "made"})
    model = "Endless " + kind
    pieces = client.stream(model, kind)
    assert next(pieces) == 0
    ahead = settled(tmp_path / "made")
    assert MOST_PIECES <= ahead <= 3 * MOST_PIECES
    assert list(islice(pieces, 500)) == list(range(1, 501))
    pieces.close()
    wait_until(lambda: not is_busy(client), 20)
    future = client.submit(model, kind)
    wait_until(lambda: is_busy(client))
    assert future.cancel()
    wait_until(lambda: not is_busy(client), 20)
    with pytest.raises(TimeoutError):
        asyncio.run(asyncio.wait_for(client.generate(model, kind), 1.0))
    wait_until(lambda: not is_busy(client), 20)
    with client.session(model) as session:
        pieces = session.stream(kind)
        assert next(pieces) == 0
        assert settled(tmp_path / "made") <= 3 * MOST_PIECES
        assert list(islice(pieces, 500)) == list(range(1, 501))
        pieces.close()
        assert next(session.stream(kind)) == 0


def settled(made: Path) -> int:
    """What a model has written down once it goes no further."""

    def twice_the_same() -> str | None:
        first = made.read_text()
        time.sleep(0.5)
        return first if first and made.read_text() == first else None

    return int(wait_until(twice_the_same, 30))


def is_busy(client: SlotClient) -> bool:
    return any(slot.active for slot in client.status().slots)


NAMED = """
import sys, time, ray
from iris_ray import SlotClient, SlotHosts
from iris_ray.errors import SlotNameTakenError
ray.init(sys.argv[1], log_to_driver=False)
try:
    client = SlotClient([SlotHosts()], name=sys.argv[2])
except SlotNameTakenError as error:
    print(error, flush=True)
    with SlotClient.connect(sys.argv[2]) as client:
        print(client.submit("Echo", 1).result(60)[0], flush=True)
else:
    print("serves", flush=True)
    time.sleep(600)
"""


@pytest.mark.long
def test_name_belongs_to_driver_serving_under_it(cluster: SimulatedCluster) -> None:
    with driver(cluster, "again") as first:
        assert read(first) == "serves\n"
        first.kill()
    with SlotClient([SlotHosts(memory=1000 * MB)], name="again", policy=EAGER) as client:
        client.register(Echo, memory={1: 600 * MB})
        with driver(cluster, "again") as other:
            assert f"in process {os.getpid()} on" in read(other)
            assert read(other) == "echo\n"
            assert other.wait(60) == 0
        assert client.submit("Echo", 2).result(60)[1] == 2


@contextmanager
def driver(cluster: SimulatedCluster, name: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", NAMED, cluster.address, name]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment(cluster)) as started:
        try:
            yield started
        finally:
            started.kill()


def read(driver: subprocess.Popen[str]) -> str:
    assert driver.stdout is not None
    return driver.stdout.readline()


@pytest.mark.proof
def test_killed_slot_is_remade_and_its_request_reruns(client: SlotClient) -> None:
    client.register(Sleeper, memory={1: 600 * MB})
    client.submit("Sleeper", 0.0).result(60)
    first = slot_of(client, "Sleeper")
    long = client.submit("Sleeper", 3.0)
    once = client.submit("Sleeper", 3.0, retriable=False, priority=True)
    wait_until(lambda: any(slot.active for slot in client.status().slots))
    os.kill(first, signal.SIGKILL)
    assert long.result(60) == "slept"
    assert slot_of(client, "Sleeper") != first
    assert isinstance(once.exception(60), RequestLostError | type(None))


@pytest.mark.proof
def test_requests_expire_and_are_cancelled(client: SlotClient) -> None:
    client.register(Sleeper, memory={1: 600 * MB})
    client.submit("Sleeper", 0.0).result(60)
    held = client.submit("Sleeper", 30.0, request_id="held")
    wait_until(lambda: any(slot.active for slot in client.status().slots))
    with pytest.raises(RequestExpiredError, match="deadline"):
        client.submit("Sleeper", 0.0, timeout_s=0.5).result(60)
    with pytest.raises(InvalidSlotError, match="held is here already"):
        client.submit("Sleeper", 0.0, request_id="held").result(60)
    client.cancel("held")
    with pytest.raises(JobCancelledError):
        held.result(60)
    assert client.submit("Sleeper", 0.0).result(60) == "slept"


@pytest.mark.proof
def test_waiting_for_unloadable_model_is_told_why(client: SlotClient) -> None:
    client.register(Broken, memory={1: MB})
    with pytest.raises(ModelUnavailableError, match="FileNotFoundError: no weights"):
        client.submit("Broken", 0).result(120)


@pytest.mark.proof
@pytest.mark.way_in
def test_dying_host_under_load_loses_no_request(cluster: SimulatedCluster) -> None:
    hosts = [SlotHosts(tpu_type="v4-16", memory=16 * 2**30)]
    with SlotClient(hosts, policy=EAGER) as client:
        client.register(Chips, memory={4: 2**30}, concurrency=2)
        futures: list[Future[Any]] = [client.submit("Chips", number) for number in range(60)]
        wait(futures[:20], timeout=120)
        slots = [slot for slot in client.status().slots if slot.state == "ready"]
        assert slots
        name, worker = host_of(cluster, slots[0].pid)
        cluster.kill_host(name, worker)
        assert sorted(future.result(180)[0] for future in futures) == list(range(60))


@pytest.mark.long
def test_slots_of_one_host_see_own_chips(cluster: SimulatedCluster) -> None:
    with SlotClient([SlotHosts(tpu_type="v4-16", memory=16 * 2**30)], policy=EAGER) as client:
        client.register(Chips, memory={2: 2**30})
        futures = [client.submit("Chips", number) for number in range(20)]
        assert {future.result(120)[1] for future in futures} == {"0,1", "2,3"}


@pytest.mark.long
def test_command_line_shows_loads_and_evicts(cluster: SimulatedCluster) -> None:
    with SlotClient([SlotHosts(memory=1000 * MB)], name="slots", policy=EAGER) as client:
        client.register(Echo, memory={1: 600 * MB})
        client.register(Counter)
        assert "Echo is loaded" in iris(cluster, "slots", "prewarm", "Echo").stdout
        wait_until(lambda: any(slot.state == "ready" for slot in client.status().slots))
        (row,) = iris_json(cluster, "slots", "ls")
        assert (row["model"], row["state"]) == ("Echo", "ready")
        assert row["slot_id"] in iris(cluster, "slots", "ls").stdout
        assert [each["slots"] for each in iris_json(cluster, "slots", "models")] == [1, 0]
        assert "Echo: nothing waits for it" in iris(cluster, "slots", "why", "Echo").stdout
        assert SlotClient([SlotHosts()], name="slots").status().runners.keys() == {"cpu-0"}
        iris(cluster, "slots", "evict", row["slot_id"])
        wait_until(lambda: not client.status().slots)
        assert "no model" in iris(cluster, "slots", "why", "Ecco", code=USAGE).stderr
    assert "no process serves models" in iris(cluster, "slots", "ls", code=USAGE).stderr
