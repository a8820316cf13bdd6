"""The HTTP server, in a thread and an event loop of its own."""

import asyncio
import errno
import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import aclosing, asynccontextmanager, suppress
from typing import Any, Final, Self
from urllib.parse import urlsplit

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from iris_ray.errors import InvalidSlotError, ModelUnavailableError, NotPermittedError
from iris_ray.http_server import LimitedServer, send
from iris_ray.model.checks import Holds, Seconds, Whole, is_loopback, is_name, is_variables, require, unknown
from iris_ray.slots.client.served_command import ProgramAnswer
from iris_ray.slots.client.slot_client import SlotClient
from iris_ray.slots.front.api_keys import ApiKey, ApiKeys, may_use
from iris_ray.slots.front.front_metrics import FrontMetrics
from iris_ray.slots.front.openai_words import (
    NOTHING,
    ModelQuestion,
    Route,
    error_answer,
    error_words,
    event,
    model_words,
    question,
)
from iris_ray.slots.front.request_parser import Parser

MOST_BODY = 4 * 2**20
"""The limit of a request's bytes."""
CLOSE_S = 2.0
"""How long running requests may take to end when the server closes."""
MOST_PARTS = 64
"""The limit for the parts of a stream that are sent together, and so for those that wait for a slow reader."""
SLOW_READER_S = 60.0
"""How long a caller may take to read a piece before its request is cancelled."""
LISTED_S: Final = 1.0
"""How long a list of the models is used again."""
ANSWER_S = 10.0
"""How long the SlotManager may take to list its models."""
OPEN_PATHS: Final = frozenset({"/health", "/ready"})
"""The paths that need no key."""
OWNER: Final = web.RequestKey("owner", str)
"""The key with which a request was sent."""

logger = logging.getLogger(__name__)


