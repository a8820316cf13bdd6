"""The requests, answers and errors of OpenAI's API: https://platform.openai.com/docs/api-reference."""

import base64
import json
from array import array
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

from aiohttp import web
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
from iris_ray.model.checks import shown
from iris_ray.slots.client.json_body import JsonBody, payload_of, several_prompts
from iris_ray.slots.client.served_command import ProgramAnswer
from iris_ray.slots.front.request_parser import ParsedBody

Json = dict[str, Any]

STATUS: tuple[tuple[type[Exception], int, int | None], ...] = (
    (UnknownNameError, 404, None),
    (NotPermittedError, 403, None),
    (InvalidRequestError, 400, None),
    (SlotQueueFullError, 429, 1),
    (RequestLostError, 503, 1),
    (ModelUnavailableError, 503, 10),
    (RayActorError, 503, 10),
    (RequestExpiredError, 504, None),
)
"""Errors, their HTTP status, and the seconds after which to try again."""


class Route(Enum):
    """The kinds of requests: the path, the field that a request must have, and the field's types."""

    COMPLETION = "/v1/completions", "prompt", (str, list)
    CHAT = "/v1/chat/completions", "messages", (list,)
    EMBEDDING = "/v1/embeddings", "input", (str, list)

    def __init__(self, path: str, field: str, types: tuple[type, ...]) -> None:
        self.path = path
        self.field = field
        self.types = types


@dataclass(frozen=True, slots=True)
class ModelQuestion:
    """A request for an answer.

    Attributes:
        created: seconds since 1970.
        body: the request; of a large one what `ParsedBody` has.
        payload: the request as the model gets it.
        inputs: how many texts it has, and so vectors or answers it asks for; None: one, which is in no list.
        said_model: the name of the model that the caller gave, which may be an alias.
    """

    request_id: str
    created: int
    route: Route
    body: Json
    payload: Json | JsonBody
    inputs: int | None
    said_model: str

    @property
    def model(self) -> str:
        """The model's name."""
        return str(self.body["model"])

    @property
    def streams(self) -> bool:
        """Whether the answer is wanted in pieces."""
        return self.body.get("stream") is True and self.route is not Route.EMBEDDING

    def answer(self, given: Any) -> Json:
        """Return a whole answer.

        Args:
            given: the value that the model returned, or the list of the values that it yielded.

        Raises:
            TypeError: it can't answer such a request.
            InvalidSlotError: it would be one answer to several prompts.
        """
        if self.route is Route.EMBEDDING:
            return self._embeddings(given)
        self.require_one_prompt()
        metadata = AnswerMetadata()
        text = "".join(filter(None, map(metadata.text_of, given if isinstance(given, list) else [given])))
        is_chat = self.route is Route.CHAT
        content = {"message": {"role": "assistant", "content": text, "refusal": None}} if is_chat else {"text": text}
        frame = self._frame("chat.completion" if is_chat else "text_completion", content, metadata.finish_reason)
        return {**frame, "usage": metadata.usage}

    def require_one_prompt(self) -> None:
        """Refuse several prompts if no program answers: what a model returns is the answer to one.

        Raises:
            InvalidSlotError: there are several.
        """
        if self.route is Route.COMPLETION and self.inputs is not None and self.inputs > 1:
            raise several_prompts(self.inputs)

    async def events(self, first: Any, pieces: AsyncIterator[Any]) -> AsyncGenerator[bytes, None]:
        """Yield the server-sent events of an answer: its pieces, and the end or an error. Raise nothing.

        Args:
            first: the first piece, `NOTHING` if there is none.
            pieces: the others.
        """
        try:
            if isinstance(first, ProgramAnswer):  # a program has made them already
                yield first.body
                async for piece in pieces:
                    yield piece.body
                return
            async for found in self._events(first, pieces):
                yield event(found)
            yield b"data: [DONE]\n\n"
        except Exception as error:
            yield event(error_answer(error)[2])

    async def _events(self, first: Any, pieces: AsyncIterator[Any]) -> AsyncGenerator[Json, None]:
        metadata = AnswerMetadata()
        wants_usage = (self.body.get("stream_options") or {}).get("include_usage") is True
        missing = {"usage": None} if wants_usage else {}
        is_first = True
        piece = first
        while piece is not NOTHING:
            if (text := metadata.text_of(piece)) is not None:
                yield {**self._piece(text, is_first), **missing}
                is_first = False
            piece = await anext(pieces, NOTHING)
        last: Json = {"delta": {}} if self.route is Route.CHAT else {"text": ""}
        yield {**self._frame(self._piece_kind, last, metadata.finish_reason), **missing}
        if wants_usage:
            yield {**self._frame(self._piece_kind, {}, None), "choices": [], "usage": metadata.usage}

    def _embeddings(self, given: Any) -> Json:
        metadata = AnswerMetadata()
        vectors = [each for each in _listed(given) if not metadata.notes(each)]
        if self.inputs is None and vectors and not isinstance(_listed(vectors[0]), list):
            vectors = [vectors]  # the model gave the vector alone
        count = 1 if self.inputs is None else self.inputs
        if len(vectors) != count:
            raise TypeError(f"{len(vectors)} vectors for {count} inputs; a model of embeddings returns one for each")
        numbers = [[float(number) for number in _listed(vector)] for vector in vectors]
        as_text = self.body.get("encoding_format") == "base64"
        data = [
            {"object": "embedding", "index": index, "embedding": _base64(each) if as_text else each}
            for index, each in enumerate(numbers)
        ]
        return {"object": "list", "data": data, "model": self.said_model, "usage": metadata.usage}

    def _piece(self, text: str, is_first: bool) -> Json:
        role = {"role": "assistant"} if is_first else {}
        content = {"delta": {**role, "content": text}} if self.route is Route.CHAT else {"text": text}
        return self._frame(self._piece_kind, content, None)

    @property
    def _piece_kind(self) -> str:
        return "chat.completion.chunk" if self.route is Route.CHAT else "text_completion"

    def _frame(self, kind: str, content: Mapping[str, Any], finish: str | None) -> Json:
        choice = {"index": 0, **content, "finish_reason": finish, "logprobs": None}
        prefix = "chatcmpl" if self.route is Route.CHAT else "cmpl"
        return {
            "id": f"{prefix}-{self.request_id}",
            "object": kind,
            "created": self.created,
            "model": self.said_model,
            "choices": [choice],
        }


