"""How the bytes of a command or connection are carried."""

import asyncio
import contextlib
import os
import socket
import threading
from typing import Any

import pytest

from iris_ray.sessions.channels import PortConnection, RunningCommand, started
from tests.support.forks import until


def test_channel_that_gets_no_thread_is_never_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    begun: list[Any] = []

    async def story() -> None:
        go_on = threading.Event()
        busy = asyncio.create_task(asyncio.to_thread(go_on.wait, 30.0))
        await asyncio.sleep(0)
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse)
            with pytest.raises(RuntimeError, match="new thread"):
                await started(begun.append, 1)  # type: ignore[type-var]
        go_on.set()
        await busy
        await asyncio.to_thread(lambda: None)  # a thread does first what was asked of it first

    asyncio.run(story())
    assert not begun


@pytest.mark.parametrize("delay_s", [0.0, 0.01, 0.05])
def test_start_that_is_cancelled_leaves_no_descriptor_and_no_command(delay_s: float) -> None:
    """The thread can't be cancelled, and nobody else would close what it has opened."""

    async def story(address: tuple[str, int]) -> None:
        descriptors, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
        command = started(RunningCommand.start, ["sleep", "600"], dict(os.environ), "/", "", None, True)
        connection = started(PortConnection.to, *address)
        for start in (command, connection):
            starting: asyncio.Task[Any] = asyncio.ensure_future(start)
            await asyncio.sleep(delay_s)
            starting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await (await starting).drop()  # it was faster
        await until(lambda: len(os.listdir("/proc/self/fd")) <= descriptors)  # those of other tests may end meanwhile
        await until(lambda: threading.active_count() <= threads)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        asyncio.run(story(listener.getsockname()))
