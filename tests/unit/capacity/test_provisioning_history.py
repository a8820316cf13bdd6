"""What a provisioner remembers: failures and pauses, requests without an answer, how long things have lasted."""

from dataclasses import replace

from iris_ray.capacity.demand import ARRIVAL_S
from iris_ray.capacity.provider import request_id
from iris_ray.capacity.provisioning import BROKEN_S, JOIN_S, plan
from iris_ray.capacity.provisioning_actions import Create
from iris_ray.capacity.provisioning_history import ProvisioningHistory, Unconfirmed
from iris_ray.model.topology import get_tpu_config
from tests.support.provisioning import (
    BOTH,
    BUSY,
    FREE,
    HERE,
    NOTHING,
    SECOND,
    SETTINGS,
    TYPE,
    Q,
    asked,
    creates,
    deletes,
    gangs,
    make_plan,
    name,
    queued,
    waits,
)


def test_plan_backs_off_after_each_failure() -> None:
    history, now, pauses = ProvisioningHistory(), 0.0, []
    for number in range(1, 9):
        make_plan(1, queued(number, Q.FAILED, error="stockout"), history=history, now=now)
        again = make_plan(1, queued(number, Q.FAILED, error="stockout"), history=history, now=now)
        assert not creates(again)
        assert "pausing" in waits(again)[0]
        pauses.append(history.at(HERE, TYPE).not_before - now)
        now = history.at(HERE, TYPE).not_before
        assert len(creates(make_plan(1, history=history, now=now))) == 1
    assert pauses == [30, 60, 120, 240, 480, 960, 1800, 1800]


def test_only_joining_slice_ends_row_of_failures() -> None:
    history = ProvisioningHistory()
    make_plan(0, queued(1), joined={name(1): BUSY}, history=history)
    for number, now in ((2, 1000.0), (3, 1030.0)):
        make_plan(1, queued(1), queued(number, Q.FAILED), joined={name(1): BUSY}, history=history, now=now)
    assert history.at(HERE, TYPE).failures == 2
    make_plan(0, queued(1), queued(4), joined={name(1): BUSY, name(4): FREE}, history=history)
    assert history.at(HERE, TYPE).failures == 0


def test_gang_whose_slices_fail_together_is_one_failure() -> None:
    history = ProvisioningHistory()
    make_plan((4,), *(queued(n, Q.FAILED) for n in range(3)), history=history, now=0.0)
    make_plan((4,), queued(3, Q.FAILED), history=history, now=20.0)
    assert (history.at(HERE, TYPE).failures, history.at(HERE, TYPE).not_before) == (1, 30.0)


def test_refused_request_is_a_failure_and_loses_its_name() -> None:
    history = ProvisioningHistory(unconfirmed={name(1): Unconfirmed(HERE, 1000.0)})
    history.refused(name(1), HERE, TYPE, 1000.0, "no quota")
    assert not creates(make_plan(1, history=history))
    assert "no quota" in waits(make_plan(1, history=history))[0]


def test_unanswered_request_is_repeated_under_same_name() -> None:
    history = ProvisioningHistory(unconfirmed={name(1): Unconfirmed(HERE, 1000.0)})
    assert creates(make_plan(1, history=history)) == [name(1)]
    assert request_id("create", name(1)) == request_id("create", name(1)) != request_id("delete", name(1))
    assert make_plan(1, queued(1, Q.ACCEPTED), history=history) == []
    assert history.unconfirmed == {}


def test_used_or_wanted_slice_restarts_its_idle_time() -> None:
    history = ProvisioningHistory()
    make_plan(0, queued(1), joined={name(1): FREE}, history=history, now=0.0)
    make_plan(0, queued(1), joined={name(1): BUSY}, history=history, now=500.0)
    make_plan(0, queued(1), joined={name(1): FREE}, history=history, now=501.0)
    assert not deletes(make_plan(1, queued(1), joined={name(1): FREE}, history=history, now=1100.0))
    make_plan(0, queued(1), joined={name(1): FREE}, history=history, now=1101.0)
    assert not deletes(make_plan(0, queued(1), joined={name(1): FREE}, history=history, now=1700.0))
    assert deletes(make_plan(0, queued(1), joined={name(1): FREE}, history=history, now=1701.0))


