"""Stands for Ray in this process, and for its key-value store.

Actors are objects on one event loop, with handles, answers and errors as Ray's.

The loop runs in a thread, or it is the one that runs already, for instance in virtual time.

Arguments and results are pickled on their way, as they are between processes. What a call raises arrives as a
`RayTaskError`, what an actor that is gone is asked as an `ActorDiedError`.
"""

import asyncio
import concurrent.futures
import contextvars
import itertools
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Coroutine, Generator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray import cloudpickle
from ray.actor import ActorClass
from ray.exceptions import ActorDiedError, ActorUnavailableError, GetTimeoutError, RayTaskError, TaskCancelledError

from iris_ray.actors.controller import pool_registry

MakeActor = Callable[[type, tuple[Any, ...], dict[str, Any]], Any]
"""Makes the object behind an actor from its class, its arguments and the options that it is created with."""

HEAD_NODE = 28 * "0a"
"""The id of the node that this process is on."""

_handles: dict[int, "Handle"] = {}
_numbers = itertools.count(1)
_process: "contextvars.ContextVar[_Process | None]" = contextvars.ContextVar("_process", default=None)
"""The process of an actor whose task runs."""


class Reference:
    """Stands for an ObjectRef: it can be awaited on the loop, and waited for with ``ray.get``."""

    def __init__(self, future: "concurrent.futures.Future[Any]") -> None:
        self._future = future

    def future(self) -> "concurrent.futures.Future[Any]":
        return self._future

    def __await__(self) -> Generator[Any, None, Any]:
        """Wait for the result; to stop waiting does not cancel the call."""
        result = asyncio.wrap_future(self._future)
        result.add_done_callback(lambda done: done.cancelled() or done.exception())
        return asyncio.shield(result).__await__()


@dataclass(frozen=True)
class Method:
    """One method of an actor, and whether Ray repeats a call of it if the actor's process ends and starts anew."""

    actor: "Handle"
    name: str
    is_repeated: bool = False

    def options(self, max_task_retries: int = 0, **_: Any) -> "Method":
        return Method(self.actor, self.name, max_task_retries == -1)

    def remote(self, *args: Any) -> Reference:
        return self.actor._call(self.name, args, self.is_repeated)


@dataclass(eq=False)
class _Process:
    """One process of an actor. Its tasks end with it, and so do the actors that it has made."""

    actor: "Handle"
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    tasks: set[asyncio.Task[Any]] = field(default_factory=set)
    owned: list["Handle"] = field(default_factory=list)

    def end(self) -> None:
        self.ended.set()
        for task in list(self.tasks):
            task.cancel()
        for actor in self.owned:
            actor._die()


class Handle:
    """Stands for an ActorHandle. There is one for each actor, and pickling keeps it."""

    def __init__(self, ray_in_process: "RayInProcess", actor_class: type, make: Callable[[], Any]) -> None:
        self._ray = ray_in_process
        self._class = actor_class
        self._make = make
        self._number = next(_numbers)
        self._answers = asyncio.Event()
        self._answers.set()
        self._is_dead = False
        self._object: Any = None
        _handles[self._number] = self
        self._start_process()
        self._make_object()

    def __getattr__(self, name: str) -> Method:
        if name.startswith("_") or not (self._object is None or hasattr(self._object, name)):
            raise AttributeError(name)
        return Method(self, name)

    def __reduce__(self) -> tuple[Any, ...]:
        return _handle, (self._number,)

    def _start_process(self) -> None:
        self._process = _Process(self)
        self._context = contextvars.copy_context()
        self._context.run(_process.set, self._process)

    def _make_object(self) -> None:
        try:
            self._object = self._context.run(self._make)
        except Exception:  # as when a process can't make its actor
            self._is_dead = True
            self._process.ended.set()

    def _call(self, name: str, args: tuple[Any, ...], is_repeated: bool) -> Reference:
        sent = cloudpickle.dumps(args)
        self._ray.calls[args[1] if name == "serve" else name] += 1  # a service's call by its own name
        return Reference(self._ray.in_loop(self._answer(name, sent, is_repeated)))

    async def _answer(self, name: str, sent: bytes, is_repeated: bool) -> Any:
        """Return or raise what the call does.

        Raises:
            ActorDiedError: the actor is dead.
            ActorUnavailableError: its process has ended, and the call is not repeated.
        """
        while not self._is_dead:
            loop, ended = asyncio.get_running_loop(), self._process.ended
            work = loop.create_task(self._run(name, sent), context=self._context.copy())
            death = loop.create_task(ended.wait())
            try:
                await asyncio.wait({work, death}, return_when=asyncio.FIRST_COMPLETED)
                result = None if ended.is_set() else cloudpickle.loads(work.result())
            finally:
                work.cancel()
                death.cancel()
            if not ended.is_set():
                if isinstance(result, RayTaskError):
                    raise result.as_instanceof_cause()
                return result
            if not (self._is_dead or is_repeated):
                raise ActorUnavailableError("its process has ended", self._number.to_bytes(16))
        raise ActorDiedError

    async def _run(self, name: str, sent: bytes) -> bytes:
        """Return the pickled result, or a pickled `RayTaskError`."""
        await self._answers.wait()
        try:
            result = getattr(self._object, name)(*cloudpickle.loads(sent))
            if asyncio.iscoroutine(result):
                result = await result
        except RayTaskError as error:
            result = error
        except Exception as error:
            result = RayTaskError(name, traceback.format_exc(), error)
        pickled: bytes = cloudpickle.dumps(result)
        return pickled

    def _die(self) -> None:
        if not self._is_dead:
            self._is_dead = True
            self._end_process()

    def _end_process(self) -> None:
        if hasattr(self._object, "on_death"):
            self._object.on_death()
        self._process.end()

    async def _restart(self, takes_s: float) -> None:
        if self._is_dead or not self._answers.is_set():
            return
        self._answers.clear()
        self._end_process()
        self._start_process()
        await asyncio.sleep(takes_s)
        if not self._is_dead:
            self._make_object()
        self._answers.set()


