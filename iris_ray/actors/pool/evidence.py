"""What is known about the hosts of an attempt that has ended: asked before anything is given back."""

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from iris_ray.actors.pool.attempt_place import AttemptPlace
from iris_ray.actors.pool.reserved_slices import ReservedSlices
from iris_ray.actors.pool.slice_actor import SliceActor
from iris_ray.actors.protocol.controller_interface import ControllerInterface
from iris_ray.actors.wire.answers import ANSWER_TIMEOUT_S, Gone, KilledForMemory, Unreachable
from iris_ray.actors.wire.controller_client import ControllerClient
from iris_ray.model.outcomes import HostEvidence, ProviderWord, TaskKey

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
