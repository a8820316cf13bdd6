"""A dashboard that serves in a thread."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from aiohttp import web

from iris_ray.actors.calls.controller_connection import ControllerConnection
from iris_ray.dashboard.server import application

ADDRESS = "10.0.0.2:6379"


@contextmanager
def served(
    connect: Callable[[], ControllerConnection] = ControllerConnection, token: str | None = None
) -> Iterator[str]:
    """Serve the dashboard of the cluster that this process is in; give its URL."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="dashboard")
    thread.start()

    async def start() -> tuple[web.AppRunner, int]:
        runner = web.AppRunner(application(connect, ADDRESS, token), access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return runner, int(runner.addresses[0][1])

    runner, port = asyncio.run_coroutine_threadsafe(start(), loop).result()
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result()
        asyncio.run_coroutine_threadsafe(loop.shutdown_default_executor(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
