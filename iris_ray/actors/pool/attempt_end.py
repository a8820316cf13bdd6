"""The end of an attempt: ask its hosts for evidence, stop its tasks, and judge why it ended."""

import asyncio
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace

from iris_ray.actors.calls.asking import ANSWER_TIMEOUT_S
from iris_ray.actors.calls.asking_again import ask_again
from iris_ray.actors.calls.controller_client import ControllerClient
from iris_ray.actors.calls.liveness import answers_unless_silent
from iris_ray.actors.pool.attempt_place import AttemptContext, AttemptPlace, StopRequest
from iris_ray.actors.pool.reserved_slices import ReservedSlices
from iris_ray.actors.pool.slice_actor import SliceActor
from iris_ray.actors.protocol.answers import Gone, KilledForMemory, Unreachable
from iris_ray.actors.protocol.controller_interface import ControllerInterface
from iris_ray.actors.protocol.payloads import with_fetched_payload
from iris_ray.model.notices import Notice
from iris_ray.model.outcomes import (
    DID_NOT_RUN,
    EndKind,
    Fault,
    HostEvidence,
    ProviderWord,
    TaskEnd,
    TaskKey,
    TpuPreempted,
)
from iris_ray.model.verdict import Verdict, judge_gang

# -- evidence: asked before any slice is given back --------------------------------------------------------------------

ALONE_TIMEOUT_S = 1.0
"""The time that each host of a silent SliceActor has to answer the pool directly."""
FAILED_EXIT_S = 5.0
"""The time for the exit handlers of a task that has failed; `exit_grace`, if that is shorter. The gang's next attempt
waits for them."""
FETCH_S = 2.0
"""The time to fetch a large payload from the actor of its host, which may hang."""
CONTROLLER_AWAY_S = 10.0
"""The time that a verdict waits for a restarting Controller, which knows the notices."""


@dataclass(slots=True)
class Evidence:
    """The state of every host of an attempt that has ended.

    Attributes:
        hosts: by task.
        suspects: why a host did not answer, by node id.
        reachable: hosts that answer, and hosts that have only lost their actor's process.
    """

    hosts: dict[TaskKey, HostEvidence] = field(default_factory=dict)
    suspects: dict[str, str] = field(default_factory=dict)
    reachable: set[TaskKey] = field(default_factory=set)

    @property
    def lost_without_notice(self) -> set[TaskKey]:
        return {key for key, host in self.hosts.items() if (host.lost or host.out_of_memory) and not host.draining}

    @property
    def bad_slices(self) -> set[int]:
        """Slices with a host that is lost, draining or out of memory. The slice is the unit of failure."""
        bad = (key for key, host in self.hosts.items() if host.lost or host.draining or host.out_of_memory)
        return {key.slice_id for key in bad}

    @property
    def draining(self) -> TaskKey | None:
        """The first host that is draining."""
        return next((key for key, host in self.hosts.items() if host.draining), None)


async def gather_evidence(context: AttemptContext, silent: Mapping[str, str]) -> Evidence:
    """Ping every host of an attempt, and ask the Controller for its evidence about them.

    Args:
        context: the attempt.
        silent: for how long a SliceActor has been silent, by slice name. These SliceActors are not asked again.
    """
    place, slices, controller = context.place, context.slices, context.controller
    heard, replies = await asyncio.gather(
        _heard(controller, [host.node_id for hosts in place.order.slices for host in hosts]),
        asyncio.gather(*(_asked(slices, name, silent, context.request.host_silence) for name in place.names)),
    )
    evidence = Evidence()
    unexplained: dict[TaskKey, str] = {}
    for slice_id, (hosts, (slice_silence, silences)) in enumerate(zip(place.order.slices, replies, strict=True)):
        for host in hosts:
            keys, said = place.on_host(slice_id, host.host_index), heard.get(host.node_id, HostEvidence())
            on_first = slice_silence if host.host_index == 0 else None
            on_host, suspicion, is_reachable = _judge_host(said, silences[host.host_index], on_first)
            evidence.hosts |= dict.fromkeys(keys, on_host)
            if is_reachable:
                evidence.reachable.update(keys)
            if suspicion:
                evidence.suspects[host.node_id] = suspicion
                if not said.draining:
                    unexplained |= dict.fromkeys(keys, host.node_id)
    words = await _provider_words(controller, list(dict.fromkeys(unexplained.values())))
    for key, node_id in unexplained.items():
        evidence.hosts[key] = replace(evidence.hosts[key], provider=words.get(node_id))
    return evidence


