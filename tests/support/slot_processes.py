"""A SlotManager whose slots and runners stand aside: they do what a test tells them to. Its event loop is real."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from types import SimpleNamespace
from typing import Any

from ray.exceptions import RayError, RayTaskError

from iris_ray.slots.actors.messages import AnswerPiece, Ask, Maker, ModelOrder, packed
from iris_ray.slots.actors.model_call import SlotRequest
from iris_ray.slots.actors.slot_manager import SlotManager
from iris_ray.slots.actors.streams import MOST_PIECES, Arrived, Batch, Stream, StreamEnd
from iris_ray.slots.core.models import ModelSpec
from iris_ray.slots.core.policy import ServingPolicy
from tests.support.slots import host_here

MAKER = Maker("ann", "job", "worker", "process 1 on host")
NO_PORT = "address not available"
HANGS = "its load never ends"
RAISES = "its load raises, instead of returning why it failed"


class Method:
    """A method of an actor: ``remote`` and ``options`` are all that is used of it."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.remote = function

    def options(self, **_: Any) -> "Method":
        return self


class Slot:
    """Stands for a `SlotActor`. It answers once it is told to."""

    def __init__(self, number: int, why_not: str | None) -> None:
        self.number = number
        self.meets_at = ""
        self.leads: list[Slot] = []
        self.pieces = 3
        self.sent = self.read = 0
        self.taken: asyncio.Queue[Batch] = asyncio.Queue()
        self.stopped: list[str] = []
        self.requests: list[SlotRequest] = []
        self._why_not = why_not
        self.may_answer = asyncio.Event()
        self.killed = asyncio.Event()
        for name in (
            "identity",
            "lead",
            "load",
            "watch",
            "unload",
            "serve",
            "stream",
            "take",
            "note_read",
            "stop",
            "open_session",
            "end_session",
        ):
            setattr(self, name, Method(getattr(self, f"_{name}")))

    def __reduce__(self) -> tuple[Any, ...]:
        return int, (self.number,)

    async def _identity(self) -> int:
        return self.number

    async def _lead(self, followers: "Sequence[Slot]") -> str:
        if self._why_not == NO_PORT:
            raise RayTaskError("lead", "", OSError(NO_PORT))
        self.leads = list(followers)
        return "10.0.0.1:1"

    async def _load(self, pickled: bytes, meeting: str) -> str | None:
        self.meets_at = meeting
        if self._why_not == HANGS:
            await self.killed.wait()
        if self._why_not == RAISES:
            raise RayTaskError("load", "", ValueError(RAISES))
        return self._why_not

    async def _watch(self) -> None:
        await self.killed.wait()
        raise RayError("killed")

    async def _unload(self) -> None:
        await self.killed.wait()

    async def _stop(self, request_id: str) -> None:
        self.stopped.append(request_id)
        self.read = 10**6  # nobody reads the rest

    async def _open_session(self, session_id: str) -> None:
        pass

    async def _end_session(self, session_id: str, reason: str) -> None:
        """Return when its call has ended."""
        self.stopped.append(session_id)
        answered = asyncio.ensure_future(self.may_answer.wait())
        killed = asyncio.ensure_future(self.killed.wait())
        await asyncio.wait((answered, killed), return_when=asyncio.FIRST_COMPLETED)
        if self.killed.is_set():
            raise RayError("killed")

    async def _serve(self, request: SlotRequest, payload: bytes) -> AnswerPiece:
        self.requests.append(request)
        await self.may_answer.wait()
        return packed(self.number)

    async def _stream(self, request: SlotRequest, payload: bytes) -> StreamEnd:
        await self.may_answer.wait()
        for piece in range(self.pieces):
            await asyncio.sleep(0.01 if self.pieces == 3 else 0.0)
            while self.sent - self.read >= MOST_PIECES:
                await asyncio.sleep(0.001)
            self.sent += 1
            self.put(request.request_id, piece)
        return StreamEnd(self.sent, ())

    def put(self, request_id: str, piece: int) -> None:
        """Have the manager take a piece, which it does not have to ask for at the right time."""
        self.taken.put_nowait({request_id: (packed((self.number, piece)),)})

    async def _take(self) -> Batch:
        return await self.taken.get()

    def _note_read(self, request_id: str, pieces: int) -> None:
        self.read += pieces


class Slots:
    """Makes them, unless it fails to."""

    def __init__(self) -> None:
        self.made: list[Slot] = []
        self.loads: list[str | None] = []
        self.variables: list[dict[str, str]] = []
        self.fails = False

    def options(self, **_: Any) -> "Slots":
        return self

    def remote(self, variables: Any) -> Slot:
        if self.fails:
            raise ValueError("placement group bundle index 0 is invalid")
        self.variables.append(variables)
        self.made.append(Slot(len(self.made), self.loads.pop(0) if self.loads else None))
        return self.made[-1]


async def forever(*_: Any) -> None:
    await asyncio.Event().wait()


def stand_in_agent(*gpu_bytes: int) -> Any:
    """The agent of a host that is there for ever, and whose driver says so many bytes of its GPUs."""
    return SimpleNamespace(
        watch=Method(forever),
        wait_gone=Method(lambda *_: true()),
        alive=Method(lambda known: all_of(known)),
        gpu_memory_in_use=Method(lambda _: listed(gpu_bytes)),
    )


async def listed(values: Sequence[int]) -> list[int]:
    return list(values)


async def manager_of(*runners: str, **policy: Any) -> SlotManager:
    manager = SlotManager(ServingPolicy(**policy), MAKER)
    for name in runners:
        here = host_here(name, stand_in_agent())
        manager._background.start(manager.hold_host(here), "holding a host")
    await asyncio.sleep(0.01)
    return manager


async def serving(*runners: str, **policy: Any) -> SlotManager:
    """A manager that serves one model, "m"."""
    manager = await manager_of(*runners, **policy)
    await manager.register(order())
    return manager


async def true() -> bool:
    return True


async def all_of(known: Any) -> set[Any]:
    return set(known)


def order(name: str = "m", **spec: Any) -> ModelOrder:
    return ModelOrder(ModelSpec(name, **{"memory": {1: 60 * 10**9}, **spec}), b"", 0)


def ask(request_id: str, model: str = "m", **how: Any) -> Ask:
    return Ask(request_id, model, b"", **how)


async def pieces_of(manager: SlotManager, asked: Ask) -> AsyncIterator[AnswerPiece]:
    """Yield the pieces of a stream as a client gets them, who does not report that it has read them."""
    arrived: asyncio.Queue[Arrived] = asyncio.Queue()
    asyncio.ensure_future(manager.stream(asked)).add_done_callback(arrived.put_nowait)

    async def take() -> None:
        while True:
            for pieces in (await manager.take(asked.client_id)).values():
                arrived.put_nowait(pieces)

    taking, stream = asyncio.ensure_future(take()), Stream()
    try:
        while not stream.is_over:
            for piece in stream.read(await arrived.get()):
                yield piece
    finally:
        taking.cancel()


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.005)
