"""The Controller's write-ahead log, and how a successor reads it together with the records.

Every writing is one entry, which the store keeps as a whole or not at all. Entry k of Controller n has the key
``log/<n>/<k>``, and a key is only written if it is free. A successor closes a log by taking the key of the next entry.
Then the next writing of the replaced Controller fails, and the successor has read every acknowledged entry.

From time to time the values of the entries are put into records. A checkpoint says up to which entry this is done.
"""

import asyncio
import json
import logging
import pickle
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from ray import cloudpickle
from ray.actor import ActorHandle

from iris_ray.actors.calls.ray_internals import ClusterStore
from iris_ray.actors.controller.containment import Containment
from iris_ray.actors.protocol.services import all_settings
from iris_ray.errors import CorruptRecordError, DeposedError
from iris_ray.model.cluster_settings import WasSet
from iris_ray.model.limits import Limits
from iris_ray.model.options import PriorityBand
from iris_ray.model.plain_values import plain
from iris_ray.model.teams import Teams
from iris_ray.state.events import (
    Event,
    LimitsSetEvent,
    PastUsageEvent,
    SettingSetEvent,
    TaintedEvent,
    TeamsSetEvent,
)
from iris_ray.state.records import JobRecord, may_be_forgotten, require_whole

logger = logging.getLogger(__name__)

WRITE_AGAIN_S = 0.5
SIDE_BY_SIDE = 64
"""The number of values that are written at a time."""
MOST_ENTRIES = 500
MOST_BYTES = 2 << 20
"""The entries and bytes after which a checkpoint is due. A successor reads all entries since the checkpoint."""
CLOSED = b""

Values = Mapping[str, bytes | None]
"""Values by key; None: delete the key."""


class WriteAheadLog:
    """The log of one Controller, and the logs of earlier ones.

    Args:
        store: keeps them.
        epoch: the number of the Controller that writes.
    """

    def __init__(self, store: ClusterStore, epoch: int) -> None:
        self._store = store
        self._epoch = epoch
        self._next = 0
        self._checkpoint = 0
        self._bytes = 0
        self._since: dict[str, bytes | None] = {}  # the values of the entries since the checkpoint

    async def append(self, values: Values) -> None:
        """Write the next entry; try until it is stored. Make one call at a time.

        Raises:
            DeposedError: a successor has closed this log, so the entry was not written.
        """
        key, entry = self._key(self._epoch, self._next), pickle.dumps(dict(values))
        while not await self._has_appended(key, entry):
            await asyncio.sleep(WRITE_AGAIN_S)
        self._next += 1
        self._bytes += len(entry)
        self._since |= values
        if self._next - self._checkpoint >= MOST_ENTRIES or self._bytes >= MOST_BYTES:
            await self._make_checkpoint()

    async def _has_appended(self, key: str, entry: bytes) -> bool:
        try:
            is_new = await self._store.add(key, entry)
            found = entry if is_new else await self._store.fetch(key)  # ours, if an earlier try failed after writing
        except Exception as error:
            logger.warning("decisions can't be recorded; trying again: %s", error)
            return False
        if found != entry:
            raise DeposedError(f"Controller {self._epoch} was replaced; another one has taken over")
        return True

    async def _make_checkpoint(self) -> None:
        """Put the values of the entries into records, write the checkpoint, and only then delete the entries."""
        entries = range(self._checkpoint, self._next)
        await self.put(self._since)
        await self.put({f"checkpoint/{self._epoch}": b"%d" % self._next})
        self._checkpoint, self._bytes, self._since = self._next, 0, {}
        await self.put(dict.fromkeys(self._key(self._epoch, number) for number in entries))

    async def put(self, values: Values) -> None:
        """Write or delete values side by side, in any order; try until all are written."""
        keys = list(values)
        for start in range(0, len(keys), SIDE_BY_SIDE):
            left = keys[start : start + SIDE_BY_SIDE]
            while left:
                puts = (self._store.set(key, values[key]) for key in left)
                results = zip(left, await asyncio.gather(*puts, return_exceptions=True), strict=True)
                failures = {key: result for key, result in results if isinstance(result, Exception)}
                if failures:
                    error = next(iter(failures.values()))
                    logger.warning("decisions can't be recorded; trying again: %s", error)
                    await asyncio.sleep(WRITE_AGAIN_S)
                left = list(failures)

    # -- earlier Controllers ----------------------------------------------------------------------------------------

    def close(self, epoch: int) -> None:
        """Close the log of an earlier Controller, so that it can't write another entry. This blocks."""
        while True:
            first = self.checkpoint_of(epoch)
            numbers = [number for number in self._numbers(epoch) if number >= first]
            end = max(numbers, default=first)
            if not numbers or self._store.get(self._key(epoch, end)) != CLOSED:
                end += bool(numbers)
                if not self._store.put_new(self._key(epoch, end), CLOSED):
                    continue  # it has just written another entry
            if self.checkpoint_of(epoch) <= end:
                return  # else we took the key of an old entry, which a checkpoint had deleted meanwhile

    def read(self, epoch: int, first: int, contained: Containment) -> dict[str, bytes | None]:
        """Return the values of a Controller's log.

        Args:
            epoch: the number of the Controller.
            first: the number of the first entry to read, see `checkpoint_of`.
            contained: takes unreadable entries.
        """
        found = self._store.items(f"log/{epoch}/")
        values: dict[str, bytes | None] = {}
        for key in sorted(filter(_has_number, found), key=_number):
            if _number(key) >= first and found[key] != CLOSED:
                name = f"entry {key} of the log"
                values |= contained.read(name, {key: found[key]}, partial(_unpacked, found[key])) or {}
        return values

    async def clear_earlier(self, kept: int) -> None:
        """Delete the entries of earlier Controllers, except the closing entries of the latest ``kept`` logs."""
        numbers: defaultdict[int, list[int]] = defaultdict(list)
        for key in self._store.keys("log/"):
            parts = key.split("/")[1:]
            if len(parts) == 2 and all(map(str.isdecimal, parts)) and int(parts[0]) < self._epoch:
                numbers[int(parts[0])].append(int(parts[1]))
        for epoch, found in numbers.items():
            closed_by = max(found) if epoch >= self._epoch - kept else None
            await self.put({self._key(epoch, number): None for number in found if number != closed_by})

    def checkpoint_of(self, epoch: int) -> int:
        """Return the number of the first entry of a Controller's log whose values may not be in records yet."""
        found = self._store.get(f"checkpoint/{epoch}") or b""
        return int(found) if found.isdigit() else 0

    def _numbers(self, epoch: int) -> list[int]:
        return [_number(key) for key in self._store.keys(f"log/{epoch}/") if _has_number(key)]

    def _key(self, epoch: int, number: int) -> str:
        return f"log/{epoch}/{number}"


