"""Who asks the hosts of a slice, with real TPUHostActors on one event loop and a clock that costs no time."""

import asyncio
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from iris_ray.actors.calls.asking import Actor
from iris_ray.actors.calls.liveness import MOST_ASKED, SLICE_UNASKED_S, Contact, HostWatch, groups_of
from iris_ray.actors.host.host_actor import TPUHostActor
from iris_ray.actors.protocol.host_interface import HostInterface
from iris_ray.actors.protocol.messages import HostPlace
from tests.support.virtual_time import now, run

LIMIT_S = 5.0


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
def test_every_host_is_in_one_group_and_no_group_is_larger_than_there_are_groups(count: int) -> None:
    groups = groups_of(list(range(count)))
    assert sorted([*groups, *(host for others in groups.values() for host in others)]) == list(range(count))
    largest = max(len(others) + 1 for others in groups.values())
    assert largest == 1 if count <= MOST_ASKED else largest <= len(groups) <= largest + 3


@pytest.mark.parametrize("count", [MOST_ASKED, 100])
@pytest.mark.parametrize("frozen", [0, 1, 57])
def test_frozen_host_is_found_in_its_time_whoever_asks_it(count: int, frozen: int) -> None:
    async def found() -> tuple[dict[int, str], set[int], float]:
        hosts = Slice(count)
        watch = HostWatch(hosts.asked, "a", LIMIT_S)
        await kept(watch, 20)
        assert not watch.detector.silent
        hosts.frozen.add(frozen)
        since, keeping = now(), asyncio.ensure_future(kept(watch, 60))
        await watch.detector.found()
        keeping.cancel()
        watch.stop()
        return watch.detector.silent, set(watch.detector.hung), now() - since

    silent, hung, after_s = run(found())
    assert silent == {frozen: f"has not answered for {LIMIT_S:g} s"}
    assert hung == {frozen}
    assert LIMIT_S - 1.1 <= after_s <= LIMIT_S + 2.1


def test_frozen_host_of_two_places_is_found_for_both() -> None:
    """As two gangs without chips on the same hosts: the first host of a group asks the others for each of them."""

    async def found() -> tuple[list[dict[int, str]], int]:
        hosts = Slice(100)
        watches = [HostWatch(hosts.of(place), place, LIMIT_S) for place in ("a", "b")]
        keeping = [asyncio.ensure_future(kept(watch, 60)) for watch in watches]
        await asyncio.sleep(20.0)
        hosts.frozen.add(57)
        await asyncio.sleep(LIMIT_S + 3.0)
        for keeper, watch in zip(keeping, watches, strict=True):
            keeper.cancel()
            watch.stop()
        return [dict(watch.detector.silent) for watch in watches], hosts.calls["watch_peers", 0]

    silent, told = run(found())
    assert silent == [{57: f"has not answered for {LIMIT_S:g} s"}] * 2
    assert told == 2


def test_of_many_hosts_few_are_asked_directly_and_every_one_by_somebody() -> None:
    async def asked() -> Counter[tuple[str, int]]:
        hosts = Slice(100)
        watch = HostWatch(hosts.asked, "a", LIMIT_S)
        await kept(watch, 100)
        watch.stop()
        return hosts.calls

    calls = run(asked())
    assert {index for name, index in calls if name == "silent_peers"} == set(range(0, 100, 10))
    assert {index for name, index in calls if name == "healthy"} == set(range(100)) - set(range(0, 100, 10))
    assert all(90 <= calls["healthy", index] <= 101 for index in range(100) if index % 10)


def test_nobody_is_asked_any_more_once_nobody_asks_the_one_who_watches() -> None:
    async def asked_later() -> Counter[tuple[str, int]]:
        hosts = Slice(100)
        watch = HostWatch(hosts.asked, "a", LIMIT_S)
        await kept(watch, 10)
        await asyncio.sleep(2 * SLICE_UNASKED_S + 5.0)
        before = hosts.calls.copy()
        await asyncio.sleep(100.0)
        watch.stop()
        return hosts.calls - before

    assert not run(asked_later())


def test_silent_seconds_are_counted_on_after_an_unexpected_error(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    count = Contact.count

    async def fails_first(contact: Contact) -> None:
        if not caplog.records:
            raise ValueError("unexpected")
        await count(contact)

    monkeypatch.setattr(Contact, "count", fails_first)

    async def asked_later() -> Counter[tuple[str, int]]:
        hosts = Slice(2)
        watch = HostWatch(hosts.asked, "a", LIMIT_S)
        await asyncio.sleep(2 * SLICE_UNASKED_S)
        before = hosts.calls.copy()
        await asyncio.sleep(100.0)
        watch.stop()
        return hosts.calls - before

    assert not run(asked_later())
    assert "ValueError: unexpected" in caplog.text


def test_host_watches_for_its_latest_slice_actor_only() -> None:
    async def asked() -> tuple[int, int]:
        hosts = Slice(100)
        first = HostWatch(hosts.asked, "a", LIMIT_S)
        await kept(first, 10)
        first.stop()
        second = HostWatch(hosts.asked, "a", LIMIT_S)
        await kept(second, 10)
        before = hosts.calls["healthy", 1]
        await kept(second, 100)
        second.stop()
        return hosts.calls["watch_peers", 0], hosts.calls["healthy", 1] - before

    told, pings = run(asked())
    assert told == 2
    assert 90 <= pings <= 101
