"""What the Controller records in the cluster's key-value store, so that its successor can go on.

Each Controller has a number, its epoch, and writes under its own number only. What it writes goes to its write-ahead
log first, see `write_ahead_log`: each writing is there as a whole or not at all. From there it comes into records of
their own, some time later. What is to be written is made in `record_collector`.

A successor takes its epoch, closes the logs of all earlier Controllers, and then reads what is left, see `left_behind`.
A Controller that was replaced and does not know it yet, because its host was frozen, can't write to its log any more,
so it acknowledges nothing.

=================== ===================================================================================
``epoch/<n>``       the n-th Controller has begun; the numbers have no gaps
``log/<n>/<k>``     the k-th writing of the n-th Controller: keys and values of those below
``checkpoint/<n>``  up to which entry of its log everything is in records
``job/<n>/<id>``    a `JobRecord`; that of a large job without its gangs
``gangs/<n>/…``     some gangs of a large job: ``<chunk>/<id>``
``taints/<n>``      what operators have set: a JSON object, target → name → [reason, until]
``limits/<n>``      the users' limits: a JSON list of [user, band, {limit → number}]
``settings/<n>``    the cluster's settings: a JSON list of [name, text, who has set it, when]
``clock/<n>``       how its clock stood at the latest writing
``usage/<n>``       what users have held in the past hours: a JSON list of when, and user → resource → amount-hours
``fleet/<n>``       what the chips were in: a JSON object, day → state → chip-seconds
``users/<n>``       what the time of forgotten jobs went into: a JSON list of [day, user, jobs, kind → seconds, …]
``complete/<n>``    the n-th Controller has recorded everything that it took over; from now on its records count
``pool/<n>/…``      ``<owner>``: the handle of a SlicePoolManager, and the number of its process
``corrupt/<id>``    what can't be read of a record, and why; it was moved here
``unrestorable/…``  why a job could not be restored from its record; the next Controller moves that to ``corrupt/``
``aside/<id>``      why a job broke the Controller, or could not be recorded; the next Controller ends it
``incarnation/…``   a process of a pool has begun, see `actors/calls/names.py`
``endpoint/…``      an address that a task has registered, see `iris_ray.endpoints`
=================== ===================================================================================
"""

import asyncio
import contextlib
import json
import logging
import math
import time
from collections.abc import Iterator
from dataclasses import replace

from ray import cloudpickle
from ray.actor import ActorHandle

from iris_ray.actors.calls.names import is_endpoint_of
from iris_ray.actors.calls.ray_internals import ClusterStore
from iris_ray.actors.controller.clock import Clock
from iris_ray.actors.controller.containment import Containment
from iris_ray.actors.controller.write_ahead_log import (
    KINDS,
    SINGLE_KINDS,
    LeftBehind,
    WriteAheadLog,
    last_complete,
    numbers_after,
    read_left_behind,
)
from iris_ray.model.goodput_sums import FleetTimes, UserTimes
from iris_ray.state import ControllerState
from iris_ray.state.events import Event
from iris_ray.state.fleet import Taint
from iris_ray.state.records import JobRecord

# -- shared records ----------------------------------------------------------------------------------------------------
# What is recorded once for the whole cluster, beside the jobs: settings, and sums over users and chips.

USAGE_EVERY_S = 60.0
"""So often sums are written. What they held since then counts for nothing after a crash."""


class SharedRecords:
    """Knows what was recorded last, and makes new records of what has changed since.

    Args:
        fleet_times: what the chips of the cluster were in.
        user_times: what the time of forgotten jobs went into.
        clock: the Controller's.
    """

    def __init__(self, fleet_times: FleetTimes, user_times: UserTimes, clock: Clock) -> None:
        self._fleet_times = fleet_times
        self._user_times = user_times
        self._clock = clock
        self._taints: dict[str, dict[str, Taint]] = {}
        self._limits = 0  # the version of the users' limits that is recorded
        self._settings = 0  # and that of the cluster's settings
        self._users = 0  # the version of `user_times` that is recorded
        self._sums_at = -math.inf  # when the sums were recorded

    def changed(self, state: ControllerState) -> Iterator[tuple[str, bytes]]:
        """Yield each kind of record that is to be written anew, and what to write."""
        if state.fleet.taints != self._taints:
            found = state.fleet.taints.items()
            plain = {target: {name: (t.reason, t.until) for name, t in named.items()} for target, named in found}
            recorded = json.dumps(plain).encode()
            self._taints = {target: dict(named) for target, named in found}
            yield "taints", recorded
        if state.past_usage.now >= self._sums_at + USAGE_EVERY_S:
            self._sums_at = state.past_usage.now
            yield from self._sums(state)
        if state.limits.version != self._limits:
            table = [(user, band.name, dict(limits.items())) for (user, band), limits in state.limits.table.items()]
            recorded = json.dumps(table).encode()
            self._limits = state.limits.version
            yield "limits", recorded
        if state.settings.version != self._settings:
            rows = [(name, was.text, was.user, was.at) for name, was in state.settings.was_set.items()]
            recorded = json.dumps(rows).encode()
            self._settings = state.settings.version
            yield "settings", recorded

    def _sums(self, state: ControllerState) -> Iterator[tuple[str, bytes]]:
        """Yield what grows all the time: what the chips were in, and what users have held."""
        if not self._fleet_times.is_empty:
            yield "fleet", self._fleet_times.to_json()
        add_forgotten(state, self._user_times, self._clock)
        if self._user_times.version != self._users:
            self._users = self._user_times.version
            yield "users", self._user_times.to_json()
        if hours := state.past_usage.snapshot():
            yield "usage", json.dumps([state.past_usage.now, hours]).encode()


