"""How long callers of the HTTP server for models wait while others attack it; about six minutes.

    python benchmarks/slots_front.py      # --seconds 3 --rounds 3: of each attack; medians of the rounds
    python benchmarks/slots_front.py --only half-sent
    python benchmarks/slots_front.py --only slot     # all attacks at once on slots, one of which dies; four minutes

The server is a process of its own, with a model that answers at once, in five pieces. Ten callers ask it, 50 times a
second together; attackers are a third process. The model stands aside: what slots cost is in slots_on_ray.py. The last
two rows have `iris-ray serve` on a simulated cluster instead, with a program as the model. In the last one a slot and a
host die in the quiet time, too.
"""

import argparse
import asyncio
import gc
import gzip
import json
import multiprocessing
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
from ray import cloudpickle

from iris_ray import SlotClient
from iris_ray.slots.front import ApiKey, HttpFront
from iris_ray.testing import SimulatedCluster

SECRET, ATTACKERS = "sk-" + "a" * 20, "sk-" + "m" * 20
AT_A_TIME = 2
"""As many requests of the attackers' key reach a model on slots at a time: else they fill its places."""
CALLERS, EVERY_S = 10, 0.2


class Client:
    """A model that takes no time."""

    async def generate(self, model: str, body: dict[str, Any], **how: Any) -> list[str]:
        return [piece async for piece in self.astream(model, body, **how)]

    async def astream(self, model: str, body: dict[str, Any], **how: Any) -> AsyncGenerator[str, None]:
        cloudpickle.dumps(body)  # as it would travel
        endless = isinstance(body, dict) and body["prompt"] == "endless"
        for _ in range(10**6 if endless else 5):
            yield "word " * 200
            await asyncio.sleep(0.001 if endless else 0)


def serve(pipe: Any) -> None:
    gc.collect()
    gc.freeze()  # as `iris-ray serve`
    made: Any = Client()
    with HttpFront(made, keys=[ApiKey("alice", SECRET), ApiKey("mallory", ATTACKERS)]) as front:
        pipe.send(int(front.url.rsplit(":", 1)[1]))
        pipe.recv()


# -- attacks -----------------------------------------------------------------------------------------------------------


def head(*more: str, secret: str = ATTACKERS) -> bytes:
    lines = ("POST /v1/completions HTTP/1.1", "Host: localhost", f"Authorization: Bearer {secret}", *more, "", "")
    return "\r\n".join(lines).encode()


