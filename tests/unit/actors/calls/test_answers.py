"""What an answer that does not come says about the actor and its host."""

import asyncio

import pytest
from ray.exceptions import ActorDiedError, OutOfMemoryError, RayError

from iris_ray.actors.calls.asking import answer
from iris_ray.actors.protocol.answers import Gone, KilledForMemory


@pytest.mark.parametrize(("error", "found"), [(ActorDiedError(), Gone), (OutOfMemoryError("killed"), KilledForMemory)])
def test_answer_of_an_actor_that_ray_killed_for_lack_of_memory_says_so(error: RayError, found: type[Gone]) -> None:
    async def call() -> None:
        raise error

    reply = asyncio.run(answer(call(), "host 1", None))
    assert type(reply) is found
    assert reply.reason.startswith("host 1")
