"""The requests, answers and errors of OpenAI's completions and chat: https://platform.openai.com/docs/api-reference."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ray.exceptions import RayActorError

from iris_ray.errors import (
    InvalidRequestError,
    InvalidSlotError,
    ModelUnavailableError,
    NotPermittedError,
    RequestExpiredError,
    RequestLostError,
    SlotQueueFullError,
    UnknownNameError,
)

Json = dict[str, Any]


class BodyTooLargeError(InvalidSlotError):
    """A request has too many bytes."""


STATUS: tuple[tuple[type[Exception], int, int | None], ...] = (
    (UnknownNameError, 404, None),
    (NotPermittedError, 403, None),
    (BodyTooLargeError, 413, None),
    (InvalidRequestError, 400, None),
    (SlotQueueFullError, 429, 1),
    (RequestLostError, 503, 1),
    (ModelUnavailableError, 503, 10),
    (RayActorError, 503, 10),
    (RequestExpiredError, 504, None),
)
"""Errors, their HTTP status, and the seconds after which to try again."""


@dataclass(frozen=True, slots=True)
class Question:
    """A request for an answer.

    Attributes:
        created: seconds since 1970.
        chat: whether it is a chat, else a completion.
        body: the request as it came, which the model gets.
    """

    request_id: str
    created: int
    chat: bool
    body: Json

    @property
    def model(self) -> str:
        """The model's name."""
        return str(self.body["model"])

    @property
    def streams(self) -> bool:
        """Whether the answer is wanted in pieces."""
        return self.body.get("stream") is True

    def answer(self, text: str) -> Json:
        """Return a whole answer."""
        content = {"message": {"role": "assistant", "content": text}} if self.chat else {"text": text}
        return self._frame("chat.completion" if self.chat else "text_completion", content, "stop")

    def piece(self, text: str) -> Json:
        """Return a piece of an answer."""
        content = {"delta": {"role": "assistant", "content": text}} if self.chat else {"text": text}
        return self._frame(self._piece_kind, content, None)

    def last(self) -> Json:
        """Return the last piece, which ends the answer."""
        return self._frame(self._piece_kind, {"delta": {}} if self.chat else {"text": ""}, "stop")

    @property
    def _piece_kind(self) -> str:
        return "chat.completion.chunk" if self.chat else "text_completion"

    def _frame(self, kind: str, content: Mapping[str, Any], finish: str | None) -> Json:
        choice = {"index": 0, **content, "finish_reason": finish, "logprobs": None}
        prefix = "chatcmpl" if self.chat else "cmpl"
        return {
            "id": f"{prefix}-{self.request_id}",
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": [choice],
        }


def question(body: Any, *, chat: bool, request_id: str, created: int) -> Question:
    """Check the body of a request.

    Raises:
        InvalidSlotError: a field is missing or wrong; the message names it.
    """
    needed: tuple[str, type | tuple[type, ...]] = ("messages", list) if chat else ("prompt", (str, list))
    if not isinstance(body, dict):
        raise InvalidSlotError("the request's body is no JSON object")
    if not isinstance(body.get("model"), str):
        raise InvalidSlotError("give the model's name as a string: 'model'")
    if not isinstance(body.get(needed[0]), needed[1]):
        raise InvalidSlotError(f"{needed[0]!r} is missing, or of another type than {needed[1]}")
    if body.get("n", 1) not in (1, None):
        raise InvalidSlotError("only one answer for each request is given; leave 'n' out")
    return Question(request_id, created, chat, body)


def error_answer(error: Exception) -> tuple[int, dict[str, str], Json]:
    """Return status, headers and body of the answer for an error."""
    found = (each for each in STATUS if isinstance(error, each[0]))
    _, status, retry = next(found, (None, 500, None))
    headers = {} if retry is None else {"Retry-After": str(retry)}
    words = str(error) if status != 500 else f"the model raised {type(error).__name__}: {error}"
    if isinstance(error, RayActorError):
        words = f"the process that served the models is gone: {error}"
    return status, headers, {"error": {"message": words, "type": type(error).__name__, "param": None, "code": None}}


def text_of(answer: Any) -> str:
    """Return the text of a model's answer: a string, or pieces of one."""
    return "".join(map(str, answer)) if isinstance(answer, list) else str(answer)
