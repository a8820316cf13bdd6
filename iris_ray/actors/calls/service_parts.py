"""Runs the services' parts in an actor: starts them, hands them events and calls, and contains their failures.

The kernel never waits for a service. Each part runs in asyncio tasks of its own. If its start, its loop or a hook
raises an error, the part is dropped, named as failing, and made anew after a pause that doubles from `FIRST_PAUSE_S` to
`LONGEST_PAUSE_S`. What can't be contained is code that blocks the event loop: blocking work belongs in a thread, and
steps that take longer than `LONG_STEP_S` are counted and named.
"""

import asyncio
import contextlib
import functools
import inspect
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Generic, ParamSpec, TypeVar

from iris_ray.actors.calls.background import until_the_end
from iris_ray.actors.calls.message_checks import checked
from iris_ray.actors.protocol.services import SERVICE, Service, imported
from iris_ray.errors import InvalidMessageError, IrisError, ServiceUnavailableError

logger = logging.getLogger(__name__)

FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 300.0
"""Pauses before a failed part is made anew."""
SOUND_AFTER_S = 60.0
"""A part that has run for this time has recovered: its next pause is `FIRST_PAUSE_S` again."""
LONG_START_S = 60.0
"""A part that starts for longer is named as failing, and its callers no longer wait."""
LONG_STEP_S = 0.1
"""A step of a service's coroutine that blocks the event loop for longer is counted."""
MOST_WAITING = 20_000
"""The limit for events that wait for a part. Beyond it the oldest are dropped, and counted."""
MOST_CHARACTERS = 300
"""The limit for the message of an error in a `ServiceHealth`."""
THREADS = 2
"""A part's blocking calls share this number of threads, so a disk that hangs stops no other service."""

P = ParamSpec("P")
T = TypeVar("T")
Event = TypeVar("Event")


@dataclass(frozen=True, slots=True)
class ServiceHealth:
    """The condition of a service's part.

    Attributes:
        service: the service's name.
        trouble: the last error, in one line, if the part is failing now; else None.
        failures: how often it has failed.
        lost_events: events that were dropped since it began, because the part was behind or failing.
        longest_step_s: the longest time for which it has blocked the event loop.
        last_error: the last error, even if the part has recovered.
    """

    service: str
    trouble: str | None = None
    failures: int = 0
    lost_events: int = 0
    longest_step_s: float = 0.0
    last_error: str | None = None


class ServicePart(Generic[Event]):
    """The base of a service's part in an actor. Every hook may be left out.

    Attributes:
        calls: the Protocols, marked by `calls_of`, whose methods the part answers.
    """

    calls: tuple[type, ...] = ()

    async def started(self) -> None:
        """Prepare the part, once the actor is ready. After a failure, a new part reads what the old one missed."""

    async def happened(self, events: list[Event]) -> None:
        """Take events that have happened, in their order. A slow part gets many at once."""

    async def run(self) -> None:
        """Run the part's own loop. It may return."""

    def close(self) -> None:
        """Release all resources: the part is dropped."""