async def send(port: int, data: bytes, then_wait_s: float, sent: Any) -> None:
    """Send bytes over a new connection, and read what comes. Count connections and bytes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    sent[0] += 1
    with suppress(ConnectionError, TimeoutError):
        async with asyncio.timeout(then_wait_s):
            for at in range(0, len(data), 2**16):
                writer.write(data[at : at + 2**16])
                await writer.drain()
                sent[1] += min(2**16, len(data) - at)
            while await reader.read(2**16):
                pass
    writer.close()


def body(data: bytes, *more: str) -> bytes:
    return head(f"Content-Length: {len(data)}", *more) + data


def bomb() -> bytes:
    return body(
        gzip.compress(b'{"model": "m", "prompt": [' + b"[]," * (20 * 2**20) + b"[]]}"), "Content-Encoding: gzip"
    )


ATTACKS: dict[str, tuple[Callable[[], bytes], float, float]] = {
    "compressed bodies of 60 MiB": (bomb, 5.0, 0.1),
    "bodies of 131,000 lists": (lambda: body(b'{"model": "m", "prompt": [%b[]]}' % (b"[]," * 131_000)), 30.0, 0.1),
    "bodies of 3.9 MiB": (lambda: body(b'{"model": "m", "prompt": "%b"}' % (b"a" * 31 * 2**17)), 5.0, 0.1),
    "half-sent headers": (lambda: head()[:60], 60.0, 0.01),
    "half-sent bodies": (lambda: head("Content-Length: 4000000") + b"{", 60.0, 0.01),
    "unknown keys": (lambda: head("Content-Length: 2", secret="guess") + b"{}", 5.0, 0.02),
    "callers who leave early": (lambda: body(b'{"model": "m", "prompt": "endless", "stream": true}'), 0.5, 0.1),
}
"""What is sent over each connection, how long that stays open in seconds, and after how many seconds the next comes."""


def take_what_is_left() -> None:
    """Have this process use the cores only while nobody else does: attackers are on other machines."""
    os.setsid()  # else it shares the priority of the server's session
    os.nice(19)
    with suppress(OSError):  # a kernel without sessions' priorities
        Path("/proc/self/autogroup").write_text("19")


def attack(port: int, names: Sequence[str], pipe: Any, sent: Any) -> None:
    """Attack until this process is killed."""
    take_what_is_left()

    async def forever(name: str) -> None:
        make, stays_s, every_s = ATTACKS[name]
        data = make()
        pipe.send(None)
        running = set[asyncio.Task[None]]()
        while True:
            task = asyncio.create_task(send(port, data, stays_s, sent))
            running.add(task)
            task.add_done_callback(running.discard)
            await asyncio.sleep(every_s)

    async def together() -> None:
        await asyncio.gather(*map(forever, names))

    asyncio.run(together())


# -- callers -----------------------------------------------------------------------------------------------------------


async def measure(port: int, seconds: float) -> tuple[list[float], int]:
    """Return how long answers took, and how many failed."""
    took, failed = list[float](), 0
    data = json.dumps({"model": "m", "prompt": "hello"}).encode()
    headers = {"Authorization": f"Bearer {SECRET}"}

    async def call(number: int) -> None:
        nonlocal failed
        await asyncio.sleep(EVERY_S * number / CALLERS)
        until = time.monotonic() + seconds
        async with aiohttp.ClientSession(headers=headers) as session:
            while (began := time.monotonic()) < until:
                try:
                    async with session.post(f"http://127.0.0.1:{port}/v1/completions", data=data) as answer:
                        await answer.read()
                        failed += answer.status != 200
                except aiohttp.ClientError:
                    failed += 1
                took.append(time.monotonic() - began)
                await asyncio.sleep(max(0.0, EVERY_S - took[-1]))

    await asyncio.gather(*map(call, range(CALLERS)))
    return took, failed


def hundredths(took: Sequence[float]) -> tuple[float, float]:
    """Return the median and the 99th of a hundred, in ms."""
    found = statistics.quantiles(took, n=100)
    return 1000 * found[49], 1000 * found[98]


class Rounds:
    """What was measured in turn without attackers and with them."""

    def __init__(self) -> None:
        self.quiet, self.attacked = list[tuple[float, float]](), list[tuple[float, float]]()
        self.rates = list[tuple[float, float]]()
        self.failed = 0

    def add(self, took: Sequence[float], failed: int, rates: tuple[float, float] | None = None) -> None:
        """Add a round; with the attackers' rates, if there were any."""
        (self.quiet if rates is None else self.attacked).append(hundredths(took))
        self.failed += failed
        self.rates += [] if rates is None else [rates]

    def show(self, name: str) -> None:
        """Print medians of the rounds, and the ratio of each round."""
        quiet, attacked = medians(self.quiet), medians(self.attacked)
        connections, mebibytes = medians(self.rates)
        pairs = zip(self.quiet, self.attacked, strict=True)
        ratios = " ".join(f"{under[1]:.0f}/{rest[1]:.0f}={under[1] / rest[1]:.1f}" for rest, under in pairs)
        columns = f"{quiet[0]:10.1f}{quiet[1]:9.1f}{attacked[0]:15.1f}{attacked[1]:9.1f}"
        rates = f"{connections:7.0f} a second, {mebibytes:5.1f} MiB"
        print(f"{name:30}{columns}{attacked[1] / quiet[1]:9.1f} ×{self.failed:8}  {rates}  ({ratios})", flush=True)


def medians(rounds: Sequence[tuple[float, float]]) -> tuple[float, float]:
    first, second = (statistics.median(each) for each in zip(*rounds, strict=True))
    return first, second


class Sent:
    """What attackers have sent."""

    def __init__(self, counts: Any) -> None:
        self._counts = counts
        self.begin()

    def begin(self) -> None:
        """Measure from now on."""
        self._before, self._at = list(self._counts), time.monotonic()

    def rates(self) -> tuple[float, float]:
        """Return connections and MiB a second since it began."""
        connections, size = (now - before for now, before in zip(self._counts, self._before, strict=True))
        seconds = time.monotonic() - self._at
        return connections / seconds, size / seconds / 2**20


@contextmanager
def attacked(port: int, names: Sequence[str]) -> Iterator[Sent]:
    """Attack a server in some ways at once."""
    spawn = multiprocessing.get_context("spawn")
    here, there = spawn.Pipe()
    counts = spawn.RawArray("d", 2)
    attacker = spawn.Process(target=attack, args=(port, names, there, counts))
    attacker.start()
    try:
        for _ in names:
            here.recv()
        yield Sent(counts)
    finally:
        attacker.kill()
        attacker.join()


