"""The shapes of OpenAI's requests and answers."""

import pytest
from ray.exceptions import RayActorError

from iris_ray.errors import (
    InvalidSlotError,
    ModelUnavailableError,
    RequestExpiredError,
    RequestLostError,
    SlotQueueFullError,
    UnknownNameError,
)
from iris_ray.slots.front.openai_words import BodyTooLargeError, error_answer, question, text_of


@pytest.mark.parametrize(
    ("chat", "body", "why"),
    [
        (False, [], "no JSON object"),
        (False, {"prompt": "a"}, "'model'"),
        (False, {"model": "m"}, "'prompt' is missing"),
        (True, {"model": "m", "messages": "hi"}, "'messages' is missing"),
        (False, {"model": "m", "prompt": "a", "n": 2}, "only one answer"),
    ],
)
def test_senseless_request_is_refused_in_words(chat: bool, body: object, why: str) -> None:
    with pytest.raises(InvalidSlotError, match=why):
        question(body, chat=chat, request_id="r", created=1)


@pytest.mark.parametrize(
    ("error", "status", "retry"),
    [
        (UnknownNameError("x"), 404, None),
        (InvalidSlotError("x"), 400, None),
        (SlotQueueFullError("x"), 429, "1"),
        (RequestLostError("x"), 503, "1"),
        (ModelUnavailableError("x"), 503, "10"),
        (BodyTooLargeError("x"), 413, None),
        (RayActorError(error_msg="x"), 503, "10"),
        (RequestExpiredError("x"), 504, None),
        (KeyError("x"), 500, None),
    ],
)
def test_errors_have_status_and_retry_time(error: Exception, status: int, retry: str | None) -> None:
    found, headers, body = error_answer(error)
    assert (found, headers.get("Retry-After")) == (status, retry)
    assert "x" in body["error"]["message"]


def test_text_pieces_are_joined() -> None:
    assert text_of(["a", "b"]) == text_of("ab") == "ab"
    assert text_of(3) == "3"
