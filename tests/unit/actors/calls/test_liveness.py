"""Who has stopped answering: members that are plain coroutines, or real hosts that watch each other."""

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError, ActorUnschedulableError, OutOfMemoryError, RayError

from iris_ray.actors.calls.asking import Actor
from iris_ray.actors.calls.liveness import (
    FIRST_PING_S,
    MOST_ASKED,
    PING_S,
    RETRY_S,
    SLICE_UNASKED_S,
    Contact,
    FailureDetector,
    HostWatch,
    SharedWatches,
    groups_of,
)
from iris_ray.actors.host.host_actor import TPUHostActor
from iris_ray.actors.protocol.host_interface import HostInterface
from iris_ray.actors.protocol.messages import HostPlace
from tests.support.virtual_time import block, in_virtual_time, now, run

# -- the failure detector, on a clock that costs no time --------------------------------------------------------------


LIMIT_S = 5.0
Member = Callable[[], Awaitable[object]]


async def answers() -> bool:
    return True


async def answers_late() -> bool:
    await asyncio.sleep(LIMIT_S / 2)
    return True


async def never_answers() -> None:
    await asyncio.Event().wait()


async def died() -> None:
    raise ActorDiedError


async def is_unavailable() -> None:
    raise ActorUnavailableError("for now", None)


def refuses_at_once() -> Awaitable[object]:
    raise ValueError("before anything is awaited")


async def is_cancelled() -> None:
    raise asyncio.CancelledError


@contextmanager
def watching(limit_s: float = LIMIT_S, since_first: bool = False, **members: Member) -> Iterator[FailureDetector[str]]:
    watch = FailureDetector(lambda name: members[name](), members, limit_s, since_first)
    try:
        yield watch
    finally:
        watch.stop()


@in_virtual_time
async def test_answering_member_is_never_lost() -> None:
    with watching(prompt=answers, late=answers_late) as watch:
        await asyncio.sleep(4 * LIMIT_S)
        assert watch.silent == {}


@in_virtual_time
@pytest.mark.parametrize("silent", [never_answers, is_unavailable, refuses_at_once, is_cancelled])
async def test_silent_member_is_lost_at_limit_not_before(silent: Member) -> None:
    with watching(silent=silent) as watch:
        await asyncio.sleep(LIMIT_S - 0.01)
        assert watch.silent == {}
        await asyncio.wait_for(watch.found(), 60)
        assert LIMIT_S - 1e-6 <= now() <= LIMIT_S + RETRY_S + 1e-6
        assert watch.silent == {"silent": "has not answered for 5 s"}


async def test_failure_detector_works_in_real_time() -> None:
    began = time.monotonic()
    with watching(limit_s=0.2, silent=never_answers, prompt=answers) as watch:
        await asyncio.wait_for(watch.found(), 10)
        assert time.monotonic() - began >= 0.2
        assert watch.silent == {"silent": "has not answered for 0.2 s"}


@in_virtual_time
async def test_member_falling_silent_is_lost_limit_after_answer() -> None:
    last, stops = 0.0, 2 * LIMIT_S

    async def stops_answering() -> None:
        nonlocal last
        if now() > stops:
            await never_answers()
        last = now()

    with watching(member=stops_answering) as watch:
        await asyncio.wait_for(watch.found(), 60)
        assert now() == pytest.approx(last + LIMIT_S)
        assert stops - PING_S < last <= stops


@in_virtual_time
async def test_member_answering_again_before_limit_is_kept() -> None:
    async def is_away_for_a_while() -> None:
        if now() % LIMIT_S < LIMIT_S / 2:
            raise ActorUnavailableError("for now", None)

    with watching(member=is_away_for_a_while) as watch:
        await asyncio.sleep(4 * LIMIT_S)
        assert watch.silent == {}


