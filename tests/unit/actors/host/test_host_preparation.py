"""A host is prepared once, by one try at a time, and again only if that has failed."""

import asyncio
from pathlib import Path

import pytest

from iris_ray.actors.calls.background import BackgroundTasks
from iris_ray.actors.host.chips import Devices, host_devices
from iris_ray.actors.host.host_actor import HostPreparation
from iris_ray.actors.host.ledger import ProcessLedger


class StubbornOnce(ProcessLedger):
    """A ledger with a leftover that the first try can't end."""

    tries = 0

    def end_leftovers(self, grace_s: float = 0.0, recorder: tuple[int, int] | None = None) -> list[str]:
        self.tries += 1
        return ["pid 7"] if self.tries == 1 else []


@pytest.fixture
def devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Devices:
    """A simulated host's chips, which no process holds."""
    monkeypatch.setenv("IRIS_RAY_HOST_DIR", str(tmp_path))
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "accel0").touch()
    return host_devices()


async def test_failed_preparation_is_shared_by_callers_and_retried(
    devices: Devices, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ledger = StubbornOnce(tmp_path)
    preparation = HostPreparation("slice-a host 1", ledger, devices, BackgroundTasks())
    failures = await asyncio.gather(*(preparation.ensure() for _ in range(3)), return_exceptions=True)
    assert [str(failure) for failure in failures] == [
        "slice-a host 1: processes of an earlier task can't be ended: pid 7"
    ] * 3
    assert await preparation.ensure() is None
    assert await preparation.ensure() is None
    assert ledger.tries == 2
    assert [record.getMessage() for record in caplog.records] == ["preparing slice-a host 1 failed"]


async def test_leftover_on_host_without_chips_is_logged_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("IRIS_RAY_HOST_DIR", str(tmp_path))
    assert (await HostPreparation("cpu-1", StubbornOnce(tmp_path), None, BackgroundTasks()).ensure()) is None
    assert "pid 7" in caplog.text
