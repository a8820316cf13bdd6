"""The slices that one pool holds: reserved when a job needs them, kept warm for a while, then given back."""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from ray.exceptions import RuntimeEnvSetupError

from iris_ray.actors.calls.asking import ANSWER_TIMEOUT_S, Actor
from iris_ray.actors.calls.background import BackgroundTasks, repeat
from iris_ray.actors.calls.liveness import FailureDetector
from iris_ray.actors.pool.reserved_slice import Bundle, ReservedSlice, SharedHosts
from iris_ray.actors.pool.slice_actor import SliceActor
from iris_ray.actors.protocol.answers import NotReserved, SetupFailed, Unreachable
from iris_ray.actors.protocol.controller_interface import ReportedEvent
from iris_ray.actors.protocol.host_interface import HostInterface
from iris_ray.actors.protocol.messages import AttemptOrder, HostPlace, ProcessSpec
from iris_ray.model.workers import TPU
from iris_ray.state.events import SliceReleasedEvent, TaskDispatchFailedEvent, attempt_over

logger = logging.getLogger(__name__)

USED_PORTS_KEPT = 1000
WORKED_KEPT = 16
"""The number of kinds of task processes of which the pool remembers that they start."""
HEALTHY_TIMEOUT_S = 3.0
RESERVE_TIMEOUT_S = 10.0
"""The time in which Ray reserves chips that the Controller counts as free, if it reserves anything at all."""
STALLED_S = 600.0
"""The time for which Ray may reserve nothing for any job. See `ReservedSlice.reserves_nothing`."""


class SpareFailed(Exception):
    """Slices could not be got ready.

    Attributes:
        broken: the slices that are at fault and still its own.
    """

    def __init__(self, reason: str, broken: tuple[str, ...]) -> None:
        super().__init__(reason)
        self.broken = broken


