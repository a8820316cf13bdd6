"""What is to be recorded next: all that has changed since the last time, of one moment."""

import asyncio
import contextlib
import math
import time
from collections.abc import Iterator

from iris_ray.actors.controller.clock import Clock
from iris_ray.actors.controller.shared_records import SharedRecords
from iris_ray.actors.wire.ray_internals import ClusterStore
from iris_ray.actors.wire.shared_names import is_endpoint_of
from iris_ray.state import ControllerState

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
