"""The sender's thread: digests, the pace, errors that pass, receivers that hang, and bounds."""

import asyncio
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from iris_ray.errors import NotPermittedError, SecretNotFoundError
from iris_ray.notify import sender as sender_module
from iris_ray.notify.channels import NotSentError
from iris_ray.notify.core import News, news_id
from iris_ray.notify.delivery import Config, Delivery
from iris_ray.notify.destination import What
from iris_ray.notify.outbox import Outcome
from iris_ray.notify.sender import FOR_PROGRAMS, Pace, Sender
from iris_ray.notify.settings import NOTIFY_PRIVATE
from tests.support.receivers import Webhook
from tests.support.waiting import wait_until
from tests.unit.notify.test_messages import some_news

FAST = Pace(gather_s=0.1, single_s=0.01, digest_s=0.1, longest_digest_s=0.2, again_s=0.05, longest_again_s=0.2)


class Receiver:
    """Takes messages. ``errors`` are raised first, each once; places in ``hanging`` never answer."""

    def __init__(self) -> None:
        self.got: list[Sequence[News]] = []
        self.dropped = 0
        self.errors: list[Exception] = []
        self.hanging: set[str] = set()

    async def send(self, news: Sequence[News], more: int) -> None:
        if news[0].place in self.hanging:
            await asyncio.sleep(1000)
        if self.errors:
            raise self.errors.pop(0)
        self.got.append(news)
        self.dropped += more


@contextmanager
def running(receiver: Receiver, pace: Pace = FAST) -> Iterator[Sender]:
    sender = Sender(receiver.send, pace)
    try:
        yield sender
    finally:
        sender.close()
        if sender._thread is not None:
            sender._thread.join(10)
            assert not sender._thread.is_alive()


def outcomes(sender: Sender) -> list[Outcome]:
    return [entry.outcome for entry in list(sender.entries)]


def test_few_news_come_one_by_one_and_many_as_digest() -> None:
    receiver = Receiver()
    with running(receiver) as sender:
        sender.offer([some_news(f"job-{n}") for n in range(3)])
        wait_until(lambda: len(receiver.got) == 3)
        assert [len(news) for news in receiver.got] == [1, 1, 1]
        sender.offer([some_news(f"more-{n}") for n in range(10_000)])
        wait_until(lambda: sum(map(len, receiver.got)) == 10_003)
        assert len(receiver.got) <= 6
        wait_until(lambda: outcomes(sender).count(Outcome.SENT) == 10_003)


def test_program_gets_every_one_in_parts() -> None:
    receiver = Receiver()
    with running(receiver) as sender:
        news = [some_news(f"job-{n}", place="http:HOOK", key="KEY") for n in range(1000)]
        sender.offer(news)
        wait_until(lambda: sum(map(len, receiver.got)) == 1000)
        assert {one.id for batch in receiver.got for one in batch} == {one.id for one in news}
        assert max(map(len, receiver.got)) == FOR_PROGRAMS


def test_message_has_news_of_one_user_and_key_only() -> None:
    """The store checks the audience of a secret for one user, so one message must not speak for two."""
    receiver = Receiver()
    with running(receiver) as sender:
        sender.offer([
            some_news(f"job-{n}", place="http:HOOK", key=f"KEY{n % 2}", user=user)
            for n, user in enumerate(["ann"] * 4 + ["olga"] * 4)
        ])  # fmt: skip
        wait_until(lambda: sum(map(len, receiver.got)) == 8)
        assert all(len({(one.user, one.key) for one in batch}) == 1 for batch in receiver.got)


@pytest.mark.parametrize("again", [True, False])
def test_error_that_may_pass_is_tried_again(again: bool) -> None:
    receiver = Receiver()
    receiver.errors += [NotSentError("HTTP 503", again)] * 3
    with running(receiver) as sender:
        sender.offer([some_news()])
        last = Outcome.SENT if again else Outcome.GIVEN_UP
        wait_until(lambda: last in outcomes(sender))
        assert outcomes(sender) == [Outcome.WAITS] * 3 * again + [last]
        assert sender.entries[-1].tries == (4 if again else 1)
        assert len(receiver.got) == again


def test_receiver_that_always_fails_is_given_up() -> None:
    receiver = Receiver()
    receiver.errors += [NotSentError("HTTP 503") for _ in range(10_000)]
    with running(receiver, Pace(0.01, again_s=0.01, longest_again_s=0.05, give_up_s=0.5)) as sender:
        sender.offer([some_news()])
        wait_until(lambda: Outcome.GIVEN_UP in outcomes(sender))
        assert sender.entries[-1].error == "HTTP 503"


