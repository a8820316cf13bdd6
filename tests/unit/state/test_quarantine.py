"""Hosts on which task processes fail again and again, where they do not elsewhere, are set aside."""

import pytest

from iris_ray.actors.controller.status_views import worker_status
from iris_ray.state.events import TaintedEvent, TaintLiftedEvent, TimePassedEvent, WorkerBlamedEvent
from iris_ray.state.quarantine import BLAMES_ALLOWED, MEMORY_S, QUARANTINE, QUARANTINE_S, SHORT_QUARANTINE_S
from tests.support.worlds import World

TOO_MANY = BLAMES_ALLOWED + 1


def blame(world: World, node_id: str, job_id: str = "job", by_user_code: bool = True) -> None:
    world.do(WorkerBlamedEvent(node_id, job_id, "SIGSEGV", by_user_code))
    world.state.check()


def set_aside(world: World) -> set[str]:
    return {node_id for node_id, taints in world.state.fleet.taints.items() if QUARANTINE in taints}


@pytest.mark.parametrize("by_user_code", [True, False])
def test_host_is_set_aside_after_three_failures(world: World, by_user_code: bool) -> None:
    for _ in range(BLAMES_ALLOWED):
        blame(world, "a-0", by_user_code=by_user_code)
        assert set_aside(world) == set()
    blame(world, "a-0", by_user_code=by_user_code)
    assert set_aside(world) == {"a-0"}
    job = world.submit()
    world.schedule()
    assert job.gang.groups == ("b",)


def test_operators_see_why_a_host_is_set_aside(world: World) -> None:
    for _ in range(TOO_MANY):
        blame(world, "a-0")
    status = worker_status(world.state.workers["a-0"], world.state, world.now)
    assert f"taint:{QUARANTINE} (3 task processes failed there within an hour, the last one: SIGSEGV)" in (
        status.unavailable or ""
    )
    assert worker_status(world.state.workers["a-1"], world.state, world.now).unavailable is None


def test_job_that_crashes_on_other_hosts_as_well_is_not_the_hosts_fault(world: World) -> None:
    blame(world, "b-0")
    for _ in range(5):
        blame(world, "a-0")
    assert set_aside(world) == set()
    blame(world, "a-0", "another job")  # so many of that one count
    assert set_aside(world) == set()
    for _ in range(BLAMES_ALLOWED):
        blame(world, "a-0", "another job")
    assert set_aside(world) == {"a-0"}


def test_host_comes_back_when_the_users_tasks_crash_elsewhere_too(world: World) -> None:
    """A script that crashes again and again, each time as a new job, does not use up the cluster."""
    for number in range(TOO_MANY):
        world.submit(f"try-{number}", user="ann")
        blame(world, "a-0", f"try-{number}")
    assert set_aside(world) == {"a-0"}
    world.submit("once-more", user="ann")
    blame(world, "b-0", "once-more")
    assert set_aside(world) == set()
    for _ in range(5):
        blame(world, "b-0", "once-more")
    assert set_aside(world) == {"b-0"}, "a's share in it is forgotten"


def test_host_that_others_complain_about_stays_aside(world: World) -> None:
    for by_user_code in (False, False, False):
        blame(world, "a-0", "ann's", by_user_code)
    blame(world, "b-0", "ann's")
    assert set_aside(world) == {"a-0"}, "three could not be started at all"


def test_processes_that_cannot_be_started_count_wherever_else_that_happens(world: World) -> None:
    for _ in range(TOO_MANY):
        for node_id in ("a-0", "b-0"):
            blame(world, node_id, by_user_code=False)
    assert set_aside(world) == {"a-0", "b-0"}


def test_failures_are_forgotten_after_an_hour(world: World) -> None:
    for _ in range(BLAMES_ALLOWED):
        blame(world, "a-0")
    world.now += MEMORY_S + 1
    blame(world, "a-0")
    assert set_aside(world) == set()


@pytest.mark.parametrize(("by_user_code", "seconds"), [(True, QUARANTINE_S), (False, SHORT_QUARANTINE_S)])
def test_host_comes_back_when_its_time_is_over_and_starts_afresh(
    world: World, by_user_code: bool, seconds: float
) -> None:
    for _ in range(TOO_MANY):
        blame(world, "a-0", by_user_code=by_user_code)
    world.now += seconds - 1
    world.do(TimePassedEvent(world.now))
    assert set_aside(world) == {"a-0"}
    world.now += 1
    world.do(TimePassedEvent(world.now))
    assert set_aside(world) == set()
    job = world.submit()
    world.schedule()
    assert job.gang.groups == ("a",)
    blame(world, "a-0")
    assert set_aside(world) == set()


def test_failures_are_forgiven_when_somebody_lifts_the_taint(world: World) -> None:
    for _ in range(BLAMES_ALLOWED):
        blame(world, "a-0")
    world.do(TaintLiftedEvent("a-0", QUARANTINE))
    for _ in range(BLAMES_ALLOWED):
        blame(world, "a-0")
        assert set_aside(world) == set()
    blame(world, "a-0")
    assert set_aside(world) == {"a-0"}
    world.do(TaintLiftedEvent("a-0", QUARANTINE))
    assert set_aside(world) == set()


def test_lifting_another_taint_forgives_nothing(world: World) -> None:
    for _ in range(BLAMES_ALLOWED):
        blame(world, "a-0")
    world.do(TaintLiftedEvent("a-0", "drained"))
    blame(world, "a-0")
    assert set_aside(world) == {"a-0"}


def test_host_that_is_gone_is_not_blamed(world: World) -> None:
    world.lose("a-0")
    for _ in range(TOO_MANY):
        blame(world, "a-0")
    assert set_aside(world) == set()


@pytest.mark.parametrize("expired", [True, False])
def test_acquittal_leaves_alone_what_an_operator_has_set_since(world: World, expired: bool) -> None:
    for _ in range(TOO_MANY):
        blame(world, "a-0")
    if expired:
        world.now += QUARANTINE_S
        world.do(TimePassedEvent(world.now))
        assert set_aside(world) == set()
    world.do(TaintedEvent("a-0", QUARANTINE, "the fan is broken"))
    blame(world, "b-0")  # so it was the job's own doing
    assert world.state.fleet.taints["a-0"][QUARANTINE].reason == "the fan is broken"
