"""The Controller's write-ahead log: every writing is one value, which is there as a whole or not at all.

Entry k of Controller n has the key ``log/<n>/<k>``. A key is only ever written if it is free. So a successor closes the
log of a Controller: it takes the key of the next entry. Then that Controller's next writing fails, whatever it believes
of itself, and the successor has read all that was acknowledged. To write and to learn of a successor is one call.

What the entries say is put into records of their own from time to time. A checkpoint says up to which entry.
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
from iris_ray.errors import CorruptRecordError, DeposedError
from iris_ray.model.cluster_settings import TABLE, WasSet
from iris_ray.model.limits import Limits
from iris_ray.model.options import PriorityBand
from iris_ray.model.plain_values import plain
from iris_ray.state.events import Event, LimitsSetEvent, PastUsageEvent, SettingSetEvent, TaintedEvent
from iris_ray.state.record_check import require_whole
from iris_ray.state.records import JobRecord

logger = logging.getLogger(__name__)

WRITE_AGAIN_S = 0.5
SIDE_BY_SIDE = 64
"""Values that are written at a time."""
MOST_ENTRIES = 500
MOST_BYTES = 2 << 20
"""What the entries hold at most before a checkpoint; a successor reads them all."""
CLOSED = b""

Values = Mapping[str, bytes | None]
"""By their keys; None is to be deleted."""


class WriteAheadLog:
    """The log of one Controller, and those of earlier ones.

    Args:
        store: where they are.
        epoch: the number of the Controller that writes.
    """

    def __init__(self, store: ClusterStore, epoch: int) -> None:
        self._store = store
        self._epoch = epoch
        self._next = 0
        self._checkpoint = 0
        self._bytes = 0
        self._since: dict[str, bytes | None] = {}  # what the entries since the checkpoint say

    async def append(self, values: Values) -> None:
        """Write the next entry; try until it is there. One call at a time.

        Raises:
            DeposedError: a successor has closed this log. The entry is not there.
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
            found = entry if is_new else await self._store.fetch(key)  # ours, if an earlier try has failed too late
        except Exception as error:
            logger.warning("what has been decided can't be recorded; trying again: %s", error)
            return False
        if found != entry:
            raise DeposedError(f"Controller {self._epoch} was replaced; another one has taken over")
        return True

    async def _make_checkpoint(self) -> None:
        """Put what the entries say into records, say so, and only then delete the entries."""
        entries = range(self._checkpoint, self._next)
        await self.put(self._since)
        await self.put({f"checkpoint/{self._epoch}": b"%d" % self._next})
        self._checkpoint, self._bytes, self._since = self._next, 0, {}
        await self.put(dict.fromkeys(self._key(self._epoch, number) for number in entries))

    async def put(self, values: Values) -> None:
        """Write or delete values side by side, in no order; try until all are written."""
        keys = list(values)
        for start in range(0, len(keys), SIDE_BY_SIDE):
            left = keys[start : start + SIDE_BY_SIDE]
            while left:
                puts = (self._store.set(key, values[key]) for key in left)
                results = zip(left, await asyncio.gather(*puts, return_exceptions=True), strict=True)
                failures = {key: result for key, result in results if isinstance(result, Exception)}
                if failures:
                    error = next(iter(failures.values()))
                    logger.warning("what has been decided can't be recorded; trying again: %s", error)
                    await asyncio.sleep(WRITE_AGAIN_S)
                left = list(failures)

    # -- earlier Controllers ----------------------------------------------------------------------------------------

    def close(self, epoch: int) -> None:
        """Close the log of an earlier Controller, which writes nothing more that counts. This blocks."""
        while True:
            first = self._checkpoint_of(epoch)
            numbers = [number for number in self._numbers(epoch) if number >= first]
            end = max(numbers, default=first)
            if not numbers or self._store.get(self._key(epoch, end)) != CLOSED:
                end += bool(numbers)
                if not self._store.put_new(self._key(epoch, end), CLOSED):
                    continue  # it has just written another entry
            if self._checkpoint_of(epoch) <= end:
                return  # else the key was that of an old entry, which a checkpoint has deleted meanwhile

    def read(self, epoch: int, contained: Containment) -> dict[str, bytes | None]:
        """Return what the entries of an earlier Controller say that may not be in records. Records are read later.

        Args:
            epoch: the number of the Controller.
            contained: takes the entries that can't be read.
        """
        while True:
            first = self._checkpoint_of(epoch)
            found = self._store.items(f"log/{epoch}/")
            if first == self._checkpoint_of(epoch):
                break
        values: dict[str, bytes | None] = {}
        for key in sorted(filter(_has_number, found), key=_number):
            if _number(key) >= first and found[key] != CLOSED:
                name = f"entry {key} of the log"
                values |= contained.read(name, {key: found[key]}, partial(_unpacked, found[key])) or {}
        return values

    async def clear_earlier(self, kept: int) -> None:
        """Delete the entries of earlier Controllers, but what closes the logs of the latest ones: they may be frozen.

        Args:
            kept: so many of them stay closed.
        """
        numbers: defaultdict[int, list[int]] = defaultdict(list)
        for key in self._store.keys("log/"):
            parts = key.split("/")[1:]
            if len(parts) == 2 and all(map(str.isdecimal, parts)) and int(parts[0]) < self._epoch:
                numbers[int(parts[0])].append(int(parts[1]))
        for epoch, found in numbers.items():
            closed_by = max(found) if epoch >= self._epoch - kept else None
            await self.put({self._key(epoch, number): None for number in found if number != closed_by})

    def _checkpoint_of(self, epoch: int) -> int:
        found = self._store.get(f"checkpoint/{epoch}") or b""
        return int(found) if found.isdigit() else 0

    def _numbers(self, epoch: int) -> list[int]:
        return [_number(key) for key in self._store.keys(f"log/{epoch}/") if _has_number(key)]

    def _key(self, epoch: int, number: int) -> str:
        return f"log/{epoch}/{number}"