@dataclass(slots=True)
class AnswerMetadata:
    """The ``usage`` and ``finish_reason`` of an answer, which models give in pieces that are mappings.

    Attributes:
        usage: OpenAI's counts of tokens; None if the model does not count.
    """

    usage: Json | None = None
    finish_reason: str = "stop"

    def notes(self, piece: Any) -> bool:
        """Note a piece with ``usage`` or ``finish_reason`` only. Return whether it is such a piece."""
        if not isinstance(piece, Mapping) or not piece.keys() <= {"usage", "finish_reason"}:
            return False
        self.finish_reason = piece.get("finish_reason") or self.finish_reason
        if counts := piece.get("usage"):
            total = counts.get("prompt_tokens", 0) + counts.get("completion_tokens", 0)
            self.usage = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": total, **counts}
        return True

    def text_of(self, piece: Any) -> str | None:
        """Return the text of a piece; None if it has only ``usage`` or ``finish_reason``."""
        return None if self.notes(piece) else str(piece)


NOTHING: Final = object()
"""The first piece of an answer without pieces."""


def question(
    parsed: ParsedBody, route: Route, *, request_id: str, created: int, aliases: Mapping[str, str] | None = None
) -> ModelQuestion:
    """Check the body of a request.

    Args:
        parsed: the body.
        aliases: further names of models, and the models.

    Raises:
        InvalidSlotError: a field is missing or wrong; the message names it.
    """
    body = parsed.value
    if not isinstance(body, dict):
        raise InvalidSlotError("the request's body is not a JSON object; send one, with the fields of OpenAI's API")
    name = body.get("model")
    if not isinstance(name, str):
        raise InvalidSlotError(f"'model' is {shown(name)}; give the model's name as a string")
    given = body.get(route.field)
    if not isinstance(given, route.types):
        wanted = " or ".join("a list" if each is list else "a string" for each in route.types)
        problem = "is missing" if given is None else f"is {shown(given)}"
        raise InvalidSlotError(f"'{route.field}' {problem}; give {wanted}")
    if given == []:
        raise InvalidSlotError(f"'{route.field}' is an empty list; give at least one")
    if not isinstance(body.get("stream", False), bool | None):
        raise InvalidSlotError(f"'stream' is {shown(body['stream'])}; give true or false")
    if not isinstance(body.get("stream_options"), dict | None):
        raise InvalidSlotError(f"'stream_options' is {shown(body['stream_options'])}; give an object")
    if body.get("n", 1) not in (1, None):
        raise InvalidSlotError("each request gets one answer; leave 'n' out")
    if route is Route.EMBEDDING and body.get("encoding_format", "float") not in ("float", "base64", None):
        raise InvalidSlotError('\'encoding_format\' is neither "float" nor "base64"; give one of these')
    model = (aliases or {}).get(name, name)
    body = {**body, "model": model}
    payload = payload_of(body) if parsed.data is None else JsonBody(parsed.data, model)
    asked: Any = given
    is_one = isinstance(asked, str) or (bool(asked) and isinstance(asked[0], int))
    inputs = None if is_one else parsed.counts.get(route.field, len(asked))
    return ModelQuestion(request_id, created, route, body, payload, inputs, name)


