"""How long callers of the HTTP server for models wait while others attack it; about two minutes.

    python benchmarks/slots_front.py      # --seconds 3 --rounds 3: of each attack; medians of the rounds
    python benchmarks/slots_front.py --only half-sent

The server is a process of its own, with a model that answers at once, in five pieces. Ten callers ask it, 50 times a
second together; attackers are a third process. The model stands aside: what slots cost is in slots_on_ray.py.
"""

import argparse
import asyncio
import gc
import gzip
import json
import multiprocessing
import os
import statistics
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import suppress
from typing import Any

import aiohttp
from ray import cloudpickle

from iris_ray.slots.front import ApiKey, HttpFront

SECRET = "sk-" + "a" * 20
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
    with HttpFront(made, keys=[ApiKey("alice", SECRET)]) as front:
        pipe.send(int(front.url.rsplit(":", 1)[1]))
        pipe.recv()


# -- attacks -----------------------------------------------------------------------------------------------------------


def head(*more: str, secret: str = SECRET) -> bytes:
    lines = ("POST /v1/completions HTTP/1.1", "Host: localhost", f"Authorization: Bearer {secret}", *more, "", "")
    return "\r\n".join(lines).encode()


async def send(port: int, data: bytes, then_wait_s: float) -> None:
    """Send bytes over a new connection, and read what comes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    with suppress(ConnectionError, TimeoutError):
        async with asyncio.timeout(then_wait_s):
            writer.write(data)
            await writer.drain()
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
    "callers who do not read": (lambda: body(b'{"model": "m", "prompt": "endless", "stream": true}'), 0.5, 0.1),
}
"""What is sent over each connection, how long that stays open in seconds, and after how many seconds the next comes."""


def attack(port: int, names: Sequence[str], pipe: Any) -> None:
    """Attack until this process is killed."""
    os.nice(10)  # attackers are elsewhere, and would not take the server's cores

    async def forever(name: str) -> None:
        make, stays_s, every_s = ATTACKS[name]
        data = make()
        pipe.send(None)
        running = set[asyncio.Task[None]]()
        while True:
            task = asyncio.create_task(send(port, data, stays_s))
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


def hundredths(took: list[float]) -> tuple[float, float]:
    """Return the median and the 99th of a hundred, in ms."""
    found = statistics.quantiles(took, n=100)
    return 1000 * found[49], 1000 * found[98]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="", help="the attacks that have these words in their names")
    arguments = parser.parse_args()
    spawn = multiprocessing.get_context("spawn")
    here, there = spawn.Pipe()
    to_server, of_server = spawn.Pipe()
    server = spawn.Process(target=serve, args=(of_server,))
    server.start()
    port = to_server.recv()
    asyncio.run(measure(port, 1.0))
    print(f"{'':30}{'quiet p50':>10}{'p99':>7}{'attacked p50':>15}{'p99':>7} ms{'ratio':>8}{'failed':>8}")
    for name in (name for name in ATTACKS if arguments.only in name):
        quiet, attacked, failures = list[tuple[float, float]](), list[tuple[float, float]](), 0
        for _ in range(arguments.rounds):  # in turn, because the machine changes
            quiet.append(hundredths(asyncio.run(measure(port, arguments.seconds))[0]))
            attacker = spawn.Process(target=attack, args=(port, [name], there))
            attacker.start()
            here.recv()
            time.sleep(0.5)
            took, failed = asyncio.run(measure(port, arguments.seconds))
            attacked.append(hundredths(took))
            failures += failed
            attacker.kill()
            attacker.join()
            time.sleep(1.0)
        p50, p99, under50, under99 = (
            statistics.median(each) for each in (*zip(*quiet, strict=True), *zip(*attacked, strict=True))
        )
        ratio = f"{under99 / p99:.1f} ×"
        print(f"{name:30}{p50:10.1f}{p99:7.1f}{under50:15.1f}{under99:7.1f}{ratio:>11}{failures:8}", flush=True)
    to_server.send(None)
    server.join()


if __name__ == "__main__":
    main()
