"""An HTTP server with limits: callers that send too much, too slowly or too often keep no other caller out.

aiohttp brings some limits, which are set here. It has none for the number of connections and the time of a body.
"""

import asyncio
import logging
import resource
from collections import Counter
from collections.abc import Callable
from typing import Any, Final

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.typedefs import Handler
from aiohttp.web_protocol import RequestHandler

from iris_ray.fair_limits import BACKLOG, Places

HEADERS_S: Final = 20.0
"""How long a connection may take to send the headers of a request, and be idle before it."""
BODY_S: Final = 30.0
"""How long a request's body may take to arrive."""
LINGER_S: Final = 1.0
"""How long the server reads the rest of a refused request, so that its sender sees the answer."""
MOST_LINGERING: Final = 64
"""The limit for refused connections that are read at the same time."""
LARGE_ANSWER: Final = 2**16
"""The size of an answer in bytes up to which the kernel takes it at once."""
LEAST_RATE: Final = 2**16
"""How many bytes a second the reader of a larger answer has to read."""
MOST_CONNECTIONS: Final = 1024
"""The limit for connections; half of the descriptors that this process may have, if that is less."""
LARGEST_SHARE: Final = 0.75
"""The part of the connections that others do not use which may be at work for one owner."""
MOST_BODIES: Final = 256 * 2**20
"""The limit of bytes of all bodies together, until their requests are answered."""
SMALL_BODY: Final = 2**16
"""Bodies of up to this number of bytes are accepted even if there is no room for bodies."""
logger = logging.getLogger(__name__)
logger.addFilter(lambda record: not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError)))
"""Gets aiohttp's lines, without those about broken HTTP: callers could fill the log with them."""

FULL: Final = b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


def _in_words(status: int, words: str) -> web.Response:
    """Return an answer in plain text."""
    return web.Response(status=status, text=words)


def _address_of(transport: asyncio.BaseTransport | None) -> str:
    peer = None if transport is None else transport.get_extra_info("peername")
    return str(peer[0]) if peer else ""


def _by_address(request: web.Request) -> str:
    """Return the address of a request's sender."""
    return request.remote or ""


def _take_off(counts: Counter[str], owner: str, count: int) -> None:
    """Subtract from an owner's number, and forget an owner that has nothing any more."""
    counts[owner] -= count
    if not counts[owner]:
        del counts[owner]


async def send(response: web.StreamResponse, data: bytes, timeout_s: float) -> None:
    """Send a part of an answer. Raise ConnectionError if its reader is gone, or takes longer than ``timeout_s``."""
    try:
        async with asyncio.timeout(timeout_s) as scope:
            await response.write(data)
    except TimeoutError:
        raise (ConnectionError("the reader is too slow") if scope.expired() else TimeoutError) from None


