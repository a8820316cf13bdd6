"""How the bytes of a command or connection are carried."""

import asyncio
import threading
from typing import Any

import pytest

from iris_ray.sessions.channels import started


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