def _unpacked(entry: bytes) -> dict[str, bytes | None]:
    found: dict[str, bytes | None] = pickle.loads(entry)
    if not all(isinstance(key, str) and isinstance(value, bytes | None) for key, value in found.items()):
        raise CorruptRecordError("it has other things than keys and values")
    return found


def _has_number(key: str) -> bool:
    return key.rpartition("/")[2].isdecimal()


def _number(key: str) -> int:
    return int(key.rpartition("/")[2])


# -- left behind -------------------------------------------------------------------------------------------------------
# What an earlier Controller has left in the cluster's key-value store: first its keys and values, then their meaning.
#
# What can't be read is left out, and kept apart as corrupt.


KINDS = "pool", "job", "gangs"
"""Of keys that have an id after the epoch."""
SINGLE_KINDS = "taints", "limits", "settings", "usage", "fleet", "users", "clock"
"""Of keys that end with the epoch."""


@dataclass(frozen=True, slots=True)
class LeftBehind:
    """All that one Controller has recorded.

    Attributes:
        epoch: the number of that Controller.
        values: by their keys.
    """

    epoch: int = 0
    values: Mapping[str, bytes] = field(default_factory=dict)

    def settings(self, contained: Containment) -> list[Event]:
        """Return taints, past usage, limits and the settings of the cluster, as events.

        Args:
            contained: takes what can't be read.
        """
        taints = self._events("taints", "the taints", _taints, contained)
        usage = self._events("usage", "the past usage", _usage, contained)
        limits = self._events("limits", "the limits", _limits, contained)
        settings = self._events("settings", "the settings", _settings, contained)
        return [*taints, *usage, *limits, *settings]

    def records(self, contained: Containment) -> list[JobRecord]:
        """Return the records of its jobs, the oldest first.

        Args:
            contained: takes what can't be read, and what is of no use.

        Raises:
            UnknownRecordError: another version of iris_ray wrote it.
        """
        found, unrestorable = [], contained.unrestorable()
        for job_id, values in _by_job(self.of_kind("job"), self.of_kind("gangs")).items():
            if (why := unrestorable.get(job_id)) is not None:
                contained.leave_out(job_id, values, why)
            elif (record := contained.read(job_id, values, partial(_joined, job_id, values))) is not None:
                found.append(record)
        return sorted(found, key=lambda record: record.job.number)

    def pools(self) -> dict[str, tuple[ActorHandle, int]]:
        """Return the pools that it knew, by owner, each with the number of its process."""
        found = {}
        for key, value in self.of_kind("pool").items():
            try:
                found[key.split("/", 2)[2]] = cloudpickle.loads(value)
            except Exception:  # its Ray job is gone, and so is the pool
                logger.exception("the handle of %s can't be read", key)
        return found

    def hand_on(self, kind: str, name: str, take_up: Callable[[bytes], None], contained: Containment) -> bool:
        """Return whether it has recorded something of a kind that ends with the epoch.

        Args:
            kind: which.
            name: what people call it.
            take_up: gets what was recorded.
            contained: takes it if `take_up` raises an error.
        """
        found = self.of_kind(kind)
        for key, recorded in found.items():
            contained.read(name, {key: recorded}, partial(take_up, recorded))
        return bool(found)

    def of_kind(self, kind: str) -> dict[str, bytes]:
        """Return the values of a kind, by their keys."""
        return {key: value for key, value in self.values.items() if key.startswith(f"{kind}/")}

    def _events(
        self, kind: str, name: str, make: Callable[[bytes], Sequence[Event]], contained: Containment
    ) -> Sequence[Event]:
        """Return what is made of a kind that ends with the epoch; nothing if it was not recorded or can't be read."""
        found = self.of_kind(kind)
        if (recorded := found.get(f"{kind}/{self.epoch}")) is None:
            return ()
        return contained.read(name, found, partial(make, recorded)) or ()


