"""Contains failures: a job or record that the Controller can't handle is set aside and reported, and all others go on.

A job that failed is ended. A record that can't be read is left out and kept apart: its job is lost. Notes tell the next
Controller of both. Their keys are listed in `journal.py`.
"""

import logging
import pickle
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from iris_ray.actors.calls.ray_internals import ClusterStore
from iris_ray.actors.controller.clock import Clock
from iris_ray.errors import UnknownRecordError
from iris_ray.model.containment import SetAside, by_a_defect, in_short, lost, others_go_on
from iris_ray.state import ControllerState
from iris_ray.state.controller_state import apply_safely, job_of
from iris_ray.state.events import AttemptEndConfirmedEvent, Event, JobCancelledEvent
from iris_ray.state.instructions import Instructions

logger = logging.getLogger(__name__)

MOST_JOBS = 1000
"""The number of jobs that are remembered; the oldest are forgotten first."""
MOST_RECORDS = 100
"""The number of records that are kept apart; the oldest give way."""
MOST_BYTES = 2**24
"""And the size of all of them together."""
_ASIDE, _UNRESTORABLE, _CORRUPT = "aside/", "unrestorable/", "corrupt/"

Made = TypeVar("Made")


class BrokenStateError(Exception):
    """The state breaks its invariants. Only a new process helps, which rebuilds the state from the records."""


