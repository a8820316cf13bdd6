"""Hosts on which task processes fail again and again, where they do not elsewhere: for whom they are closed."""

import pytest

from iris_ray.actors.controller.views import worker_status
from iris_ray.model.outcomes import Fault
from iris_ray.state.events import TaintedEvent, TaintLiftedEvent, TimePassedEvent, WorkerBlamedEvent
from iris_ray.state.fleet import Fleet
from iris_ray.state.quarantine import (
    BLAMES_ALLOWED,
    KEPT_OF_A_PAIR,
    MEMORY_S,
    QUARANTINE,
    QUARANTINE_S,
    SHORT_QUARANTINE_S,
    Blame,
    BlameBook,
    Quarantine,
)
from tests.support.worlds import World

TOO_MANY = BLAMES_ALLOWED + 1
USERS = ("ann", "bob", "cem")


def blame(world: World, node_id: str, user: str = "ann", fault: Fault = Fault.CRASH) -> None:
    """A failure of a task of a job of its own."""
    job_id = f"{user}-{len(world.state.jobs)}"
    world.submit_tasks(job_id, 1, user=user, resources={"TPU": 400.0})
    world.do(WorkerBlamedEvent(node_id, job_id, "SIGSEGV", fault))
    world.state.check()


def quarantined(world: World) -> set[str]:
    return {node_id for node_id, taints in world.state.fleet.taints.items() if QUARANTINE in taints}


def avoided(world: World) -> dict[str, tuple[str, ...]]:
    fleet = world.state.fleet
    return {user: hosts for user in USERS if (hosts := fleet.avoided_by(user, world.now))}


def placed(world: World, user: str) -> tuple[str, ...]:
    """The slices that a new job of the user gets."""
    job = world.submit(f"new-of-{user}", user=user)
    world.schedule()
    return job.gang.groups


# -- one user ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", [Fault.CRASH, Fault.HANG, Fault.NO_START])
def test_three_failures_of_one_user_close_host_to_that_user(world: World, fault: Fault) -> None:
    for _ in range(BLAMES_ALLOWED):
        blame(world, "a-0", fault=fault)
        assert avoided(world) == {}
    blame(world, "a-0", fault=fault)
    assert (avoided(world), quarantined(world)) == ({"ann": ("a-0",)}, set())
    assert placed(world, "ann") == ("b",)
    assert placed(world, "bob") == ("a",)


def test_user_failing_on_other_hosts_is_the_cause(world: World) -> None:
    """A script that crashes again and again, each time as a new job, closes nothing."""
    blame(world, "b-0")
    for _ in range(5):
        blame(world, "a-0")
    assert (avoided(world), quarantined(world)) == ({}, set())


def test_host_reopens_to_user_who_fails_elsewhere_too(world: World) -> None:
    for _ in range(TOO_MANY):
        blame(world, "a-0")
    assert avoided(world) == {"ann": ("a-0",)}
    blame(world, "b-0", fault=Fault.NO_START)
    assert avoided(world) == {}


@pytest.mark.parametrize(
    ("fault", "seconds"),
    [(Fault.CRASH, QUARANTINE_S), (Fault.HANG, QUARANTINE_S), (Fault.NO_START, SHORT_QUARANTINE_S)],
)
def test_host_reopens_to_user_after_quarantine_time(world: World, fault: Fault, seconds: float) -> None:
    for _ in range(TOO_MANY):
        blame(world, "a-0", fault=fault)
    world.now += seconds - 1
    world.do(TimePassedEvent(world.now))
    assert avoided(world) == {"ann": ("a-0",)}
    world.now += 1
    world.do(TimePassedEvent(world.now))
    assert (avoided(world), dict(world.state.fleet.avoided)) == ({}, {})


# -- everybody ---------------------------------------------------------------------------------------------------------


def close_to_all(world: World, node_id: str) -> None:
    for user in ("ann", "ann", "bob"):
        blame(world, node_id, user)


def test_failures_of_different_users_close_host_to_all(world: World) -> None:
    close_to_all(world, "a-0")
    assert (avoided(world), quarantined(world)) == ({}, {"a-0"})
    assert placed(world, "cem") == ("b",)