def _judge_host(
    said: HostEvidence, silence: Unreachable | None, slice_silence: Unreachable | None
) -> tuple[HostEvidence, str | None, bool]:
    """Return the evidence about a host, why it may be gone (None if nothing says so), and whether it can be reached.

    Args:
        said: the Controller's answer.
        silence: why the TPUHostActor does not answer; None if it does.
        slice_silence: why the SliceActor on this host does not answer; None if it does, or runs on another host.
    """
    killed = [actor.reason for actor in (slice_silence, silence) if isinstance(actor, KilledForMemory)]
    suspicion = said.lost or (None if silence is None or killed else silence.reason)
    lost = suspicion or (None if slice_silence is None or killed else slice_silence.reason)
    is_reachable = not said.lost and (silence is None or isinstance(silence, Gone))
    return HostEvidence(lost, said.draining, out_of_memory=killed[0] if killed else None), suspicion, is_reachable


async def _asked(
    slices: ReservedSlices, name: str, silent: Mapping[str, str], silence_s: float
) -> tuple[Unreachable | None, dict[int, Unreachable | None]]:
    """Return why a slice's SliceActor does not answer, and why each of its hosts counts as lost; None if it answers."""
    reply: dict[int, Unreachable | None] | Unreachable
    if name in silent:
        reply = Unreachable(f"slice {name} {silent[name]}")
    else:
        deadline_s = silence_s + ANSWER_TIMEOUT_S
        reply = await slices.actor(name).ask_within(deadline_s, SliceActor.healthy, silence_s)
    if isinstance(reply, Unreachable):  # the hosts may still answer
        return reply, await slices.ask_hosts(name, ALONE_TIMEOUT_S)
    return None, reply


async def _heard(controller: ControllerClient, node_ids: list[str]) -> dict[str, HostEvidence]:
    """Return the Controller's evidence about hosts. Wait for a Controller that is being restarted."""
    word = await ask_again(
        lambda: controller.ask_once(ControllerInterface.evidence, node_ids), within_s=CONTROLLER_AWAY_S
    )
    return {} if isinstance(word, Unreachable) else word


async def _provider_words(controller: ControllerClient, node_ids: list[str]) -> dict[str, ProviderWord]:
    """Return the cloud provider's statements about hosts that were lost without notice."""
    if not node_ids:
        return {}
    words = await controller.ask_once(ControllerInterface.provider_words, node_ids)
    return {} if isinstance(words, Unreachable) else words


# -- attempt end -------------------------------------------------------------------------------------------------------

FAULTS = {
    EndKind.CRASHED: Fault.CRASH,
    EndKind.DISK_ERROR: Fault.DISK,
    EndKind.NEVER_STARTED: Fault.NO_START,
    EndKind.HOST_UNFIT: Fault.HOST,
}
"""Ends that may be the host's fault."""

Ends = dict[TaskKey, TaskEnd | None]
"""The end of each task; None if no host has reported it."""


