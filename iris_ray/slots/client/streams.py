"""The streams of one client: a thread fetches the pieces of all while there are any."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import TimeoutError as NoAnswer
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Final

from iris_ray.actors.calls.asking import Actor
from iris_ray.errors import InvalidSlotError
from iris_ray.slots.actors.messages import Ask
from iris_ray.slots.actors.slot_manager import SlotManager
from iris_ray.slots.actors.streams import READ_AT_ONCE, Arrived, Batch, Stream
from iris_ray.slots.client.lease import ClientKeeper

LOOK_S: Final = 5.0
"""How often the thread looks whether this process is still in the SlotManager's cluster."""

Arrive = Callable[[Arrived], object]


class StreamFetcher:
    """Fetches the pieces of a client's streams from its SlotManager.

    Args:
        keeper: knows the client's id, and cancels the streams that are given up.
    """

    def __init__(self, manager: Actor[SlotManager], keeper: ClientKeeper) -> None:
        self._manager = manager
        self._keeper = keeper
        self._readers: dict[str, Arrive] = {}
        self._lock = threading.Lock()
        self._runs = False

    @contextmanager
    def stream(self, ask: Ask, arrive: Arrive) -> Iterator[Stream]:
        """Ask for a stream. If the caller gives up, it is cancelled.

        Args:
            arrive: gets, in another thread, what `Stream.read` takes.

        Raises:
            InvalidSlotError: a stream of the same id runs.
        """
        ask = replace(ask, client_id=self._keeper.client_id)  # the client may have found another manager meanwhile
        with self._keeper.request(ask.request_id):
            with self._lock:
                if ask.request_id in self._readers:
                    raise InvalidSlotError(f"request {ask.request_id} runs already; give each request its own id")
                self._readers[ask.request_id] = arrive
                if not self._runs:
                    self._runs = True
                    threading.Thread(target=self._run, name="streams of slots", daemon=True).start()
            try:
                self._manager.call(SlotManager.stream, ask).future().add_done_callback(arrive)
                yield Stream()
            finally:
                with self._lock:
                    self._readers.pop(ask.request_id, None)

    def note_read(self, ask: Ask, stream: Stream) -> None:
        """Note that the caller has read a further piece, and now and then tell the SlotManager."""
        stream.unreported += 1
        if stream.unreported == READ_AT_ONCE and self._keeper.is_connected:
            stream.unreported = 0
            self._manager.call(SlotManager.note_read, ask.request_id, READ_AT_ONCE)

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._readers:
                    self._runs = False
                    return
            arrived = dict[str, Arrived]()
            try:
                arrived.update(self._taken())
            except Exception as error:  # the manager is gone, or its answer is lost, and pieces with it
                arrived.update(dict.fromkeys(list(self._readers), error))
            for request_id, found in arrived.items():
                with self._lock:
                    arrive = self._readers.get(request_id)
                    if isinstance(found, BaseException):
                        self._readers.pop(request_id, None)
                if arrive is not None:
                    arrive(found)

    def _taken(self) -> Batch:
        """Return the next pieces; nothing if there are none for some seconds."""
        self._keeper.require_connection()
        called = self._manager.call(SlotManager.take, self._keeper.client_id).future()
        while True:
            with suppress(NoAnswer):
                return called.result(LOOK_S)
            self._keeper.require_connection()  # else the answer would never come
