"""Each route of the HTTP server, as OpenAI's own client uses it."""

import json
from collections.abc import AsyncGenerator, Iterator
from types import SimpleNamespace
from typing import Any

import openai
import pytest

from iris_ray.errors import InvalidSlotError, RequestExpiredError, SlotQueueFullError, UnknownNameError
from iris_ray.slots.client.served_command import ProgramAnswer
from iris_ray.slots.front import ApiKey, HttpFront
from iris_ray.slots.front.openai_words import event

SECRET = "sk-" + "a" * 20
USAGE = {"prompt_tokens": 2, "completion_tokens": 3}
ERRORS = {
    "unknown": UnknownNameError("there is no model 'unknown'"),
    "senseless": InvalidSlotError("it fits nowhere"),
    "full": SlotQueueFullError("the queue is full"),
    "late": RequestExpiredError("it did not begin in time"),
    "broken": ValueError("not that word"),
}


def choice(number: int, text: str) -> dict[str, Any]:
    return {"index": number, "text": text, "finish_reason": "stop"}


class Client:
    """Models that repeat a text, or give vectors; others fail."""

    async def generate(self, model: str, body: dict[str, Any], **how: Any) -> Any:
        if model == "program":
            body = json.loads(json.dumps(body))  # which it is sent
        if model == "vectors":
            texts = [body["input"]] if isinstance(body["input"], str) else body["input"]
            return [[float(len(text)), 0.5] for text in texts] + [{"usage": USAGE}]
        if model == "program":
            choices = [choice(number, text) for number, text in enumerate(body["prompt"])]
            return ProgramAnswer(200, "application/json", json.dumps({"choices": choices}).encode())
        return [piece async for piece in self.astream(model, body, **how)]

    async def astream(self, model: str, body: dict[str, Any], **how: Any) -> AsyncGenerator[Any, None]:
        if model in ERRORS:
            raise ERRORS[model]
        if model == "program":
            for number, text in enumerate(json.loads(json.dumps(body))["prompt"]):
                yield ProgramAnswer(200, "text/event-stream", event({"choices": [choice(number, text)]}))
            return
        if model == "listed":
            for each in body["prompt"] if isinstance(body, dict) else ["a"]:
                yield each
            return
        for word in (body["prompt"] if "prompt" in body else body["messages"][-1]["content"]).split():
            yield word
        yield {"usage": USAGE, "finish_reason": "length"}

    def status(self) -> Any:
        return SimpleNamespace(models=[SimpleNamespace(model=name) for name in ("words", "vectors", "org/model")])


@pytest.fixture(scope="module")
def user() -> Iterator[openai.OpenAI]:
    client: Any = Client()
    with (
        HttpFront(client, keys=[ApiKey("alice", SECRET)], aliases={"gpt": "words"}) as front,
        openai.OpenAI(base_url=f"{front.url}/v1", api_key=SECRET, max_retries=0) as user,
    ):
        yield user


@pytest.mark.parametrize("model", ["words", "gpt"])
def test_completion_is_whole_or_in_pieces(user: openai.OpenAI, model: str) -> None:
    whole = user.completions.create(model=model, prompt="a b")
    assert (whole.choices[0].text, whole.choices[0].finish_reason, whole.object) == ("ab", "length", "text_completion")
    assert whole.model == model
    assert whole.usage is not None
    assert whole.usage.total_tokens == 5
    *pieces, last = user.completions.create(model=model, prompt="a b", stream=True)
    assert [piece.choices[0].text for piece in pieces] == ["a", "b"]
    assert (last.choices[0].text, last.choices[0].finish_reason) == ("", "length")