@in_virtual_time
@pytest.mark.parametrize("since_first", [False, True])
@pytest.mark.parametrize(
    "error",
    [ActorDiedError(), OutOfMemoryError("killed"), ActorUnschedulableError("its node is dead")],
    ids=["died", "killed for memory", "never started"],
)
async def test_member_whose_actor_is_gone_is_lost_at_once(error: RayError, since_first: bool) -> None:
    async def died() -> None:
        raise error

    with watching(since_first=since_first, dead=died, prompt=answers) as watch:
        await asyncio.wait_for(watch.found(), 60)
        assert now() == FIRST_PING_S
        assert list(watch.silent) == ["dead"]
        assert type(error).__name__ in watch.silent["dead"]
        assert not watch.hung


@in_virtual_time
async def test_one_silent_member_does_not_hide_another() -> None:
    with watching(dead=died, silent=never_answers, prompt=answers) as watch:
        await asyncio.wait_for(watch.found(), 60)
        assert list(watch.silent) == ["dead"]
        await asyncio.wait_for(watch.found(), 60)  # it stays found
        assert now() == FIRST_PING_S
        await asyncio.sleep(2 * LIMIT_S)
        assert set(watch.silent) == {"dead", "silent"}


@in_virtual_time
@pytest.mark.parametrize("before_s", [0.0, 0.5, 1.0, 1.2, 2.4, 2.5, 3.0, 3.5])
async def test_blocked_event_loop_time_counts_against_no_member(before_s: float) -> None:
    """Whenever it begins: before the next question, or while one is under way whose answer would come in time."""
    with watching(prompt=answers, late=answers_late) as watch:
        await asyncio.sleep(before_s)
        block(1.6 * LIMIT_S)
        await asyncio.sleep(2 * LIMIT_S)
        assert watch.silent == {}


@in_virtual_time
async def test_silent_member_is_found_despite_blocked_event_loop() -> None:
    with watching(silent=never_answers, prompt=answers) as watch:
        await asyncio.sleep(1.0)
        block(2 * LIMIT_S)
        await asyncio.wait_for(watch.found(), LIMIT_S)
        assert list(watch.silent) == ["silent"]


@in_virtual_time
@pytest.mark.parametrize("after_s", [0.0, 0.05, 2 * LIMIT_S])
async def test_stop_leaves_no_task_behind(after_s: float) -> None:
    with watching(a=answers, b=never_answers, c=died, d=is_unavailable):
        await asyncio.sleep(after_s)
    for _ in range(100):
        await asyncio.sleep(0)
    assert asyncio.all_tasks() == {asyncio.current_task()}


@in_virtual_time
async def test_watch_without_members_finds_nobody() -> None:
    with watching() as watch:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(watch.found(), 60)
        assert watch.silent == {}


@in_virtual_time
async def test_starting_member_is_not_lost_before_first_answer() -> None:
    asked = 0

    async def starts_late_and_hangs_then() -> None:
        nonlocal asked
        asked += 1
        await asyncio.sleep(10 * LIMIT_S if asked == 1 else 1000 * LIMIT_S)

    with watching(since_first=True, new=starts_late_and_hangs_then, starting=never_answers) as watch:
        await asyncio.sleep(10.5 * LIMIT_S)
        before = dict(watch.silent)
        await asyncio.sleep(2 * LIMIT_S)
        before, silent = before, watch.silent
    assert before == {}
    assert silent.keys() == {"new"}


@in_virtual_time
async def test_silent_member_is_found_after_watch_error(caplog: pytest.LogCaptureFixture) -> None:
    with watching(silent=never_answers) as watch:
        with mock.patch.object(asyncio, "wait", side_effect=ValueError("unexpected")):
            await asyncio.sleep(1.0)
        await asyncio.wait_for(watch.found(), LIMIT_S)
        assert watch.silent == {"silent": "has not answered for 5 s"}
    assert "ValueError: unexpected" in caplog.text


# -- an actor that nobody asks any more -------------------------------------------------------------------------------


async def count(contact: Contact, seconds: int) -> bool:
    for _ in range(seconds):
        await contact.count()
    return contact.is_lost


@in_virtual_time
async def test_contact_is_lost_after_limit_and_renewed_by_question() -> None:
    contact = Contact(5.0, lambda: True)
    found = [await count(contact, 4)]
    contact.asked()
    found += [await count(contact, 4), await count(contact, 1)]
    contact.asked()
    assert [*found, contact.is_lost] == [False, False, True, False]


