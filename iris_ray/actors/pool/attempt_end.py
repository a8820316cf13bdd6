"""How an attempt ended, and what is known of its tasks and hosts by then."""

import asyncio
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace

from iris_ray.actors.calls.asking import ANSWER_TIMEOUT_S
from iris_ray.actors.calls.controller_client import ControllerClient
from iris_ray.actors.calls.liveness import answers_unless_silent
from iris_ray.actors.pool.attempt_place import AttemptPlace, StopRequest
from iris_ray.actors.pool.reserved_slices import ReservedSlices
from iris_ray.actors.pool.slice_actor import SliceActor
from iris_ray.actors.protocol.answers import Gone, KilledForMemory, Unreachable
from iris_ray.actors.protocol.controller_interface import ControllerInterface
from iris_ray.actors.protocol.messages import RunRequest
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

# -- evidence ----------------------------------------------------------------------------------------------------------
# What is known about the hosts of an attempt that has ended: asked before anything is given back.

ALONE_TIMEOUT_S = 1.0
"""How long a host has to answer whose SliceActor does not."""
CONTROLLER_AWAY_S = 10.0
"""How long a verdict waits for a Controller that is being started anew: it knows of notices."""
CONTROLLER_AGAIN_S = 0.5


@dataclass(slots=True)
class Evidence:
    """The state of every host.

    Attributes:
        hosts: by task.
        suspects: hosts that did not answer, by node id, and why.
        reachable: hosts that answer, or of which only a process is known to be gone.
    """

    hosts: dict[TaskKey, HostEvidence] = field(default_factory=dict)
    suspects: dict[str, str] = field(default_factory=dict)
    reachable: set[TaskKey] = field(default_factory=set)

    @property
    def lost_without_notice(self) -> set[TaskKey]:
        return {key for key, host in self.hosts.items() if (host.lost or host.out_of_memory) and not host.draining}

    @property
    def bad_slices(self) -> set[int]:
        """The slice is the unit of failure: one host lost or about to go, and it is worthless."""
        bad = (key for key, host in self.hosts.items() if host.lost or host.draining or host.out_of_memory)
        return {key.slice_id for key in bad}

    @property
    def draining(self) -> TaskKey | None:
        """The first host that is about to go."""
        return next((key for key, host in self.hosts.items() if host.draining), None)


async def gather_evidence(
    place: AttemptPlace,
    slices: ReservedSlices,
    controller: ControllerClient,
    silent: Mapping[str, str],
    silence_s: float,
) -> Evidence:
    """Ask every host whether it is there, and the Controller what it has heard about them.

    Args:
        place: the hosts.
        slices, controller: are asked.
        silent: slices whose SliceActor has stopped answering, and for how long; they are not asked.
        silence_s: how long a host may take to answer; seconds.
    """
    names = place.names
    heard, replies = await asyncio.gather(
        _heard(controller, [host.node_id for hosts in place.order.slices for host in hosts]),
        asyncio.gather(*(_asked(slices, name, silent, silence_s) for name in names)),
    )
    evidence = Evidence()
    unexplained: dict[TaskKey, str] = {}
    for slice_id, (hosts, (slice_silence, silences)) in enumerate(zip(place.order.slices, replies, strict=True)):
        for host in hosts:
            key, said = TaskKey(slice_id, host.host_index), heard.get(host.node_id, HostEvidence())
            on_first = slice_silence if host.host_index == 0 else None
            found = _HostReplies(said, silences[host.host_index], on_first)
            evidence.hosts[key] = HostEvidence(found.lost, said.draining, out_of_memory=found.killed)
            if found.is_reachable:
                evidence.reachable.add(key)
            if suspicion := found.suspicion:
                evidence.suspects[host.node_id] = suspicion
                if not said.draining:
                    unexplained[key] = host.node_id
    words = await _provider_words(controller, list(unexplained.values()))
    for key, node_id in unexplained.items():
        evidence.hosts[key] = replace(evidence.hosts[key], provider=words.get(node_id))
    return evidence


@dataclass(frozen=True, slots=True)
class _HostReplies:
    """What was learned about one host.

    Attributes:
        said: what the Controller has heard.
        silence: why its own actor does not answer; None if it does.
        slice_silence: why the SliceActor does not answer that runs there; None if it does, or none runs there.
    """

    said: HostEvidence
    silence: Unreachable | None
    slice_silence: Unreachable | None

    @property
    def is_reachable(self) -> bool:
        return not self.said.lost and (self.silence is None or isinstance(self.silence, Gone))

    @property
    def killed(self) -> str | None:
        """How Ray killed a process of ours for lack of memory, if it did; such a host is there."""
        killed = (actor for actor in (self.slice_silence, self.silence) if isinstance(actor, KilledForMemory))
        return next((actor.reason for actor in killed), None)

    @property
    def suspicion(self) -> str | None:
        """Why the host is thought to be gone; None if it is not."""
        silence = None if self.silence is None or self.killed is not None else self.silence.reason
        return self.said.lost or silence

    @property
    def lost(self) -> str | None:
        """Why the host is of no use to the gang: it may just have lost the SliceActor."""
        if self.suspicion or self.slice_silence is None or self.killed is not None:
            return self.suspicion
        return self.slice_silence.reason