class Containment:
    """Ends the jobs of events that failed, keeps unreadable records apart, and remembers why.

    Args:
        store: keeps the unreadable records, and the notes for the next Controller.
        clock: the Controller's.

    Attributes:
        jobs: the jobs that were ended, by id.
        records: the unreadable records, by the id of the job or the name of the record. `keep_records` adds those that
            earlier Controllers have found; `forget_records` removes old ones.
    """

    def __init__(self, store: ClusterStore, clock: Clock) -> None:
        self.jobs: dict[str, SetAside] = {}
        self.records: dict[str, SetAside] = {}
        self._store = store
        self._clock = clock
        self._found: dict[str, tuple[str, Mapping[str, bytes]]] = {}  # record → why, and its values by key

    # -- jobs -------------------------------------------------------------------------------------------------------

    def without(self, events: Iterable[Event]) -> list[Event]:
        """Return the events without those of set-aside jobs. Keep the ends of their attempts, which free the hosts."""
        if not self.jobs:
            return list(events)
        return [e for e in events if isinstance(e, AttemptEndConfirmedEvent) or job_of(e) not in self.jobs]

    def end_those_of_failed(self, state: ControllerState, instructions: Instructions) -> None:
        """End the job of each event that failed, and check the state: the first steps of an event may have been done.

        Args:
            state: has handled the events.
            instructions: has the failed events, and gets the instructions that follow from the ends of their jobs.

        Raises:
            BrokenStateError: the state breaks its invariants. The jobs are remembered nevertheless.
        """
        failed, instructions.failed = instructions.failed, []
        if not failed:
            return
        for failure in failed:
            self.end(_job_to_blame(failure.event, state), "handled", failure.error, state, instructions)
        try:
            assert not instructions.failed, "a job that failed can't be ended"
            state.check()
        except Exception as error:
            raise BrokenStateError(f"{error}; after {failed[0].error!r}") from failed[0].error

    def end(self, job_id: str, what: str, error: Exception, state: ControllerState, instructions: Instructions) -> None:
        """End a job that could not be handled, if it has not ended already.

        Args:
            job_id: the job; for an empty id nothing is done.
            what: the verb for the message: the job could not be "handled", "recorded", …
            error: the error that was raised.
            state: has the job.
            instructions: gets the instructions that follow from the end.
        """
        if not job_id:
            return
        logger.error("%s is set aside", job_id, exc_info=error)
        why = f"iris_ray has set it aside: it could not be {what}, {by_a_defect(error)}"
        self._end(job_id, f"{why}. {others_go_on('jobs', 'Controller')}", state, instructions)

    def _end(self, job_id: str, why: str, state: ControllerState, instructions: Instructions) -> None:
        self.jobs[job_id] = SetAside(job_id, why, since=self._clock.now())
        while len(self.jobs) > MOST_JOBS:
            del self.jobs[next(iter(self.jobs))]
        apply_safely(state, [JobCancelledEvent(job_id, why)], instructions)

    # -- records ----------------------------------------------------------------------------------------------------

    def read(self, name: str, values: Mapping[str, bytes], make: Callable[[], Made]) -> Made | None:
        """Return the result of reading a record. If that fails, remember the record as unreadable and return None.

        Args:
            name: the id of its job, or the record's name.
            values: its values by key, which are kept apart if they can't be read.
            make: reads them.

        Raises:
            UnknownRecordError: another version of iris_ray wrote it. Such a record is not corrupt.
        """
        try:
            return make()
        except UnknownRecordError:
            raise
        except Exception as error:
            logger.exception("the record of %s can't be read; it is left out", name)
            self.leave_out(name, values, in_short(error))
            return None

    def leave_out(self, name: str, values: Mapping[str, bytes], why: str) -> None:
        """Remember a record as unreadable."""
        self._found[name] = why, values
        self.records[name] = lost(name, why)

    def keep_records(self) -> None:
        """Store the unreadable records apart, and add the records that earlier Controllers have stored there.

        Beyond `MOST_RECORDS` and `MOST_BYTES`, the oldest are no longer kept.
        """
        stored = self._stored()
        now = self._clock.now()
        new = {
            name: _Kept(now, why, values)
            for name, (why, values) in self._found.items()
            if name not in stored or stored[name].values != values  # else the service has not replaced it since
        }
        size = 0
        for count, (name, record) in enumerate(sorted({**stored, **new}.items(), key=_age), 1):
            is_kept = count <= MOST_RECORDS and size + record.size <= MOST_BYTES
            size += record.size if is_kept else 0
            if is_kept and name in new:
                self._store.put(f"{_CORRUPT}{name}", pickle.dumps((record.since, record.why, dict(record.values))))
            elif not is_kept and name in stored:
                self._store.delete(f"{_CORRUPT}{name}")
            if is_kept or name in new:
                self.records[name] = lost(name, record.why, record.since, is_kept)
            else:
                self.records.pop(name, None)
        self._found.clear()

    def _stored(self) -> dict[str, "_Kept"]:
        """Return the records that were kept apart. One that can't be read is found once more, as it is."""
        found = {}
        for key, value in self._store.items(_CORRUPT).items():
            name = key.removeprefix(_CORRUPT)
            try:
                since, why, values = pickle.loads(value)
                found[name] = _Kept(float(since), str(why), dict(values))
            except Exception as error:
                why = f"the copy that was kept apart can't be read either: {error}"
                self._found.setdefault(name, (why, {key: value}))
        return found

    async def forget_records(self, older_than_s: float) -> int:
        """Delete the unreadable records that were found longer ago than this; return how many."""
        before = self._clock.now() - older_than_s
        old = [name for name, one in self.records.items() if one.since is not None and one.since < before]
        for name in old:
            await self._store.set(f"{_CORRUPT}{name}", None)
            del self.records[name]
        return len(old)

    # -- notes for the next Controller ------------------------------------------------------------------------------

    def note_jobs(self, job_ids: Iterable[str]) -> None:
        """Have the next Controller end these jobs, because their records may say that they still run.

        Those that are more than `MOST_JOBS` are forgotten, and get no note.
        """
        for job_id in job_ids:
            if (aside := self.jobs.get(job_id)) is not None:
                self._note(_ASIDE, job_id, aside.why)

    def note_unrestorable(self, job_id: str, error: Exception) -> None:
        """Have the next Controller leave out a record that this Controller failed to restore, and that ends it."""
        self._note(_UNRESTORABLE, job_id, f"{type(error).__name__}: {error}")

    def unrestorable(self) -> dict[str, str]:
        """Return why the Controller before could not restore jobs, by their ids."""
        return self._noted(_UNRESTORABLE)

    def end_noted(self, state: ControllerState, instructions: Instructions) -> None:
        """End the jobs that the Controller before has noted."""
        for job_id, why in self._noted(_ASIDE).items():
            self._end(job_id, why, state, instructions)

    def forget_notes(self) -> None:
        """Delete all notes, once the jobs have ended and the records that could not be restored are kept apart."""
        self._store.delete_all(_ASIDE)
        self._store.delete_all(_UNRESTORABLE)

    def _note(self, kind: str, job_id: str, why: str) -> None:
        try:
            self._store.put(f"{kind}{job_id}", why.encode(errors="backslashreplace"))
        except Exception:
            logger.exception("the note %s%s can't be recorded", kind, job_id)

    def _noted(self, kind: str) -> dict[str, str]:
        found = self._store.items(kind).items()
        return {key.removeprefix(kind): why.decode(errors="replace") for key, why in found}


def _job_to_blame(event: object, state: ControllerState) -> str:
    """Return the id of the event's job; for a spare, the id of the job that it is held for."""
    job_id = job_of(event)  # type: ignore[arg-type]
    job = state.jobs.get(job_id)
    return job_id if job is None or job.spec.spare_for is None else job.spec.spare_for.job_id


@dataclass(frozen=True, slots=True)
class _Kept:
    """An unreadable record: since when it is kept apart, why, and its values by key."""

    since: float
    why: str
    values: Mapping[str, bytes]

    @property
    def size(self) -> int:
        return sum(map(len, self.values.values()))


def _age(named: tuple[str, _Kept]) -> tuple[float, str]:
    """Return a key that sorts records, the newest first."""
    name, record = named
    return -record.since, name
