"""Ending the tasks of an attempt, and which of its slices can't be used again after that."""

import asyncio
from collections.abc import Collection, Iterable, Mapping

from iris_ray.actors.pool.attempt_place import AttemptPlace
from iris_ray.actors.pool.reserved_slices import ReservedSlices
from iris_ray.actors.wire.answers import Unreachable
from iris_ray.actors.wire.failure_detector import answers_unless_silent
from iris_ray.actors.wire.messages import RunRequest
from iris_ray.model.outcomes import TaskEnd, TaskKey


class AttemptShutdown:
    """Ends the tasks of an attempt. What is not known to be clean after that is not used again.

    Args:
        place: whose tasks these are.
        slices: end the tasks.
        request: says how long exit handlers may run, and how long hosts may be silent.

    Attributes:
        hung: slices whose SliceActor has stopped answering, and for how long; they are not asked.
    """

    def __init__(self, place: AttemptPlace, slices: ReservedSlices, request: RunRequest) -> None:
        self.hung: Mapping[str, str] = {}
        self._place = place
        self._slices = slices
        self._request = request
        self._lost: set[str] = set()  # slices that can't be used any more

    @property
    def leaving(self) -> tuple[str, ...]:
        """What is given back at once: slices that can't be used any more, and the place on a host that others share."""
        return tuple(sorted(self._lost)) if self._place.on_slices else self._place.names

    def lose(self, names: Iterable[str]) -> None:
        """Note that these slices can't be used any more."""
        self._lost.update(names)

    async def stop_all(self, reason: str | None) -> dict[TaskKey, TaskEnd]:
        """End all tasks and wait until their processes are gone; return how each ended, as far as its host can say.

        Args:
            reason: why; None after success, to let exit handlers of user code run. A later call with a reason cuts that
                short.
        """
        names = self._place.names
        asked = [name for name in names if name in self._slices and name not in self.hung]
        self.lose(self.hung)
        stubs = {name: self._slices.stub(name) for name in asked}
        grace = self._request.exit_grace if reason is None else 0.0
        asks = {name: stub.stop(self._place.order.attempt, reason, grace) for name, stub in stubs.items()}
        replies = await answers_unless_silent(asks, lambda name: stubs[name].ping(), self._request.host_silence)
        ends: dict[TaskKey, TaskEnd] = {}
        for name, reply in replies.items():
            if isinstance(reply, (Unreachable, BaseException)):
                self.lose([name])
                continue
            if None in reply.values():
                self.lose([name])  # what is not known to be clean is not used again
            slice_id = names.index(name)
            ends |= {TaskKey(slice_id, host_index): end for host_index, end in reply.items() if end is not None}
        return ends

    async def end_leftovers(self, hosts: Collection[TaskKey]) -> None:
        """End what runs on those hosts of lost slices, though a process of ours that should have done so is gone."""
        place = self._place
        left = {name: [key.host_index for key in hosts if place.name(key) == name] for name in sorted(self._lost)}
        asks = (
            self._slices.end_tasks(name, indexes) for name, indexes in left.items() if indexes and name in self._slices
        )
        await asyncio.gather(*asks)
