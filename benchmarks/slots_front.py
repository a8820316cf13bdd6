"""How long callers of the HTTP server for models wait while others attack it; about a minute. No Ray.

    python benchmarks/slots_front.py                 # --seconds 5: for each attack

The server is a process of its own, with a model that answers at once, in five pieces. Ten callers ask it, 50 times a
second together; attackers are a third process. The model stands aside: what slots cost is in slots_on_ray.py.
"""

import argparse
import asyncio
import gzip
import json
import multiprocessing
import statistics
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import suppress
from typing import Any

import aiohttp

from iris_ray.slots.front import ApiKey, HttpFront

SECRET = "sk-" + "a" * 20
CALLERS, EVERY_S = 10, 0.2
Attack = Callable[[int], Awaitable[None]]


class Client:
    """A model that takes no time."""

    async def generate(self, model: str, body: dict[str, Any], **how: Any) -> list[str]:
        return [piece async for piece in self.astream(model, body, **how)]

    async def astream(self, model: str, body: dict[str, Any], **how: Any) -> AsyncGenerator[str, None]:
        for _ in range(10**6 if body["prompt"] == "endless" else 5):
            yield "word " * 200
            await asyncio.sleep(0.001 if body["prompt"] == "endless" else 0)


def serve(pipe: Any) -> None:
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


BOMB = gzip.compress(b'{"model": "m", "prompt": [' + b"[]," * (20 * 2**20) + b"[]]}")
VALUES = b'{"model": "m", "prompt": "a", "x": [' + b"[]," * (2**17 - 10) + b"[]]}"
ATTACKS: dict[str, tuple[bytes, float, float]] = {
    "compressed bodies of 60 MiB": (body(BOMB, "Content-Encoding: gzip"), 5.0, 0.1),
    "bodies of 131,000 lists": (body(VALUES), 30.0, 0.1),
    "bodies of 3.9 MiB": (body(b'{"model": "m", "prompt": "' + b"a" * (39 * 2**17) + b'"}'), 5.0, 0.1),
    "half-sent headers": (head()[:60], 60.0, 0.01),
    "half-sent bodies": (head("Content-Length: 4000000") + b"{", 60.0, 0.01),
    "unknown keys": (head("Content-Length: 2", secret="guess") + b"{}", 5.0, 0.02),
    "callers who do not read": (body(b'{"model": "m", "prompt": "endless", "stream": true}'), 0.5, 0.1),
}
"""What is sent over each connection, how long that stays open in seconds, and after how many seconds the next comes."""


def attack(port: int, name: str) -> None:
    async def forever() -> None:
        data, stays_s, every_s = ATTACKS[name]
        running = set[asyncio.Task[None]]()
        while True:
            task = asyncio.create_task(send(port, data, stays_s))
            running.add(task)
            task.add_done_callback(running.discard)
            await asyncio.sleep(every_s)

    asyncio.run(forever())


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


def row(name: str, took: list[float], failed: int, quiet: float) -> float:
    hundredths = statistics.quantiles(took, n=100)
    p50, p99 = 1000 * hundredths[49], 1000 * hundredths[98]
    ratio = f"{p99 / quiet:5.1f} ×" if quiet else "       "
    print(f"{name:32}{p50:9.1f}{p99:9.1f}  {ratio}{len(took):8}{failed:7}", flush=True)
    return p99


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=6.0)
    seconds = parser.parse_args().seconds
    spawn = multiprocessing.get_context("spawn")
    here, there = spawn.Pipe()
    server = spawn.Process(target=serve, args=(there,))
    server.start()
    port = here.recv()
    asyncio.run(measure(port, 1.0))
    print(f"{'attack':32}{'p50 ms':>9}{'p99 ms':>9}{'':>9}{'asked':>8}{'failed':>7}")
    for name in ATTACKS:  # a quiet time before each, because the machine changes
        quiet = row("none", *asyncio.run(measure(port, seconds)), 0.0)
        attacker = spawn.Process(target=attack, args=(port, name))
        attacker.start()
        time.sleep(1.5)
        row(name, *asyncio.run(measure(port, seconds)), quiet)
        attacker.kill()
        attacker.join()
        time.sleep(1.0)
    here.send(None)
    server.join()


if __name__ == "__main__":
    main()
