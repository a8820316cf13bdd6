"""The journal when the store fails: nothing is lost, nothing older comes after something newer."""

import asyncio
from collections.abc import Callable

import pytest

from iris_ray.actors import journal as module
from iris_ray.actors.journal import Journal
from iris_ray.lifecycle import JobState
from iris_ray.records import JobRecord
from tests.worlds import World


class FailingStore:
    """Keeps what is put, but for the first few calls; the real one fails while the GCS is away."""

    def __init__(self, failures: int, meanwhile: Callable[[], object] = lambda: None) -> None:
        self.failures = failures
        self.meanwhile = meanwhile
        self.values: dict[str, bytes | None] = {}
        self.calls: list[str] = []

    async def set(self, key: str, value: bytes | None) -> None:
        self.calls.append(f"begin {key}")
        await asyncio.sleep(0)
        if self.failures:
            self.failures -= 1
            self.meanwhile()
            raise ConnectionError("no GCS")
        self.values[key] = value
        self.calls.append(f"end {key}")


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setattr(module, "WRITE_AGAIN_S", 0.0)
    world = World()
    world.add_slice("a")
    return world


def journal_on(store: FailingStore, monkeypatch: pytest.MonkeyPatch) -> Journal:
    monkeypatch.setattr(module, "ClusterStore", lambda: store)
    return Journal()


def test_everything_is_put_down_however_often_the_store_fails(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    store = FailingStore(3)
    world.submit("one")
    world.submit("other")
    asyncio.run(journal_on(store, monkeypatch).write(world.state))
    assert set(store.values) == {"job/0/one", "job/0/other"}
    assert not world.state.unrecorded
    world.state.check()


def test_newer_record_wins_over_one_that_failed(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    job = world.submit()
    store = FailingStore(1, meanwhile=world.schedule)
    asyncio.run(journal_on(store, monkeypatch).write(world.state))
    record = store.values["job/0/job"]
    assert record is not None
    assert job.state is JobState.RUNNING
    assert JobRecord.from_bytes(record).job.state is JobState.RUNNING
    world.state.check()


def test_pool_that_ends_while_the_store_fails_is_deleted(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    store = FailingStore(1, meanwhile=lambda: journal.note_pool("me", None))
    journal = journal_on(store, monkeypatch)
    journal.note_pool("me", "a handle")
    asyncio.run(journal.write(world.state))
    assert store.values == {"pool/me": None}


def test_pool_is_put_down_before_its_jobs(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A successor takes a job whose pool it does not know for one whose process is gone."""
    store = FailingStore(1)
    journal = journal_on(store, monkeypatch)
    world.submit()
    journal.note_pool("me", None)
    asyncio.run(journal.write(world.state))
    assert store.calls == ["begin pool/me", "begin pool/me", "end pool/me", "begin job/0/job", "end job/0/job"]
    world.state.check()
