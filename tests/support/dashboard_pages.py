"""A dashboard that serves in a thread, and a real browser without a screen that shows its pages."""

import asyncio
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import pytest

from iris_ray.actors.calls.controller_connection import ControllerConnection
from iris_ray.dashboard.server import application
from iris_ray.http_server import LimitedServer

if TYPE_CHECKING:
    from playwright.sync_api import Browser as Chromium
    from playwright.sync_api import Page

T = TypeVar("T")

CHROMIUM = "IRIS_TEST_CHROMIUM"
"""The variable with the path of a Chromium; without it, the one that ``playwright install chromium`` has brought."""
NONE = f"no Chromium: run `playwright install --with-deps chromium`, or set {CHROMIUM} to the path of one"


class Browser:
    """Chromium, driven from a thread of its own: Playwright keeps an event loop where it runs.

    Attributes:
        troubles: what pages have complained about on their consoles.
    """

    def __init__(self, thread: ThreadPoolExecutor, chromium: "Chromium") -> None:
        self.troubles: list[str] = []
        self._thread = thread
        self._chromium = chromium

    def see(self, story: Callable[["Page"], T], dark: bool = False, width: int = 1280, height: int = 860) -> T:
        """Open a page in a window of that size, tell the story with it, and return what it returns."""
        return self._thread.submit(self._see, story, "dark" if dark else "light", width, height).result()

    def _see(self, story: Callable[["Page"], T], scheme: Any, width: int, height: int) -> T:
        context = self._chromium.new_context(color_scheme=scheme, viewport={"width": width, "height": height})
        page = context.new_page()
        page.on("pageerror", lambda error: self.troubles.append(str(error)))
        page.on("console", lambda said: self.troubles.append(said.text) if said.type in ("error", "warning") else None)
        try:
            return story(page)
        finally:
            page.unroute_all(behavior="ignoreErrors")  # a request may be on its way
            context.close()


@contextmanager
def browser() -> Iterator[Browser]:
    """Start a browser; skip the test if this machine has none."""
    sync_api = pytest.importorskip("playwright.sync_api", reason=NONE)
    path = os.environ.get(CHROMIUM) or shutil.which("chromium")
    with ThreadPoolExecutor(1) as thread:
        playwright = thread.submit(lambda: sync_api.sync_playwright().start()).result()
        try:
            launch = thread.submit(playwright.chromium.launch, executable_path=path, args=["--no-sandbox"])
            try:
                chromium = launch.result()
            except sync_api.Error as error:
                if "Executable doesn't exist" not in str(error):
                    raise
                pytest.skip(NONE)
            yield Browser(thread, chromium)
            thread.submit(chromium.close).result()
        finally:
            thread.submit(playwright.stop).result()


ADDRESS = "10.0.0.2:6379"


@contextmanager
def served(
    connect: Callable[[], ControllerConnection] = ControllerConnection, token: str | None = None
) -> Iterator[str]:
    """Serve the dashboard of the cluster that this process is in; give its URL."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="dashboard")
    thread.start()

    async def start() -> tuple[LimitedServer, int]:
        server = LimitedServer(application(connect, ADDRESS, token), shutdown_s=0.1)
        return server, await server.start("127.0.0.1", 0)

    server, port = asyncio.run_coroutine_threadsafe(start(), loop).result()
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        asyncio.run_coroutine_threadsafe(server.close(), loop).result()
        asyncio.run_coroutine_threadsafe(loop.shutdown_default_executor(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
