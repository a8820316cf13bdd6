"""What the Controller puts down in the cluster's key-value store, so that its successor can go on.

``taints`` is a JSON object, target → name → reason. ``job/<job id>`` is a `JobRecord`, ``pool/<owner>`` the handle of a SlicePoolManager, ``epoch/<n>`` says that the n-th
Controller has begun.
"""

import json
import logging
from copy import deepcopy

from ray import cloudpickle
from ray.actor import ActorHandle

from iris_ray.actors.ray_internals import ClusterStore
from iris_ray.events import TaintedEvent
from iris_ray.records import JobRecord
from iris_ray.state import ControllerState

logger = logging.getLogger(__name__)

JOB, POOL, EPOCH, TAINTS = "job/", "pool/", "epoch/", "taints"


class Journal:
    """Written before anything is done that follows from what is written."""

    def __init__(self) -> None:
        self._store = ClusterStore()
        self._taints: dict[str, dict[str, str]] = {}

    def begin_epoch(self) -> int:
        """The number of this Controller, larger than that of any before it."""
        past = [int(key.removeprefix(EPOCH)) for key in self._store.items(EPOCH)]
        epoch = max(past, default=0) + 1
        while not self._store.put_new(f"{EPOCH}{epoch:08d}", b""):  # somebody else begins at this moment
            epoch += 1
        for old in past:
            if old < epoch - 1:
                self._store.delete(f"{EPOCH}{old:08d}")
        return epoch

    def write(self, state: ControllerState) -> None:
        """Put down everything that has changed since the last time."""
        if state.taints != self._taints:
            self._store.put(TAINTS, json.dumps(state.taints).encode())
            self._taints = deepcopy(state.taints)
        while state.unrecorded:
            job_id = state.unrecorded.pop()
            record = state.record(job_id)
            if record is None:
                self._store.delete(JOB + job_id)
            else:
                self._store.put(JOB + job_id, record.to_bytes())

    def jobs(self) -> list[JobRecord]:
        """All records, the oldest job first.

        Raises:
            UnknownRecordError: another version of iris_ray wrote them.
        """
        return sorted(map(JobRecord.from_bytes, self._store.items(JOB).values()), key=lambda record: record.number)

    def taints(self) -> list[TaintedEvent]:
        """What an operator has set and not lifted, as events."""
        stored = self._store.items(TAINTS).get(TAINTS, b"{}")
        return [
            TaintedEvent(target, *taint) for target, taints in json.loads(stored).items() for taint in taints.items()
        ]

    def pools(self) -> dict[str, ActorHandle]:
        """The pools that an earlier Controller knew, by owner."""
        found = {}
        for key, value in self._store.items(POOL).items():
            try:
                found[key.removeprefix(POOL)] = cloudpickle.loads(value)
            except Exception:  # its Ray job is gone, and so is the pool
                logger.exception("the handle of pool %s can't be read", key)
        return found

    def put_pool(self, owner: str, pool: ActorHandle) -> None:
        self._store.put(POOL + owner, cloudpickle.dumps(pool))

    def forget_pool(self, owner: str) -> None:
        self._store.delete(POOL + owner)
