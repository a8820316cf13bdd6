"""Which files go, by age and size."""

from dataclasses import replace

from iris_ray.cleaning.core import DAY_S, ClockReading, Item, Limits, to_remove

NOW = ClockReading("boot", 1e9, 5e5)


def item(name: str, days: float, size: int = 10, used: bool = False) -> Item[str]:
    return Item(name, NOW.wall - days * DAY_S, size, used)


def names(items: list[Item[str]], limits: Limits, clock: ClockReading = NOW) -> list[str]:
    return [one.key for one in to_remove(items, clock, limits)]


def test_what_is_old_goes_and_what_is_used_stays() -> None:
    items = [item("new", 1), item("old", 15), item("oldest", 40), item("used", 40, used=True)]
    assert names(items, Limits(14, None)) == ["oldest", "old"]
    assert names(items, Limits(None, None)) == []


def test_beyond_the_size_the_oldest_go_until_the_rest_fits() -> None:
    items = [item("a", 5), item("b", 4), item("used", 6, used=True), item("c", 3), item("d", 2)]
    assert names(items, Limits(14, 35)) == ["a", "b"]
    assert names(items, Limits(None, 50)) == []


def test_a_new_file_stays_on_the_fullest_disk() -> None:
    assert names([item("written", 0.01), item("hours", 0.1)], Limits(14, 0)) == ["hours"]


def test_no_jump_of_the_clock_makes_a_file_old() -> None:
    later = replace(NOW, wall=NOW.wall + 400 * DAY_S, uptime=NOW.uptime + 60).after(NOW)
    items = [item("yesterdays", 1)]
    assert names(items, Limits(14, 0), later) == []
    after_days = replace(later, wall=later.wall + 15 * DAY_S, uptime=later.uptime + 15 * DAY_S).after(later)
    assert names(items, Limits(14, None), after_days) == ["yesterdays"]


def test_a_clock_that_went_back_keeps_all() -> None:
    back = replace(NOW, wall=NOW.wall - 100 * DAY_S, uptime=NOW.uptime + 60).after(NOW)
    assert names([item("from the future", 1), item("older", 200)], Limits(14, 0), back) == []


def test_a_machine_that_was_off_for_weeks_has_old_files() -> None:
    rebooted = ClockReading("next boot", NOW.wall + 20 * DAY_S, 60.0).after(NOW)
    assert names([item("before", 1)], Limits(14, None), rebooted) == ["before"]
    behind = ClockReading("next boot", NOW.wall - DAY_S, 60.0).after(NOW)
    assert behind.set_at == behind.wall


def test_a_file_from_the_future_ages_from_when_the_clock_was_set_back() -> None:
    """Else what was written while the clock was a year ahead would stay for that year, and push out all others."""
    back = replace(NOW, wall=NOW.wall - 100 * DAY_S, uptime=NOW.uptime + 60).after(NOW)
    after_days = replace(back, wall=back.wall + 15 * DAY_S, uptime=back.uptime + 15 * DAY_S).after(back)
    assert names([item("from the future", 1)], Limits(14, None), after_days) == ["from the future"]
    unseen = replace(NOW, wall=NOW.wall - 100 * DAY_S)
    assert names([item("from the future", 1)], Limits(14, 0), unseen) == []
