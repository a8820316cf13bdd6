"""The journal when the store fails or a successor begins: no acknowledged thing is lost, nothing older comes later."""

import asyncio
import pickle
from collections.abc import Callable, Iterator
from functools import partial

import pytest

from iris_ray.actors.controller import journal as module
from iris_ray.actors.controller import journal as record_collector
from iris_ray.actors.controller import write_ahead_log
from iris_ray.actors.controller.journal import EPOCHS_KEPT, Journal
from iris_ray.errors import DeposedError
from iris_ray.model.constraints import AttributeValue
from iris_ray.model.lifecycle import JobState
from iris_ray.model.limits import Limits
from iris_ray.model.options import PriorityBand
from iris_ray.model.teams import Quota, Team
from iris_ray.model.workers import TPU_NAME, TPU_VM_COUNT
from iris_ray.state.events import LimitsSetEvent, PastUsageEvent, TeamsSetEvent, TimePassedEvent, WorkerRegisteredEvent
from iris_ray.state.records import JobRecord
from tests.support.worlds import World


class FailingStore:
    """Keeps what is put, but for the first few calls; the real one fails while the GCS is away.

    Args:
        failures: how many calls fail.
        too_late: whether these calls do what they should before they fail.
        meanwhile: called whenever one fails.
    """

    def __init__(self, failures: int, too_late: bool = False, meanwhile: Callable[[], object] = lambda: None) -> None:
        self.failures = failures
        self.too_late = too_late
        self.meanwhile = meanwhile
        self.values: dict[str, bytes] = {}

    def _fail(self) -> None:
        if self.failures:
            self.failures -= 1
            self.meanwhile()
            raise ConnectionError("no GCS")

    async def add(self, key: str, value: bytes) -> bool:
        await asyncio.sleep(0)
        is_new = key not in self.values
        if self.too_late or not self.failures:
            self.values.setdefault(key, value)
        self._fail()
        return is_new

    async def fetch(self, key: str) -> bytes | None:
        self._fail()
        return self.values.get(key)

    async def set(self, key: str, value: bytes | None) -> None:
        await asyncio.sleep(0)
        self._fail()
        self.values.pop(key, None)
        if value is not None:
            self.values[key] = value

    @property
    def writings(self) -> list[dict[str, bytes | None]]:
        """What each entry of the log says."""
        return [pickle.loads(entry) for key, entry in sorted(self.values.items()) if key.startswith("log/")]


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.setattr(write_ahead_log, "WRITE_AGAIN_S", 0.0)
    world = World("a")
    yield world
    world.check()


def journal_on(store: FailingStore, monkeypatch: pytest.MonkeyPatch) -> Journal:
    monkeypatch.setattr(module, "ClusterStore", lambda: store)
    return Journal()


@pytest.mark.parametrize("too_late", [False, True])
@pytest.mark.parametrize("failures", [0, 1, 3])
def test_write_is_stored_whole_and_once_despite_store_failures(
    world: World, monkeypatch: pytest.MonkeyPatch, failures: int, too_late: bool
) -> None:
    store = FailingStore(failures, too_late)
    journal = journal_on(store, monkeypatch)
    for name in ("one", "other"):
        world.submit(name)
    journal.note_pool("me", ("a handle", 1))
    asyncio.run(journal.write(world.state))
    assert [set(values) for values in store.writings] == [{"clock/0", "job/0/one", "job/0/other", "pool/0/me"}]
    assert not world.state.unrecorded
    world.state.check()