def test_time_in_which_process_was_suspended_does_not_count() -> None:
    busy = True
    contact = Contact(5.0, lambda: busy)

    async def look() -> list[bool]:
        nonlocal busy
        await count(contact, 4)
        busy = False
        found = [await count(contact, 100)]
        busy = True
        return [*found, await count(contact, 4), await count(contact, 1)]

    assert run(look()) == [False, False, True]


# -- hosts that watch each other: real TPUHostActors on one event loop ------------------------------------------------


class Slice:
    """Hosts that count how often they are asked.

    Attributes:
        calls: how often each method of each host was called.
        frozen: the hosts that answer nothing.
    """

    def __init__(self, count: int) -> None:
        self.calls: Counter[tuple[str, int]] = Counter()
        self.frozen: set[int] = set()
        self.actors = [TPUHostActor(HostPlace(f"n{i}", "10.0.0.1", "a", i), False, None) for i in range(count)]
        self.asked = self.of("a")

    def of(self, place: str) -> dict[int, Actor[HostInterface]]:
        """Return what is asked on behalf of a place that has all of these hosts."""
        return {i: Actor(self._handle(i), f"{place} host {i}") for i in range(len(self.actors))}

    def _handle(self, index: int) -> Any:
        def method(name: str) -> SimpleNamespace:
            async def call(*args: Any) -> Any:
                self.calls[name, index] += 1
                if index in self.frozen:
                    await asyncio.Event().wait()
                return await getattr(self.actors[index], name)(*args)

            return SimpleNamespace(remote=call)

        return SimpleNamespace(**{name: method(name) for name in ("healthy", "silent_peers", "watch_peers")})


async def kept(watch: HostWatch, seconds: int) -> None:
    """Ask the one who watches once a second, as a pool does."""
    for _ in range(seconds):
        watch.asked()
        await asyncio.sleep(1.0)


@pytest.mark.parametrize("count", [1, 2, MOST_ASKED, MOST_ASKED + 1, 100, 1024, 4096])
def test_hosts_are_divided_into_groups_of_square_root_size(count: int) -> None:
    groups = groups_of(list(range(count)))
    assert sorted([*groups, *(host for others in groups.values() for host in others)]) == list(range(count))
    largest = max(len(others) + 1 for others in groups.values())
    assert largest == 1 if count <= MOST_ASKED else largest <= len(groups) <= largest + 3


@in_virtual_time
@pytest.mark.parametrize("count", [MOST_ASKED, 100])
@pytest.mark.parametrize("frozen", [0, 1, 57])
async def test_frozen_host_is_found_in_time_by_any_watcher(count: int, frozen: int) -> None:
    hosts = Slice(count)
    watch = HostWatch(hosts.asked, "a", LIMIT_S)
    await kept(watch, 20)
    assert not watch.detector.silent
    hosts.frozen.add(frozen)
    since, keeping = now(), asyncio.ensure_future(kept(watch, 60))
    await watch.detector.found()
    keeping.cancel()
    watch.stop()
    silent, hung, after_s = watch.detector.silent, set(watch.detector.hung), now() - since
    assert silent == {frozen: f"has not answered for {LIMIT_S:g} s"}
    assert hung == {frozen}
    assert LIMIT_S - 1.1 <= after_s <= LIMIT_S + 2.1


@in_virtual_time
async def test_frozen_host_in_two_gangs_is_found_for_both() -> None:
    """As two gangs without chips on the same hosts: the first host of a group asks the others for each of them."""
    hosts = Slice(100)
    watches = [HostWatch(hosts.of(place), place, LIMIT_S) for place in ("a", "b")]
    keeping = [asyncio.ensure_future(kept(watch, 60)) for watch in watches]
    await asyncio.sleep(20.0)
    hosts.frozen.add(57)
    await asyncio.sleep(LIMIT_S + 3.0)
    for keeper, watch in zip(keeping, watches, strict=True):
        keeper.cancel()
        watch.stop()
    silent, told = [dict(watch.detector.silent) for watch in watches], hosts.calls["watch_peers", 0]
    assert silent == [{57: f"has not answered for {LIMIT_S:g} s"}] * 2
    assert told == 2


