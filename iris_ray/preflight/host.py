"""A short test of a host that is suspected, before a gang returns to it: its chips, memory, disk and links."""

import asyncio
import os
import secrets
import time
from pathlib import Path
from statistics import median
from typing import Any

import psutil
from ray.actor import ActorHandle

from iris_ray.actors.calls.asking import Actor
from iris_ray.actors.host.chips import Devices, wait_until_free
from iris_ray.actors.host.ledger import ProcessLedger
from iris_ray.actors.host.services import HostPart
from iris_ray.actors.protocol.host_interface import HostInterface
from iris_ray.preflight.calls import Link, PreflightCalls

LEAST_MEMORY_BYTES = 512 << 20
"""A host with less free memory can't hold another task process."""
DISK_BYTES, DISK_S = 1 << 20, 3.0
"""The size of a file, and the longest time to write and read it."""
PINGS = 5
PIECES, PIECE_BYTES = 16, 64 << 10
"""The pieces that a link carries at a time, and their size. Ray sends larger ones through its object store."""


def problem_of(directory: Path, devices: Devices | None, ledger: ProcessLedger) -> str | None:
    """Return why this host must not take a task, as part of a sentence about the host; None if nothing is wrong.

    Args:
        directory: iris_ray's directory on the host.
        devices: its chips; None if its tasks use none.
        ledger: the host's record of task processes.
    """
    return (
        (_problem_of_chips(devices, ledger) if devices is not None else None)
        or _problem_of_memory()
        or _problem_of_disk(directory)
    )


def _problem_of_chips(devices: Devices, ledger: ProcessLedger) -> str | None:
    if (not_free := wait_until_free(devices, ledger)) is not None:
        return not_free.why
    for chip in devices.chips:
        try:
            os.close(os.open(chip, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC))
        except OSError as error:
            return f"its chip {chip} can't be opened: {error.strerror}"
    return None


def _problem_of_memory() -> str | None:
    free = psutil.virtual_memory().available
    return f"only {free >> 20} MiB of its memory are free" if free < LEAST_MEMORY_BYTES else None


def _problem_of_disk(directory: Path) -> str | None:
    path, data, began = directory / f"preflight-{os.getpid()}", secrets.token_bytes(DISK_BYTES), time.monotonic()
    try:
        with open(path, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        if path.read_bytes() != data:
            return "its disk returns other bytes than were written"
    except OSError as error:
        return f"its disk fails: {error}"
    finally:
        path.unlink(missing_ok=True)
    took = time.monotonic() - began
    return f"its disk took {took:.1f} s for {DISK_BYTES >> 20} MiB" if took > DISK_S else None


class PreflightOnHost(HostPart):
    """See `PreflightCalls`."""

    calls = (PreflightCalls,)

    async def preflight(self) -> str | None:
        host = self.host
        return await self.in_thread(problem_of, host.directory(), host.devices, host.ledger())

    async def measure_link(self, peer: ActorHandle, name: str) -> Link:
        return await measure_link(Actor(peer, name))

    async def take_bytes(self, data: bytes) -> None: ...


async def measure_link(peer: Actor[Any]) -> Link:
    """Return how fast calls and bytes get from here to another host. A call that fails raises."""
    times = []
    for _ in range(PINGS):
        began = time.monotonic()
        await peer.call(HostInterface.healthy)
        times.append(time.monotonic() - began)
    data, began = bytes(PIECE_BYTES), time.monotonic()
    await asyncio.gather(*(_received(peer, data) for _ in range(PIECES)))
    return Link(median(times), PIECES * PIECE_BYTES / (time.monotonic() - began))


async def _received(peer: Actor[Any], data: bytes) -> None:
    await peer.call(PreflightCalls.take_bytes, data)