def test_changes_during_store_failure_come_with_next_write(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def meanwhile() -> None:
        world.schedule()
        journal.note_pool("me", None)

    job = world.submit()
    store = FailingStore(1, too_late=True, meanwhile=meanwhile)
    journal = journal_on(store, monkeypatch)
    journal.note_pool("me", ("a handle", 1))
    for _ in range(2):
        asyncio.run(journal.write(world.state))
    assert job.state is JobState.RUNNING
    records = [values["job/0/job"] for values in store.writings]
    states = [JobRecord.joined(record).job.state for record in records if record is not None]
    assert states == [JobState.PENDING, JobState.RUNNING]
    assert store.writings[1]["pool/0/me"] is None
    world.state.check()


async def test_write_in_pieces_shows_one_moment(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a job could have the hosts that another one, by its older record, still has."""
    monkeypatch.setattr(record_collector, "TURN_S", 0.0)
    store = FailingStore(0)
    journal = journal_on(store, monkeypatch)
    first = world.start("first")
    second = world.submit("second")
    writing = asyncio.ensure_future(journal.write(world.state))
    await asyncio.sleep(0)  # the record of the first is made
    world.finish(first)
    world.schedule()
    await writing
    assert second.state is JobState.RUNNING
    found = {key: JobRecord.joined(value) for key, value in store.writings[0].items() if value and "job/" in key}
    held = [node_id for record in found.values() for held in record.allocations.values() for node_id, _, _ in held]
    assert len(held) == len(set(held)) == 2
    world.state.check()


def test_endpoints_and_code_of_forgotten_jobs_are_deleted_in_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_collector, "FORGOTTEN_AT_ONCE", 2)
    monkeypatch.setattr(write_ahead_log, "MOST_ENTRIES", 1)
    store, world = SharedStore(), World()
    journal = begun_on(store, monkeypatch)
    names = "one", "other", "third"
    for name in (*names, "there"):
        world.submit(name)
        store.values |= {f"endpoint/{name}:0": b"", f"code/{name}": b""}
    asyncio.run(journal.write(world.state))
    for name in names:
        del world.state.jobs[name]  # type: ignore[attr-defined]
        world.state.unrecorded[name] = set()
        asyncio.run(journal.write(world.state))
        assert ("endpoint/one:0" in store.values) == (name != "third")
    assert store.keys("endpoint/") == ["endpoint/there:0"]
    assert store.keys("code/") == ["code/there"]


def test_endpoints_of_jobs_forgotten_earlier_are_deleted_by_successor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write_ahead_log, "MOST_ENTRIES", 1)
    store, world = SharedStore(), World()
    names = "there", "there-too"
    for name in names:
        world.submit(name)
    asyncio.run(begun_on(store, monkeypatch).write(world.state))
    for name in (*names, "forgotten"):
        store.values[f"endpoint/{name}:0"] = b""
    journal = Journal()
    journal.begin()
    asyncio.run(journal.take_over(world.state))
    asyncio.run(journal.write(world.state))
    assert store.keys("endpoint/") == [f"endpoint/{name}:0" for name in names]


def test_checkpoint_moves_log_into_records_and_shortens_it(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write_ahead_log, "MOST_ENTRIES", 3)
    store = FailingStore(0)
    journal = journal_on(store, monkeypatch)
    for number in range(4):
        world.submit(f"job-{number}")
        if number == 1:
            store.failures = 7
        asyncio.run(journal.write(world.state))
    assert {key for key in store.values if key.startswith("job/")} == {"job/0/job-0", "job/0/job-1", "job/0/job-2"}
    assert store.values["checkpoint/0"] == b"3"
    assert [key for key in store.values if key.startswith("log/")] == ["log/0/3"]
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

    async def add(self, key: str, value: bytes) -> bool:
        await asyncio.sleep(0)
        is_new = self.put_new(key, value)
        await asyncio.sleep(0)
        return is_new

    async def fetch(self, key: str) -> bytes | None:
        await asyncio.sleep(0)
        return self.get(key)

    def get(self, key: str) -> bytes | None:
        self._turn(f"get {key}")
        return self.values.get(key)

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


class Writer:
    """A Controller that records one job after the other, and knows which it may acknowledge."""

    def __init__(self, store: SharedStore, monkeypatch: pytest.MonkeyPatch) -> None:
        self.journal = begun_on(store, monkeypatch)
        self.acknowledged: list[str] = []
        self._world = World()

    def write(self, *names: str) -> None:
        loop = asyncio.new_event_loop()  # it may be within another one, at any moment of the other Controller
        try:
            for name in names:
                self._world.submit(name)
                loop.run_until_complete(self.journal.write(self._world.state))
                self.acknowledged.append(name)
        except DeposedError:
            pass
        finally:
            loop.close()


def read_by(journal: Journal) -> list[str]:
    return [record.job.spec.job_id for record in journal.begin()[0]]


@pytest.mark.parametrize("entries", [1, 2, 500])
def test_successor_reads_exactly_what_was_acknowledged_whenever_it_begins(
    monkeypatch: pytest.MonkeyPatch, entries: int
) -> None:
    """Before each of the operations of which some writings consist, and after the last."""
    monkeypatch.setattr(write_ahead_log, "MOST_ENTRIES", entries)
    outcomes = set()
    for moment in range(100):
        store = SharedStore()
        writer, second = Writer(store, monkeypatch), Journal()
        read: list[str] = []

        def successor_begins(read: list[str] = read, second: Journal = second) -> None:
            read += read_by(second)

        store.before[len(store.operations) + moment] = successor_begins
        writer.write("one", "two", "three")
        if ended := bool(store.before):
            store.before.clear()
            successor_begins()
        assert read == writer.acknowledged
        outcomes.add(len(read))
        if ended:
            break
    assert ended
    assert outcomes == {0, 1, 2, 3}


@pytest.mark.parametrize("entries", [1, 2, 500])
def test_successor_reads_exactly_what_was_acknowledged_during_writes(
    monkeypatch: pytest.MonkeyPatch, entries: int
) -> None:
    """The writings come before each of the operations of which the successor's beginning consists."""
    monkeypatch.setattr(write_ahead_log, "MOST_ENTRIES", entries)
    outcomes = set()
    for moment in range(100):
        store = SharedStore()
        writer, second = Writer(store, monkeypatch), Journal()
        writer.write("one")
        store.before[len(store.operations) + moment] = partial(writer.write, "two", "three")
        read = read_by(second)
        ended = bool(store.before)
        store.before.clear()
        writer.write("four")
        assert read == writer.acknowledged
        outcomes.add(len(read))
        if ended:
            break
    assert ended
    assert outcomes == {1, 3}


@pytest.mark.parametrize("entries", [1, 2, 500])
def test_running_controller_is_seen_as_of_one_moment(monkeypatch: pytest.MonkeyPatch, entries: int) -> None:
    """The writing of a job together with a limit comes before each of the operations of somebody who looks."""
    monkeypatch.setattr(write_ahead_log, "MOST_ENTRIES", entries)
    outcomes = set()
    for moment in range(100):
        store, world = SharedStore(), World()
        journal = begun_on(store, monkeypatch)

        def write(world: World = world, journal: Journal = journal) -> None:
            world.submit("one")
            world.do(LimitsSetEvent("ann", PriorityBand.BATCH, Limits(chips=1)))
            asyncio.run(journal.write(world.state))

        store.before[len(store.operations) + moment] = write
        records, settings = Journal().look_back()
        assert len(records) == len(settings)
        outcomes.add(len(records))
        if store.before:
            break
    assert outcomes == {0, 1}


def test_successor_reads_after_it_has_its_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    store = SharedStore()
    begun_on(store, monkeypatch)
    store.operations.clear()
    Journal().begin()
    assert store.operations.index("put epoch/2") < store.operations.index("items job/1/")


def test_journals_starting_together_get_consecutive_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    store = SharedStore()
    begun_on(store, monkeypatch)
    second, third = Journal(), Journal()
    store.before[len(store.operations) + 1] = second.begin  # the third has seen the first only
    third.begin()
    assert (second.epoch, third.epoch) == (2, 3)


def test_journal_frozen_through_many_successors_notices(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_start_cost_does_not_depend_on_number_of_predecessors(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Controller looks only for what is there, once by kind, not once by earlier Controller."""

    def operations_of_a_start() -> int:
        before = len(store.operations)
        begun_on(store, monkeypatch)
        return len(store.operations) - before

    store = SharedStore()
    begun_on(store, monkeypatch)
    few = operations_of_a_start()
    for _ in range(30):
        begun_on(store, monkeypatch)
    assert operations_of_a_start() == few


def test_records_cleared_by_rival_are_found_in_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_successor_reads_past_usage_of_users(monkeypatch: pytest.MonkeyPatch) -> None:
    store, world = SharedStore(), World()
    first = begun_on(store, monkeypatch)
    world.add_slice("a")
    world.start(user="ann")
    for _ in range(3):  # it is written once a minute
        world.now += 40.0
        world.do(TimePassedEvent(world.now))
        asyncio.run(first.write(world.state))
    entries = [pickle.loads(value) for key, value in store.values.items() if key.startswith("log/1/") and value]
    assert sum("usage/1" in values for values in entries) == 2
    (event,) = Journal().begin()[1]
    assert isinstance(event, PastUsageEvent)
    assert event.at == 220.0
    assert event.hours["ann"]["TPU"] == pytest.approx(8 * 120 / 3600, rel=0.02)
    world.state.check()


def test_past_usage_that_is_imported_is_recorded_at_once(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    store = SharedStore()
    first = begun_on(store, monkeypatch)
    asyncio.run(first.take_over(world.state))
    world.do(PastUsageEvent({"ann": {"TPU": 3.0}}, world.now))
    asyncio.run(first.write(world.state))
    assert Journal().begin()[1] == [PastUsageEvent({"ann": {"TPU": 3.0}}, world.now)]


def test_successor_reads_teams_and_their_past_usage(monkeypatch: pytest.MonkeyPatch) -> None:
    store, world = SharedStore(), World()
    first = begun_on(store, monkeypatch)
    teams = (Team("ads", {"v4-16": Quota(8, lend=4)}, 2.0, ("ann",)), Team("ads/eu"))
    world.do(TeamsSetEvent(teams))
    world.do(PastUsageEvent({}, world.now, {"ads": {"TPU": 3.0}}))
    asyncio.run(first.write(world.state))
    assert Journal().begin()[1] == [
        TeamsSetEvent(teams),
        PastUsageEvent({}, world.now, {"ads": {"TPU": 3.0}}),
    ]


def test_successors_go_on_with_names_of_single_hosts_slices(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    store = SharedStore()
    journal = begun_on(store, monkeypatch)
    one_host = {TPU_NAME: AttributeValue("my-tpu"), TPU_VM_COUNT: AttributeValue(1)}
    for node_id in ("first", "second"):
        journal.own_slices.named(WorkerRegisteredEvent(node_id, "10.0.0.1", one_host, {}))
    asyncio.run(journal.write(world.state))
    names = journal.own_slices.to_json()
    assert b'"second": "my-tpu-second"' in names
    for _ in range(2):
        journal = Journal()
        journal.begin()
        assert journal.own_slices.to_json() == names
        asyncio.run(journal.take_over(world.state))
