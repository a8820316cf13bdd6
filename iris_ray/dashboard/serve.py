"""Runs the dashboard in this process until it is told to end."""

import asyncio
import signal
from collections.abc import Callable

from aiohttp import web

from iris_ray.actors.wire.controller_connection import ControllerConnection
from iris_ray.dashboard.server import application
from iris_ray.errors import InvalidRequestError

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
    """Serve until SIGINT or SIGTERM.

    Args:
        connect, address, token: see `application`.
        host, port: where to listen; port 0 takes a free one.
        ready: called with the URL once it listens.

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
