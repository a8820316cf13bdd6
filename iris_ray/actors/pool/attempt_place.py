"""The context that the parts of an attempt share: its place, its slices, and the request to stop."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Concatenate, ParamSpec, TypeVar

from iris_ray.actors.calls.asking import ANSWER_TIMEOUT_S
from iris_ray.actors.calls.controller_client import ControllerClient
from iris_ray.actors.pool.reserved_slices import ReservedSlices
from iris_ray.actors.pool.slice_actor import SliceActor
from iris_ray.actors.protocol.answers import Unreachable
from iris_ray.actors.protocol.messages import AttemptOrder, HostPlace, RunRequest
from iris_ray.model.lifecycle import AttemptId
from iris_ray.model.notices import OUR_MOVES, Notice
from iris_ray.model.outcomes import TaskKey, TpuCancelled, TpuPreempted, TpuResult

P = ParamSpec("P")
T = TypeVar("T")

NAMED = 8
"""The number of slices or hosts that a log message names at most."""


@dataclass(frozen=True, slots=True)
class AttemptPlace:
    """The hosts of one order and the processes on them: their names, indexes and words.

    To the Controller each host has one task. To the user each process is a task, with a rank of its own.
    """

    order: AttemptOrder

    @property
    def on_slices(self) -> bool:
        """Whether the gang has slices to itself. Tasks without chips share their hosts."""
        return self.order.on_slices

    @property
    def names(self) -> tuple[str, ...]:
        """The slices' names by slice id."""
        return tuple(hosts[0].slice_name for hosts in self.order.slices)

    @property
    def num_hosts(self) -> int:
        return self.order.hosts_per_slice * len(self.order.slices)

    @property
    def num_ranks(self) -> int:
        return self.num_hosts * self.order.processes_per_host

    def key(self, slice_id: int, process: int) -> TaskKey:
        """Return the key of a slice's process, by its number in the slice."""
        return TaskKey(slice_id, *divmod(process, self.order.processes_per_host))

    def process(self, key: TaskKey) -> int:
        """Return the number of a process in its slice."""
        return key.host_index * self.order.processes_per_host + key.local_index

    def on_host(self, slice_id: int, host_index: int) -> list[TaskKey]:
        """Return the keys of the processes of a host."""
        return [TaskKey(slice_id, host_index, local) for local in range(self.order.processes_per_host)]

    def host(self, key: TaskKey) -> HostPlace:
        return self.order.slices[key.slice_id][key.host_index]

    def name(self, key: TaskKey) -> str:
        """Return the name of a task's slice."""
        return self.order.slices[key.slice_id][0].slice_name

    def task_index(self, key: TaskKey) -> int:
        """Return the index that the Controller gives the task of a process's host."""
        return self.order.first_task + key.slice_id * self.order.hosts_per_slice + key.host_index

    def rank(self, key: TaskKey) -> int:
        """Return the index of a process in its job, as the user sees it."""
        return self.task_index(key) * self.order.processes_per_host + key.local_index

    def previous_rank(self, key: TaskKey) -> int | None:
        """Return the rank of the process of this number on this host in the attempt before, or None."""
        index = self.order.previous_indices.get(self.host(key).node_id)
        return None if index is None else index * self.order.processes_per_host + key.local_index

    def tasks(self) -> list[TaskKey]:
        """Return the key of every process, in order."""
        processes = range(self.order.hosts_per_slice * self.order.processes_per_host)
        return [self.key(slice_id, process) for slice_id in range(len(self.order.slices)) for process in processes]

    def __str__(self) -> str:
        if self.num_hosts == 1 and not self.on_slices:
            return self.order.slices[0][0].address
        where = self.names if self.on_slices else [host.address for hosts in self.order.slices for host in hosts]
        named = f"{', '.join(where[:NAMED])}{', …' if len(where) > NAMED else ''}"
        return f"{named} ({self.num_hosts} host{'s' if self.num_hosts > 1 else ''})"

    def in_words(self, key: TaskKey) -> str:
        """Return the place of a task as logs and errors show it."""
        if not self.on_slices:
            return f"task {self.task_index(key)} on {self.host(key).address}"
        process = f" process {key.local_index}" if self.order.processes_per_host > 1 else ""
        return f"slice {key.slice_id} ({self.name(key)}) worker {key.host_index}{process}"