def _handle(number: int) -> Handle:
    return _handles[number]


def _new_task(loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, Any], **options: Any) -> "asyncio.Task[Any]":
    """Make a task, which belongs to the process in whose context it runs."""
    task = asyncio.Task(work, loop=loop, **options)
    context = options.get("context")
    process = _process.get() if context is None else context.get(_process)
    if process is not None:
        if process.ended.is_set():
            task.cancel()
        process.tasks.add(task)
        task.add_done_callback(process.tasks.discard)
    return task


class RayInProcess:
    """Takes the place of what the code under test calls in the module ``ray``, for one test.

    Args:
        make: makes the objects behind actors. One that has a method ``on_death`` has it called when it is killed.
        loop: the loop that actors run on; without one, it is a new one in a thread.

    Attributes:
        has_pressed_ctrl_c: asked again and again while this process waits for a result; True raises KeyboardInterrupt.
        calls: how often each method of any actor was called.
    """

    def __init__(self, make: MakeActor, loop: asyncio.AbstractEventLoop | None = None) -> None:
        self.has_pressed_ctrl_c: Callable[[], bool] = lambda: False
        self.calls: Counter[str] = Counter()
        self._make = make
        self._named: dict[str, Handle] = {}
        self._loop = loop or asyncio.new_event_loop()
        self._loop.set_task_factory(_new_task)  # type: ignore[arg-type]  # called with one loop only
        self._thread = threading.current_thread()
        if loop is None:
            self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
            self._thread.start()

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        places = {
            "init": lambda **_: None,
            "shutdown": lambda: None,
            "is_initialized": lambda: True,
            "get": self.get,
            "wait": self.wait,
            "kill": self.kill,
            "cancel": lambda reference: reference.future().cancel(),
            "get_actor": self.get_actor,
            "get_runtime_context": lambda: SimpleNamespace(
                gcs_address="10.0.0.1:6379",
                runtime_env={},
                get_node_id=lambda: HEAD_NODE,
                get_job_id=lambda: "01000000",
                current_actor=self.current_actor(),
                get_actor_id=lambda: f"{0 if (actor := self.current_actor()) is None else actor._number:032x}",
            ),
        }
        for name, stand_in in places.items():
            monkeypatch.setattr(ray, name, stand_in)

        monkeypatch.setattr(pool_registry, "ActorHandle", Handle)

        def create(wanted: Any, args: Any = None, kwargs: Any = None, **options: Any) -> Handle:
            assert not any(kwargs.values())  # no process starts a Controller, and no task submits a job
            return self.create(wanted.__ray_metadata__.modified_class, tuple(args or ()), options)

        monkeypatch.setattr(ActorClass, "_remote", create)

    def end(self) -> None:
        """End every actor and the thread."""
        self.in_loop(self.end_actors()).result(60)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(20)
        self._loop.close()

    async def end_actors(self) -> None:
        """End every actor, and whatever else runs on the loop."""
        for handle in self._handles():
            handle._die()
        while left := asyncio.all_tasks() - {asyncio.current_task()}:
            _, endless = await asyncio.wait(left, timeout=2)
            for task in endless:
                task.cancel()
        for handle in self._handles():
            del _handles[handle._number]

    def in_loop(self, work: Coroutine[Any, Any, Any]) -> "concurrent.futures.Future[Any]":
        """Run a coroutine on the loop of all actors."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def _handles(self) -> list[Handle]:
        return [handle for handle in _handles.values() if handle._ray is self]

    # -- what Ray's module has -------------------------------------------------------------------------------------

    def wait(self, references: list[Reference], timeout: float | None = None) -> tuple[list[Any], list[Any]]:
        (reference,) = references
        deadline = None if timeout is None else time.monotonic() + timeout
        while not reference.future().done() and (deadline is None or time.monotonic() < deadline):
            self._hear_ctrl_c()
            concurrent.futures.wait([reference.future()], 0.01)
        return (references, []) if reference.future().done() else ([], references)

    def _hear_ctrl_c(self) -> None:
        if threading.current_thread() is threading.main_thread() and self.has_pressed_ctrl_c():
            raise KeyboardInterrupt

    def get(self, reference: Reference, timeout: float | None = None) -> Any:
        deadline = None if timeout is None else time.monotonic() + timeout
        future = reference.future()
        while True:
            self._hear_ctrl_c()
            try:
                return future.result(0.01)
            except concurrent.futures.CancelledError:
                raise TaskCancelledError from None
            except TimeoutError:
                if future.done():  # the call itself has raised it
                    raise
            if deadline is not None and time.monotonic() > deadline:
                raise GetTimeoutError("it took too long")

    def kill(self, handle: Handle, no_restart: bool = True) -> None:
        assert no_restart
        for name in [name for name, actor in list(self._named.items()) if actor is handle]:
            self._named.pop(name)
        self._loop.call_soon_threadsafe(handle._die)

    def restart(self, handle: Handle, takes_s: float = 1.0) -> None:
        """End an actor's process. Ray starts it anew within so many seconds."""
        self.in_loop(handle._restart(takes_s))

    def current_actor(self) -> Handle | None:
        """Return the actor whose task runs."""
        process = _process.get()
        return None if process is None else process.actor

    def get_actor(self, name: str, namespace: str | None = None) -> Handle:
        if name not in self._named or self._named[name]._is_dead:
            raise ValueError(f"there is no actor {name}")
        return self._named[name]

    def create(self, actor_class: type, args: tuple[Any, ...], options: dict[str, Any]) -> Handle:
        """Make an actor, as ``ActorClass.options(...).remote(...)`` does."""
        name = options.get("name")
        if name is not None and options.get("get_if_exists"):
            try:
                return self.get_actor(name)
            except ValueError:
                pass

        def make() -> Handle:
            handle = Handle(self, actor_class, lambda: self._make(actor_class, args, options))
            owner = _process.get()
            if owner is not None and options.get("lifetime") != "detached":
                owner.owned.append(handle)
            if name is not None:
                self._named[name] = handle  # before it does anything, such as ending
            return handle

        async def made() -> Handle:  # Ray makes async actors in their event loop
            return make()

        return make() if threading.current_thread() is self._thread else self.in_loop(made()).result(60)

    def is_alive(self, handle: Handle, actor_class: type) -> bool:
        """Return whether it is an actor of that class, or of its stand-in, and lives."""
        return issubclass(handle._class, actor_class) and not handle._is_dead

    def freeze(self, handle: Handle) -> None:
        """Make an actor answer nothing until it thaws."""
        self._loop.call_soon_threadsafe(handle._answers.clear)

    def thaw(self, handle: Handle) -> None:
        self._loop.call_soon_threadsafe(handle._answers.set)


