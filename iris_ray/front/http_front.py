"""The server, in a thread and an event loop of its own."""

import asyncio
import json
import threading
import time
import uuid
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, Self

from aiohttp import web

from iris_ray.client.slot_client import SlotClient
from iris_ray.errors import InvalidSlotError
from iris_ray.front.openai_words import Question, error_answer, question, text_of

MOST_BODY = 64 * 2**20
"""Bytes of a request."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class HttpFront:
    """Serves the models of a client at ``/v1/completions``, ``/v1/chat/completions`` and ``/v1/models``.

    A model gets the request's JSON object and answers with text, whole or in pieces. A caller who goes away cancels its
    request. There are no keys: whoever reaches the port can use the models.

    Args:
        client: whose models.
        host: where to listen. Other machines reach it only if this is one of this machine's own addresses.
        port: 0 for any that is free.
        timeout_s: how long a request may wait before it begins.

    Example:
        >>> with HttpFront(client) as front:
        ...     openai.OpenAI(base_url=f"{front.url}/v1", api_key="none")
    """

    def __init__(
        self, client: SlotClient, *, host: str = "127.0.0.1", port: int = 0, timeout_s: float | None = 300.0
    ) -> None:
        self._client = client
        self._at = host, port
        self._timeout_s = timeout_s
        self._loop = asyncio.new_event_loop()
        self._stopped = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="http front", daemon=True)
        self._started: Future[int] = Future()

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://{self._at[0]}:{self._started.result()}"

    def start(self) -> Self:
        """Listen.

        Raises:
            OSError: the port is in use, or the address is not this machine's.
        """
        self._thread.start()
        self._started.result()
        return self

    def close(self) -> None:
        """Listen no more."""
        self._loop.call_soon_threadsafe(self._stopped.set)
        self._thread.join()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *error: object) -> None:
        self.close()

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            self._loop.close()

    async def _serve(self) -> None:
        app = web.Application(client_max_size=MOST_BODY)
        app.router.add_post("/v1/completions", self._answers(chat=False))
        app.router.add_post("/v1/chat/completions", self._answers(chat=True))
        app.router.add_get("/v1/models", self._models)
        runner = web.AppRunner(app, handler_cancellation=True, access_log=None)
        await runner.setup()
        try:
            await web.TCPSite(runner, *self._at).start()
            self._started.set_result(runner.addresses[0][1])
            await self._stopped.wait()
        except OSError as error:
            self._started.set_exception(error)
        finally:
            await runner.cleanup()

    async def _models(self, request: web.Request) -> web.Response:
        status = await asyncio.to_thread(self._client.status)
        listed = [{"id": row.model, "object": "model", "created": 0, "owned_by": "iris_ray"} for row in status.models]
        return web.json_response({"object": "list", "data": listed})

    def _answers(self, chat: bool) -> Handler:
        async def handle(request: web.Request) -> web.StreamResponse:
            request_id = uuid.uuid4().hex
            try:
                asked = question(await _json(request), chat=chat, request_id=request_id, created=int(time.time()))
                return await (self._stream(request, asked) if asked.streams else self._whole(asked))
            except asyncio.CancelledError:
                self._loop.run_in_executor(None, self._cancel, request_id)
                raise
            except ConnectionError:
                await asyncio.to_thread(self._cancel, request_id)
                raise
            except Exception as error:
                status, headers, body = error_answer(error)
                return web.json_response(body, status=status, headers=headers)

        return handle

    async def _whole(self, asked: Question) -> web.Response:
        answer = await self._client.generate(
            asked.model, asked.body, request_id=asked.request_id, timeout_s=self._timeout_s
        )
        return web.json_response(asked.answer(text_of(answer)))

    async def _stream(self, request: web.Request, asked: Question) -> web.StreamResponse:
        """Send pieces as they come. What goes wrong before the first one has a status of its own."""
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        pieces = self._client.astream(asked.model, asked.body, request_id=asked.request_id, timeout_s=self._timeout_s)
        try:
            async for piece in pieces:
                if not response.prepared:
                    await response.prepare(request)
                await _send(response, asked.piece(str(piece)))
        except Exception as error:
            if isinstance(error, ConnectionError) or not response.prepared:
                raise
            await _send(response, error_answer(error)[2])
            return response
        if not response.prepared:
            await response.prepare(request)
        await _send(response, asked.last())
        await response.write(b"data: [DONE]\n\n")
        return response

    def _cancel(self, request_id: str) -> None:
        with suppress(Exception):  # the client may be closed by now
            self._client.cancel(request_id)


async def _json(request: web.Request) -> Any:
    try:
        return await request.json()
    except ValueError:
        raise InvalidSlotError("the request's body is no JSON object") from None


async def _send(response: web.StreamResponse, event: dict[str, Any]) -> None:
    await response.write(f"data: {json.dumps(event)}\n\n".encode())