def test_plan_abandons_slice_that_never_joins_as_failure() -> None:
    history = ProvisioningHistory()
    make_plan(1, queued(1), history=history, now=0.0)
    assert make_plan(1, queued(1), history=history, now=JOIN_S) == []
    actions = make_plan(1, queued(1), history=history, now=JOIN_S + 1)
    assert deletes(actions) == [name(1)]
    assert "start-up script" in waits(actions)[0]


def test_slice_that_comes_a_second_time_counts_as_lost() -> None:
    """A group of VMs waits again for those that were taken from it."""
    history = ProvisioningHistory()
    make_plan(0, queued(1), joined={name(1): BUSY}, history=history, now=0.0)
    again = queued(1, Q.WAITING_FOR_RESOURCES)
    assert len(creates(make_plan(1, again, history=history, now=1.0))) == 1
    assert deletes(make_plan(0, again, history=history, now=2.0 + BROKEN_S)) == [name(1)]


def test_refusal_falls_over_and_returns_to_preferred_source() -> None:
    history = ProvisioningHistory()
    assert asked(make_plan(2, history=history, now=0.0, **BOTH)) == ["here", "here"]
    history.refused("x", HERE, TYPE, 0.0, "no capacity")
    assert asked(make_plan(2, history=history, now=1.0, **BOTH)) == ["there", "there"]
    assert asked(make_plan(2, history=history, now=30.0, **BOTH)) == ["here", "here"]


def test_all_sources_pausing_are_named_with_reasons() -> None:
    history = ProvisioningHistory()
    history.refused("x", HERE, TYPE, 0.0, "no capacity")
    history.refused("y", SECOND.key, TYPE, 0.0, "quota")
    (waiting,) = waits(make_plan(1, history=history, now=1.0, **BOTH))
    assert "pausing: here for 30 s after 1 failures, the last: no capacity; there for 30 s" in waiting


def test_stockout_of_one_type_pauses_no_other() -> None:
    types = get_tpu_config("v6e-256"), get_tpu_config("v4-8")
    settings, history = replace(SETTINGS, configs=types), ProvisioningHistory()
    history.refused("x", HERE, "v6e-256", 0.0, "no capacity")
    actions = plan(settings, gangs({"v6e-256": [1], "v4-8": [1]}), [], NOTHING, history, 1.0, 1.7e9)
    assert [action.config.name for action in actions if isinstance(action, Create)] == ["v4-8"]
    (waiting,) = waits(actions)
    assert waiting.startswith("1 more v6e-256 wanted")
    v4 = queued(0, name="iris-ann-v4-8-1", accelerator_type="v4-8")
    plan(settings, [], [v4], {v4.name: FREE}, history, 2.0, 1.7e9)
    assert history.at(HERE, "v6e-256").failures == 1, "a v4-8 that joins says nothing of v6e-256"


def test_joining_slice_ends_only_its_own_sources_failures() -> None:
    history = ProvisioningHistory()
    for source in (HERE, SECOND.key):
        history.refused("x", source, TYPE, 0.0, "no capacity")
    make_plan(0, queued(1), joined={name(1): FREE}, history=history, now=1.0, **BOTH)
    assert (history.at(HERE, TYPE).failures, history.at(SECOND.key, TYPE).failures) == (0, 1)


def test_unlisted_zone_is_neither_asked_nor_cleared() -> None:
    history = ProvisioningHistory()
    settings, waiting = replace(SETTINGS, **BOTH), queued(1, Q.WAITING_FOR_RESOURCES)
    for now in (0.0, 1000.0):
        actions = plan(settings, gangs({"v6e-16": [1, 1]}), [waiting], NOTHING, history, now, 1.7e9, {HERE})
    assert (deletes(actions), asked(actions)) == ([], ["there"])


def test_request_without_answer_counts_while_its_zone_is_unlisted() -> None:
    """It may be there, unseen: another one elsewhere would exceed the budget when the zone answers again."""
    history = ProvisioningHistory(unconfirmed={name(1): Unconfirmed(f"{HERE}/reservations/res", 0.0)})
    settings = replace(SETTINGS, budget=16, **BOTH)
    late = ARRIVAL_S + 1.0
    assert asked(plan(settings, gangs({"v6e-16": [1]}), [], NOTHING, history, late, 1.7e9, {HERE})) == []
    assert asked(plan(settings, gangs({"v6e-16": [1]}), [], NOTHING, history, late, 1.7e9)) == ["here"], (
        "it never arrived"
    )
