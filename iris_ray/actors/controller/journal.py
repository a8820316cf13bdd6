"""What the Controller records in the cluster's key-value store, so that its successor can go on.

Each Controller has a number, its epoch, and writes under its own number only. A Controller that was replaced and does
not know it yet, because its host was frozen, writes keys that are never read.

Such a Controller acknowledges nothing, either. A successor takes its epoch first and then reads what is left; a
Controller writes first and then looks for the next epoch. So if a successor has not read a record, its writer finds
the next epoch and does not acknowledge.

=================== ===================================================================================
``epoch/<n>``       the n-th Controller has begun; the numbers have no gaps
``job/<n>/<id>``    a `JobRecord`; that of a large job without its gangs
``gangs/<n>/…``     some gangs of a large job: ``<chunk>/<id>``
``taints/<n>``      what operators have set: a JSON object, target → name → [reason, until]
``clock/<n>``       how its clock stood at the latest writing
``usage/<n>``       what users have held in the past hours: a JSON list of when, and user → resource → amount-hours
``complete/<n>``    the n-th Controller has recorded everything that it took over; from now on its records count
``pool/<n>/…``      ``<owner>``: the handle of a SlicePoolManager, and the number of its process
``corrupt/<id>``    what can't be read of a record, and why; it was moved here
``unrestorable/…``  why a job could not be restored from its record; the next Controller moves it, too
``aside/<id>``      why a job broke the Controller, which ended with it; the next one ends the job
``incarnation/…``   a process of a pool has begun, see `actors/wire/incarnations.py`
``endpoint/…``      an address that a task has registered, see `iris_ray.endpoints`
=================== ===================================================================================
"""

import asyncio
import contextlib
import json
import logging
import math
import time
from collections.abc import Iterator, Mapping

from ray import cloudpickle
from ray.actor import ActorHandle

from iris_ray.actors.controller.clock import Clock
from iris_ray.actors.controller.corrupt_records import CorruptRecords
from iris_ray.actors.wire.ray_internals import ClusterStore
from iris_ray.actors.wire.shared_names import endpoint_key
from iris_ray.errors import DeposedError
from iris_ray.model.plain import plain
from iris_ray.state import ControllerState
from iris_ray.state.events import Event, PastUsageEvent, TaintedEvent
from iris_ray.state.fleet import Taint
from iris_ray.state.record_check import require_whole
from iris_ray.state.records import JobRecord

logger = logging.getLogger(__name__)

WRITE_AGAIN_S = 0.5
TURN_S = 0.02
"""For so long records are made without a pause."""
CHUNKS_AT_ONCE = 16
"""Of a large job, which takes about as long."""
SIDE_BY_SIDE = 64
"""Values that are written at a time."""
CLOCK_S = 10.0
"""How often the clock is recorded at least."""
USAGE_EVERY_S = 60.0
"""So often what users have held is written. What they held since then counts for nothing after a crash."""
EPOCHS_KEPT = 1000
"""By the key of the next epoch a Controller that was frozen finds out; so it stays, however many have come since."""


