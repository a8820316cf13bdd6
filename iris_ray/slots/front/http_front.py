"""The HTTP server, in a thread and an event loop of its own."""

import asyncio
import errno
import json
import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import Future
from contextlib import aclosing, suppress
from typing import Any, Final, Self
from urllib.parse import urlsplit

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware
from aiohttp.web import Request, StreamResponse, middleware

from iris_ray.errors import InvalidSlotError, NotPermittedError
from iris_ray.model.checks import is_loopback, is_plain_int, is_seconds_or_forever, require
from iris_ray.slots.client.slot_client import SlotClient
from iris_ray.slots.front.openai_words import BodyTooLargeError, Question, error_answer, question, text_of

MOST_BODY = 64 * 2**20
"""The limit of a request's bytes."""
CHARSETS: Final = frozenset({"utf-8", "utf8", "us-ascii"})
"""The charsets of requests. Others may take long to decode, which would stop the server."""
CLOSE_S = 5.0
"""How long running requests may take to end when the server closes."""
_NOTHING: Final = object()

logger = logging.getLogger(__name__)
Endpoint = Callable[[web.Request], Awaitable[web.StreamResponse]]


class HttpFront:
    """Serves the models of a client at ``/v1/completions``, ``/v1/chat/completions`` and ``/v1/models``.

    A model gets the request's JSON object and answers with text, whole or in pieces. A caller who goes away cancels its
    request. The server checks no API keys: every program that reaches the port can use the models. It refuses web
    pages.

    Args:
        client: the client of the models.
        host: the address at which it listens. Other machines reach it only at an address of this machine's own.
        port: 0 for any free port.
        timeout_s: seconds for which a request may wait before it begins.

    Raises:
        InvalidSlotError: there is no such port or timeout.

    Example:
        >>> with HttpFront(client) as front:
        ...     openai.OpenAI(base_url=f"{front.url}/v1", api_key="none")
    """

    def __init__(
        self, client: SlotClient, *, host: str = "127.0.0.1", port: int = 0, timeout_s: float | None = 300.0
    ) -> None:
        is_port = is_plain_int(port, 0) and port <= 65535
        require(is_port, "HttpFront: port", port, "an int from 0 to 65535", InvalidSlotError)
        is_wait = timeout_s is None or is_seconds_or_forever(timeout_s)
        require(is_wait, "HttpFront: timeout_s", timeout_s, "seconds, 0 or more, or None", InvalidSlotError)
        self._client = client
        self._at = host, port
        self._timeout_s = timeout_s
        self._loop: asyncio.AbstractEventLoop  # set by the thread
        self._stopped = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="http front", daemon=True)
        self._started: Future[int] = Future()

    @property
    def url(self) -> str:
        """The URL at which it listens."""
        if not self._is_started:
            raise InvalidSlotError("HttpFront is not started; call start(), or use it with `with`")
        host = f"[{self._at[0]}]" if ":" in self._at[0] else self._at[0]
        return f"http://{host}:{self._started.result()}"

    def start(self) -> Self:
        """Listen.

        Raises:
            OSError: the port is in use, or the address is not this machine's.
        """
        self._thread.start()
        self._started.result()
        return self

    def close(self) -> None:
        """Stop listening. Requests that have not ended after `CLOSE_S` are cancelled."""
        if not self._is_started:
            return
        with suppress(RuntimeError):  # its loop is closed already
            self._loop.call_soon_threadsafe(self._stopped.set)
        self._thread.join()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def _is_started(self) -> bool:
        return self._thread.ident is not None

    def _run(self) -> None:
        self._loop = asyncio.new_event_loop()
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            self._loop.close()

    async def _serve(self) -> None:
        app = web.Application(client_max_size=MOST_BODY, middlewares=[_errors_said, refusing_pages(self._at[0])])
        app.router.add_post("/v1/completions", self._answers(chat=False))
        app.router.add_post("/v1/chat/completions", self._answers(chat=True))
        app.router.add_get("/v1/models", self._models)
        runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=CLOSE_S)
        await runner.setup()
        try:
            await web.TCPSite(runner, *self._at).start()
        except OSError as error:
            number = error.errno or errno.EADDRNOTAVAIL  # asyncio keeps it back since Python 3.13
            why = f"HttpFront can't listen at {self._at[0]}, port {self._at[1]}: {os.strerror(number)}"
            why = f"{why}; give an address of this machine and a free port"
            self._started.set_exception(error if isinstance(error, socket.gaierror) else OSError(number, why))
        except Exception as error:  # a host that is no name at all
            self._started.set_exception(error)
        else:
            self._started.set_result(runner.addresses[0][1])
            await self._stopped.wait()
        finally:
            await runner.cleanup()

    async def _models(self, request: web.Request) -> web.Response:
        status = await asyncio.to_thread(self._client.status)
        listed = [{"id": row.model, "object": "model", "created": 0, "owned_by": "iris_ray"} for row in status.models]
        return web.json_response({"object": "list", "data": listed})

    def _answers(self, chat: bool) -> Endpoint:
        async def handle(request: web.Request) -> web.StreamResponse:
            body, request_id = await _json(request), uuid.uuid4().hex
            asked = question(body, chat=chat, request_id=request_id, created=int(time.time()))
            return await (self._stream(request, asked) if asked.streams else self._whole(asked))

        return handle

    async def _whole(self, asked: Question) -> web.Response:
        answer = await self._client.generate(
            asked.model, asked.body, request_id=asked.request_id, timeout_s=self._timeout_s
        )
        return web.json_response(asked.answer(text_of(answer)))

    async def _stream(self, request: web.Request, asked: Question) -> web.StreamResponse:
        """Send pieces as they come. An error before the first piece gets an HTTP status of its own."""
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        asking = self._client.astream(asked.model, asked.body, request_id=asked.request_id, timeout_s=self._timeout_s)
        async with aclosing(asking) as pieces:  # a caller who goes away cancels the request
            first = await anext(pieces, _NOTHING)
            try:
                await response.prepare(request)
                async for event in _events(asked, first, pieces):
                    await response.write(f"data: {event}\n\n".encode())
            except ConnectionError:
                logger.info("the caller of request %s has gone", asked.request_id)
        return response


