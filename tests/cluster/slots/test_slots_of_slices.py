"""Slots that use all hosts of a slice: a process on each host, which make every call together."""

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from iris_ray import SlotClient, SlotHosts
from iris_ray.slots.core.policy import IdleFor, PlacementPolicy, ServingPolicy
from iris_ray.testing import SimulatedCluster
from tests.support.waiting import wait_until

EAGER = ServingPolicy(placement=PlacementPolicy(stale_at=IdleFor(0.0), min_residency_s=0.0))
GB = 2**30


class Sharded:
    """A JAX program on all hosts. Each answer takes a part from every one of them."""

    def load(self) -> None:
        import jax

        import iris_ray.jax

        iris_ray.jax.initialize()
        assert jax.process_count() == 2

    def __call__(self, payload: Any) -> Any:
        import numpy as np
        from jax.experimental import multihost_utils

        if payload == "pieces":
            return self.pieces(4)
        if isinstance(payload, Exception):
            raise payload
        return multihost_utils.process_allgather(np.array([os.getpid(), payload])).tolist()

    def pieces(self, count: int) -> Iterator[list[int]]:
        import numpy as np
        from jax.experimental import multihost_utils

        for number in range(count):
            yield multihost_utils.process_allgather(np.array(number)).tolist()


@pytest.fixture(scope="module")
def client(cluster: SimulatedCluster) -> Iterator[SlotClient]:
    with SlotClient([SlotHosts(tpu_type="v4-16", whole_slices=True, memory=16 * GB)], policy=EAGER) as client:
        client.register(Sharded, memory={8: GB})
        yield client


def pids(answer: list[list[int]]) -> list[int]:
    return [pid for pid, _ in answer]


def test_every_host_makes_every_call_or_all_end(client: SlotClient) -> None:
    first = client.submit("Sharded", 1).result(180)
    assert [payload for _, payload in first] == [1, 1]
    assert len(set(pids(first))) == 2
    answers = [client.submit("Sharded", number) for number in range(8)]
    assert [answer.result(60)[0][1] for answer in answers] == list(range(8))
    assert list(client.stream("Sharded", "pieces")) == [[number, number] for number in range(4)]
    with pytest.raises(ZeroDivisionError):
        client.submit("Sharded", ZeroDivisionError("on all hosts")).result(60)
    with client.session("Sharded") as session:
        assert pids(session.call(2)) == pids(first)
    os.kill(pids(first)[1], signal.SIGKILL)
    again = [client.submit("Sharded", number) for number in range(3)]
    assert not set(pids(first)) & {pid for answer in again for pid in pids(answer.result(180))}


@pytest.mark.proof
def test_abandoned_stream_leaves_hosts_in_step(client: SlotClient) -> None:
    for _ in range(3):
        next(iter(client.stream("Sharded", "pieces")))
    assert client.submit("Sharded", 1).result(180)[0][1] == 1


@pytest.mark.proof
def test_models_take_turns_on_a_slice(client: SlotClient) -> None:
    client.register(Sharded, "other", memory={8: GB})
    before = pids(client.submit("Sharded", 1).result(180))
    assert not set(before) & set(pids(client.submit("other", 1).result(180)))
    wait_until(lambda: [slot.model for slot in client.status().slots] == ["other"])
    assert not set(before) & set(pids(client.submit("Sharded", 1).result(180)))
