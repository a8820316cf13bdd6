"""The process of one slot: it loads a user's model, and runs requests and the calls of sessions on it."""

import asyncio
import gc
import inspect
import os
import sys
import threading
import time
import traceback
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, ParamSpec, TypeVar

import ray
from ray import cloudpickle
from ray.actor import ActorHandle

from iris_ray.actors.calls.asking import Actor
from iris_ray.actors.protocol.task_files import TaskFiles
from iris_ray.processes.identity import ProcessIdentity
from iris_ray.slots.actors.followers import Followers, Sent, meet_at, opened
from iris_ray.slots.actors.messages import AnswerPiece, NotHeld, StopReasons, packed, packed_error
from iris_ray.slots.actors.model_call import ModelCall, ModelLoop, RunningCalls, SlotRequest, StoppedError
from iris_ray.slots.actors.streams import Batch, Outbox, StreamEnd

P = ParamSpec("P")
T = TypeVar("T")
HEALTH_S = 10.0
"""The interval between two calls of a model's ``health()``."""
HEALTH_ANSWER_S = 60.0
"""How long ``health()`` may take. A missing answer is a bad one."""
MOST_UNWELL = 3
"""The number of bad answers of ``health()`` in a row after which the slot ends."""
CALLS: Final = "calls"
"""The concurrency group of the methods that run user code."""


def _runs_user_code(method: Callable[P, T]) -> Callable[P, T]:
    found: Callable[P, T] = ray.method(concurrency_group=CALLS)(method)
    return found


def join_task() -> None:
    """Have this process end with the task that keeps its host, even if the SlotManager is gone."""
    if (files := TaskFiles.of_this_task()) is not None:
        files.add_member(ProcessIdentity.of_this_process())


class SlotActor:
    """Holds one instance of the user's class.

    All methods are functions, which Ray runs in threads: that is faster than an asynchronous actor, which one coroutine
    among the methods would make of it. Methods that run user code share the threads of `CALLS`, one for each seat. So a
    model with one seat is loaded and called in one thread.

    Args:
        variables: environment variables to set first, such as those that name its devices.
    """

    def __init__(self, variables: Mapping[str, str]) -> None:
        os.environ.update(variables)
        join_task()
        self._model = LoadedModel()
        self._calls = RunningCalls(self._model.loop)
        self._sessions = HeldSessions()
        self._followers = Followers()
        self._outbox = Outbox()
        gc.freeze()  # as the SlotManager; not what the model makes, which it may replace

    def identity(self) -> ProcessIdentity:
        """Return the identity of this process."""
        return ProcessIdentity.of_this_process()

    def watch(self) -> None:
        """Never return: the call fails when this process is gone."""
        threading.Event().wait()

    def lead(self, followers: Sequence[ActorHandle]) -> str:
        """Have the slot's processes on other hosts make every call, too. Return an address where all can meet."""
        return self._followers.lead([partial(Actor[SlotActor](actor).call, SlotActor.follow) for actor in followers])

    @_runs_user_code
    def load(self, pickled: bytes, meeting: str = "") -> str | None:
        """Make an instance of the user's class and load it. Return why that failed, or None.

        Args:
            pickled: the class and its arguments.
            meeting: what `lead` returned, if the slot has several hosts.
        """
        if meeting:
            meet_at(meeting)
        return self._model.load(pickled)

    @_runs_user_code
    def unload(self) -> None:
        """Let the user's object tidy up."""
        self._model.unload()

    # -- requests, which the SlotManager passes on ------------------------------------------------

    @_runs_user_code
    def serve(self, request: SlotRequest, payload: bytes) -> AnswerPiece | None:
        """Return the answer to a request, the pieces of a generator as a list; None if it was stopped."""
        try:
            value = cloudpickle.loads(payload)
            with self._calls.running(request) as call, self._followers.calling(AnswerPiece(payload), request):
                return packed(self._model.answer(value, call))
        except StoppedError:
            return None
        except Exception as error:
            return packed_error(error)

    @_runs_user_code
    def stream(self, request: SlotRequest, payload: bytes) -> StreamEnd:
        """Answer a request piece by piece, for `take`; the answer of a function is one piece."""
        request_id = request.request_id
        self._outbox.begin(request_id)
        try:
            value = cloudpickle.loads(payload)
            with self._calls.running(request) as call, self._followers.calling(AnswerPiece(payload), request):
                for piece in self._followers.in_full(self._model.pieces(value, call)):
                    self._outbox.put(request_id, packed(piece))
        except StoppedError:
            pass
        except Exception as error:
            self._outbox.put(request_id, packed_error(error), is_last=True)
        return self._outbox.end(request_id)

    def take(self) -> Batch:
        """Return the next pieces of all streams of requests. Wait until there are some."""
        return self._outbox.take()

    def note_read(self, request_id: str, pieces: int) -> None:
        """Note that the caller of a stream has read this number of further pieces."""
        self._outbox.note_read(request_id, pieces)

    def stop(self, call_id: str) -> None:
        """Stop a request, or a call of a session, if it runs as a coroutine or makes pieces; else it goes on.

        A call of a slot with several hosts goes on, too: all hosts would have to stop it at the same place.
        """
        self._outbox.drop(call_id)
        if not self._followers:
            self._calls.stop(call_id)

    @_runs_user_code
    def follow(self, payload: Sent, request: SlotRequest) -> str | None:
        """Make the same call as the leader of this slot. Return why that failed, or None."""
        try:
            with self._calls.running(request) as call:
                self._model.answer(opened(payload), call)
        except Exception as error:
            return "".join(traceback.format_exception_only(error)).strip()
        return None

    # -- sessions, whose clients call directly ----------------------------------------------------

    def open_session(self, session_id: str) -> None:
        """Take calls of a session from now on."""
        self._sessions.open(session_id)

    def end_session(self, session_id: str, reason: str) -> None:
        """Take no more calls of a session; return when its last call has ended."""
        self._sessions.stop(session_id, reason)

    @_runs_user_code
    def call(self, session_id: str, call_id: str, payload: Any) -> Any:
        """Return the answer to a call of a session: the value, `NotHeld`, or its exception as an `AnswerPiece`."""
        if (refused := self._sessions.begin_call(session_id)) is not None:
            return refused
        request = SlotRequest(call_id)
        try:
            with self._calls.running(request) as call, self._followers.calling((payload,), request):
                return self._model.answer(payload, call)
        except Exception as error:
            return packed_error(error)
        finally:
            self._sessions.end_call(session_id)

    @_runs_user_code
    def call_in_pieces(self, session_id: str, call_id: str, payload: Any) -> Iterator[Any]:
        """As `call`, piece by piece."""
        if (refused := self._sessions.begin_call(session_id)) is not None:
            yield refused
            return
        request = SlotRequest(call_id)
        try:
            with self._calls.running(request) as call, self._followers.calling((payload,), request):
                yield from self._followers.in_full(self._model.pieces(payload, call))
        except Exception as error:
            yield packed_error(error)
        finally:
            self._sessions.end_call(session_id)