class Journal:
    """Written before anything is done that follows from what is written.

    Attributes:
        epoch: the number of this Controller, larger than that of any before it; 0 before `begin`.
        corrupt: the records that can't be read.
        clock: the Controller's; it goes on where that of the Controller before stood.
    """

    def __init__(self) -> None:
        self.epoch = 0
        self._store = ClusterStore()
        self.corrupt = CorruptRecords(self._store)
        self.clock = Clock()
        self._clock_recorded_at = -math.inf
        self._taints: dict[str, dict[str, Taint]] = {}
        self._usage_at = -math.inf  # when that was recorded
        self._last = 0  # the epoch of what was left behind
        self._pools: dict[str, bytes | None] = {}  # what is known of pools and was not collected yet
        self._recorded_pools: set[str] = set()  # their keys
        self._pending: dict[str, bytes | None] = {}  # what is to be written; None is to be deleted
        self._unrecordable: dict[str, Exception] = {}

    def begin(self) -> tuple[list[JobRecord], list[Event]]:
        """Take an epoch, and only then read what is left: from now on an earlier Controller acknowledges nothing.

        Raises:
            UnknownRecordError: as `left_behind`.
        """
        self.epoch = max(self._numbers("epoch/"), default=0) + 1
        while not self._store.put_new(f"epoch/{self.epoch}", b""):  # another Controller begins at this moment
            self.epoch += 1
        left = self.left_behind()
        self._set_clock()
        self.corrupt.keep()
        return left

    def left_behind(self) -> tuple[list[JobRecord], list[Event]]:
        """What the last Controller has left that got so far as to write: its jobs, the oldest first, and the rest.

        What can't be read is left out.

        Raises:
            UnknownRecordError: another version of iris_ray wrote it.
        """
        last, completed = -1, self._last_complete()
        while last != completed:  # else another one has taken over while this one read, and cleared it away
            last = completed
            jobs, gangs = self._store.items(f"job/{last}/"), self._store.items(f"gangs/{last}/")
            taints_then, usage_then = self._store.items(f"taints/{last}"), self._store.items(f"usage/{last}")
            completed = self._last_complete()
        self._last = last
        noted = self._store.items("unrestorable/")
        records = (self._record(job_id, values, noted) for job_id, values in _by_job(jobs, gangs).items())
        taints = self.corrupt.read("the taints", taints_then, lambda: _taints(taints_then.get(f"taints/{last}", b"{}")))
        usage = self.corrupt.read(
            "the past usage", usage_then, lambda: _usage(usage_then.get(f"usage/{last}", b"null"))
        )
        return sorted(filter(None, records), key=lambda record: record.job.number), [*(taints or []), *(usage or [])]

    def _set_clock(self) -> None:
        found, key = self._store.items(f"clock/{self._last}"), f"clock/{self._last}"
        if (recorded := found.get(key)) is not None:
            self.corrupt.read("the clock", {key: recorded}, lambda: self.clock.go_on_from(recorded))

    def _record(self, job_id: str, values: Mapping[str, bytes], noted: Mapping[str, bytes]) -> JobRecord | None:
        """Return the record of a job; None if it can't be read, or if a Controller has failed to restore it."""
        if (why := noted.get(f"unrestorable/{job_id}")) is not None:
            self.corrupt.found(job_id, values, why.decode(errors="replace"))
            return None
        return self.corrupt.read(job_id, values, lambda: _joined(job_id, values))

    def note_unrestorable(self, job_id: str, error: Exception) -> None:
        """Have a successor leave out this record: this Controller has failed to restore it, and ends with that."""
        self._store.put(f"unrestorable/{job_id}", f"{type(error).__name__}: {error}".encode(errors="backslashreplace"))

    async def take_over(self, state: ControllerState) -> None:
        """Put everything down under this epoch, and clear up what earlier ones have left.

        Raises:
            DeposedError: another Controller has begun.
        """
        await self.write(state)
        self._store.put(f"complete/{self.epoch}", b"")
        for epoch in {*self._numbers("epoch/"), *self._numbers("complete/")} - {self.epoch}:
            if epoch < self.epoch:
                self._store.delete_all(f"job/{epoch}/")
                self._store.delete_all(f"gangs/{epoch}/")
                self._store.delete_all(f"pool/{epoch}/")
        for kind, kept in (("taints/", 0), ("usage/", 0), ("clock/", 0), ("complete/", 0), ("epoch/", EPOCHS_KEPT)):
            for number in self._numbers(kind):
                if number < self.epoch - kept:
                    self._store.delete(f"{kind}{number}")

    async def write(self, state: ControllerState) -> None:
        """Record everything that has changed since the last time, side by side; try until it is done.

        One call at a time, so that no older record comes after a newer one. A new pool comes before its jobs, which a
        successor would otherwise take for those of a pool that is gone. What becomes of a pool later comes after its
        jobs: by then these know that what ran in its process is over. The gangs of large jobs come after these jobs.

        Raises:
            DeposedError: another Controller has begun, and may have read the journal before this was written.
        """
        await self._collect(state)
        while self._pending:
            batch, self._pending = self._pending, {}
            try:
                for step in self._in_order(batch):
                    await self._put(step)
                    self._note_recorded_pools(step)
                deposed = await self._store.has(f"epoch/{self.epoch + 1}")
            except Exception as error:
                logger.warning("what has been decided can't be recorded; trying again: %s", error)
                self._pending = batch | self._pending
                await asyncio.sleep(WRITE_AGAIN_S)
                await self._collect(state)
                continue
            if deposed:
                raise DeposedError(f"Controller {self.epoch} was replaced; another one has taken over")
            return

    def _in_order(self, batch: Mapping[str, bytes | None]) -> Iterator[dict[str, bytes | None]]:
        """Yield what is written first, then what is written after it, and so on."""
        kinds = "before jobs", "job", "gangs", "pool"
        steps: dict[str, dict[str, bytes | None]] = {kind: {} for kind in kinds}
        for key, value in batch.items():
            kind = key.partition("/")[0]
            is_new_pool = kind == "pool" and value is not None and key not in self._recorded_pools
            if is_new_pool or kind == "clock":
                kind = "before jobs"
            steps[kind if kind in steps else "job"][key] = value
        return filter(None, steps.values())

    def _note_recorded_pools(self, step: Mapping[str, bytes | None]) -> None:
        pools = {key: value for key, value in step.items() if key.startswith("pool/")}
        self._recorded_pools.update(pools)
        self._recorded_pools.difference_update(key for key, value in pools.items() if value is None)

    async def _put(self, values: Mapping[str, bytes | None]) -> None:
        """Side by side, `SIDE_BY_SIDE` at a time; raises what went wrong first, once these are through."""
        keys = list(values)
        for start in range(0, len(keys), SIDE_BY_SIDE):
            puts = (self._store.set(key, values[key]) for key in keys[start : start + SIDE_BY_SIDE])
            for failure in await asyncio.gather(*puts, return_exceptions=True):
                if failure is not None:
                    raise failure

    async def _collect(self, state: ControllerState) -> None:
        """Take what has changed until now, and make the records of it in pieces: others get their turn in between.

        A record may then be newer than this moment. What is known of pools is of this moment, or it could be written
        before something that came first.
        """
        self._pending |= self._pools
        self._pools = {}
        if state.fleet.taints != self._taints:
            found = state.fleet.taints.items()
            plain = {target: {name: (t.reason, t.until) for name, t in named.items()} for target, named in found}
            self._pending[f"taints/{self.epoch}"] = json.dumps(plain).encode()
            self._taints = {target: dict(named) for target, named in found}
        past = state.past_usage
        if past.now >= self._usage_at + USAGE_EVERY_S:
            self._usage_at = past.now
            if hours := past.snapshot():
                self._pending[f"usage/{self.epoch}"] = json.dumps([past.now, hours]).encode()
        changed = dict(state.unrecorded)
        state.unrecorded.clear()
        turn_ends = time.monotonic() + TURN_S
        for job_id, chunks in changed.items():
            for some in _in_parts(sorted(chunks)) if job_id in state.jobs else [sorted(chunks)]:
                try:
                    self._collect_job(state, job_id, some)
                except Exception as error:  # it must not keep all others from being recorded
                    self._unrecordable[job_id] = error
                    break
                if time.monotonic() > turn_ends:
                    await asyncio.sleep(0)
                    turn_ends = time.monotonic() + TURN_S
        if self._pending or self.clock.now() > self._clock_recorded_at + CLOCK_S:
            self._clock_recorded_at = self.clock.now()  # no time in these records is later
            self._pending[f"clock/{self.epoch}"] = self.clock.record()

    def _collect_job(self, state: ControllerState, job_id: str, chunks: list[int]) -> None:
        """Make what has changed of a job's record, or note that the job is forgotten."""
        record = state.record(job_id)
        self._pending[f"job/{self.epoch}/{job_id}"] = None if record is None else record.head()
        parts = dict.fromkeys(chunks) if record is None else dict(record.chunks(chunks))
        self._pending |= {f"gangs/{self.epoch}/{number}/{job_id}": part for number, part in parts.items()}
        if record is None:
            with contextlib.suppress(Exception):  # they are never looked up again
                self._store.delete_all(endpoint_key(job_id, ""))

    def take_unrecordable(self) -> dict[str, Exception]:
        """Return the jobs of which no record could be made since the last call, by id, each with its error."""
        found, self._unrecordable = self._unrecordable, {}
        return found

    def note_aside(self, jobs: Mapping[str, str]) -> None:
        """Have a successor end these jobs as soon as it has their records: they broke this Controller.

        Args:
            jobs: why, by id.
        """
        for job_id, reason in jobs.items():
            try:
                self._store.put(f"aside/{job_id}", reason.encode())
            except Exception:
                logger.exception("that %s is set aside can't be recorded", job_id)

    def noted_aside(self) -> dict[str, str]:
        """Return the jobs that an earlier Controller has noted, by id, each with the reason."""
        found = self._store.items("aside/").items()
        return {key.removeprefix("aside/"): value.decode(errors="replace") for key, value in found}

    def forget_aside(self) -> None:
        """Forget these notes: the jobs have ended, and records that could not be restored are kept elsewhere."""
        self._store.delete_all("aside/")
        self._store.delete_all("unrestorable/")

    def pools(self) -> dict[str, tuple[ActorHandle, int]]:
        """The pools that the last Controller knew, by owner, each with the number of its process."""
        found, prefix = {}, f"pool/{self._last}/"
        for key, value in self._store.items(prefix).items():
            try:
                found[key.removeprefix(prefix)] = cloudpickle.loads(value)
            except Exception:  # its Ray job is gone, and so is the pool
                logger.exception("the handle of %s can't be read", key)
        return found

    def note_pool(self, owner: str, pool: tuple[ActorHandle, int] | None) -> None:
        """Have a pool recorded with the next writing, with the number of its process; None: have it deleted."""
        self._pools[f"pool/{self.epoch}/{owner}"] = None if pool is None else cloudpickle.dumps(pool)

    def _last_complete(self) -> int:
        return max(self._numbers("complete/"), default=0)

    def _numbers(self, kind: str) -> list[int]:
        found = (key.removeprefix(kind) for key in self._store.keys(kind))
        return [int(number) for number in found if number.isdecimal()]  # anything else is not ours


