"""The seat that a session has: how it is called, whether it is in use, and why it is over."""

import asyncio
import threading
import time
import uuid
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from ray import ObjectRef
from ray.exceptions import ObjectLostError, RayActorError

from iris_ray.actors.calls.actor import Actor
from iris_ray.actors.slots.messages import Grant, NotHeld
from iris_ray.actors.slots.pieces import Piece
from iris_ray.actors.slots.slot_actor import SlotActor
from iris_ray.actors.wire.ray_internals import STREAM
from iris_ray.client.connection import this_connection
from iris_ray.errors import RequestLostError, SessionEndedError, SlotQueueFullError

MOST_CALLS = 32
"""Of one session that have not been answered. They run one after the other."""


@dataclass(slots=True, eq=False)
class Turn:
    """The place of a call in the line of its session's calls.

    Attributes:
        call_id: what the call is named.
        came: done when the call may be made.
        end: Ray's reference to the end of the call; None: it was not sent.
    """

    call_id: str
    came: "Future[None]" = field(default_factory=Future)
    end: "ObjectRef | None" = None


@dataclass(slots=True, eq=False)
class Lease:
    """One seat, from the moment it is granted.

    Attributes:
        session_id: what it is called; never used again.
        model: the model's name.
        grant: the slot.
        over: why it takes no more calls, or "".
    """

    session_id: str
    model: str
    grant: Grant
    over: str = ""
    _line: deque["Turn"] = field(default_factory=deque)
    _used_at: float = field(default_factory=time.monotonic)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _raised: Exception | None = None
    """What the model raised in the call that has just ended. It may look like an error of Ray's about the slot."""
    _slot: Actor[SlotActor] = field(init=False)
    _connection: str | None = field(default_factory=this_connection)

    def __post_init__(self) -> None:
        self._slot = Actor(self.grant.actor)

    def line_up(self) -> "Turn":
        """Take a place in the line of calls.

        Raises:
            SessionEndedError: it is over.
            SlotQueueFullError: so many calls wait that no more are taken.
        """
        with self._lock:
            if self.over:
                raise SessionEndedError(self._words())
            if len(self._line) >= MOST_CALLS:
                raise SlotQueueFullError(
                    f"{MOST_CALLS} calls of this session with {self.model} have no answer yet, which is the limit; "
                    f"wait for some, or open more sessions"
                )
            turn = Turn(uuid.uuid4().hex)
            turn.came.set_running_or_notify_cancel()  # whoever gives up does not end it
            self._line.append(turn)
            if self._line[0] is turn:
                turn.came.set_result(None)
            return turn

    def send(self, turn: "Turn", payload: Any) -> Any:
        """Send a call whose turn has come; return Ray's reference to the answer."""
        turn.end = answer = self._slot.call(SlotActor.call, self.session_id, turn.call_id, payload)
        return answer

    def send_for_pieces(self, turn: "Turn", payload: Any) -> Any:
        """Send a call whose turn has come; return Ray's generator of references to the pieces of its answer."""
        slot = self._slot.with_options(**STREAM)
        pieces = slot.stream(SlotActor.call_in_pieces, self.session_id, turn.call_id, payload)
        turn.end = pieces.completed()
        return pieces

    @contextmanager
    def calling(self, turn: "Turn") -> Iterator[None]:
        """Make a call, or wait for its turn. What is given up is stopped. Ray's words for a lost slot become ours."""
        given_up = False
        try:
            yield
        except (RayActorError, ObjectLostError) as error:  # the latter: a large answer on a host which is gone
            if error is self._raised:  # about an actor that the model has asked
                raise
            raise self.lost() from None
        except (asyncio.CancelledError, GeneratorExit, KeyboardInterrupt):
            given_up = True
            raise
        finally:
            self._raised = None
            if given_up and turn.end is not None and self._is_connected():
                self._stop(turn, turn.end)
            else:
                self._leave(turn)

    def _is_connected(self) -> bool:
        """Return whether this process is still in the slot's cluster. If not, Ray would start one to tell the slot."""
        return this_connection() == self._connection

    def _stop(self, turn: "Turn", end: "ObjectRef") -> None:
        """Stop a call. Until its end it has the session's seat, and the next call waits."""
        self._slot.call(SlotActor.stop, turn.call_id)
        end.future().add_done_callback(lambda _: self._leave(turn))

    def _leave(self, turn: "Turn") -> None:
        with self._lock:
            self._line.remove(turn)
            self._used_at = time.monotonic()
            following = self._line[0] if self._line else None
            if following is not None and not following.came.done():
                following.came.set_result(None)

    def idle_s(self) -> float:
        """Return for how many seconds no call has been running."""
        with self._lock:
            return 0.0 if self._line else time.monotonic() - self._used_at

    def end(self, reason: str) -> None:
        """Take no more calls. The first reason counts."""
        with self._lock:
            self.over = self.over or reason

    def opened(self, answer: Any) -> Any:
        """Return what a slot answered to a call, or raise what it says."""
        if isinstance(answer, Piece):
            try:
                return answer.open()
            except Exception as error:
                self._raised = error
                raise
        if isinstance(answer, NotHeld):
            self.end(answer.reason)
            raise SessionEndedError(self._words())
        return answer

    def lost(self) -> RequestLostError:
        """Return what a call raises whose slot is gone."""
        self.end(f"slot {self.grant.slot_id} is gone")
        return RequestLostError(
            f"a call of {self.model} was cut off, because the process of slot {self.grant.slot_id} is gone; it may "
            f"have run in part. The session is over: open it again, and repeat the call if that does no harm"
        )

    def _words(self) -> str:
        return f"the session with {self.model} is over: {self.over}. This call has not run; open the session again"
