"""The Controller's records in the cluster's key-value store, from which its successor goes on.

Each Controller has a number, its epoch, and writes under its own number only. Each writing first goes to its
write-ahead log, as a whole or not at all (see `write_ahead_log`), and from there into records some time later.

A successor takes its epoch, closes the logs of all earlier Controllers, and then reads their records. A Controller that
was replaced without knowing it, because its host was frozen, can't write to its closed log, so it acknowledges nothing.

=================== ===================================================================================
``epoch/<n>``       the n-th Controller has begun; the numbers have no gaps
``log/<n>/<k>``     the k-th writing of the n-th Controller: keys of the records below, and their values
``checkpoint/<n>``  all entries of its log before this number are in records
``job/<n>/<id>``    a `JobRecord`; that of a large job without its gangs
``gangs/<n>/…``     some gangs of a large job: ``<chunk>/<id>``
``taints/<n>``      the operators' taints: a JSON object, target → name → [reason, until]
``limits/<n>``      the users' limits: a JSON list of [user, band, {limit → number}]
``teams/<n>``       the teams: a JSON object, name → users, weight and quotas, as in a file of teams
``settings/<n>``    the cluster's settings: a JSON list of [name, text, who has set it, when]
``clock/<n>``       the reading of its clock at the latest writing
``usage/<n>``       the past usage: a JSON list of when, user → resource → amount-hours, and the same by team
``service/<n>/…``   ``<name>``: the record of a service, which the service alone reads
``own-slices/<n>``  names of single hosts' slices whose labels are the same: a JSON object, node id → name
``complete/<n>``    the n-th Controller has recorded everything that it took over, so its records count from now on
``pool/<n>/…``      ``<owner>``: the handle of a SlicePoolManager, and the number of its process
``corrupt/<id>``    a record that can't be read, moved here, and why
``unrestorable/…``  why a job could not be restored; the next Controller moves its record to ``corrupt/``
``aside/<id>``      why a job broke the Controller, or could not be recorded; the next Controller ends it
``incarnation/…``   ``<owner>/<n>``: the pool's n-th process has begun, see `actors/calls/names.py`;
                    ``<owner>/adopter``: the attempt that has adopted its only job, see `actors/pool/children.py`
``endpoint/…``      an address that a task has registered, see `iris_ray.endpoints`
=================== ===================================================================================
"""

import asyncio
import contextlib
import json
import logging
import math
import time
from collections import deque
from collections.abc import Iterator

from ray import cloudpickle
from ray.actor import ActorHandle

from iris_ray.actors.calls.names import CODE_PREFIX, COMMAND_PREFIX, is_endpoint_of
from iris_ray.actors.calls.ray_internals import ClusterStore
from iris_ray.actors.controller.clock import Clock
from iris_ray.actors.controller.containment import Containment
from iris_ray.actors.controller.own_slices import OwnSlices
from iris_ray.actors.controller.services import ServiceRecords
from iris_ray.actors.controller.write_ahead_log import (
    KINDS,
    SINGLE_KINDS,
    LeftBehind,
    WriteAheadLog,
    last_complete,
    numbers_after,
    read_left_behind,
)
from iris_ray.state import ControllerState
from iris_ray.state.events import Event
from iris_ray.state.fleet import Taint
from iris_ray.state.records import JobRecord

logger = logging.getLogger(__name__)

EPOCHS_KEPT = 1000
"""The number of earlier Controllers whose logs stay closed, because a frozen Controller may thaw late."""

WRITINGS_KEPT = 10_000
"""The number of writings whose durations are kept until they are measured."""