def _in_parts(chunks: list[int]) -> Iterator[list[int]]:
    """Yield all of them, a few at a time, and at least once."""
    for start in range(0, max(1, len(chunks)), CHUNKS_AT_ONCE):
        yield chunks[start : start + CHUNKS_AT_ONCE]


def _by_job(jobs: Mapping[str, bytes], gangs: Mapping[str, bytes]) -> dict[str, dict[str, bytes]]:
    """Return the values of each job's record by their keys: its head first, then its chunks by number."""
    found = {key.split("/", 2)[2]: {key: value} for key, value in jobs.items()}
    split = (key.split("/", 3) for key in gangs if key.count("/") > 2)
    for *kind, number, job_id in sorted(split, key=lambda parts: (len(parts[2]), parts[2])):
        if (values := found.get(job_id)) is not None:
            key = "/".join([*kind, number, job_id])
            values[key] = gangs[key]
    return found


def _joined(job_id: str, values: Mapping[str, bytes]) -> JobRecord | None:
    """Put the values of a job's record together; None if a chunk is missing, because it was never acknowledged."""
    head, *chunks = values.values()
    record = JobRecord.joined(head, dict(enumerate(chunks)))
    if record is None:
        logger.warning("%s was being submitted or forgotten when its Controller ended; it is left out", job_id)
        return None
    return require_whole(record, job_id)


def _taints(recorded: bytes) -> list[TaintedEvent]:
    found = json.loads(recorded)
    events = [TaintedEvent(target, name, *taint) for target, named in found.items() for name, taint in named.items()]
    made: list[TaintedEvent] = plain(list[TaintedEvent], events, "taints")
    return made


def _usage(recorded: bytes) -> list[PastUsageEvent]:
    if (found := json.loads(recorded)) is None:
        return []
    at, hours = found
    return [plain(PastUsageEvent, PastUsageEvent(hours, at), "past usage")]