class LimitedServer:
    """Serves an application of aiohttp.

    It reads a request's body before the request reaches its handler, after the application's own middlewares. A
    compressed body is refused with 415, one that is too large with 413, and one that takes too long with 408. When all
    connections are taken, a new one takes the place of one that waits for its next request: of the address that has
    most of them, the one that has waited longest. It gets a 503 if each is at work. A request gets one if its owner's
    others hold so many connections that few are left for those of other owners.

    Args:
        app: the application; its ``client_max_size`` is the limit of a body. It gets a further middleware.
        shutdown_s: how long requests may go on when it closes.
        cancels: whether a caller that disconnects cancels its request.
        owner: returns whose request it is. The requests and bodies of one owner leave room for those of others.
        refusal: makes the answer to a request that no middleware sees, such as broken headers, from a status and words.
    """

    def __init__(
        self,
        app: web.Application,
        *,
        shutdown_s: float,
        cancels: bool = False,
        owner: Callable[[web.Request], str] = _by_address,
        refusal: Callable[[int, str], web.Response] = _in_words,
    ) -> None:
        app.middlewares.append(self._limited)
        self._most = min(MOST_CONNECTIONS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)
        self._open: set[RequestHandler] = set()
        self._timers: dict[RequestHandler, asyncio.TimerHandle] = {}
        """Of connections that wait for a request, or whose callers still read a large answer."""
        self._idle: Places[RequestHandler] = Places()
        """Connections that wait for a request, by address."""
        self._owner = owner
        self._at_work: Counter[str] = Counter()
        """Requests that are being answered, by their owners."""
        self._bodies: Counter[str] = Counter()
        """Bytes of bodies that have come, by the owners of their requests."""
        self._refused: set[asyncio.BaseTransport] = set()
        self._refusal = refusal
        self._runner = web.AppRunner(app, shutdown_timeout=shutdown_s, handler_cancellation=cancels)
        self._listening: asyncio.Server | None = None

    async def start(self, host: str, port: int) -> int:
        """Listen; return the port.

        Raises:
            OSError: it can't listen there.
        """
        await self._runner.setup()
        loop = asyncio.get_running_loop()
        self._listening = await loop.create_server(self._connected, host, port, reuse_address=True, backlog=BACKLOG)
        found: int = self._listening.sockets[0].getsockname()[1]
        return found

    def stop_listening(self) -> None:
        """Stop accepting connections. Running requests go on."""
        if self._listening is not None:
            self._listening.close()

    async def close(self) -> None:
        """Stop listening, wait for requests for at most ``shutdown_s``, and close all connections."""
        self.stop_listening()
        for timer in self._timers.values():
            timer.cancel()
        await self._runner.cleanup()
        for refused in self._refused:
            refused.close()

    # -- connections ------------------------------------------------------------------------------

    def _connected(self) -> asyncio.Protocol:
        server = self._runner.server
        assert server is not None, "it has been set up"
        if len(self._open) >= self._most and not self._idle:
            return _Refusal(self._refused)
        return _Connection(server, self._refusal, self._came, self._left)

    def _came(self, connection: RequestHandler) -> None:
        """Take a new connection. If there are too many now, close one that waits for its next request."""
        self._open.add(connection)
        self._wait_for(connection, HEADERS_S)
        if len(self._open) > self._most and (found := self._idle.take_one()) is not None:
            self._close(found)

    def _left(self, connection: RequestHandler) -> None:
        self._open.discard(connection)
        self._wait_no_more(connection)

    def _wait_for(self, connection: RequestHandler, timeout_s: float) -> None:
        """Close a connection if its request does not arrive in time, or if its place is needed."""
        self._wait_no_more(connection)
        if connection not in self._open:
            return
        self._timers[connection] = asyncio.get_running_loop().call_later(timeout_s, self._close, connection)
        self._idle.add(connection, _address_of(connection.transport))

    def _wait_no_more(self, connection: RequestHandler) -> None:
        self._idle.remove(connection)
        if timer := self._timers.pop(connection, None):
            timer.cancel()

    def _wait_for_reader(self, connection: RequestHandler, answer: web.StreamResponse) -> None:
        """Close a connection if its caller reads the answer too slowly. Until then its place is not given away."""
        size = answer.content_length or 0
        self._wait_for(connection, HEADERS_S + size / LEAST_RATE)
        if size > LARGE_ANSWER:
            self._idle.remove(connection)

    def _close(self, connection: RequestHandler) -> None:
        self._left(connection)
        if connection.transport is not None:
            connection.transport.abort()  # a caller that reads nothing would keep it open

    # -- bodies -----------------------------------------------------------------------------------

    @web.middleware
    async def _limited(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        self._wait_for(request.protocol, BODY_S + LINGER_S)
        owner = self._owner(request)
        size = await self._read(request, owner)
        self._wait_no_more(request.protocol)
        answer = web.StreamResponse()
        try:
            answer = await self._answer(request, owner, handler)
        finally:
            self._count(owner, -size)
            if request.transport is not None:
                self._wait_for_reader(request.protocol, answer)
        return answer

    async def _answer(self, request: web.Request, owner: str, handler: Handler) -> web.StreamResponse:
        """Answer a request, unless its owner has taken its share of the connections: three quarters if it is alone."""
        if self._at_work[owner] >= LARGEST_SHARE * (self._most - self._at_work.total() + self._at_work[owner]):
            why = f"{self._at_work[owner]} of your requests are being answered, which is your share; wait for some"
            raise web.HTTPServiceUnavailable(text=why, headers={"Retry-After": "1"})
        self._at_work[owner] += 1
        try:
            return await handler(request)
        finally:
            _take_off(self._at_work, owner, 1)

    async def _read(self, request: web.Request, owner: str) -> int:
        """Read the body of a request, count its bytes as they come, and return their number."""
        if request.headers.get("Content-Encoding", "identity").lower() != "identity":
            raise web.HTTPUnsupportedMediaType(text="compressed bodies are not accepted; send the body uncompressed")
        expected = request.content_length if request.can_read_body else 0
        most = request.client_max_size
        too_large = f"the request's body has more than {most:,} bytes, which is the limit"
        if expected is not None and expected > most:
            raise web.HTTPRequestEntityTooLarge(most, expected, text=too_large)
        body = bytearray()
        self._require_room(owner, body, expected or 0)
        try:
            async with asyncio.timeout(BODY_S):
                while part := await request.content.readany():
                    body += part
                    self._count(owner, len(part))
                    if len(body) > most:
                        raise web.HTTPRequestEntityTooLarge(most, len(body), text=too_large)
                    self._require_room(owner, body)
        except BaseException as error:
            self._count(owner, -len(body))
            if isinstance(error, TimeoutError):
                why = f"the request's body did not arrive within {BODY_S:g} s"
                raise web.HTTPRequestTimeout(text=why, headers={"Connection": "close"}) from None
            if isinstance(error, web.RequestPayloadError | HttpProcessingError | ConnectionError | RuntimeError):
                # the latter two: the connection is closed, which aiohttp would log as an error of the server
                why = "the request's body can't be read; send it again"
                raise web.HTTPBadRequest(text=why, headers={"Connection": "close"}) from None
            raise
        request._read_bytes = bytes(body)  # what `Request.read` returns from now on
        return len(body)

    def _count(self, owner: str, size: int) -> None:
        _take_off(self._bodies, owner, -size)

    def _require_room(self, owner: str, body: bytearray, more: int = 0) -> None:
        """Refuse a body, of which ``more`` bytes are to come, if its owner would hold more bytes than are free.

        So one owner can hold half of all bytes, two can hold a third each, and some are always free for others.
        """
        held, all_held = self._bodies[owner] + more, self._bodies.total() + more
        if len(body) + more > SMALL_BODY and held > MOST_BODIES - all_held:
            why = "the server holds as many bytes of requests as it may; come back in a second"
            raise web.HTTPServiceUnavailable(text=why, headers={"Retry-After": "1"})


class _Connection(RequestHandler):
    """A connection that answers requests which no middleware sees in the style of the application.

    Args:
        server: that of the application.
        refusal: see `LimitedServer`.
        made, lost: are called with it when its caller is there, and when it is closed.
    """

    __slots__ = ("_lost", "_made", "_refusal")

    def __init__(
        self,
        server: web.Server,
        refusal: Callable[[int, str], web.Response],
        made: Callable[[RequestHandler], object],
        lost: Callable[[RequestHandler], object],
    ) -> None:
        super().__init__(
            server,
            loop=asyncio.get_running_loop(),
            keepalive_timeout=HEADERS_S,
            lingering_time=LINGER_S,
            auto_decompress=False,
            access_log=None,  # type: ignore[arg-type]  # aiohttp means none
            logger=logger,
        )
        self._refusal = refusal
        self._made, self._lost = made, lost

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._made(self)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._lost(self)
        super().connection_lost(exc)

    def handle_error(self, *args: Any, **how: Any) -> web.StreamResponse:
        """Return the answer to headers that are not HTTP, or to an error of the server."""
        answer = super().handle_error(*args, **how)
        assert isinstance(answer, web.Response)
        refused = self._refusal(answer.status, (answer.text or answer.reason).partition("\n")[0].strip(" :"))
        refused.force_close()
        return refused

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Send an answer. An exception is one that no middleware has seen, such as that of a header Expect."""
        if isinstance(resp, web.HTTPException):
            resp = self._refusal(resp.status, resp.text or resp.reason)
        return await super().finish_response(request, resp, start_time)


class _Refusal(asyncio.Protocol):
    """A connection for which there is no room.

    The server reads it for a moment: a caller that still sends would see a broken connection in place of the answer.

    Args:
        lingering: the connections that are refused at the moment.
    """

    def __init__(self, lingering: set[asyncio.BaseTransport]) -> None:
        self._lingering = lingering

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.write(FULL)
        if len(self._lingering) >= MOST_LINGERING:
            transport.close()
            return
        self._lingering.add(transport)
        transport.write_eof()
        asyncio.get_running_loop().call_later(LINGER_S, self._close, transport)

    def _close(self, transport: asyncio.BaseTransport) -> None:
        self._lingering.discard(transport)
        transport.close()