class ReservedSlices:
    """Slices by name. Methods that give slices back return the events that tell the Controller so.

    Args:
        owner: the id of the SlicePoolManager that holds them.
    """

    def __init__(self, owner: str) -> None:
        self.owner = owner
        self.used_ports: deque[int] = deque(maxlen=USED_PORTS_KEPT)
        self._held: dict[str, ReservedSlice] = {}
        self._shared = SharedHosts()
        self.has_fitted = False  # whether any host has had an iris_ray that goes with this one
        self._worked = deque([ProcessSpec()], maxlen=WORKED_KEPT)  # the default works: this process runs with it
        self._background = BackgroundTasks()
        self._leaving: dict[asyncio.Task[None], str] = {}  # being given back; a new order reserves them afresh

    def __getitem__(self, name: str) -> ReservedSlice:
        return self._held[name]

    def __contains__(self, name: str) -> bool:
        return name in self._held

    @property
    def holds_any(self) -> bool:
        """Whether the pool holds slices, or hosts that its next task without chips would use."""
        return bool(self._held or self._leaving or self._shared.actors)

    def actor(self, name: str) -> Actor[SliceActor]:
        return self._held[name].actor

    def host_actors(self, name: str) -> tuple[Actor[HostInterface], ...]:
        """Return the TPUHostActors of a slice by host index."""
        return self._held[name].actors.hosts

    async def ask_hosts(self, name: str, timeout_s: float = HEALTHY_TIMEOUT_S) -> dict[int, Unreachable | None]:
        """Ask a slice's hosts without its SliceActor. Return why each host counts as lost; None if it answers."""
        hosts = self._held[name].actors.hosts
        answers = await asyncio.gather(*(host.ask_within(timeout_s, HostInterface.healthy) for host in hosts))
        return {i: reply if isinstance(reply, Unreachable) else None for i, reply in enumerate(answers)}

    async def end_tasks(self, name: str, host_indexes: Iterable[int]) -> None:
        """End the task processes on these hosts of a slice without its SliceActor.

        Return when no task process runs there any more, or after a while, with a warning.
        """
        held, hosts = self._held[name], tuple(host_indexes)
        for i, why in zip(hosts, await asyncio.gather(*map(held.end_tasks, hosts)), strict=True):
            if why is not None:
                logger.warning("%s host %d: its task may run for a moment longer: %s", name, i, why)

    def slice_names(self) -> tuple[str, ...]:
        """Return the slices. The pool also holds places for tasks without chips."""
        return tuple(name for name, held in self._held.items() if TPU in held.bundle)

    # -- for an attempt --------------------------------------------------------------------------------------------

    def scale_multislice(self, order: AttemptOrder, process: ProcessSpec, keep_warm: float) -> None:
        """Hold every slice of the order for this kind of task. Reuse warm slices, and reserve the others."""
        for hosts in order.slices:
            held = self._hold(hosts, order.bundle, process)
            held.in_use, held.used_by, held.spare = True, order.attempt.job_id, None
            held.keep_warm = keep_warm

    def _hold(self, hosts: tuple[HostPlace, ...], bundle: Bundle, process: ProcessSpec) -> ReservedSlice:
        """Return the slice if it is held and fits; else reserve it. Start processes if none of that kind wait."""
        held = self._held.get(hosts[0].slice_name)
        if held is not None and (held.hosts != hosts or held.bundle != bundle):
            self._discard(held)
            held = None
        if held is None:
            held = ReservedSlice.reserve(self.owner, hosts, bundle, process, self.used_ports, self._shared)
            self._held[held.name] = held
        elif held.process != process:
            held.use_for(process)
        if held.waiting is None:
            held.start_processes(self.used_ports)
        return held

    async def hold_ready(self, order: AttemptOrder, process: ProcessSpec, keep_warm: float, silence_s: float) -> None:
        """Reserve the slices of the order that are not held yet, and wait until their processes are ready.

        Raises:
            SpareFailed: some slice did not get ready.
        """
        for hosts in order.slices:
            held = self._held.get(hosts[0].slice_name)
            if held is not None and held.in_use:
                continue  # the gang itself was faster
            held = self._hold(hosts, order.bundle, process)
            held.used_by, held.spare, held.keep_warm = order.spare_for or "", order.attempt, keep_warm
            held.idle_since = asyncio.get_running_loop().time()
        names = (hosts[0].slice_name for hosts in order.slices)
        mine = {name: self._held[name] for name in names if not self._held[name].in_use}
        broken = {name: why for name, why in (await self.all_ready(list(mine), silence_s)).items() if is_broken(why)}
        if broken:
            # The gang, or another job since this one ended, may have taken one over.
            own = (n for n in broken if self._held.get(n) is mine[n] and mine[n].spare == order.attempt)
            raise SpareFailed(in_words(broken), tuple(own))

    async def all_ready(self, names: Sequence[str], silence_s: float) -> dict[str, Any]:
        """Wait until every host could start a task at once. Return `SliceReady` for each slice.

        As soon as one slice fails, return the answers so far; that slice's answer is `Unreachable` or an exception.
        If it failed because it can't set up the request's environment, wait for the others: they show
        whether the hosts or the request is at fault.

        Args:
            names: the slices.
            silence_s: a host that has not answered for this time counts as lost; seconds.
        """
        asks = {asyncio.ensure_future(self._ready(self._held[name], silence_s)): name for name in names}
        pending, broken = set(asks), False
        try:
            while pending and not broken:
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                broken = any(is_broken(why := ask.result()) and not isinstance(why, SetupFailed) for ask in done)
        finally:
            for ask in pending:
                ask.cancel()
        answers = {name: ask.result() for ask, name in asks.items() if ask not in pending}
        ready = [self._held[name].process for name, reply in answers.items() if name in self and not is_broken(reply)]
        self._worked.extend(process for process in ready if process not in self._worked)
        partly = (isinstance(reply, SetupFailed) and reply.works_elsewhere for reply in answers.values())
        self.has_fitted |= bool(ready) or any(partly)
        return answers

    def has_worked(self, process: ProcessSpec) -> bool:
        """Return whether any host could set up this process. Then a host that can't is at fault, not the request."""
        return process in self._worked

    async def _ready(self, held: ReservedSlice, silence_s: float) -> Any:
        """Wait for a slice. Return `SliceReady`, or `Unreachable` or an exception if it fails. Raise nothing."""
        assert held.waiting is not None, "an attempt or a spare has started them"
        ready = held.waiting.ready
        try:
            if ready.done():
                return ready.result()
            if not await self._is_reserved(held, ready):
                return NotReserved(
                    f"Ray did not reserve {held.name} within {RESERVE_TIMEOUT_S:g} s: its resources are in use outside"
                    " iris_ray, or its hosts are going away"
                )
            return await self._started(held, ready, silence_s)  # it is reserved; only processes are still to start
        except RuntimeEnvSetupError as error:
            return SetupFailed(f"{held.name} host 0: {error}", (0,))
        except asyncio.CancelledError:
            if not ready.cancelled():
                raise  # this call itself was cancelled
            return NotReserved(f"{held.name} was given back while its processes started")
        except Exception as error:
            return error

    async def _is_reserved(self, held: ReservedSlice, ready: "asyncio.Future[Any]") -> bool:
        """Wait until Ray has reserved a slice, or reserves other things and not this one. Return whether it has."""
        waited_s = 0.0
        while waited_s < STALLED_S:
            await asyncio.wait({ready}, timeout=RESERVE_TIMEOUT_S)
            waited_s += RESERVE_TIMEOUT_S
            if ready.done() or await asyncio.to_thread(held.is_reserved):
                return True
            if not await asyncio.to_thread(held.reserves_nothing, self.owner):
                return await asyncio.to_thread(held.is_reserved)
            logger.warning(
                "%s waits: Ray has reserved nothing for any job for %g s, as it does when it waits for the answer of a"
                " host that has vanished",
                held.name,
                waited_s,
            )
        return False

    async def _started(self, held: ReservedSlice, ready: "asyncio.Future[Any]", silence_s: float) -> Any:
        """Return the result of `ready`, or `Unreachable` if a host that has answered once falls silent before."""
        if ready.done():
            return ready.result()
        hosts = held.actors.hosts
        ping = HostInterface.healthy
        watch = FailureDetector(lambda i: hosts[i].call(ping), range(len(hosts)), silence_s, since_first=True)
        silence = asyncio.ensure_future(watch.found())
        try:
            await asyncio.wait({ready, silence}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            silence.cancel()
            watch.stop()
        if ready.done():
            return ready.result()
        return Unreachable("; ".join(f"{held.name} host {i} {why}" for i, why in watch.silent.items()))

    def is_warm(self, order: AttemptOrder, process: ProcessSpec) -> bool:
        """Return whether all hosts of the order have been ready before, shared ones at least for another task."""
        if not order.on_slices:
            return self.has_worked(process) and all(self._shared.fits(host) for hosts in order.slices for host in hosts)
        held = [self._held.get(hosts[0].slice_name) for hosts in order.slices]
        return all(one is not None and one.has_started for one in held)

    def take_processes(self, names: Sequence[str]) -> dict[str, int]:
        """Return the number of the processes that run the tasks on each of these slices."""
        return {name: self._held[name].take_processes() for name in names}

    def drop_processes(self, names: Iterable[str]) -> None:
        """End the processes that wait on these slices. The next attempt starts others."""
        for held in (self._held[name] for name in names if name in self):
            held.drop_processes()

    def set_idle(self, names: Sequence[str]) -> None:
        """Note that the attempt on these slices is over, so that others may use them."""
        now = asyncio.get_running_loop().time()
        for name in names:
            if held := self._held.get(name):
                held.in_use, held.idle_since = False, now

    def retire(self, names: Sequence[str], whole: Collection[str] = ()) -> list[SliceReleasedEvent]:
        """Drop slices at once. Their hosts may be gone, except those of the `whole` ones, whose tasks have ended."""
        for name in names:
            if held := self._held.get(name):
                self._discard(held, name not in whole)
        return [SliceReleasedEvent(name, self.owner) for name in names]

    def retire_idle(self, names: Sequence[str]) -> list[ReportedEvent]:
        """Drop slices that broke while idle. A gang that held one as a spare needs another."""
        spares = {held.spare for name in names if (held := self._held.get(name)) and held.spare}
        events = list[ReportedEvent](self.retire(names))
        for attempt in spares:
            events += attempt_over(attempt, [TaskDispatchFailedEvent(attempt, "its slice was lost", 0.0)])
        return events

    async def job_over(self, job_id: str) -> None:
        """Tell the hosts that a job used last that it is over. Return once they have removed its files.

        Log a warning for a host that can't remove them, such as one with a faulty disk.
        """
        mine = [held for held in self._held.values() if held.used_by == job_id and TPU in held.bundle]
        hosts = [host for held in mine for host in held.actors.hosts]
        asks = (host.ask_once(HostInterface.job_over, job_id) for host in hosts)
        replies = await asyncio.gather(*asks, return_exceptions=True)
        for host, reply in zip(hosts, replies, strict=True):
            if isinstance(reply, Exception):
                logger.warning("%s: the files of job %s may stay there: %s", host.name, job_id, reply)

    # -- giving back -----------------------------------------------------------------------------------------------

    async def release_if(self, condition: Callable[[ReservedSlice], bool]) -> list[SliceReleasedEvent]:
        """Give back the idle slices for which the condition holds. Return when their processes are gone."""
        chosen = [held for held in self._held.values() if not held.in_use and condition(held)]
        for held in chosen:
            del self._held[held.name]
            task = self._background.start(self._tear_down(held), f"giving back {held.name}")
            self._leaving[task] = held.name
            task.add_done_callback(self._leaving.pop)
        for held in chosen:
            await self.left(held.name)
        return [SliceReleasedEvent(held.name, self.owner) for held in chosen]

    def has_idle(self, condition: Callable[[ReservedSlice], bool]) -> bool:
        """Return whether the condition holds for an idle slice."""
        return any(not held.in_use and condition(held) for held in self._held.values())

    async def release_idle_hosts(self) -> None:
        """End the TPUHostActors of shared hosts that no place uses any more."""
        await self._shared.end_idle()

    async def lost_while_idle(self) -> tuple[str, ...]:
        """Return the idle slices, spares included, with an actor or host that does not answer any more."""
        idle = [name for name, held in self._held.items() if not held.in_use and held.has_started]
        asks = (self.actor(name).ask_within(ANSWER_TIMEOUT_S, SliceActor.healthy, HEALTHY_TIMEOUT_S) for name in idle)
        answers = await asyncio.gather(*asks, return_exceptions=True)
        return tuple(
            name
            for name, silent in zip(idle, answers, strict=True)
            if name in self and not self[name].in_use
            if isinstance(silent, (Unreachable, BaseException)) or any(silent.values())
        )

    async def settle(self, condition: Callable[[ReservedSlice], bool]) -> None:
        """Wait until the slices for which the condition holds are idle."""
        while any(held.in_use and condition(held) for held in self._held.values()):
            await asyncio.sleep(0.02)

    async def left(self, name: str) -> None:
        """Wait until the pool has given the slice back, if it is doing so."""
        if leaving := [task for task, leaving in self._leaving.items() if leaving == name]:
            await asyncio.wait(leaving)

    async def _tear_down(self, held: ReservedSlice) -> None:
        try:
            await held.actor.ask_once(SliceActor.teardown)
        except Exception:
            logger.exception("%s could not be torn down; it ends with its reservation", held.name)
        await discarded(held)

    def _discard(self, held: ReservedSlice, is_broken: bool = True) -> None:
        if self._held.get(held.name) is held:
            del self._held[held.name]
        try:
            held.discard(is_broken)
        except Exception:
            logger.exception("%s could not be given back to Ray; it is tried again", held.name)
            self._background.start(discarded(held), f"giving {held.name} back to Ray")


async def discarded(held: ReservedSlice) -> None:
    """Give a slice back to Ray. Try again after an error: Ray's GCS may be restarting."""

    async def discard() -> bool:
        held.discard()
        return True

    await repeat(discard, f"giving {held.name} back to Ray")


def is_broken(reply: Any) -> bool:
    """Return whether an answer of `ReservedSlices.all_ready` says that the slice can't be used."""
    return isinstance(reply, (Unreachable, BaseException))


def in_words(broken: Mapping[str, Any]) -> str:
    """Return in words why these slices can't be used."""
    return "; ".join(why.reason if isinstance(why, Unreachable) else str(why) or repr(why) for why in broken.values())
