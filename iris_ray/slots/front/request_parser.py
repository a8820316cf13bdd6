"""Parses requests without holding up other callers."""

import asyncio
import json
import subprocess
import sys
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

from aiohttp import web

from iris_ray.errors import InvalidSlotError, ModelUnavailableError
from iris_ray.fair_limits import Turns
from iris_ray.slots.front import json_outline

MOST_VALUES: Final = 2**17
"""The limit of a request's values in JSON, estimated by its commas and opening brackets."""
FEW_BYTES: Final = 2**16
FEW_VALUES: Final = 2**13
"""A request with no more bytes and values is parsed in a millisecond."""
FIELDS: Final = (
    "model", "prompt", "messages", "input", "stream", "stream_options", "include_usage", "n", "encoding_format",
)  # fmt: skip
"""The fields of a request that the server reads."""
PARSED_S: Final = 30.0
"""How long a request may take to be parsed."""
CHARSETS: Final = frozenset({"utf-8", "utf8", "us-ascii"})
"""The charsets of requests. Others may take long to decode, which would stop the server."""


@dataclass(frozen=True, slots=True)
class ParsedBody:
    """The JSON of a request.

    Attributes:
        value: its value. Of a large request only the `FIELDS`, with one value of each list and the beginning of each
            text.
        data: the bytes of a large request, for the model; None: ``value`` is complete.
        counts: the lengths of the lists in a large request, by field.
    """

    value: Any
    data: bytes | None = None
    counts: Mapping[str, int] = field(default_factory=dict)


class Parser:
    """Parses the JSON of requests: small ones at once, large ones one by one in another process.

    Owners of large requests take turns: however many one owner has, a request of another owner waits for one of them.
    """

    def __init__(self) -> None:
        self._elsewhere = OutsideParser()
        self._thread = ThreadPoolExecutor(1, "large requests")
        self._turns = Turns()

    def close(self) -> None:
        """Kill the parsing process, even while it works."""
        self._elsewhere.kill()
        self._thread.shutdown(cancel_futures=True)
        self._elsewhere.close()

    async def parse(self, request: web.Request, owner: str) -> ParsedBody:
        """Return the value of a request's body.

        Raises:
            InvalidSlotError: it is not JSON, or has too many values.
            ModelUnavailableError: the process that parses is gone.
        """
        data = await self._data(request)
        if len(data) <= FEW_BYTES and json_outline.values(data) <= FEW_VALUES:
            try:
                return ParsedBody(json.loads(data))
            except (ValueError, RecursionError):
                raise _no_json() from None
        async with self._turns.turn(owner):
            said = await asyncio.get_running_loop().run_in_executor(self._thread, self._elsewhere.ask, data)
        match said.get("error"):
            case None:
                return ParsedBody(said["outline"], data, said["counts"])
            case "values":
                raise InvalidSlotError(f"the request's body has more than {MOST_VALUES:,} values; send fewer, or text")
        raise _no_json()

    async def _data(self, request: web.Request) -> bytes:
        if (request.charset or "utf-8").lower() not in CHARSETS:
            raise InvalidSlotError("the request's body is not a JSON object in UTF-8; send it as application/json")
        return await request.read()


class OutsideParser:
    """The process that parses large requests. It starts with the first of them, and again after its end."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, data: bytes) -> Any:
        """Return what `json_outline.described` says of JSON.

        Raises:
            ModelUnavailableError: the process has ended, or takes too long.
        """
        if self._process is None:
            words = [sys.executable, "-I", json_outline.__file__, str(MOST_VALUES), *FIELDS]
            self._process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        timer = threading.Timer(PARSED_S, process.kill)
        timer.start()
        try:
            json_outline.write(process.stdin, data)
            return json.loads(json_outline.read(process.stdout))
        except (OSError, EOFError):
            self.close()
            raise ModelUnavailableError(
                "the process that parses large requests has ended or took too long; send the request again"
            ) from None
        finally:
            timer.cancel()

    def kill(self) -> None:
        """Kill the process. The request that it parses gets an error."""
        if (process := self._process) is not None:
            process.kill()

    def close(self) -> None:
        """End the process."""
        if (process := self._process) is None:
            return
        self._process = None
        process.kill()
        with suppress(OSError), process:  # closes the pipes, and waits
            pass


def _no_json() -> InvalidSlotError:
    return InvalidSlotError("the request's body is not a JSON object, or is nested too deeply")
