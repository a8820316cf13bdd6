"""The HTTP server of the dashboard.

==========================  ============================================================================
``/``                       the pages
``/api/snapshot``           all tables, and their version
``/api/changes?since=V``    server-sent events: the changes since a version, as they come
``/api/jobs``, …            one table: its rows
``/api/goodput``            how each user's jobs spent their time
``/api/history/…``          ``utilisation`` over time, and ``jobs`` of that time; ``hours``, ``type``, ``text``
``/api/history/jobs/ID``    a job in full, also one that the Controller has forgotten
``/api/jobs/ID``            a job in full: why it waits, its tasks and attempts
``/api/jobs/ID/logs``       a piece of a task's output; ``task``, ``attempt``, ``offset`` or ``tail``
``/healthz``, ``/readyz``   the server lives; the Controller answers it
==========================  ============================================================================
"""

import asyncio
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from pathlib import Path

from aiohttp import web
from aiohttp.typedefs import Handler

from iris_ray.actors.calls.controller_connection import ControllerConnection
from iris_ray.actors.protocol.services import Page, installed_services
from iris_ray.dashboard.access import COOKIE, FOR_PROGRAMS, SESSION_S, Access, add_headers
from iris_ray.dashboard.cluster_view import TABLES, ClusterView
from iris_ray.dashboard.follower import Channel, Follower, OpenPage, encode
from iris_ray.dashboard.job_pages import JobPages
from iris_ray.errors import InvalidRequestError, IrisError, UnknownNameError
from iris_ray.fair_limits import Places
from iris_ray.http_server import LimitedServer, send

STATIC = Path(__file__).parent / "static"
KEEP_ALIVE_S = 10.0
SLOW_READER_S = 30.0
"""How long a page may take to read a message. Then its connection is closed."""
MOST_BODY = 2**16
"""Bytes. Only the form of the login has one."""
MOST_PAGES = 200
"""Streams of changes, of all readers together. One more takes the place of the oldest of the reader that has most."""
MOST_OF_A_VERSION = 50
"""Characters. The channel's versions have about twelve."""
JOB = "{job:[^/]+}"
"""Any id. By default, aiohttp would not match ids with braces."""
LOGIN = (STATIC / "login.html").read_text()


def application(connect: Callable[[], ControllerConnection], address: str, token: str | None = None) -> web.Application:
    """Return the server of a cluster's dashboard.

    Args:
        connect: returns a connection to the Controller; blocks; raises `IrisError` if there is none.
        address: the cluster's address, for people.
        token: the token that readers need; None: they need none.
    """
    view = ClusterView()
    channel = Channel(view)
    follower = Follower(connect, view, channel, address)
    access = Access(token)
    routes = _Routes(view, channel, JobPages(connect), access)
    app = web.Application(client_max_size=MOST_BODY, middlewares=[access.guard, errors_as_json])
    app.on_response_prepare.append(add_headers)
    app.cleanup_ctx.append(lambda _: _running(follower))
    app.add_routes(
        [
            web.get("/", routes.page),
            web.get("/login", routes.login_page),
            web.post("/login", routes.login),
            web.get("/healthz", routes.health),
            web.get("/readyz", routes.ready),
            web.get("/api/snapshot", routes.snapshot),
            web.get("/api/changes", routes.changes),
            *(
                web.get(page.path, routes.of_service(page))
                for service in installed_services()
                for page in service.pages
            ),
            web.get(f"/api/jobs/{JOB}", routes.job),
            web.get(f"/api/{{table:{'|'.join(TABLES)}}}", routes.table),
            web.static("/static", STATIC),
        ]
    )
    return app


async def _running(follower: Follower) -> AsyncIterator[None]:
    following = asyncio.create_task(follower.run())
    yield
    following.cancel()
    with suppress(asyncio.CancelledError):
        await following