def test_fault_of_ours_shows_no_text_and_stops_nothing(caplog: pytest.LogCaptureFixture) -> None:
    receiver = Receiver()
    receiver.errors += [ValueError("https://hooks/s3cr3t")]
    with running(receiver) as sender:
        sender.offer([some_news("a"), some_news("b", place="slack:OTHER")])
        wait_until(lambda: {Outcome.GIVEN_UP, Outcome.SENT} <= set(outcomes(sender)))
    assert "s3cr3t" not in caplog.text
    assert not any("s3cr3t" in entry.error for entry in sender.entries)


def test_same_event_of_job_is_sent_once_in_a_while_with_count() -> None:
    receiver, pace = Receiver(), Pace(gather_s=0.01, single_s=0.01, often_s=1.5)
    with running(receiver, pace) as sender:
        for number in range(1, 6):
            sender.offer([lost(number)])
            wait_until(lambda: receiver.got)
        began = time.monotonic()
        wait_until(lambda: len(receiver.got) == 2)
        assert time.monotonic() - began > 0.5
        assert [(one.number, one.times) for (one,) in receiver.got] == [(1, 1), (5, 4)]
        sender.offer([lost(1, "other")])
        wait_until(lambda: len(receiver.got) == 3)
        wait_until(lambda: outcomes(sender).count(Outcome.SENT) == 3)
        assert outcomes(sender).count(Outcome.MERGED) == 3


def lost(number: int, job_id: str = "job") -> News:
    place = "slack:HOOK"
    about = "n", "ann", "", "running", 1.0, "lost", place
    return News(news_id(job_id, What.LOST, number, place), What.LOST, number, job_id, *about)


def test_news_that_were_sent_by_earlier_controller_count() -> None:
    receiver = Receiver()
    with running(receiver) as sender:
        sender.offer([lost(2), lost(1, "other")], {("slack:HOOK", "job", What.LOST): 10.0})
        wait_until(lambda: receiver.got)
        time.sleep(0.3)
        assert [one.job_id for (one,) in receiver.got] == ["other"]


def test_hanging_receivers_hold_up_nobody_else() -> None:
    receiver = Receiver()
    receiver.hanging = {f"slack:BAD{n}" for n in range(200)}
    with running(receiver) as sender:
        began = time.monotonic()
        sender.offer([some_news(f"job-{n}", place=place, user="eve") for n, place in enumerate(receiver.hanging)])
        assert time.monotonic() - began < 1
        sender.offer([some_news("good", user="ann")])
        wait_until(lambda: receiver.got)
        assert receiver.got[0][0].job_id == "good"


def test_user_with_most_news_loses_the_oldest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sender_module, "MOST_WAITING", 100)
    receiver = Receiver()
    with running(receiver, Pace(gather_s=2.0)) as sender:
        sender.offer([some_news("good", user="ann", place="slack:GOOD")])
        sender.offer([some_news(f"job-{n}", user="eve") for n in range(500)])
        wait_until(lambda: len(receiver.got) == 2)
        digest = next(news for news in receiver.got if news[0].user == "eve")
        assert (len(digest), digest[-1].job_id, receiver.dropped) == (99, "job-499", 401)
        assert {news[0].user for news in receiver.got} == {"ann", "eve"}


def test_user_with_most_places_loses_the_oldest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of a job's destinations may be another mailbox, so places and messages on their way have a limit as well."""
    monkeypatch.setattr(sender_module, "MOST_PLACES", 10)
    receiver = Receiver()
    bad = [f"email:eve{n}@example.org" for n in range(50)]
    receiver.hanging = {"slack:SLOW", *bad}
    with running(receiver) as sender:
        sender.offer([some_news("good", user="ann", place="slack:SLOW")])
        for place in bad:
            sender.offer([some_news(f"job of {place}", user="eve", place=place)])
        wait_until(lambda: outcomes(sender).count(Outcome.DROPPED) == 41)
        assert len(sender._places) == 10
        assert "slack:SLOW" in sender._places
        sender.offer([some_news("fine", user="olga")])
        wait_until(lambda: receiver.got)


