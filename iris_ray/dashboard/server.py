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
from iris_ray.dashboard.access import COOKIE, add_headers, guard, is_right
from iris_ray.dashboard.cluster_view import TABLES, ClusterView
from iris_ray.dashboard.follower import Channel, Follower, encode
from iris_ray.dashboard.job_pages import JobPages
from iris_ray.errors import InvalidRequestError, IrisError, UnknownNameError

STATIC = Path(__file__).parent / "static"
KEEP_ALIVE_S = 10.0
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
        token: the token that readers need; None: everybody who reaches the server may read.
    """
    view = ClusterView()
    channel = Channel(view)
    follower = Follower(connect, view, channel, address)
    routes = _Routes(view, channel, JobPages(connect), token)
    app = web.Application(middlewares=[guard(token), errors_as_json])
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
            web.get("/api/goodput", routes.goodput),
            web.get("/api/history/{what:utilisation|jobs}", routes.history),
            web.get(f"/api/history/jobs/{JOB}", routes.past_job),
            web.get(f"/api/jobs/{JOB}", routes.job),
            web.get(f"/api/jobs/{JOB}/logs", routes.logs),
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
    """Answer with the messages of our errors."""
    try:
        return await handler(request)
    except UnknownNameError as error:
        return web.json_response({"error": str(error)}, status=404)
    except InvalidRequestError as error:
        return web.json_response({"error": str(error)}, status=400)
    except IrisError as error:
        return web.json_response({"error": str(error)}, status=503)


class _Routes:
    def __init__(self, view: ClusterView, channel: Channel, jobs: JobPages, token: str | None) -> None:
        self._view = view
        self._channel = channel
        self._jobs = jobs
        self._token = token

    async def page(self, _: web.Request) -> web.StreamResponse:
        return web.FileResponse(STATIC / "index.html", headers={"Cache-Control": "no-cache"})

    async def login_page(self, _: web.Request) -> web.StreamResponse:
        return web.Response(text=LOGIN, content_type="text/html")

    async def login(self, request: web.Request) -> web.StreamResponse:
        try:
            given = (await request.post()).get("token")
        except (ValueError, LookupError) as error:  # not text of its charset, or no such charset
            raise InvalidRequestError(f"the form can't be read ({error}); send it from the page /login") from None
        if self._token is None or not isinstance(given, str) or not is_right(given.strip(), self._token):
            return web.Response(status=403, text=LOGIN.replace("hidden", ""), content_type="text/html")
        response = web.Response(status=303, headers={"Location": "/"})
        response.set_cookie(COOKIE, self._token, httponly=True, samesite="Strict")
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
            raise InvalidRequestError("since is no version; give the one that /api/snapshot has")
        response = web.StreamResponse(headers={"Cache-Control": "no-store", "Content-Type": "text/event-stream"})
        await response.prepare(request)
        reader = self._channel.open(version)
        try:
            await self._send(response, reader.queue)
        except ConnectionError:
            pass  # the page was closed
        finally:
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
            await response.write(message)

    async def job(self, request: web.Request) -> web.StreamResponse:
        found = await self._jobs.job(request.match_info["job"])
        return web.Response(body=encode(found), content_type="application/json")

    async def goodput(self, _: web.Request) -> web.StreamResponse:
        return web.Response(body=encode(await self._jobs.goodput()), content_type="application/json")

    async def history(self, request: web.Request) -> web.StreamResponse:
        found = await self._jobs.history(request.match_info["what"], request.query)
        return web.Response(body=encode(found), content_type="application/json")

    async def past_job(self, request: web.Request) -> web.StreamResponse:
        found = await self._jobs.past_job(request.match_info["job"])
        return web.Response(body=encode(found), content_type="application/json")

    async def logs(self, request: web.Request) -> web.StreamResponse:
        found = await self._jobs.logs(request.match_info["job"], request.query)
        return web.Response(body=encode(found), content_type="application/json")


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
    runner = web.AppRunner(application(connect, address, token), access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    try:
        site = web.TCPSite(runner, host, port)
        try:
            await site.start()
        except OSError as error:
            raise InvalidRequestError(
                f"can't listen at {host}:{port} ({error.strerror}); choose another port: --port 0 takes a free one"
            ) from None
        ready(_url(host, runner.addresses[0][1]))
        await _told_to_end()
    finally:
        await runner.cleanup()


def _url(host: str, port: int) -> str:
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


async def _told_to_end() -> None:
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, ended.set)
    await ended.wait()
