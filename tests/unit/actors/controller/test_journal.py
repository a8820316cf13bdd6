"""The journal when the store fails or a successor begins: no acknowledged thing is lost, nothing older comes later."""

import asyncio
from collections.abc import Callable

import pytest

from iris_ray.actors.controller import journal as module
from iris_ray.actors.controller.journal import EPOCHS_KEPT, Journal
from iris_ray.errors import DeposedError
from iris_ray.model.lifecycle import JobState
from iris_ray.state.events import PastUsageEvent, TimePassedEvent
from iris_ray.state.records import JobRecord
from tests.support.worlds import World


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

    async def has(self, key: str) -> bool:
        self.calls.append(f"has {key}")
        return key in self.values


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
    assert set(store.values) == {"clock/0", "job/0/one", "job/0/other"}
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
    journal.note_pool("me", ("a handle", 1))
    asyncio.run(journal.write(world.state))
    assert store.values.keys() == {"clock/0", "pool/0/me"}
    assert store.values["pool/0/me"] is None


def test_new_pool_is_put_down_before_its_jobs_and_what_becomes_of_it_after_them(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A successor takes a job whose pool it does not know for one whose process is gone."""
    store = FailingStore(1)
    journal = journal_on(store, monkeypatch)
    for name, process in (("new", 1), ("changed", 2), ("gone", None)):
        world.submit(name)
        journal.note_pool("me", None if process is None else ("a handle", process))
        asyncio.run(journal.write(world.state))
        pool, job = "end pool/0/me", f"end job/0/{name}"
        written = [call for call in store.calls if call in (pool, job)]
        assert written == ([pool, job] if name == "new" else [job, pool])
        store.calls.clear()
    world.state.check()


class SharedStore:
    """What two Controllers share. Something happens right before its n-th operation."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.operations: list[str] = []
        self.before: dict[int, Callable[[], object]] = {}

    def _turn(self, operation: str) -> None:
        if then := self.before.pop(len(self.operations), None):
            then()
        self.operations.append(operation)

    async def set(self, key: str, value: bytes | None) -> None:
        await asyncio.sleep(0)
        self.delete(key) if value is None else self.put(key, value)
        await asyncio.sleep(0)

    async def has(self, key: str) -> bool:
        await asyncio.sleep(0)
        self._turn(f"has {key}")
        return key in self.values

    def put(self, key: str, value: bytes) -> None:
        self._turn(f"put {key}")
        self.values[key] = value

    def put_new(self, key: str, value: bytes) -> bool:
        self._turn(f"put {key}")
        is_new = key not in self.values
        self.values.setdefault(key, value)
        return is_new

    def delete(self, key: str) -> None:
        self._turn(f"delete {key}")
        self.values.pop(key, None)

    def delete_all(self, prefix: str) -> None:
        for key in self.keys(prefix):
            self.delete(key)

    def keys(self, prefix: str) -> list[str]:
        self._turn(f"keys {prefix}")
        return [key for key in self.values if key.startswith(prefix)]

    def items(self, prefix: str) -> dict[str, bytes]:
        self._turn(f"items {prefix}")
        return {key: value for key, value in self.values.items() if key.startswith(prefix)}


def begun_on(store: SharedStore, monkeypatch: pytest.MonkeyPatch) -> Journal:
    """The journal of a Controller that has taken over."""
    monkeypatch.setattr(module, "ClusterStore", lambda: store)
    journal = Journal()
    journal.begin()
    asyncio.run(journal.take_over(World().state))
    return journal


def test_what_is_acknowledged_is_in_what_the_successor_reads_whenever_that_begins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before each of the operations of which a writing consists, and after the last."""
    outcomes = set()
    for moment in range(20):
        store, world = SharedStore(), World()
        first = begun_on(store, monkeypatch)
        second = Journal()
        for name in ("one", "other"):
            world.submit(name)
        read: list[JobRecord] = []

        def successor_begins(read: list[JobRecord] = read, second: Journal = second) -> None:
            read += second.begin()[0]

        began = len(store.operations)
        store.before[began + moment] = successor_begins
        try:
            asyncio.run(first.write(world.state))
            acknowledged = True
        except DeposedError:
            acknowledged = False
        if ended := bool(store.before):
            store.before.clear()
            successor_begins()
        if acknowledged:
            assert {record.job.spec.job_id for record in read} == {"one", "other"}
        outcomes.add((acknowledged, len(read)))
        if ended:
            break
    assert outcomes == {(False, 0), (False, 1), (False, 2), (True, 2)}


def test_successor_reads_after_it_has_its_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    store = SharedStore()
    begun_on(store, monkeypatch)
    store.operations.clear()
    Journal().begin()
    assert store.operations.index("put epoch/2") < store.operations.index("items job/1/")


def test_two_that_begin_together_get_numbers_without_a_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    store = SharedStore()
    begun_on(store, monkeypatch)
    second, third = Journal(), Journal()
    store.before[len(store.operations) + 1] = second.begin  # the third has seen the first only
    third.begin()
    assert (second.epoch, third.epoch) == (2, 3)


def test_one_that_was_frozen_while_many_came_and_went_still_finds_out(monkeypatch: pytest.MonkeyPatch) -> None:
    store, world = SharedStore(), World()
    first = begun_on(store, monkeypatch)
    for _ in range(3):
        last = begun_on(store, monkeypatch)
    world.submit()
    with pytest.raises(DeposedError, match="Controller 1 was replaced"):
        asyncio.run(first.write(world.state))
    for number in range(5, EPOCHS_KEPT + 8):
        store.values[f"epoch/{number}"] = b""
    last = begun_on(store, monkeypatch)
    assert last.epoch == EPOCHS_KEPT + 8
    assert len(store.keys("epoch/")) == EPOCHS_KEPT + 1  # they don't heap up for ever


def test_records_that_another_one_clears_away_while_they_are_read_are_found_in_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store, world = SharedStore(), World()
    first = begun_on(store, monkeypatch)
    world.submit()
    asyncio.run(first.write(world.state))
    second, third = Journal(), Journal()
    second.begin()

    def second_takes_over() -> None:
        world.state.unrecorded["job"] = set()
        loop = asyncio.new_event_loop()
        loop.run_until_complete(second.take_over(world.state))
        loop.close()

    store.before[len(store.operations) + 1] = second_takes_over  # the third knows which records are to be read
    records, _ = third.left_behind()
    assert [record.job.spec.job_id for record in records] == ["job"]


def test_successor_reads_what_users_have_held(monkeypatch: pytest.MonkeyPatch) -> None:
    store, world = SharedStore(), World()
    first = begun_on(store, monkeypatch)
    world.add_slice("a")
    world.start(user="ann")
    for _ in range(3):  # it is written once a minute
        world.now += 40.0
        world.do(TimePassedEvent(world.now))
        asyncio.run(first.write(world.state))
    assert sum(operation == "put usage/1" for operation in store.operations) == 2
    (event,) = Journal().begin()[1]
    assert isinstance(event, PastUsageEvent)
    assert event.at == 220.0
    assert event.hours["ann"]["TPU"] == pytest.approx(8 * 120 / 3600, rel=0.02)
    world.state.check()