class Store:
    """The cluster's key-value store, as a dictionary.

    Attributes:
        values: by key.
        before_write: called before anything changes.
        newest_first: of the values that are set at the same time, the last one is written first.
    """

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.before_write: Callable[[], None] = lambda: None
        self.newest_first = False
        self._being_set = 0

    async def set(self, key: str, value: bytes | None) -> None:
        self._being_set += 1
        for _ in range(100 - self._being_set if self.newest_first else 0):
            await asyncio.sleep(0)
        self._being_set -= 1
        if value is None:
            self.delete(key)
        else:
            self.put(key, value)

    async def add(self, key: str, value: bytes) -> bool:
        return self.put_new(key, value)

    async def fetch(self, key: str) -> bytes | None:
        return self.get(key)

    def put(self, key: str, value: bytes) -> None:
        self.before_write()
        self.values[key] = value

    def put_new(self, key: str, value: bytes) -> bool:
        self.before_write()
        is_new = key not in self.values
        self.values.setdefault(key, value)
        return is_new

    def get(self, key: str) -> bytes | None:
        return self.values.get(key)

    def delete(self, key: str) -> None:
        self.before_write()
        self.values.pop(key, None)

    def delete_all(self, prefix: str) -> None:
        for key in self.keys(prefix):
            self.delete(key)

    def keys(self, prefix: str) -> list[str]:
        return [key for key in list(self.values) if key.startswith(prefix)]

    def items(self, prefix: str) -> dict[str, bytes]:
        return {key: self.values[key] for key in self.keys(prefix)}