class Journal:
    """Records decisions before the Controller acts on them, and reads the records of the Controller before.

    Attributes:
        epoch: the number of this Controller, larger than that of any before it; 0 before `begin`.
        contained: jobs that were ended because of a failure, and records that can't be read.
        clock: the Controller's. This and the next two attributes continue those of the previous Controller.
        own_slices: the names of single hosts' slices.
        service_records: the records of services.
    """

    def __init__(self) -> None:
        self.epoch = 0
        self._store = ClusterStore()
        self.clock = Clock()
        self.contained = Containment(self._store, self.clock)
        self.own_slices = OwnSlices()
        self.service_records = ServiceRecords()
        self._left = LeftBehind()
        self._log = WriteAheadLog(self._store, 0)
        self._writings: deque[float] = deque(maxlen=WRITINGS_KEPT)
        self._writing_since: float | None = None
        self._collector = self._new_collector()

    def _new_collector(self) -> "RecordCollector":
        shared = SharedRecords(self.own_slices)
        return RecordCollector(self.epoch, self._store, self.clock, shared, self.service_records)

    def begin(self) -> tuple[list[JobRecord], list[Event]]:
        """Take an epoch, close the logs of earlier Controllers, and read their records as `left_behind` does.

        From then on an earlier Controller acknowledges nothing.

        Raises:
            UnknownRecordError: another version of iris_ray wrote the records.
        """
        self.epoch = max(numbers_after(self._store, "epoch/"), default=0) + 1
        while not self._store.put_new(f"epoch/{self.epoch}", b""):  # another Controller begins at this moment
            self.epoch += 1
        self._log = WriteAheadLog(self._store, self.epoch)
        self._collector = self._new_collector()
        for epoch in range(max(1, last_complete(self._store)), self.epoch):
            self._log.close(epoch)
        left = self.look_back()
        self.contained.keep_records()
        return left

    def look_back(self) -> tuple[list[JobRecord], list[Event]]:
        """Read all records of the last Controller as `begin` does, with its clock, but write nothing.

        Raises:
            UnknownRecordError: another version of iris_ray wrote the records.
        """
        left = self.left_behind()
        self._left.hand_on("clock", "the clock", self.clock.go_on_from, self.contained)
        self._left.hand_on("own-slices", "the names of single hosts' slices", self.own_slices.restore, self.contained)
        self.service_records.restore({key.split("/", 2)[2]: v for key, v in self._left.of_kind("service").items()})
        return left

    def left_behind(self) -> tuple[list[JobRecord], list[Event]]:
        """Return the job records of the last Controller, the oldest first, and its settings as events.

        Unreadable records are left out.

        Raises:
            UnknownRecordError: another version of iris_ray wrote the records.
        """
        self._left = read_left_behind(self._store, self._log, self.contained)
        settings = self._left.settings(self.contained)
        return self._left.records(self.contained), settings

    async def take_over(self, state: ControllerState) -> None:
        """Record everything under this epoch, and delete the records of earlier ones.

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
        self._collector.delete_endpoints(state)  # an earlier Controller may have ended before it did so

    async def write(self, state: ControllerState) -> None:
        """Record all changes since the last time, as a whole; try until it is done.

        Make one call at a time, so that no older record comes after a newer one.

        Raises:
            DeposedError: another Controller has begun. Nothing was recorded.
        """
        if values := await self._collector.collect(state):
            began = self._writing_since = time.monotonic()
            try:
                await self._log.append(values)
                self._writings.append(time.monotonic() - began)
            finally:
                self._writing_since = None

    def take_writings(self) -> tuple[list[float], float]:
        """Return the durations of the writings since the last call, and the time that the present one has waited."""
        writings, since = list(self._writings), self._writing_since
        self._writings.clear()
        return writings, 0.0 if since is None else time.monotonic() - since

    def take_unrecordable(self) -> dict[str, Exception]:
        """Return the errors of jobs that could not be recorded since the last call, by job id."""
        return self._collector.take_unrecordable()

    def _epochs_of(self, kind: str) -> set[int]:
        """Return the numbers of the Controllers that have keys of a kind. Usually only the latest one has."""
        found = (key.split("/", 2)[1] for key in self._store.keys(f"{kind}/"))
        return {int(epoch) for epoch in found if epoch.isdecimal()}

    # -- pools ------------------------------------------------------------------------------------------------------

    def pools(self) -> dict[str, tuple[ActorHandle, int]]:
        """Return the pools that the last Controller knew, by owner, each with the number of its process."""
        return self._left.pools()

    def note_pool(self, owner: str, pool: tuple[ActorHandle, int] | None) -> None:
        """Record a pool and the number of its process with the next writing; None: delete the record."""
        self._collector.put_pool(owner, None if pool is None else cloudpickle.dumps(pool))


# -- shared records ----------------------------------------------------------------------------------------------------

USAGE_EVERY_S = 60.0
"""The interval at which the past usage is recorded."""


class SharedRecords:
    """Makes the records of the whole cluster that have changed: settings, teams, limits, taints and past usage.

    Args:
        own_slices: the names of single hosts' slices.
    """

    def __init__(self, own_slices: OwnSlices) -> None:
        self._own_slices = own_slices
        self._taints: dict[str, dict[str, Taint]] = {}
        self._limits = 0  # the version of the users' limits that is recorded
        self._teams = 0  # and that of the teams
        self._settings = 0  # and that of the cluster's settings
        self._names = 0  # and that of `own_slices`
        self._usage_at = -math.inf  # when the past usage was recorded

    def changed(self, state: ControllerState) -> Iterator[tuple[str, bytes]]:
        """Yield the kind and the value of each record that has changed."""
        if state.fleet.taints != self._taints:
            found = state.fleet.taints.items()
            plain = {target: {name: (t.reason, t.until) for name, t in named.items()} for target, named in found}
            recorded = json.dumps(plain).encode()
            self._taints = {target: dict(named) for target, named in found}
            yield "taints", recorded
        if state.past_usage.now >= self._usage_at + USAGE_EVERY_S:
            hours, of_teams = state.past_usage.snapshot(), state.teams.past.snapshot()
            if hours or of_teams:
                self._usage_at = state.past_usage.now
                yield "usage", json.dumps([state.past_usage.now, hours, of_teams]).encode()
        if state.limits.version != self._limits:
            table = [(user, band.name, dict(limits.items())) for (user, band), limits in state.limits.table.items()]
            recorded = json.dumps(table).encode()
            self._limits = state.limits.version
            yield "limits", recorded
        if state.teams.version != self._teams:
            recorded = json.dumps(state.teams.teams.to_tables()).encode()
            self._teams = state.teams.version
            yield "teams", recorded
        if state.settings.version != self._settings:
            rows = [(name, was.text, was.user, was.at) for name, was in state.settings.was_set.items()]
            recorded = json.dumps(rows).encode()
            self._settings = state.settings.version
            yield "settings", recorded
        if self._own_slices.version != self._names:
            self._names = self._own_slices.version
            yield "own-slices", self._own_slices.to_json()


# -- record collector --------------------------------------------------------------------------------------------------

TURN_S = 0.02
"""The time for which records are made without a pause; seconds."""
CHUNKS_AT_ONCE = 16
"""The number of chunks of a large job that are recorded without a pause, which takes about as long."""
FORGOTTEN_AT_ONCE = 100
"""The number of forgotten jobs whose endpoints are deleted together, because finding them is a call to the store."""
CLOCK_S = 10.0
"""The clock is recorded at least at this interval."""


class RecordCollector:
    """Makes records of all changes since the last time, as of one moment.

    Args:
        epoch: the number of the Controller that writes; it is in every key.
        store: lists the endpoints.
        clock: is recorded with the other records.
        shared: makes the records of the whole cluster.
        services: the records of services.
    """

    def __init__(
        self, epoch: int, store: ClusterStore, clock: Clock, shared: SharedRecords, services: ServiceRecords
    ) -> None:
        self._epoch = epoch
        self._store = store
        self._clock = clock
        self._shared = shared
        self._services = services
        self._pending: dict[str, bytes | None] = {}  # values to write by key; None: delete the key
        self._unrecordable: dict[str, Exception] = {}
        self._forgotten = 0  # how many forgotten jobs may still have endpoints
        self._clock_recorded_at = -math.inf

    def put_pool(self, owner: str, value: bytes | None) -> None:
        """Write the record of a pool with the next records; None: delete it."""
        self._pending[f"pool/{self._epoch}/{owner}"] = value

    async def collect(self, state: ControllerState) -> dict[str, bytes | None]:
        """Return the values that have changed since the last call, by key; None: delete the key.

        The records of very many jobs are made with pauses for other work. Jobs that change meanwhile are recorded once
        more at the end.
        """
        await self._collect_jobs_in_turns(state)
        for job_id, chunks in _taken(state.unrecorded):
            self._collect_job(state, job_id, sorted(chunks))
        for kind, value in self._shared.changed(state):
            self._pending[f"{kind}/{self._epoch}"] = value
        for name, value in self._services.take_changed().items():
            self._pending[f"service/{self._epoch}/{name}"] = value
        if self._forgotten > FORGOTTEN_AT_ONCE:
            self.delete_endpoints(state)
        if self._pending or self._clock.now() > self._clock_recorded_at + CLOCK_S:
            self._clock_recorded_at = self._clock.now()  # no time in these records is later
            self._pending[f"clock/{self._epoch}"] = self._clock.record()
        values, self._pending = self._pending, {}
        return values

    def delete_endpoints(self, state: ControllerState) -> None:
        """Delete the endpoints, the code and the command lines of forgotten jobs with the next records.

        This may fail, since they are never looked up again.
        """
        self._forgotten = 0
        with contextlib.suppress(Exception):
            for prefix in (CODE_PREFIX, COMMAND_PREFIX):
                kept = {key: key.removeprefix(prefix) for key in self._store.keys(prefix)}
                self._pending |= {key: None for key, job_id in kept.items() if job_id not in state.jobs}
            self._pending |= {k: None for k in self._store.keys("endpoint/") if not is_endpoint_of(state.jobs, k)}

    def take_unrecordable(self) -> dict[str, Exception]:
        """Return the errors of jobs that could not be recorded since the last call, by job id."""
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
        """Record the changed chunks of a job. Return whether that worked; if not, remember the error."""
        try:
            self._make_record(state, job_id, chunks)
        except Exception as error:
            self._unrecordable[job_id] = error
            return False
        return True

    def _make_record(self, state: ControllerState, job_id: str, chunks: list[int]) -> None:
        """Make the changed parts of a job's record, or delete the record of a forgotten job."""
        record = state.record(job_id)
        self._pending[f"job/{self._epoch}/{job_id}"] = None if record is None else record.head()
        parts = dict.fromkeys(chunks) if record is None else dict(record.chunks(chunks))
        self._pending |= {f"gangs/{self._epoch}/{number}/{job_id}": part for number, part in parts.items()}
        if record is None:
            self._forgotten += 1


def _taken(unrecorded: dict[str, set[int]]) -> list[tuple[str, set[int]]]:
    """Return the changed chunks by job id, and clear them."""
    changed = list(unrecorded.items())
    unrecorded.clear()
    return changed


def _in_parts(chunks: list[int]) -> Iterator[list[int]]:
    """Yield `CHUNKS_AT_ONCE` chunks at a time; once if there are none."""
    for start in range(0, max(1, len(chunks)), CHUNKS_AT_ONCE):
        yield chunks[start : start + CHUNKS_AT_ONCE]