@dataclass(frozen=True, slots=True)
class AttemptEnd:
    """How an attempt ended.

    Attributes:
        verdict: why it ended, and which task was the first cause.
        suspects: why a host did not answer or can't take a task, by node id.
        lost_before: tasks whose host broke before they started, while its slice was idle.
        moved_for: the notice that moved the gang, if a notice was the reason for the end.
        is_hang: whether it ended because no task had made progress for too long.
        held_up: whether the first cause held up the other tasks then.
    """

    place: AttemptPlace
    verdict: Verdict
    ends: Ends
    suspects: Mapping[str, str] = field(default_factory=dict)
    lost_before: Collection[TaskKey] = frozenset()
    moved_for: Notice | None = None
    is_hang: bool = False
    held_up: bool = False

    @property
    def unfit_slices(self) -> list[str]:
        """The slices with a host that can't take a task."""
        return [self.place.name(key) for key in _refused(self.ends)]

    # -- about the first cause: only after a failure ----------------------------------------------------------------

    @property
    def never_started(self) -> bool:
        """Whether the task ended before any user code ran in it, or its host was lost before the start."""
        end = self._first_end
        return (end is not None and end.kind in DID_NOT_RUN) or self._cause in self.lost_before

    @property
    def is_failed_launch(self) -> bool:
        """Whether a task that never started counts as a failed launch. It does not if another task has its chips."""
        end = self._first_end
        return end is None or end.kind is not EndKind.CHIPS_TAKEN

    @property
    def exit_code(self) -> int | None:
        """The exit code of the task's process, if the task failed and the code is known."""
        end = self._first_end
        return None if end is None or end.kind is EndKind.RETURNED else end.exit_code

    @property
    def blamed_host(self) -> tuple[str, Fault] | None:
        """The node id and the fault of the host that may have caused the task's end; None if no host can have."""
        end = self._first_end
        fault = Fault.HANG if self.held_up else None if end is None else FAULTS.get(end.kind)
        return None if fault is None else (self.place.host(self._cause).node_id, fault)

    @property
    def _cause(self) -> TaskKey:
        assert self.verdict.cause is not None
        return self.verdict.cause

    @property
    def _first_end(self) -> TaskEnd | None:
        return self.ends.get(self._cause)


def all_returned(place: AttemptPlace, ends: Ends) -> AttemptEnd:
    """Return the end of an attempt whose tasks have all returned."""
    return AttemptEnd(place, judge_gang(ends, dict.fromkeys(ends, HostEvidence())), ends)


def with_late_ends(ends: Ends, late: Mapping[TaskKey, TaskEnd], was_asked: bool) -> Ends:
    """Return how each task ended.

    Args:
        ends: the ends known before the tasks were stopped. They take precedence: their payloads were fetched.
        late: the ends known after the tasks were stopped.
        was_asked: whether iris_ray asked the attempt to end. Then a task that returned meanwhile, and whose result is
            lost, counts as stopped.
    """
    known = {key: end for key, end in ends.items() if end is not None}
    return {**ends, **{key: _without_reference(end, was_asked) for key, end in late.items()}, **known}


def _without_reference(end: TaskEnd, was_asked: bool) -> TaskEnd | None:
    if end.payload is None or isinstance(end.payload, bytes):
        return end
    if end.kind is not EndKind.RETURNED:
        return replace(end, payload=None)
    return replace(end, kind=EndKind.STOPPED, payload=None, exit_code=None) if was_asked else None


def judge_attempt(place: AttemptPlace, ends: Ends, evidence: Evidence, stop: StopRequest, at_once: bool) -> AttemptEnd:
    """Return the end of an attempt whose tasks have been stopped.

    Args:
        place: where it ran.
        ends: how each task ended.
        evidence: gathered before its tasks were stopped.
        stop: why we ended it, if we did.
        at_once: whether it ended within `AT_ONCE_S` of its start.
    """
    cause = stop.cause
    if cause is not None and isinstance(cause[1], TpuPreempted):
        cause = evidence.draining or cause[0], cause[1]
    verdict = judge_gang(ends, evidence.hosts, cause, was_told=stop.moved_for is not None)
    was_ours = cause is not None and verdict.result is cause[1]  # else the verdict found another first cause
    suspects = dict(evidence.suspects)
    for key, end in _refused(ends).items():
        suspects.setdefault(place.host(key).node_id, end.error)
    return AttemptEnd(
        place,
        verdict,
        ends,
        suspects=suspects,
        lost_before=evidence.lost_without_notice if at_once else frozenset(),
        moved_for=stop.moved_for if was_ours else None,
        is_hang=stop.is_hang and was_ours,
        held_up=stop.held_up and was_ours,
    )


