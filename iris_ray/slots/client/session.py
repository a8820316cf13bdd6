"""A session: a seat on one slot of a model, whose calls go to the slot directly."""

import asyncio
import uuid
from collections.abc import AsyncGenerator, Generator
from contextlib import suppress
from typing import Any, Self

import ray
from ray.exceptions import RayActorError

from iris_ray.actors.calls.asking import Actor
from iris_ray.errors import InvalidSlotError, SessionEndedError
from iris_ray.slots.actors.messages import Ask
from iris_ray.slots.actors.slot_manager import SlotManager
from iris_ray.slots.client.lease import ClientKeeper, Lease, Turn
from iris_ray.slots.core.models import WorkloadKind
from iris_ray.slots.core.request_queue import CLOSED


class Session:
    """A seat on a slot, made by `SlotClient.session`. ``with`` and ``async with`` open and close it, also repeatedly.

    While it is open, the seat is its own, and of other models only those that starve can have the slot evicted. Its
    calls run one after the other. Calls of other sessions run at the same time, but a slot of several hosts runs one
    call at a time. It ends when it is closed, when it was not used for ``idle_s``, when its slot is lost or has to end,
    when other requests have waited long, or ``ServingPolicy.silence_s`` after its client's process has ended. Then a
    call that has not run raises `SessionEndedError`, and one that may have run in part `RequestLostError`. No call is
    repeated.

    Args:
        manager: the SlotManager.
        keeper: renews the session.
        model: the model's name.
        how: ``idle_s``, ``timeout_s``, ``priority``: see `SlotClient.session`.
    """

    def __init__(self, manager: Actor[SlotManager], keeper: ClientKeeper, model: str, **how: Any) -> None:
        self._manager = manager
        self._keeper = keeper
        self._model = model
        self._how = how
        self._lease: Lease | None = None

    @property
    def over(self) -> str:
        """Why it takes no calls; "" while it is open. This process learns of its end at the next call, or after about
        five seconds."""
        return "it is not open" if self._lease is None else self._lease.over

    @property
    def slot_id(self) -> str:
        """The slot on which it has, or had, a seat; "" before it has had one."""
        return "" if self._lease is None else self._lease.grant.slot_id

    def open(self) -> Self:
        """Wait for a seat.

        Raises:
            InvalidSlotError: the session is open already, the model fits nowhere, or an argument of
                `SlotClient.session` makes no sense.
            SlotQueueFullError: the queue has reached its limit.
            RequestExpiredError: no seat became free within ``timeout_s``.
            ModelUnavailableError: the model can't be loaded.
            UnknownNameError: there is no such model.
        """
        ask = self._ask()
        try:
            with self._keeper.request(ask.request_id):
                self._take(ask, ray.get(self._manager.call(SlotManager.submit, ask)).open())
        except BaseException:
            self._keeper.cancel(ask.request_id)
            raise
        return self

    async def aopen(self) -> Self:
        """As `open`, for an event loop."""
        ask = self._ask()
        try:
            with self._keeper.request(ask.request_id):
                self._take(ask, (await self._manager.call(SlotManager.submit, ask)).open())
        except BaseException:
            self._keeper.cancel(ask.request_id)
            raise
        return self

    def close(self) -> None:
        """Give the seat back. A running call gets its answer; calls that wait for it raise `SessionEndedError`."""
        if lease := self._give_up():
            with suppress(RayActorError):  # the manager is gone, and the seat with it
                ray.get(self._manager.call(SlotManager.cancel, lease.session_id))

    async def aclose(self) -> None:
        """As `close`, for an event loop."""
        if lease := self._give_up():
            with suppress(RayActorError):
                await self._manager.call(SlotManager.cancel, lease.session_id)

    def call(self, payload: Any) -> Any:
        """Call the model and return its answer; the pieces of a generator as a list.

        It raises the model's own exceptions.

        Raises:
            SessionEndedError: the session is over, or was never opened. The call has not run.
            RequestLostError: the slot's process is gone. The call may have run in part.
            SlotQueueFullError: 32 calls of the session have no answer yet.
            NoClusterError: this process has left the cluster.
        """
        lease, turn = self._line_up()
        with lease.calling(turn):
            turn.came.result()
            return lease.opened(ray.get(lease.send(turn, payload)))

    async def generate(self, payload: Any) -> Any:
        """As `call`, for an event loop."""
        lease, turn = self._line_up()
        with lease.calling(turn):
            await asyncio.wrap_future(turn.came)
            return lease.opened(await lease.send(turn, payload))

    def stream(self, payload: Any) -> Generator[Any, None, None]:
        """Call the model, and yield the pieces of its answer as they come. Raises like `call`.

        Stopping early also stops the model, unless its slot has several hosts.
        """
        lease, turn = self._line_up()
        with lease.calling(turn):
            turn.came.result()
            for reference in lease.send_for_pieces(turn, payload):
                yield lease.opened(ray.get(reference))

    async def astream(self, payload: Any) -> AsyncGenerator[Any, None]:
        """As `stream`, for an event loop."""
        lease, turn = self._line_up()
        with lease.calling(turn):
            await asyncio.wrap_future(turn.came)
            async for reference in lease.send_for_pieces(turn, payload):
                yield lease.opened(await reference)

    def __enter__(self) -> Self:
        return self.open()

    def __exit__(self, *error: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return await self.aopen()

    async def __aexit__(self, *error: object) -> None:
        await self.aclose()

    def _ask(self) -> Ask:
        if self._lease is not None and not self._lease.over:
            raise InvalidSlotError(f"this session with {self._model} is open; close it first, or make another one")
        how = {"kind": WorkloadKind.SESSION, "client_id": self._keeper.client_id, **self._how}
        return Ask(uuid.uuid4().hex, self._model, b"", **how)

    def _take(self, ask: Ask, grant: Any) -> None:
        self._lease = Lease(ask.request_id, self._model, grant)
        self._keeper.add(self._lease)

    def _give_up(self) -> Lease | None:
        """Stop using the seat; return it if the manager can still be reached, to give it back."""
        if (lease := self._lease) is None:
            return None
        self._keeper.remove(lease)
        lease.end(CLOSED)
        return lease if self._keeper.is_connected else None

    def _line_up(self) -> tuple[Lease, Turn]:
        if self._lease is None:
            raise SessionEndedError(f"the session with {self._model} is not open; open() it, or use it with `with`")
        self._keeper.require_connection()
        return self._lease, self._lease.line_up()