def test_place_of_several_users_is_nobodys_to_lose(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user who was first to send to a channel, and then opens many mailboxes, does not close it for the others."""
    monkeypatch.setattr(sender_module, "MOST_PLACES", 10)
    receiver = Receiver()
    bad = [f"email:eve{n}@example.org" for n in range(50)]
    receiver.hanging = {"slack:TEAM", *bad}
    with running(receiver) as sender:
        sender.offer([some_news("first", user="eve", place="slack:TEAM")])
        sender.offer([some_news("good", user="ann", place="slack:TEAM")])
        for place in bad:
            sender.offer([some_news(f"job of {place}", user="eve", place=place)])
        wait_until(lambda: outcomes(sender).count(Outcome.DROPPED) == 41)
        assert "slack:TEAM" in sender._places
        assert {entry.news.user for entry in sender.entries} == {"eve"}


def test_user_who_may_not_use_a_channel_any_more_holds_up_nobody(hook: Webhook) -> None:
    def secret(name: str, news: News | None) -> str:
        if news is not None and news.user == "eve":
            raise NotPermittedError(f"{name} is for others")
        return hook.url

    async def no_lines(_: News) -> Sequence[str]:
        return []

    delivery = Delivery(secret, no_lines)
    delivery.config = Config(private=NOTIFY_PRIVATE.parse("127.0.0.1"))
    sender = Sender(delivery.send, FAST)
    sender.offer([some_news(f"job-{n}", user="eve" if n % 2 else "ann") for n in range(10)])
    wait_until(lambda: len(sender.entries) == 10)
    by_user = {(entry.news.user, entry.outcome) for entry in sender.entries}
    assert by_user == {("ann", Outcome.SENT), ("eve", Outcome.GIVEN_UP)}
    assert hook.got[0].json["text"].startswith("5 events of jobs")
    sender.close()
    delivery.close()


def test_key_that_was_removed_holds_up_nobody_with_another_key(hook: Webhook) -> None:
    def secret(name: str, _: News | None) -> str:
        if name == "REMOVED":
            raise SecretNotFoundError(f"no {name}")
        return hook.url if name == "HOOK" else "key"

    async def no_lines(_: News) -> Sequence[str]:
        return []

    delivery = Delivery(secret, no_lines)
    delivery.config = Config(private=NOTIFY_PRIVATE.parse("127.0.0.1"))
    sender = Sender(delivery.send, FAST)
    sender.offer([some_news("a", place="http:HOOK", user="eve", key="REMOVED")])
    sender.offer([some_news("b", place="http:HOOK", user="ann", key="KEY")])
    wait_until(lambda: len(sender.entries) == 2, 10)
    assert [(entry.news.user, entry.outcome, entry.error) for entry in sender.entries] == [
        ("eve", Outcome.GIVEN_UP, "the secret REMOVED was removed"),
        ("ann", Outcome.SENT, ""),
    ]
    sender.close()
    delivery.close()


def test_names_that_resolve_slowly_hold_up_no_other_user(hook: Webhook, monkeypatch: pytest.MonkeyPatch) -> None:
    resolve, goes_on = socket.getaddrinfo, threading.Event()

    def slowly(host: str, *more: Any, **options: Any) -> Any:
        if host.startswith("slow"):
            goes_on.wait(60)
        return resolve(host, *more, **options)

    async def no_lines(_: News) -> Sequence[str]:
        return []

    monkeypatch.setattr(socket, "getaddrinfo", slowly)
    delivery = Delivery(lambda name, _: hook.url if name == "GOOD" else "https://slow.invalid/", no_lines)
    delivery.config = Config(private=NOTIFY_PRIVATE.parse("127.0.0.1"))
    sender = Sender(delivery.send, FAST)
    sender.offer([some_news(place=f"slack:BAD{n}", user="eve") for n in range(20)])
    time.sleep(1)
    sender.offer([some_news(place="slack:GOOD", user="ann")])
    wait_until(lambda: hook.got, 10)
    goes_on.set()
    sender.close()
    delivery.close()


def test_closed_sender_takes_nothing_and_ends_its_thread() -> None:
    receiver = Receiver()
    receiver.hanging = {"slack:HOOK"}
    before = threading.active_count()
    with running(receiver) as sender:
        sender.offer([])
        assert threading.active_count() == before, "nobody is told of anything"
        sender.offer([some_news()])
    sender.offer([some_news("late")])
    sender.close()
    Sender(receiver.send).close()
    wait_until(lambda: threading.active_count() <= before)