class HttpFront:
    """Serves the models of a client as OpenAI's API: completions, chat, embeddings and the list of models.

    A model gets the request's JSON object and answers with text, whole or in pieces; a model of embeddings with
    vectors. A caller that disconnects cancels its request. Requests with the header ``Origin`` are refused: browsers
    send it with each POST of a web page. If it listens at a loopback address, requests whose header ``Host`` names
    anything but ``localhost`` or a loopback address are refused as well.

    Args:
        client: the client of the models.
        host: the address at which it listens. Other machines can't reach it at a loopback address, such as the default.
        port: 0 for any free port.
        timeout_s: seconds for which a request may wait before it begins; None: for as long as it takes.
        keys: the callers' keys, and their limits. Without keys it listens on loopback only, and every program on this
            machine can use all models.
        aliases: further names of models, and the models.

    Raises:
        InvalidSlotError: an argument makes no sense, or it would listen for other machines without keys.

    Example:
        >>> with HttpFront(client) as front:
        ...     openai.OpenAI(base_url=f"{front.url}/v1", api_key="none")
    """

    def __init__(
        self,
        client: SlotClient,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        timeout_s: float | None = 300.0,
        keys: Sequence[ApiKey] = (),
        aliases: Mapping[str, str] | None = None,
    ) -> None:
        check_front(host, port, timeout_s, keys, aliases)
        self._client = client
        self._at = host, port
        self._timeout_s = timeout_s
        self._keys = ApiKeys()
        self._aliases: Mapping[str, str] = {}
        self.set_access(keys, aliases)
        self._models = ListedModels(client)
        self._parser = Parser()
        self._metrics = FrontMetrics()
        self._running = RunningRequests()
        self._loop: asyncio.AbstractEventLoop  # set by the thread
        self._thread = threading.Thread(target=self._run, name="http front", daemon=True)
        self._started: Future[int] = Future()

    def set_access(self, keys: Sequence[ApiKey], aliases: Mapping[str, str] | None = None) -> None:
        """Replace the keys and the aliases. Requests that run go on.

        Raises:
            InvalidSlotError: they make no sense, or other machines could use the models without a key.
        """
        check_access(self._at[0], keys, aliases)
        self._keys.set(keys)
        self._aliases = dict(aliases or {})

    @property
    def url(self) -> str:
        """The URL at which it listens. Raises InvalidSlotError before `start`."""
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

    def close(self, grace_s: float = CLOSE_S) -> None:
        """Stop listening. Requests that have not ended after ``grace_s`` get a 503, or their streams an error."""
        if not self._is_started:
            return
        with suppress(RuntimeError):  # its loop is closed already
            self._loop.call_soon_threadsafe(self._running.close, grace_s)
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

    def _server(self) -> LimitedServer:
        app = web.Application(
            client_max_size=MOST_BODY, middlewares=[_errors_said, refusing_pages(self._at[0]), self._for_keys]
        )
        for route in Route:
            app.router.add_post(route.path, self._answers(route))
        app.router.add_get("/v1/models", self._list)
        app.router.add_get("/v1/models/{model:.+}", self._retrieve)
        app.router.add_get("/health", self._health)
        app.router.add_get("/ready", self._ready)
        app.router.add_get("/metrics", self._measured)
        return LimitedServer(app, shutdown_s=1.0, cancels=True, owner=_owner, refusal=_refusal)

    async def _serve(self) -> None:
        server = self._server()
        try:
            port = await server.start(*self._at)
        except OSError as error:
            number = error.errno or errno.EADDRNOTAVAIL  # asyncio keeps it back since Python 3.13
            why = f"HttpFront can't listen at {self._at[0]}, port {self._at[1]}: {os.strerror(number)}"
            why = f"{why}; give an address of this machine and a free port"
            self._started.set_exception(error if isinstance(error, socket.gaierror) else OSError(number, why))
        except Exception as error:  # the host is not a name
            self._started.set_exception(error)
        else:
            self._started.set_result(port)
            grace_s = await self._running.closed()
            server.stop_listening()
            await self._running.end(grace_s)
        finally:
            await server.close()
            self._parser.close()

    # -- routes -----------------------------------------------------------------------------------

    @web.middleware
    async def _for_keys(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path in OPEN_PATHS or (use := self._keys.use_of(request)) is None:
            return await handler(request)
        request[OWNER] = f"key {use.key.name}"
        with use.request(self._keys.now):
            return await handler(request)

    async def _health(self, request: web.Request) -> web.Response:
        return web.json_response({"alive": True})

    async def _ready(self, request: web.Request) -> web.Response:
        await self._models.names()
        return web.json_response({"ready": True})

    async def _measured(self, request: web.Request) -> web.Response:
        if (use := self._keys.use_of(request)) and use.key.models is not None:
            raise NotPermittedError("/metrics names all models and keys; ask with a key that may use all models")
        await self._models.names()
        return web.Response(body=self._metrics.page(self._models.rows), content_type="text/plain")

    async def _list(self, request: web.Request) -> web.Response:
        listed = [model_words(name, self._models.began) for name in await self._names(request)]
        return web.json_response({"object": "list", "data": listed})

    async def _retrieve(self, request: web.Request) -> web.Response:
        name, names = request.match_info["model"], await self._names(request)
        if name not in names:
            raise unknown("model", name, names)
        return web.json_response(model_words(name, self._models.began))

    async def _names(self, request: web.Request) -> list[str]:
        """Return the models and aliases that the key of a request may use."""
        use = self._keys.use_of(request)
        served = await self._models.names()
        names = [*served, *(alias for alias, model in self._aliases.items() if model in served)]
        return [name for name in dict.fromkeys(names) if may_use(use, self._aliases.get(name, name))]

    def _answers(self, route: Route) -> Handler:
        async def handle(request: web.Request) -> web.StreamResponse:
            use = self._keys.use_of(request)
            with self._metrics.request(route.path, use.key.name if use else "") as measured:
                asked = await read(request)
                measured.model = asked.model
                if not may_use(use, asked.model):
                    why = f"this key may not use the model {asked.said_model!r}; /v1/models lists those that it may use"
                    raise NotPermittedError(why)
                response = await (self._stream(request, asked) if asked.streams else self._whole(asked))
                measured.status = response.status
                return response

        async def read(request: web.Request) -> ModelQuestion:
            async with self._running.request():
                body = await self._parser.parse(request, _owner(request))
            return question(body, route, request_id=uuid.uuid4().hex, created=int(time.time()), aliases=self._aliases)

        return handle

    async def _whole(self, asked: ModelQuestion) -> web.Response:
        async with self._running.request():
            answer = await self._client.generate(
                asked.model, asked.payload, request_id=asked.request_id, timeout_s=self._timeout_s
            )
        if isinstance(answer, ProgramAnswer):
            headers = _headers(answer)
            return web.Response(
                body=answer.body, status=answer.status, content_type=answer.content_type, headers=headers
            )
        return web.json_response(asked.answer(answer))

    async def _stream(self, request: web.Request, asked: ModelQuestion) -> web.StreamResponse:
        """Send pieces as they come. An error before the first piece gets an HTTP status of its own."""
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        asking = self._client.astream(
            asked.model, asked.payload, request_id=asked.request_id, timeout_s=self._timeout_s
        )
        try:
            async with aclosing(asking) as pieces, self._running.request():  # a caller that disconnects cancels it
                first = await anext(pieces, NOTHING)
                if isinstance(first, ProgramAnswer):
                    response.set_status(first.status)
                    response.content_type = first.content_type
                    response.headers.update(_headers(first))
                else:
                    asked.require_one_prompt()
                try:
                    await response.prepare(request)
                    async with aclosing(together(asked.events(first, pieces))) as parts:
                        async for data in parts:
                            await send(response, data, SLOW_READER_S)
                except ConnectionError:
                    logger.info("the caller of request %s has gone, or does not read", asked.request_id)
                    if request.transport is not None:
                        request.transport.abort()  # else it would wait for the caller to read
        except ClosingError as error:
            if not response.prepared:
                raise
            with suppress(ConnectionError):
                await send(response, event(error_answer(error)[2]), 1.0)
        return response


def check_front(
    host: str, port: int, timeout_s: float | None, keys: Sequence[ApiKey], aliases: Mapping[str, str] | None
) -> None:
    """Refuse arguments of `HttpFront` that make no sense. Raises InvalidSlotError."""
    require("HttpFront: host", host, Holds(is_name, "an address, such as '127.0.0.1'"), InvalidSlotError)
    require("HttpFront: port", port, Whole(0, 65535, exactly=True), InvalidSlotError)
    require("HttpFront: timeout_s", timeout_s, Seconds(endless=True, or_none=True), InvalidSlotError)
    check_access(host, keys, aliases)


def check_access(host: str, keys: Sequence[ApiKey], aliases: Mapping[str, str] | None) -> None:
    """Refuse keys and aliases that make no sense, and none for other machines. Raises InvalidSlotError."""
    require("HttpFront: aliases", aliases or {}, Holds(is_variables, "names by name"), InvalidSlotError)
    if not keys and not is_loopback(host):
        raise InvalidSlotError(
            f"HttpFront would let everybody who reaches {host} use the models; give keys=[ApiKey(NAME,"
            " SECRET)], or leave out host"
        )
    ApiKeys(keys)


class ListedModels:
    """The models of a client, which is asked at most once in `LISTED_S`. Requests in that time share the answer.

    Attributes:
        rows: the status of each model.
    """

    def __init__(self, client: SlotClient) -> None:
        self._client = client
        self._asked: asyncio.Task[Any] | None = None
        self._at = float("-inf")
        self.rows: list[Any] = []
        self.began = int(time.time())

    async def names(self) -> list[str]:
        """Return the names.

        Raises:
            ModelUnavailableError: the SlotManager does not answer.
        """
        if self._asked is None or (self._asked.done() and time.monotonic() > self._at + LISTED_S):
            self._asked = asyncio.create_task(asyncio.to_thread(self._client.status))
            self._at = time.monotonic()
        try:
            async with asyncio.timeout(ANSWER_S):
                status = await asyncio.shield(self._asked)
        except TimeoutError:
            raise ModelUnavailableError(f"the SlotManager has not answered for {ANSWER_S:g} s; try again") from None
        except Exception:
            self._asked = None
            raise
        self.rows = list(status.models)
        return [row.model for row in self.rows]


# -- the end -----------------------------------------------------------------------------------------------------------


class ClosingError(ModelUnavailableError):
    """The server closes."""


class RunningRequests:
    """The requests that run, and their end when the server closes."""

    def __init__(self) -> None:
        self._scopes: set[asyncio.Timeout] = set()
        self._grace_s: float | None = None
        self._closed = asyncio.Event()
        self._none = asyncio.Event()

    def close(self, grace_s: float) -> None:
        """Refuse new requests, and let running ones go on for ``grace_s`` seconds."""
        self._grace_s = grace_s
        self._closed.set()

    async def closed(self) -> float:
        """Wait for `close`; return how long requests may go on."""
        await self._closed.wait()
        assert self._grace_s is not None
        return self._grace_s

    @asynccontextmanager
    async def request(self) -> AsyncIterator[None]:
        """Note a request while it runs.

        Raises:
            ClosingError: the server closes.
        """
        why = "this server is closing; send the request again"
        if self._closed.is_set():
            raise ClosingError(why)
        scope = asyncio.timeout(None)
        try:
            async with scope:
                self._scopes.add(scope)
                yield
        except TimeoutError:
            if scope.expired():
                raise ClosingError(why) from None
            raise
        finally:
            self._scopes.discard(scope)
            if not self._scopes:
                self._none.set()

    async def end(self, grace_s: float) -> None:
        """Wait until all requests have ended. After ``grace_s`` seconds, end them."""
        end_at = asyncio.get_running_loop().time() + grace_s
        for scope in self._scopes:
            scope.reschedule(end_at)
        self._none.clear()
        if self._scopes:
            await self._none.wait()


# -- requests ----------------------------------------------------------------------------------------------------------


async def together(parts: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    """Yield the parts of an answer. Parts that come without a wait are joined, up to `MOST_PARTS`."""
    waiting: asyncio.Queue[bytes | None] = asyncio.Queue(MOST_PARTS)

    async def fetch() -> None:
        async with aclosing(parts):
            async for part in parts:
                await waiting.put(part)
        await waiting.put(None)

    fetching = asyncio.create_task(fetch())
    try:
        found: list[bytes | None] = []
        while None not in found:
            found = [await waiting.get()]
            while not waiting.empty():
                found.append(waiting.get_nowait())
            if data := b"".join(filter(None, found)):
                yield data
    finally:
        fetching.cancel()
        await asyncio.wait([fetching])


def _owner(request: web.Request) -> str:
    """Return whose request it is: the key's, or without keys the sender's address."""
    return str(request.get(OWNER) or request.remote)


def _headers(answer: ProgramAnswer) -> dict[str, str]:
    return {} if answer.location is None else {"Location": answer.location}


def _refusal(status: int, words: str) -> web.Response:
    return web.json_response(error_words(status, words), status=status)


@web.middleware
async def _errors_said(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except Exception as error:
        status, headers, body = error_answer(error)
        if isinstance(error, web.HTTPException) and request.match_info.http_exception is not None:
            there_are = ", ".join(sorted(f"POST {route.path}" for route in Route))
            why = f"{request.method} {request.path[:100]} is not served here; there are {there_are}, GET /v1/models"
            body = error_words(status, why)
        return web.json_response(body, status=status, headers=headers)


def refusing_pages(listens_at: str) -> Middleware:
    """Return a middleware that raises `NotPermittedError` for requests of web pages.

    Without keys, any page in a browser could use the models.
    """

    @web.middleware
    async def guarded(request: web.Request, handler: Handler) -> web.StreamResponse:
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
