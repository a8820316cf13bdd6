"""What the Controller records in the cluster's key-value store, so that its successor can go on.

Each Controller has a number, its epoch, and writes under its own number only. What it writes goes to its write-ahead
log first, see `write_ahead_log`: each writing is there as a whole or not at all. From there it comes into records of
their own, some time later.

A successor takes its epoch, closes the logs of all earlier Controllers, and then reads what is left. A Controller that
was replaced and does not know it yet, because its host was frozen, can't write to its log any more, so it acknowledges
nothing.

=================== ===================================================================================
``epoch/<n>``       the n-th Controller has begun; the numbers have no gaps
``log/<n>/<k>``     the k-th writing of the n-th Controller: keys and values of those below
``checkpoint/<n>``  up to which entry of its log everything is in records
``job/<n>/<id>``    a `JobRecord`; that of a large job without its gangs
``gangs/<n>/…``     some gangs of a large job: ``<chunk>/<id>``
``taints/<n>``      what operators have set: a JSON object, target → name → [reason, until]
``limits/<n>``      the users' limits: a JSON list of [user, band, {limit → number}]
``clock/<n>``       how its clock stood at the latest writing
``usage/<n>``       what users have held in the past hours: a JSON list of when, and user → resource → amount-hours
``fleet/<n>``       what the chips were in: a JSON object, day → state → chip-seconds
``users/<n>``       what the time of forgotten jobs went into: a JSON list of [day, user, jobs, kind → seconds, …]
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
from functools import partial

from ray import cloudpickle
from ray.actor import ActorHandle

from iris_ray.actors.controller.clock import Clock
from iris_ray.actors.controller.corrupt_records import CorruptRecords
from iris_ray.actors.controller.write_ahead_log import WriteAheadLog
from iris_ray.actors.wire.ray_internals import ClusterStore
from iris_ray.actors.wire.shared_names import is_endpoint_of
from iris_ray.goodput.fleet_times import FleetTimes
from iris_ray.goodput.user_times import UserTimes
from iris_ray.model.job_spec import PriorityBand
from iris_ray.model.limits import Limits
from iris_ray.model.plain import plain
from iris_ray.state import ControllerState
from iris_ray.state.events import Event, LimitsSetEvent, PastUsageEvent, TaintedEvent
from iris_ray.state.fleet import Taint
from iris_ray.state.record_check import require_whole
from iris_ray.state.records import JobRecord

logger = logging.getLogger(__name__)

TURN_S = 0.02
"""For so long records are made without a pause."""
CHUNKS_AT_ONCE = 16
"""Of a large job, which takes about as long."""
FORGOTTEN_AT_ONCE = 100
"""Jobs whose endpoints are deleted together: to look for them is a call to the store."""
KINDS = "pool", "job", "gangs"
"""Of keys that have an id after the epoch."""
SINGLE_KINDS = "taints", "limits", "usage", "fleet", "users", "clock"
"""Of keys that end with the epoch."""
CLOCK_S = 10.0
"""How often the clock is recorded at least."""
USAGE_EVERY_S = 60.0
"""So often what users have held is written. What they held since then counts for nothing after a crash."""
EPOCHS_KEPT = 1000
"""The logs of so many Controllers stay closed: one that was frozen may thaw, however many have come since."""


class Journal:
    """Written before anything is done that follows from what is written.

    Attributes:
        epoch: the number of this Controller, larger than that of any before it; 0 before `begin`.
        corrupt: the records that can't be read.
        clock: the Controller's; it goes on where that of the Controller before stood.
        fleet_times: what the chips of the cluster were in; it goes on, too.
        user_times: what the time of forgotten jobs went into; it goes on, too.
    """

    def __init__(self) -> None:
        self.epoch = 0
        self._store = ClusterStore()
        self.corrupt = CorruptRecords(self._store)
        self.clock = Clock()
        self.fleet_times = FleetTimes()
        self.user_times = UserTimes()
        self._users = 0  # the version of these that is recorded
        self._clock_recorded_at = -math.inf
        self._limits = 0  # the version of the users' limits that is recorded
        self._taints: dict[str, dict[str, Taint]] = {}
        self._usage_at = -math.inf  # when that was recorded
        self._left: Mapping[str, bytes] = {}  # what was left behind, by key
        self._pools: dict[str, bytes | None] = {}  # what is known of pools and was not collected yet
        self._pending: dict[str, bytes | None] = {}  # what is to be written; None is to be deleted
        self._log = WriteAheadLog(self._store, 0)
        self._unrecordable: dict[str, Exception] = {}
        self._forgotten = 0  # jobs whose endpoints were not deleted yet

    def begin(self) -> tuple[list[JobRecord], list[Event]]:
        """Take an epoch, and only then read what is left: from now on an earlier Controller acknowledges nothing.

        Raises:
            UnknownRecordError: as `left_behind`.
        """
        self.epoch = max(self._numbers("epoch/"), default=0) + 1
        while not self._store.put_new(f"epoch/{self.epoch}", b""):  # another Controller begins at this moment
            self.epoch += 1
        self._log = WriteAheadLog(self._store, self.epoch)
        for epoch in range(max(1, self._last_complete()), self.epoch):
            self._log.close(epoch)
        left = self.left_behind()
        self._set_clock()
        for key, recorded in _of_kind("fleet", self._left).items():
            self.corrupt.read("what the chips were in", {key: recorded}, partial(self.fleet_times.restore, recorded))
        for key, recorded in _of_kind("users", self._left).items():
            self.corrupt.read("the time of forgotten jobs", {key: recorded}, partial(self.user_times.restore, recorded))
            self.user_times.version += 1  # so that it is recorded again
        self.corrupt.keep()
        return left

    def left_behind(self) -> tuple[list[JobRecord], list[Event]]:
        """Return what the last Controller that wrote has left: its jobs, the oldest first, and the rest.

        What can't be read is left out.

        Raises:
            UnknownRecordError: another version of iris_ray wrote it.
        """
        last, completed = -1, self._last_complete()
        while last != completed:  # else another one has taken over while this one read, and cleared it away
            last = completed
            values = self._values(last)
            completed = self._last_complete()
        noted = self._store.items("unrestorable/")
        self._left = values
        by_job = _by_job(_of_kind("job", values), _of_kind("gangs", values))
        records = (self._record(job_id, parts, noted) for job_id, parts in by_job.items())
        taints_then, usage_then = _of_kind("taints", values), _of_kind("usage", values)
        limits_then = _of_kind("limits", values)
        taints = self.corrupt.read("the taints", taints_then, lambda: _taints(taints_then.get(f"taints/{last}", b"{}")))
        usage = self.corrupt.read(
            "the past usage", usage_then, lambda: _usage(usage_then.get(f"usage/{last}", b"null"))
        )
        limits = self.corrupt.read("the limits", limits_then, lambda: _limits(limits_then.get(f"limits/{last}", b"[]")))
        rest = [*(taints or ()), *(usage or ()), *(limits or ())]
        return sorted(filter(None, records), key=lambda record: record.job.number), rest

    def _values(self, epoch: int) -> dict[str, bytes]:
        """Return all that a Controller has written, by key. Its log is read first: what goes comes into records."""
        logged = self._log.read(epoch, self.corrupt)
        values: dict[str, bytes | None] = {}
        for kind in KINDS:
            values |= self._store.items(f"{kind}/{epoch}/")
        for kind in SINGLE_KINDS:
            key = f"{kind}/{epoch}"
            values[key] = self._store.get(key)
        return {key: value for key, value in (values | logged).items() if value is not None}

    def _set_clock(self) -> None:
        for key, recorded in _of_kind("clock", self._left).items():
            self.corrupt.read("the clock", {key: recorded}, partial(self.clock.go_on_from, recorded))

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
        """Record everything under this epoch, and clear up what earlier ones have left.

        Raises:
            DeposedError: another Controller has begun.
        """
        await self._collect(state)
        values, self._pending = self._pending, {}
        await self._log.put(values)
        self._store.put(f"complete/{self.epoch}", b"")
        await self._log.append({})
        for kind in KINDS:
            for epoch in self._epochs_of(kind):
                if epoch < self.epoch:
                    self._store.delete_all(f"{kind}/{epoch}/")
        await self._log.clear_earlier(EPOCHS_KEPT)
        for kind in (*SINGLE_KINDS, "complete", "checkpoint", "epoch"):
            kept = EPOCHS_KEPT if kind in ("checkpoint", "epoch") else 0
            for number in self._numbers(f"{kind}/"):
                if number < self.epoch - kept:
                    self._store.delete(f"{kind}/{number}")
        self._delete_endpoints(state)  # an earlier Controller may have ended before it did

    async def write(self, state: ControllerState) -> None:
        """Record everything that has changed since the last time, as a whole; try until it is done.

        One call at a time, so that no older record comes after a newer one.

        Raises:
            DeposedError: another Controller has begun. Nothing was recorded.
        """
        await self._collect(state)
        if self._pending:
            values, self._pending = self._pending, {}
            await self._log.append(values)

    async def _collect(self, state: ControllerState) -> None:
        """Take what has changed, all of one moment.

        The records of very many are made in pieces, and others get their turn in between. What changes meanwhile is
        taken once more at the end.
        """
        await self._collect_jobs_in_turns(state)
        for job_id, chunks in _taken(state.unrecorded):
            self._collect_job(state, job_id, sorted(chunks))
        self._pending |= self._pools
        self._pools = {}
        self._collect_taints(state)
        self._collect_usage(state)
        self._collect_limits(state)
        if self._forgotten > FORGOTTEN_AT_ONCE:
            self._delete_endpoints(state)
        if self._pending or self.clock.now() > self._clock_recorded_at + CLOCK_S:
            self._clock_recorded_at = self.clock.now()  # no time in these records is later
            self._pending[f"clock/{self.epoch}"] = self.clock.record()

    async def _collect_jobs_in_turns(self, state: ControllerState) -> None:
        turn_ends = time.monotonic() + TURN_S
        for job_id, chunks in _taken(state.unrecorded):
            for some in _in_parts(sorted(chunks)) if job_id in state.jobs else [sorted(chunks)]:
                if not self._collect_job(state, job_id, some):
                    break
                if time.monotonic() > turn_ends:
                    await asyncio.sleep(0)
                    turn_ends = time.monotonic() + TURN_S

    def _collect_taints(self, state: ControllerState) -> None:
        if state.fleet.taints != self._taints:
            found = state.fleet.taints.items()
            plain = {target: {name: (t.reason, t.until) for name, t in named.items()} for target, named in found}
            self._pending[f"taints/{self.epoch}"] = json.dumps(plain).encode()
            self._taints = {target: dict(named) for target, named in found}

    def _collect_usage(self, state: ControllerState) -> None:
        """Take, now and then, what grows all the time: what the chips were in, and what users have held."""
        past = state.past_usage
        if past.now < self._usage_at + USAGE_EVERY_S:
            return
        self._usage_at = past.now
        if not self.fleet_times.is_empty:
            self._pending[f"fleet/{self.epoch}"] = self.fleet_times.to_json()
        self._collect_users(state)
        if hours := past.snapshot():
            self._pending[f"usage/{self.epoch}"] = json.dumps([past.now, hours]).encode()

    def _collect_limits(self, state: ControllerState) -> None:
        if state.limits.version != self._limits:
            table = [(user, band.name, dict(limits.items())) for (user, band), limits in state.limits.table.items()]
            self._pending[f"limits/{self.epoch}"] = json.dumps(table).encode()
            self._limits = state.limits.version

    def _collect_users(self, state: ControllerState) -> None:
        for job in state.take_forgotten():
            self.user_times.add(job)
        if self.user_times.version != self._users:
            self._users = self.user_times.version
            self._pending[f"users/{self.epoch}"] = self.user_times.to_json()

    def _collect_job(self, state: ControllerState, job_id: str, chunks: list[int]) -> bool:
        """Return whether a record could be made of what has changed of a job. If not, all others are recorded."""
        try:
            self._make_record(state, job_id, chunks)
        except Exception as error:
            self._unrecordable[job_id] = error
            return False
        return True

    def _make_record(self, state: ControllerState, job_id: str, chunks: list[int]) -> None:
        """Make what has changed of a job's record, or note that the job is forgotten."""
        record = state.record(job_id)
        self._pending[f"job/{self.epoch}/{job_id}"] = None if record is None else record.head()
        parts = dict.fromkeys(chunks) if record is None else dict(record.chunks(chunks))
        self._pending |= {f"gangs/{self.epoch}/{number}/{job_id}": part for number, part in parts.items()}
        if record is None:
            self._forgotten += 1

    def _delete_endpoints(self, state: ControllerState) -> None:
        """Delete the endpoints of forgotten jobs. They are never looked up again, so it may fail."""
        self._forgotten = 0
        with contextlib.suppress(Exception):
            self._pending |= {k: None for k in self._store.keys("endpoint/") if not is_endpoint_of(state.jobs, k)}

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
        found = {}
        for key, value in _of_kind("pool", self._left).items():
            try:
                found[key.split("/", 2)[2]] = cloudpickle.loads(value)
            except Exception:  # its Ray job is gone, and so is the pool
                logger.exception("the handle of %s can't be read", key)
        return found

    def note_pool(self, owner: str, pool: tuple[ActorHandle, int] | None) -> None:
        """Have a pool recorded with the next writing, with the number of its process; None: have it deleted."""
        self._pools[f"pool/{self.epoch}/{owner}"] = None if pool is None else cloudpickle.dumps(pool)

    def _last_complete(self) -> int:
        return max(self._numbers("complete/"), default=0)

    def _epochs_of(self, kind: str) -> set[int]:
        """Return the numbers of the Controllers that have keys of a kind. Usually that is the latest one alone."""
        found = (key.split("/", 2)[1] for key in self._store.keys(f"{kind}/"))
        return {int(epoch) for epoch in found if epoch.isdecimal()}

    def _numbers(self, kind: str) -> list[int]:
        found = (key.removeprefix(kind) for key in self._store.keys(kind))
        return [int(number) for number in found if number.isdecimal()]  # anything else is not ours


def _taken(unrecorded: dict[str, set[int]]) -> list[tuple[str, set[int]]]:
    """Return what has changed of which jobs, and forget it."""
    changed = list(unrecorded.items())
    unrecorded.clear()
    return changed


def _of_kind(kind: str, values: Mapping[str, bytes]) -> dict[str, bytes]:
    return {key: value for key, value in values.items() if key.startswith(f"{kind}/")}


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


def _joined(job_id: str, values: Mapping[str, bytes]) -> JobRecord:
    """Put the values of a job's record together."""
    head, *chunks = values.values()
    return require_whole(JobRecord.joined(head, chunks), job_id)


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


def _limits(recorded: bytes) -> list[LimitsSetEvent]:
    events = [LimitsSetEvent(user, PriorityBand[band], Limits(**set_)) for user, band, set_ in json.loads(recorded)]
    made: list[LimitsSetEvent] = plain(list[LimitsSetEvent], events, "limits")
    return made
