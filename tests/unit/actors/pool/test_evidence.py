"""What is asked about the hosts of an attempt that has ended."""

import asyncio
import time
from collections.abc import Mapping

import pytest

from iris_ray.actors.pool.attempt_end import ALONE_TIMEOUT_S, gather_evidence
from iris_ray.actors.protocol.answers import KilledForMemory, Unreachable
from iris_ray.actors.protocol.messages import AttemptOrder, HostPlace
from iris_ray.model.lifecycle import AttemptId
from iris_ray.model.outcomes import HostEvidence, TaskKey
from tests.support.attempts import Controller, Slices, new_context
from tests.support.virtual_time import in_virtual_time


class SilentController(Controller):
    """Does not answer; notes that a question was given up."""

    given_up = False

    async def evidence(self, node_ids: list[str]) -> dict[str, HostEvidence]:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.given_up = True
            raise
        return {}


class SilentSlices(Slices):
    async def healthy(self, patience_s: float) -> dict[int, None]:
        await asyncio.Event().wait()
        return {}


async def test_cancelled_gathering_drops_question_to_controller() -> None:
    controller = SilentController()
    order = AttemptOrder(AttemptId("job", 1), ((HostPlace("node", "10.0.0.1", "a", 0),),), {"TPU": 4.0}, 1, 1)
    gathering = asyncio.ensure_future(gather_evidence(new_context(order, SilentSlices(), controller), {}))
    await asyncio.sleep(0.01)
    gathering.cancel()
    await asyncio.wait({gathering})
    assert controller.given_up


class HungHosts:
    """Slices whose hosts do not answer either."""

    async def ask_hosts(self, name: str, timeout_s: float) -> dict[int, Unreachable]:
        await asyncio.sleep(timeout_s)
        return {0: Unreachable(f"{name} host 0 did not answer")}


@in_virtual_time
async def test_silent_slice_actors_are_asked_in_parallel() -> None:
    """A gang that has lost half of its slices is not away for a minute longer."""
    names = [f"slice-{i}" for i in range(64)]
    places = tuple((HostPlace(f"node of {name}", "10.0.0.1", name, 0),) for name in names)
    order = AttemptOrder(AttemptId("job", 1), places, {"TPU": 4.0}, 1, 1)
    silent = dict.fromkeys(names, "has not answered for 5 s")
    began = time.monotonic()
    found = await gather_evidence(new_context(order, HungHosts(), Controller()), silent)
    evidence, took = found, time.monotonic() - began
    assert len(evidence.lost_without_notice) == 64
    assert took == pytest.approx(ALONE_TIMEOUT_S)


class KilledSlices(Slices):
    """Ray has killed processes on its hosts: what it says about the SliceActor, and about each host."""

    def __init__(self, actor: Unreachable | None, hosts: Mapping[int, Unreachable | None]) -> None:
        super().__init__(len(hosts))
        self._actor = actor
        self._answers = hosts

    async def healthy(self, patience_s: float) -> Mapping[int, Unreachable | None] | Unreachable:  # type: ignore[override]
        return self._answers if self._actor is None else self._actor

    async def ask_hosts(self, name: str, timeout_s: float) -> Mapping[int, Unreachable | None]:
        return self._answers


KILLED = KilledForMemory("Ray killed processes there")


@pytest.mark.parametrize(
    ("actor", "hosts", "victim"),
    [(None, {0: None, 1: KILLED}, 1), (KILLED, {0: KILLED, 1: None}, 0), (KILLED, {0: None, 1: None}, 0)],
    ids=["a host's actor", "all that ran on host 0", "the slice's actor alone"],
)
async def test_memory_kill_by_ray_is_evidence_of_full_memory(
    actor: Unreachable | None, hosts: dict[int, Unreachable | None], victim: int
) -> None:
    places = tuple(HostPlace(f"node-{i}", f"10.0.0.{i}", "a", i) for i in hosts)
    order = AttemptOrder(AttemptId("job", 1), (places,), {"TPU": 4.0}, 1, 1)
    slices = KilledSlices(actor, hosts)
    evidence = await gather_evidence(new_context(order, slices, Controller()), {})
    reasons = {key.host_index: host.out_of_memory for key, host in evidence.hosts.items()}
    assert reasons == {i: KILLED.reason if i == victim else None for i in hosts}
    assert (evidence.suspects, evidence.bad_slices) == ({}, {0})
    assert evidence.reachable == {TaskKey(0, i) for i in hosts}, "what runs there can be ended"
    assert not any(host.lost for host in evidence.hosts.values())