def read_left_behind(store: ClusterStore, log: WriteAheadLog, contained: Containment) -> LeftBehind:
    """Return all that the last Controller has recorded that had recorded everything it took over.

    Args:
        store: where it is.
        log: reads what is not in records yet.
        contained: takes the entries of the log that can't be read.
    """
    last, completed = -1, last_complete(store)
    values: dict[str, bytes] = {}
    while last != completed:  # else another one has taken over while this one read, and cleared it away
        last = completed
        values = _values(last, store, log, contained)
        completed = last_complete(store)
    return LeftBehind(last, values)


def last_complete(store: ClusterStore) -> int:
    """Return the number of the last Controller that has recorded everything that it took over; 0 for none."""
    return max(numbers_after(store, "complete/"), default=0)


def numbers_after(store: ClusterStore, prefix: str) -> list[int]:
    """Return the numbers that come after a prefix of keys and end them."""
    found = (key.removeprefix(prefix) for key in store.keys(prefix))
    return [int(number) for number in found if number.isdecimal()]  # anything else is not ours


def _values(epoch: int, store: ClusterStore, log: WriteAheadLog, contained: Containment) -> dict[str, bytes]:
    """Return all that a Controller has written, by key. Its log is read first: what goes comes into records."""
    logged = log.read(epoch, contained)
    values: dict[str, bytes | None] = {}
    for kind in KINDS:
        values |= store.items(f"{kind}/{epoch}/")
    for kind in SINGLE_KINDS:
        key = f"{kind}/{epoch}"
        values[key] = store.get(key)
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


def _settings(recorded: bytes) -> list[SettingSetEvent]:
    """Return what was set; without what this version of iris_ray does not know."""
    rows = [(name, was_set) for name, *was_set in json.loads(recorded) if name in TABLE]
    events = [SettingSetEvent(name, WasSet(TABLE[name].checked(text), *who_when)) for name, (text, *who_when) in rows]
    made: list[SettingSetEvent] = plain(list[SettingSetEvent], events, "settings")
    return made
