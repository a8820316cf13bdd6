"""Deadlines between hosts whose wall clocks differ."""

import itertools
import pickle
import time

import pytest

from iris_ray.actors.calls.clocks import Moment, by_this_clock
from iris_ray.model.notices import HostNotice, Notice, NoticeKind


@pytest.mark.parametrize("ahead", [3600.0, 0.0, -3600.0])
def test_notice_leaves_same_time_on_receivers_clock(ahead: float) -> None:
    """Were it an hour ahead, a task would believe that its time is up; an hour behind, that it has an hour."""
    sent_at = time.time() - ahead
    notice = Notice(NoticeKind.PREEMPTION, "the slice goes", sent_at + 20.0)
    assert by_this_clock(notice, sent_at).deadline - time.time() == pytest.approx(20.0, abs=1.0)


@pytest.mark.parametrize("ahead", [3600.0, 0.0, -3600.0])
def test_past_moment_keeps_its_age_on_receivers_clock(monkeypatch: pytest.MonkeyPatch, ahead: float) -> None:
    """So the first of several ends on several hosts is known, whatever their clocks say."""
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + ahead)
    sent = pickle.dumps(Moment(Moment.now() - 20.0))
    monkeypatch.setattr(time, "time", lambda: now)
    received = pickle.loads(sent)
    assert type(received) is Moment
    assert received == pytest.approx(now - 20.0, abs=1e-3)


def test_repeated_notice_stays_equal_if_clocks_agree() -> None:
    notice = Notice(NoticeKind.PREEMPTION, "the slice goes", 1795424195.25)
    assert by_this_clock(notice, time.time()) == by_this_clock(notice, time.time() - 0.3) == notice


def test_notice_that_goes_round_does_not_come_back_earlier(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be news to the host that sent it, and go round for ever."""
    ahead = [0.0, -0.6, -1.2, -1.8, -2.4, 0.0]
    notice = Notice(NoticeKind.PREEMPTION, "the slice goes", 1030.0)
    for sender, receiver in itertools.pairwise(ahead):
        monkeypatch.setattr(time, "time", lambda receiver=receiver: 1000.0 + receiver)
        notice = by_this_clock(notice, 1000.0 + sender, exact=True)
        assert notice.deadline - time.time() == pytest.approx(30.0)


def test_preemption_uses_hosts_clock_and_maintenance_uses_googles() -> None:
    sent_at = time.time() + 3600.0
    preemption = HostNotice(NoticeKind.PREEMPTION, "it goes", sent_at + 30.0)
    assert by_this_clock(preemption, sent_at).deadline == pytest.approx(time.time() + 30.0, abs=1.0)
    for deadline in (None, time.time() + 600.0):
        maintenance = HostNotice(NoticeKind.MAINTENANCE, "it is planned", deadline)
        assert by_this_clock(maintenance, sent_at) == maintenance
