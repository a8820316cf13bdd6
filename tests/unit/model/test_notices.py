"""Which of several notices a task is told: the same one once, and the earliest deadline."""

import itertools

import pytest

from iris_ray.model.notices import Notice, NoticeKind, is_news, keeps

NOW = 1000.0
PREEMPTION, MAINTENANCE = NoticeKind.PREEMPTION, NoticeKind.MAINTENANCE
GROWTH, EVICTION = NoticeKind.GROWTH, NoticeKind.EVICTION


def notice(kind: NoticeKind, in_s: float, reason: str = "why") -> Notice:
    return Notice(kind, reason, NOW + in_s)


@pytest.mark.parametrize(
    ("known", "heard", "expected"),
    [
        (None, notice(PREEMPTION, 30), True),
        (notice(PREEMPTION, 30), notice(PREEMPTION, 30.5, "in other words"), False),
        (notice(PREEMPTION, 30), notice(PREEMPTION, 40), False),
        (notice(PREEMPTION, 30), notice(PREEMPTION, 20), True),
        (notice(EVICTION, 30), notice(PREEMPTION, 40), False),
        (notice(MAINTENANCE, 400), notice(PREEMPTION, 30), True),
        (notice(GROWTH, 30), notice(PREEMPTION, 40), True),
        (notice(PREEMPTION, 30), notice(GROWTH, 60), False),
        (notice(MAINTENANCE, -5), notice(MAINTENANCE, 400), True),
        (notice(PREEMPTION, -5), notice(PREEMPTION, -5), False),
        (notice(PREEMPTION, -5), notice(MAINTENANCE, -2), False),
    ],
)
def test_peers_notice_is_news_if_it_is_more_urgent(known: Notice | None, heard: Notice, expected: bool) -> None:
    assert is_news(known, heard, NOW) is expected


@pytest.mark.parametrize(
    ("known", "named", "expected"),
    [
        (None, notice(PREEMPTION, 30), False),
        (notice(PREEMPTION, 30), notice(PREEMPTION, 30.5, "in other words"), True),
        (notice(PREEMPTION, 30), notice(PREEMPTION, 38), True),
        (notice(PREEMPTION, 30), notice(PREEMPTION, 20), False),
        (notice(EVICTION, 30), notice(PREEMPTION, 40), False),
        (notice(GROWTH, 30), notice(GROWTH, 60), False),
        (notice(GROWTH, 60), notice(GROWTH, 60), True),
        (notice(MAINTENANCE, -5), notice(MAINTENANCE, 400), False),
        (notice(PREEMPTION, -5), notice(PREEMPTION, -5), True),
    ],
)
def test_task_keeps_earliest_notice_of_provider(known: Notice | None, named: Notice, expected: bool) -> None:
    assert keeps(known, named, NOW) is expected


@pytest.mark.parametrize("order", list(itertools.permutations([20, 25, 30, 30.2])))
def test_earliest_deadline_is_left_in_any_order(order: tuple[float, ...]) -> None:
    by_peers, by_pool = None, None
    for heard in (notice(PREEMPTION, seconds) for seconds in order):
        by_peers = heard if is_news(by_peers, heard, NOW) else by_peers
        by_pool = by_pool if keeps(by_pool, heard, NOW) else heard
    assert by_peers == by_pool == notice(PREEMPTION, 20)
