"""The seats of sessions and their calls, and the thread that renews a client's requests and sessions."""

import asyncio
import logging
import threading
import time
import uuid
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NoAnswer
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from ray import ObjectRef
from ray.exceptions import ActorUnavailableError, ObjectLostError, RayActorError, RayError, RayTaskError

from iris_ray.actors.calls.asking import Actor
from iris_ray.actors.calls.ray_internals import STREAM
from iris_ray.client.connection import this_connection
from iris_ray.errors import NoClusterError, RequestLostError, SessionEndedError, SlotQueueFullError
from iris_ray.slots.actors.messages import AnswerPiece, Grant, NotHeld
from iris_ray.slots.actors.slot_actor import SlotActor
from iris_ray.slots.actors.slot_manager import SlotManager
from iris_ray.slots.core.policy import RENEW_S

MOST_CALLS = 32
"""How many calls of one session may be unanswered. They run one after the other."""


@dataclass(slots=True, eq=False)
class Turn:
    """The place of a call in the line of its session's calls.

    Attributes:
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
        session_id: never used again.
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
    """The model's exception in the call that has just ended. It may look like an error of Ray's about the slot."""
    _slot: Actor[SlotActor] = field(init=False)
    _connection: str | None = field(default_factory=this_connection)

    def __post_init__(self) -> None:
        self._slot = Actor(self.grant.actor)

    def line_up(self) -> "Turn":
        """Take a place in the line of calls.

        Raises:
            SessionEndedError: the session is over.
            SlotQueueFullError: `MOST_CALLS` calls have no answer yet.
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
            turn.came.set_running_or_notify_cancel()  # a caller who gives up must not cancel it
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
        """Hold a turn while the caller waits for it and makes the call. Stop the call if the caller gives up.

        Ray's errors about a lost slot become `RequestLostError`.
        """
        given_up = False
        try:
            yield
        except (RayActorError, ObjectLostError) as error:  # the latter: a large answer on a host which is gone
            if error is self._raised:  # it is about an actor that the model has called
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
        """Return whether this process is still in the slot's cluster. If not, a call would have Ray start a cluster."""
        return this_connection() == self._connection

    def _stop(self, turn: "Turn", end: "ObjectRef") -> None:
        """Stop a call. It keeps its turn until its end, and the next call waits."""
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
        """Return a slot's answer to a call, or raise the error that it holds."""
        if isinstance(answer, AnswerPiece):
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
        """Return the error of a call whose slot is gone."""
        self.end(f"slot {self.grant.slot_id} is gone")
        return RequestLostError(
            f"a call of {self.model} was cut off, because the process of slot {self.grant.slot_id} is gone; it may "
            f"have run in part. The session is over: open it again, and repeat the call if that does no harm"
        )

    def _words(self) -> str:
        return f"the session with {self.model} is over: {self.over}. This call has not run; open the session again"


# -- client keeper -----------------------------------------------------------------------------------------------------

logger = logging.getLogger(__name__)


class ClientKeeper:
    """Tells a SlotManager every few seconds that a client is alive.

    Its thread runs while the client has requests or sessions. The manager knows the client by its ``client_id``.
    """

    def __init__(self, manager: Actor[SlotManager]) -> None:
        self.client_id = uuid.uuid4().hex
        self._manager = manager
        self._connection = this_connection()
        self._leases: dict[str, Lease] = {}
        self._requests = 0
        self._lock = threading.Lock()
        self._runs = False

    @property
    def is_connected(self) -> bool:
        """Whether this process is still in the manager's cluster. If not, a call of the manager would have Ray join
        another cluster, or start one."""
        return this_connection() == self._connection

    def require_connection(self) -> None:
        """Raise NoClusterError if this process has left the manager's cluster."""
        if not self.is_connected:
            raise NoClusterError(
                "this process has left the cluster on which these models are served (ray.shutdown); connect again, and"
                " make another SlotClient"
            )

    def add(self, lease: Lease) -> None:
        """Renew a session until it is over or removed."""
        with self._lock:
            self._leases[lease.session_id] = lease
            self._start()

    def remove(self, lease: Lease) -> None:
        """Stop renewing a session."""
        with self._lock:
            self._leases.pop(lease.session_id, None)

    def add_request(self) -> None:
        """Count a request: the client is renewed while it has any. Raises like `require_connection`."""
        self.require_connection()
        with self._lock:
            self._requests += 1
            self._start()

    def remove_request(self) -> None:
        """Note the end of a request."""
        with self._lock:
            self._requests -= 1

    @contextmanager
    def request(self, request_id: str) -> Iterator[None]:
        """Count a request while the caller waits for its answer. Cancel the request if the caller gives up."""
        self.add_request()
        try:
            yield
        except (asyncio.CancelledError, GeneratorExit, KeyboardInterrupt):
            self.cancel(request_id)
            raise
        finally:
            self.remove_request()

    def cancel(self, request_id: str) -> None:
        """Tell the manager to cancel a request, without waiting."""
        if self.is_connected:
            with suppress(RayError):  # the manager is gone
                self._manager.call(SlotManager.cancel, request_id)

    def _start(self) -> None:
        if not self._runs:
            self._runs = True
            threading.Thread(target=self._run, name="slot client", daemon=True).start()

    def _run(self) -> None:
        pause = threading.Event()
        while True:
            pause.wait(RENEW_S)
            with self._lock:
                leases = {name: each for name, each in self._leases.items() if not each.over}
                self._leases = leases.copy()
                if not leases and not self._requests:
                    self._runs = False
                    return
            if not self._renew(leases):
                return

    def _renew(self, leases: dict[str, Lease]) -> bool:
        """Return whether the manager is there."""
        if not self.is_connected:
            for each in leases.values():
                each.end("this process has left the cluster")
            return False
        idle = {name: each.idle_s() for name, each in leases.items()}
        try:  # a thread that waits in ray.get while the driver disconnects would crash the process
            over = self._manager.call(SlotManager.renew, self.client_id, idle).future().result(RENEW_S)
        except (NoAnswer, ActorUnavailableError) as error:
            logger.warning("a client of slots could not be renewed: %s; it is tried again", type(error).__name__)
        except RayTaskError:
            logger.exception("a client of slots could not be renewed, by a defect of iris_ray; it is tried again")
        except RayError:
            for each in leases.values():
                each.end("its SlotManager is gone")
            return False
        else:
            for name, reason in over.items():
                leases[name].end(reason)
        return True
