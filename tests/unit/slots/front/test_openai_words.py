"""The shapes of OpenAI's requests and answers."""

import asyncio
import json
import pickle
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
from aiohttp import web
from ray.exceptions import RayActorError

from iris_ray.errors import (
    InvalidSlotError,
    ModelUnavailableError,
    RequestExpiredError,
    RequestLostError,
    SlotQueueFullError,
    UnknownNameError,
)
from iris_ray.slots.client.json_body import payload_of
from iris_ray.slots.front.openai_words import NOTHING, ModelQuestion, Route, error_answer, question
from iris_ray.slots.front.request_parser import ParsedBody

COUNTS = {"prompt_tokens": 2, "completion_tokens": 3}
USAGE = {**COUNTS, "total_tokens": 5}


def asked(route: Route, **body: Any) -> ModelQuestion:
    parsed = ParsedBody({"model": "m", route.field: "a", **body})
    return question(parsed, route, request_id="r", created=1)


@pytest.mark.parametrize(
    ("route", "body", "why"),
    [
        (Route.COMPLETION, [], "not a JSON object"),
        (Route.COMPLETION, {"prompt": "a"}, "'model' is None"),
        (Route.COMPLETION, {"model": "m"}, "'prompt' is missing; give a string or a list"),
        (Route.CHAT, {"model": "m", "messages": "hi"}, "'messages' is 'hi'; give a list"),
        (Route.COMPLETION, {"model": "m", "prompt": "a", "n": 2}, "one answer"),
        (Route.COMPLETION, {"model": "m", "prompt": "a", "stream": "yes"}, "'stream' is 'yes'"),
        (Route.COMPLETION, {"model": "m", "prompt": "a", "stream_options": 1}, "'stream_options' is 1"),
        (Route.EMBEDDING, {"model": "m", "input": "a", "encoding_format": "hex"}, "'encoding_format'"),
    ],
)
def test_senseless_request_is_refused_in_words(route: Route, body: object, why: str) -> None:
    with pytest.raises(InvalidSlotError, match=why):
        question(ParsedBody(body), route, request_id="r", created=1)


@pytest.mark.parametrize(
    ("error", "status", "retry"),
    [
        (UnknownNameError("x"), 404, None),
        (InvalidSlotError("x"), 400, None),
        (SlotQueueFullError("x"), 429, "1"),
        (RequestLostError("x"), 503, "1"),
        (ModelUnavailableError("x"), 503, "10"),
        (web.HTTPServiceUnavailable(text="x", headers={"Retry-After": "7"}), 503, "7"),
        (RayActorError(error_msg="x"), 503, "10"),
        (RequestExpiredError("x"), 504, None),
        (KeyError("x"), 500, None),
    ],
)
def test_errors_have_status_and_retry_time(error: Exception, status: int, retry: str | None) -> None:
    found, headers, body = error_answer(error)
    assert (found, headers.get("Retry-After")) == (status, retry)
    assert "x" in body["error"]["message"]


@pytest.mark.parametrize(
    ("given", "text", "usage", "finish"),
    [
        ("ab", "ab", None, "stop"),
        (["a", "b"], "ab", None, "stop"),
        (3, "3", None, "stop"),
        (["a", {"usage": COUNTS, "finish_reason": "length"}], "a", USAGE, "length"),
        ([], "", None, "stop"),
    ],
)
def test_answer_has_text_usage_and_finish(given: Any, text: str, usage: Any, finish: str) -> None:
    answer = asked(Route.COMPLETION).answer(given)
    assert (answer["choices"][0]["text"], answer["usage"]) == (text, usage)
    assert answer["choices"][0]["finish_reason"] == finish
    chat = asked(Route.CHAT, messages=[{}]).answer(given)
    assert chat["choices"][0]["message"]["content"] == text


def events_of(asked: ModelQuestion, pieces: list[Any]) -> list[Any]:
    async def rest() -> AsyncIterator[Any]:
        for piece in pieces[1:]:
            if isinstance(piece, Exception):
                raise piece
            yield piece

    async def collect() -> list[bytes]:
        return [each async for each in asked.events(pieces[0] if pieces else NOTHING, rest())]

    sent = [each.decode().removeprefix("data: ").strip() for each in asyncio.run(collect())]
    return [each if each == "[DONE]" else json.loads(each) for each in sent]


def test_stream_ends_with_usage_if_asked_for() -> None:
    pieces = ["a", "b", {"usage": COUNTS}]
    plain = events_of(asked(Route.CHAT, messages=[{}], stream=True), pieces)
    assert [each["choices"][0]["delta"] for each in plain[:-1]] == [
        {"role": "assistant", "content": "a"},
        {"content": "b"},
        {},
    ]
    assert all("usage" not in each for each in plain[:-1])
    counted = events_of(asked(Route.COMPLETION, stream_options={"include_usage": True}), pieces)
    assert [each["usage"] for each in counted[:-1]] == [None, None, None, USAGE]
    assert counted[-2]["choices"] == []
    assert counted[-1] == "[DONE]"


def test_stream_that_fails_ends_with_the_error() -> None:
    *_, last = events_of(asked(Route.COMPLETION), ["a", ValueError("broken")])
    assert last["error"]["message"] == "the model raised ValueError: broken"


@pytest.mark.parametrize(
    ("input", "given", "vectors"),
    [
        ("a", [0.5, 2.0], [[0.5, 2.0]]),
        ("a", [[0.5, 2.0]], [[0.5, 2.0]]),
        ([1, 2, 3], [0.5], [[0.5]]),
        (["a", "b"], [[1], [2]], [[1.0], [2.0]]),
        (["a", "b"], np.ones((2, 1)), [[1.0], [1.0]]),
        (["a", "b"], [np.ones(1), np.ones(1), {"usage": COUNTS}], [[1.0], [1.0]]),
    ],
    ids=str,
)
def test_vectors_are_numbered_for_their_inputs(input: Any, given: Any, vectors: Any) -> None:
    answer = asked(Route.EMBEDDING, input=input).answer(given)
    assert [each["embedding"] for each in answer["data"]] == vectors
    assert [each["index"] for each in answer["data"]] == list(range(len(vectors)))


def test_wrong_number_of_vectors_is_models_mistake() -> None:
    with pytest.raises(TypeError, match="1 vectors for 2 inputs"):
        asked(Route.EMBEDDING, input=["a", "b"]).answer([[1.0]])


def test_programs_get_several_prompts_as_they_are() -> None:
    body = {"model": "m", "prompt": ["a", "b"]}
    payload = pickle.loads(pickle.dumps(payload_of(body)))
    assert json.loads(json.dumps(payload)) == body
    assert payload.get("stream") is None
    with pytest.raises(InvalidSlotError, match="has 2 texts"):
        payload["prompt"]
    for one in ("a", [1, 2], []):
        assert payload_of({"prompt": one})["prompt"] == one


class Mute(Exception):
    def __str__(self) -> str:
        raise ValueError


def test_error_without_readable_message_is_an_error() -> None:
    assert error_answer(Mute())[2]["error"]["message"] == "the model raised Mute: it has no readable message"
