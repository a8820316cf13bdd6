"""What may be asked of a SlotActor: one method for each of its own."""

from collections.abc import AsyncIterator
from typing import Any

from ray.actor import ActorHandle

from iris_ray.actors.calls.asking import Reference, remote_method
from iris_ray.actors.calls.ray_internals import STREAM
from iris_ray.slots.actors.messages import AnswerPiece
from iris_ray.slots.actors.model_call import SlotRequest
from iris_ray.slots.actors.slot_actor import SlotActor


class SlotStub:
    """The slot's process behind an actor handle.

    Args:
        handle: the actor.
    """

    def __init__(self, handle: ActorHandle) -> None:
        self.handle = handle
        self.identity = remote_method(handle, SlotActor.identity)
        self.watch = remote_method(handle, SlotActor.watch)
        self.lead = remote_method(handle, SlotActor.lead)
        self.load = remote_method(handle, SlotActor.load)
        self.unload = remote_method(handle, SlotActor.unload)
        self.serve = remote_method(handle, SlotActor.serve)
        self.stop = remote_method(handle, SlotActor.stop)
        self.open_session = remote_method(handle, SlotActor.open_session)
        self.end_session = remote_method(handle, SlotActor.end_session)
        self.call = remote_method(handle, SlotActor.call)

    def stream(self, request: SlotRequest, payload: bytes) -> AsyncIterator[Reference[AnswerPiece]]:
        """Return references to the pieces of an answer, as they come; see `SlotActor.stream`."""
        pieces: AsyncIterator[Reference[AnswerPiece]] = self.handle.stream.options(**STREAM).remote(request, payload)
        return pieces

    def call_in_pieces(self, session_id: str, call_id: str, payload: Any) -> Any:
        """Return Ray's generator of references to the pieces of an answer; see `SlotActor.call_in_pieces`."""
        return self.handle.call_in_pieces.options(**STREAM).remote(session_id, call_id, payload)