@in_virtual_time
async def test_places_of_a_host_share_its_pings_and_find_its_loss() -> None:
    hosts = Slice(1)
    watches = SharedWatches(hosts.asked[0], "host a")
    uses = [watches.take(LIMIT_S) for _ in range(50)]
    for _ in range(20):
        for use in uses:
            use.asked()
        await asyncio.sleep(1.0)
    assert 15 <= hosts.calls["healthy", 0] <= 21
    for use in uses[:40]:
        use.stop()
    hosts.frozen.add(0)
    since = now()
    await asyncio.gather(*(use.detector.found() for use in uses[40:]))
    assert LIMIT_S - 1.1 <= now() - since <= LIMIT_S + 2.1
    assert [set(use.detector.hung) for use in uses[40:]] == [{0}] * 10


@in_virtual_time
async def test_host_that_was_lost_is_watched_anew_for_later_places() -> None:
    hosts = Slice(1)
    watches = SharedWatches(hosts.asked[0], "host a")
    earlier = watches.take(LIMIT_S)
    hosts.frozen.add(0)
    await earlier.detector.found()
    hosts.frozen.clear()
    later = watches.take(LIMIT_S)
    await asyncio.sleep(LIMIT_S)
    earlier.stop()
    before = hosts.calls["healthy", 0]
    await asyncio.sleep(2 * LIMIT_S)
    assert not later.detector.silent
    assert hosts.calls["healthy", 0] > before
    later.stop()
    before = hosts.calls["healthy", 0]
    await asyncio.sleep(LIMIT_S)
    assert hosts.calls["healthy", 0] == before


@in_virtual_time
async def test_large_gang_asks_few_hosts_directly_and_covers_all() -> None:
    hosts = Slice(100)
    watch = HostWatch(hosts.asked, "a", LIMIT_S)
    await kept(watch, 100)
    watch.stop()
    calls = hosts.calls
    assert {index for name, index in calls if name == "silent_peers"} == set(range(0, 100, 10))
    assert {index for name, index in calls if name == "healthy"} == set(range(100)) - set(range(0, 100, 10))
    assert all(90 <= calls["healthy", index] <= 101 for index in range(100) if index % 10)


@in_virtual_time
async def test_watching_host_stops_when_nobody_asks_it() -> None:
    hosts = Slice(100)
    watch = HostWatch(hosts.asked, "a", LIMIT_S)
    await kept(watch, 10)
    await asyncio.sleep(2 * SLICE_UNASKED_S + 5.0)
    before = hosts.calls.copy()
    await asyncio.sleep(100.0)
    watch.stop()
    assert not (hosts.calls - before)


@in_virtual_time
async def test_silent_seconds_are_counted_after_unexpected_error(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    count = Contact.count

    async def fails_first(contact: Contact) -> None:
        if not caplog.records:
            raise ValueError("unexpected")
        await count(contact)

    monkeypatch.setattr(Contact, "count", fails_first)
    hosts = Slice(2)
    watch = HostWatch(hosts.asked, "a", LIMIT_S)
    await asyncio.sleep(2 * SLICE_UNASKED_S)
    before = hosts.calls.copy()
    await asyncio.sleep(100.0)
    watch.stop()
    assert not (hosts.calls - before)
    assert "ValueError: unexpected" in caplog.text


@in_virtual_time
async def test_host_watches_for_its_latest_slice_actor_only() -> None:
    hosts = Slice(100)
    first = HostWatch(hosts.asked, "a", LIMIT_S)
    await kept(first, 10)
    first.stop()
    second = HostWatch(hosts.asked, "a", LIMIT_S)
    await kept(second, 10)
    before = hosts.calls["healthy", 1]
    await kept(second, 100)
    second.stop()
    told, pings = hosts.calls["watch_peers", 0], hosts.calls["healthy", 1] - before
    assert told == 2
    assert 90 <= pings <= 101