@web.middleware
async def _errors_said(request: web.Request, handler: Endpoint) -> web.StreamResponse:
    try:
        return await handler(request)
    except web.HTTPException:
        raise  # no such path
    except Exception as error:
        status, headers, body = error_answer(error)
        return web.json_response(body, status=status, headers=headers)


async def _json(request: web.Request) -> Any:
    try:
        if (request.charset or "utf-8").lower() not in CHARSETS:
            raise LookupError
        return json.loads(await request.read())
    except web.HTTPRequestEntityTooLarge:
        raise BodyTooLargeError(f"the request's body has more than {MOST_BODY:,} bytes") from None
    except (ValueError, LookupError, RecursionError, web.RequestPayloadError):
        # no JSON, no such charset, nested too deeply, compressed otherwise than it says
        raise InvalidSlotError("the request's body is no JSON object, or can't be read") from None


async def _events(asked: Question, first: Any, pieces: AsyncIterator[Any]) -> AsyncIterator[str]:
    """Yield the server-sent events of an answer: its pieces, and the end or an error."""
    try:
        if first is not _NOTHING:
            yield json.dumps(asked.piece(str(first)))
        async for piece in pieces:
            yield json.dumps(asked.piece(str(piece)))
    except Exception as error:
        yield json.dumps(error_answer(error)[2])
    else:
        yield json.dumps(asked.last())
        yield "[DONE]"


def refusing_pages(listens_at: str) -> Middleware:
    """Return a middleware that raises `NotPermittedError` for requests of web pages.

    A front asks for no key, so any page in a browser could use the models.
    """

    @middleware
    async def guarded(request: Request, handler: Handler) -> StreamResponse:
        if origin := request.headers.get("Origin"):  # browsers send it with each POST, other clients don't
            raise NotPermittedError(
                f"a web page of {origin[:100]!r} sent this request; HttpFront answers programs only. Have the page's"
                " own server ask, or leave out the header Origin"
            )
        host = request.headers.get("Host")
        if host and is_loopback(listens_at) and not is_loopback(_name(host)):
            raise NotPermittedError(  # a page's own name may be made to lead here
                f"the header Host says {host[:100]!r}, and HttpFront listens for its own machine only. Ask it at"
                " http://localhost, or have it listen at another address: HttpFront(..., host=ADDRESS)"
            )
        return await handler(request)

    return guarded


def _name(host: str) -> str | None:
    try:
        return urlsplit(f"//{host}").hostname
    except ValueError:
        return None