class StopRequest:
    """A request that an attempt end before its tasks do. The first request counts.

    Attributes:
        reason: the reason, for people; done once the attempt is asked to end.
        cause: the task that we blame for the end, and its outcome; None if the owner or the Controller asked for it.
        moved_for: the notice that moves the gang, if a notice is the reason.
        is_hang: whether the gang had made no progress for too long.
        held_up: whether it is clear that the blamed task held up the others. Its host may be why.
    """

    def __init__(self) -> None:
        self.reason: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.cause: tuple[TaskKey, TpuResult] | None = None
        self.moved_for: Notice | None = None
        self.is_hang = self.held_up = False

    @property
    def asked(self) -> bool:
        return self.reason.done()

    def ask(self, reason: str) -> None:
        """Ask the attempt to end."""
        if not self.asked:
            self.reason.set_result(reason)

    def blame(self, key: TaskKey, result: TpuResult, reason: str) -> None:
        """Ask the attempt to end because of one of its tasks."""
        if not self.asked:
            self.cause = key, result
            self.ask(reason)

    def blame_for_hang(self, key: TaskKey, result: TpuResult, reason: str, held_up: bool) -> None:
        """Ask the attempt to end because it hangs. Blame a task if its guilt is clear."""
        if not self.asked:
            self.is_hang, self.held_up = True, held_up
            self.blame(key, result, reason)

    def move(self, notice: Notice, reason: str) -> None:
        """Ask the attempt to end, so that its gang can run elsewhere."""
        if not self.asked:
            by_us = notice.kind in OUR_MOVES
            self.moved_for = notice
            self.blame(TaskKey(0, 0), TpuCancelled(reason) if by_us else TpuPreempted(reason), reason)


@dataclass(frozen=True, slots=True)
class AttemptContext:
    """One attempt, as its parts see it.

    Attributes:
        place: where it runs.
        slices: the slices of its pool.
        controller: asks the Controller.
        request: the job.
        stop: asks the attempt to end.
    """

    place: AttemptPlace
    slices: ReservedSlices
    controller: ControllerClient
    request: RunRequest
    stop: StopRequest = field(default_factory=StopRequest)

    @property
    def id(self) -> AttemptId:
        return self.place.order.attempt

    async def ask(
        self, method: Callable[Concatenate[SliceActor, P], Awaitable[T]], *args: P.args, **kwargs: P.kwargs
    ) -> list[T | None]:
        """Ask all SliceActors. Return their answers by slice id; None for one that fails or does not answer."""
        return await self.ask_within(ANSWER_TIMEOUT_S, method, *args, **kwargs)

    async def ask_within(
        self,
        deadline_s: float,
        method: Callable[Concatenate[SliceActor, P], Awaitable[T]],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> list[T | None]:
        """Ask as `ask` does, and wait for each answer for this time at most."""
        actors = [self.slices.actor(name) for name in self.place.names]
        asks = (actor.ask_within(deadline_s, method, *args, **kwargs) for actor in actors)
        replies = await asyncio.gather(*asks, return_exceptions=True)
        return [None if isinstance(reply, (Unreachable, BaseException)) else reply for reply in replies]

    def by_task(self, replies: Sequence[Mapping[int, T] | None]) -> dict[TaskKey, T]:
        """Return the answers of SliceActors, which are by process of the slice, by task."""
        return {
            self.place.key(slice_id, process): answer
            for slice_id, reply in enumerate(replies)
            for process, answer in (reply or {}).items()
        }
