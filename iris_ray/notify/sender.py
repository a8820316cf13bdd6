"""Sends notifications from a thread of its own, so that no receiver and no resolver of names holds up the Controller.

News wait by place. A place gets one message at a time; while it gets none, news gather and become one message. What is
to be sent again waits there as well, and holds up no other place.
"""

import asyncio
import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

from tenacity import AsyncRetrying, RetryCallState, retry_if_exception, stop_after_delay, wait_random_exponential

from iris_ray.fair_limits import Places, Turns
from iris_ray.notify.channels import NotAllowedError, NotSentError
from iris_ray.notify.core import MOST_AGE_S, OFTEN_S, News, merged
from iris_ray.notify.destination import Channel, What
from iris_ray.notify.outbox import Entry, Outcome

logger = logging.getLogger(__name__)

T = TypeVar("T")

MOST_WAITING: Final = 20_000
"""The limit for news that wait. Beyond it, the user with most loses the oldest."""
MOST_PLACES: Final = 2000
"""The limit for places with news, or to which some were sent within the hour. Beyond it, the user with most loses the
oldest, with its news."""
SINGLES: Final = 3
"""People get this number of messages in a row; more news that wait become a digest."""
FOR_PROGRAMS: Final = 100
"""The limit for the news in a message to a program."""
AT_ONCE: Final = 16
THREADS: Final = 4 * AT_ONCE
"""The threads that read secrets and resolve names. A resolver keeps its thread for longer than a try lasts."""
ENTRIES_KEPT: Final = 4 * MOST_WAITING
REPEATS: Final = frozenset({What.LOST, What.STALLED, What.WAITING})
"""Events that a job may have often."""


@dataclass(frozen=True, slots=True)
class Pace:
    """Times between messages, in seconds.

    Attributes:
        gather_s: a place without news gets the first one after this time, with all that came meanwhile.
        single_s: after a message with one event.
        digest_s, longest_digest_s: after a digest, and after several in a row, each time twice as long.
        often_s: see `OFTEN_S`.
        again_s, longest_again_s: the mean pause before the second try, and the longest before any.
        give_up_s: the time after which nothing is tried again.
    """

    gather_s: float = 1.0
    single_s: float = 1.0
    digest_s: float = 10.0
    longest_digest_s: float = 300.0
    often_s: float = OFTEN_S
    again_s: float = 2.0
    longest_again_s: float = 900.0
    give_up_s: float = MOST_AGE_S


@dataclass(slots=True)
class _Place:
    """News for one place.

    Attributes:
        owner: the user of all its news; its own name if they are of several users, or of an earlier Controller's.
        waiting: by job and event, the news and when they may be sent.
        free_at: when the next message may be sent.
        digests: digests in a row.
        dropped: news that were dropped and of which nobody was told.
        sent: when news of a job and event were last sent.
        changed: is set when news came.
    """

    owner: str
    waiting: dict[tuple[str, What], tuple[News, float]] = field(default_factory=dict)
    free_at: float = 0.0
    digests: int = 0
    dropped: int = 0
    sent: dict[tuple[str, What], float] = field(default_factory=dict)
    changed: asyncio.Event = field(default_factory=asyncio.Event)