def test_chat_is_whole_or_in_pieces(user: openai.OpenAI) -> None:
    how: Any = {"model": "words", "messages": [{"role": "user", "content": "a b"}]}
    whole = user.chat.completions.create(**how)
    assert (whole.choices[0].message.role, whole.choices[0].message.content) == ("assistant", "ab")
    assert whole.usage.total_tokens == 5
    *pieces, last, counted = user.chat.completions.create(**how, stream=True, stream_options={"include_usage": True})
    assert [piece.choices[0].delta.content for piece in pieces] == ["a", "b"]
    assert pieces[0].choices[0].delta.role == "assistant"
    assert {piece.usage for piece in (*pieces, last)} == {None}
    assert (last.choices[0].finish_reason, counted.choices, counted.usage.total_tokens) == ("length", [], 5)
    with user.chat.completions.stream(**how) as stream, pytest.raises(openai.LengthFinishReasonError):
        stream.get_final_completion()


@pytest.mark.parametrize("streams", [False, True])
def test_several_prompts_are_not_answered_as_one(user: openai.OpenAI, streams: bool) -> None:
    with pytest.raises(openai.BadRequestError, match="'prompt' has 2 texts, and this model answers one"):
        user.completions.create(model="listed", prompt=["a", "b"], stream=streams)
    with pytest.raises(openai.BadRequestError, match=f"has {10**4} texts"):
        user.completions.create(model="listed", prompt=["a"] * 10**4, stream=streams)
    tokens = user.completions.create(model="listed", prompt=[3, 4, 5])
    assert tokens.choices[0].text == "345"


def test_program_answers_several_prompts_itself(user: openai.OpenAI) -> None:
    choices = user.completions.create(model="program", prompt=["a", "b"]).choices
    assert [(choice.index, choice.text) for choice in choices] == [(0, "a"), (1, "b")]
    streamed = user.completions.create(model="program", prompt=["a", "b"], stream=True)
    assert [(piece.choices[0].index, piece.choices[0].text) for piece in streamed] == [(0, "a"), (1, "b")]


def test_empty_list_is_the_callers_mistake(user: openai.OpenAI) -> None:
    for ask in (
        lambda: user.embeddings.create(model="vectors", input=[]),
        lambda: user.completions.create(model="listed", prompt=[]),
        lambda: user.chat.completions.create(model="words", messages=[]),
    ):
        with pytest.raises(openai.BadRequestError, match="is an empty list"):
            ask()


@pytest.mark.parametrize("encoding", [{}, {"encoding_format": "float"}, {"encoding_format": "base64"}], ids=str)
def test_vectors_come_for_one_or_many_inputs(user: openai.OpenAI, encoding: Any) -> None:
    one = user.embeddings.create(model="vectors", input="abc", encoding_format="float")
    assert one.data[0].embedding == [3.0, 0.5]
    many = user.embeddings.create(model="vectors", input=["abc", "a"], **encoding)
    assert [each.index for each in many.data] == [0, 1]
    if encoding.get("encoding_format") != "base64":
        assert [each.embedding for each in many.data] == [[3.0, 0.5], [1.0, 0.5]]
    assert many.usage.total_tokens == 5


def test_models_are_listed_and_retrieved(user: openai.OpenAI) -> None:
    assert [model.id for model in user.models.list()] == ["words", "vectors", "org/model", "gpt"]
    assert user.models.retrieve("org/model").id == "org/model"
    with pytest.raises(openai.NotFoundError, match="there is no model 'word'; did you mean words"):
        user.models.retrieve("word")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("model", "error", "code"),
    [
        ("unknown", openai.NotFoundError, "model_not_found"),
        ("senseless", openai.BadRequestError, None),
        ("full", openai.RateLimitError, None),
        ("late", openai.InternalServerError, None),
        ("broken", openai.InternalServerError, None),
    ],
)
def test_failure_is_clients_own_error(user: openai.OpenAI, model: str, error: Any, code: Any, stream: bool) -> None:
    with pytest.raises(error) as raised:
        list(user.completions.create(model=model, prompt="a", stream=stream))
    assert raised.value.code == (code or ("rate_limit_exceeded" if model == "full" else None))
    assert str(ERRORS[model]) in raised.value.message


def test_wrong_key_is_clients_authentication_error(user: openai.OpenAI) -> None:
    with pytest.raises(openai.AuthenticationError, match="not known here"):
        user.with_options(api_key="sk-wrong").models.list()