class RunningPart(Generic[Event]):
    """One part: made, supervised, and made anew after failures.

    Args:
        service: the service.
        place: its part's class.
        make: makes the part of its class.
    """

    def __init__(self, service: Service, place: str, make: Callable[[Any, "RunningPart[Event]"], Any]) -> None:
        self.service = service
        self.part: ServicePart[Event] | None = None
        self._place = place
        self._make = make
        self._waiting: deque[Event] = deque()
        self._news = asyncio.Event()
        self._made: ServicePart[Event] | None = None  # also before it has started
        self._starts_since: float | None = None
        self._leftover: set[asyncio.Future[None]] = set()  # work of dropped parts that does not end when cancelled
        self._wants_events = True
        self._failures = self._lost = 0
        self._longest_step_s = 0.0
        self._trouble: str | None = None
        self._last_error: str | None = None
        self._broken: asyncio.Future[None] | None = None
        self._is_ready = asyncio.Event()  # set once the part has started or failed for the first time
        self._threads: ThreadPoolExecutor | None = None
        self._free_threads = asyncio.Semaphore(THREADS)

    @property
    def health(self) -> ServiceHealth:
        trouble, since = self._trouble, self._starts_since
        if trouble is None and since is not None and (seconds := time.monotonic() - since) >= LONG_START_S:
            trouble = f"it has been starting for {seconds:.0f} s"
        return ServiceHealth(
            self.service.name, trouble, self._failures, self._lost, self._longest_step_s, self._last_error
        )

    def note(self, events: Iterable[Event]) -> None:
        """Queue events for the part. Return at once; raise nothing."""
        if not self._wants_events:
            return
        self._waiting.extend(events)
        while len(self._waiting) > MOST_WAITING:
            self._waiting.popleft()
            self._lost += 1
        self._news.set()

    async def supervise(self) -> None:
        """Run the part for ever."""
        pause_s = FIRST_PAUSE_S
        while True:
            began = time.monotonic()
            self._broken = asyncio.get_running_loop().create_future()
            try:
                await self._run_once(self._broken)
            except GeneratorExit:  # the process ends, and its event loop has ended
                raise
            except BaseException as error:
                if (task := asyncio.current_task()) is not None and task.cancelling():
                    raise
                self._note_failure(error)
            finally:
                self._drop()
            if time.monotonic() - began > SOUND_AFTER_S:
                pause_s = FIRST_PAUSE_S
            await asyncio.sleep(pause_s)
            while self._leftover:  # two parts of one service must not work side by side, and must not pile up
                for work in self._leftover:
                    work.cancel()
                _, self._leftover = await asyncio.wait(self._leftover, timeout=pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    async def in_thread(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a function that blocks in a thread of this service.

        A call waits for a thread here, not in the executor, which would keep each cancelled call for as long as the
        threads hang.
        """
        if self._threads is None:
            self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix=self.service.name)
        await self._free_threads.acquire()
        loop = asyncio.get_running_loop()

        def release(_: Future[T]) -> None:
            with contextlib.suppress(RuntimeError):  # the event loop has ended
                loop.call_soon_threadsafe(self._free_threads.release)

        try:
            call = self._threads.submit(functools.partial(function, *args, **kwargs))
        except BaseException:  # such as no thread left
            self._free_threads.release()
            raise
        call.add_done_callback(release)
        return await asyncio.wrap_future(call)

    async def answer(self, method: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Answer a call. Its arguments are rebuilt from plain values, as the method's annotations say.

        Raises:
            InvalidMessageError: the service has no such call, or an argument is not what the method takes.
            ServiceUnavailableError: the part is failing, starts for long, or has cancelled its own work.
            Exception: the method's own error.
        """
        part: ServicePart[Event] = await self._ready_part()
        call = _call_of(part.__class__, self.service.name, method)
        try:
            return await self._timed(lambda: call(part, *args, **kwargs))
        except asyncio.CancelledError as error:
            if (task := asyncio.current_task()) is None or task.cancelling():
                raise
            raise ServiceUnavailableError(f"the service {self.service.name} has cancelled the call") from error

    async def call(self, hook: Callable[[Any], Awaitable[T]], deadline_s: float | None) -> T:
        """Call a hook of the part, and return its result.

        Args:
            hook: is called with the part.
            deadline_s: how long the part may take; seconds. None: the caller stops waiting by itself.

        Raises:
            IrisError: the hook's own.
            ServiceUnavailableError: the part fails, or takes longer.
        """
        name, began = self.service.name, time.monotonic()
        try:
            async with asyncio.timeout(deadline_s):
                part = await self._ready_part()
        except TimeoutError as error:
            raise ServiceUnavailableError(f"the service {name} has not started within {deadline_s} s") from error
        # A task of its own: the caller waits no longer than its deadline, even if the hook ignores its cancellation.
        work = asyncio.ensure_future(self._timed(lambda: hook(part)))
        try:
            await asyncio.wait([work], timeout=deadline_s and max(0.0, deadline_s - (time.monotonic() - began)))
        finally:
            work.cancel()
        problem: BaseException | None
        if not work.done():
            problem = TimeoutError(f"no answer within {deadline_s} s")
        elif work.cancelled():
            problem = asyncio.CancelledError("the service has cancelled its own work")
        else:
            problem = work.exception()
        if problem is None:
            return work.result()
        if isinstance(problem, IrisError):
            raise problem
        self._break_down(part, problem)
        raise ServiceUnavailableError(f"the service {name} has failed: {_in_a_line(problem)}") from problem

    def call_now(self, hook: Callable[[Any], object], kind: type[T]) -> T | None:
        """Return the answer of a hook that is not a coroutine; None if the part fails, or answers something else."""
        if (part := self.part) is None:
            return None
        began = time.perf_counter()
        try:
            if (found := hook(part)) is None or isinstance(found, kind):
                return found
            raise TypeError(f"a hook returned {type(found).__name__}, not {kind.__name__}")
        except BaseException as error:  # SystemExit would end the actor's event loop
            self._break_down(part, error)
            return None
        finally:
            self._note_step(time.perf_counter() - began)

    async def _ready_part(self) -> Any:
        """Return the part. A part that starts for the first time is waited for; a failing one is not.

        Raises:
            ServiceUnavailableError: it is failing, or has been starting for `LONG_START_S`.
        """
        if self.part is None and self._failures == 0:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LONG_START_S):
                    await self._is_ready.wait()
        if self.part is None:
            why = self.health.trouble or "it has not started"
            raise ServiceUnavailableError(f"the service {self.service.name} is failing: {why}")
        return self.part

    def _break_down(self, part: ServicePart[Event], error: BaseException) -> None:
        """Drop a part because of an error in a hook, and have it made anew. Leave the part alone that follows it."""
        if self.part is part and self._broken is not None and not self._broken.done():
            self._broken.set_exception(error)
            self._broken.exception()  # asyncio need not log it when the actor ends first

    async def _run_once(self, broken: "asyncio.Future[None]") -> None:
        self._starts_since = time.monotonic()
        part = self._made = self._make(imported(self._place), self)
        await self._timed(part.started)
        self._starts_since = None
        self._wants_events = type(part).happened is not ServicePart.happened
        self.part, self._trouble = part, None
        self._is_ready.set()
        if not self._wants_events:
            self._waiting.clear()
        works = [until_the_end(asyncio.create_task(work)) for work in (self._deliver(part), self._loop(part))]
        try:
            done, _ = await asyncio.wait([broken, *works], return_when=asyncio.FIRST_COMPLETED)
            for ended in done:
                await ended
        except GeneratorExit:  # nothing can be awaited any more: see `supervise`
            works.clear()
            raise
        finally:
            for work in works:
                work.cancel()
            self._leftover.update(works)
            if works:
                _, self._leftover = await asyncio.wait(self._leftover, timeout=1.0)

    async def _loop(self, part: ServicePart[Event]) -> None:
        await self._timed(part.run)
        await asyncio.Event().wait()

    async def _deliver(self, part: ServicePart[Event]) -> None:
        while True:
            await self._news.wait()
            self._news.clear()
            events = list(self._waiting)
            self._waiting.clear()
            if events and self._wants_events:
                try:
                    await self._timed(lambda events=events: part.happened(events))  # type: ignore[misc]
                except BaseException:
                    self._lost += len(events)
                    raise
                await asyncio.sleep(0)  # else a part that causes events at each event would never let others run

    def _drop(self) -> None:
        part, self._made, self.part, self._starts_since = self._made, None, None, None
        if part is not None:
            try:
                part.close()
            except BaseException:  # SystemExit would end the actor's event loop
                logger.exception("closing the service %s failed", self.service.name)

    def _note_failure(self, error: BaseException) -> None:
        self._failures += 1
        self._trouble = self._last_error = _in_a_line(error)
        self._is_ready.set()
        logger.error("the service %s has failed; the kernel continues without it", self.service.name, exc_info=error)

    async def _timed(self, hook: Callable[[], Awaitable[T]]) -> T:
        """Call a hook. Turn what would end the event loop into an error, and note for how long each step held it."""
        return await _Timed(_awaited(hook), self._note_step)

    def _note_step(self, seconds: float) -> None:
        self._longest_step_s = max(self._longest_step_s, seconds)
        if seconds > LONG_STEP_S:
            logger.warning("the service %s has blocked this process for %.2f s", self.service.name, seconds)


class RunningParts(Generic[Event]):
    """All services' parts in this actor.

    Args:
        services: each service with a part in this actor, and the import path of that part's class.
        make: makes a part of its class.
    """

    def __init__(self, services: Iterable[tuple[Service, str]], make: Callable[[Any, RunningPart[Event]], Any]) -> None:
        self._parts = {service.name: RunningPart(service, place, make) for service, place in services}

    def __iter__(self) -> Iterator[RunningPart[Event]]:
        return iter(self._parts.values())

    def works(self) -> Iterator[tuple[Coroutine[Any, Any, None], str]]:
        """Yield the work of each part, with a phrase that names it, for the actor to run in the background."""
        return ((part.supervise(), f"running the service {part.service.name}") for part in self)

    def note(self, events: Iterable[Event]) -> None:
        """Queue events for all parts. Return at once; raise nothing."""
        if noted := list(events):
            for part in self:
                part.note(noted)

    async def answer(self, service: str, method: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Answer a call of a service. Raise like `RunningPart.answer`.

        Raises:
            ServiceUnavailableError: there is no such service here.
        """
        part = self._parts.get(service) if isinstance(service, str) else None
        if part is None:
            raise ServiceUnavailableError(
                f"there is no service {str(service)[:50]!r} here: it was taken out of iris_ray, or the versions differ"
            )
        return await part.answer(method, args, kwargs)

    def failing(self) -> list[ServiceHealth]:
        """Return the condition of the parts that are failing now."""
        return [one for one in self.health() if one.trouble is not None]

    def health(self) -> list[ServiceHealth]:
        return [part.health for part in self]


def _in_a_line(error: BaseException) -> str:
    try:
        words = str(error).strip()
    except Exception:
        words = "its message can't be read"
    return f"{type(error).__name__}: {(words.splitlines() or ['no message'])[0][:MOST_CHARACTERS]}"


async def _awaited(hook: Callable[[], Awaitable[T]]) -> T:
    work = hook()
    if not inspect.isawaitable(work):
        raise TypeError(f"a hook returned {type(work).__name__}, not a coroutine")
    return await work


@functools.cache
def _checked(method: Callable[..., Any]) -> Callable[..., Awaitable[Any]]:
    return checked(method)


def _call_of(kind: type, service: str, method: str) -> Callable[..., Awaitable[Any]]:
    """Return a method of a part's class that checks its arguments.

    Raises:
        InvalidMessageError: none of the part's Protocols has such a method.
    """
    for protocol in kind.calls:  # type: ignore[attr-defined]
        if getattr(vars(protocol).get(method), SERVICE, None) == service:
            return _checked(getattr(kind, method))
    raise InvalidMessageError(f"the service {service} has no call {method[:50]!r}")


class _Timed(Generic[T]):
    """Awaits a coroutine, and reports how long each of its steps held the event loop."""

    def __init__(self, work: Awaitable[T], report: Callable[[float], None]) -> None:
        self._work = work
        self._report = report

    def __await__(self) -> Generator[Any, Any, T]:
        steps = self._work.__await__()
        send: Callable[[], Any] = functools.partial(next, steps)
        while True:
            began = time.perf_counter()
            try:
                waits_for = send()
            except StopIteration as end:
                result: T = end.value
                return result
            except (SystemExit, KeyboardInterrupt) as error:  # asyncio would end the actor's event loop
                raise RuntimeError(f"a hook raised {type(error).__name__}: {error}") from error
            finally:
                self._report(time.perf_counter() - began)
            try:
                value = yield waits_for
            except BaseException as error:
                send = functools.partial(steps.throw, error)
            else:
                send = functools.partial(steps.send, value)