def _unpacked(entry: bytes) -> dict[str, bytes | None]:
    found: dict[str, bytes | None] = pickle.loads(entry)
    if not all(isinstance(key, str) and isinstance(value, bytes | None) for key, value in found.items()):
        raise CorruptRecordError("it holds something other than keys and values")
    return found


def _has_number(key: str) -> bool:
    return key.rpartition("/")[2].isdecimal()


def _number(key: str) -> int:
    return int(key.rpartition("/")[2])


# -- left behind by an earlier Controller ------------------------------------------------------------------------------


KINDS = "pool", "job", "gangs", "service"
"""Kinds of keys that have an id after the epoch."""
SINGLE_KINDS = "taints", "limits", "teams", "settings", "usage", "own-slices", "clock"
"""Kinds of keys that end with the epoch."""


@dataclass(frozen=True, slots=True)
class LeftBehind:
    """All records of one Controller. `Containment` takes the unreadable ones.

    Attributes:
        epoch: the number of that Controller.
        values: by key.
    """

    epoch: int = 0
    values: Mapping[str, bytes] = field(default_factory=dict)

    def settings(self, contained: Containment) -> list[Event]:
        """Return taints, teams, past usage, limits and the settings of the cluster, as events."""
        taints = self._events("taints", "the taints", _taints, contained)
        teams = self._events("teams", "the teams", _teams, contained)
        usage = self._events("usage", "the past usage", _usage, contained)
        limits = self._events("limits", "the limits", _limits, contained)
        settings = self._events("settings", "the settings", _settings, contained)
        return [*taints, *teams, *usage, *limits, *settings]

    def records(self, contained: Containment) -> list[JobRecord]:
        """Return the records of its jobs, the oldest first, except the ones that could not be restored before.

        Ended jobs in records of another version are forgotten: nothing is left to do for them.

        Raises:
            UnknownRecordError: another version of iris_ray wrote the record of a job that has not ended.
        """
        found, unrestorable = [], contained.unrestorable()
        for job_id, values in _by_job(self.of_kind("job"), self.of_kind("gangs")).items():
            if may_be_forgotten(next(iter(values.values()))):
                continue
            if (why := unrestorable.get(job_id)) is not None:
                contained.leave_out(job_id, values, why)
            elif (record := contained.read(job_id, values, partial(_joined, job_id, values))) is not None:
                found.append(record)
        return sorted(found, key=lambda record: record.job.number)

    def pools(self) -> dict[str, tuple[ActorHandle, int]]:
        """Return its pools by owner, each with the number of its process."""
        found = {}
        for key, value in self.of_kind("pool").items():
            try:
                found[key.split("/", 2)[2]] = cloudpickle.loads(value)
            except Exception:  # the pool is gone with its Ray job
                logger.exception("the handle of %s can't be read", key)
        return found

    def hand_on(self, kind: str, name: str, take_up: Callable[[bytes], None], contained: Containment) -> bool:
        """Call ``take_up`` with the recorded value of a single kind. Return whether there was one.

        Args:
            kind: one of `SINGLE_KINDS`.
            name: the record's name, for people.
            take_up: gets the value.
            contained: takes the value if ``take_up`` raises an error.
        """
        found = self.of_kind(kind)
        for key, recorded in found.items():
            contained.read(name, {key: recorded}, partial(take_up, recorded))
        return bool(found)

    def of_kind(self, kind: str) -> dict[str, bytes]:
        """Return the values of a kind, by key."""
        return {key: value for key, value in self.values.items() if key.startswith(f"{kind}/")}

    def _events(
        self, kind: str, name: str, make: Callable[[bytes], Sequence[Event]], contained: Containment
    ) -> Sequence[Event]:
        """Return the events of a single kind; none if it was not recorded or can't be read."""
        found = self.of_kind(kind)
        if (recorded := found.get(f"{kind}/{self.epoch}")) is None:
            return ()
        return contained.read(name, found, partial(make, recorded)) or ()


