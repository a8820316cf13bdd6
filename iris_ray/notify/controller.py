"""The service of notifications in the Controller: it sees what happens to jobs, and hands news to the sender's thread.

It looks at jobs, not at events: what a job has had and nobody was told yet is told. So a Controller that starts anew
misses nothing, and tells what it can't know to be told already once more, with the same id.
"""

import asyncio
import logging
import math
import sqlite3
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from iris_ray.actors.calls.service_parts import RunningPart
from iris_ray.actors.controller.services import Controller, ControllerPart, Happening, Published
from iris_ray.errors import InvalidRequestError, ServiceUnavailableError
from iris_ray.model.job_spec import JobSpec
from iris_ray.model.jobs import Job
from iris_ray.notify.addresses import RefusedAddressError, checked_url
from iris_ray.notify.calls import MOST_LISTED, Notification, NotifyCalls, Tested
from iris_ray.notify.channels import NotSentError
from iris_ray.notify.core import MOST_AGE_S, News, facts_of, news_id, news_of
from iris_ray.notify.delivery import Config, Delivery
from iris_ray.notify.destination import Channel, Destination, What, destinations_of, parse_destination
from iris_ray.notify.messages import clean_lines
from iris_ray.notify.outbox import Entry, Outbox, Outcome
from iris_ray.notify.sender import Sender
from iris_ray.notify.settings import NOTIFY, NOTIFY_COMMANDS, NOTIFY_PRIVATE, NOTIFY_SMTP
from iris_ray.state.events import TaskStateChangedEvent

logger = logging.getLogger(__name__)

LOOK_S = 1.0
WAITS_S = 15.0
"""The interval at which jobs are looked at that wait, or use up a budget."""
SEEN_S = 60.0
"""A setting is seen at the latest this long after it was set."""
TIDY_S = 3600.0
TURN = 200
"""The number of jobs, or of earlier news, that are looked at before other work has its turn."""
TEST_S = 45.0
TESTS_AT_ONCE = 4
LINE_BYTES = 32 << 10