def add_forgotten(state: ControllerState, user_times: UserTimes, clock: Clock) -> None:
    """Add up what the time of jobs that were just forgotten went into, by the wall clock of their end."""
    for job in state.take_forgotten():
        user_times.add(replace(job, ended_at=clock.wall(job.ended_at)))


# -- record collector --------------------------------------------------------------------------------------------------
# What is to be recorded next: all that has changed since the last time, of one moment.

TURN_S = 0.02
"""For so long records are made without a pause."""
CHUNKS_AT_ONCE = 16
"""Of a large job, which takes about as long."""
FORGOTTEN_AT_ONCE = 100
"""Jobs whose endpoints are deleted together: to look for them is a call to the store."""
CLOCK_S = 10.0
"""How often the clock is recorded at least."""


class RecordCollector:
    """Makes records of what has changed.

    Args:
        epoch: the number of the Controller that writes; it is in every key.
        store: knows which endpoints there are.
        clock: is recorded with all else.
        shared: what is recorded beside the jobs.
    """

    def __init__(self, epoch: int, store: ClusterStore, clock: Clock, shared: SharedRecords) -> None:
        self._epoch = epoch
        self._store = store
        self._clock = clock
        self._shared = shared
        self._pending: dict[str, bytes | None] = {}  # what is to be written; None is to be deleted
        self._unrecordable: dict[str, Exception] = {}
        self._forgotten = 0  # jobs whose endpoints were not deleted yet
        self._clock_recorded_at = -math.inf

    def put_pool(self, owner: str, value: bytes | None) -> None:
        """Have what is known of a pool written with the next records; None: have it deleted."""
        self._pending[f"pool/{self._epoch}/{owner}"] = value

    async def collect(self, state: ControllerState) -> dict[str, bytes | None]:
        """Return what has changed since the last call, by key; None is to be deleted.

        The records of very many jobs are made in pieces, and others get their turn in between. What changes meanwhile
        is taken once more at the end.
        """
        await self._collect_jobs_in_turns(state)
        for job_id, chunks in _taken(state.unrecorded):
            self._collect_job(state, job_id, sorted(chunks))
        for kind, value in self._shared.changed(state):
            self._pending[f"{kind}/{self._epoch}"] = value
        if self._forgotten > FORGOTTEN_AT_ONCE:
            self.delete_endpoints(state)
        if self._pending or self._clock.now() > self._clock_recorded_at + CLOCK_S:
            self._clock_recorded_at = self._clock.now()  # no time in these records is later
            self._pending[f"clock/{self._epoch}"] = self._clock.record()
        values, self._pending = self._pending, {}
        return values

    def delete_endpoints(self, state: ControllerState) -> None:
        """Have the endpoints of forgotten jobs deleted. They are never looked up again, so it may fail."""
        self._forgotten = 0
        with contextlib.suppress(Exception):
            self._pending |= {k: None for k in self._store.keys("endpoint/") if not is_endpoint_of(state.jobs, k)}

    def take_unrecordable(self) -> dict[str, Exception]:
        """Return the jobs of which no record could be made since the last call, by id, each with its error."""
        found, self._unrecordable = self._unrecordable, {}
        return found

    async def _collect_jobs_in_turns(self, state: ControllerState) -> None:
        turn_ends = time.monotonic() + TURN_S
        for job_id, chunks in _taken(state.unrecorded):
            for some in _in_parts(sorted(chunks)) if job_id in state.jobs else [sorted(chunks)]:
                if not self._collect_job(state, job_id, some):
                    break
                if time.monotonic() > turn_ends:
                    await asyncio.sleep(0)
                    turn_ends = time.monotonic() + TURN_S

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
        self._pending[f"job/{self._epoch}/{job_id}"] = None if record is None else record.head()
        parts = dict.fromkeys(chunks) if record is None else dict(record.chunks(chunks))
        self._pending |= {f"gangs/{self._epoch}/{number}/{job_id}": part for number, part in parts.items()}
        if record is None:
            self._forgotten += 1


def _taken(unrecorded: dict[str, set[int]]) -> list[tuple[str, set[int]]]:
    """Return what has changed of which jobs, and forget it."""
    changed = list(unrecorded.items())
    unrecorded.clear()
    return changed


def _in_parts(chunks: list[int]) -> Iterator[list[int]]:
    """Yield all of them, a few at a time, and at least once."""
    for start in range(0, max(1, len(chunks)), CHUNKS_AT_ONCE):
        yield chunks[start : start + CHUNKS_AT_ONCE]


