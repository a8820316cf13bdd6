"""The Controller's records and its log: jobs come, run, are lost and end, while it writes them, and dies."""

import asyncio
import contextlib
import io
import os
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from iris_ray.actors.controller import journal as journal_module
from iris_ray.actors.controller import write_ahead_log
from iris_ray.actors.controller.journal import Journal
from iris_ray.actors.controller.write_ahead_log import WriteAheadLog
from iris_ray.state.events import JobRestoredEvent
from tests.proofs.every_operation.operations import Operations, StoreIsAwayError
from tests.proofs.every_operation.runs import Said, Scenario
from tests.support.ray_in_process import Store
from tests.support.worlds import World

replace = os.replace


def records() -> Scenario:
    return Scenario(
        "records",
        lambda place: None,
        _act,
        _judge,
        (StoreIsAwayError,),
        {"log forgets the checkpoint's entries first": _delete_first, "an unanswered entry counts": _believe},
    )


class StoreInFile(Store):
    """The cluster's key-value store, in a file that outlives the process; its operations count.

    Args:
        place: the directory of the file.
        operations: count; None: they don't.
    """

    def __init__(self, place: Path, operations: Operations | None = None) -> None:
        super().__init__()
        self._file = place / "values"
        self._operations = operations
        with contextlib.suppress(FileNotFoundError), io.FileIO(str(self._file)) as file:
            self.values = pickle.loads(file.readall())

    def put(self, key: str, value: bytes) -> None:
        self._do("kv write", lambda: super(StoreInFile, self).put(key, value))

    def put_new(self, key: str, value: bytes) -> bool:
        return bool(self._do("kv write", lambda: super(StoreInFile, self).put_new(key, value)))

    def delete(self, key: str) -> None:
        self._do("kv write", lambda: super(StoreInFile, self).delete(key))

    def get(self, key: str) -> bytes | None:
        found: bytes | None = self._do("kv read", lambda: super(StoreInFile, self).get(key))
        return found

    def keys(self, prefix: str) -> list[str]:
        return list(self._do("kv read", lambda: super(StoreInFile, self).keys(prefix)))

    def items(self, prefix: str) -> dict[str, bytes]:
        return {key: self.values[key] for key in self.keys(prefix)}

    def _do(self, name: str, work: Callable[[], Any]) -> Any:
        def done() -> Any:
            found = work()
            if name == "kv write":
                with io.FileIO(f"{self._file}.new", "w") as file:
                    file.write(pickle.dumps(self.values))
                replace(f"{self._file}.new", self._file)
            return found

        return done() if self._operations is None else self._operations.do(name, done)


def _story(world: World) -> Iterator[None]:
    """Play a story; yield after each step."""
    jobs = [world.submit(name, max_retries_failure=1, max_retries_preemption=1) for name in ("one", "two")]
    yield
    world.schedule()
    yield
    world.long_run()
    world.finish(jobs[0])
    yield
    small = world.submit_tasks("small", 3)
    yield
    world.schedule()
    world.lose("b-1")
    yield
    world.confirm(jobs[1], attempt=1)
    yield
    world.add_slice("c")
    world.schedule()
    assert small.gangs
    yield


def _journal(store: Store) -> Journal:
    setattr(journal_module, "ClusterStore", lambda: store)  # noqa: B010
    write_ahead_log.WRITE_AGAIN_S = 0.0
    write_ahead_log.MOST_ENTRIES = 2
    return Journal()


def _act(place: Path, said: Said, operations: Operations) -> None:
    async def act() -> None:
        journal = _journal(StoreInFile(place, operations))
        world = World("a", "b")
        journal.begin()
        await journal.take_over(world.state)
        for step, _ in enumerate(_story(world)):
            said("begins", step)
            await journal.write(world.state)
            said("done", step)

    asyncio.run(act())


def _recorded(world: World) -> dict[str, bytes]:
    records = {job_id: world.state.record(job_id) for job_id in world.state.jobs}
    return {job_id: record.to_bytes() for job_id, record in records.items() if record is not None}


def _snapshots() -> list[dict[str, bytes]]:
    world = World("a", "b")
    return [{}, *(_recorded(world) for _ in _story(world))]


def _judge(place: Path, said: list[list[Any]]) -> None:
    snapshots = _snapshots()
    done = 1 + max((step for word, step in said if word == "done"), default=-1)
    begun = 1 + max((step for word, step in said if word == "begins"), default=-1)
    read: list[dict[str, bytes]] = []

    async def come_back() -> None:
        store = StoreInFile(place)
        journal = _journal(store)
        records, _ = journal.begin()
        world = World("a", "b", "c")
        for record in records:
            world.do(JobRestoredEvent(record))
        read.append({record.job.spec.job_id: record.to_bytes() for record in records})
        await journal.take_over(world.state)
        assert {key.split("/")[1] for key in store.values if key.startswith("job/")} <= {str(journal.epoch)}

    for _ in range(2):
        asyncio.run(come_back())
    assert read[0] in snapshots[done : begun + 1], f"steps {done} to {begun}; read {sorted(read[0])}"
    assert read[1].keys() == read[0].keys()


# -- defects, put in on purpose ----------------------------------------------------------------------------------------


def _delete_first() -> None:
    async def make_checkpoint(log: WriteAheadLog) -> None:
        entries = range(log._checkpoint, log._next)
        await log.put(dict.fromkeys(log._key(log._epoch, number) for number in entries))
        await log.put(log._since)
        await log.put({f"checkpoint/{log._epoch}": b"%d" % log._next})
        log._checkpoint, log._bytes, log._since = log._next, 0, {}

    WriteAheadLog._make_checkpoint = make_checkpoint  # type: ignore[method-assign, assignment]


def _believe() -> None:
    async def has_appended(log: WriteAheadLog, key: str, entry: bytes) -> bool:
        try:
            await log._store.add(key, entry)
        except Exception:
            return True
        return True

    WriteAheadLog._has_appended = has_appended  # type: ignore[method-assign, assignment]
