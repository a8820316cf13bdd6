"""What the Controller records in the cluster's key-value store, so that its successor can go on.

Each Controller has a number, its epoch, and writes under its own number only. A Controller that was replaced and does
not know it yet, because its host was frozen, writes keys that are never read.

Such a Controller acknowledges nothing, either. A successor takes its epoch first and then reads what is left; a
Controller writes first and then looks for the next epoch. So if a successor has not read a record, its writer finds
the next epoch and does not acknowledge.

=================== ===================================================================================
``epoch/<n>``       the n-th Controller has begun; the numbers have no gaps
``job/<n>/<id>``    a `JobRecord`
``taints/<n>``      what operators have set: a JSON object, target → name → [reason, until]
``complete/<n>``    the n-th Controller has recorded everything that it took over; from now on its records count
``pool/<owner>``    the handle of a SlicePoolManager, and the incarnation of its process
``endpoint/…``      an address that a task has registered, see `iris_ray.endpoints`
=================== ===================================================================================
"""

import asyncio
import contextlib
import json
import logging
from collections.abc import Mapping

from ray import cloudpickle
from ray.actor import ActorHandle

from iris_ray.actors.wire.ray_internals import ClusterStore
from iris_ray.actors.wire.shared_names import endpoint_key
from iris_ray.errors import DeposedError
from iris_ray.state import ControllerState
from iris_ray.state.events import TaintedEvent
from iris_ray.state.fleet import Taint
from iris_ray.state.records import JobRecord

logger = logging.getLogger(__name__)

WRITE_AGAIN_S = 0.5
EPOCHS_KEPT = 1000
"""By the key of the next epoch a Controller that was frozen finds out; so it stays, however many have come since."""


class Journal:
    """Written before anything is done that follows from what is written.

    Attributes:
        epoch: the number of this Controller, larger than that of any before it; 0 before `begin`.
    """

    def __init__(self) -> None:
        self.epoch = 0
        self._store = ClusterStore()
        self._taints: dict[str, dict[str, Taint]] = {}
        self._pending: dict[str, bytes | None] = {}  # what is to be written; None is to be deleted

    def begin(self) -> tuple[list[JobRecord], list[TaintedEvent]]:
        """Take an epoch, and only then read what is left: from now on an earlier Controller acknowledges nothing.

        Raises:
            UnknownRecordError: as `left_behind`.
        """
        self.epoch = max(self._numbers("epoch/"), default=0) + 1
        while not self._store.put_new(f"epoch/{self.epoch}", b""):  # another Controller begins at this moment
            self.epoch += 1
        return self.left_behind()

    def left_behind(self) -> tuple[list[JobRecord], list[TaintedEvent]]:
        """What the last Controller has left that got so far as to write: its jobs, the oldest first, and the taints.

        Raises:
            UnknownRecordError: another version of iris_ray wrote it.
        """
        last, completed = -1, self._last_complete()
        while last != completed:  # else another one has taken over while this one read, and cleared it away
            last = completed
            jobs, taints_then = self._store.items(f"job/{last}/"), self._store.items(f"taints/{last}")
            completed = self._last_complete()
        records = map(JobRecord.from_bytes, jobs.values())
        taints = json.loads(taints_then.get(f"taints/{last}", b"{}"))
        return (
            sorted(records, key=lambda record: record.job.number),
            [TaintedEvent(target, name, *t) for target, named in taints.items() for name, t in named.items()],
        )

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
        for kind, kept in (("taints/", 0), ("complete/", 0), ("epoch/", EPOCHS_KEPT)):
            for number in self._numbers(kind):
                if number < self.epoch - kept:
                    self._store.delete(f"{kind}{number}")

    async def write(self, state: ControllerState) -> None:
        """Record everything that has changed since the last time, side by side; try until it is done.

        One call at a time, so that no older record comes after a newer one. Pools come before their jobs, which a
        successor would otherwise take for those of a pool that is gone.

        Raises:
            DeposedError: another Controller has begun, and may have read the journal before this was written.
        """
        self._collect(state)
        while self._pending:
            batch, self._pending = self._pending, {}
            pools = {key: value for key, value in batch.items() if key.startswith("pool/")}
            jobs = {key: value for key, value in batch.items() if key not in pools}
            try:
                await self._put(pools)
                await self._put(jobs)
                deposed = await self._store.has(f"epoch/{self.epoch + 1}")
            except Exception as error:
                logger.warning("what has been decided can't be recorded; trying again: %s", error)
                self._pending = batch | self._pending
                await asyncio.sleep(WRITE_AGAIN_S)
                self._collect(state)
                continue
            if deposed:
                raise DeposedError(f"Controller {self.epoch} was replaced; another one has taken over")
            return

    async def _put(self, values: Mapping[str, bytes | None]) -> None:
        """Side by side; raises what went wrong first, once all are through."""
        puts = (self._store.set(key, value) for key, value in values.items())
        for failure in await asyncio.gather(*puts, return_exceptions=True):
            if failure is not None:
                raise failure

    def _collect(self, state: ControllerState) -> None:
        if state.fleet.taints != self._taints:
            found = state.fleet.taints.items()
            plain = {target: {name: (t.reason, t.until) for name, t in named.items()} for target, named in found}
            self._pending[f"taints/{self.epoch}"] = json.dumps(plain).encode()
            self._taints = {target: dict(named) for target, named in found}
        for job_id in state.unrecorded:
            record = state.record(job_id)
            self._pending[f"job/{self.epoch}/{job_id}"] = None if record is None else record.to_bytes()
            if record is None:
                with contextlib.suppress(Exception):  # they are never looked up again
                    self._store.delete_all(endpoint_key(job_id, ""))
        state.unrecorded.clear()

    def pools(self) -> dict[str, tuple[ActorHandle, str]]:
        """The pools that an earlier Controller knew, by owner, each with the incarnation of its process."""
        found = {}
        for key, value in self._store.items("pool/").items():
            try:
                found[key.removeprefix("pool/")] = cloudpickle.loads(value)
            except Exception:  # its Ray job is gone, and so is the pool
                logger.exception("the handle of %s can't be read", key)
        return found

    def note_pool(self, owner: str, pool: tuple[ActorHandle, str] | None) -> None:
        """Have a pool recorded with the next writing, with the incarnation of its process; None: have it deleted."""
        self._pending[f"pool/{owner}"] = None if pool is None else cloudpickle.dumps(pool)

    def _last_complete(self) -> int:
        return max(self._numbers("complete/"), default=0)

    def _numbers(self, kind: str) -> list[int]:
        return [int(key.removeprefix(kind)) for key in self._store.keys(kind)]
