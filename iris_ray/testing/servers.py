"""Parts that the emulated servers share: a thread that serves HTTP, and faults that a test asks for."""

import asyncio
import ssl
import threading
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from aiohttp import web

_CLOSE_TIMEOUT_S = 0.05  # for clients that wait for a change; 0 would mean for ever

T = TypeVar("T")
Code = TypeVar("Code")


class ServerThread:
    """Serves HTTP at any number of addresses from one thread of this process."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._runners: list[web.ServerRunner] = []
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the thread. Call this from any other thread."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def listen(
        self,
        answer: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]],
        ip: str,
        tls: ssl.SSLContext | None = None,
    ) -> str:
        """Begin to answer requests at a free port of one of this machine's IP addresses. Return ``ip:port``."""
        return self.run(self._listen(answer, ip, tls))

    def close(self) -> None:
        """Stop serving. Harmless when repeated."""
        if self._loop.is_closed():
            return
        self.run(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _listen(self, answer: Any, ip: str, tls: ssl.SSLContext | None) -> str:
        server = web.Server(answer, handler_cancellation=True, access_log=None)
        runner = web.ServerRunner(server, shutdown_timeout=_CLOSE_TIMEOUT_S)
        await runner.setup()
        await web.TCPSite(runner, ip, 0, ssl_context=tls).start()
        self._runners.append(runner)
        return "{}:{}".format(*runner.addresses[0])

    async def _end(self) -> None:
        servers = [runner.server for runner in self._runners]
        transports = [connection.transport for server in servers if server for connection in server.connections]
        await asyncio.gather(*(runner.cleanup() for runner in self._runners))
        for transport in transports:  # a client that is gone would hold up the end of TLS
            if transport is not None:
                transport.abort()
        await asyncio.sleep(0)
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)


# -- faults ------------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class ApiFault(Generic[Code]):
    """A failure or delay of the next calls of a method (``*``: of all methods)."""

    method: str
    times: int
    delay_s: float = 0.0
    code: Code | None = None


@dataclass
class FaultyApi(Generic[Code]):
    """The base of the servers of emulated APIs. A ``Code`` is an error in the terms of their API.

    Attributes:
        calls: the method and the request of every call, refused ones included.
        address: HOST:PORT.
    """

    lock: threading.RLock = field(default_factory=threading.RLock)
    calls: list[tuple[str, Any]] = field(default_factory=list)
    address: str = ""
    _faults: list[ApiFault[Code]] = field(default_factory=list)

    def fail(self, code: Code, method: str = "*", times: int = 1) -> None:
        """Answer the next calls of a method, such as ``"GetNode"`` or ``"instances.delete"``, with an error."""
        with self.lock:
            self._faults.append(ApiFault(method, times, code=code))

    def delay(self, seconds: float, method: str = "*", times: int = 1) -> None:
        """Delay the next calls of a method."""
        with self.lock:
            self._faults.append(ApiFault(method, times, delay_s=seconds))

    def heal(self) -> None:
        """Cancel the failures and delays that have not happened yet."""
        with self.lock:
            self._faults.clear()

    def count(self, method: str) -> int:
        """Return how many calls of a method have come."""
        with self.lock:
            return sum(called == method for called, _ in self.calls)

    def take_fault(self, method: str, request: Any) -> ApiFault[Code] | None:
        """Note a call. Return the fault that it meets, or None, and count it down."""
        with self.lock:
            self.calls.append((method, request))
            fault = next((one for one in self._faults if one.method in (method, "*")), None)
            if fault is not None:
                fault.times -= 1
                if fault.times <= 0:
                    self._faults.remove(fault)
            return fault