# -- journal -----------------------------------------------------------------------------------------------------------

logger = logging.getLogger(__name__)

EPOCHS_KEPT = 1000
"""The logs of so many Controllers stay closed: one that was frozen may thaw, however many have come since."""


class Journal:
    """Written before anything is done that follows from what is written.

    Attributes:
        epoch: the number of this Controller, larger than that of any before it; 0 before `begin`.
        contained: what can't be handled: jobs that were ended, and records that can't be read.
        clock: the Controller's; it goes on where that of the Controller before stood.
        fleet_times: what the chips of the cluster were in; it goes on, too.
        user_times: what the time of forgotten jobs went into; it goes on, too.
    """

    def __init__(self) -> None:
        self.epoch = 0
        self._store = ClusterStore()
        self.clock = Clock()
        self.contained = Containment(self._store, self.clock)
        self.fleet_times = FleetTimes()
        self.user_times = UserTimes()
        self._left = LeftBehind()
        self._log = WriteAheadLog(self._store, 0)
        self._collector = self._new_collector()

    def _new_collector(self) -> RecordCollector:
        shared = SharedRecords(self.fleet_times, self.user_times, self.clock)
        return RecordCollector(self.epoch, self._store, self.clock, shared)

    def begin(self) -> tuple[list[JobRecord], list[Event]]:
        """Take an epoch, and only then read what is left: from now on an earlier Controller acknowledges nothing.

        Raises:
            UnknownRecordError: as `left_behind`.
        """
        self.epoch = max(numbers_after(self._store, "epoch/"), default=0) + 1
        while not self._store.put_new(f"epoch/{self.epoch}", b""):  # another Controller begins at this moment
            self.epoch += 1
        self._log = WriteAheadLog(self._store, self.epoch)
        self._collector = self._new_collector()
        for epoch in range(max(1, last_complete(self._store)), self.epoch):
            self._log.close(epoch)
        left = self.left_behind()
        self._left.hand_on("clock", "the clock", self.clock.go_on_from, self.contained)
        self._left.hand_on("fleet", "what the chips were in", self.fleet_times.restore, self.contained)
        if self._left.hand_on("users", "the time of forgotten jobs", self.user_times.restore, self.contained):
            self.user_times.version += 1  # so that it is recorded again
        self.contained.keep_records()
        return left

    def left_behind(self) -> tuple[list[JobRecord], list[Event]]:
        """Return what the last Controller that wrote has left: its jobs, the oldest first, and the rest.

        What can't be read is left out.

        Raises:
            UnknownRecordError: another version of iris_ray wrote it.
        """
        self._left = read_left_behind(self._store, self._log, self.contained)
        settings = self._left.settings(self.contained)
        return self._left.records(self.contained), settings

    async def take_over(self, state: ControllerState) -> None:
        """Record everything under this epoch, and clear up what earlier ones have left.

        Raises:
            DeposedError: another Controller has begun.
        """
        await self._log.put(await self._collector.collect(state))
        self._store.put(f"complete/{self.epoch}", b"")
        await self._log.append({})
        for kind in KINDS:
            for epoch in self._epochs_of(kind):
                if epoch < self.epoch:
                    self._store.delete_all(f"{kind}/{epoch}/")
        await self._log.clear_earlier(EPOCHS_KEPT)
        for kind in (*SINGLE_KINDS, "complete", "checkpoint", "epoch"):
            kept = EPOCHS_KEPT if kind in ("checkpoint", "epoch") else 0
            for number in numbers_after(self._store, f"{kind}/"):
                if number < self.epoch - kept:
                    self._store.delete(f"{kind}/{number}")
        self._collector.delete_endpoints(state)  # an earlier Controller may have ended before it did

    async def write(self, state: ControllerState) -> None:
        """Record everything that has changed since the last time, as a whole; try until it is done.

        One call at a time, so that no older record comes after a newer one.

        Raises:
            DeposedError: another Controller has begun. Nothing was recorded.
        """
        if values := await self._collector.collect(state):
            await self._log.append(values)

    def take_unrecordable(self) -> dict[str, Exception]:
        """Return the jobs of which no record could be made since the last call, by id, each with its error."""
        return self._collector.take_unrecordable()

    def _epochs_of(self, kind: str) -> set[int]:
        """Return the numbers of the Controllers that have keys of a kind. Usually that is the latest one alone."""
        found = (key.split("/", 2)[1] for key in self._store.keys(f"{kind}/"))
        return {int(epoch) for epoch in found if epoch.isdecimal()}

    # -- pools ------------------------------------------------------------------------------------------------------

    def pools(self) -> dict[str, tuple[ActorHandle, int]]:
        """The pools that the last Controller knew, by owner, each with the number of its process."""
        return self._left.pools()

    def note_pool(self, owner: str, pool: tuple[ActorHandle, int] | None) -> None:
        """Have a pool recorded with the next writing, with the number of its process; None: have it deleted."""
        self._collector.put_pool(owner, None if pool is None else cloudpickle.dumps(pool))
