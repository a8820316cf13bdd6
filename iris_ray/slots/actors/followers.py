"""A slot of several hosts: each call of the leader also runs on the other hosts, in the same order."""

import os
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from typing import Any, NoReturn

import ray
from ray.exceptions import RayError, RayTaskError

from iris_ray.actors.calls.asking import Reference
from iris_ray.actors.host.task_environment import hold_ports
from iris_ray.errors import RemoteUserError
from iris_ray.model.job_info import job_info_of
from iris_ray.slots.actors.messages import AnswerPiece
from iris_ray.slots.actors.model_call import SlotRequest

OUT_OF_STEP_S = 60.0
"""How long one process may go on with a call after another process has ended it. Then the slot is broken."""

Sent = AnswerPiece | tuple[Any]
"""The payload of a call on its way to other hosts: the caller's bytes of a request, or the value of a session's call in
a tuple. So each host opens it as the leader does, and Ray does not replace an `ObjectRef` by its value."""

Answer = Reference[str | None]
Follow = Callable[[Sent, SlotRequest], Answer]
"""A call of `SlotActor.follow` on another host."""


def opened(sent: Sent) -> Any:
    """Return the payload of a call."""
    return sent.open() if isinstance(sent, AnswerPiece) else sent[0]


class Followers:
    """The processes of a slot on the other hosts of its runner; empty for a slot of one host, and in a follower."""

    def __init__(self) -> None:
        self._follow: Sequence[Follow] = ()
        self._turn = threading.Lock()
        self._reader = AnswerReader()

    def __bool__(self) -> bool:
        return bool(self._follow)

    def lead(self, follow: Sequence[Follow]) -> str:
        """Have these processes repeat every call. Return an address of this host, at which all hosts can meet."""
        self._follow = follow
        me = job_info_of(os.environ)
        assert me is not None, "the process has its task's variables"
        host = me.coordinator_address.rpartition(":")[0]
        (held,) = hold_ports(host, 1, ())
        with closing(held):
            return f"{host}:{held.getsockname()[1]}"

    @contextmanager
    def calling(self, payload: Sent, request: SlotRequest) -> Iterator[None]:
        """Have the followers make a call while the leader makes it; one call at a time.

        If a follower is lost, or the hosts are out of step, this process ends, and the call has no result.

        Raises:
            RemoteUserError: the model raised an exception on another host, but not here.
        """
        if not self._follow:
            yield
            return
        with self._turn:
            led: Future[None] = Future()
            followed: Future[str | None] = Future()
            calls = [follow(payload, request) for follow in self._follow]
            how = calls, led, followed, self._reader
            threading.Thread(target=_follow, args=how, name="followers", daemon=True).start()
            try:
                yield
            finally:
                led.set_result(None)
                why_not = _result_or_exit(followed, OUT_OF_STEP_S)
            if why_not is not None:
                raise RemoteUserError(f"the model failed on another host of its slot: {why_not}")

    def in_full(self, pieces: Iterator[Any]) -> Generator[Any, None, None]:
        """Yield all pieces. If the caller stops early, the model still makes the rest, as the followers do."""
        if not self._follow:
            yield from pieces
            return
        for piece in pieces:
            try:
                with self._reader.has_piece():
                    yield piece
            except GeneratorExit:
                for _ in pieces:
                    pass
                raise


def meet_at(address: str) -> None:
    """Let `iris_ray.jax.initialize` join this process with the processes of its slot on other hosts."""
    me = job_info_of(os.environ)
    assert me is not None, "the process has its task's variables"
    os.environ.update(replace(me, coordinator_address=address).to_env())


class AnswerReader:
    """The reader of an answer's pieces. While it holds a piece, the leader waits, and `OUT_OF_STEP_S` does not run."""

    def __init__(self) -> None:
        self._has_piece = False
        self._since = float("-inf")

    @contextmanager
    def has_piece(self) -> Iterator[None]:
        """Note that the leader waits until the reader takes more."""
        self._has_piece = True
        try:
            yield
        finally:
            self._has_piece, self._since = False, time.monotonic()

    def limit(self, since: float) -> float:
        """Return until when hosts may be out of step that have been out of step since then."""
        return (time.monotonic() if self._has_piece else max(since, self._since)) + OUT_OF_STEP_S


def _follow(calls: list[Answer], led: "Future[None]", followed: "Future[str | None]", reader: AnswerReader) -> None:
    """Set why a follower's call failed, or None, once all calls have ended. After the first end, all must end soon."""
    ray.wait(calls)
    since, late = time.monotonic(), calls
    while late:
        _, late = ray.wait(calls, num_returns=len(calls), timeout=_left(reader, since))
    failures = [_why_not(call) for call in calls]
    followed.set_result(next((each for each in failures if each is not None), None))
    while not led.done():
        with suppress(TimeoutError):
            led.result(_left(reader, since))


def _left(reader: AnswerReader, since: float) -> float:
    """Return for how many more seconds the hosts may be out of step; exit if there are none."""
    left = reader.limit(since) - time.monotonic()
    if left <= 0:
        _end_out_of_step()
    return left


def _why_not(call: Answer) -> str | None:
    try:
        found: str | None = ray.get(call)
    except RayTaskError as error:  # the payload can't be opened there
        return f"{type(error.cause).__name__}: {error.cause}"
    except RayError as error:
        _end(f"another host of this slot is lost: {type(error).__name__}")
    return found


def _result_or_exit(future: "Future[Any]", timeout_s: float) -> Any:
    try:
        return future.result(max(0.0, timeout_s))
    except TimeoutError:
        _end_out_of_step()


def _end_out_of_step() -> NoReturn:
    _end(f"the hosts of this slot are out of step for {OUT_OF_STEP_S:g} s")


def _end(why: str) -> NoReturn:
    """End this process, and so the slot: its requests run again on another slot."""
    print(f"{why}; it ends", file=sys.stderr, flush=True)
    os._exit(1)