@pytest.mark.parametrize("users", [("ann", "ann", "ann"), ("ann", "bob", "cem")])
def test_unfit_host_is_closed_to_all_briefly(world: World, users: tuple[str, ...]) -> None:
    """Another process holds its chips, whoever is sent there. That this happens elsewhere, too, is no excuse."""
    blame(world, "b-0", "ann", Fault.HOST)
    for user in users:
        assert quarantined(world) == set()
        blame(world, "a-0", user, Fault.HOST)
    assert quarantined(world) == {"a-0"}
    world.now += SHORT_QUARANTINE_S
    world.do(TimePassedEvent(world.now))
    assert quarantined(world) == set()


def test_host_faults_and_user_failures_are_counted_separately(world: World) -> None:
    for fault in (Fault.CRASH, Fault.HOST, Fault.NO_START, Fault.HOST):
        blame(world, "a-0", "ann", fault)
    assert (avoided(world), quarantined(world)) == ({}, set())


def test_host_reopens_when_one_of_two_users_is_the_cause(world: World) -> None:
    close_to_all(world, "a-0")
    blame(world, "b-0", "bob")
    assert quarantined(world) == set()
    for user in ("ann", "bob"):
        blame(world, "a-0", user)
    assert quarantined(world) == set(), "its share in it is forgotten"


def test_operators_see_reason_of_quarantine(world: World) -> None:
    close_to_all(world, "a-0")
    status = worker_status(world.state.workers["a-0"], world.state, world.now)
    assert f"taint:{QUARANTINE} (3 task processes failed there within an hour, the last one: SIGSEGV)" in (
        status.unavailable or ""
    )
    assert worker_status(world.state.workers["a-1"], world.state, world.now).unavailable is None


def test_failures_are_forgotten_after_an_hour(world: World) -> None:
    for _ in range(BLAMES_ALLOWED):
        blame(world, "a-0")
    world.now += MEMORY_S + 1
    blame(world, "a-0", "bob")
    blame(world, "a-0")
    assert (avoided(world), quarantined(world)) == ({}, set())


def test_lifting_the_taint_forgives_failures(world: World) -> None:
    for user in ("ann", "bob"):
        blame(world, "a-0", user)
    world.do(TaintLiftedEvent("a-0", QUARANTINE))
    for user in ("ann", "bob"):
        blame(world, "a-0", user)
        assert quarantined(world) == set()
    blame(world, "a-0")
    assert quarantined(world) == {"a-0"}
    world.do(TaintLiftedEvent("a-0", QUARANTINE))
    assert quarantined(world) == set()


@pytest.mark.parametrize("expired", [True, False])
def test_acquittal_keeps_taint_set_by_operator(world: World, expired: bool) -> None:
    close_to_all(world, "a-0")
    if expired:
        world.now += QUARANTINE_S
        world.do(TimePassedEvent(world.now))
        assert quarantined(world) == set()
    world.do(TaintedEvent("a-0", QUARANTINE, "the fan is broken"))
    blame(world, "b-0")  # so it was the user's own doing
    assert world.state.fleet.taints["a-0"][QUARANTINE].reason == "the fan is broken"


# -- very many ---------------------------------------------------------------------------------------------------------


def test_only_latest_failures_per_user_and_host_are_kept() -> None:
    """A job of 20,000 tasks that all crash kept the Controller busy: each crash was compared with all before."""
    book = BlameBook()
    for number in range(1000):
        judged = book.add(Blame("a-0", "ann", Fault.CRASH, float(number)))
    assert judged is not None
    assert [blame.at for blame in judged.blames] == [float(number) for number in range(1000)][-KEPT_OF_A_PAIR:]
    judged = book.add(Blame("a-0", "bob", Fault.CRASH, 1000.0))
    assert judged is not None
    assert judged.everybody, "bob's one failure still counts beside the many of ann"
    book.add(Blame("b-0", "ann", Fault.CRASH, 1001.0))
    assert not book.still_holds(judged)


def test_long_reopened_hosts_are_not_remembered() -> None:
    fleet = Fleet()
    quarantine = Quarantine(fleet)
    for host in range(5):
        for number in range(TOO_MANY):
            quarantine.blame(Blame(f"a-{host}", "ann", Fault.HOST, host * QUARANTINE_S + number), "its chips are taken")
        assert list(fleet.taints) == [f"a-{host}"]
        fleet.time_passed(host * QUARANTINE_S + SHORT_QUARANTINE_S + TOO_MANY)
        assert len(quarantine._quarantined) == 1
