"""What an earlier Controller has left in the cluster's key-value store: first its keys and values, then their meaning.

What can't be read is left out, and kept apart as corrupt.
"""

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from ray import cloudpickle
from ray.actor import ActorHandle

from iris_ray.actors.controller.corrupt_records import CorruptRecords
from iris_ray.actors.controller.write_ahead_log import WriteAheadLog
from iris_ray.actors.wire.ray_internals import ClusterStore
from iris_ray.model.cluster_settings import TABLE, WasSet
from iris_ray.model.job_spec import PriorityBand
from iris_ray.model.limits import Limits
from iris_ray.model.plain import plain
from iris_ray.state.events import Event, LimitsSetEvent, PastUsageEvent, SettingSetEvent, TaintedEvent
from iris_ray.state.record_check import require_whole
from iris_ray.state.records import JobRecord

logger = logging.getLogger(__name__)

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

    def settings(self, corrupt: CorruptRecords) -> list[Event]:
        """Return taints, past usage, limits and the settings of the cluster, as events.

        Args:
            corrupt: takes what can't be read.
        """
        taints = self._events("taints", "the taints", _taints, corrupt)
        usage = self._events("usage", "the past usage", _usage, corrupt)
        limits = self._events("limits", "the limits", _limits, corrupt)
        settings = self._events("settings", "the settings", _settings, corrupt)
        return [*taints, *usage, *limits, *settings]

    def records(self, corrupt: CorruptRecords, unrestorable: Mapping[str, str]) -> list[JobRecord]:
        """Return the records of its jobs, the oldest first.

        Args:
            corrupt: takes what can't be read, and what is of no use.
            unrestorable: why a Controller has failed to restore a job, by id.

        Raises:
            UnknownRecordError: another version of iris_ray wrote it.
        """
        found = []
        for job_id, values in _by_job(self.of_kind("job"), self.of_kind("gangs")).items():
            if (why := unrestorable.get(job_id)) is not None:
                corrupt.found(job_id, values, why)
            elif (record := corrupt.read(job_id, values, partial(_joined, job_id, values))) is not None:
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

    def hand_on(self, kind: str, name: str, take_up: Callable[[bytes], None], corrupt: CorruptRecords) -> bool:
        """Return whether it has recorded something of a kind that ends with the epoch.

        Args:
            kind: which.
            name: what people call it.
            take_up: gets what was recorded.
            corrupt: takes it if `take_up` raises an error.
        """
        found = self.of_kind(kind)
        for key, recorded in found.items():
            corrupt.read(name, {key: recorded}, partial(take_up, recorded))
        return bool(found)

    def of_kind(self, kind: str) -> dict[str, bytes]:
        """Return the values of a kind, by their keys."""
        return {key: value for key, value in self.values.items() if key.startswith(f"{kind}/")}

    def _events(
        self, kind: str, name: str, make: Callable[[bytes], Sequence[Event]], corrupt: CorruptRecords
    ) -> Sequence[Event]:
        """Return what is made of a kind that ends with the epoch; nothing if it was not recorded or can't be read."""
        found = self.of_kind(kind)
        if (recorded := found.get(f"{kind}/{self.epoch}")) is None:
            return ()
        return corrupt.read(name, found, partial(make, recorded)) or ()


def read_left_behind(store: ClusterStore, log: WriteAheadLog, corrupt: CorruptRecords) -> LeftBehind:
    """Return all that the last Controller has recorded that had recorded everything it took over.

    Args:
        store: where it is.
        log: reads what is not in records yet.
        corrupt: takes the entries of the log that can't be read.
    """
    last, completed = -1, last_complete(store)
    values: dict[str, bytes] = {}
    while last != completed:  # else another one has taken over while this one read, and cleared it away
        last = completed
        values = _values(last, store, log, corrupt)
        completed = last_complete(store)
    return LeftBehind(last, values)


def last_complete(store: ClusterStore) -> int:
    """Return the number of the last Controller that has recorded everything that it took over; 0 for none."""
    return max(numbers_after(store, "complete/"), default=0)


def numbers_after(store: ClusterStore, prefix: str) -> list[int]:
    """Return the numbers that come after a prefix of keys and end them."""
    found = (key.removeprefix(prefix) for key in store.keys(prefix))
    return [int(number) for number in found if number.isdecimal()]  # anything else is not ours


def _values(epoch: int, store: ClusterStore, log: WriteAheadLog, corrupt: CorruptRecords) -> dict[str, bytes]:
    """Return all that a Controller has written, by key. Its log is read first: what goes comes into records."""
    logged = log.read(epoch, corrupt)
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