@web.middleware
async def errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer with the messages of our errors, and to programs also with those of aiohttp."""
    try:
        return await handler(request)
    except (web.HTTPClientError, web.HTTPServerError) as error:  # such as an unknown address, or too many requests
        if not request.path.startswith(FOR_PROGRAMS):
            raise
        return web.json_response({"error": error.text or error.reason}, status=error.status, headers=_kept(error))
    except UnknownNameError as error:
        return web.json_response({"error": str(error)}, status=404)
    except InvalidRequestError as error:
        return web.json_response({"error": str(error)}, status=400)
    except IrisError as error:
        return web.json_response({"error": str(error)}, status=503)


def _kept(error: web.HTTPException) -> dict[str, str]:
    """Return the headers of an error that do not describe its text."""
    return {name: value for name, value in error.headers.items() if not name.lower().startswith("content-")}


class _Routes:
    def __init__(self, view: ClusterView, channel: Channel, jobs: JobPages, access: Access) -> None:
        self._view = view
        self._channel = channel
        self._jobs = jobs
        self._access = access
        self._open_pages: Places[OpenPage] = Places(MOST_PAGES)

    async def page(self, _: web.Request) -> web.StreamResponse:
        return web.FileResponse(STATIC / "index.html", headers={"Cache-Control": "no-cache"})

    async def login_page(self, _: web.Request) -> web.StreamResponse:
        return web.Response(text=LOGIN, content_type="text/html")

    async def login(self, request: web.Request) -> web.StreamResponse:
        try:
            given = (await request.post()).get("token")
        except (ValueError, LookupError) as error:  # not text of its charset, or no such charset
            raise InvalidRequestError(f"the form can't be read ({error}); send it from the page /login") from None
        cookie = self._access.login(given)
        if cookie is None:
            return web.Response(status=403, text=LOGIN.replace("hidden", ""), content_type="text/html")
        response = web.Response(status=303, headers={"Location": "/"})
        # Lax: sent with links of other sites as well, which lead to a page; `Access` refuses their other requests
        response.set_cookie(COOKIE, cookie, max_age=int(SESSION_S), httponly=True, samesite="Lax")
        return response

    async def health(self, _: web.Request) -> web.StreamResponse:
        return web.json_response({"alive": True})

    async def ready(self, _: web.Request) -> web.StreamResponse:
        now = self._view.tables["cluster"].rows.get("now", {"trouble": "it has just begun"})
        return web.json_response({"trouble": now["trouble"]}, status=503 if now["trouble"] else 200)

    async def table(self, request: web.Request) -> web.StreamResponse:
        rows = self._view.tables[request.match_info["table"]].rows
        return web.Response(body=encode(rows), content_type="application/json")

    async def snapshot(self, _: web.Request) -> web.StreamResponse:
        headers = {"Content-Encoding": "gzip", "Cache-Control": "no-store"}
        return web.Response(body=self._channel.snapshot(), content_type="application/json", headers=headers)

    async def changes(self, request: web.Request) -> web.StreamResponse:
        version = request.headers.get("Last-Event-ID") or request.query.get("since", "")
        if len(version) > MOST_OF_A_VERSION:
            raise InvalidRequestError("since is not a version; give the one that /api/snapshot has")
        response = web.StreamResponse(headers={"Cache-Control": "no-store", "Content-Type": "text/event-stream"})
        reader = self._channel.open(version)
        if (closed := self._open_pages.add(reader, self._access.reader_of(request))) is not None:
            closed.close()
        try:
            await response.prepare(request)
            await self._send(response, reader.queue)
        except ConnectionError:  # the page was closed, or does not read
            if request.transport is not None:
                request.transport.abort()
        finally:
            self._open_pages.remove(reader)
            self._channel.close(reader)
        return response

    async def _send(self, response: web.StreamResponse, messages: "asyncio.Queue[bytes | None]") -> None:
        """Send messages as they come; return when the page is too far behind."""
        while True:
            try:
                async with asyncio.timeout(KEEP_ALIVE_S):
                    message = await messages.get()
            except TimeoutError:
                message = b": still there\n\n"
            if message is None:
                return
            await send(response, message, SLOW_READER_S)

    async def job(self, request: web.Request) -> web.StreamResponse:
        found = await self._jobs.job(request.match_info["job"])
        return web.Response(body=encode(found), content_type="application/json")

    def of_service(self, page: Page) -> Handler:
        """Return the handler of a service's page."""

        async def handle(request: web.Request) -> web.StreamResponse:
            found = await self._jobs.of_service(page, dict(request.match_info), dict(request.query))
            return web.Response(body=encode(found), content_type="application/json")

        return handle


PORT = 8267
"""Ray's dashboard has 8265."""


async def serve(
    connect: Callable[[], ControllerConnection],
    address: str,
    host: str,
    port: int,
    token: str | None,
    ready: Callable[[str], object],
) -> None:
    """Run the dashboard in this process until SIGINT or SIGTERM.

    Args:
        connect, address, token: see `application`.
        host, port: the address at which it listens; port 0 takes a free one.
        ready: called with the URL when it listens.

    Raises:
        InvalidRequestError: it can't listen there.
    """
    server = LimitedServer(application(connect, address, token), shutdown_s=1.0)
    try:
        try:
            listens_at = await server.start(host, port)
        except OSError as error:
            raise InvalidRequestError(
                f"can't listen at {host}:{port} ({error.strerror}); choose another port: --port 0 takes a free one"
            ) from None
        ready(_url(host, listens_at))
        await _told_to_end()
    finally:
        await server.close()


def _url(host: str, port: int) -> str:
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


async def _told_to_end() -> None:
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, ended.set)
    await ended.wait()
