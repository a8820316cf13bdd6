"""The test of a suspected host: its chips, memory, disk and links."""

import asyncio
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from iris_ray.actors.calls.asking import Actor
from iris_ray.actors.host.chips import Devices
from iris_ray.actors.host.ledger import ProcessLedger
from iris_ray.preflight import host as preflight
from iris_ray.preflight.host import PIECE_BYTES, PIECES, PINGS, measure_link, problem_of


@pytest.fixture
def devices(tmp_path: Path) -> Devices:
    chip = tmp_path / "accel0"
    chip.touch()
    return Devices(tmp_path / "libtpu_lockfile", (chip,))


@pytest.fixture
def ledger(own_host: Path) -> ProcessLedger:
    return ProcessLedger(own_host, True)


def test_sound_host_passes_and_keeps_no_file(own_host: Path, devices: Devices, ledger: ProcessLedger) -> None:
    before = set(own_host.iterdir())
    assert problem_of(own_host, devices, ledger) is None
    assert problem_of(own_host, None, ledger) is None
    assert set(own_host.iterdir()) == before


def test_chip_that_does_not_open_is_named(own_host: Path, devices: Devices, ledger: ProcessLedger) -> None:
    (chip,) = devices.chips
    chip.unlink()
    chip.mkdir()
    assert f"its chip {chip} can't be opened" in (problem_of(own_host, devices, ledger) or "")


def test_process_that_holds_chip_is_named(own_host: Path, devices: Devices, ledger: ProcessLedger) -> None:
    with open(devices.chips[0]):
        assert f"held by pid {os.getpid()}" in (problem_of(own_host, devices, ledger) or "")


def test_host_without_memory_fails(own_host: Path, ledger: ProcessLedger, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=100 << 20))
    assert problem_of(own_host, None, ledger) == "only 100 MiB of its memory are free"


def test_disk_that_fails_lies_or_crawls_is_named(
    own_host: Path, ledger: ProcessLedger, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "its disk fails: " in (problem_of(own_host / "gone", None, ledger) or "")
    monkeypatch.setattr(preflight, "DISK_S", 0.0)
    assert "its disk took" in (problem_of(own_host, None, ledger) or "")
    monkeypatch.setattr(Path, "read_bytes", lambda path: b"")
    assert problem_of(own_host, None, ledger) == "its disk returns other bytes than were written"


class Peer:
    """A host at the other end of a link."""

    def __init__(self, latency_s: float) -> None:
        self.latency_s = latency_s
        self.calls = self.received = 0

    async def healthy(self) -> bool:
        self.calls += 1
        await asyncio.sleep(self.latency_s)
        return True

    async def take_bytes(self, data: bytes) -> None:
        self.received += len(data)


async def test_link_is_measured_in_both_ways() -> None:
    peer = Peer(0.02)
    link = await measure_link(Actor[Any].here(peer, "peer"))
    assert (peer.calls, peer.received) == (PINGS, PIECES * PIECE_BYTES)
    assert 0.02 <= link.latency_s < 10.0
    assert link.bytes_per_s > 0.0
