"""The HTTP front on real slots, asked by OpenAI's own client."""

import asyncio
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from iris_ray import SlotClient, SlotHosts
from iris_ray.slots.core.policy import ServingPolicy
from iris_ray.slots.front import HttpFront
from iris_ray.testing import SimulatedCluster

pytestmark = pytest.mark.proof
MB = 2**20


class Shout:
    """Repeats what it is told, in capitals, word by word."""

    async def __call__(self, request: dict[str, Any]):
        text = request["prompt"] if "prompt" in request else request["messages"][-1]["content"]
        if text == "raise":
            raise ValueError("not that word")
        for word in text.split():
            await asyncio.sleep(30.0 if word == "wait" else 0.01)
            yield word.upper() + " "


@pytest.fixture(scope="module")
def slots(cluster: SimulatedCluster) -> Iterator[SlotClient]:
    with SlotClient([SlotHosts(memory=500 * MB)], policy=ServingPolicy(most_waiting=2)) as client:
        client.register(Shout, "shout", memory={1: 400 * MB}, concurrency=2)
        client.register(Shout, "huge", memory={1: 10**15})
        yield client


@pytest.fixture(scope="module")
def front(slots: SlotClient) -> Iterator[HttpFront]:
    with HttpFront(slots) as front:
        yield front


@pytest.fixture
def user(front: HttpFront) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{front.url}/v1", api_key="none", max_retries=0) as user:
        yield user


def test_completions_and_chats_answer_whole_and_in_pieces(user: openai.OpenAI) -> None:
    whole = user.completions.create(model="shout", prompt="hello world")
    assert whole.choices[0].text == "HELLO WORLD "
    assert whole.choices[0].finish_reason == "stop"
    pieces = list(user.completions.create(model="shout", prompt="a b c", stream=True))
    assert [piece.choices[0].text for piece in pieces] == ["A ", "B ", "C ", ""]
    chat = user.chat.completions.create(model="shout", messages=[{"role": "user", "content": "hi there"}])
    assert chat.choices[0].message.content == "HI THERE "
    stream = user.chat.completions.create(model="shout", messages=[{"role": "user", "content": "one two"}], stream=True)
    assert "".join(piece.choices[0].delta.content or "" for piece in stream) == "ONE TWO "
    assert sorted(model.id for model in user.models.list()) == ["huge", "shout"]


def test_failures_have_status_and_words(user: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="there is no model 'whisper'"):
        user.completions.create(model="whisper", prompt="a")
    with pytest.raises(openai.BadRequestError, match="fits on no runner"):
        user.completions.create(model="huge", prompt="a")
    with pytest.raises(openai.BadRequestError, match="'prompt' is missing"):
        user.completions.create(model="shout", prompt=None)
    with pytest.raises(openai.InternalServerError, match="ValueError: not that word"):
        user.completions.create(model="shout", prompt="raise")
    with pytest.raises(openai.InternalServerError, match="not that word"):
        list(user.completions.create(model="shout", prompt="raise", stream=True))


def test_taken_port_is_an_error(front: HttpFront, slots: SlotClient) -> None:
    with pytest.raises(OSError, match="in use"):
        HttpFront(slots, port=int(front.url.rsplit(":", 1)[1])).start()