class Sender:
    """A thread that sends news.

    Args:
        send: sends news of one place in one message, with the number of those that were dropped; raises NotSentError.
        pace: the times between messages.

    Attributes:
        entries: what has become of news, to be taken away and written.
    """

    def __init__(self, send: Callable[[Sequence[News], int], Awaitable[None]], pace: Pace | None = None) -> None:
        self.entries: deque[Entry] = deque(maxlen=ENTRIES_KEPT)
        self.waiting = 0
        self._send = send
        self._pace = pace or Pace()
        self._places: dict[str, _Place] = {}
        self._bounded: Places[tuple[str, tuple[str, What]]] = Places(MOST_WAITING)
        self._open: Places[str] = Places(MOST_PLACES)
        self._turns = Turns(AT_ONCE)
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._starting = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def offer(self, news: Sequence[News], sent_ago_s: Mapping[tuple[str, str, What], float] | None = None) -> None:
        """Queue news. Return at once; from any thread.

        Args:
            news: in the order of their events.
            sent_ago_s: by place, job and event: for how many seconds the last such news have been sent; from an
                earlier Controller.
        """
        if news or sent_ago_s:
            with contextlib.suppress(RuntimeError):  # it has been closed
                self._running().call_soon_threadsafe(self._take, list(news), dict(sent_ago_s or {}))

    def call(self, work: Callable[[], Awaitable[T]]) -> "Future[T]":
        """Run a coroutine in the thread, such as a test of a destination."""

        async def once() -> T:
            return await work()

        loop = self._running()
        return asyncio.run_coroutine_threadsafe(once(), loop)

    def close(self) -> None:
        """End the thread. News that wait are those of the next sender, if they are in the file."""
        with self._starting, contextlib.suppress(RuntimeError):
            if self._loop is not None and not self._is_closed:  # a second stop would break off what the first one ends
                self._loop.call_soon_threadsafe(self._loop.stop)
            self._is_closed = True

    def _running(self) -> asyncio.AbstractEventLoop:
        """Return the thread's loop. The first caller starts it: most clusters send no notifications.

        Raises:
            RuntimeError: the sender has been closed.
        """
        with self._starting:
            if self._is_closed:
                raise RuntimeError("the sender has been closed")
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._loop.set_default_executor(ThreadPoolExecutor(THREADS, thread_name_prefix="notifications"))
                self._thread = threading.Thread(target=self._run, args=[self._loop], name="notifications", daemon=True)
                self._thread.start()
            return self._loop

    # -- in the thread -----------------------------------------------------------------------------------------------

    @staticmethod
    def _run(loop: asyncio.AbstractEventLoop) -> None:
        asyncio.set_event_loop(loop)
        try:
            loop.run_forever()
        finally:
            for task in asyncio.all_tasks(loop):
                task.cancel()
            loop.run_until_complete(asyncio.sleep(0.05))
            loop.close()

    def _take(self, news: Iterable[News], sent_ago_s: Mapping[tuple[str, str, What], float]) -> None:
        now = time.monotonic()
        for (name, job_id, what), ago in sent_ago_s.items():
            self._place(name, name, now).sent[job_id, what] = now - ago
        for one in news:
            place = self._place(one.place, one.user, now)
            if one.user != place.owner and place.owner != one.place:  # news of several users: it is nobody's to lose
                place.owner = one.place
                self._open.remove(one.place)
                self._open.add(one.place, place.owner)
            due = now
            if one.what in REPEATS and one.thread in place.sent:
                due = place.sent[one.thread] + self._pace.often_s
            if one.thread in place.waiting:
                before, due = place.waiting[one.thread]
                self._became(before, Outcome.MERGED)
                one = merged(before, one)
                self._bounded.remove((one.place, one.thread))
            place.waiting[one.thread] = one, due
            lost = self._bounded.add((one.place, one.thread), one.user)
            if lost is not None:
                self._drop(*lost)
            place.changed.set()
        self.waiting = len(self._bounded)

    def _drop(self, name: str, thread: tuple[str, What]) -> None:
        found = self._places[name]
        dropped, _ = found.waiting.pop(thread)
        found.dropped += 1
        self._became(dropped, Outcome.DROPPED)

    def _place(self, name: str, owner: str, now: float) -> _Place:
        if name not in self._places:
            if (lost := self._open.add(name, owner)) is not None:
                self._close_place(lost)
            place = self._places[name] = _Place(owner, free_at=now + self._pace.gather_s)
            self._tasks[name] = asyncio.get_running_loop().create_task(self._serve(name, place))
        return self._places[name]

    def _close_place(self, name: str) -> None:
        """Drop a place with the news that wait for it. A message on its way is dropped as well."""
        for thread in list(self._places[name].waiting):
            self._bounded.remove((name, thread))
            self._drop(name, thread)
        del self._places[name]
        self._tasks.pop(name).cancel()

    async def _serve(self, name: str, place: _Place) -> None:
        """Send what waits for a place, until nothing has waited for `OFTEN_S`."""
        while True:
            now = time.monotonic()
            next_due = min((due for _, due in place.waiting.values()), default=now + self._pace.often_s)
            if (pause_s := max(next_due, place.free_at) - now) > 0:
                place.changed.clear()
                try:
                    async with asyncio.timeout(pause_s):
                        await place.changed.wait()
                except TimeoutError:
                    if not place.waiting:
                        self._open.remove(name)
                        del self._places[name], self._tasks[name]
                        return
                await asyncio.sleep(max(0.0, place.free_at - time.monotonic()))
                continue
            batch = self._next(name, place, now)
            more, place.dropped = place.dropped, 0
            await self._deliver(name, batch, more)
            self._note_sent(place, batch)

    def _next(self, name: str, place: _Place, now: float) -> list[News]:
        """Take the news of the next message out of those that wait."""
        ready = [news for news, due in place.waiting.values() if due <= now]
        if Channel(name.partition(":")[0]).is_for_programs:
            # a message is signed with one key, for one audience of secrets
            first = ready[0]
            ready = [one for one in ready if (one.key, one.user, one.team, one.by_rule) == _signer(first)]
            batch = ready[:FOR_PROGRAMS]
        else:
            batch = ready[:1] if len(ready) <= SINGLES else ready
        for one in batch:
            del place.waiting[one.thread]
            self._bounded.remove((name, one.thread))
        self.waiting = len(self._bounded)
        return batch

    async def _deliver(self, name: str, batch: Sequence[News], more: int) -> None:
        """Send a message; try again after errors that may pass. Note what has become of it."""
        pace, tries = self._pace, 0

        def pause_s(state: RetryCallState) -> float:
            error = state.outcome.exception() if state.outcome else None
            self._note_try(batch, state.attempt_number, error)
            usual = wait_random_exponential(multiplier=pace.again_s, min=pace.again_s / 2, max=pace.longest_again_s)
            return max(usual(state), error.after_s if isinstance(error, NotSentError) else 0.0)

        async def once() -> None:
            nonlocal tries
            async with self._turns.turn(batch[0].user):
                tries += 1
                await self._send(batch, more)

        try:
            policy: dict[str, Any] = {"stop": stop_after_delay(pace.give_up_s), "wait": pause_s, "reraise": True}
            await AsyncRetrying(retry=retry_if_exception(_may_pass), **policy)(once)
        except NotAllowedError as error:
            self._became_all([one for one in batch if one.id in error.ids], Outcome.GIVEN_UP, tries, str(error))
            if others := [one for one in batch if one.id not in error.ids]:
                await self._deliver(name, others, more)
        except NotSentError as error:
            logger.warning("%d notifications for %s are given up: %s", len(batch), name, error)
            self._became_all(batch, Outcome.GIVEN_UP, tries, str(error))
        except Exception as error:  # its text may have the address of a webhook
            logger.error("%d notifications for %s can't be sent: %s", len(batch), name, type(error).__name__)
            self._became_all(batch, Outcome.GIVEN_UP, tries, type(error).__name__)
        except asyncio.CancelledError:
            if name not in self._places:  # else the thread ends, and the next one sends them
                self._became_all(batch, Outcome.DROPPED, tries, "")
            raise
        else:
            self._became_all(batch, Outcome.SENT, tries, "")

    def _note_sent(self, place: _Place, batch: Sequence[News]) -> None:
        now, pace = time.monotonic(), self._pace
        place.digests = place.digests + 1 if len(batch) > SINGLES else 0
        pause_s = min(pace.digest_s * 2 ** min(place.digests - 1, 20), pace.longest_digest_s)
        is_digest = place.digests and not Channel(batch[0].place.partition(":")[0]).is_for_programs
        place.free_at = now + (pause_s if is_digest else pace.single_s)
        place.sent |= {one.thread: now for one in batch if one.what in REPEATS}
        for thread in place.waiting.keys() & place.sent.keys():  # it came while the message was on its way
            news, due = place.waiting[thread]
            place.waiting[thread] = news, max(due, place.sent[thread] + pace.often_s)
        place.sent = {thread: at for thread, at in place.sent.items() if at > now - pace.often_s}

    def _note_try(self, batch: Sequence[News], tries: int, error: BaseException | None) -> None:
        self._became_all(batch[:FOR_PROGRAMS], Outcome.WAITS, tries, str(error))

    def _became_all(self, batch: Sequence[News], outcome: Outcome, tries: int, error: str) -> None:
        for one in batch:
            self._became(one, outcome, tries, error)

    def _became(self, news: News, outcome: Outcome, tries: int = 0, error: str = "") -> None:
        self.entries.append(Entry(news, outcome, time.time(), tries, error))


def _signer(news: News) -> tuple[str, str, str, bool]:
    return news.key, news.user, news.team, news.by_rule


def _may_pass(error: BaseException) -> bool:
    return isinstance(error, NotSentError) and error.again