class NotifyInController(ControllerPart):
    """See `NotifyCalls`."""

    calls = (NotifyCalls,)

    def __init__(self, controller: Controller, running: RunningPart[Happening]) -> None:
        super().__init__(controller, running)
        self._state, self._clock = controller.state, controller.clock
        self._delivery = Delivery(self._secret, self._last_lines)
        self._sender: Sender | None = None
        self._outbox: Outbox | None = None
        self._loop = asyncio.get_running_loop()
        self._told: dict[str, dict[tuple[str, What], int]] = {}  # job → place and event → the latest number
        self._watched: dict[str, Job] = {}  # jobs that somebody hears of, also if the state has forgotten them
        self._stalls: dict[str, int] = {}  # job → its latest attempt that has stalled
        self._settings: int | None = None
        self._rule: tuple[Destination, ...] = ()
        self._rule_since = -math.inf  # what happened before is not told by the rule
        self._read: int | None = None  # the version of the jobs that were looked at
        self._looked_at = self._tidied_at = -math.inf  # at all watched jobs
        self._unwritten: list[Entry] = []
        self._counts = {Outcome.SENT: 0, Outcome.GIVEN_UP: 0, Outcome.DROPPED: 0}
        self._trouble: str | None = None
        self._tests = asyncio.Semaphore(TESTS_AT_ONCE)

    async def started(self) -> None:
        try:
            directory = self.controller.directory()
        except OSError as error:
            directory, self._trouble = None, str(error)
        known: list[Entry] = []
        if directory is not None:
            self._outbox = Outbox(directory)
            try:
                known = await self.in_thread(self._outbox.known, self._unended())
            except (OSError, sqlite3.Error) as error:
                self._note_trouble(error)
        self._follow_settings()
        self._sender = Sender(self._delivery.send)
        await self._go_on_from(known)

    def _unended(self) -> list[str]:
        """Return the ids of unfinished jobs. Until they end, the outbox must remember what it has sent about them."""
        return [job_id for job_id, job in self._state.jobs.items() if job.over is None]

    async def _go_on_from(self, known: Sequence[Entry]) -> None:
        """Take up the work of an earlier Controller, or of an earlier part of this one."""
        ago: dict[tuple[str, str, What], float] = {}
        wall = time.time()
        for count, entry in enumerate(reversed(known)):
            if count % TURN == TURN - 1:
                await asyncio.sleep(0)
            news, told = entry.news, self._told.setdefault(entry.news.job_id, {})
            told[news.place, news.what] = max(news.number, told.get((news.place, news.what), 0))
            if entry.outcome is Outcome.SENT and 0 <= (seconds := wall - entry.changed_at) < MOST_AGE_S:
                ago[news.place, news.job_id, news.what] = seconds  # a clock that was set back says nothing
        assert self._sender is not None
        self._sender.offer([one.news for one in reversed(known) if one.outcome is Outcome.WAITS], ago)

    async def happened(self, events: list[Happening]) -> None:
        for event in events:
            if isinstance(event, TaskStateChangedEvent) and event.is_hang:
                job_id, number = event.attempt.job_id, event.attempt.number
                self._stalls[job_id] = max(number, self._stalls.get(job_id, 0))

    async def run(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            await self.look()

    def close(self) -> None:
        super().close()
        if self._sender is not None:
            self._sender.close()
        self._delivery.close()

    def _follow_settings(self) -> None:
        settings = self._state.settings
        if settings.version == self._settings:
            return
        is_first, self._settings = self._settings is None, settings.version
        value = settings.value
        self._delivery.config = Config(value(NOTIFY_COMMANDS), value(NOTIFY_SMTP), value(NOTIFY_PRIVATE))
        if (rule := value(NOTIFY)) != self._rule:
            was_set, now = settings.was_set.get(NOTIFY.name), self._clock.now()
            ago = max(0.0, time.time() - was_set.at) if was_set is not None else 0.0
            ago = ago if is_first else min(ago, SEEN_S)  # a clock that was set must not bring back the past
            self._rule, self._rule_since, self._read = rule, now - ago, None

    # -- what there is to tell ---------------------------------------------------------------------------------------

    async def look(self) -> None:
        """Tell what has happened since the last look."""
        self._follow_settings()
        changes, jobs = self._state.job_changes, self._state.jobs
        changed = None if self._read is None else changes.since(self._read)
        self._read = changes.version
        now = self._clock.now()
        looks_at = dict.fromkeys((*jobs, *self._watched) if changed is None else changed)
        if now >= self._looked_at + WAITS_S:
            self._looked_at = now
            looks_at |= dict.fromkeys(self._watched)
            self._forget()
        news: list[News] = []
        for count, job_id in enumerate(looks_at):
            # a job may have ended and been forgotten since the last look
            if (job := jobs.get(job_id) or self._watched.get(job_id)) is not None:
                try:
                    news += self._news_of(job_id, job, now)
                except Exception:
                    logger.exception("the notifications about %s failed; other jobs are not affected", job_id)
            if count % TURN == TURN - 1:
                await asyncio.sleep(0)
        assert self._sender is not None
        if news:
            self._unwritten += [Entry(one, Outcome.WAITS, time.time()) for one in news]
            self._sender.offer(news)
        await self._write()
        self._publish()

    def _news_of(self, job_id: str, job: Job, now: float) -> list[News]:
        destinations = self._destinations(job)
        if not destinations:
            self._watched.pop(job_id, None)
            return []
        told = self._told.setdefault(job_id, {})
        found = []
        for destination, by_rule in destinations:
            for fact in facts_of(job, destination, now, self._stalls.get(job_id, 0)):
                key = destination.place, fact.what
                if told.get(key, 0) >= fact.number:
                    continue
                told[key] = fact.number
                if now - fact.at > MOST_AGE_S or (by_rule and fact.at < self._rule_since):
                    continue
                found.append(news_of(job, destination, fact, self._clock.wall(fact.at), by_rule))
        if job.over is None:
            self._watched[job_id] = job
        else:
            self._watched.pop(job_id, None)
        return found

    def _destinations(self, job: Job) -> list[tuple[Destination, bool]]:
        """Return who hears of a job, and whether it is by the operator's rule."""
        spec = job.spec
        if spec.spare_for is not None or not (spec.notify or self._rule):
            return []
        own = {one.place: one for one in map(parse_destination, spec.notify)}
        # the rule first: a user's own destination with another key must not take its place
        rule = [replace(one, lines=own[one.place].lines) if one.place in own else one for one in self._rule]
        found = [(one, True) for one in rule] + [(one, False) for one in own.values()]
        return [(one, by_rule) for one, by_rule in found if spec.priority in one.bands]

    def _forget(self) -> None:
        jobs = self._state.jobs
        for by_job in (self._told, self._stalls):
            for job_id in [one for one in by_job if one not in jobs and one not in self._watched]:
                del by_job[job_id]

    # -- the file ----------------------------------------------------------------------------------------------------

    async def _write(self) -> None:
        """Write news, and what has become of them. Keep what can't be written for the next look."""
        assert self._sender is not None
        entries = self._sender.entries
        while entries:
            entry = entries.popleft()
            self._unwritten.append(entry)
            if entry.outcome in self._counts:
                self._counts[entry.outcome] += 1
        if self._outbox is None:
            self._unwritten.clear()
            return
        now = self._clock.now()
        try:
            if self._unwritten:
                batch, self._unwritten = self._unwritten, []
                try:
                    await self.in_thread(self._outbox.write, batch)
                except BaseException:
                    self._unwritten = (batch + self._unwritten)[-entries.maxlen :] if entries.maxlen else []
                    raise
            if now >= self._tidied_at + TIDY_S and self._outbox.path.exists():
                self._tidied_at = now
                await self.in_thread(self._outbox.tidy, time.time(), self._unended())
            self._trouble = None
        except (OSError, sqlite3.Error) as error:
            self._note_trouble(error)

    def _note_trouble(self, error: Exception) -> None:
        words = f"notifications are not written, and may be sent twice after a restart: {error}"
        if words != self._trouble:
            logger.warning("%s", words)
        self._trouble = words

    def _publish(self) -> None:
        assert self._sender is not None
        counts = {outcome.value.replace(" ", "_"): count for outcome, count in self._counts.items()}
        waits = self._sender.waiting
        self.publish(Published(about={**counts, "waiting": waits, "trouble": self._trouble}))

    # -- secrets and output ------------------------------------------------------------------------------------------

    def _secret(self, name: str, news: News | None) -> str:
        """Return a secret's value for news; blocks. Raise like `SecretStore.value`."""
        from iris_ray.secrets.store import SecretStore  # another service, which may have been taken out

        store = SecretStore(self.controller.directory)
        if news is None or news.by_rule:
            return store.value_for_operators(name).decode().strip()
        return store.value(name, news.user, news.team).decode().strip()

    async def _last_lines(self, news: News) -> Sequence[str]:
        """Return the last lines of a job's output. It is called in the sender's thread."""
        asking = asyncio.run_coroutine_threadsafe(self._read_lines(news), self._loop)
        return await asyncio.wrap_future(asking)

    async def _read_lines(self, news: News) -> Sequence[str]:
        from iris_ray.logs.calls import LogCalls
        from iris_ray.logs.core import LogPosition

        attempt = news.number if news.what is What.STALLED else None
        at = LogPosition(attempt=attempt, tail_lines=news.lines)
        log = await self.controller.ask(LogCalls.fetch_task_logs, news.job_id, news.task, at, LINE_BYTES)
        names = self._state.jobs[news.job_id].spec.stored_secrets  # without their values, there are no lines
        secrets = [await self.in_thread(self._secret, name, news) for name in names]
        return clean_lines(log.text, news.lines, secrets)

    # -- calls and jobs ----------------------------------------------------------------------------------------------

    async def admit(self, spec: JobSpec) -> None:
        """Refuse a job with a destination that is invalid, or that its user may not use."""
        for destination in destinations_of(spec):
            await self._require_usable(destination, spec.user, spec.team)

    async def _require_usable(self, destination: Destination, user: str, team: str) -> None:
        config, name, place = self._config(), destination.name, destination.place
        if destination.channel is Channel.COMMAND and name not in config.commands:
            raise InvalidRequestError(
                f"{place}: the cluster has no such command; an operator can add it:"
                " iris-ray cluster settings set notify_commands=…"
            )
        if destination.channel is Channel.EMAIL:
            if config.smtp is None:
                raise InvalidRequestError(
                    f"{place}: the cluster has no SMTP server; an operator can name one:"
                    " iris-ray cluster settings set notify_smtp=…"
                )
            if not config.smtp.sends_to(name):
                raise InvalidRequestError(
                    f"{place}: e-mail is sent to {', '.join(sorted(config.smtp.domains))} only; see notify_smtp"
                )
        for secret in destination.secret_names:
            who = _test_news(destination, user, team, 0.0)
            try:
                value = await self.in_thread(self._secret, secret, who)
            except ImportError:
                raise InvalidRequestError(f"{place}: the service of secrets was taken out of iris_ray") from None
            if secret != destination.name:
                continue
            try:
                checked_url(value, config.private)
            except RefusedAddressError as error:
                raise InvalidRequestError(f"{place}: {error}") from None

    def _config(self) -> Config:
        self._follow_settings()
        return self._delivery.config

    async def list_notifications(self, job_id: str | None, most: int) -> list[Notification]:
        if self._outbox is None:
            return []
        try:
            found = await self.in_thread(self._outbox.listed, job_id, min(max(most, 1), MOST_LISTED))
        except (OSError, sqlite3.Error) as error:
            raise ServiceUnavailableError(f"the file of notifications can't be read: {error}") from None
        return list(map(_shown, found))

    async def test_notification(self, destination: str, user: str) -> Tested:
        parsed = parse_destination(destination)
        await self._require_usable(parsed, user, "")
        assert self._sender is not None
        news = _test_news(parsed, user, "", time.time())
        async with self._tests:
            sending = self._sender.call(partial(self._delivery.send, [news], 0))
            try:
                async with asyncio.timeout(TEST_S):
                    await asyncio.wrap_future(sending)
            except NotSentError as error:
                return Tested(parsed.place, str(error))
            except TimeoutError:
                return Tested(parsed.place, f"no answer within {TEST_S:g} s")
        return Tested(parsed.place, "")


def _test_news(destination: Destination, user: str, team: str, at: float) -> News:
    text = f"{user or 'somebody'} tests this destination of notifications"
    identity = news_id(f"test {user}", What.SUCCEEDED, int(at * 1000), destination.place)
    news = News(identity, What.SUCCEEDED, 1, "test", "test", user, team, "succeeded", at, text, destination.place)
    return replace(news, key=destination.key)


def _shown(entry: Entry) -> Notification:
    news = entry.news
    return Notification(
        news.id,
        news.what.value,
        news.job_id,
        news.name,
        news.user,
        news.at,
        news.text,
        news.place,
        entry.outcome.value,
        entry.changed_at,
        entry.tries,
        entry.error,
    )