def model_words(name: str, created: int) -> Json:
    """Return the entry of a model in the list of models."""
    return {"id": name, "object": "model", "created": created, "owned_by": "iris_ray"}


def event(value: Json) -> bytes:
    """Return a server-sent event."""
    return f"data: {json.dumps(value)}\n\n".encode()


# -- errors ------------------------------------------------------------------------------------------------------------

KINDS: Final = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
CODES: Final = {401: "invalid_api_key", 429: "rate_limit_exceeded"}


def error_answer(error: Exception) -> tuple[int, dict[str, str], Json]:
    """Return status, headers and body of the answer for an error."""
    if isinstance(error, web.HTTPException):
        kept = ("Retry-After", "Allow", "WWW-Authenticate", "Connection")
        headers = {name: error.headers[name] for name in kept if name in error.headers}
        return error.status, headers, error_words(error.status, error.text or error.reason)
    found = (each for each in STATUS if isinstance(error, each[0]))
    _, status, retry = next(found, (None, 500, None))
    words = _said_by(error) if status != 500 else f"the model raised {type(error).__name__}: {_said_by(error)}"
    if isinstance(error, RayActorError):
        words = f"the process that served the models is gone: {error}"
    code = "model_not_found" if isinstance(error, UnknownNameError) else None
    return status, {} if retry is None else {"Retry-After": str(retry)}, error_words(status, words, code)


def _said_by(error: Exception) -> str:
    """Return the message of an error, which may be a model's own and fail to give one."""
    try:
        return str(error)
    except Exception:
        return "it has no readable message"


def error_words(status: int, words: str, code: str | None = None) -> Json:
    """Return the body of an answer with this status."""
    kind = KINDS.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return {"error": {"message": words, "type": kind, "param": None, "code": code or CODES.get(status)}}


# -- vectors -----------------------------------------------------------------------------------------------------------


def _listed(value: Any) -> Any:
    """Return a list of what a model returned: a list, tuple, or array of NumPy or PyTorch. Else the value itself."""
    if isinstance(value, (list, tuple)):
        return list(value)
    return value.tolist() if hasattr(value, "tolist") else value


def _base64(numbers: Iterable[float]) -> str:
    """Return 32-bit floats as OpenAI's clients ask for them."""
    found = array("f", numbers)
    return base64.b64encode(found.tobytes()).decode()