# -- parts of a slot ---------------------------------------------------------------------------------------------------


class LoadedModel:
    """An instance of the user's class.

    The class may have ``load()``, ``unload()`` and ``health()``, and must have ``__call__(payload)``: a function, a
    coroutine, or a generator of either kind. Coroutines run in one event loop, everything else in the calling thread.
    """

    def __init__(self) -> None:
        self.loop = ModelLoop()
        self._model: Any = None

    def load(self, pickled: bytes) -> str | None:
        """Make an instance of the user's class and load it. Return why that failed, or None."""
        try:
            made, keywords = cloudpickle.loads(pickled)
            self._model = made(**keywords)
            self._run_if_there("load")
        except (Exception, asyncio.CancelledError) as error:
            return "".join(traceback.format_exception_only(error)).strip()
        if hasattr(self._model, "health"):
            threading.Thread(target=self._watch_health, name="model's health", daemon=True).start()
        return None

    def unload(self) -> None:
        """Let the user's object tidy up."""
        self._run_if_there("unload")

    def answer(self, payload: Any, call: ModelCall) -> Any:
        """Return the answer; the pieces of a generator as a list."""
        answer = self._begin(payload, call)
        if isinstance(answer, AsyncIterator):
            return call.wait(_all(answer))
        return list(call.each(answer)) if isinstance(answer, Iterator) else answer

    def pieces(self, payload: Any, call: ModelCall) -> Iterator[Any]:
        """Yield the answer piece by piece; the answer of a function as one piece."""
        answer = self._begin(payload, call)
        if isinstance(answer, AsyncIterator):
            yield from call.wait_each(answer)
        elif isinstance(answer, Iterator):
            yield from call.each(answer)
        else:
            yield answer

    def _begin(self, payload: Any, call: ModelCall) -> Any:
        answer = self._model(payload)
        return call.wait(answer) if inspect.iscoroutine(answer) else answer

    def _run_if_there(self, name: str) -> Any:
        result = getattr(self._model, name)() if hasattr(self._model, name) else None
        return ModelCall(self.loop).wait(result) if inspect.iscoroutine(result) else result

    def _watch_health(self) -> None:
        """End this process, and so the slot, when the model is not well. Its requests run again on another slot."""
        unwell, threads = 0, ThreadPoolExecutor(MOST_UNWELL)
        while unwell < MOST_UNWELL:
            time.sleep(HEALTH_S)
            answer = threads.submit(self._run_if_there, "health")
            try:
                why = None if answer.result(HEALTH_ANSWER_S) is not False else "health() returned False"
            except (Exception, asyncio.CancelledError) as error:
                late = f"health() did not answer within {HEALTH_ANSWER_S:g} s"
                why = f"health() raised {type(error).__name__}: {error}" if answer.done() else late
            unwell = 0 if why is None else unwell + 1
        print(f"the model was not well {MOST_UNWELL} times in a row: {why}; its slot ends", file=sys.stderr, flush=True)
        os._exit(1)


async def _all(pieces: AsyncIterator[Any]) -> list[Any]:
    return [piece async for piece in pieces]


@dataclass(slots=True, eq=False)
class HeldSessions:
    """The sessions that have a seat on a slot, by id, and how many calls each has. Several threads use it."""

    _calls: dict[str, int] = field(default_factory=dict)
    _over: StopReasons = field(default_factory=StopReasons)
    _changed: threading.Condition = field(default_factory=threading.Condition)

    def open(self, session_id: str) -> None:
        """Give a session its seat, unless it has been stopped already."""
        with self._changed:
            if not self._over.knows(session_id):
                self._calls[session_id] = 0

    def begin_call(self, session_id: str) -> NotHeld | None:
        """Count a call; return why the session may not make it, or None. Its client makes one at a time."""
        with self._changed:
            if session_id not in self._calls or self._over.knows(session_id):
                return NotHeld(self._over.of(session_id))
            self._calls[session_id] += 1
            return None

    def end_call(self, session_id: str) -> None:
        """Note the end of a call."""
        with self._changed:
            self._calls[session_id] -= 1
            self._changed.notify_all()

    def stop(self, session_id: str, reason: str) -> None:
        """Refuse further calls of a session, and return when its last call has ended."""
        with self._changed:
            self._over.note(session_id, reason)
            self._changed.wait_for(lambda: not self._calls.get(session_id))
            self._calls.pop(session_id, None)
