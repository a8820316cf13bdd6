"""Which of several notices is news: the same one is told once, and the earliest deadline counts."""

import itertools

import pytest

from iris_ray.model.notices import HostNotice, Notice, NoticeKind, Replacement, is_news

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
        (notice(PREEMPTION, -5), notice(GROWTH, 60), False),
        (notice(GROWTH, 30), notice(GROWTH, 60), False),
        (notice(GROWTH, 30), HostNotice(PREEMPTION, "why", None), True),
        (notice(EVICTION, 30), HostNotice(PREEMPTION, "why", None), False),
    ],
)
def test_notice_is_news_if_it_is_more_urgent(known: Notice | None, heard: Notice | HostNotice, expected: bool) -> None:
    assert is_news(known, heard, NOW) is expected


@pytest.mark.parametrize(
    ("known", "expected"),
    [
        (notice(EVICTION, 30), True),
        (notice(GROWTH, 30), True),
        (notice(MAINTENANCE, 30), True),
        (notice(PREEMPTION, 30), False),
        (notice(PREEMPTION, 40.5), False),
    ],
)
def test_less_urgent_notice_replaces_only_what_may_be_called_off(known: Notice, expected: bool) -> None:
    assert is_news(known, Replacement(PREEMPTION, "why", NOW + 40), NOW) is expected


@pytest.mark.parametrize("order", list(itertools.permutations([20, 25, 30, 30.2])))
def test_earliest_deadline_is_left_in_any_order(order: tuple[float, ...]) -> None:
    known = None
    for heard in (notice(PREEMPTION, seconds) for seconds in order):
        known = heard if is_news(known, heard, NOW) else known
    assert known == notice(PREEMPTION, 20)