def read_left_behind(store: ClusterStore, log: WriteAheadLog, contained: Containment) -> LeftBehind:
    """Return all records of the last Controller that had completed its takeover.

    Args:
        store: keeps them.
        log: reads the values that are not in records yet.
        contained: takes unreadable entries of the log.
    """
    last, completed = -1, last_complete(store)
    values: dict[str, bytes] = {}
    while last != completed:  # repeat if another Controller has taken over meanwhile and deleted these records
        last = completed
        values = _values(last, store, log, contained)
        completed = last_complete(store)
    return LeftBehind(last, values)


def last_complete(store: ClusterStore) -> int:
    """Return the number of the last Controller that had completed its takeover; 0 for none."""
    return max(numbers_after(store, "complete/"), default=0)


def numbers_after(store: ClusterStore, prefix: str) -> list[int]:
    """Return the numbers of all keys that consist of this prefix and a number."""
    found = (key.removeprefix(prefix) for key in store.keys(prefix))
    return [int(number) for number in found if number.isdecimal()]


def _values(epoch: int, store: ClusterStore, log: WriteAheadLog, contained: Containment) -> dict[str, bytes]:
    """Return all values of a Controller by key, as of the moment when its log is read. It may still write.

    The records have at least the values of all entries before the checkpoint, unless there is another one meanwhile.
    """
    while True:
        first = log.checkpoint_of(epoch)
        values: dict[str, bytes | None] = {}
        for kind in KINDS:
            values |= store.items(f"{kind}/{epoch}/")
        for kind in SINGLE_KINDS:
            key = f"{kind}/{epoch}"
            values[key] = store.get(key)
        logged = log.read(epoch, first, contained)
        if first == log.checkpoint_of(epoch):
            break
    return {key: value for key, value in (values | logged).items() if value is not None}


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
    at, hours, *of_teams = found
    return [plain(PastUsageEvent, PastUsageEvent(hours, at, *of_teams), "past usage")]


def _teams(recorded: bytes) -> list[TeamsSetEvent]:
    return [TeamsSetEvent(tuple(Teams.from_tables(json.loads(recorded))))]


def _limits(recorded: bytes) -> list[LimitsSetEvent]:
    events = [LimitsSetEvent(user, PriorityBand[band], Limits(**set_)) for user, band, set_ in json.loads(recorded)]
    made: list[LimitsSetEvent] = plain(list[LimitsSetEvent], events, "limits")
    return made


def _settings(recorded: bytes) -> list[SettingSetEvent]:
    """Return the settings as events. A setting whose service is not installed is kept as it is, for its return."""
    known = all_settings()
    events = [
        SettingSetEvent(name, WasSet(known[name].checked(text) if name in known else text, *who_when))
        for name, text, *who_when in json.loads(recorded)
    ]
    made: list[SettingSetEvent] = plain(list[SettingSetEvent], events, "settings")
    return made