async def _asked(
    slices: ReservedSlices, name: str, silent: Mapping[str, str], silence_s: float
) -> tuple[Unreachable | None, dict[int, Unreachable | None]]:
    """Return why a slice's SliceActor does not answer, or None, and why each of its hosts counts as lost, or None."""
    reply: dict[int, Unreachable | None] | Unreachable
    if name in silent:
        reply = Unreachable(f"slice {name} {silent[name]}")
    else:
        deadline_s = silence_s + ANSWER_TIMEOUT_S
        reply = await slices.actor(name).ask_within(deadline_s, SliceActor.healthy, silence_s)
    if isinstance(reply, Unreachable):  # its SliceActor is gone; the hosts may be there
        return reply, await slices.ask_hosts(name, ALONE_TIMEOUT_S)
    return None, reply


async def _heard(controller: ControllerClient, node_ids: list[str]) -> dict[str, HostEvidence]:
    """Return what the Controller has heard about hosts; it may just be coming back."""
    give_up_at = time.monotonic() + CONTROLLER_AWAY_S
    while isinstance(word := await controller.ask_once(ControllerInterface.evidence, node_ids), Unreachable):
        if time.monotonic() > give_up_at:
            return {}
        await asyncio.sleep(CONTROLLER_AGAIN_S)
    return word


async def _provider_words(controller: ControllerClient, node_ids: list[str]) -> dict[str, ProviderWord]:
    """Return what the provider says about hosts that were lost without notice, as far as it says anything."""
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
"""How each task ended; None if that was not reported."""


@dataclass(frozen=True, slots=True)
class AttemptEnd:
    """How an attempt ended.

    Attributes:
        place: where it ran.
        verdict: why it ended, and which task was the first cause.
        ends: how each task ended.
        suspects: hosts that did not answer or can't take a task, by node id, and why.
        lost_before: tasks whose host broke before they started, while its slice was idle.
        moved_for: the notice because of which all tasks were ended, if nothing else was the matter.
    """

    place: AttemptPlace
    verdict: Verdict
    ends: Ends
    suspects: Mapping[str, str] = field(default_factory=dict)
    lost_before: Collection[TaskKey] = frozenset()
    moved_for: Notice | None = None

    @property
    def unfit_slices(self) -> list[str]:
        """The slices with a host that can't take a task."""
        return [self.place.name(key) for key in _refused(self.ends)]

    @property
    def slices_with_dead_standbys(self) -> set[str]:
        """The slices whose standbys may have ended while they waited: one has, or a host's memory was used up.

        What has ended one may have ended others, and Ray's memory monitor ends those that wait before the task.
        """
        telling = EndKind.NEVER_STARTED, EndKind.OUT_OF_MEMORY
        return {self.place.name(key) for key, end in self.ends.items() if end is not None and end.kind in telling}

    # -- about the first cause; not after success -------------------------------------------------------------------

    @property
    def never_started(self) -> bool:
        """Whether the task ended before any user code ran in it, or its host was lost from the beginning."""
        end = self._first_end
        return (end is not None and end.kind in DID_NOT_RUN) or self._cause in self.lost_before

    @property
    def is_failed_launch(self) -> bool:
        """Whether a task that never started counts as a failed launch: not if it waits for another task of ours."""
        end = self._first_end
        return end is None or end.kind is not EndKind.CHIPS_TAKEN

    @property
    def exit_code(self) -> int | None:
        """The exit code of the task's process if it has failed, and that is known."""
        end = self._first_end
        return None if end is None or end.kind is EndKind.RETURNED else end.exit_code

    @property
    def blamed_host(self) -> tuple[str, Fault] | None:
        """The node id of the host that may be at fault for the task's end, and in which way; None if it can't be."""
        end = self._first_end
        fault = None if end is None else FAULTS.get(end.kind)
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
        ends: what was known before the tasks were stopped. It takes precedence: a task's process has ended by now, and
            a payload that the pool has not fetched ended with it.
        late: what was known after that.
        was_asked: whether iris_ray wanted the attempt to end. Then a task counts as stopped if it has returned
            meanwhile and its result is lost.
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
        evidence: what was known of its hosts before its tasks were stopped.
        stop: why we ended it, if we did.
        at_once: whether it ended right after its start.
    """
    cause = stop.cause
    if cause is not None and isinstance(cause[1], TpuPreempted):
        cause = evidence.draining or cause[0], cause[1]
    verdict = judge_gang(ends, evidence.hosts, cause, was_told=stop.moved_for is not None)
    was_ours = cause is not None and verdict.result is cause[1]  # else something else was the matter
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
    )


def _refused(ends: Ends) -> dict[TaskKey, TaskEnd]:
    """Return the ends of tasks that their hosts can't take."""
    kinds = EndKind.HOST_UNFIT, EndKind.CHIPS_TAKEN
    return {key: end for key, end in ends.items() if end is not None and end.kind in kinds}


# -- attempt shutdown --------------------------------------------------------------------------------------------------
# Ending the tasks of an attempt, and which of its slices can't be used again after that.


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
        actors = {name: self._slices.actor(name) for name in asked}
        grace = self._request.exit_grace if reason is None else 0.0
        attempt, ping = self._place.order.attempt, SliceActor.ping
        asks = {name: actor.ask_once(SliceActor.stop, attempt, reason, grace) for name, actor in actors.items()}
        replies = await answers_unless_silent(asks, lambda name: actors[name].call(ping), self._request.host_silence)
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