def _refused(ends: Ends) -> dict[TaskKey, TaskEnd]:
    """Return the ends of the tasks that their hosts could not take."""
    kinds = EndKind.HOST_UNFIT, EndKind.CHIPS_TAKEN
    return {key: end for key, end in ends.items() if end is not None and end.kind in kinds}


async def _fetched(end: TaskEnd) -> TaskEnd:
    """Return an end with its large payload, which its host's actor holds; unchanged if that host does not answer."""
    try:
        async with asyncio.timeout(FETCH_S):
            return await with_fetched_payload(end) or end
    except TimeoutError:
        return end


# -- shutdown ----------------------------------------------------------------------------------------------------------


class AttemptShutdown:
    """Ends the tasks of an attempt. A slice that is not known to be clean after that is not used again.

    Args:
        context: the attempt.

    Attributes:
        hung: for how long a SliceActor has been silent, by slice name. These SliceActors are not asked again.
    """

    def __init__(self, context: AttemptContext) -> None:
        self.hung: Mapping[str, str] = {}
        self._attempt, self._place = context, context.place
        self._lost: set[str] = set()  # slices that can't be used any more
        self._unused: frozenset[str] = frozenset()  # places whose tasks have left nothing in the reservation

    @property
    def leaving(self) -> tuple[str, ...]:
        """The places that are given back at once: slices that can't be used again, and places on shared hosts."""
        return tuple(sorted(self._lost)) if self._place.on_slices else self._place.names

    @property
    def whole(self) -> frozenset[str]:
        """The places on shared hosts whose tasks have ended in order, and have left nothing in the reservation."""
        return frozenset() if self._place.on_slices else self._unused - self._lost

    def heard(self, ends: Ends) -> None:
        """Note how the tasks have ended. Those that have joined Ray may have actors in the reservation."""
        used = {key.slice_id for key, end in ends.items() if end is None or not end.never_joined}
        self._unused = frozenset(name for i, name in enumerate(self._place.names) if i not in used)

    def lose(self, names: Iterable[str]) -> None:
        """Note that these slices can't be used again."""
        self._lost.update(names)

    async def stop_all(self, reason: str | None) -> dict[TaskKey, TaskEnd]:
        """End all tasks and wait until their processes are gone. Return the end of each, as far as its host knows it.

        Args:
            reason: why; None after success. A later call with a reason ends the processes while their exit handlers
                still run. Exit handlers of tasks that have failed run for at most `FAILED_EXIT_S`.
        """
        names = self._place.names
        slices = self._attempt.slices
        actors = {name: slices.actor(name) for name in names if name in slices and name not in self.hung}
        self.lose(self.hung)
        exit_grace = self._attempt.request.exit_grace
        grace = exit_grace if reason is None else min(exit_grace, FAILED_EXIT_S)
        attempt, ping = self._attempt.id, SliceActor.ping
        asks = {name: actor.ask_once(SliceActor.stop, attempt, reason, grace) for name, actor in actors.items()}
        replies = await answers_unless_silent(
            asks, lambda name: actors[name].call(ping), self._attempt.request.host_silence
        )
        ends: dict[TaskKey, TaskEnd] = {}
        for name, reply in replies.items():
            if isinstance(reply, (Unreachable, BaseException)):
                self.lose([name])
                continue
            if None in reply.values():
                self.lose([name])  # a host can't say that its task has ended
            slice_id = names.index(name)
            ends |= {self._place.key(slice_id, process): end for process, end in reply.items() if end is not None}
        return dict(zip(ends, await asyncio.gather(*map(_fetched, ends.values())), strict=True))

    async def end_leftovers(self, hosts: Collection[TaskKey]) -> None:
        """End the processes left on these hosts of lost slices, whose SliceActor or TPUHostActor may be gone."""
        slices, on = self._attempt.slices, {self._place.host(key) for key in hosts}
        left = {name: [host.host_index for host in on if host.slice_name == name] for name in sorted(self._lost)}
        asks = (slices.end_tasks(name, indexes) for name, indexes in left.items() if indexes and name in slices)
        await asyncio.gather(*asks)
