"""The seat that a session has: how it is called, whether it is in use, and why it is over."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from ray.exceptions import RayActorError

from iris_ray.actors.slots.messages import Grant, NotHeld
from iris_ray.actors.slots.pieces import Piece
from iris_ray.errors import RequestLostError, SessionEndedError, SlotQueueFullError

MOST_CALLS = 32
"""Of one session that have not been answered. They run one after the other."""


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
    _calls: int = 0
    _used_at: float = field(default_factory=time.monotonic)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def begin_call(self) -> None:
        """Count a call that is about to be made.

        Raises:
            SessionEndedError: it is over.
            SlotQueueFullError: so many calls wait that no more are taken.
        """
        with self._lock:
            if self.over:
                raise SessionEndedError(self._words())
            if self._calls >= MOST_CALLS:
                raise SlotQueueFullError(
                    f"{self._calls} calls of this session with {self.model} have no answer yet, which is the limit; "
                    f"wait for some, or open more sessions"
                )
            self._calls += 1

    def end_call(self) -> None:
        """Note that a call has an answer, or will have none."""
        with self._lock:
            self._calls -= 1
            self._used_at = time.monotonic()

    @contextmanager
    def calling(self) -> Iterator[None]:
        """Make a call, and have Ray's words for a lost actor put into ours."""
        self.begin_call()
        try:
            yield
        except RayActorError:
            raise self.lost() from None
        finally:
            self.end_call()

    def idle_s(self) -> float:
        """Return for how many seconds no call has been running."""
        with self._lock:
            return 0.0 if self._calls else time.monotonic() - self._used_at

    def end(self, reason: str) -> None:
        """Take no more calls. The first reason counts."""
        with self._lock:
            self.over = self.over or reason

    def opened(self, answer: Any) -> Any:
        """Return what a slot answered to a call, or raise what it says."""
        if isinstance(answer, Piece):
            return answer.open()
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
