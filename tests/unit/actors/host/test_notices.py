"""Hosts of a gang pass notices on to each other: everybody hears, once, and only the running attempt."""

import asyncio
import time
from collections import Counter
from typing import Any

import pytest

from iris_ray.actors.calls.asking import Actor
from iris_ray.actors.host.notices import GangPeers
from iris_ray.actors.pool.notice_delivery import peers_of
from iris_ray.model.lifecycle import AttemptId
from iris_ray.model.notices import Notice, NoticeKind

ATTEMPT = AttemptId("job", 2)


def notice(in_s: float = 30.0, kind: NoticeKind = NoticeKind.PREEMPTION) -> Notice:
    return Notice(kind, "the host goes", time.time() + in_s)


class Gang:
    """Hosts that know each other. Each has one task, whose pid is the host's index.

    Attributes:
        told: the notices that each task was told.
        calls: how many calls each host got.
    """

    def __init__(self, size: int, hung: int | None = None) -> None:
        self.told: dict[int, list[Notice]] = {index: [] for index in range(size)}
        self.calls = Counter[int]()
        self.hosts = [GangPeers(lambda pid, notice: self.told[pid].append(notice)) for _ in range(size)]
        self._hung = hung
        actors = [Actor[Any].here(_Host(self, index), f"host {index}") for index in range(size)]
        for index, host in enumerate(self.hosts):
            host.meet(index, ATTEMPT, [actors[peer] for peer in peers_of(index, size)])

    async def called(self, index: int, attempt: AttemptId, notice: Notice) -> None:
        self.calls[index] += 1
        if index == self._hung:
            await asyncio.Event().wait()
        self.hosts[index].hear(attempt, notice)

    async def settle(self) -> None:
        for _ in range(100):
            await asyncio.sleep(0)


class _Host:
    def __init__(self, gang: Gang, index: int) -> None:
        self._gang = gang
        self._index = index

    async def hear_notice(self, attempt: AttemptId, notice: Notice, sent_at: float) -> None:
        await self._gang.called(self._index, attempt, notice)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7, 64, 1000])
async def test_notice_reaches_each_task_of_gang_once(size: int) -> None:
    gang, given = Gang(size), notice()
    gang.hosts[size // 2].spread(given)
    await gang.settle()
    assert set(map(tuple, gang.told.values())) == {(given,)}
    assert max(gang.calls.values(), default=0) <= (size - 1).bit_length()


@pytest.mark.parametrize("size", [3, 4, 9, 64])
async def test_notice_goes_round_any_hung_host(size: int) -> None:
    for hung in range(1, size):
        gang, given = Gang(size, hung), notice()
        gang.hosts[0].spread(given)
        await gang.settle()
        assert [told for index, told in gang.told.items() if index != hung] == [[given]] * (size - 1)


async def test_slice_notice_from_all_its_hosts_spreads_once() -> None:
    gang, given = Gang(8), notice()
    for seconds, host in enumerate(gang.hosts[:4]):
        host.spread(Notice(given.kind, given.reason, given.deadline + 0.2 * seconds))
    await gang.settle()
    assert [len(told) for told in gang.told.values()] == [1] * 8
    assert max(gang.calls.values()) <= 3


@pytest.mark.parametrize(
    ("in_s", "kind", "is_told"),
    [(20, NoticeKind.PREEMPTION, True), (50, NoticeKind.PREEMPTION, False), (31, NoticeKind.MAINTENANCE, False)],
)
async def test_gang_hears_second_notice_only_if_earlier(in_s: float, kind: NoticeKind, is_told: bool) -> None:
    gang, first, later = Gang(4), notice(30), notice(in_s, kind)
    gang.hosts[0].spread(first)
    await gang.settle()
    gang.hosts[3].spread(later)
    await gang.settle()
    assert list(gang.told.values()) == [[first, later] if is_told else [first]] * 4


@pytest.mark.parametrize("size", [4, 64])
@pytest.mark.parametrize(
    ("one", "other"),
    [
        ((-1, NoticeKind.PREEMPTION), (-4, NoticeKind.PREEMPTION)),
        ((-1, NoticeKind.MAINTENANCE), (-4, NoticeKind.PREEMPTION)),
        ((50, NoticeKind.GROWTH), (-4, NoticeKind.MAINTENANCE)),
    ],
)
async def test_notices_that_cross_do_not_circulate(
    size: int, one: tuple[float, NoticeKind], other: tuple[float, NoticeKind]
) -> None:
    """If each of two notices were news to hosts that know the other, the hosts would pass them on for ever."""
    gang = Gang(size)
    gang.hosts[0].spread(notice(*one))
    gang.hosts[size // 2].spread(notice(*other))
    await gang.settle()
    assert max(len(told) for told in gang.told.values()) <= 2
    assert max(gang.calls.values()) <= 2 * (size - 1).bit_length()


@pytest.mark.parametrize("other", [AttemptId("job", 1), AttemptId("job", 3), AttemptId("another", 2)])
async def test_notice_of_other_attempt_is_ignored(other: AttemptId) -> None:
    gang = Gang(4)
    gang.hosts[0].hear(other, notice())
    await gang.settle()
    assert (list(gang.told.values()), gang.calls.total()) == ([[]] * 4, 0)


async def test_processes_of_one_host_hear_without_more_calls() -> None:
    gang, given = Gang(2), notice()
    gang.told |= {2: [], 3: []}
    gang.hosts[1].meet(2, ATTEMPT, gang.hosts[1]._members[1].peers)
    gang.hosts[1].meet(3, AttemptId("another", 1), ())
    gang.hosts[1].spread(given)
    await gang.settle()
    assert (gang.told, gang.calls) == ({index: [given] for index in range(4)}, {0: 1, 1: 1})


async def test_host_whose_task_ends_tells_and_passes_nothing() -> None:
    gang = Gang(4)
    gang.hosts[0].forget(0)
    gang.hosts[0].spread(notice())
    await gang.settle()
    assert (list(gang.told.values()), gang.calls.total()) == ([[]] * 4, 0)