def in_turn(names: Sequence[str], seconds: float, rounds: int) -> None:
    """One attack after the other, on a server without slots."""
    spawn = multiprocessing.get_context("spawn")
    to_server, of_server = spawn.Pipe()
    server = spawn.Process(target=serve, args=(of_server,))
    server.start()
    port = to_server.recv()
    asyncio.run(measure(port, 1.0))
    for name in names:
        found = Rounds()
        for _ in range(rounds):  # in turn, because the machine changes
            found.add(*asyncio.run(measure(port, seconds)))
            with attacked(port, [name]) as sent:
                time.sleep(0.5)
                sent.begin()
                found.add(*asyncio.run(measure(port, seconds)), sent.rates())
            time.sleep(1.0)
        found.show(name)
    to_server.send(None)
    server.join()


# -- deaths ------------------------------------------------------------------------------------------------------------

TOGETHER, DEATHS = "all of them at once", "while a slot and a host die"
SETTLE_S = 10.0
"""Until the processes of a new host have started: they take both cores for some seconds."""
PROGRAM = Path(__file__).resolve().parents[1] / "tests" / "support" / "served_program.py"
FILE = f"""
port = 0
[[hosts]]
tpu_type = "v4-8"
count = 2
memory_gb = 16
[models.m]
command = "{sys.executable} {PROGRAM} --port {{port}}"
memory_gb = {{ 4 = 10 }}
concurrency = 8
replicas = 2
[keys.alice]
secret = "{SECRET}"
[keys.mallory]
secret = "{ATTACKERS}"
at_a_time = {AT_A_TIME}
"""


@contextmanager
def serving(cluster: SimulatedCluster) -> Iterator[int]:
    """`iris-ray serve` with a model on two hosts; yields its port."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "models.toml"
        path.write_text(FILE)
        command = [sys.executable, "-m", "iris_ray", "serve", str(path)]
        how: Any = {"stdout": subprocess.PIPE, "text": True, "env": {**os.environ, "RAY_ADDRESS": cluster.address}}
        with subprocess.Popen(command, **how) as process:
            assert process.stdout is not None
            try:
                yield next(int(at[1]) for line in process.stdout if (at := re.search(r"at http\S+:(\d+)/v1;", line)))
            finally:
                process.send_signal(signal.SIGINT)


def on_slots(seconds: float, rounds: int) -> None:
    """All attacks at once; then the process of one slot is killed, and the host of the other, without them and with."""
    found = Rounds(), Rounds()
    with SimulatedCluster({"v4-8": 3}, quiet=True) as cluster, serving(cluster) as port:
        client = SlotClient.connect("slots")

        def ready() -> list[int]:
            while len(pids := [row.pid for row in client.status().slots if row.state == "ready" and row.pid]) < 2:
                time.sleep(0.2)
            return pids

        def kill() -> None:
            first, _ = ready()
            os.kill(first, signal.SIGKILL)
            time.sleep(seconds / 3)
            _, second = ready()  # else nobody is left to answer
            name = next(each for each in cluster.slice_names if second in cluster.host_pids(each, 0))
            cluster.kill_host(name, 0)

        def look(sent: Sent | None = None) -> None:
            for they_die in (False, True):
                ready()
                time.sleep(SETTLE_S)
                dying = threading.Timer(seconds / 3, kill)
                if they_die:
                    dying.start()
                if sent is not None:
                    sent.begin()
                measured = asyncio.run(measure(port, seconds))
                found[they_die].add(*measured, None if sent is None else sent.rates())
                if they_die:
                    dying.join()
                    cluster.add_slice("v4-8")

        for _ in range(rounds):
            asyncio.run(measure(port, 1.0))
            look()
            with attacked(port, list(ATTACKS)) as sent:
                look(sent)
    for rounds_of, name in zip(found, (TOGETHER, DEATHS), strict=True):
        rounds_of.show(name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="", help="the attacks that have these words in their names")
    arguments = parser.parse_args()
    columns = f"{'':30}{'quiet p50':>10}{'p99':>9}{'attacked p50':>15}{'p99':>9} ms{'ratio':>8}{'failed':>8}"
    print(f"{columns}  connections of attackers  (ratio of each round)")
    if names := [name for name in ATTACKS if arguments.only in name]:
        in_turn(names, arguments.seconds, arguments.rounds)
    if arguments.only in TOGETHER or arguments.only in DEATHS:
        on_slots(5 * arguments.seconds, arguments.rounds)


if __name__ == "__main__":
    main()
